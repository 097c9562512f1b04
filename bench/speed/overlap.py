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
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.rows import Arguments, one_world, rows_of_ranks, write
from bench.tables import ended
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
    """Returns models of a few thousand parameters and 16 prompts in four mini-batches, which take almost no time."""
    models = [f"models.actor={folder / 'actor'}", f"models.reward={folder / 'reward'}"]
    sizes = ["rollout_batch=16", "mini_batch=4", "generation.max_new_tokens=4", "num_samples=0"]
    sizes.append(f"ppo.epochs={epochs}")
    return presets.load("tiny", [*models, *sizes, f"iterations={ITERATIONS}"])


def write_models(folder: Path, num_kv_heads: int = 1) -> None:
    """Writes a small actor and reward model with random weights and the embedded tokenizer."""
    from rlhf_spmd import embedded
    from rlhf_spmd.model.hf import load_model, save_state
    from rlhf_spmd.model.texts.tokenizer_files import Texts
    from rlhf_spmd.model.transformer import Transformer

    for name, head in (("actor", "lm"), ("reward", "scalar")):
        source = embedded.path_of(name)
        sizes = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "head_dim": 4}
        shape = dataclasses.replace(load_model(source, head=head).config, **sizes, num_kv_heads=num_kv_heads)
        model = Transformer(shape, head=head)
        model.init_weights(seed=0)
        save_state(model.state_dict(), shape, head, folder / name, Texts(source))


def slow_s(program: Program, step: Run, scale: float = 1.0) -> float:
    """Returns the seconds by which a Run is slowed.

    scale: of all times in SLOW_S.
    """
    workload, layout, share = program.workload, program.layout_of(step), 1.0
    if not step.call.endswith("_train"):
        share = len(program.mini_batches_of(step)) / workload.num_mini_batches
    if step.columns is not None:  # a call that begins with the rows it has
        of_ranks = (layout.columns(rank, workload.mini_batch) for rank in layout.ranks)
        share *= len(step.columns) / next(len(columns) for columns in of_ranks if set(step.columns) <= set(columns))
    return scale * SLOW_S[step.call] * share


class Runner:
    """One program on one rank, with models of its own."""

    def __init__(self, config: Config, program: Program, world: Any):
        from rlhf_spmd.runtime.execute.executor import Executor
        from rlhf_spmd.runtime.run.prepare import prepare
        from rlhf_spmd.runtime.world.trace import Tracer

        self.program, self.world, self.recorder = program, world, Tracer()
        self.job = prepare(config, program, world).job
        self.executor = Executor(self.job, self.recorder)
        self.in_flight: Any = None

    def slow(self, seconds: Callable[[Run], float]) -> None:
        """Makes each Run sleep besides from now on."""
        run = self.executor.run

        def slowed(step: Run, data: Any) -> None:
            run(step, data)
            time.sleep(seconds(step))

        self.executor.run = slowed

    def iteration(self, number: int) -> tuple[float, list[float]]:
        """Runs an iteration. Returns its seconds, and those of each Run of this rank. One ahead, the first one is the
        prologue."""
        from rlhf_spmd.runtime.run.prepare import make_iteration

        data = make_iteration(self.job, number)
        batches = (data,)
        if self.program.placement.ahead:
            batches, self.in_flight = (self.in_flight, data), data
        else:
            self.executor.begin()
        self.world.barrier("the start of an iteration")
        self.recorder.spans.clear()
        began = time.perf_counter()
        self.executor.iteration(*batches)
        took_s = time.perf_counter() - began
        return took_s, [span[3] - span[2] for span in self.recorder.spans if span[1] == "compute"]


Iteration = Sequence[tuple[float, list[float]]]  # of each rank: total, seconds of each Run


def seconds_of(program: Program, of_ranks: Iteration) -> dict[tuple[int, Run], float]:
    """Returns the seconds of each Run of each rank in an iteration."""
    found: dict[tuple[int, Run], float] = {}
    for rank, (_, seconds) in enumerate(of_ranks):
        runs = [step for step in program.instructions[rank] if isinstance(step, Run)]
        found |= {(rank, step): s for step, s in zip(runs, seconds, strict=True)}
    return found


def measure(
    world: Any,
    name: str,
    folder: Path,
    with_groups: Callable,
    extra_s: dict[str, float] | None = None,
    *,
    scale: float = 1.0,
    iterations: int = ITERATIONS,
) -> dict:
    """Returns predicted and measured seconds of an iteration, on every rank alike.

    folder: where `write_models` wrote.
    with_groups: with_groups(program) is the world with the groups of a program.
    extra_s: seconds that a Run of each call takes besides its sleep; None: what is measured here.
    scale: of all times in SLOW_S.
    """
    strategy, options, epochs = VARIANTS.get(name, (name, {}, 1))
    config = small(folder, epochs)
    program = load_strategy(strategy).compile(make_workload(config), Cluster((Node(world.size),)), options)
    world = with_groups(program)
    runner = Runner(config, program, world)
    runner.slow(lambda step: slow_s(program, step, scale))
    everyone = world.allgather([runner.iteration(number) for number in range(iterations)][1:])
    rounds = list(zip(*everyone, strict=True))
    extra_s = besides_s(program, rounds, scale) if extra_s is None else extra_s
    slowed = Times(lambda rank, step: slow_s(program, step, scale))
    forecast = Times(lambda rank, step: slow_s(program, step, scale) + extra_s[step.call])
    return {
        "bench": "overlap",
        "strategy": name,
        "ranks": world.size,
        "slowed_s": simulate(program, slowed).makespan_s,
        "forecast_s": simulate(program, forecast).makespan_s,
        "measured_s": statistics.median(max(total_s for total_s, _ in ranks) for ranks in rounds),
        "extra_s": extra_s,
    }


def besides_s(program: Program, iterations: Sequence[Iteration], scale: float = 1.0) -> dict[str, float]:
    """Returns the median time of a Run of each call besides its sleep.

    In a group the last rank to come shows how long the Run itself takes; the others also wait in it.
    """
    found: dict[str, list[float]] = {}
    for of_ranks in iterations:
        of_run = seconds_of(program, of_ranks)
        for rank, step in of_run:
            members = program.groups[step.group] if step.group is not None else (rank,)
            fastest = min(of_run[member, step] for member in members)
            found.setdefault(step.call, []).append(fastest - slow_s(program, step, scale))
    return {call: statistics.median(seconds) for call, seconds in found.items()}


def measure_all(
    world, folder: Path, with_groups: Callable, strategies: Sequence[str] = STRATEGIES, **options
) -> list[dict]:
    """Measures a row per strategy, flattening first.

    options: those of `measure`.
    """
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
    """Runs the cases on each rank."""
    rows: list[dict] = []
    with one_world(file, rows) as world:
        everyone = {f"ranks 0-{world.size - 1}": tuple(range(world.size))}
        world.start_torch(everyone, threads=1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(world.bcast(name, what="the folder"))
            if world.rank == 0:
                write_models(folder)
            world.barrier("the models")
            rows += measure_all(world, folder, lambda program: world, (*STRATEGIES, *VARIANTS))
            world.barrier("the end of the folder")


def main(arguments: list[str]) -> int:
    parser = Arguments("overlap", __doc__)
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.on_ranks:
        run_cases(parsed.on_ranks)
        return 0
    rows = rows_of_ranks("overlap", NUM_RANKS)
    judge(rows)
    write("overlap", rows)
    return ended("overlap", rows)
