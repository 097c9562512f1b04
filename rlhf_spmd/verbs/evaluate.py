"""The evaluate verb on the ranks of an MPI world: compares options and program, then evaluates a model once."""

import argparse
import json
from typing import Any

from rlhf_spmd.command_line.checks import evaluate_of
from rlhf_spmd.command_line.clusters import cluster_of
from rlhf_spmd.command_line.words import DEFAULT_STRATEGY, load_config
from rlhf_spmd.config import options as configs
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.cluster_calibration import calibration_for, with_reserve
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.program.instructions import communicators
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.runtime.world.devices import check_program


def run(world: Any, parsed: argparse.Namespace) -> None:
    """Reads and compares everything that the ranks must agree on, evaluates, and prints the metrics on rank 0. Raises
    UserError."""
    with world.together("reading the configuration"):
        config = load_config(parsed)
        if not config.eval.prompts:
            raise UserError("there are no prompts to evaluate: give eval.prompts=FILE (.jsonl, .parquet or .txt)")
        strategy = load_strategy(parsed.strategy or DEFAULT_STRATEGY)
    world.use_device(config.device)
    with world.together("reading the configuration for this device"):
        config = load_config(parsed, on_gpu=world.computes.index is not None)
    with world.together("comparing the configuration"):
        options = {f"option {key}": value for key, value in configs.leaves(config).items()}
        world.agree("the start", options | {"the algorithm": config.algorithm.source})
    with world.together("compiling the program"):
        if not config.main_folder:
            raise UserError(f"preset {config.preset} has no weights; pass --model FOLDER")
        cluster = cluster_of(world, parsed.cluster, config.device_type)
        cluster = with_reserve(cluster, config.reserve, calibration_for(None, cluster))
        training = strategy.compile(configs.make_workload(config), cluster, config.strategy)
        program = evaluate_of(config)(training)
        assert program is not None, "there are prompts"
        if errors := [str(finding) for finding in check(program) if finding.severity == "error"]:
            raise UserError(f"strategy {strategy.name} is refused by check: {'; '.join(errors[:3])}")
        check_program(world.computes, program)
    with world.together("comparing the program"):
        world.agree("the start", {"the program": program.fingerprint, "the strategy": strategy.source})
    world.set_deadline(config.deadline_s)
    world.start_torch(*communicators([program]))

    from rlhf_spmd.runtime.run.evaluation import evaluate_once  # torch, which start_torch has prepared for

    metrics = evaluate_once(config, program, world, parsed.after)
    if world.rank == 0:
        shown = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for name, value in shown.items():
            print(f"{name:24} {value:.6g}")
        print(json.dumps(metrics | {"ok": True}))
