"""What subcommands on the ranks of an MPI world do before they begin: they compare options and programs, and start
torch."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_spmd.command_line.words import load_config
from rlhf_spmd.config import options as configs
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import calibration_for, with_reserve
from rlhf_spmd.machines.cluster_file import on_machines, read_cluster
from rlhf_spmd.pages.strategy import Strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.program.transfers import communicators
from rlhf_spmd.runtime.profile.machine import free_memory
from rlhf_spmd.runtime.world.devices import type_of


def on_device(world: Any, parsed: argparse.Namespace, config: configs.Config) -> configs.Config:
    """Chooses this rank's device, and returns the configuration for it. Collective; raises UserError."""
    world.use_device(config.device)
    with world.together("reading the configuration for this device"):
        return load_config(parsed, on_gpu=world.computes.index is not None)


def compare_options(world: Any, config: configs.Config, about: Mapping[str, str] | None = None) -> None:
    """Compares the options among the ranks. Collective; raises UserError.

    about: further facts to compare, by name.
    """
    with world.together("comparing the configuration"):
        options = {f"option {key}": value for key, value in configs.leaves(config).items()}
        world.agree("the start", options | {"the algorithm": config.algorithm.source} | dict(about or {}))


def compare_programs(world: Any, strategy: Strategy, programs: Sequence[Program]) -> None:
    """Compares compiled programs among the ranks. Collective; raises UserError."""
    with world.together("comparing the program"):
        facts = {f"program {number}": program.fingerprint for number, program in enumerate(programs)}
        world.agree("the start", facts | {"the strategy": strategy.source})


def start_torch(world: Any, config: configs.Config, programs: Sequence[Program]) -> None:
    """Starts torch for programs. Collective."""
    world.set_deadline(config.deadline_s)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch demands it of OptimizerStep.within
    world.start_torch(*communicators(programs))


def cluster_of_run(
    world: Any, config: configs.Config, path: str | None, calibration: str | None = None, *, required: bool = False
) -> tuple[Cluster, Calibration | None]:
    """Returns the cluster of this world, less the reserve, and its calibration. Raises UserError, also for a run
    without weights.

    path: file of the cluster.
    calibration, required: see calibration_for.
    """
    if not config.main_folder:
        raise UserError(f"preset {config.preset} has no weights; pass --model FOLDER")
    cluster = cluster_of(world, path, config.device_type)
    if world.computes.index is not None:
        cluster = cluster.with_hosts(world.allgather(free_memory(), "the free memory of hosts"))
    constants = calibration_for(calibration, cluster, required=required)
    return with_reserve(cluster, config.reserve, constants), constants


def cluster_of(world: Any, path: str | None, device_type: str) -> Cluster:
    """Returns the cluster of this world: as a file describes it, else nodes with the devices that the ranks found.
    device_type: the option.
    """
    if path:
        return on_machines(read_cluster(path), world.nodes, path)
    nodes = []
    for node in range(world.num_nodes):
        of_node = [device for device, its_node in zip(world.chosen, world.nodes, strict=True) if its_node == node]
        first = min(of_node, key=lambda device: device.num_bytes or 0)
        if first.index is None:
            nodes.append(Node(len(of_node), "cpu", None))
            continue
        kind = type_of(first, device_type)
        most = max(device.num_ranks for device in of_node)  # ranks that share a device have a part of it each
        nodes.append(Node(len(of_node), kind, first.num_bytes // most))
    return Cluster(tuple(nodes))
