"""Layers whose modules find their parts at once, for the few rows of a decode step on a CPU.

nn.Module looks its parameters and sub-modules up in dicts of its own and calls sub-modules by way of their hooks. That
is Python's time, which nothing hides on a CPU: a sixth of what a layer of a decode step takes besides its arithmetic.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from rlhf_spmd.model.transformer import Transformer


@contextmanager
def bound(model: Transformer, forwards: Mapping[nn.Module, Callable] = {}) -> Iterator[None]:
    """Within it, the modules inside the layers have their parameters, and the forwards of their sub-modules, as plain
    attributes. Neither may be replaced meanwhile, and hooks inside the layers do not run. forwards: of modules inside
    the layers, instead of their own."""
    modules = [module for layer in model.layers.values() for module in layer.modules()]
    for module in modules:
        module.__dict__.update({name: forwards.get(child, child.forward) for name, child in module.named_children()})
        module.__dict__.update(module._parameters)
    try:
        yield
    finally:
        for module in modules:
            for name in (*module._modules, *module._parameters):
                del module.__dict__[name]
