"""The profile verb: measures, on the ranks of this world, the constants and tables that forecasts are made of.

All ranks work at the same time, because cores that share memory slow each other down while they train, too; seconds are
those of a rank that has a core to itself, since the simulator shares out the cores of a node. Torch is imported late:
`start_torch` must come before it.
"""

import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean, median
from typing import TYPE_CHECKING

from tqdm import tqdm

from rlhf_spmd.config import Config, make_workload
from rlhf_spmd.plan.calibration import Calibration, Device, Link, Measured, fit_link
from rlhf_spmd.plan.layout import Layout, group_name
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.devices import type_of
from rlhf_spmd.runtime.machine import machines, processor

if TYPE_CHECKING:
    from rlhf_spmd.runtime.world import World

BUDGET_S = 0.2  # of repeating one thing
FEWEST, MOST = 3, 20  # times that it is repeated
GOLDEN, SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1  # multiples, wrapped around, are spread evenly however many there are
STEP = 4  # from one number of rows to the next
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
CPU_CACHE_BYTES = 1 << 24  # about what a core has to itself
PACKAGES = ("rlhf-spmd", "torch")


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. max_prompt, max_response: tokens of the longest sequence. shares: mean lengths of sequences as
    parts of that. most_rows: of full length in one forward. most_places: rows decoded at the same time. tps: slices."""

    max_prompt: int
    max_response: int
    shares: tuple[float, ...]
    most_rows: int
    most_places: int
    tps: tuple[int, ...]

    @classmethod
    def of(cls, workload: Workload, size: int, devices: int) -> "Grid":
        """What the calls of a workload may meet on so many ranks, `devices` to a node."""
        heads = min(shape.num_kv_heads for shape in workload.models.values() if shape)
        return cls(
            max_prompt=workload.max_prompt,
            max_response=workload.max_response,
            shares=(0.5, 1.0),
            most_rows=workload.micro_batch,
            most_places=min(workload.max_sequences, workload.num_sequences),
            tps=tuple(tp for tp in range(1, min(heads, devices) + 1) if size % tp == 0 and devices % tp == 0),
        )

    @property
    def longest(self) -> int:
        """Tokens of a sequence of full length."""
        return self.max_prompt + self.max_response

    def rows(self, share: float, num_rows: int) -> list[tuple[int, int]]:
        """Tokens of the prompt and the response of each row. They differ where their mean leaves room for it, as those
        of an iteration do: rows of equal length are cheaper."""
        return [
            (spread(share, self.max_prompt, i * GOLDEN), spread(share, self.max_response, i * SILVER))
            for i in range(num_rows)
        ]


def spread(share: float, most: int, place: float) -> int:
    """About a share of `most`: evenly from a third to five thirds of it, so far as none is longer, by a place on a
    circle."""
    width = min(share, 1 - share) * 2 / 3
    return max(1, round(most * (share + width * (2 * (place % 1) - 1))))


def rows_up_to(most: int) -> tuple[int, ...]:
    """Numbers of rows, ever larger steps apart, two at least: 1, 4, 16, 32."""
    numbers = [1]
    while numbers[-1] * STEP < most:
        numbers.append(numbers[-1] * STEP)
    return (*numbers, max(most, 2)) if numbers[-1] < max(most, 2) else tuple(numbers)


def groups_of(world: "World", tps: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """The groups that measuring needs: neighbours in tp slices, the first n ranks, and a rank of each node."""
    named = [Layout.grid_of(range(world.size), tp=tp) for tp in tps]
    tensor = [layout.tensor_ranks(rank) for layout in named for rank in layout.ranks]
    return {group_name(ranks): ranks for ranks in (*tensor, *inside_ranks(world), *between_ranks(world))}


def inside_ranks(world: "World") -> list[tuple[int, ...]]:
    """2, 4, 8, ... and all ranks of the first node."""
    ranks = tuple(rank for rank, node in enumerate(world.nodes) if node == 0)
    sizes = [size for size in (2**power for power in range(1, 12)) if size < len(ranks)]
    return [ranks[:size] for size in (*sizes, len(ranks)) if size > 1]


def between_ranks(world: "World") -> list[tuple[int, ...]]:
    """The first rank of every node."""
    return [tuple(world.nodes.index(node) for node in range(world.num_nodes))] if world.num_nodes > 1 else []


@dataclass(slots=True)
class Clock:
    """Times things that all ranks, or a group, do at the same moment."""

    world: "World"
    num_workers: float | None
    synchronize: Callable[[], object]  # waits until the device is done
    cool: Callable[[], object]  # what has been used just now leaves the caches, as between the calls of an iteration
    bar: tqdm
    budget_s: float = BUDGET_S

    def seconds(self, *works: Callable[[], object], idle: bool = False, together: int = 0) -> tuple[float, ...]:
        """Seconds of each of these on a rank with a core to itself, the mean of all ranks that do it. Its repetitions
        take turns. idle: this rank only waits. together: ranks of a node that wait for each other in it.

        Where ranks share cores, these are processor seconds, since what a rank waits for, others use: their mean, as an
        iteration is a sum. But ranks that wait for each other also wait until the processor turns to them, so that
        together they take their share of the clock: the median.
        """
        by_clock = self.num_workers is None or together > 1
        timer, middle = (time.perf_counter, median) if by_clock else (time.process_time, fmean)
        share = min(1.0, self.num_workers / together) if self.num_workers is not None and together > 1 else 1.0
        first = 0.0
        if not idle:
            self._once(works, time.perf_counter)
            first = sum(self._once(works, time.perf_counter))
        longest = max(self.world.allgather(first, "a first measurement"))
        number = min(max(int(self.budget_s / max(longest, 1e-9)), FEWEST), MOST)
        found = [] if idle else list(map(middle, zip(*(self._once(works, timer) for _ in range(number)), strict=True)))
        everyone = [one for one in self.world.allgather(found, "a measurement") if one]
        self.bar.update()
        return tuple(share * fmean(of_ranks) for of_ranks in zip(*everyone, strict=True))

    def _once(self, works: Sequence[Callable[[], object]], timer: Callable[[], float]) -> list[float]:
        taken = []
        for work in works:
            self.cool()
            self.synchronize()
            began = timer()
            work()
            self.synchronize()
            taken.append(timer() - began)
        return taken


def cache_bytes(index: int | None) -> int:
    """The last cache of a GPU (None: of the CPU)."""
    import torch

    return CPU_CACHE_BYTES if index is None else torch.cuda.get_device_properties(index).L2_cache_size


def profile(
    world: "World", config: Config, *, name: str, grid: Grid | None = None, budget_s: float = BUDGET_S
) -> Calibration:
    """The calibration of this machine for the models of a configuration, the same on every rank. Starts torch.

    grid: what is measured, by default what the configuration's batches ask for. budget_s: for each number. Collective.
    """
    with world.together("choosing what to measure"):
        workload = make_workload(config)
        grid = grid or Grid.of(workload, world.size, world.nodes.count(world.node))
    world.start_torch(groups_of(world, grid.tps))

    import torch

    from rlhf_spmd.runtime.profile_links import constants, links
    from rlhf_spmd.runtime.profile_passes import measure

    kind = type_of(world.computes, config.device_type)
    machine = machines(world)[world.rank]
    num_workers = machine.cores / machine.threads if world.computes.index is None else None
    shapes = dict.fromkeys(replace(shape, num_layers=0) for shape in workload.models.values() if shape)
    with tqdm(desc="profile", unit="points", disable=world.rank != 0, file=sys.stderr) as bar:
        wait = torch.cuda.synchronize if world.computes.index is not None else lambda: None
        others = torch.zeros(2 * cache_bytes(world.computes.index) // 4, device=world.device)
        clock = Clock(world, num_workers, wait, partial(others.add_, 1), bar, budget_s)
        tables: list[Measured] = []
        for shape in shapes:
            for tp in grid.tps:
                tables.append(measure(clock, config, workload, grid, shape, tp))
        found = constants(clock, workload.param_bytes)
        inside, between = (links(clock, ranks) for ranks in (inside_ranks(world), between_ranks(world)))
    smallest = tables[0]
    device = Device(
        **found,
        layer_s=smallest.forward.tables[0].layer.seconds[0],
        decode_layer_s=0.0 if smallest.decode is None else smallest.decode.layer.seconds[0],
        num_workers=num_workers,
        measured=tuple(tables),
    )
    inside_link = fit_link(inside) if inside else Link(found["memory_bytes_per_s"], 0.0)
    return Calibration(
        name,
        {kind: device},
        inside_link,
        fit_link(between) if between else inside_link,
        provenance=provenance(world, config, torch.get_num_threads(), bool(between)),
        machine=machine,
    )


def provenance(world: "World", config: Config, num_threads: int, has_between: bool) -> str:
    """Machine, versions and date, and what was not measured."""
    versions = ", ".join(f"{package} {version_of(package)}" for package in PACKAGES)
    ranks = f"{world.size} ranks on {world.num_nodes} node{'s' if world.num_nodes > 1 else ''}"
    missing = "" if has_between else " Nothing was measured between nodes: `between` repeats `inside`."
    return (
        f"Measured on {time.strftime('%Y-%m-%d')} by `python -m rlhf_spmd profile --preset {config.preset}` with "
        f"{ranks}, {num_threads} thread{'s' if num_threads > 1 else ''} each, {config.dtype}, on {computes_on(world)}; "
        f"Python {platform.python_version()}, {versions}.{missing}"
    )


def version_of(package: str) -> str:
    """The version of a package, if it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "from its source tree"


def computes_on(world: "World") -> str:
    """The names of this machine's processor and, where one is used, of its GPU."""
    if world.computes.index is None:
        return processor()
    return f"{world.computes.name}, {processor()}"


def summary(calibration: Calibration) -> str:
    """What a person wants to see of a calibration."""
    lines = []
    for kind, device in calibration.devices.items():
        lines.append(f"{kind}: {device.matrix_flops:.3g} FLOP/s, memory {device.memory_bytes_per_s:.3g} B/s")
        for one in device.measured:
            forward_s, train_s = (
                [table.layer.seconds[-1] * 1e3 for table in part.tables] for part in (one.forward, one.train)
            )
            head = "scalar" if one.shape.scalar_head else "lm"
            tokens = one.forward.tables[-1].layer.amounts[-1]
            lines.append(
                f"  hidden {one.shape.hidden_size}, {head} head, tp {one.tp}: a layer with {tokens:.0f} tokens "
                f"{forward_s[-1]:.2f} ms forward, {train_s[-1]:.2f} ms in training"
            )
    for what, link in (("inside", calibration.inside), ("between", calibration.between)):
        lines.append(f"{what} nodes: {link.latency_s * 1e6:.0f} us, {link.bytes_per_s:.3g} B/s")
    return "\n".join(lines)


def result(calibration: Calibration, path: str, wall_s: float) -> Mapping[str, object]:
    """The last line of standard output."""
    tables: Sequence[Measured] = [one for device in calibration.devices.values() for one in device.measured]
    return {
        "calibration": path,
        "devices": list(calibration.devices),
        "tables": len(tables),
        "inside_latency_s": calibration.inside.latency_s,
        "inside_bytes_per_s": calibration.inside.bytes_per_s,
        "wall_s": round(wall_s, 1),
        "ok": True,
    }
