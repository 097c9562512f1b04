"""Inference calls, which make logprobs, values or scores of a model's output; and scores of reward functions."""

# B sequences, P prompt tokens, G response tokens

from collections.abc import Callable, Sequence
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
from rlhf_spmd.plan.workflow import Infer, Measure, ModelCall
from rlhf_spmd.runtime.execute.iteration import Iteration, Place
from rlhf_spmd.runtime.execute.job import Job, shape_of
from rlhf_spmd.runtime.execute.page_functions import called, loss_of
from rlhf_spmd.runtime.execute.pipeline_runtime import Passes
from rlhf_spmd.runtime.execute.readout import read_for_loss, read_output, row_lengths, sequences_of, stored_arguments
from rlhf_spmd.runtime.rewards.response_scores import Judged


@dataclass(frozen=True, slots=True)
class _Reading:
    """The micro-batches of a Run, and what becomes of them. read: takes the output of one on the last stage; close:
    called after the last one."""

    batches: Sequence[Sequences]
    read: Callable[[int, Tensor], None]
    close: Callable[[], None]


def begin(job: Job, call: Infer | Measure, run: Run, data: Iteration) -> Passes | None:
    """The forwards of a Run; None if there is nothing left to do: where a function scores in the place of the model,
    and where ZeRO 3 shards its weights, so that each layer runs on all rows before the next one."""
    if job.workload.models[call.model] is None:
        keep_scores(job, call, data, job.place(run), None)
        return None
    model = job.models.model(call)
    if isinstance(call, Measure):
        reading = _measurement(job, call, run, data, model)
    else:
        reading = _inference(job, call, run, data, model)
    batches, read = reading.batches, reading.read
    if (sharded := job.models.sharded_by_zero(call)) is not None:
        with torch.no_grad():
            for index, output in enumerate(forward_by_layer(sharded.model, batches, sharded.gathered)):
                read(index, output)
        reading.close()
        return None

    @torch.no_grad()
    def one_pass(index: int, received_nD: Tensor | None) -> Tensor | None:
        """One micro-batch through this stage -> the input of the next stage; the last one reads its output."""
        output_nD = forward(model, batches[index], received_nD)
        if not model.parallel.is_last:
            return output_nD
        read(index, output_nD)
        return None

    def num_tokens(index: int) -> int:
        return len(batches[index].tokens_N)

    return Passes(model, len(batches), num_tokens, one_pass, reading.close, within=job.models.weights(call))


def _inference(job: Job, call: Infer, run: Run, data: Iteration, model: Transformer) -> _Reading:
    """Makes a readout; `close` stores the results of the last stage."""
    place, layout = job.place(run), job.layout(call)
    prompts, responses = (job.held(data, key, place) for key in call.tokens)
    last = model.parallel.is_last
    kept = job.held(data, call.kept, place) if last and call.kept else None
    scorer = job.scorer if judges(job, call) and job.scorer is not None and job.scorer.texts is not None else None
    index_MC = data.prompt_MC[place]
    join, lengths = (Sequences.join, lengths_of) if scorer is None else (scorer.batch, scorer.lengths)

    def rows_of(row: int, places: Tensor) -> tuple:
        """What the input of some rows is made of."""
        rows = prompts[row, places], responses[row, places]
        if scorer is None:
            return rows
        return (*rows, job.ended(rows[1]), index_MC[row, places.cpu()].tolist())

    used_MC = prompts[..., 0] >= 0  # places without a row have no prompt
    parts = []
    for row, used_C in enumerate(used_MC):
        (places,) = torch.nonzero(used_C, as_tuple=True)
        of_row = lengths(*rows_of(row, places))
        parts += [(row, places[part]) for part in cut(of_row, layout, job.micro_batch(layout))]
    batches = [join(*rows_of(*part)) for part in parts]
    results: list[Tensor] = []

    def read(index: int, output_nD: Tensor) -> None:
        """Keeps the readout of one micro-batch."""
        sets = None if kept is None else kept[parts[index]]
        results.append(read_output(call.function, model, batches[index], output_nD, sets, job.sampling))

    def close() -> None:
        whole = torch.cat(results).float() if results else None
        if last and judges(job, call):
            keep_scores(job, call, data, place, whole)
        elif last and prompts.numel():  # also where no place has a row
            values_MC = data.store.at(call.outputs[0], place)
            if whole is not None:
                values_MC[used_MC] = whole.to(values_MC.dtype)

    return _Reading(batches, read, close)


def _measurement(job: Job, call: Measure, run: Run, data: Iteration, model: Transformer) -> _Reading:
    """Only logs a loss (plan/program/evaluation.py)."""
    place, layout, algorithm = job.place(run), job.layout(call), job.config.algorithm
    keys = job.program.reads(run, job.world.rank)
    rows = {key: job.held(data, key, place).flatten(0, 1) for key in keys}
    parts = [
        {key: value[part] for key, value in rows.items()}
        for part in cut(row_lengths(call, rows), layout, job.micro_batch(layout))
    ]
    batches, numbers = [sequences_of(call, part) for part in parts], job.numbers

    def read(index: int, output_nD: Tensor) -> None:
        own = read_for_loss(job, call, model, batches[index], output_nD, parts[index])[1]
        given = numbers | stored_arguments(job, call, parts[index]) | own
        made = called(algorithm, call.function, job.functions[call.name].function, given)
        for name, (total, weight) in loss_of(algorithm, call.function, made, learns=False)[1].items():
            job.meter(call, data).log(name, total, weight, algorithm.over(name))

    return _Reading(batches, read, lambda: None)


def judges(job: Job, call: ModelCall) -> bool:
    """Whether a call scores whole responses, so that the reward function's scores are added."""
    return call.function == SCORES and job.config.algorithm.roles[call.model].judge


def keep_scores(job: Job, call: ModelCall, data: Iteration, place: Place, of_model_B: Tensor | None) -> None:
    """Stores the sum of the reward model's scores (None: there is no model, or no row) and the function's."""
    prompts, responses = (job.held(data, key, place).flatten(0, 1) for key in call.tokens)
    index_B = data.prompt_MC[place].flatten().tolist()
    judged = add_functions(job, call, prompts, responses, index_B, of_model_B)
    scores_B, logs = judged.scores_B, judged.logs
    data.store.at(call.outputs[0], place)[:] = scores_B.unflatten(0, shape_of(place))
    name, meter = call.outputs[0].removesuffix("s"), job.meter(call, data)
    if job.config.reward_timeout_s:
        meter.add(TIMEOUTS, len(judged.late), len(scores_B))
    for label, values in ({"": scores_B.tolist()} | logs).items():
        found = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
        meter.add(f"{name}_{label}" if label else name, found.sum(), len(found))
        if label and values:
            data.note(f"{name}_{label}", place, values)
        if not label or label in function_labels(job.config):
            meter.add(f"{name}_{label}_sq" if label else f"{name}_sq", found.square().sum(), len(found))


def add_functions(
    job: Job,
    call: ModelCall,
    prompts_BP: Tensor,
    responses_BG: Tensor,
    index_B: Sequence[int],
    of_model_B: Tensor | None,
) -> Judged:
    """The reward model's scores, if there is one, plus those of the reward functions. A function runs on one rank for
    each row, which counts it for the log: it may be random or slow, and all ranks with a row must use the same score.
    index_B: of the prompts in the data set."""
    scores_B = torch.zeros(len(prompts_BP), device=prompts_BP.device) if of_model_B is None else of_model_B
    scorer = job.scorer
    assert scorer is not None, "this rank judges"
    if not scorer.specs:
        return Judged(scores_B)
    rank = job.world.rank
    slices = job.layout(call).tensor_ranks(rank)
    judged = Judged(scores_B)
    if rank == slices[0] and len(prompts_BP):
        judged = scorer.of_functions(prompts_BP, responses_BG, index_B)
        scores_B = scores_B + judged.scores_B
    if len(slices) > 1:
        dist.broadcast(scores_B, src=slices[0], group=job.world.group(group_name(slices)))
    return replace(judged, scores_B=scores_B)


def scores(
    job: Job, call: ModelCall, prompts_BP: Tensor, responses_BG: Tensor, index_B: Sequence[int]
) -> Judged | None:
    """Scores of whole responses outside an iteration; collective where ranks share the reward model. None on the
    ranks of a stage before the last one. index_B: of the prompts in the data set."""
    of_model_B = None
    if job.workload.models[call.model] is not None:
        assert job.scorer is not None, "this rank judges"
        rows = prompts_BP, responses_BG, job.ended(responses_BG), index_B
        batches = [job.scorer.batch(*rows)] if len(prompts_BP) else []
        with torch.no_grad():
            of_model_B, is_last = _scores_of_model(job, call, batches)
        if not is_last:
            return None
    return add_functions(job, call, prompts_BP, responses_BG, index_B, of_model_B)


def _scores_of_model(job: Job, call: ModelCall, batches: Sequence[Sequences]) -> tuple[Tensor | None, bool]:
    """The scores of at most one batch, on the last stage; and whether this rank is there."""
    if (sharded := job.models.sharded_by_zero(call)) is not None:  # gathers weights also without a batch
        made = enumerate(forward_by_layer(sharded.model, batches, sharded.gathered))
        found = [sequence_scores(sharded.model, batches[index], output) for index, output in made]
        return (found[0] if found else None), True
    with job.models.weights(call) as model:
        for batch in batches:
            output = model.through_stages(batch.tokens_N, batch.context(model))
            if model.parallel.is_last:
                return sequence_scores(model, batch, output), True
        return None, model.parallel.is_last
