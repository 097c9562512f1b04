"""Chooses the library of matrix products (kernels/products.py) of a job by measuring, once for a kind of machine.

The first run on a kind of machine measures and keeps the result in the user's cache folder,
`$XDG_CACHE_HOME/rlhf_spmd/products/` or `~/.cache/rlhf_spmd/products/`; all others read it, so that two starts of one
command give the same bits. The library of rank 0 holds for the job, and a resumed run keeps its own.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.products import BACKWARD, DTYPES, LIBRARIES, LINEAR, Choice, Library, use
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.failure.failures import name_ranks
from rlhf_spmd.runtime.profile.machine import free_memory, kind_of_machine
from rlhf_spmd.runtime.world.world import World

RULES = 3  # to be raised when something else is measured or chosen than before
PACKED_SHARE = 0.5  # of the free memory that packed weights may take; the rest is for keys, values and activations
REPETITIONS = 7  # of which the fewest seconds count
LAYER = ((960, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))  # matrices [O, I] of a layer that is timed
TIMED_BYTES = 2**27  # of all of them, more than caches hold
STEP_ROWS, PASS_ROWS = 32, 256  # of a decode step and of a pass over given tokens


class Options(Protocol):
    """Options of a job: the library (`auto`: the fastest), and the precision."""

    @property
    def products(self) -> str: ...

    @property
    def dtype(self) -> str: ...


Recorded = tuple[Any, str]  # the choice of a run as its file has it, and the file


def choice_of(values: Any, source: str = "the user's cache folder") -> Choice:
    """Reads the choice that a file holds. Raises UserError naming `source`."""
    with suppress(ValueError):
        choice = TypeAdapter(Choice).validate_python(values)
        if values and choice.library in LIBRARIES and choice.backward in BACKWARD:
            return choice
    raise UserError(f"{source} names no matmul library that this version knows; restore the file")


# ---- choosing for a job ---------------------------------------------------------------------------------------------


def choose(
    world: World, options: Options, shapes: Iterable[ModelShape | None], recorded: Recorded | None = None
) -> tuple[Choice | None, str]:
    """Makes all ranks use one library. Returns the choice to record, and a note for the user (empty: none). None:
    F.linear, because the job computes on GPUs or its matrices are small. Collective; raises UserError.

    recorded: by the run that is resumed.
    """
    use({})
    wanted, dtype = options.products, options.dtype
    matters = any(shape.has_large_matrices for shape in shapes if shape) and world.computes.index is None
    if not matters or wanted == LINEAR.name or dtype not in DTYPES:
        return None, ""
    values = None
    with world.together("choosing the matmul library"):
        if world.rank == 0:
            values = asdict(choice_of(*recorded) if recorded else _choice(wanted, dtype))
    choice = Choice(**world.bcast(values, what="the matmul library"))
    exists = all(LIBRARIES[name].exists(DTYPES[dtype]) for name in (choice.library, choice.backward))
    every = world.allgather(exists, "who has the matmul library")
    note = ""
    if not all(every):
        where = name_ranks([rank for rank, has in enumerate(every) if not has], world.hosts)
        if wanted != "auto" and not recorded:
            raise UserError(f"products={wanted}: {where} cannot compute them in {dtype}; give products=auto")
        note = f"{where} cannot compute matmuls by {choice.library}: F.linear is used"
        note += ", and numbers differ in their last digits" if recorded else ""
        choice = Choice(LINEAR.name)
    elif wanted == "auto" and not recorded and world.rank == 0 and not os.path.exists(_kept(dtype)):
        note = (
            f"matmuls are computed by {choice.library}, but {_kept(dtype).parent} can't be written: the next start "
            f"measures again and may choose another library; give products={choice.library}"
        )
    elif wanted == "auto" and not recorded and cpu.is_missing():
        note = (
            f"matmuls are computed by {choice.library}, because the faster kernels of this program were not compiled: "
            "install it again where there is g++"
        )
    use({dtype: choice})
    return choice, note


def limit_packing(world: World, options: Options, choice: Choice | None, num_bytes: int) -> str:
    """Uses plain weights on all ranks of a node where packed copies would take more than a part of the free memory -> a
    note for the user (empty: none). num_bytes: of this rank's copies. Collective."""
    if choice is None or not LIBRARIES[choice.library].packs:
        return ""
    every = world.allgather((world.node, num_bytes, free_memory()), "the memory for packed weights")
    copies, free = dict.fromkeys(world.nodes, 0), dict.fromkeys(world.nodes, math.inf)
    for node, num, unused in every:
        copies[node] += num
        free[node] = min(free[node], unused)
    full = [rank for rank, node in enumerate(world.nodes) if copies[node] > PACKED_SHARE * free[node]]
    if world.rank in full:
        use({options.dtype: replace(choice, pack_s=math.inf)})
    where = name_ranks(full, world.hosts)
    return f"too little memory is free for packed weights on {where}: generation is slower there" if full else ""


def _choice(wanted: str, dtype: str) -> Choice:
    """Returns the fastest library, or the one that the user names, also for backward products where it can, as if it
    took the default seconds."""
    if wanted == "auto":
        return of_this_machine(dtype)
    return Choice(wanted, wanted if wanted in BACKWARD else LINEAR.name)


def of_this_machine(dtype: str) -> Choice:
    """Returns the fastest library here: as it was measured before, else measured now, and kept for the next time. A new
    library, such as kernels that were compiled meanwhile, is measured again."""
    path = _kept(dtype)
    with suppress(OSError, ValueError, UserError):
        return choice_of(json.loads(path.read_bytes()))
    choice = measure(DTYPES[dtype])
    with suppress(OSError):
        if not path.is_absolute():  # "~", of a user who is not in passwd, without HOME
            return choice
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f"{path.name}.{os.getpid()}")
        whole.write_text(json.dumps(asdict(choice)), encoding="utf-8")
        whole.replace(path)
    return choice


def _kept(dtype: str) -> Path:
    """Returns the file of what was measured on this kind of machine."""
    libraries = [name for name, library in LIBRARIES.items() if library.exists(DTYPES[dtype])]
    kind = kind_of_machine(), torch.__version__, torch.get_num_threads()
    name = hashlib.sha256(repr([RULES, dtype, *kind, libraries]).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "rlhf_spmd" / "products" / name


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seconds:
    """The fewest seconds of a library per byte of weights: of a decode step with plain weights and with packed ones,
    and of a pass over given tokens."""

    plain_s: float = math.inf
    packed_s: float = math.inf
    pass_s: float = math.inf

    @property
    def token_s(self) -> float:
        """Of a token: it is drawn, and read by a pass (by more for several models, by none if it is only generated)."""
        return min(self.plain_s, self.packed_s) / STEP_ROWS + self.pass_s / PASS_ROWS


@torch.inference_mode()
def measure(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> Choice:
    """Returns the library with the fewest seconds of a token, and the one for backward products: those with the fewest
    of some repetitions, in which they take turns. Nothing is timed if F.linear is the only one."""
    libraries = [library for library in LIBRARIES.values() if library.exists(dtype)]
    if libraries == [LINEAR]:
        return Choice(LINEAR.name)
    weights = _weights(dtype)
    first = weights[: max(len(weights) // 8, 1)]
    copies, pack_s = {}, {}
    for library in libraries:
        began = clock()
        copies[library.name] = [library.pack(weight, STEP_ROWS) for weight in weights]
        pack_s[library.name] = (clock() - began) / sum(weight.nbytes for weight in weights)
    seconds = {library.name: Seconds() for library in libraries}
    for _ in range(REPETITIONS):
        for library in libraries:
            before = seconds[library.name]
            seconds[library.name] = Seconds(
                min(before.plain_s, _per_byte(library, STEP_ROWS, weights, weights, clock)),
                min(before.packed_s, _per_byte(library, STEP_ROWS, weights, copies[library.name], clock)),
                min(before.pass_s, _per_byte(library, PASS_ROWS, first, first, clock)),
            )
    name = min(seconds, key=lambda name: seconds[name].token_s)
    backward = LINEAR.name if name == LINEAR.name else fastest_backward(dtype, first, clock)
    return Choice(name, backward, seconds[name].plain_s, seconds[name].packed_s, pack_s[name])


def _per_byte(
    library: Library, num_rows: int, weights: Sequence[Tensor], given: Sequence, clock: Callable[[], float]
) -> float:
    """Returns the seconds of products per byte of weights. given: the weights as the library gets them."""
    x = {num_in: torch.ones(num_rows, num_in, dtype=weights[0].dtype) for _, num_in in LAYER}
    began = clock()
    for weight_OI, plain_OI in zip(given, weights, strict=True):
        library.multiply(x[plain_OI.shape[1]], weight_OI, None)
    return (clock() - began) / sum(weight.nbytes for weight in weights)


def fastest_backward(dtype: torch.dtype, weights: Sequence[Tensor], clock: Callable[[], float]) -> str:
    """Returns the library with the fewest seconds for the backward products after a pass over given tokens."""
    seconds = {name: math.inf for name in BACKWARD if LIBRARIES[name].exists(dtype)}
    grads = {num: torch.ones(PASS_ROWS, num, dtype=dtype) for layer in LAYER for num in layer}
    for _ in range(REPETITIONS):
        for name in seconds:
            began = clock()
            for weight_OI in weights:
                grad_NO, x_NI = (grads[num] for num in weight_OI.shape)
                BACKWARD[name](grad_NO, weight_OI)
                BACKWARD[name](grad_NO.T, x_NI)
            seconds[name] = min(seconds[name], clock() - began)
    return min(seconds, key=lambda name: seconds[name])


def _weights(dtype: torch.dtype) -> list[Tensor]:
    """Returns matrices of equal layers, as they lie in memory one after the other."""
    generator = torch.Generator().manual_seed(1)
    layer = [torch.randn(shape, generator=generator).to(dtype) for shape in LAYER]
    num_layers = -(-TIMED_BYTES // sum(weight.nbytes for weight in layer))
    return [weight.clone() for _ in range(num_layers) for weight in layer]
