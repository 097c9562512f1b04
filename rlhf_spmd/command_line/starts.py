"""The start of subcommands that run calls of a training program without training: evaluate and precompute."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_spmd.command_line.clusters import cluster_of
from rlhf_spmd.config import options as configs
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.cluster_calibration import calibration_for, with_reserve
from rlhf_spmd.pages.strategy import Strategy
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.program.transfers import communicators
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.runtime.world.devices import check_program


def start_without_training(
    world: Any,
    parsed: argparse.Namespace,
    config: configs.Config,
    strategy: Strategy,
    make: Callable[[Program], Program],
    about: Mapping[str, str] | None = None,
) -> Program:
    """Compares options and program among the ranks, starts torch, and returns the program. Collective; raises
    UserError.

    make: makes it from that of training.
    about: further facts to compare, by name.
    """
    with world.together("comparing the configuration"):
        options = {f"option {key}": value for key, value in configs.leaves(config).items()}
        world.agree("the start", options | {"the algorithm": config.algorithm.source} | dict(about or {}))
    with world.together("compiling the program"):
        if not config.main_folder:
            raise UserError(f"preset {config.preset} has no weights; pass --model FOLDER")
        cluster = cluster_of(world, parsed.cluster, config.device_type)
        cluster = with_reserve(cluster, config.reserve, calibration_for(None, cluster))
        program = make(strategy.compile(configs.make_workload(config), cluster, config.strategy))
        if errors := [str(finding) for finding in check(program) if finding.severity == "error"]:
            raise UserError(f"strategy {strategy.name} is refused by check: {'; '.join(errors[:3])}")
        check_program(world.computes, program)
    with world.together("comparing the program"):
        world.agree("the start", {"the program": program.fingerprint, "the strategy": strategy.source})
    world.set_deadline(config.deadline_s)
    world.start_torch(*communicators([program]))
    return program
