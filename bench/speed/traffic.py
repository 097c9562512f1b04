"""What kernels read, write and compute, counted while Triton's interpreter runs them (TRITON_INTERPRET=1).

Counted are the bytes that the masks of loads and stores let through. An address that one instruction names several
times counts once, since a GPU fetches it once; what several instructions or several programs read counts each time,
although a cache may hold it.

Only the first programs along axis 0 of a grid run: that axis counts rows or tokens in every kernel, and a count is
scaled by the rows left out.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, ReduceOps, ScanOps

from bench.speed.launches import Launch, bound, name_of

# Ways to memory that no kernel here takes; one that does has to be counted above all.
NOT_COUNTED = [name for name in dir(InterpreterBuilder) if name.startswith(("create_atomic", "create_descriptor"))]


@dataclass
class Traffic:
    """Of one launch: all of its programs."""

    launch: Launch
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    touched_bytes: float = 0.0  # different addresses read, and written
    matrix_flops: float = 0.0  # of matrix products, padding included
    vector_ops: float = 0.0  # results of other operations on floats, reductions included; 1 for a division
    times: int = 1  # that the same work was launched
    addresses: dict[tuple[str, int], list[np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    def access(self, kind: str, pointers, mask) -> int:
        """Notes the addresses of one load or store; returns its bytes."""
        size = pointers.get_element_ty().primitive_bitwidth // 8
        found = np.unique(np.broadcast_to(pointers.data, mask.data.shape)[mask.data])
        self.addresses.setdefault((kind, size), []).append(found)
        return found.size * size

    def finish(self, scale: float) -> None:
        """Scales counts: all programs ran but for a share of them, so counts become those of the whole launch."""
        for (_, size), found in self.addresses.items():
            self.touched_bytes += np.unique(np.concatenate(found)).size * size
        self.addresses.clear()
        for name in ("read_bytes", "written_bytes", "touched_bytes", "matrix_flops", "vector_ops"):
            setattr(self, name, scale * getattr(self, name))


@contextmanager
def counted(rows: int | None = None) -> Iterator[list[Traffic]]:
    """Counts launches in this context, which run as far as `rows` programs of axis 0 (None: all) and are added to the
    list. Of launches that do the same work only the first one runs."""
    found: dict[tuple, Traffic] = {}
    traffics: list[Traffic] = []
    now: list[Traffic] = []

    def run(kernel, *arguments, grid, warmup, **named):
        del warmup
        launch = Launch(name_of(kernel), tuple(grid), bound(kernel, arguments, named))
        if launch.key in found:
            found[launch.key].times += 1
            return
        now[:] = [found.setdefault(launch.key, Traffic(launch))]
        traffics.append(now[0])
        some = (min(rows or grid[0], grid[0]), *grid[1:])
        execute = GridExecutor(kernel.rewrite(), kernel.arg_names, some)
        execute._restore_args_dev = lambda *_: None  # tensors of the host are used in place
        execute(*arguments, **named)
        now[0].finish(grid[0] / some[0])

    with ExitStack() as stack:
        stack.enter_context(patch.object(InterpretedFunction, "run", run))
        for owner, name, replacement in _counters(now):
            stack.enter_context(patch.object(owner, name, replacement))
        yield traffics


def _counters(now: list[Traffic]) -> Iterator[tuple[type, str, Callable]]:
    """Yields methods of the interpreter, and what counts before it calls them."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    dot = InterpreterBuilder.create_dot

    def counted_load(self, pointers, mask, *rest):
        now[0].read_bytes += now[0].access("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        now[0].written_bytes += now[0].access("write", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counted_dot(self, a, b, *rest):
        result = dot(self, a, b, *rest)
        now[0].matrix_flops += 2.0 * result.data.size * a.data.shape[-1]
        return result

    yield InterpreterBuilder, "create_masked_load", counted_load
    yield InterpreterBuilder, "create_masked_store", counted_store
    yield InterpreterBuilder, "create_dot", counted_dot
    for name in ("unary_op", "binary_op", "ternary_op"):
        yield InterpreterBuilder, name, _counted_op(getattr(InterpreterBuilder, name), now)
    for owner in (ReduceOps, ScanOps):
        yield owner, "apply_impl", _counted_reduction(owner.apply_impl, now)
    for name in NOT_COUNTED:
        yield InterpreterBuilder, name, _refused(name)


def _counted_op(op: Callable, now: list[Traffic]) -> Callable:
    def counted_op(self, *operands):
        result = op(self, *operands)
        if any(getattr(x, "dtype", None) is not None and x.dtype.scalar.is_floating() for x in operands):
            now[0].vector_ops += result.data.size
        return result

    return counted_op


def _counted_reduction(apply: Callable, now: list[Traffic]) -> Callable:
    def counted_reduction(self, inputs):
        now[0].vector_ops += sum(x.handle.data.size for x in inputs if x.dtype.is_floating())
        return apply(self, inputs)

    return counted_reduction


def _refused(name: str) -> Callable:
    def refused(*_):
        raise RuntimeError(
            f"a kernel uses {name}, whose traffic this bench cannot count; a count without it would be too low"
        )

    return refused
