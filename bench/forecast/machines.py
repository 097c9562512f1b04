"""Are forecasts right on machines other than the calibration's? The demo on machines that this one can imitate.

Slower ones: libraries kept to AVX2 or to SSE, the ranks kept on one core, a control group with a quota of a core and a
part, and SSE on one core. Each runs the demo (15 iterations of the embedded model under separation on four ranks),
which ends with its forecast by `cpu-2core`, scaled by a probe (rlhf_spmd/runtime/profile/calibration_probe.py). The
machines take turns. A row has the medians of measured and forecast seconds and of their ratios, with and without
scaling. A quota needs the right to make control groups (root); without it that machine is left out.

Cost: 15 minutes on two cores. Command: python -m bench machines [RUNS] [--iterations N]
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.rows import train, write
from bench.tables import text_table

RANKS, STRATEGY, CALIBRATION = 4, "separation", "cpu-2core"
RUNS, ITERATIONS = 5, 15
TOLERANCE = 0.25  # of the measured seconds
ENOUGH = 3  # machines that must be within it, this one as it is not counted
CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
# MKL asks for Intel's own variable on Intel's processors only; MKL_CBWR also counts on others
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
AVX2 |= {"MKL_CBWR": "AVX2"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
SSE |= {"MKL_CBWR": "COMPATIBLE"}


@dataclass(frozen=True)
class Imitated:
    """A machine. variables: of the environment. cores: that the ranks may use. quota: cores' worth of time."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    cores: int | None = None
    quota: float | None = None


MACHINES = (
    Imitated("as it is"),
    Imitated("AVX2", AVX2),
    Imitated("SSE", SSE),
    Imitated("one core", cores=1),
    Imitated("quota of 1.2 cores", quota=1.2),
    Imitated("SSE, one core", SSE, cores=1),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench machines", description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=RUNS, help=f"of each machine (default: {RUNS})")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"of each run (default: {ITERATIONS})")
    parsed = parser.parse_args(arguments)
    found: list[tuple[Imitated, list[dict]]] = [(one, []) for one in MACHINES if one.quota is None or can_limit()]
    with tempfile.TemporaryDirectory(prefix="machines_") as name:
        for _ in range(parsed.runs):
            for machine, runs in found:
                runs.append(run(machine, Path(name), parsed.iterations))
                show(machine, runs[-1])
    rows = [row_of(machine, runs) for machine, runs in found]
    if (parsed.runs, parsed.iterations) == (RUNS, ITERATIONS):
        write("machines", rows)
    print(text_table("machines", rows))
    imitated = [row for row in rows if row["machine"] != MACHINES[0].name]
    within = sum(row["ok"] for row in imitated)
    ok = within >= ENOUGH
    print(json.dumps({"bench": "machines", "machines": len(imitated), "within_25_percent": within, "ok": ok}))
    return 0 if ok else 1


def run(machine: Imitated, folder: Path, iterations: int) -> dict:
    """One run of the demo: measurements and forecast."""
    words = ["--preset", "tiny", "--strategy", STRATEGY, "--calibration", CALIBRATION, "--runs", str(folder)]
    words += [f"iterations={iterations}", "num_samples=0"]
    with entering(machine) as enter:
        result, _ = train(RANKS, words, environment={**os.environ, **machine.variables}, enter=enter)
    return json.loads((Path(result["run_dir"]) / "forecast.json").read_text(encoding="utf-8"))


@contextmanager
def entering(machine: Imitated) -> Iterator[Callable[[], None]]:
    """Moves this process, and so its children, to an imitated machine."""
    cores = sorted(os.sched_getaffinity(0))[: machine.cores]
    if machine.quota is None:
        yield lambda: os.sched_setaffinity(0, cores)
        return
    group, is_second = cgroup()
    group.mkdir()
    try:
        limit_us = round(machine.quota * PERIOD_US)
        if is_second:
            (group / "cpu.max").write_text(f"{limit_us} {PERIOD_US}", encoding="utf-8")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="utf-8")
            (group / "cpu.cfs_quota_us").write_text(str(limit_us), encoding="utf-8")
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
    finally:
        group.rmdir()


def cgroup() -> tuple[Path, bool]:
    """The folder of a control group of our own, and whether it is of version 2."""
    is_second = (CGROUPS / "cgroup.controllers").exists()
    return (CGROUPS if is_second else CGROUPS / "cpu") / f"rlhf_spmd_bench_{os.getpid()}", is_second


def can_limit() -> bool:
    """Whether control groups can be made here."""
    group, _ = cgroup()
    try:
        group.mkdir()
        group.rmdir()
    except OSError:
        return False
    return True


def row_of(machine: Imitated, runs: Sequence[Mapping]) -> dict:
    """The medians of some runs on one machine."""
    whole = [one["rows"][-1] for one in runs]
    ratios = [one["forecast_s"] / one["measured_s"] for one in whole]
    as_given = [run["as_given_s"] / one["measured_s"] for run, one in zip(runs, whole, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "bench": "machines",
        "machine": machine.name,
        "ranks": RANKS,
        "strategy": STRATEGY,
        "calibration": CALIBRATION,
        "measured_s": statistics.median(one["measured_s"] for one in whole),
        "forecast_s": statistics.median(one["forecast_s"] for one in whole),
        "as_given_s": statistics.median(run["as_given_s"] for run in runs),
        "ratio": ratio,
        "as_given_ratio": statistics.median(as_given),
        "ratios": ratios,
        "as_given_ratios": as_given,
        "scales": [run["scale"] for run in runs],
        "calls": [{one["call"]: one["forecast_s"] / one["measured_s"] for one in run["rows"]} for run in runs],
        "probe_s": max(run["probe_s"] for run in runs),
        "ok": abs(ratio - 1) <= TOLERANCE,
    }


def show(machine: Imitated, found: Mapping) -> None:
    """A run for people, as soon as there is one."""
    whole, scale = found["rows"][-1], found["scale"]
    seconds = f"measured {whole['measured_s']:.2f} s, forecast {whole['forecast_s']:.2f} s"
    factors = ", ".join(f"{name} {value:.2f}" for name, value in scale.items()) if scale else found["why_not"]
    print(f"{machine.name:<20} {seconds}, not scaled {found['as_given_s']:.2f} s; {factors}", flush=True)
    calls = (f"{one['call']} {one['forecast_s'] / one['measured_s']:.2f}" for one in found["rows"])
    print(f"{'':<20} {', '.join(calls)}", flush=True)
