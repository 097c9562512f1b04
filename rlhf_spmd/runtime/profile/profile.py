"""The profile subcommand: measures, on the ranks of this world, the constants and tables for forecasts.

All ranks work at the same time, because cores that share memory also slow each other down in training. Seconds are
those of a rank with its own core; the simulator models shared cores. Torch is imported late, after `start_torch`.
"""

import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.files import progress
from rlhf_spmd.plan.cost.calibration import (
    HOST_LINK,
    OF_DEVICE,
    OF_LINKS,
    Calibration,
    Device,
    Link,
    Measured,
    fit_link,
)
from rlhf_spmd.plan.layout import HOST, Layout, group_name
from rlhf_spmd.runtime.profile.clock import BUDGET_S, Clock, last_level_cache_bytes
from rlhf_spmd.runtime.profile.machine import machines, processor
from rlhf_spmd.runtime.profile.measured_sizes import Grid
from rlhf_spmd.runtime.world.devices import type_of
from rlhf_spmd.runtime.world.world import World

PACKAGES = ("rlhf-spmd", "torch")


def groups_of(world: World, tps: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """Returns the groups for the measurements: adjacent ranks in tp slices, the first n ranks, and one rank of each
    node."""
    named = [Layout.grid_of(range(world.size), tp=tp) for tp in tps]
    tensor = [layout.tensor_ranks(rank) for layout in named for rank in layout.ranks]
    return {group_name(ranks): ranks for ranks in (*tensor, *inside_ranks(world), *between_ranks(world))}


def inside_ranks(world: World) -> list[tuple[int, ...]]:
    """Returns 2, 4, 8, ... and all ranks of the first node."""
    ranks = tuple(rank for rank, node in enumerate(world.nodes) if node == 0)
    sizes = [size for size in (2**power for power in range(1, 12)) if size < len(ranks)]
    return [ranks[:size] for size in (*sizes, len(ranks)) if size > 1]


def between_ranks(world: World) -> list[tuple[int, ...]]:
    """Returns the first rank of every node."""
    return [tuple(world.nodes.index(node) for node in range(world.num_nodes))] if world.num_nodes > 1 else []


def host_group(world: World) -> dict[str, tuple[int, ...]]:
    """Returns the group for messages through host memory, if GPUs of the first node need one."""
    ranks = tuple(range(world.size))
    return {group_name(ranks, HOST): ranks} if world.computes.index is not None and inside_ranks(world) else {}


def profile(
    world: World, config: Config, *, name: str, grid: Grid | None = None, budget_s: float = BUDGET_S
) -> Calibration:
    """Measures the calibration of this machine for the models of a configuration, the same on every rank. Starts torch.
    Collective.

    grid: the sizes to measure, by default those of the configuration's batches.
    budget_s: per measurement.
    """
    with world.together("choosing what to measure"):
        workload = make_workload(config)
        grid = grid or Grid.of(workload, world.size, world.nodes.count(world.node))
    world.start_torch(groups_of(world, grid.tps) | host_group(world))

    import torch

    from rlhf_spmd.runtime.profile.hardware import constants, host_messages, links
    from rlhf_spmd.runtime.profile.model_timings import measure_shape
    from rlhf_spmd.runtime.profile.products import choose

    choose(world, config, workload.models.values())
    kind = type_of(world.computes, config.device_type)
    machine = machines(world)[world.rank]
    num_workers = machine.cores / machine.threads if world.computes.index is None else None
    given = [shape for shape in workload.models.values() if shape]
    shapes = dict.fromkeys(replace(shape, num_layers=0, num_dense_layers=0, adapters=None) for shape in given)
    wait = torch.cuda.synchronize if world.computes.index is not None else lambda: None
    others = torch.zeros(2 * last_level_cache_bytes(world.computes.index) // 4, device=world.device)
    clock = Clock(world, num_workers, wait, partial(others.add_, 1), budget_s)
    progress.say(lambda: f"measuring this machine, {clock.num_points} measurements so far")  # on rank 0
    tables: list[Measured] = []
    for shape in shapes:
        for tp in (tp for tp in grid.tps if shape.most_tp(tp) == tp):
            tables.append(measure_shape(clock, config, workload, grid, shape, tp))
    device_constants = constants(clock, workload.param_bytes)
    inside, between = (links(clock, ranks) for ranks in (inside_ranks(world), between_ranks(world)))
    host = host_messages(clock, inside_ranks(world)[0]) if host_group(world) else []
    smallest = tables[0]
    device = Device(
        **device_constants,
        layer_s=smallest.forward.tables[0].layer.seconds[0],
        decode_layer_s=0.0 if smallest.decode is None else smallest.decode.layer.seconds[0],
        num_workers=num_workers,
        measured=tuple(tables),
    )
    inside_link = fit_link(inside) if inside else Link(device_constants["memory_bytes_per_s"], 0.0)
    return Calibration(
        name,
        {kind: device},
        inside_link,
        fit_link(between) if between else inside_link,
        provenance=provenance(world, config, torch.get_num_threads(), bool(between)),
        machine=machine,
        sources=sources_of(device, {"inside": bool(inside), "between": bool(between), "host": bool(host)}),
        host=fit_link(host) if host else HOST_LINK,
    )


def sources_of(device: Device, links: Mapping[str, bool]) -> dict[str, str]:
    """Returns where each constant comes from. An all-reduce of a decode step is assumed to take what its link does.

    links: whether each was measured.
    """
    sources = {name: "measured" for name in OF_DEVICE if getattr(device, name) is not None}
    sources |= {name: "measured" if links[name.partition(".")[0]] else "assumed" for name in OF_LINKS}
    return sources | {"decode_reduce_s": "assumed"}


def provenance(world: World, config: Config, num_threads: int, has_between: bool) -> str:
    """Returns machine, versions, date, and missing measurements."""
    versions = ", ".join(f"{package} {version_of(package)}" for package in PACKAGES)
    ranks = f"{world.size} ranks on {world.num_nodes} node{'s' if world.num_nodes > 1 else ''}, {num_threads} thread"
    ranks += "s each" if num_threads > 1 else " each"
    device = "" if world.computes.index is None else f"{world.computes.name}, "
    missing = "" if has_between else " Nothing was measured between nodes: `between` repeats `inside`."
    return (
        f"Measured on {time.strftime('%Y-%m-%d')} by `python -m rlhf_spmd profile --preset {config.preset}` with "
        f"{ranks}, {config.dtype}, on {device}{processor()}; "
        f"Python {platform.python_version()}, {versions}.{missing}"
    )


def version_of(package: str) -> str:
    """Returns the version of a package, if installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "from its source tree"


def summary(calibration: Calibration) -> str:
    """Returns a readable summary of a calibration."""
    lines = []
    for kind, device in calibration.devices.items():
        lines.append(f"{kind}: {device.matrix_flops:.3g} FLOP/s, memory {device.memory_bytes_per_s:.3g} B/s")
        for table in device.measured:
            forward, train = table.forward.tables[-1].layer, table.train.tables[-1].layer
            head = "scalar" if table.shape.scalar_head else "lm"
            lines.append(
                f"  hidden {table.shape.hidden_size}, {head} head, tp {table.tp}: a layer with "
                f"{forward.amounts[-1]:.0f} tokens {1e3 * forward.seconds[-1]:.2f} ms forward, "
                f"{1e3 * train.seconds[-1]:.2f} ms in training"
            )
    for what, link in (("inside", calibration.inside), ("between", calibration.between)):
        lines.append(f"{what} nodes: {link.latency_s * 1e6:.0f} us, {link.bytes_per_s:.3g} B/s")
    return "\n".join(lines)


def last_line(calibration: Calibration, path: str, wall_s: float) -> Mapping[str, object]:
    """Returns the values of the last line of standard output."""
    return {
        "calibration": path,
        "devices": list(calibration.devices),
        "tables": sum(len(device.measured) for device in calibration.devices.values()),
        "inside_latency_s": calibration.inside.latency_s,
        "inside_bytes_per_s": calibration.inside.bytes_per_s,
        "wall_s": round(wall_s, 1),
        "ok": True,
    }
