"""The measured constants of a machine, from which seconds are computed (seconds.py).

Every constant is physical and the same for all models, layouts and calls. A type of device may also have tables:
seconds of a layer, and of the rest, for shapes that were measured on it (runtime/profile/profile.py).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.workload import ModelShape

SOURCES = ("measured", "fitted", "derived", "data sheet", "assumed")  # where a constant may come from
OF_DEVICE = (
    *("matrix_flops", "memory_bytes_per_s", "host_bytes_per_s", "layer_s", "decode_layer_s", "decode_reduce_s"),
    "graph_layer_s",
)
OF_LINKS = tuple(f"{link}.{one}" for link in ("inside", "between", "host") for one in ("bytes_per_s", "latency_s"))
CONSTANTS = (*OF_DEVICE, *OF_LINKS)
VERSION = 1  # of the meaning of these constants; a file of another version is refused


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over an amount: linear between measured points and beyond them, never negative.

    amounts: ascending, two at least. seconds: at each.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascends = all(earlier < later for earlier, later in pairwise(self.amounts))
        if not ascends or len(self.amounts) < 2 or len(self.amounts) != len(self.seconds):
            given = f"{list(self.amounts)} with {len(self.seconds)} seconds"
            raise UserError(f"a curve needs at least two amounts that ascend, and seconds for each, not {given}")

    def at(self, amount: float) -> float:
        """Returns seconds at an amount."""
        end = min(max(bisect_left(self.amounts, amount), 1), len(self.amounts) - 1)
        (x, y), (next_x, next_y) = ((self.amounts[i], self.seconds[i]) for i in (end - 1, end))
        return max(0.0, y + (amount - x) / (next_x - x) * (next_y - y))

    def times(self, factor: float) -> "Curve":
        """Returns all seconds multiplied by a factor."""
        return replace(self, seconds=tuple(factor * second for second in self.seconds))


@dataclass(frozen=True, slots=True)
class Layered:
    """Seconds of a model with any number of layers. layer: of one. rest: embedding, head, and starting."""

    layer: Curve
    rest: Curve

    def at(self, num_layers: int, amount: float, *, rest: bool = True) -> float:
        """Returns seconds of so many layers, with the rest or, for a stage before the last one, without."""
        return num_layers * self.layer.at(amount) + (self.rest.at(amount) if rest else 0.0)

    def times(self, factor: float) -> "Layered":
        """Returns all seconds multiplied by a factor."""
        return Layered(self.layer.times(factor), self.rest.times(factor))


@dataclass(frozen=True, slots=True)
class ByLength:
    """Seconds over tokens, for sequences of several lengths: linear between two lengths, constant beyond the first and
    the last. lengths: ascending."""

    lengths: tuple[float, ...]
    tables: tuple[Layered, ...]

    def __post_init__(self) -> None:
        ascending = all(earlier < later for earlier, later in pairwise(self.lengths))
        if not self.lengths or len(self.lengths) != len(self.tables) or not ascending:
            raise UserError(
                f"{len(self.tables)} tables are for lengths {list(self.lengths)}; give one to each, ascending"
            )

    def at(self, num_layers: int, tokens: float, length: float, *, rest: bool = True) -> float:
        """Returns the seconds of a pass of so many tokens in sequences of one length.

        rest: see Layered.
        """
        length = min(max(length, self.lengths[0]), self.lengths[-1])
        after = max(bisect_left(self.lengths, length), 1)
        if after >= len(self.lengths):
            return self.tables[-1].at(num_layers, tokens, rest=rest)
        share = (length - self.lengths[after - 1]) / (self.lengths[after] - self.lengths[after - 1])
        before_s, after_s = (self.tables[i].at(num_layers, tokens, rest=rest) for i in (after - 1, after))
        return (1 - share) * before_s + share * after_s

    def times(self, factor: float) -> "ByLength":
        """Returns all seconds multiplied by a factor."""
        return replace(self, tables=tuple(table.times(factor) for table in self.tables))


@dataclass(frozen=True, slots=True)
class Measured:
    """Tables of one shape on one type of device, for a rank that is one of `tp` slices, including their messages.

    shape: the model without its layers (`num_layers` 0).
    tp: number of slices.
    param_bytes: bytes per weight while computing.
    forward: by length, over tokens: a pass without gradients, to logprobs, values or scores.
    train: by length, over tokens: a forward and a backward pass.
    update: a curve over parameters of the rank: clipping and the optimizer step.
    prefill: by length, over tokens of prompts: a pass over prompts that samples the first token; models that generate.
    decode: layered, over rows: one further token for each row; models that generate.
    ends: a curve over rows at the start of decoding: the additional time of a step in which rows finish.
    """

    shape: ModelShape
    tp: int
    param_bytes: int
    forward: ByLength
    train: ByLength
    update: Curve
    prefill: ByLength | None = None
    decode: Layered | None = None
    ends: Curve | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One type of device.

    matrix_flops: floating-point operations per second in large matrix products, in the precision of the run.
    memory_bytes_per_s: bandwidth of a long read of device memory.
    host_bytes_per_s: bandwidth between host and device memory.
    layer_s: seconds per layer of a forward pass to launch its kernels, beside matrix products and messages.
    decode_layer_s: seconds in which the host launches the kernels of a layer of a decode step.
    decode_reduce_s: seconds in which the host launches one all-reduce of a decode step; default 0. With tensor
        parallelism, a layer has two.
    graph_layer_s: seconds per layer between its kernels when decode steps are replayed as CUDA graphs, in addition to
        the kernels; replaces `decode_layer_s` and `decode_reduce_s`. Left out: decoding uses no CUDA graphs.
    num_workers: how many ranks of a node can compute at full speed at once, if they share its cores (a container may
        have a core and a half); default: each rank has its own device.
    measured: tables of shapes (`Measured`); they take precedence over the constants.
    reserve: share of a device's memory that no program may fill; default and minimum 0.06.
    """

    matrix_flops: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    layer_s: float
    decode_layer_s: float
    decode_reduce_s: float = 0.0
    graph_layer_s: float | None = None
    num_workers: float | None = None
    measured: tuple[Measured, ...] = ()
    reserve: float | None = None

    def __post_init__(self) -> None:
        if self.reserve is not None and not 0 < self.reserve < 1:
            raise UserError(f"reserve {self.reserve:g} is not a share of a device's memory between 0 and 1")

    def decode_step_s(self, busy_s: float, num_layers: int, num_reduces: int) -> float:
        """Returns seconds of a decode step of so many layers and all-reduces, whose kernels take busy_s: the host
        starts them while others run, or the device pauses between those of a graph."""
        if self.graph_layer_s is not None:
            return busy_s + num_layers * self.graph_layer_s
        return max(busy_s, num_layers * self.decode_layer_s + num_reduces * self.decode_reduce_s)

    def table(self, shape: ModelShape, tp: int, param_bytes: int) -> Measured | None:
        """Returns the table of a shape with any number of layers."""
        wanted = replace(shape, num_layers=0), tp, param_bytes
        return next((one for one in self.measured if (one.shape, one.tp, one.param_bytes) == wanted), None)


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of two devices.

    bytes_per_s: bandwidth of one device in one direction.
    latency_s: latency of one message.
    """

    bytes_per_s: float
    latency_s: float


HOST_LINK = Link(1e9, 2e-4)  # assumed: what sockets inside a node and a thread of gloo's do at least


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of each node on which seconds depend; a calibration is valid for all equal machines.

    processor: its name.
    details: what distinguishes processors of one name, and the instructions that torch uses.
    cores: available to the ranks of a node, not always whole.
    threads: of each rank.
    torch: its version.
    """

    processor: str
    details: str
    cores: float
    threads: int
    torch: str

    def __str__(self) -> str:
        return f"{self.processor}, {self.cores:g} core{'s' if self.cores != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants of a kind of machine, from which forecasts follow.

    provenance: where the numbers come from, in words.
    devices: one entry for each device type.
    inside, between: links between devices of one node, and of two nodes.
    host: link between two processes of one node, by gloo, for rows between GPUs, which are also copied from and to
        devices (`host_bytes_per_s`). Between nodes the slower of `host` and `between` counts. Default: 1e9 and 2e-4,
        assumed.
    pipelined_prefill: whether a copy in pipeline stages cuts the prompts into micro-batches; default false.
    sources: the source of each constant: `measured`, `fitted`, `derived`, `data sheet` or `assumed`; those of links are
        written `inside.latency_s`. `plan` prints it.
    machine: the machine on which it was measured; `profile` writes it.
    """

    name: str
    devices: Mapping[str, Device]
    inside: Link
    between: Link
    provenance: str
    pipelined_prefill: bool = False
    machine: Machine | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    host: Link = HOST_LINK

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            if name not in CONSTANTS or source not in SOURCES:
                known = f"constants ({', '.join(CONSTANTS)}) to one of {', '.join(SOURCES)}"
                raise UserError(f"sources: {name!r}: {source!r} is unknown; map {known}")

    @property
    def sources_text(self) -> str:
        """For people: the constants, grouped by where they come from."""
        groups = {source: [name for name, of in self.sources.items() if of == source] for source in SOURCES}
        return "; ".join(f"{source}: {', '.join(names)}" for source, names in groups.items() if names)

    def require(self, device: str) -> None:
        """Raises UserError unless this type of device has been measured."""
        if device not in self.devices:
            known = ", ".join(self.devices)
            raise UserError(
                f"calibration {self.name} does not know devices of type {device}, only {known}; choose another one, "
                "or measure this machine: python -m rlhf_spmd profile"
            )


def fit_link(times_s: Sequence[tuple[int, float, float]]) -> Link:
    """Returns the link that explains measured all-gathers best; times_s: ranks, bytes of the whole, seconds.

    Least squares of the relative error of (n - 1) latency + (n - 1) / n bytes / bandwidth, the ring of seconds.py.
    """
    import numpy as np  # late: `check` starts sooner without it

    rows = np.array([((n - 1) / s, (n - 1) / n * size / s) for n, size, s in times_s])
    latency_s, byte_s = map(float, np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0])
    if latency_s < 0 or byte_s <= 0:  # noise: the largest message tells the bandwidth, the smallest the latency
        (few, _, least_s), (n, size, most_s) = (f(times_s, key=lambda one: one[1]) for f in (min, max))
        latency_s, byte_s = least_s / (few - 1), most_s / ((n - 1) / n * size)
    return Link(1 / byte_s, latency_s)
