"""Is overlap real? Two ranks with slowed calls: measured iterations against the program's critical path.

Each call of a very small model also sleeps for a fixed time (shared evenly by its mini-batches), so that what is
measured is who waits for whom, not two cores. The critical path that a program predicts is made of these times and of
what a Run of each call takes besides, which is measured under flattening: a rank that has slept computes slower, its
pages and caches being cold, and does so in each Run anew.

The last two rows are separation with two epochs, without and with the next batch drawn one iteration ahead.

Cost: two and a half minutes. Command: python -m bench overlap
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.rows import on_ranks, write
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.plan.program.instructions import Program, Run

SLOW_S = {  # of a call in an iteration; a train call's is that of one optimizer step
    "actor_generate": 1.2,
    "reference_infer": 0.9,
    "reward_infer": 0.9,
    "critic_infer": 0.3,
    "estimate_advantages": 0.0,
    "actor_train": 0.3,
    "critic_train": 0.15,
}
STRATEGIES = ("flattening", "interleaving1", "interleaving2", "separation")
# name -> strategy, its options, epochs
VARIANTS = {"two epochs": ("separation", {}, 2), "two epochs ahead": ("separation", {"ahead": 1}, 2)}
LEAST_GAIN = 1.4  # of drawing ahead; 1.54 is the best possible
NUM_RANKS = 2
TOLERANCE = 0.15  # of the forecast
ITERATIONS = 4  # the first one is a warm-up


def small(folder: Path, epochs: int = 1) -> Config:
    """Models of a few thousand parameters and 16 prompts in four mini-batches, which take almost no time."""
    models = [f"models.actor={folder / 'actor'}", f"models.reward={folder / 'reward'}"]
    sizes = ["rollout_batch=16", "mini_batch=4", "generation.max_new_tokens=4", "num_samples=0"]
    sizes.append(f"ppo.epochs={epochs}")
    return presets.load("tiny", [*models, *sizes, f"iterations={ITERATIONS}"])


def write_models(folder: Path) -> None:
    """Random weights with the embedded tokenizer."""
    from rlhf_spmd import embedded
    from rlhf_spmd.model.hf import load_model, save_state
    from rlhf_spmd.model.transformer import Transformer

    for name, head in (("actor", "lm"), ("reward", "scalar")):
        source = embedded.path_of(name)
        sizes = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        shape = dataclasses.replace(load_model(str(source), head=head).config, **sizes, head_dim=4)
        model = Transformer(shape, head=head)
        model.init_weights(seed=0)
        save_state(model.state_dict(), shape, head, folder / name, source=source)


def slow_s(program: Program, step: Run, scale: float = 1.0) -> float:
    """Seconds by which a Run is slowed; scale: of all times in SLOW_S."""
    share = 1.0 if step.call.endswith("_train") else len(program.mini_batches_of(step)) / len(_all(program))
    if step.columns is not None:  # a call that begins with the rows it has
        share *= len(step.columns) / len(program.layout_of(step).columns(_rank_of(program, step), _width(program)))
    return scale * SLOW_S[step.call] * share


def _all(program: Program) -> range:
    return range(program.workload.num_mini_batches)


def _width(program: Program) -> int:
    return program.workload.mini_batch


def _rank_of(program: Program, step: Run) -> int:
    layout = program.layout_of(step)
    return next(rank for rank in layout.ranks if set(step.columns) <= set(layout.columns(rank, _width(program))))


def measure(
    world,
    name: str,
    folder: Path,
    with_groups: Callable,
    extra_s: dict[str, float] | None = None,
    *,
    scale: float = 1.0,
    iterations: int = ITERATIONS,
) -> dict:
    """Predicted and measured seconds of an iteration, on every rank alike.

    folder: where `write_models` wrote; with_groups(program): the world with the groups of a program. extra_s: seconds
    that a Run of each call takes besides its sleep; None: what is measured here. scale: of all times in SLOW_S.
    """
    from rlhf_spmd.runtime.ahead.in_flight import Batch
    from rlhf_spmd.runtime.ahead.steps import AheadExecutor, Batches
    from rlhf_spmd.runtime.execute.executor import Executor
    from rlhf_spmd.runtime.observe.trace import Tracer
    from rlhf_spmd.runtime.run.prepare import make_iteration, prepare

    strategy, options, epochs = VARIANTS.get(name, (name, {}, 1))
    config = small(folder, epochs)
    workload, cluster = make_workload(config), Cluster((Node(world.size),))
    program = load_strategy(strategy).compile(workload, cluster, options)
    world = with_groups(program)
    job = prepare(config, program, world)
    recorder = Tracer()
    ahead = AheadExecutor(job, recorder) if program.placement.ahead else None
    executor, mine = ahead.inner if ahead else Executor(job, recorder), []
    run, in_flight = executor.run, None

    def slowed(step, data):
        run(step, data)
        time.sleep(slow_s(program, step, scale))

    executor.run = slowed
    for number in range(iterations):
        data = make_iteration(job, number)
        world.barrier("the start of an iteration")
        recorder.spans.clear()
        began = time.perf_counter()
        if ahead:  # the first step is the prologue
            in_flight, trained = Batch(data), in_flight
            ahead.iteration(Batches(trained, in_flight))
        else:
            executor.iteration(data)
        total_s = time.perf_counter() - began
        mine.append((total_s, [span[3] - span[2] for span in recorder.spans if span[1] == "compute"]))
    everyone = world.allgather(mine[1:])
    if extra_s is None:
        extra_s = besides_s(program, list(zip(*everyone, strict=True)), scale)
    return {
        "bench": "overlap",
        "strategy": name,
        "ranks": world.size,
        "slowed_s": simulate(program, Times(lambda rank, step: slow_s(program, step, scale))).makespan_s,
        "forecast_s": simulate(
            program, Times(lambda rank, step: slow_s(program, step, scale) + extra_s[step.call])
        ).makespan_s,
        "measured_s": statistics.median(max(total_s for total_s, _ in ranks) for ranks in zip(*everyone, strict=True)),
        "extra_s": extra_s,
    }


def besides_s(program: Program, iterations: list, scale: float = 1.0) -> dict[str, float]:
    """The median time of a Run of each call besides its sleep. iterations[i][rank]: total, seconds of each Run.

    In a group the last rank to come shows how long the Run itself takes; the others also wait in it.
    """
    found: dict[str, list[float]] = {}
    for of_ranks in iterations:
        of_run: dict[tuple[int, Run], float] = {}
        for rank, (_, seconds) in enumerate(of_ranks):
            runs = [step for step in program.instructions[rank] if isinstance(step, Run)]
            of_run |= {(rank, step): s for step, s in zip(runs, seconds, strict=True)}
        for rank, step in of_run:
            members = program.groups[step.group] if step.group is not None else (rank,)
            fastest = min(of_run[member, step] for member in members)
            found.setdefault(step.call, []).append(fastest - slow_s(program, step, scale))
    return {call: statistics.median(seconds) for call, seconds in found.items()}


def measure_all(
    world, folder: Path, with_groups: Callable, strategies: Sequence[str] = STRATEGIES, **options
) -> list[dict]:
    """A row per strategy, flattening first; options: those of `measure`."""
    rows = [measure(world, strategies[0], folder, with_groups, **options)]
    extra_s = rows[0]["extra_s"]
    return rows + [measure(world, name, folder, with_groups, extra_s, **options) for name in strategies[1:]]


def judge(rows: list[dict], tolerance: float = TOLERANCE) -> None:
    """Adds `ratio` and `ok`: within the tolerance of the critical path, and less than flattening, where all is in one
    line."""
    flat = next(row for row in rows if row["strategy"] == "flattening")
    for row in rows:
        row["ratio"] = row["measured_s"] / row["forecast_s"]
        row["ok"] = abs(row["ratio"] - 1) <= tolerance
        if row["strategy"] in STRATEGIES and row is not flat:
            row["ok"] &= row["measured_s"] < flat["measured_s"]
    late, ahead = ([row for row in rows if row["strategy"] == name] for name in VARIANTS)
    for row in ahead:
        row["gain"] = late[0]["measured_s"] / row["measured_s"]
        row["ok"] &= row["gain"] >= LEAST_GAIN


def run_cases(file: Path) -> None:
    """The main function of each rank; rank 0 writes the rows."""
    from rlhf_spmd.runtime.world.world import World

    world = World.discover()
    world.use_device("cpu")
    rows = []
    try:
        everyone = {f"ranks 0-{world.size - 1}": tuple(range(world.size))}
        world.start_torch(everyone, threads=1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(world.bcast(name, what="the folder"))
            if world.rank == 0:
                write_models(folder)
            world.barrier("the models")
            rows = measure_all(world, folder, lambda program: world, (*STRATEGIES, *VARIANTS))
            world.barrier("the end of the folder")
        world.shutdown()
    except BaseException as error:
        world.fail(error)
    if world.rank == 0:
        file.write_text(json.dumps(rows), encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench overlap", description=__doc__)
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.on_ranks:
        run_cases(parsed.on_ranks)
        return 0
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.json"
        on_ranks(NUM_RANKS, ["overlap", "--on-ranks", str(file)])
        rows = json.loads(file.read_text(encoding="utf-8"))
    judge(rows)
    print("strategy          slowed calls alone s  critical path s  measured s  ratio")
    for row in rows:
        seconds = f"{row['slowed_s']:20.2f}  {row['forecast_s']:15.2f}  {row['measured_s']:10.2f}"
        print(f"{row['strategy']:<16}  {seconds}  {row['ratio']:5.2f}")
    write("overlap", rows)
    ok = all(row["ok"] for row in rows)
    print(json.dumps({"bench": "overlap", "ok": ok}))
    return 0 if ok else 1
