"""What an iteration of 8,192 rows x 4,096 tokens takes on eight ranks beside its models: seconds and memory of a rank.

Everything but the models is real: the iteration is made, the instructions of each strategy are executed with their
messages between ranks, rows are put into the store, and the closing agreement hashes all tokens. A call writes constant
results, and weights do not move. The random numbers of generation, one for each token, are shown apart: the call that
generates makes them, and computes a whole model for each. Promised are processor seconds, the random numbers included:
they are what a rank takes that has a core to itself. By the clock eight ranks on fewer cores wait for each other.

Then 100,000 prompts are tokenised: by every rank for itself, and by one rank of the node for all.

Cost: two minutes. Command: python -m bench iteration-size
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from bench.rows import write
from bench.tables import measured_on_ranks
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import DEVICE_BYTES, Cluster, Node
from rlhf_spmd.plan.program.instructions import Post, Program, Run, Wait
from rlhf_spmd.plan.program.transfers import communicators
from rlhf_spmd.runtime.world.world import World

NUM_RANKS, NUM_ITERATIONS = 8, 4  # the first one warms up
STRATEGIES = ("flattening", "interleaving1", "separation")
SIZES = ("rollout_batch=512", "samples_per_prompt=16", "mini_batch=1024")
LENGTHS = ("data.max_prompt=512", "generation.max_new_tokens=4096")
NUM_PROMPTS, PROMPT_WORDS = 100_000, 60
MOST_S, MOST_MB = 0.5, 200  # promised where every rank has an eighth of the rows; processor seconds


def main(arguments: list[str]) -> int:
    if arguments != ["--on-ranks"]:
        assert not arguments, "iteration-size takes no options"
        return measured_on_ranks("iteration-size", NUM_RANKS)
    world, rows = World.discover(), []
    world.use_device("cpu")
    try:
        config = presets.load("tiny", [*SIZES, *LENGTHS])
        cluster = Cluster((Node(world.size, "cpu", DEVICE_BYTES["cpu"]),))
        programs = {name: load_strategy(name).compile(make_workload(config), cluster, {}) for name in STRATEGIES}
        world.start_torch(*communicators(programs.values()))
        for name, program in programs.items():
            row = {"bench": "iteration-size", "what": f"an iteration, {name}", "ranks": world.size}
            rows.append(row | iterations(config, program, world))
        rows += tokenising(config, world)
        world.shutdown()
    except BaseException as error:
        world.fail(error)
    if world.rank == 0:
        write("iteration_size", rows)
    return 0


class Clock:
    """Seconds and processor seconds of this process."""

    def __init__(self) -> None:
        self.spent = [0.0, 0.0]

    def __enter__(self) -> "Clock":
        self.began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_) -> None:
        self.spent[0] += time.perf_counter() - self.began[0]
        self.spent[1] += time.process_time() - self.began[1]


class Constant:
    """Runs of a model that answers at once: what they make is the same for all rows."""

    def __init__(self, program: Program, rank: int):
        import torch

        self.program, self.rank, self.draws = program, rank, Clock()
        self.width = program.workload.max_response
        self.response_G = torch.arange(self.width) % 30_000

    def run(self, step: Run, data) -> None:
        rows, columns = self.program.mini_batches_of(step), self.program.columns_of(step, self.rank)
        place = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        if step.call == "actor_generate" and rows.start == 0:  # then those of all mini-batches are made
            with self.draws:
                assert data.random_bits(0, place[1]).shape[1:] == (len(columns), self.width)
        for key in self.program.makes(step, self.rank):
            data.store.at(key, place)[:] = self.response_G if key == "responses" else 0.5


def iterations(config: Config, program: Program, world: World) -> dict:
    """Seconds and megabytes of an iteration, of the rank that takes most; the same on every rank."""
    import numpy as np

    from rlhf_spmd.kernels.known_tokens import KnownTokens
    from rlhf_spmd.runtime.data.packed_rows import TextRows, TokenRows
    from rlhf_spmd.runtime.data.prompts import PromptSet
    from rlhf_spmd.runtime.execute.executor import Executor
    from rlhf_spmd.runtime.execute.job import Job, RunState
    from rlhf_spmd.runtime.observe.trace import Tracer
    from rlhf_spmd.runtime.run.prepare import make_iteration

    workload = program.workload
    moves = {number for number, transfer in enumerate(program.transfers) if transfer.model}
    kept = tuple(
        tuple(step for step in steps if not (isinstance(step, Post | Wait) and step.transfer in moves))
        for steps in program.instructions
    )
    program = replace(program, instructions=kept)
    ends = np.arange(1, workload.rollout_batch + 1) * workload.max_prompt
    prompts = TokenRows(np.arange(ends[-1], dtype=np.int32) % 30_000, ends)
    texts = TextRows.of([""] * len(ends))
    calls = Constant(program, world.rank)
    job = Job(
        config,
        program,
        world,
        tokenizer=None,
        prompts=PromptSet(prompts, texts),
        models=None,
        scorer=None,
        eos_ids=(),
        known=KnownTokens(30_000),
        functions={},
        state=RunState(None),
        columns=program.held(world.rank),
    )
    executor, found = Executor(job, Tracer(world.rank)), []
    executor.run = calls.run
    for number in range(NUM_ITERATIONS):
        gc.collect()
        world.barrier("the start of an iteration")
        calls.draws, began_bytes = Clock(), start_of_peak()
        with Clock() as made:
            data = make_iteration(job, number)
        with Clock() as executed:
            answers = executor.iteration(data)
        grown = peak_bytes() - began_bytes
        assert sum(len(answer["rows"]) for answer in answers) == workload.num_sequences
        del data, answers
        draws_s, draws_cpu_s = calls.draws.spent
        seconds, cpu_s = (sum(both) for both in zip(made.spent, executed.spent, strict=True))
        found.append([seconds - draws_s, cpu_s - draws_cpu_s, draws_s, draws_cpu_s, grown / 1e6])
    mine = [statistics.median(column) for column in zip(*found[1:], strict=True)]
    mine[-1] = max(row[-1] for row in found)
    most = map(max, zip(*world.allgather(mine, "the seconds of an iteration"), strict=True))
    row = dict(zip(("seconds", "processor_s", "draws_s", "draws_processor_s", "grown_mb"), most, strict=True))
    promised = all(sum(map(len, ranges)) == workload.mini_batch // world.size for ranges in job.columns.values())
    within = row["processor_s"] + row["draws_processor_s"] <= MOST_S and row["grown_mb"] <= MOST_MB
    return row | {"rows": workload.num_sequences, "tokens": workload.max_response, "ok": not promised or within}


def start_of_peak() -> int:
    """Forgets the most memory that this process has had; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most memory that this process has had since then."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def tokenising(config: Config, world: World) -> Sequence[dict]:
    """Seconds and megabytes of a data set, of the rank that takes most; the same on every rank."""
    from rlhf_spmd.kernels.known_tokens import KnownTokens
    from rlhf_spmd.model.hf import load_tokenizer
    from rlhf_spmd.model.texts.template_time import time_of_start
    from rlhf_spmd.runtime.data.shared_prompts import once_per_node
    from rlhf_spmd.runtime.run.inputs import read_prompts

    with tempfile.TemporaryDirectory(prefix="prompts_") as folder:
        path = Path(world.bcast(folder, what="the folder")) / "prompts.jsonl"
        if world.rank == 0:
            write_prompts(Path(config.data.prompts), path)
        world.barrier("the prompts")
        words = [f"data.prompts={path}", "data.long_prompts=truncate", "data.max_prompt=512"]
        config = presets.load("tiny", [*SIZES, *words])
        tokenizer, rows = load_tokenizer(config.main_folder), []

        def alone():
            return read_prompts(config, tokenizer, KnownTokens(2**31), started=time_of_start())

        def once():
            return once_per_node(world, alone)

        ways: dict[str, Callable] = {"by every rank": alone, "once per node": once}
        for way, load in ways.items():
            gc.collect()
            world.barrier("the start of tokenising")
            began_bytes = start_of_peak()
            with Clock() as clock:
                prompts = load()
                prompts.fingerprint()
            most = world.allgather([*clock.spent, (peak_bytes() - began_bytes) / 1e6], "the seconds of tokenising")
            row = dict(zip(("seconds", "processor_s", "grown_mb"), map(max, zip(*most, strict=True)), strict=True))
            row |= {"rows": len(prompts), "tokens": len(prompts.prompts.items) // len(prompts)}
            rows.append({"bench": "iteration-size", "what": f"tokenising {way}", "ranks": world.size, **row})
            del prompts
        rows[0]["ok"] = True
        rows[1]["ok"] = rows[1]["seconds"] < rows[0]["seconds"]
        world.barrier("the end of tokenising")  # rank 0 removes the folder
    return rows


def write_prompts(source: Path, path: Path) -> None:
    """Different prompts from the lines of a file."""
    lines = source.read_text(encoding="utf-8").splitlines()
    pieces = islice(product(lines, repeat=8), NUM_PROMPTS)
    texts = (" ".join(" ".join(piece).split()[:PROMPT_WORDS]) for piece in pieces)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
