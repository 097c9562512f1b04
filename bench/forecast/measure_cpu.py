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
python -m bench measure-cpu --algorithm grpo --mixture
python -m bench measure-cpu --algorithm sft data.prompts=answers.jsonl
"""

import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.rows import Arguments, rows_so_far, train, write
from bench.tables import ended
from rlhf_spmd import embedded
from rlhf_spmd.command_line.plans import alternatives, fastest, module_source
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.workload import ResponseLengths, Workload
from rlhf_spmd.runtime.world.trace import read_chrome

STRATEGIES = ("flattening", "interleaving1", "separation", "reallocation")
SEARCHED = "plan"  # the row of the planner's best plan
SIZES = (4, 8)
TOLERANCE = 0.15  # of the measured seconds
ITERATIONS = 6  # the first one is a warm-up
WORDS = [f"iterations={ITERATIONS}", "num_samples=0"]


def main(arguments: list[str]) -> int:
    parser = Arguments("measure-cpu", __doc__)
    parser.add_argument("--quick", action="store_true", help="4 ranks only")
    parser.add_argument("--calibration", default="cpu-2core", help="name or file (default: cpu-2core)")
    parser.add_argument("--algorithm", default="ppo", help="its rows are replaced (default: ppo)")
    parser.add_argument("--mixture", action="store_true", help="of the embedded mixture of experts")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of the runs, e.g. data.prompts=FILE")
    parsed = parser.parse_args(arguments)
    calibration, rows, words = load_calibration(parsed.calibration), [], [*WORDS, *parsed.overrides]
    preset, model = ("arithmetic", str(embedded.path_of("mixture/actor"))) if parsed.mixture else ("tiny", None)
    config = presets.load(preset, words, model, algorithm=parsed.algorithm)
    workload = replace(make_workload(config), forecast_lengths=lengths_of(config))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = ["--runs", name, "--algorithm", parsed.algorithm, "--preset", preset, *words]
        told += ["--model", model] if model else []
        for size in SIZES[:1] if parsed.quick else SIZES:
            cluster = Cluster.parse(f"1x{size}")
            for strategy in STRATEGIES:
                try:
                    program = load_strategy(strategy).compile(workload, cluster, {})
                except UserError as error:
                    print(f"{size} ranks, {strategy}: left out: {error}")
                    continue
                rows.append(run_case(calibration, program, strategy, told))
            program, source = searched(config, workload, cluster, calibration, words)
            (folder / f"plan_{size}.py").write_text(source, encoding="utf-8")
            found = run_case(calibration, program, str(folder / f"plan_{size}.py"), told)
            rows.append(found | {"strategy": SEARCHED})
    label = parsed.algorithm + " of a mixture" * parsed.mixture
    rows = [row | {"algorithm": label} for row in rows]
    if not parsed.quick:
        others = [row for row in rows_so_far("measure_cpu") if row["algorithm"] != label]
        write("measure_cpu", others + rows)
    return ended("measure-cpu", rows, worst_error=max(abs(row["error"]) for row in rows))


def lengths_of(config: Config) -> ResponseLengths:
    """Returns the tokens of every prompt and response of the measured iterations, which this process runs as one rank;
    of given responses, those of the file."""
    from rlhf_spmd.runtime.run.forecast_report import given_counts
    from tests.runs import RunOf

    run = RunOf(config)
    prompts = run.job.prompts.prompts
    if not run.program.workload.workflow.generate_calls:
        num_prompt, num_response = given_counts(run.job.prompts)
        return ResponseLengths.of(num_response, num_prompt)
    run.iterations()
    responses = [drawn for iteration in run.responses[1:] for drawn in iteration.items()]
    return ResponseLengths.of(
        [len(tokens) for _, tokens in responses], [len(prompts[one]) for (one, _), _ in responses]
    )


def searched(
    config: Config, workload: Workload, cluster: Cluster, calibration: Calibration, words: Sequence[str]
) -> tuple[Program, str]:
    """Returns the program of the planner's best plan, and the source of its strategy module."""
    rows, *_ = alternatives(workload, cluster, calibration, top=1)
    best = fastest([row for row in rows if row.name.startswith("plan ")], cluster)
    return best.program, module_source(best, config, calibration, list(words))


def run_case(calibration: Calibration, program: Program, strategy: str, told: Sequence[str]) -> dict:
    """Runs one strategy once; returns its row, with the forecast of its program."""
    found, size = forecast(program, calibration), program.cluster.num_devices
    result, metrics = train(size, ["--strategy", strategy, *told])
    measured_s = statistics.median(row["iteration_s"] for row in metrics[1:])
    error = found.makespan_s / measured_s - 1
    return {
        "bench": "measure-cpu",
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
