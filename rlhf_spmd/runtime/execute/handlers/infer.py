"""Inference calls, which make logprobs, values or scores of a model's output; and scores of reward functions."""

# B sequences, P prompt tokens, G response tokens

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.config.options import function_labels
from rlhf_spmd.model.sequences import Sequences, forward, forward_by_layer, lengths_of, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.layout import cut, group_name
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import SCORES, TIMEOUTS
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.runtime.execute.handlers.context import CallContext, shape_of
from rlhf_spmd.runtime.execute.iteration import Iteration, Place
from rlhf_spmd.runtime.execute.optimizer_step import Training, read_output, row_lengths, sequences_of
from rlhf_spmd.runtime.execute.pipeline_runtime import Passes
from rlhf_spmd.runtime.rewards.response_scores import Judged


@dataclass(frozen=True, slots=True)
class Forwards:
    """The micro-batches of one Run on one rank. read: takes the output of one on the last stage; close: called after
    the last one."""

    model: Transformer
    batches: Sequence[Sequences]
    read: Callable[[int, Tensor], None]
    close: Callable[[], None]

    def passes(self) -> Passes:
        """As the passes of a stage."""

        @torch.no_grad()
        def one_pass(index: int, received_nD: Tensor | None) -> Tensor | None:
            output_nD = forward(self.model, self.batches[index], received_nD)
            return self.read(index, output_nD) if self.model.parallel.is_last else output_nD

        return Passes(
            self.model, len(self.batches), lambda index: len(self.batches[index].tokens_N), one_pass, self.close
        )

    @torch.no_grad()
    def run(self, context: CallContext, call: Call) -> None:
        """All of them, in a layout without stages."""
        for index, output_nD in enumerate(outputs(context, call, self.batches)):
            self.read(index, output_nD)
        self.close()


def outputs(context: CallContext, call: Call, batches: Sequence[Sequences]) -> Iterator[Tensor]:
    """The outputs of a call's model, which has no stages; collective if ZeRO 3 shards it."""
    sharded = context.models.sharded_by_zero(call)
    if sharded is not None:
        yield from forward_by_layer(sharded.model, batches, sharded.gathered)
        return
    with context.models.weights(call) as model:
        for batch in batches:
            yield forward(model, batch)


def inference(context: CallContext, call: Call, step: Run, data: Iteration, model: Transformer) -> Forwards:
    """Forwards that make a readout; `close` stores the results of the last stage."""
    place, layout = context.place(step), context.layout(call)
    prompts, responses = (context.held(data, key, place) for key in call.tokens)
    last = model.parallel.is_last
    kept = context.held(data, call.kept, place) if last and call.kept else None
    by_text, index_MC = judges(context, call) and context.scorer.texts is not None, data.prompt_MC[place]
    join, lengths = Sequences.join, lengths_of
    if by_text:
        join, lengths = context.scorer.batch, context.scorer.lengths

    def rows_of(row: int, places: Tensor) -> tuple:
        """What the input of some rows is made of."""
        rows = prompts[row, places], responses[row, places]
        return (*rows, context.ended(rows[1]), index_MC[row, places.cpu()].tolist()) if by_text else rows

    used_MC = prompts[..., 0] >= 0  # places without a row have no prompt
    parts = []
    for row, used_C in enumerate(used_MC):
        (places,) = torch.nonzero(used_C, as_tuple=True)
        of_row = lengths(*rows_of(row, places))
        parts += [(row, places[part]) for part in cut(of_row, layout, context.micro_batch(layout))]
    batches = [join(*rows_of(*part)) for part in parts]
    results: list[Tensor] = []

    def read(index: int, output_nD: Tensor) -> None:
        sets = None if kept is None else kept[parts[index]]
        results.append(read_output(call.function, model, batches[index], output_nD, sets, context.sampling))

    def close() -> None:
        whole = torch.cat(results).float() if results else None
        if last and judges(context, call):
            keep_scores(context, call, data, place, whole)
        elif last and prompts.numel():  # also where no place has a row
            values_MC = data.store.at(call.outputs[0], place)
            if whole is not None:
                values_MC[used_MC] = whole.to(values_MC.dtype)

    return Forwards(model, batches, read, close)


def measurement(
    context: CallContext, training: Training, call: Call, step: Run, data: Iteration, model: Transformer
) -> Forwards:
    """Forwards that only log a loss (plan/program/evaluation.py)."""
    place, layout = context.place(step), context.layout(call)
    keys = context.program.reads(step, context.world.rank)
    rows = {key: context.held(data, key, place).flatten(0, 1) for key in keys}
    parts = [
        {key: value[part] for key, value in rows.items()}
        for part in cut(row_lengths(call, rows), layout, context.micro_batch(layout))
    ]
    batches = [sequences_of(call, part) for part in parts]
    numbers = context.config.algorithm.numbers(context.config.options, None)

    def read(index: int, output_nD: Tensor) -> None:
        for name, (total, weight) in training.measure(
            call, model, batches[index], output_nD, parts[index], numbers
        ).items():
            context.meter(call, data).log(name, total, weight, context.config.algorithm.over(name))

    return Forwards(model, batches, read, lambda: None)


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
        rows = prompts_BP, responses_BG, context.ended(responses_BG), index_B
        batches = [context.scorer.batch(*rows)] if len(prompts_BP) else []
        with torch.no_grad():
            of_model_B, is_last = _scores_of_model(context, call, batches)
        if not is_last:
            return None
    return add_functions(context, call, prompts_BP, responses_BG, index_B, of_model_B)


def _scores_of_model(context: CallContext, call: Call, batches: Sequence[Sequences]) -> tuple[Tensor | None, bool]:
    """The scores of at most one batch, on the last stage; and whether this rank is there."""
    if context.layout(call).pp == 1:
        model = context.models.model(call)
        made = enumerate(outputs(context, call, batches))  # also without a batch, since ZeRO 3 gathers weights
        found = [sequence_scores(model, batches[index], output) for index, output in made]
        return (found[0] if found else None), True
    with context.models.weights(call) as model:  # ZeRO 3 has no stages
        for batch in batches:
            output = model.through_stages(batch.tokens_N, batch.context(model))
            if model.parallel.is_last:
                return sequence_scores(model, batch, output), True
        return None, model.parallel.is_last
