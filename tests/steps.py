"""An optimizer step of an engine on some micro-batches, as the runtime makes it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def engine_step(engine, micro_batches: Sequence[Any], loss: Callable[[Any, Any], Tensor], *, lr: float) -> float:
    """Makes a step of an engine and returns the norm of the gradient.

    loss: loss(model, micro-batch) is this rank's share of the global loss.
    """
    engine.begin()
    for index, micro_batch in enumerate(micro_batches):
        output = engine.forward(lambda model, micro_batch=micro_batch: loss(model, micro_batch))
        engine.backward(output, last=index == len(micro_batches) - 1)
    return engine.update(lr=lr)
