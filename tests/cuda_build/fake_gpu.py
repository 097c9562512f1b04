"""Runs the code that a GPU runs on fake CUDA tensors: nothing is computed, and what would be launched is counted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from rlhf_spmd.kernels import decode_attention
from tests.launches import name_of

VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "expand",
        "slice",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "select",
        "as_strided",
        "detach",
        "alias",
        "unbind",
        "chunk",
        "permute",
        "unflatten",
        "flatten",
        "narrow",
        "reshape",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "is_pinned",
        "lift_fresh",
        "resolve_conj",
        "resolve_neg",
        "device",
    ]
)  # operators that launch nothing


class _Operators(TorchDispatchMode):
    """Counts operators with CUDA tensors that launch something."""

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in VIEWS and any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves((args, kwargs))):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def gpu() -> Iterator[None]:
    """Makes CUDA tensors fake, of an H100."""
    guard = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if guard is not None:
        guard()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        patch.object(decode_attention, "processors", lambda device: 132),
    ):
        yield


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Counts what is launched inside: kernels of Triton as module.function, operators of torch by their names."""
    counts: Counter[str] = Counter()

    def run(kernel, *arguments, grid, warmup, **named):
        counts[name_of(kernel)] += 1

    with patch.object(JITFunction, "run", run), _Operators(counts):
        yield counts
