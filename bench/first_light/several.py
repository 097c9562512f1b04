"""The steps of `python -m bench first-light` that need two GPUs: NCCL under strategies, in CUDA graphs, and waiting.

What two ranks do, with a GPU each: mpirun -n 2 python -m bench.first_light.several CASE [--dry]. Rank 0 prints what
they found as a line of JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from bench.first_light.checks import (
    ROWS,
    by_kernels_and_graphs,
    compared,
    ended,
    on_the_cpu,
    strategies_on,
)
from bench.first_light.steps import Found, Light
from bench.speed.gpu_decode import captured
from bench.speed.roofline import alternate
from rlhf_spmd import embedded
from rlhf_spmd.kernels import one_shot
from rlhf_spmd.kernels.collectives import all_gather
from rlhf_spmd.kernels.silu_mul import silu_mul
from rlhf_spmd.model.hf import load_model
from rlhf_spmd.model.parallel import Parallel, sum_over
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.failure.processes import process_fields, waiting
from rlhf_spmd.runtime.world.world import World
from tests.run_mpi import mpi_command

RANKS, MOST_RANKS = 2, 4
ONE_SHOT, NOTED = {"RLHF_SPMD_ONE_SHOT": "1"}, "NCCL_GRAPH_REGISTER=1"
WAYS = {"one shot": ONE_SHOT, "NCCL": {}, NOTED: {"NCCL_GRAPH_REGISTER": "1"}}
# of the steps: a receive by sockets has a thread of NCCL's that spins
VARIABLES = {"one-shot": ONE_SHOT, "waiting-rank": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}}
CASE_S = 100.0  # of one case
HELD_S, DRY_HELD_S = 3.0, 0.3  # after which the sender sends
SLOWER = 1.10  # products beside pending receives, against products alone
EDGE, PRODUCTS = 8192, 20  # rows and columns of a matrix; products that are timed
RECEIVES = (0, 1, 2)
WORK_SHARE = 0.1  # of the time for which a rank only waits for a message
MESSAGES, NUM_SUMS = (2**14, 2**17, 2**20), 50  # bytes of a decode step; sums in a graph
OFF = 2.0**-7  # of the largest sum: two roundings to bfloat16


# ---- steps -----------------------------------------------------------------------------------------------------------


def on_ranks(light: Light, **variables: str) -> tuple[dict | None, str]:
    """Runs the case of a step and returns what its rank 0 has found; None and why, where it does not end well."""
    words = [sys.executable, "-m", "bench.first_light.several", light.name, *(["--dry"] if light.dry else [])]
    stdout, why = ended(light.name, [*mpi_command(RANKS), *words], limit_s=CASE_S, **variables)
    return None if why else json.loads(stdout.strip().splitlines()[-1]), why


def nccl_strategies(light: Light) -> Found:
    return strategies_on(light, min(MOST_RANKS, max(RANKS, torch.cuda.device_count())), "device=cuda")


def tp_graphs(light: Light) -> Found:
    """Tests two slices, whose sums are captured, in one shot and by NCCL. NCCL registers captured buffers unless told
    not to, which expandable segments do not allow: what happens then is noted, not judged."""
    told, ok = [], True
    with ThreadPoolExecutor() as pool:
        jobs = {name: pool.submit(on_ranks, light, **variables) for name, variables in WAYS.items()}
        results = {name: job.result() for name, job in jobs.items()}
    for name, (found, why) in results.items():
        light.row(sums=name, why=why, **(found or {}))
        told.append(f"{name}: {found['told'] if found else why}")
        ok &= name == NOTED or (found is not None and found["ok"])
    return Found(ok, "; ".join(told))


def on_two_gpus(light: Light) -> Found:
    """Takes the step that has the name of its case."""
    found, why = on_ranks(light, **VARIABLES.get(light.name, {}))
    light.row(**(found or {"why": why}))
    return Found(found is not None and (light.dry or found["ok"]), found["told"] if found else why)


# ---- cases, on each rank ---------------------------------------------------------------------------------------------


def slices(world: World, dry: bool) -> dict:
    """Compares the tokens of two slices, with graphs and without, with those of the whole model on the CPU."""
    num = 12 if dry else ROWS
    parallel = Parallel(Shard(tp=world.size, tp_index=world.rank), group=world.group("tp"))
    folder = embedded.path_of("actor")
    model = load_model(folder, head="lm", device=world.device, parallel=parallel).eval().requires_grad_(False)
    found = {"one rank": on_the_cpu(num)} | by_kernels_and_graphs(model, num)
    ok, told, numbers = compared(found, "one rank")
    return {"ok": ok, "told": told} | numbers


def pending_receive(world: World, dry: bool) -> dict:
    """Checks that what a rank does while a receive is pending does not wait for the sender, and is hardly slower."""
    device, held_s = world.device, DRY_HELD_S if dry else HELD_S
    message = torch.zeros(1024, device=device)
    work = actions(device)
    if world.rank == 0:
        work["first launch"]()  # compiles the kernel, which the other rank then only loads
    seconds = {}
    for name, act in work.items():
        world.barrier(name)
        if world.rank == 0:
            time.sleep(held_s)
            dist.send(message, 1)
            continue
        waiting = dist.irecv(message, 0)
        started = time.perf_counter()
        act()
        seconds[name] = time.perf_counter() - started
        waiting.wait()
    products = [beside_receives(world, device, num, 64 if dry else EDGE) for num in RECEIVES]
    _, seconds = world.allgather(seconds, "seconds")
    _, products = world.allgather(products, "products")
    waits = [name for name, taken_s in seconds.items() if taken_s >= held_s]
    slower = max(products) / products[0]
    told = [f"{name} waited for the sender" for name in waits] or ["nothing waited for the sender"]
    told.append(f"products beside {RECEIVES[-1]} receives take {slower:.2f} times as long")
    return {"seconds": seconds, "product_s": products} | {"ok": not waits and slower <= SLOWER, "told": "; ".join(told)}


def waiting_rank(world: World, dry: bool) -> dict:
    """Checks that a rank which waits for a message looks idle to the watch for hangs: NCCL's threads, which spin, have
    names that the watch knows."""
    device, held_s, found = world.device, DRY_HELD_S if dry else HELD_S, {}
    message = torch.zeros(1024, device=device)
    for number in range(2):  # the first message makes the connection
        world.barrier(f"message {number}")
        if world.rank == 0:
            time.sleep(held_s)
            dist.send(message, 1)
        else:
            before, started = used_s(), time.perf_counter()
            dist.irecv(message, 0).wait()
            synchronise(device)
            taken_s = time.perf_counter() - started
            found = {f"{kind}_share": (used - before[kind]) / taken_s for kind, used in used_s().items()}
    _, found = world.allgather(found | {"threads": thread_names()}, "threads")
    has_name = any(name.startswith("NCCL Progress") for name in found["threads"])
    told = f"{'a' if has_name else 'no'} thread is named NCCL Progress; while a rank waits, it works "
    told += f"{found['work_share']:.0%} of the time and its threads spin {found['spun_share']:.0%}"
    return found | {"ok": has_name and found["work_share"] <= WORK_SHARE, "told": told}


@torch.no_grad()
def sums(world: World, dry: bool) -> dict:
    """Compares the sums of decode steps in one shot with NCCL's: their numbers, their bits on all ranks, their time."""
    group, device = world.group("tp"), world.device
    one_shot.connect(group)
    found: dict = {"how": one_shot.description() or "gloo", "seconds": {}, "off": 0.0, "equal_bits": True}
    for num_bytes in MESSAGES:
        generator = torch.Generator(device).manual_seed(world.rank)
        mine_N = torch.randn(num_bytes // 2, generator=generator, device=device).to(torch.bfloat16)
        ours_N, theirs_N = sum_over(mine_N.clone(), group=group), mine_N.clone()
        dist.all_reduce(theirs_N, group=group)
        found["off"] = max(found["off"], float((ours_N - theirs_N).abs().max() / theirs_N.abs().max()))
        of_ranks_RN = ours_N.new_empty(world.size, len(ours_N))
        all_gather(of_ranks_RN.view(-1), ours_N, group=group)
        found["equal_bits"] &= all(torch.equal(one_N, ours_N) for one_N in of_ranks_RN)
        x_N = torch.zeros_like(mine_N)
        calls = {
            "one shot": lambda x_N=x_N: [sum_over(x_N, group=group) for _ in range(NUM_SUMS)],
            "NCCL": lambda x_N=x_N: [dist.all_reduce(x_N, group=group) for _ in range(NUM_SUMS)],
        }
        graphs = {name: captured(call, device) for name, call in calls.items()}
        seconds = alternate(graphs, device, rounds=1 if dry else 9)
        found["seconds"][num_bytes] = {name: one / NUM_SUMS for name, one in seconds.items()}
    slow = [num for num, of in found["seconds"].items() if of["one shot"] > of["NCCL"]]
    right = found["equal_bits"] and found["off"] <= OFF
    times = (f"{1e6 * of['one shot']:.0f} for {1e6 * of['NCCL']:.0f} us" for of in found["seconds"].values())
    told = f"{found['how']}; {', '.join(times)} of NCCL; off by {found['off']:.1e}"
    told += "" if found["equal_bits"] else "; ranks have other bits"
    in_one_shot = found["how"].startswith("in one shot")
    return found | {"ok": right and (not slow if in_one_shot else one_shot.NO_LINKS in found["how"]), "told": told}


def used_s() -> dict[str, float]:
    """Returns the processor seconds of this process that count as work, and those of threads that spin."""
    fields = process_fields(os.getpid())
    assert fields is not None
    return {"work": fields[1], "spun": waiting().spun_s}


def thread_names() -> list[str]:
    """Returns the names of this process's threads, each once."""
    return sorted({path.read_text(encoding="utf-8").strip() for path in Path("/proc/self/task").glob("*/comm")})


def actions(device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns what may make the driver wait for the device; each returns when its own stream has ended."""

    def launch() -> None:
        x = torch.ones(3, 96, device=device, dtype=torch.bfloat16)
        silu_mul(x, x)
        synchronise(device)

    def free() -> None:
        torch.empty(2**28, device=device)
        torch.cuda.empty_cache()

    def capture() -> None:
        graph, x = torch.cuda.CUDAGraph(), torch.ones(64, 64, device=device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            x @ x
            graph.capture_begin(capture_error_mode="thread_local")
            x @ x
            graph.capture_end()
        graph.replay()
        synchronise(device)

    found: dict[str, Callable[[], object]] = {"first launch": launch}
    return found | ({"empty_cache": free, "capture": capture} if device.type == "cuda" else {})


def beside_receives(world: World, device: torch.device, num: int, edge: int) -> float:
    """Measures the seconds of a product on rank 1 while so many receives of it are pending."""
    messages = [torch.zeros(1024, device=device) for _ in range(num)]
    x, taken_s = torch.ones(edge, edge, device=device, dtype=torch.bfloat16), 0.0
    x @ x
    synchronise(device)
    world.barrier("products")
    if world.rank == 1:
        waiting = [dist.irecv(message, 0) for message in messages]
        started = time.perf_counter()
        for _ in range(PRODUCTS):
            x @ x
        synchronise(device)
        taken_s = (time.perf_counter() - started) / PRODUCTS
    world.barrier("products are done")
    if world.rank == 0:
        for message in messages:
            dist.send(message, 1)
    else:
        for one in waiting:
            one.wait()
    return taken_s


def synchronise(device: torch.device) -> None:
    """Waits for the stream of products, not for those of messages."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


CASES = {"tp-graphs": slices, "one-shot": sums, "pending-receive": pending_receive, "waiting-rank": waiting_rank}


def main(case: str, *dry: str) -> None:
    world = World.discover(deadline_s=60.0)
    world.use_device("cpu" if dry else "cuda")
    world.start_torch({"tp": (0, 1)}, {None: [(0, 1)]})
    found = CASES[case](world, bool(dry))
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    world.shutdown()
    world.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
