"""Chooses the library of matrix products (kernels/products.py) of a job by measuring, once for a kind of machine.

The first run on a kind of machine measures and keeps the result in the user's cache folder,
`$XDG_CACHE_HOME/rlhf_spmd/products/` or `~/.cache/rlhf_spmd/products/`; all others read it, so that two starts of one
command give the same bits. The library of rank 0 holds for the job, and a resumed run keeps its own.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.user_cache import keep, recall
from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.products import BACKWARD, DTYPES, LIBRARIES, LINEAR, Choice, Library, use
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.failure.failures import name_ranks
from rlhf_spmd.runtime.profile.machine import free_memory, kind_of_machine
from rlhf_spmd.runtime.world.world import World

RULES = 3  # to be raised when something else is measured or chosen than before
MARGIN = 1.1  # a library this many times faster is another choice; within it, speed does not count
PACKED_SHARE = 0.5  # of the free memory that packed weights may take; the rest is for keys, values and activations
REPETITIONS = 7  # of which the fewest seconds count
HOPELESS = 3.0  # a library that takes this many times the fewest seconds in the first repetition has no others
LAYER = ((960, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))  # matrices [O, I] of a layer that is timed
TIMED_BYTES = 2**27  # of all of them, more than caches hold
STEP_ROWS, PASS_ROWS = 32, 256  # of a decode step and of a pass over given tokens
Recorded = tuple[Any, str]  # the table of a run as its file has it, and the file


@dataclass(frozen=True, slots=True)
class Table:
    """The libraries for a dtype and where they were chosen; seconds per byte of weights as in
    kernels.products.Choice."""

    dtype: str
    library: str
    backward: str
    plain_s: float
    packed_s: float
    pack_s: float
    machine: str
    torch: str
    threads: int

    @property
    def choice(self) -> Choice:
        return Choice(self.library, self.backward, self.plain_s, self.packed_s, self.pack_s)

    def exists(self) -> bool:
        """Returns whether this machine has these libraries."""
        return all(LIBRARIES[name].exists(DTYPES[self.dtype]) for name in (self.library, self.backward))

    @property
    def where(self) -> tuple[str, str]:
        """What may change the bits of a library."""
        return self.machine, self.torch


def table_of(values: Any, source: str = "the user's cache folder") -> Table:
    """Reads the table that a file holds. Raises UserError naming `source`."""
    names = {part.name: part.type for part in fields(Table)}
    kinds: dict[object, type | tuple[type, ...]] = {float: (int, float), int: int, str: str}
    is_table = isinstance(values, Mapping) and values.keys() == names.keys()
    is_table = is_table and all(isinstance(values[name], kinds[kind]) for name, kind in names.items())
    is_known = is_table and values["library"] in LIBRARIES and values["backward"] in BACKWARD
    if not is_known or values["dtype"] not in DTYPES:
        raise UserError(f"{source} names no matmul library that this version knows; restore the file")
    return Table(**values)


# ---- choosing for a job ---------------------------------------------------------------------------------------------


def choose(
    world: World, wanted: str, dtype: str, shapes: Iterable[ModelShape | None], recorded: Recorded | None = None
) -> tuple[Table | None, str]:
    """Makes all ranks use one library. Returns the table to record, and a note for the user (empty: none). None:
    F.linear, because the job computes on GPUs or its matrices are small. Collective; raises UserError.

    wanted: the option `products`.
    recorded: by the run that is resumed.
    """
    use({})
    matters = any(shape.has_large_matrices for shape in shapes if shape) and world.computes.index is None
    if not matters or wanted == LINEAR.name or dtype not in DTYPES:
        return None, ""
    values, resumed = None, None
    with world.together("choosing the matmul library"):
        resumed = table_of(*recorded) if recorded else None
        if world.rank == 0:
            values = asdict(resumed or (of_this_machine(dtype) if wanted == "auto" else _fixed(wanted, dtype)))
    table = Table(**world.bcast(values, what="the matmul library"))
    mine = [table.exists(), kind_of_machine(), torch.__version__]
    every = world.allgather(mine, "who has the matmul library")
    lacking = [rank for rank, (has, *_) in enumerate(every) if not has]
    others = [rank for rank, (_, *where) in enumerate(every) if resumed and tuple(where) != resumed.where]
    note, where = "", name_ranks(lacking or others, world.hosts)
    if wanted == "auto" and not resumed and world.rank == 0 and not _recall(dtype):
        note = (
            f"matmuls are computed by {table.library}, but the user's cache folder can't be written: the next start "
            f"measures again and may choose another library; give products={table.library}"
        )
    elif wanted == "auto" and not resumed and cpu.is_missing():
        note = (
            f"matmuls are computed by {table.library}, because the faster kernels of this program were not compiled: "
            "install it again where there is g++"
        )
    if lacking:
        if not resumed and wanted != "auto":
            raise UserError(f"products={wanted}: {where} cannot compute them in {dtype}; give products=auto")
        note = f"{where} cannot compute matmuls by {table.library}: F.linear is used"
        note += ", and numbers differ in their last digits" if resumed else ""
        _, machine, version = every[0]
        table = Table(dtype, LINEAR.name, LINEAR.name, 0.0, 0.0, 0.0, machine, version, torch.get_num_threads())
    elif resumed and others:
        note = (
            f"the run was started on {resumed.machine} with torch {resumed.torch}; it keeps its matmul library, "
            f"{table.library}, but on {where} numbers may differ in their last digits"
        )
    use({dtype: table.choice})
    world.agree("the start", {"the matmul library": json.dumps(asdict(table))})
    return table, note


def limit_packing(world: World, table: Table | None, num_bytes: int) -> str:
    """Uses plain weights on all ranks of a node where packed copies would take more than a part of the free memory -> a
    note for the user (empty: none). num_bytes: of this rank's copies. Collective."""
    if table is None or not LIBRARIES[table.library].packs:
        return ""
    every = world.allgather([num_bytes, free_memory()], "the memory for packed weights")
    full = []
    for node in sorted(set(world.nodes)):
        mine = [one for one, its_node in zip(every, world.nodes, strict=True) if its_node == node]
        if sum(copies for copies, _ in mine) > PACKED_SHARE * min(free for _, free in mine):
            full.append(node)
    if world.node in full:
        use({table.dtype: replace(table.choice, pack_s=math.inf)})
    where = name_ranks([rank for rank, node in enumerate(world.nodes) if node in full], world.hosts)
    return f"too little memory is free for packed weights on {where}: generation is slower there" if full else ""


def _fixed(library: str, dtype: str) -> Table:
    """Returns a library that the user names, also for backward products where it can, as if it took the default
    seconds."""
    one = Choice(library, backward=library if library in BACKWARD else LINEAR.name)
    seconds = one.plain_s, one.packed_s, one.pack_s
    return Table(dtype, one.library, one.backward, *seconds, *_kind())


# ---- what is known of this kind of machine --------------------------------------------------------------------------


def of_this_machine(dtype: str) -> Table:
    """Returns the fastest library here: as it was measured before, else measured now, and kept for the next time. A new
    library, such as kernels that were compiled meanwhile, is measured again."""
    if known := _recall(dtype):
        return known
    measured = measure(DTYPES[dtype])
    library = fastest(measured)
    backward = LINEAR.name if library == LINEAR.name else fastest_backward(measure_backward(DTYPES[dtype]))
    best = measured[library]
    table = Table(dtype, library, backward, best.plain_s, best.packed_s, best.pack_s, *_kind())
    keep("products", _name(dtype), asdict(table), table_of)
    return _recall(dtype) or table


def _kind() -> tuple[str, str, int]:
    return kind_of_machine(), torch.__version__, torch.get_num_threads()


def _name(dtype: str) -> str:
    """Returns the name under which results on this kind of machine are kept."""
    here = [name for name, one in LIBRARIES.items() if one.exists(DTYPES[dtype])]
    return hashlib.sha256(repr([RULES, dtype, *_kind(), here]).encode()).hexdigest()


def _recall(dtype: str) -> Table | None:
    return recall("products", _name(dtype), table_of)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a library per byte of weights.

    depends: whether the bits of a row depend on the rows beside it.
    """

    plain_s: float  # a decode step with plain weights
    packed_s: float  # and with packed ones
    pass_s: float  # a pass over given tokens
    pack_s: float = 0.0  # packing
    depends: bool = True

    @property
    def token_s(self) -> float:
        """Of a token: it is drawn, and read by a pass (by more for several models, by none if it is only generated)."""
        return min(self.plain_s, self.packed_s) / STEP_ROWS + self.pass_s / PASS_ROWS


def fastest(measured: Mapping[str, Seconds]) -> str:
    """Returns the library with the fewest seconds of a token, F.linear unless another one is faster by MARGIN. Of those
    that are as fast within MARGIN, one whose rows do not depend on each other."""
    linear_s = measured[LINEAR.name].token_s
    faster = {name: one for name, one in measured.items() if one.token_s * MARGIN < linear_s}
    least = min((one.token_s for one in faster.values()), default=0.0)
    near = [name for name, one in faster.items() if one.token_s <= MARGIN * least]
    return min(near, key=lambda name: (faster[name].depends, faster[name].token_s), default=LINEAR.name)


@torch.inference_mode()
def measure(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> dict[str, Seconds]:
    """Measures the seconds of all libraries that this machine has: the fewest of some repetitions, in which they take
    turns. Nothing is timed if F.linear is the only one."""
    libraries = [one for one in LIBRARIES.values() if one.exists(dtype)]
    if libraries == [LINEAR]:
        return {LINEAR.name: Seconds(0.0, 0.0, 0.0)}
    weights = _weights(dtype)
    trials = [_Trial(one, weights, clock) for one in libraries]
    for trial in trials:
        trial.repeat()
    least = min(trial.seconds.token_s for trial in trials)
    lasting = [trial for trial in trials if trial.seconds.token_s <= HOPELESS * least]
    for _ in range(REPETITIONS - 1):
        for trial in lasting:
            trial.repeat()
    return {trial.library.name: trial.seconds for trial in trials}


class _Trial:
    """A library, and the fewest seconds that it has taken so far."""

    def __init__(self, library: Library, weights: Sequence[Tensor], clock: Callable[[], float]):
        self.library, self.weights, self._clock = library, weights, clock
        began = clock()
        self._copies = [library.pack(weight, STEP_ROWS) for weight in weights] if library.packs else []
        pack_s = (clock() - began) / sum(weight.nbytes for weight in weights)
        self.seconds = Seconds(math.inf, math.inf, math.inf, pack_s, _depends(library, weights[0]))

    def repeat(self) -> None:
        """Measures once more."""
        plain_s = self._per_byte(STEP_ROWS, self.weights)
        packed_s = self._per_byte(STEP_ROWS, self._copies) if self._copies else plain_s
        pass_s = self._per_byte(PASS_ROWS, self.weights[: max(len(self.weights) // 8, 1)])
        before = self.seconds
        self.seconds = replace(
            before,
            plain_s=min(before.plain_s, plain_s),
            packed_s=min(before.packed_s, packed_s),
            pass_s=min(before.pass_s, pass_s),
        )

    def _per_byte(self, num_rows: int, own: Sequence) -> float:
        """Returns the seconds per byte of weights.

        own: the first weights, plain or packed.
        """
        part = self.weights[: len(own)]
        x = {num_in: torch.ones(num_rows, num_in, dtype=part[0].dtype) for _, num_in in LAYER}
        began = self._clock()
        for weight, plain in zip(own, part, strict=True):
            self.library.multiply(x[plain.shape[1]], weight, None)
        return (self._clock() - began) / sum(weight.nbytes for weight in part)


def fastest_backward(seconds: Mapping[str, float]) -> str:
    """Returns torch.mm, unless another library is faster by MARGIN."""
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] * MARGIN < seconds[LINEAR.name] else LINEAR.name


@torch.inference_mode()
def measure_backward(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Measures the seconds of the backward products of some layers after a pass over given tokens, as `measure` has
    them."""
    seconds = {name: math.inf for name in BACKWARD if LIBRARIES[name].exists(dtype)}
    weights = _weights(dtype)
    grads = {num: torch.ones(PASS_ROWS, num, dtype=dtype) for layer in LAYER for num in layer}
    for _ in range(REPETITIONS):
        for name in [name for name, s in seconds.items() if s == math.inf or s <= HOPELESS * min(seconds.values())]:
            began = clock()
            for weight_OI in weights[: len(weights) // 8]:
                grad_NO, x_NI = (grads[num] for num in weight_OI.shape)
                BACKWARD[name](grad_NO, weight_OI)
                BACKWARD[name](grad_NO.T, x_NI)
            seconds[name] = min(seconds[name], clock() - began)
    return seconds


def _weights(dtype: torch.dtype) -> list[Tensor]:
    """Returns matrices of equal layers, as they lie in memory one after the other."""
    generator = torch.Generator().manual_seed(1)
    layer = [torch.randn(shape, generator=generator).to(dtype) for shape in LAYER]
    num_layers = -(-TIMED_BYTES // sum(weight.nbytes for weight in layer))
    return [weight.clone() for _ in range(num_layers) for weight in layer]


def _depends(library: Library, weight_OI: Tensor) -> bool:
    """Returns whether the bits of a row depend on the rows beside it."""
    x_NI = torch.randn(PASS_ROWS, weight_OI.shape[1], generator=torch.Generator().manual_seed(2)).to(weight_OI.dtype)
    wanted_O = library.multiply(x_NI, weight_OI, None)[0]
    return any(not library.multiply(x_NI[:num], weight_OI, None)[0].equal(wanted_O) for num in (2, STEP_ROWS))
