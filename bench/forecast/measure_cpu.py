"""Do forecasts come true? Iterations of the embedded model on CPU ranks under four strategies, and under the planner's
best plan, forecast and measured.

The machine is calibrated once (`profile`, or a calibration that is given), and every case is forecast from that.
Lengths of prompts and responses are what no planner can know: they are taken from one run of the first iterations,
whose tokens are those of every case (numbers do not depend on the placement), and are the same for all. Measured is
the median of five iterations after a warm-up. Run it on a machine with nothing else to do. Strategies that do not apply
to an algorithm are left out. An algorithm that learns from given responses needs a file of rows, of which all lengths
are known.

Cost: six minutes on two cores for each algorithm.
Command: python -m bench measure-cpu [--algorithm NAME] [--quick] [--calibration NAME|FILE.json] [KEY=VALUE ...]
python -m bench measure-cpu --algorithm sft data.prompts=answers.jsonl
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.rows import RESULTS, on_ranks, read_rows, train, write
from bench.tables import text_table
from rlhf_spmd.command_line.plans import alternatives, fastest, module_source
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.workload import ResponseLengths, Workload
from rlhf_spmd.runtime.observe.trace import read_chrome

STRATEGIES = ("flattening", "interleaving1", "separation", "reallocation")
SEARCHED = "plan"  # the row of the planner's best plan
SIZES = (4, 8)
TOLERANCE = 0.15  # of the measured seconds
ITERATIONS = 6  # the first one is a warm-up
WORDS = [f"iterations={ITERATIONS}", "num_samples=0"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench measure-cpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 ranks only")
    parser.add_argument("--calibration", default="cpu-2core", help="name or file (default: cpu-2core)")
    parser.add_argument("--algorithm", default="ppo", help="its rows are replaced (default: ppo)")
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of the runs, e.g. data.prompts=FILE")
    parsed = parser.parse_args(arguments)
    words = [*WORDS, *parsed.overrides]
    if parsed.on_ranks:
        write_lengths(parsed.on_ranks, parsed.algorithm, words)
        return 0
    calibration, rows = load_calibration(parsed.calibration), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = ["--algorithm", parsed.algorithm, "--on-ranks", str(folder / "lengths.json")]
        on_ranks(1, ["measure-cpu", *told, *parsed.overrides])
        lengths = json.loads((folder / "lengths.json").read_text(encoding="utf-8"))
        for size in SIZES[:1] if parsed.quick else SIZES:
            for strategy in STRATEGIES:
                try:
                    program = program_of(parsed.algorithm, words, lengths, size, strategy)
                except UserError as error:
                    print(f"{size} ranks, {strategy}: left out: {error}")
                    continue
                rows.append(run_case(folder, calibration, program, parsed.algorithm, strategy, words))
            file = folder / f"plan_{size}.py"
            program = searched(parsed.algorithm, words, lengths, size, calibration, file)
            found = run_case(folder, calibration, program, parsed.algorithm, str(file), words)
            rows.append(found | {"strategy": SEARCHED})
    print(text_table("measure_cpu", rows))
    if not parsed.quick:
        others = [row for row in read_rows(RESULTS / "measure_cpu.jsonl") if row["algorithm"] != parsed.algorithm]
        write("measure_cpu", others + rows)
    ok = all(row["ok"] for row in rows)
    print(json.dumps({"bench": "measure-cpu", "worst_error": max(abs(row["error"]) for row in rows), "ok": ok}))
    return 0 if ok else 1


def workload_of(algorithm: str, words: Sequence[str], lengths: dict[str, list[int]]) -> Workload:
    """Returns the embedded model's iteration with measured lengths."""
    workload = make_workload(presets.load("tiny", words, algorithm=algorithm))
    return replace(workload, forecast_lengths=ResponseLengths.of(lengths["responses"], lengths["prompts"]))


def program_of(
    algorithm: str, words: Sequence[str], lengths: dict[str, list[int]], size: int, strategy: str
) -> Program:
    """Compiles an iteration on this number of ranks. Raises UserError if the strategy does not apply."""
    return load_strategy(strategy).compile(workload_of(algorithm, words, lengths), Cluster.parse(f"1x{size}"), {})


def searched(
    algorithm: str, words: Sequence[str], lengths: dict[str, list[int]], size: int, calibration: Calibration, file: Path
) -> Program:
    """Returns the program of the planner's best plan, whose strategy module it writes to `file`."""
    workload, cluster = workload_of(algorithm, words, lengths), Cluster.parse(f"1x{size}")
    rows, _ = alternatives(workload, cluster, calibration, top=1)
    best = fastest([row for row in rows if row.name.startswith("plan ")], cluster)
    file.write_text(
        module_source(best, presets.load("tiny", words, algorithm=algorithm), calibration, list(words)),
        encoding="utf-8",
    )
    return best.program


def run_case(
    folder: Path, calibration: Calibration, program: Program, algorithm: str, strategy: str, words: Sequence[str]
) -> dict:
    """Runs one strategy once; returns its row, with the forecast of its program."""
    found, size = forecast(program, calibration), program.cluster.num_devices
    told = ["--runs", str(folder), "--algorithm", algorithm, "--strategy", strategy]
    result, metrics = train(size, [*told, *words])
    measured_s = statistics.median(row["iteration_s"] for row in metrics[1:])
    error = found.makespan_s / measured_s - 1
    return {
        "bench": "measure-cpu",
        "algorithm": algorithm,
        "ranks": size,
        "strategy": strategy,
        "calibration": calibration.name,
        "forecast_s": found.makespan_s,
        "measured_s": measured_s,
        "error": error,
        "calls_forecast_s": forecast_calls_s(found),
        "calls_measured_s": measured_calls_s(read_chrome(Path(result["run_dir"]) / "timeline.json")),
        "ok": abs(error) <= TOLERANCE,
    }


def forecast_calls_s(found: Forecast) -> dict[str, float]:
    """Sums the seconds of each call in an iteration, waiting included, on the rank that it holds longest."""
    total: Counter[tuple[str, int]] = Counter()
    for rank, (steps, spans) in enumerate(zip(found.program.instructions, found.times, strict=True)):
        for step, (begin_s, end_s) in zip(steps, spans, strict=True):
            if isinstance(step, Run):
                total[step.call, rank] += end_s - begin_s
    return _largest(total)


def measured_calls_s(
    records: Sequence[Mapping], middle: Callable[[Iterable[float]], float] = statistics.median
) -> dict[str, float]:
    """Returns the same of a timeline: the median of its iterations, or another middle."""
    by_iteration: dict[int, Counter] = defaultdict(Counter)
    for record in records:
        for name, category, begin_s, end_s, iteration, _ in record["spans"]:
            if category == "compute":
                by_iteration[iteration][name, record["rank"]] += end_s - begin_s
    largest = [_largest(total) for total in by_iteration.values()]
    return {call: middle(one[call] for one in largest) for call in largest[0]}


def _largest(total: Counter) -> dict[str, float]:
    return {call: max(s for (name, _), s in total.items() if name == call) for call, _ in total}


def write_lengths(file: Path, algorithm: str, words: Sequence[str]) -> None:
    """Writes the tokens of every prompt and response of the measured iterations, which one rank runs; of given
    responses, those of the file."""
    from rlhf_spmd.plan.cluster import Node
    from rlhf_spmd.runtime.execute.executor import Executor
    from rlhf_spmd.runtime.observe.trace import Tracer
    from rlhf_spmd.runtime.run.forecast_report import given_counts
    from rlhf_spmd.runtime.run.loop import update
    from rlhf_spmd.runtime.run.prepare import make_iteration, prepare
    from rlhf_spmd.runtime.world.world import World

    world = World.discover()
    world.use_device("cpu")
    try:
        config = presets.load("tiny", words, algorithm=algorithm)
        program = load_strategy("flattening").compile(make_workload(config), Cluster((Node(world.size),)), {})
        world.start_torch(program.groups, program.pairs)
        job = prepare(config, program, world)
        executor, lengths = Executor(job, Tracer()), {"prompts": [], "responses": []}
        generates = bool(program.workload.workflow.generate_calls)
        if not generates:
            lengths = dict(zip(lengths, given_counts(job.prompts), strict=True))
        for number in range(config.iterations if generates else 0):
            answers = executor.iteration(make_iteration(job, number))
            update(job, answers)
            for prompt, length in answers[0]["rows"][["prompt", "length"]].tolist() if number else []:
                lengths["prompts"].append(len(job.prompts.prompts[prompt]))
                lengths["responses"].append(length)
        file.write_text(json.dumps(lengths), encoding="utf-8")
        world.shutdown()
    except BaseException as error:
        world.fail(error)
