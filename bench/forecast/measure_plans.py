"""Is the planner's choice the fastest where it can be measured? Its plans and all shipped strategies on CPU ranks.

Three workloads of the embedded model on 4 and 8 ranks: short responses, long ones, a critic that is larger than the
actor. For each the machine is calibrated with eight ranks (`profile`). Then all ranks of one world hold the three that
`plan --measure-top 3` measures and every shipped strategy, and run an iteration of each in turn. The plan is the one of
the three that is fastest in the first rounds; what is compared are the medians of the five rounds behind them. Lengths
of prompts and responses are taken from one run of these iterations, whose tokens are those of all (numbers do not
depend on the placement). Run it on a machine with nothing else to do.

Cost: 35 minutes on two cores. Command: python -m bench measure-plans [--case NAME ...] [--calibration FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.forecast.measure_cpu import workload_of
from bench.rows import REPOSITORY, RESULTS, on_ranks, read_rows, write
from bench.tables import text_table
from rlhf_spmd.command_line.plans import KEEP, alternatives, module_source, most_promising, strategy_of
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.program.transfers import communicators
from rlhf_spmd.plan.workload import Workload

SIZES = (4, 8)
TOP = 3  # plans that are run
CHOOSING, ROUNDS = 6, 5  # the first of the choosing rounds warms up
BEHIND, TOLERANCE = 0.05, 0.20  # of the fastest one's seconds; of the plan's own
CRITIC = {"hidden_size": 256, "intermediate_size": 704, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4}
LONG = ("generation.max_new_tokens=160", "generation.min_new_tokens=120", "rollout_batch=64")
WORKLOADS: dict[str, tuple[str, ...]] = {"short": (), "long": LONG, "large critic": ("models.critic={critic}",)}


@dataclass(frozen=True, slots=True)
class Case:
    """What is run on the ranks: (name, source of the strategy module, forecast seconds) of each program."""

    told: list[tuple[str, str, float]]
    num_plans: int  # the first ones, of which one is chosen


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench measure-plans", description=__doc__)
    parser.add_argument("--case", nargs="*", default=list(WORKLOADS), choices=WORKLOADS, help="default: all")
    parser.add_argument("--calibration", help="a file of `profile` for these cases, instead of one made for each")
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.on_ranks:
        measure_on_ranks(parsed.on_ranks)
        return 0
    num_ok, path = 0, RESULTS / "measure_plans.jsonl"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_critic(folder / "critic")
        for case in parsed.case:
            words = [word.format(critic=folder / "critic") for word in WORKLOADS[case]]
            words += [f"iterations={CHOOSING + ROUNDS}", "num_samples=0"]
            on_ranks(1, ["measure-cpu", "--on-ranks", str(folder / "lengths.json"), *words])
            lengths = json.loads((folder / "lengths.json").read_text(encoding="utf-8"))
            file = Path(parsed.calibration or folder / f"{case.replace(' ', '_')}.json")
            if not parsed.calibration:
                profile(file, words)
            calibration = load_calibration(str(file))
            rows: list[dict[str, Any]] = []
            for size in SIZES:
                found = planned(words, lengths, size, calibration)
                seconds = run_on_ranks(folder / "case.json", found, words, size)
                about = {"bench": "measure-plans", "workload": case, "ranks": size}
                rows += [about | row for row in rows_of(found, seconds)]
                print(text_table("measure_plans", rows[-len(found.told) :]), flush=True)
            others = [row for row in read_rows(path) if row["workload"] != case] if path.exists() else []
            write("measure_plans", others + rows)
            num_ok += sum(bool(row["ok"]) for row in rows if row["chosen"])
    num = len(parsed.case) * len(SIZES)
    print(json.dumps({"bench": "measure-plans", "cases": num, "kept": num_ok, "ok": num_ok == num}))
    return 0 if num_ok == num else 1


def write_critic(folder: Path) -> None:
    """A critic with random weights that is five times as large as the actor, and its tokenizer."""
    from rlhf_spmd import embedded
    from rlhf_spmd.model.hf import load_model, load_tokenizer, save_state
    from rlhf_spmd.model.transformer import Transformer

    actor = str(embedded.path_of("actor"))
    config = replace(load_model(actor, head="lm").config, head_dim=32, **CRITIC)
    state = Transformer(config, head="scalar", seed=0).state_dict()
    save_state(state, config, "scalar", folder, tokenizer=load_tokenizer(actor))


def profile(file: Path, words: Sequence[str]) -> None:
    """Calibrates this machine for a workload."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    command = [mpirun, "-n", str(max(SIZES)), sys.executable, "-m", "rlhf_spmd", "profile", "--out", str(file), *words]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def planned(words: Sequence[str], lengths: dict[str, list[int]], size: int, calibration: Calibration) -> Case:
    """The most promising plans for an iteration with these lengths, then the other shipped strategies that fit."""
    workload: Workload = workload_of("ppo", words, lengths)
    cluster, config = Cluster.parse(f"1x{size}"), presets.load("tiny", words)
    rows, found = alternatives(workload, cluster, calibration, keep=KEEP)
    plans = most_promising(rows, TOP)
    shipped = [row for row in rows[len(found.plans) :] if row.forecast and row not in plans]
    told = [
        (row.name, module_source(row, config, calibration, list(words)), row.forecast.makespan_s)
        for row in plans + shipped
    ]
    return Case(told, len(plans))


def run_on_ranks(file: Path, case: Case, words: Sequence[str], size: int) -> list[list[float]]:
    """Seconds of each round of each program."""
    file.write_text(json.dumps({"told": [one[:2] for one in case.told], "words": list(words)}), encoding="utf-8")
    on_ranks(size, ["measure-plans", "--on-ranks", str(file)])
    return json.loads(file.with_suffix(".seconds").read_text(encoding="utf-8"))


def measure_on_ranks(file: Path) -> None:
    """What each rank does: holds all programs, and runs an iteration of each in turn."""
    from rlhf_spmd.runtime.world.world import World
    from rlhf_spmd.verbs.plan import iteration_runner

    world = World.discover()
    world.use_device("cpu")
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        config = presets.load("tiny", given["words"])
        workload, cluster = make_workload(config), Cluster.parse(f"1x{world.size}")
        programs = [strategy_of(name, source).compile(workload, cluster, {}) for name, source in given["told"]]
        world.start_torch(*communicators(programs))
        runs = [iteration_runner(config, program, world) for program in programs]
        rounds = [[run(number) for run in runs] for number in range(CHOOSING + ROUNDS)]
        if world.rank == 0:
            seconds = [list(one) for one in zip(*rounds, strict=True)]
            file.with_suffix(".seconds").write_text(json.dumps(seconds), encoding="utf-8")
        world.shutdown()
    except BaseException as error:
        world.fail(error)


def rows_of(case: Case, seconds: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """A row for each program. The chosen plan's is ok if it keeps what is promised."""
    chosen = min(range(case.num_plans), key=lambda at: statistics.median(seconds[at][1:CHOOSING]))
    medians = [statistics.median(one[CHOOSING:]) for one in seconds]
    rows: list[dict[str, Any]] = []
    for at, ((name, _, forecast_s), measured_s) in enumerate(zip(case.told, medians, strict=True)):
        row: Mapping[str, Any] = {
            "plan": name,
            "chosen": at == chosen,
            "forecast_s": forecast_s,
            "measured_s": measured_s,
            "rounds_s": list(seconds[at][CHOOSING:]),
            "error": forecast_s / measured_s - 1,
            "behind": measured_s / min(medians) - 1,
        }
        kept = row["behind"] <= BEHIND and abs(row["error"]) <= TOLERANCE
        rows.append({**row, "ok": kept if at == chosen else None})
    return rows
