"""Both programs cast to float32 in the midst of a float64 model; here, these casts give float64. No TRL, none of ours.

transformers casts in norms and rotary angles; TRL for the logsumexp of the logits and their gradient, and stores
rewards in float32; ours stores rewards, advantages and the logprobs of other passes in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


class _Wide(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextmanager
def widened() -> Iterator[None]:
    """Gives float64 to what asks torch for float32, inside this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)
