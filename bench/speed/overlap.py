"""Is overlap real? Two and four ranks with slowed calls: measured iterations against the program's critical path.

Each call of a very small model also sleeps for a fixed time (shared evenly by its mini-batches), so that what is
measured is who waits for whom, not two cores. The critical path that a program predicts is made of these times and of
what a Run of each call takes besides, which is measured in the first row of as many ranks: a rank that has slept
computes slower, its pages and caches being cold, and does so in each Run anew.

After the strategies come two rows of separation with two epochs, without and with the next batch drawn one iteration
ahead; then two on four ranks, of which two have a copy of the actor or of the critic, without and with a chain of
iterations. A chain is measured from the end of an iteration on a rank to the end of the next one.

Cost: four minutes. Command: python -m bench overlap
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.ranks import rows_of_ranks
from bench.rows import Arguments, write
from bench.tables import ended
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.program.transfers import communicators

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
LARGE_CRITIC = SLOW_S | {"actor_generate": 4.0, "reference_infer": 0.3, "reward_infer": 0.3}
LARGE_CRITIC |= {"actor_train": 0.1, "critic_train": 0.4}
SHARES = tuple(f"{model}=1/2" for model in ("actor", "critic", "reference", "reward"))


class Variant(NamedTuple):
    """What a row measures.

    slow_s: of each call.
    """

    strategy: str
    options: dict[str, Any] = {}
    epochs: int = 1
    num_ranks: int = 2
    slow_s: dict[str, float] = SLOW_S


ALONE = Variant("separation", {"chain": False})
VARIANTS = {name: ALONE if name == ALONE.strategy else Variant(name) for name in STRATEGIES}
VARIANTS["two epochs"] = ALONE._replace(epochs=2)
VARIANTS["two epochs ahead"] = Variant("separation", {"ahead": 1}, 2)
for name, chain in {"four ranks": False, "four ranks in a chain": True}.items():
    VARIANTS[name] = Variant("separation", {"ratios": SHARES, "chain": chain}, 2, 4, LARGE_CRITIC)
# name -> what it is compared with, the least gain: of 1.54 that drawing ahead may gain, and 1.4 of a chain
GAINS = {"two epochs ahead": ("two epochs", 1.4), "four ranks in a chain": ("four ranks", 1.3)}
TOLERANCE = {2: 0.15, 4: 0.05}  # of the forecast, by number of ranks
ITERATIONS = 4  # the first one is a warm-up; a chain has two more: its second one waits for less, its last one drains


def small(folder: Path, epochs: int = 1) -> Config:
    """Returns models of a few thousand parameters and 16 prompts in four mini-batches, which take almost no time."""
    models = [f"models.actor={folder / 'actor'}", f"models.reward={folder / 'reward'}"]
    sizes = ["rollout_batch=16", "mini_batch=4", "generation.max_new_tokens=4", "num_samples=0"]
    sizes.append(f"ppo.epochs={epochs}")
    return presets.load("tiny", [*models, *sizes, f"iterations={ITERATIONS}"])


def write_models(folder: Path, num_kv_heads: int = 1) -> None:
    """Writes a small actor and reward model."""
    sizes = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "head_dim": 4}
    for name, head in (("actor", "lm"), ("reward", "scalar")):
        write_random(name, head, folder / name, **sizes, num_kv_heads=num_kv_heads)


def write_random(name: str, head: str, folder: Path, **sizes: int) -> None:
    """Writes a model with random weights that has some other sizes than an embedded one, and its tokenizer."""
    from rlhf_spmd import embedded
    from rlhf_spmd.model.hf import load_model, save_state
    from rlhf_spmd.model.texts.tokenizer_files import Texts
    from rlhf_spmd.model.transformer import Transformer

    source = embedded.path_of(name)
    shape = dataclasses.replace(load_model(source, head=head).config, **sizes)
    model = Transformer(shape, head=head)
    model.init_weights(seed=0)
    save_state(model.state_dict(), shape, head, folder, Texts(source))


def slow_s(program: Program, step: Run, of_call: Mapping[str, float]) -> float:
    """Returns the seconds by which a Run is slowed.

    of_call: seconds of each call; none of the parity gate, which only a run ahead has.
    """
    workload, layout, share = program.workload, program.layout_of(step), 1.0
    if not step.call.endswith("_train"):
        share = len(program.mini_batches_of(step)) / workload.num_mini_batches
    if step.columns is not None:  # a call that begins with the rows it has
        of_ranks = (layout.columns(rank, workload.mini_batch) for rank in layout.ranks)
        share *= len(step.columns) / next(len(columns) for columns in of_ranks if set(step.columns) <= set(columns))
    return of_call.get(step.call, 0.0) * share


class Runner:
    """One program on one rank, with models of its own."""

    def __init__(self, config: Config, program: Program, world: Any):
        from rlhf_spmd.runtime.execute.executor import Executor
        from rlhf_spmd.runtime.run.prepare import prepare
        from rlhf_spmd.runtime.world.trace import Tracer

        self.program, self.world, self.recorder = program, world, Tracer()
        self.job = prepare(config, program, world).job
        self.executor = Executor(self.job, self.recorder)
        self.in_flight: Any = None  # the batch drawn ahead, or the last iteration of a chain
        self.began_s = 0.0

    def slow(self, seconds: Callable[[Run], float]) -> None:
        """Makes each Run sleep besides from now on."""
        run = self.executor.run

        def slowed(step: Run, data: Any) -> None:
            run(step, data)
            time.sleep(seconds(step))

        self.executor.run = slowed

    def iteration(self, number: int) -> tuple[float, list[float]]:
        """Runs an iteration. Returns its seconds, in a chain since the end of the one before, and those of each Run of
        this rank. One ahead, the first one is the prologue."""
        from rlhf_spmd.runtime.run.prepare import make_iteration

        data = make_iteration(self.job, number)
        before = self.in_flight
        follows = self.program.chains and before is not None
        if self.program.overlaps:
            self.in_flight = data
        else:
            self.executor.begin()
        if not follows:
            self.world.barrier("the start of an iteration")
            self.began_s = time.perf_counter()
        self.recorder.spans.clear()
        self.executor.iteration(data, before)
        return self._took_s(), [span[3] - span[2] for span in self.recorder.spans if span[1] == "compute"]

    def _took_s(self) -> float:
        """Returns the seconds since it was last asked."""
        began_s, self.began_s = self.began_s, time.perf_counter()
        return self.began_s - began_s

    def block(self, numbers: range) -> list[tuple[float, list[float]]]:
        """Runs iterations in a row. A chain is drained after the last one, whose seconds have what that takes."""
        measured = [self.iteration(number) for number in numbers]
        if self.program.chains:
            self.executor.iteration(None, self.in_flight)
            took_s, of_runs = measured[-1]
            measured[-1] = took_s + self._took_s(), of_runs
            for number in numbers[:-1] if self.world.rank == 0 else ():
                self.executor.reports.all_of(number)
            self.executor.reports.finish()
            self.in_flight = None
        return measured


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
    scale: of all times that calls sleep.
    """
    config, program = compiled(name, folder)
    world = with_groups(program)
    of_call = {call: scale * seconds for call, seconds in VARIANTS[name].slow_s.items()}
    runner = Runner(config, program, world)
    runner.slow(lambda step: slow_s(program, step, of_call))
    first, end = (2, -1) if program.chains else (1, None)
    everyone = world.allgather(runner.block(range(iterations + 2 * program.chains))[first:end], "the seconds")
    extra_s = besides_s(program, list(zip(*everyone, strict=True)), of_call) if extra_s is None else extra_s
    slowed = Times(lambda rank, step: slow_s(program, step, of_call))
    forecast = Times(lambda rank, step: slow_s(program, step, of_call) + extra_s.get(step.call, 0.0))
    return {
        "bench": "overlap",
        "strategy": name,
        "ranks": world.size,
        "slowed_s": simulate(program, slowed).makespan_s,
        "forecast_s": simulate(program, forecast).makespan_s,
        "measured_s": max(statistics.median(total_s for total_s, _ in of_rank) for of_rank in everyone),
        "extra_s": extra_s,
    }


def compiled(name: str, folder: Path) -> tuple[Config, Program]:
    """Returns options and program of a row."""
    strategy, options, epochs, num_ranks, _ = VARIANTS[name]
    config = small(folder, epochs)
    return config, load_strategy(strategy).compile(make_workload(config), Cluster((Node(num_ranks),)), options)


def besides_s(program: Program, iterations: Sequence[Iteration], of_call: Mapping[str, float]) -> dict[str, float]:
    """Returns the median time of a Run of each call besides its sleep.

    of_call: as in slow_s.

    In a group the last rank to come shows how long the Run itself takes; the others also wait in it.
    """
    found: dict[str, list[float]] = {}
    for of_ranks in iterations:
        of_run = seconds_of(program, of_ranks)
        for rank, step in of_run:
            members = program.groups[step.group] if step.group is not None else (rank,)
            fastest = min(of_run[member, step] for member in members)
            found.setdefault(step.call, []).append(fastest - slow_s(program, step, of_call))
    return {call: statistics.median(seconds) for call, seconds in found.items()}


def measure_all(world, folder: Path, with_groups: Callable, names: Sequence[str] = STRATEGIES, **options) -> list[dict]:
    """Measures rows. The first one says what Runs take besides their sleep.

    options: those of `measure`.
    """
    rows = [measure(world, names[0], folder, with_groups, **options)]
    extra_s = rows[0]["extra_s"]
    return rows + [measure(world, name, folder, with_groups, extra_s, **options) for name in names[1:]]


def judge(rows: list[dict], tolerance: float | None = None) -> None:
    """Adds `ratio` and `ok`: within the tolerance of the critical path, and less than flattening, where all is in one
    line. Adds to the rows of GAINS how many times as fast they are, measured and forecast.

    tolerance: None: that of so many ranks.
    """
    named = {row["strategy"]: row for row in rows}
    for name, row in named.items():
        row["ratio"] = row["measured_s"] / row["forecast_s"]
        row["ok"] = abs(row["ratio"] - 1) <= (tolerance or TOLERANCE[row["ranks"]])
        if name in STRATEGIES[1:]:
            row["ok"] &= row["measured_s"] < named["flattening"]["measured_s"]
        if name in GAINS:
            other, least = GAINS[name]
            for kind in ("measured", "forecast"):
                row[f"gain_{kind}"] = named[other][f"{kind}_s"] / row[f"{kind}_s"]
            row["ok"] &= row["gain_measured"] >= least


def run_cases(world: Any, folder: Path) -> list[dict]:
    """Runs the cases on each rank."""
    names = [name for name, variant in VARIANTS.items() if variant.num_ranks == world.size]
    world.start_torch(*communicators(compiled(name, folder)[1] for name in names), threads=1)
    return measure_all(world, folder, lambda program: world, names)


def main(arguments: list[str]) -> int:
    Arguments("overlap", __doc__).parse_args(arguments)
    rows = [row for num_ranks in TOLERANCE for row in rows_of_ranks(__name__, num_ranks, inputs=write_models)]
    judge(rows)
    write("overlap", rows)
    return ended("overlap", rows)
