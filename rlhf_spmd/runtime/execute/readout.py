"""What is read of a model's output: logprobs, values or scores, and what a loss asks for."""

# B sequences of a micro-batch, G response tokens

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.model.sequences import Sequences, lengths_of, response_logprobs, response_values, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.pages.algorithm import mask_words, readout_words
from rlhf_spmd.plan.runtime_words import ENTROPY, LOGPROBS, MOST_LIKELY, SCORES, VALUES
from rlhf_spmd.plan.workflow import LossCall
from rlhf_spmd.runtime.execute.job import Job

Rows = dict[str, Tensor]  # data key -> [B, ...]


def sequences_of(call: LossCall, rows: Rows) -> Sequences:
    """The sequences of some rows. If a call reads two responses to a prompt, all first ones come before the second."""
    prompts_BP, responses_BG = [rows[call.prompts]] * len(call.responses), [rows[key] for key in call.responses]
    if len(call.responses) == 1:
        return Sequences.join(prompts_BP[0], responses_BG[0])
    return Sequences.join(torch.cat(prompts_BP), torch.cat(responses_BG))


def row_lengths(call: LossCall, rows: Rows) -> list[int]:
    """Tokens of each row: of the prompt with each response that the call reads."""
    of_each = (lengths_of(rows[call.prompts], rows[key]) for key in call.responses)
    return [sum(one) for one in zip(*of_each, strict=True)]


def read_output(
    what: str,
    model: Transformer,
    batch: Sequences,
    output: Tensor,
    kept_BGK: Tensor | None,
    sampling: Mapping[str, Any],
) -> Tensor:
    """Logprobs, values or scores, from the output of the last stage."""
    if what == LOGPROBS:
        return _each(response_logprobs(model, batch, output, kept_BGK, **sampling))[0]
    return {VALUES: response_values, SCORES: sequence_scores}[what](model, batch, output)


def stored_arguments(job: Job, call: LossCall, rows: Rows) -> Rows:
    """The arguments of a loss and its companions that stored rows give."""
    tokens = {key: rows[key] for key in call.responses}
    masks = job.masks(mask_words(job.workload.workflow, call), tokens)
    return {name: rows[key] for name, key in call.arguments} | masks


def read_for_loss(
    job: Job, call: LossCall, model: Transformer, batch: Sequences, output: Tensor, rows: Rows
) -> tuple[Rows, Rows]:
    """What is read of the model's output for a loss: all of it, and the arguments of the loss."""
    asked, words = job.functions[call.name].words, readout_words(job.workload.workflow, call)
    words = {word: which for word, which in words.items() if word in asked}
    outputs = _outputs(job, call, model, batch, output, rows, {what for _, what in words.values()})
    read = {
        word: outputs[what].chunk(len(call.responses))[call.responses.index(key)] for word, (key, what) in words.items()
    }
    return outputs, read


def _outputs(
    job: Job, call: LossCall, model: Transformer, batch: Sequences, output: Tensor, rows: Rows, asked: set[str]
) -> Rows:
    """Logprobs (and what else is asked of an lm head), or what is asked of a scalar head, for all responses, one key
    after the other."""
    if job.workload.workflow.heads[call.model] == "lm":
        kept_BGK = rows[call.kept] if call.kept else None
        top = MOST_LIKELY in asked
        made = response_logprobs(model, batch, output, kept_BGK, entropy=call.entropy, top=top, **job.sampling)
        names = [LOGPROBS, *([ENTROPY] if call.entropy else []), *([MOST_LIKELY] if top else [])]
        return dict(zip(names, _each(made), strict=True))
    return {what: read_output(what, model, batch, output, None, job.sampling) for what in asked}


def _each(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
