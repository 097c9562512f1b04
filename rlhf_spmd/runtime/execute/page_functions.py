"""Calls the functions that an algorithm names: binds their parameters, and checks their results.

A user's function may raise anything and return anything. Each mistake becomes one message that names the
function, and what it should return.
"""

# B sequences of a micro-batch, G response tokens, n tokens of a tp rank's share, D hidden

import re
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.sequences import Sequences, response_logprobs, response_values, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.pages.functions import bound, mask_words, readout_words
from rlhf_spmd.plan.calls import Compute, LossCall
from rlhf_spmd.plan.runtime_words import ENTROPY, LOGPROBS, MOST_LIKELY, SCORES, VALUES
from rlhf_spmd.runtime.execute.iteration import Rows
from rlhf_spmd.runtime.execute.job import Job

OF_SCALARS = {VALUES: response_values, SCORES: sequence_scores}
# Names in the log that the runtime itself gives (metrics.py).
OWN_NAMES = re.compile(
    r"iteration|gen_tokens.*|response_length|ended_fraction|turns|end_.*|parity_.*|lag|lag_.*|held_groups|moved_.*|tokens_sha256|reward_timeouts|.*_(s|lr|grad_norm|steps_made)"
)


def read_output(
    job: Job, model: Transformer, batch: Sequences, output_nD: Tensor, asked: Collection[str], kept_BGK: Tensor | None
) -> Rows:
    """Reads the requested values from the output of the last stage, by word. An lm head always gives logprobs.

    kept_BGK: the sampling support of the tokens, if sampling was restricted.
    """
    if model.head == "scalar":
        return {word: OF_SCALARS[word](model, batch, output_nD) for word in asked}
    words = [LOGPROBS, *(word for word in (ENTROPY, MOST_LIKELY) if word in asked)]
    entropy, top = ENTROPY in asked, MOST_LIKELY in asked
    made = response_logprobs(model, batch, output_nD, kept_BGK, entropy=entropy, top=top, **job.sampling)
    return dict(zip(words, made if isinstance(made, tuple) else (made,), strict=True))


def stored_arguments(job: Job, call: LossCall, rows: Rows) -> Rows:
    """Returns the arguments of a loss and its companions that stored rows give."""
    masks = job.masks(mask_words(job.workload.workflow, call), rows)
    return {name: rows[key] for name, key in call.arguments} | masks


def called(job: Job, call: LossCall | Compute, given: Mapping[str, Any], companion: str = "") -> Any:
    """Calls the function of a call, or its companion ("sums", "prepare", "finish"), with data, options and state.
    Raises UserError naming the line if a user's function fails; an error in our own algorithms is an error of the
    program."""
    functions, algorithm = job.functions[call.name], job.config.algorithm
    function = getattr(functions, companion or "function")
    arguments = bound(function, {**algorithm.numbers(job.config.options, job.state.of_algorithm), **given})
    with algorithm.calling(_name(call, companion), function, lets=(torch.OutOfMemoryError,)):
        return function(**arguments)


def read_loss(
    job: Job,
    call: LossCall,
    model: Transformer,
    batch: Sequences,
    output_nD: Tensor,
    rows: Rows,
    prepared: Mapping[str, Any],
) -> tuple[Tensor, Mapping[str, tuple], Rows]:
    """Computes the loss of some rows, its sums for the log, which it need not have, and what was read of the output of
    the last stage. Raises UserError.

    prepared: arguments in the place of stored ones.
    """
    asked_for = job.functions[call.name].words
    words = {word: what for word, what in readout_words(job.workload.workflow, call).items() if word in asked_for}
    kept_BGK = rows[call.kept] if call.kept else None
    outputs = read_output(job, model, batch, output_nD, dict.fromkeys(what for _, what in words.values()), kept_BGK)
    given = stored_arguments(job, call, rows) | dict(prepared)
    for word, (key, what) in words.items():
        given[word] = outputs[what].chunk(len(call.responses))[call.responses.index(key)]
    made = called(job, call, given)
    total, log = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    who = f"algorithm {job.config.algorithm.name}: {call.function}()"
    needs_gradient = torch.is_grad_enabled()  # not where a loss is only measured
    is_loss = isinstance(total, Tensor) and not total.dim() and (total.requires_grad or not needs_gradient)
    if not is_loss or not isinstance(log, Mapping):
        raise UserError(
            f"{who} returned {_kinds(made)}; return the sum of the loss over the mask, a tensor without dimensions "
            "that depends on the model's output, and, if you like, a dict of sums for the log after it"
        )
    _check_log(who, log, scalars=True)
    return total, log, outputs


def results_of(
    job: Job, call: Compute, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], companion: str = ""
) -> tuple[Rows, Mapping[str, tuple]]:
    """Computes the results of a compute or of its companion, and its sums for the log. Raises UserError.

    shapes: of each result, by key, in order.
    """
    made = called(job, call, given, companion)
    made = made if isinstance(made, tuple) else (made,)
    log = made[-1] if isinstance(made[-1], Mapping) else {}
    results = made[: len(made) - isinstance(made[-1], Mapping)]
    who = f"algorithm {job.config.algorithm.name}: {_name(call, companion)}()"
    fits = [
        isinstance(result, Tensor) and not result.is_complex() and tuple(result.shape) == shape
        for result, shape in zip(results, shapes.values(), strict=False)
    ]
    if len(results) != len(shapes) or not all(fits):
        wanted = ", ".join(f"{key} of shape {list(shape)}" for key, shape in shapes.items())
        raise UserError(
            f"{who} returned {_kinds(made)}; return tensors of real numbers, {wanted}, and, if you like, a dict of "
            "sums for the log after them"
        )
    _check_log(who, log)
    return dict(zip(shapes, results, strict=True)), log


def _name(call: LossCall | Compute, companion: str) -> str:
    return f"{call.function}_{companion}" if companion else call.function


def _kinds(made: Any) -> str:
    """Describes the result of a function."""
    kinds = []
    for value in made if isinstance(made, tuple) else (made,):
        is_tensor = isinstance(value, Tensor)
        kinds.append(f"a tensor {value.dtype} {list(value.shape)}" if is_tensor else f"a {type(value).__name__}")
    return ", ".join(kinds)


def _check_log(who: str, log: Mapping, *, scalars: bool = False) -> None:
    """Raises UserError unless sums are {name: (sum, weight)}; scalars: of numbers, not of tensors of groups."""
    for name, pair in log.items():
        is_sum = isinstance(pair, tuple) and len(pair) == 2 and all(_is_real(part, scalars) for part in pair)
        if not is_sum or not isinstance(name, str) or OWN_NAMES.fullmatch(name):
            raise UserError(
                f"{who} returned {name!r}: {pair!r:.60} for the log; return (sum, weight), two numbers, under a name "
                "that is not taken"
            )


def _is_real(part: Any, scalar: bool) -> bool:
    if isinstance(part, Tensor):
        return not part.is_complex() and not (scalar and part.dim())
    return isinstance(part, Real)
