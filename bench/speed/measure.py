"""The papers' matrix, measured: strategies and sizes of models on one layout, with random weights and responses of one
length, each beside its forecast.

Started without ranks on a machine, or in the batch step of a job: it starts `train` on the ranks of each cell by
--launcher. Strategies have the options that `bench scan` chose for this layout, if it has it. A row is written as its
cell ends, and what has a row is not measured again, so the command continues after a failure; a cell that ends by an
error, as where memory runs out, has a row that says so. Of all iterations but the first --warmup the median counts.

On a cluster: slurm/measure.sh submits a job for each layout.
Cost: a start and --iterations iterations a cell. Command: python -m bench measure --layout 1x8
"""

import argparse
import json
import statistics
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

from bench.rows import OUTPUT, RESULTS, Arguments, fill, on, read_rows
from bench.tables import ended
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.plan.cluster import Cluster

SIZES = ("llama-7b", "llama-13b", "llama-33b", "llama-65b")  # APP's
STRATEGIES = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation", "auto")
TEXT = "On Sunday Dora went to Vienna by boat, and her brother came by train. " * 40
NO_MEMORY = ("ran out of memory", "memory ran out", "GiB, and may use")  # in errors of a rank, a host and a check
OF_SLURM = ("srun", "slurmstepd")  # which tell that ranks have ended, not why
KEY = ("algorithm", "preset", "layout", "strategy", "overrides")  # of a cell


def main(arguments: list[str]) -> int:
    parser = Arguments("measure", __doc__, writes=False)
    parser.add_argument("--layout", default="1x8", metavar="NxG", help="nodes x devices (default: 1x8)")
    parser.add_argument("--preset", nargs="+", default=SIZES, help="sizes of models (default: APP's four)")
    parser.add_argument("--strategy", nargs="+", default=STRATEGIES, help="strategies (default: all but heterogeneous)")
    parser.add_argument("--algorithm", default="ppo", help="default: ppo")
    parser.add_argument("--launcher", help="words that start the ranks (default: mpirun -n RANKS)")
    parser.add_argument("--iterations", type=int, default=3, help="measured iterations of a cell (default: 3)")
    parser.add_argument("--warmup", type=int, default=2, help="iterations before those (default: 2)")
    parser.add_argument("--calibration", help="constants of the forecasts (default: those shipped)")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="of a cell (default: 3600)")
    parser.add_argument("--out", type=Path, default=Path("runs/measure/rows.jsonl"), help="file of rows, added to")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of all cells")
    parsed = parser.parse_args(arguments)
    if parsed.out.suffix != ".jsonl":  # the runs lie in a folder of its name without it
        parser.error(f"--out {parsed.out}: give FILE.jsonl")
    Cluster.parse(parsed.layout)
    loaded = {preset: load(preset, parsed.overrides, algorithm=parsed.algorithm) for preset in parsed.preset}
    OUTPUT.folder = parsed.out.parent
    cells = [
        dict(zip(KEY, (parsed.algorithm, preset, parsed.layout, strategy, parsed.overrides), strict=True))
        for preset, strategy in product(loaded, parsed.strategy)
    ]
    every = fill(parsed.out.stem, cells, lambda cell: measure(cell, loaded[cell["preset"]], parsed))
    rows = [row for row in every if row["layout"] == parsed.layout]
    return ended("measure", rows, ok=any(not row["why_not"] for row in rows), out=str(parsed.out))


def measure(cell: dict[str, Any], config: Config, parsed: argparse.Namespace) -> dict[str, Any]:
    """Runs a cell. Returns its numbers, or why there are none."""
    folder = parsed.out.with_suffix("")  # of these rows alone: the jobs of other layouts write beside it
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.txt"
    prompts.write_text((TEXT + "\n") * config.rollout_batch, encoding="utf-8")
    options = chosen_options(cell)
    words = [
        *("--algorithm", cell["algorithm"], "--preset", cell["preset"], "--strategy", cell["strategy"]),
        *("--random-weights", "--json", "--runs", str(folder)),
        *(["--calibration", parsed.calibration] if parsed.calibration else []),
        *(f"strategy.{name}={option_text(value)}" for name, value in options.items()),
        *(f"data.prompts={prompts}", "data.long_prompts=truncate"),
        f"generation.min_new_tokens={config.generation.max_new_tokens}",
        *(f"iterations={parsed.warmup + parsed.iterations}", "checkpoint.every=0", "num_samples=0"),
        *cell["overrides"],
    ]
    ranks = on(Cluster.parse(cell["layout"]).num_devices, parsed.launcher)
    command = [*ranks, "rlhf_spmd", "train", *words]
    nothing = {
        "bench": "measure",
        "options": options,
        "why_not": "",
        "out_of_memory": False,
        "samples_per_s": None,
        "iteration_s": None,
    }
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=parsed.limit, check=False)
    except subprocess.TimeoutExpired:
        return nothing | {"why_not": f"it took longer than {parsed.limit:g} s"}
    if done.returncode:
        lines = (done.stderr + done.stdout).splitlines()
        said = [line for line in lines if "error:" in line and not line.startswith(OF_SLURM)]
        why = said[-1].partition("error: ")[2] if said else f"it ended with status {done.returncode}"
        return nothing | {"why_not": why, "out_of_memory": any(text in why for text in NO_MEMORY)}
    run = Path(json.loads(done.stdout.strip().splitlines()[-1])["run_dir"])
    return nothing | numbers_of(run, config, parsed.warmup)


def numbers_of(run: Path, config: Config, warmup: int) -> dict[str, Any]:
    """Returns the numbers of a run: medians over its iterations without the first ones, and its forecast."""
    rows = read_rows(run / "metrics.jsonl")[warmup:]
    names = [name for name in ("iteration_s", "generate_s", "tflops", "mfu", "peak_bytes") if name in rows[0]]
    numbers: dict[str, Any] = {name: statistics.median(row[name] for row in rows) for name in names}
    numbers["samples_per_s"] = make_workload(config).num_sequences / numbers["iteration_s"]
    compared = json.loads((run / "forecast.json").read_text(encoding="utf-8"))
    numbers["calibration"], numbers["why_no_forecast"] = compared["calibration"], compared["why_not"]
    numbers["calls"] = {row.pop("call"): row for row in compared["rows"]}
    return numbers | {"forecast_s": numbers["calls"]["iteration"]["forecast_s"]}


def option_text(value: Any) -> str:
    """Returns the value of an option as the command line takes it."""
    return ",".join(value) if isinstance(value, list) else str(value).lower()


def chosen_options(cell: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with which `bench scan` forecasts a cell; none where it has no such cell."""
    place = {name: cell[name] for name in ("algorithm", "preset", "layout", "strategy")}
    rows = [row for row in read_rows(RESULTS / "scan.jsonl") if place.items() <= row.items() and not row["why_not"]]
    return rows[0]["options"] if rows and not cell["overrides"] else {}
