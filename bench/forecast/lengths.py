"""Are iterations with spread lengths as long as their distribution says? Measured on CPU ranks whose layers sleep.

Each layer of a very small model also sleeps for a fixed time per token, per pair of tokens in attention and per row of
a decode step, so that 8 ranks do not share two cores but wait for each other as on 8 devices. Responses end after a
number of tokens drawn from a lognormal distribution by the random bits of their row, the same under every placement.
All else is real: the engine with its refilled places, packing, micro-batches, optimizer steps, messages. The ranks are
then calibrated as they are, with the measurements of `profile`, and each program is forecast from that calibration and
the distribution: the mean of iterations, beside a forecast of responses that all have the mean length.

Cost: 8 minutes on two cores for each number of ranks, whose rows are replaced.
Command: python -m bench lengths [--ranks N ...]
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.forecast.measure_cpu import forecast_calls_s, measured_calls_s
from bench.ranks import rows_of_ranks
from bench.rows import Arguments, keep, rows_so_far
from bench.speed.overlap import write_models
from bench.tables import ended
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.cost.calibration import Calibration, Device, fit_link
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.lengths import LengthDistribution, lognormal
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.program.transfers import communicators
from rlhf_spmd.plan.workload import ResponseLengths

SIZES = (2, 4, 8)
ALGORITHMS = {"ppo": ["ppo.epochs=1", "rollout_batch=64"], "grpo": ["samples_per_prompt=4", "rollout_batch=16"]}
STRATEGIES = ("flattening", "interleaving1", "separation", "reallocation")
PROMPT, MEAN, SIGMA, LIMIT = 11, 10.0, 0.8, 40  # tokens
PLACES, MINI_BATCH, MICRO_BATCH = 4, 16, 4
DECODE_S, ROW_S = 18e-3, 0.5e-3  # slept by a layer in a decode step, and for each of its rows
TOKEN_S, PAIR_S = 0.3e-3, 10e-6  # for each token of a pass, and for each token that attention sees for it
TRAINED = 3  # times as much in training
ITERATIONS = 6  # the first one is a warm-up
KEYS = ("algorithm", "ranks", "strategy")  # what tells rows apart
TOLERANCE, SHARE = 0.15, 0.9  # of the measured seconds, in this share of the cases


def write_inputs(folder: Path) -> None:
    """Writes small models, and the embedded prompts of PROMPT tokens."""
    from tokenizers import Tokenizer

    from rlhf_spmd import embedded

    write_models(folder, num_kv_heads=2)
    tokenizer = Tokenizer.from_file(str(embedded.path_of("actor") / "tokenizer.json"))
    lines = embedded.path_of("prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = [line for line in lines if len(tokenizer.encode(json.loads(line)["prompt"]).ids) == PROMPT]
    (folder / "prompts.jsonl").write_text("".join(chosen), encoding="utf-8")


def config_of(algorithm: str, folder: Path, limit: int = LIMIT, places: int = PLACES) -> Config:
    """Returns the options of 64 responses in four mini-batches; no response ends by itself."""
    words = [f"models.actor={folder / 'actor'}", f"models.reward={folder / 'reward'}"]
    words += [f"data.prompts={folder / 'prompts.jsonl'}", f"data.max_prompt={PROMPT}", "num_samples=0"]
    words += [f"generation.{name}_new_tokens={limit}" for name in ("min", "max")]
    words += [f"generation.max_sequences={places}"]
    words += [f"mini_batch={MINI_BATCH}", f"micro_batch={MICRO_BATCH}", f"iterations={ITERATIONS}"]
    return presets.load("tiny", [*words, *ALGORITHMS[algorithm]], algorithm=algorithm)


def programs(config: Config, size: int) -> Iterator[tuple[str, Program]]:
    """Yields the programs of the strategies that apply to so many ranks."""
    for name in STRATEGIES:
        try:
            options = {"chain": False} if name == "separation" else {}  # iterations are measured one by one
            yield name, load_strategy(name).compile(make_workload(config), Cluster((Node(size),)), options)
        except UserError as error:
            print(f"{size} ranks, {name}: left out: {error}")


def length_at(share: float, lengths: LengthDistribution, limit: int = LIMIT) -> int:
    """Returns the number of tokens that this share of all responses does not exceed."""
    cell = int((lengths.survival > 1.0 - share).sum()) - 1
    return max(1, min(limit, math.ceil(lengths.step * (cell + 0.5))))


def shuffled(bits: Sequence[int], lengths: LengthDistribution) -> dict[int, int]:
    """Deals the quantiles of a distribution to rows in the order of their first random bits -> tokens by these bits.
    All rows together have the intended mean, but which lengths meet in an iteration, or on a rank, is random."""
    return {one: length_at((place + 0.5) / len(bits), lengths) for place, one in enumerate(sorted(bits))}


def layer_s(context: Any, tp: int, token_s: float, decode_s: float, *, trains: bool) -> float:
    """Returns the seconds that one of tp slices of a layer sleeps. context: of attention."""
    if hasattr(context, "lengths"):
        tokens, pairs = sum(context.lengths), sum(one * one for one in context.lengths) / 2
        return (TRAINED if trains else 1) * (token_s * tokens + PAIR_S * pairs) / tp
    s = 0.0
    for part in context._parts:
        if hasattr(part, "lengths"):
            s += layer_s(part, tp, token_s, decode_s, trains=False)
        else:
            s += decode_s + ROW_S * len(part.positions)
    return s / tp


@contextmanager
def planted(
    tokens: dict[Any, int] | None = None, token_s: float = TOKEN_S, decode_s: float = DECODE_S
) -> Iterator[dict[Any, int]]:
    """Lets layers sleep; yields the tokens of rows by their first random bits, which the caller may change. A row that
    is not there has as many as it is asked for. token_s, decode_s: of a layer, for each token of a pass and for a
    decode step."""
    from rlhf_spmd.model.transformer import Layer
    from rlhf_spmd.runtime.generation.engine import Engine

    forward, submit = Layer.forward, Engine.submit
    tokens = {} if tokens is None else tokens

    def slow(self: Any, x: Any, turns: Any, context: Any, *others: Any) -> Any:
        group = self._modules["self_attn"].group  # plain attributes are functions while an engine runs
        time.sleep(layer_s(context, 1 if group is None else group.size(), token_s, decode_s, trains=x.requires_grad))
        return forward(self, x, turns, context, *others)

    def spread(self: Any, prompts: Any, bits_RG: Any, sampling: Any, begun: Any = None) -> range:
        if tokens:
            each = sampling if isinstance(sampling, list) else [sampling] * len(bits_RG)
            pairs = zip(bits_RG[:, 0].tolist(), each, strict=True)
            numbers = [min(tokens.get(bits, one.max_new_tokens), one.max_new_tokens) for bits, one in pairs]
            sampling = [dataclasses.replace(each[0], max_new_tokens=one, min_new_tokens=one) for one in numbers]
        return submit(self, prompts, bits_RG, sampling, begun)

    Layer.forward, Engine.submit = slow, spread
    try:
        yield tokens
    finally:
        Layer.forward, Engine.submit = forward, submit


def calibrate(world: Any, config: Config) -> Calibration:
    """Measures the calibration of these ranks in elapsed seconds, all at once; none computes in another's time."""
    from rlhf_spmd.runtime.profile.clock import Clock
    from rlhf_spmd.runtime.profile.hardware import constants, links
    from rlhf_spmd.runtime.profile.measured_sizes import Grid
    from rlhf_spmd.runtime.profile.model_timings import measure_shape
    from rlhf_spmd.runtime.profile.profile import inside_ranks

    workload = make_workload(config)
    grid = dataclasses.replace(Grid.of(workload, world.size, world.size), tps=(1, 2))
    shapes = dict.fromkeys(dataclasses.replace(shape, num_layers=0) for shape in workload.models.values() if shape)
    clock = Clock(world, None, lambda: None, lambda: None)
    tables = tuple(measure_shape(clock, config, workload, grid, shape, tp) for shape in shapes for tp in grid.tps)
    link = fit_link(links(clock, inside_ranks(world)))
    device = Device(**constants(clock, workload.param_bytes), layer_s=0.0, decode_layer_s=0.0, measured=tables)
    return Calibration(f"{world.size} ranks that sleep", {"cpu": device}, link, link, provenance="bench lengths")


def measure(
    world: Any, config: Config, program: Program, tokens: dict[int, int]
) -> tuple[list[float], dict[str, float]]:
    """Measures the slowest rank's seconds of each iteration after the warm-up, and the mean seconds of each call;
    `tokens` are those of planted()."""
    from rlhf_spmd.runtime.execute.executor import Executor
    from rlhf_spmd.runtime.run.prepare import make_iteration, prepare
    from rlhf_spmd.runtime.world.trace import Tracer, clock_of

    job, tracer, seconds = prepare(config, program, world).job, Tracer(world.rank, clock=clock_of(world.device)), []
    executor, iterations = Executor(job, tracer), [make_iteration(job, number) for number in range(ITERATIONS)]
    bits = [one for data in iterations[1:] for one in data.random_bits(0)[..., 0].flatten().tolist()]
    tokens |= shuffled(bits, lognormal(MEAN, SIGMA, LIMIT))
    for data in iterations:
        world.barrier("the start of an iteration")
        began = time.perf_counter()
        executor.iteration(data)
        seconds.append(max(world.allgather(time.perf_counter() - began, "the seconds of an iteration")))
    records = world.allgather(tracer.to_records(range(1, ITERATIONS)), "the timeline")
    return seconds[1:], measured_calls_s(records, statistics.fmean)


def row_of(
    algorithm: str,
    strategy: str,
    program: Program,
    calibration: Calibration,
    seconds: list[float],
    calls_s: dict[str, float],
) -> dict:
    """Returns the row of one case."""
    found = {}
    for name, lengths in (("forecast", ResponseLengths(MEAN, SIGMA)), ("of_mean", ResponseLengths(MEAN))):
        workload = dataclasses.replace(program.workload, forecast_lengths=lengths)
        found[name] = forecast(dataclasses.replace(program, workload=workload), calibration)
    mean_s, forecast_s, of_mean_s = statistics.fmean(seconds), *(one.makespan_s for one in found.values())
    error = forecast_s / mean_s - 1
    return {
        "bench": "lengths",
        "algorithm": algorithm,
        "ranks": program.cluster.num_devices,
        "strategy": strategy,
        "computation": "sleeps",
        "mean": MEAN,
        "sigma": SIGMA,
        "limit": LIMIT,
        "forecast_s": forecast_s,
        "of_mean_s": of_mean_s,
        "measured_s": mean_s,
        "iterations_s": seconds,
        "calls_forecast_s": forecast_calls_s(found["forecast"]),
        "calls_measured_s": calls_s,
        "error": error,
        "error_of_mean": of_mean_s / mean_s - 1,
        "ok": abs(error) <= TOLERANCE,
    }


def start(world: Any, programs: Sequence[Program], config: Config) -> Calibration:
    """Makes the groups of programs and those of a calibration, which it measures."""
    from rlhf_spmd.runtime.profile.profile import groups_of

    groups, pairs = communicators(programs)
    world.start_torch(groups | groups_of(world, (1, 2)), pairs, threads=1)
    return calibrate(world, config)


def run_cases(world: Any, folder: Path) -> list[dict]:
    """Runs all cases on each rank."""
    rows = []
    with planted() as tokens:
        configs = {algorithm: config_of(algorithm, folder) for algorithm in ALGORITHMS}
        cases = [(one, *case) for one, config in configs.items() for case in programs(config, world.size)]
        calibration = start(world, [program for *_, program in cases], configs["ppo"])
        for algorithm, strategy, program in cases:
            seconds, calls_s = measure(world, configs[algorithm], program, tokens)
            rows.append(row_of(algorithm, strategy, program, calibration, seconds, calls_s))
    return rows


def main(arguments: list[str]) -> int:
    parser = Arguments("lengths", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="default: 2 4 8")
    for size in parser.parse_args(arguments).ranks:
        keep("lengths", rows_of_ranks(__name__, size, inputs=write_inputs), KEYS, lambda row: row["ranks"])
    rows = rows_so_far("lengths")
    near = sum(row["ok"] for row in rows)
    return ended("lengths", rows, ok=near >= SHARE * len(rows), cases=len(rows), near=near)
