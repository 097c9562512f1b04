"""What is read of a model's output: logprobs, values or scores, and a loss that asks for them."""

# B sequences of a micro-batch, G response tokens, n tokens of a tp rank's share, D hidden

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rlhf_spmd.model.sequences import Sequences, lengths_of, response_logprobs, response_values, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.pages.functions import mask_words, readout_words
from rlhf_spmd.plan.runtime_words import ENTROPY, LOGPROBS, MOST_LIKELY, SCORES, VALUES
from rlhf_spmd.plan.workflow import LossCall
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.page_functions import called, loss_of

Rows = dict[str, Tensor]  # data key -> [B, ...]
OF_SCALARS = {VALUES: response_values, SCORES: sequence_scores}


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
    job: Job, model: Transformer, batch: Sequences, output_nD: Tensor, asked: Collection[str], kept_BGK: Tensor | None
) -> Rows:
    """What is asked of the output of the last stage, by word. An lm head always gives logprobs. kept_BGK: the sampling
    support of the tokens, if sampling was restricted."""
    if model.head == "scalar":
        return {word: OF_SCALARS[word](model, batch, output_nD) for word in asked}
    words = [LOGPROBS, *(word for word in (ENTROPY, MOST_LIKELY) if word in asked)]
    entropy, top = ENTROPY in asked, MOST_LIKELY in asked
    made = response_logprobs(model, batch, output_nD, kept_BGK, entropy=entropy, top=top, **job.sampling)
    return dict(zip(words, made if isinstance(made, tuple) else (made,), strict=True))


def stored_arguments(job: Job, call: LossCall, rows: Rows) -> Rows:
    """The arguments of a loss and its companions that stored rows give."""
    tokens = {key: rows[key] for key in call.responses}
    masks = job.masks(mask_words(job.workload.workflow, call), tokens)
    return {name: rows[key] for name, key in call.arguments} | masks


def read_loss(
    job: Job, call: LossCall, model: Transformer, batch: Sequences, output_nD: Tensor, rows: Rows, prepared: Rows
) -> tuple[Tensor, Mapping[str, tuple], Rows]:
    """The loss of some rows, its sums for the log, and what was read of the output of the last stage. prepared:
    arguments in the place of stored ones."""
    algorithm, function = job.config.algorithm, job.functions[call.name]
    words = {
        word: which for word, which in readout_words(job.workload.workflow, call).items() if word in function.words
    }
    kept_BGK = rows[call.kept] if call.kept else None
    asked = dict.fromkeys(what for _, what in words.values())
    outputs = read_output(job, model, batch, output_nD, asked, kept_BGK)
    given = job.numbers | stored_arguments(job, call, rows) | prepared
    for word, (key, what) in words.items():
        given[word] = outputs[what].chunk(len(call.responses))[call.responses.index(key)]
    made = called(algorithm, call.function, function.function, given)
    return *loss_of(algorithm, call.function, made, learns=torch.is_grad_enabled()), outputs
