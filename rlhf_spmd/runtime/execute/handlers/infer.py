"""Inference calls, which make logprobs, values or scores of a model's output; and scores of reward functions."""

# B sequences, P prompt tokens, G response tokens

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.config import function_labels
from rlhf_spmd.model.sequences import Sequences, forward, lengths_of, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.layout import cut, group_name
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import SCORES, TIMEOUTS
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.runtime.data.response_scores import Judged
from rlhf_spmd.runtime.execute.handlers.context import CallContext, shape_of
from rlhf_spmd.runtime.execute.iteration import Iteration, Place
from rlhf_spmd.runtime.execute.optimizer_step import Training, read_output, row_lengths, sequences_of
from rlhf_spmd.runtime.execute.pipeline_runtime import Passes


def inference(context: CallContext, call: Call, step: Run, data: Iteration, model: Transformer) -> Passes:
    """Forwards of the micro-batches of a Run; `close` stores the results of the last stage."""
    place, layout = context.place(step), context.layout(call)
    prompts, responses = (context.held(data, key, place) for key in call.tokens)
    last = model.parallel.is_last
    kept = context.held(data, call.kept, place) if last and call.kept else None
    join, lengths = Sequences.join, lengths_of
    if judges(context, call):
        join, lengths = context.scorer.batch, context.scorer.lengths
    used_MC = prompts[..., 0] >= 0  # places without a row have no prompt
    parts = []
    for row, used_C in enumerate(used_MC):
        (places,) = torch.nonzero(used_C, as_tuple=True)
        of_row = lengths(prompts[row, places], responses[row, places])
        parts += [(row, places[part]) for part in cut(of_row, layout, context.micro_batch(layout))]
    batches = [join(prompts[part], responses[part]) for part in parts]
    results: list[Tensor] = []

    @torch.no_grad()
    def one_pass(index: int, received_nD: Tensor | None) -> Tensor | None:
        output_nD = forward(model, batches[index], received_nD)
        if not last:
            return output_nD
        sets = None if kept is None else kept[parts[index]]
        results.append(read_output(call.function, model, batches[index], output_nD, sets, context.sampling))
        return None

    def close() -> None:
        whole = torch.cat(results).float() if results else None
        if last and judges(context, call):
            keep_scores(context, call, data, place, whole)
        elif last and prompts.numel():  # also where no place has a row
            values_MC = data.store.at(call.outputs[0], place)
            if whole is not None:
                values_MC[used_MC] = whole.to(values_MC.dtype)

    return Passes(model, len(batches), lambda index: len(batches[index].tokens_N), one_pass, close)


def measurement(
    context: CallContext, training: Training, call: Call, step: Run, data: Iteration, model: Transformer
) -> Passes:
    """Forwards of the micro-batches of a Run that only logs a loss (plan/program/evaluation.py)."""
    place, layout = context.place(step), context.layout(call)
    keys = context.program.reads(step, context.world.rank)
    rows = {key: context.held(data, key, place).flatten(0, 1) for key in keys}
    parts = [
        {key: value[part] for key, value in rows.items()}
        for part in cut(row_lengths(call, rows), layout, context.micro_batch(layout))
    ]
    batches = [sequences_of(call, part) for part in parts]
    numbers = context.config.algorithm.numbers(context.config.options, None)

    @torch.no_grad()
    def one_pass(index: int, received_nD: Tensor | None) -> Tensor | None:
        output_nD = forward(model, batches[index], received_nD)
        if not model.parallel.is_last:
            return output_nD
        for name, (total, weight) in training.measure(
            call, model, batches[index], output_nD, parts[index], numbers
        ).items():
            context.meter(call, data).log(name, total, weight, context.config.algorithm.over(name))
        return None

    return Passes(model, len(batches), lambda index: len(batches[index].tokens_N), one_pass, lambda: None)


def judges(context: CallContext, call: Call) -> bool:
    """Whether a call scores whole responses, so that the reward function's scores are added."""
    return call.function == SCORES and context.config.algorithm.roles[call.model].judge


def keep_scores(context: CallContext, call: Call, data: Iteration, place: Place, of_model_B: Tensor | None) -> None:
    """Stores the sum of the reward model's scores (None: there is no model, or no row) and the function's."""
    prompts, responses = (context.held(data, key, place).flatten(0, 1) for key in call.tokens)
    index_B = data.prompt_MC[place].flatten().tolist()
    judged = add_functions(context, call, prompts, responses, index_B, of_model_B)
    scores_B, logs = judged.scores_B, judged.logs
    data.store.at(call.outputs[0], place)[:] = scores_B.unflatten(0, shape_of(place))
    name, meter = call.outputs[0].removesuffix("s"), context.meter(call, data)
    if context.config.reward_timeout_s:
        meter.add(TIMEOUTS, len(judged.late), len(scores_B))
    for label, values in ({"": scores_B.tolist()} | logs).items():
        found = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
        meter.add(f"{name}_{label}" if label else name, found.sum(), len(found))
        if label and values:
            data.note(f"{name}_{label}", place, values)
        if not label or label in function_labels(context.config):
            meter.add(f"{name}_{label}_sq" if label else f"{name}_sq", found.square().sum(), len(found))


def add_functions(
    context: CallContext,
    call: Call,
    prompts_BP: Tensor,
    responses_BG: Tensor,
    index_B: Sequence[int],
    of_model_B: Tensor | None,
) -> Judged:
    """The reward model's scores, if there is one, plus those of the reward functions. A function runs on one rank for
    each row, which counts it for the log: it may be random or slow, and all ranks with a row must use the same score.
    index_B: of the prompts in the data set."""
    scores_B = torch.zeros(len(prompts_BP), device=prompts_BP.device) if of_model_B is None else of_model_B
    if not context.scorer.specs:
        return Judged(scores_B)
    rank = context.world.rank
    slices = context.layout(call).tensor_ranks(rank)
    judged = Judged(scores_B)
    if rank == slices[0] and len(prompts_BP):
        judged = context.scorer.of_functions(prompts_BP, responses_BG, index_B)
        scores_B = scores_B + judged.scores_B
    if len(slices) > 1:
        dist.broadcast(scores_B, src=slices[0], group=context.world.group(group_name(slices)))
    return replace(judged, scores_B=scores_B)


def scores(
    context: CallContext, call: Call, prompts_BP: Tensor, responses_BG: Tensor, index_B: Sequence[int]
) -> Judged | None:
    """Scores of whole responses outside an iteration; collective where ranks share the reward model. None on the
    ranks of a stage before the last one. index_B: of the prompts in the data set."""
    of_model_B = None
    if context.workload.models[call.model] is not None:
        with torch.no_grad(), context.models.weights(call) as model:
            if len(prompts_BP):
                batch = context.scorer.batch(prompts_BP, responses_BG)
                output = model.through_stages(batch.tokens_N, batch.context(model.parallel.shard.tp))
                of_model_B = sequence_scores(model, batch, output) if model.parallel.is_last else None
            if not model.parallel.is_last:
                return None
    return add_functions(context, call, prompts_BP, responses_BG, index_B, of_model_B)
