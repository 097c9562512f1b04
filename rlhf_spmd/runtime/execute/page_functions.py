"""Calls the functions that an algorithm's page names, and checks what they return.

A function of a user's page may raise anything and return anything. Each mistake becomes one message that names the
function, and what it should return.
"""

import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import Algorithm
from rlhf_spmd.pages.functions import bound

# Names in the log that the runtime itself gives (metrics.py).
OWN_NAMES = re.compile(
    r"iteration|gen_tokens.*|response_length|ended_fraction|parity_.*|moved_.*|tokens_sha256|reward_timeouts|.*_(s|lr|grad_norm)"
)


def called(algorithm: Algorithm, name: str, function: Callable, available: Mapping[str, Any]) -> Any:
    """What a function returns for the available values. Raises UserError naming the line if a user's function fails;
    an error in a page of the package is an error of the program."""
    arguments = bound(function, available)
    with algorithm.calling(name, function, lets=(torch.OutOfMemoryError,)):
        return function(**arguments)


def results_of(
    algorithm: Algorithm, name: str, made: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], Mapping[str, tuple]]:
    """The results of a compute and its sums for the log. shapes: of each result, by key, in order. Raises UserError."""
    made = made if isinstance(made, tuple) else (made,)
    log = made[-1] if isinstance(made[-1], Mapping) else {}
    results = made[: len(made) - isinstance(made[-1], Mapping)]
    who = f"algorithm {algorithm.name}: {name}()"
    if len(results) != len(shapes):
        raise UserError(
            f"{who} returned {len(results)} results, but the workflow makes {', '.join(shapes)} of them; return as "
            "many, and sums for the log after them"
        )
    for (key, shape), result in zip(shapes.items(), results, strict=True):
        if not isinstance(result, Tensor) or result.is_complex():
            kind = "complex numbers" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise UserError(f"{who} returned {kind} for {key}; return a tensor of real numbers of shape {list(shape)}")
        if tuple(result.shape) != shape:
            raise UserError(f"{who} returned {key} of shape {list(result.shape)}; return it in shape {list(shape)}")
    _check_log(who, log)
    return dict(zip(shapes, results, strict=True)), log


def loss_of(algorithm: Algorithm, name: str, made: Any, *, learns: bool = True) -> tuple[Tensor, Mapping[str, tuple]]:
    """A loss and its sums for the log, which it need not have. learns: whether it must have a gradient. Raises
    UserError."""
    total, log = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    who = f"algorithm {algorithm.name}: {name}()"
    if not isinstance(total, Tensor) or total.dim() or (learns and not total.requires_grad):
        what = f"a {type(total).__name__}"
        if isinstance(total, Tensor):
            what = f"a tensor of shape {list(total.shape)}" if total.dim() else "a number without gradient"
        raise UserError(
            f"{who} returned {what}; return the sum of the loss over the mask, a tensor without dimensions that "
            "depends on the model's output, and, if you like, sums for the log after it"
        )
    if not isinstance(log, Mapping):
        raise UserError(
            f"{who} returned a {type(log).__name__} after the loss; return a dict of sums for the log there"
        )
    _check_log(who, log, scalars=True)
    return total, log


def _check_log(who: str, log: Mapping, *, scalars: bool = False) -> None:
    """Raises UserError unless sums are {name: (sum, weight)}; scalars: of numbers, not of tensors of groups."""
    for name, pair in log.items():
        if not isinstance(name, str) or OWN_NAMES.fullmatch(name):
            raise UserError(f"{who} returned a sum named {name!r} for the log, where that name is taken; rename it")
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(_is_real(part, scalars) for part in pair)):
            raise UserError(f"{who} returned the sum {name} as {pair!r:.60}; return (sum, weight), two numbers")


def _is_real(part: Any, scalar: bool) -> bool:
    if isinstance(part, Tensor):
        return not part.is_complex() and not (scalar and part.dim())
    return isinstance(part, Real)
