"""Inference calls, which make logprobs, values or scores of a model's output; and scores of reward functions."""

# B sequences, P prompt tokens, G response tokens

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.config.options import function_labels
from rlhf_spmd.model.sequences import Sequences, forward_by_layer, lengths_of, sequence_scores
from rlhf_spmd.plan.calls import Infer, Measure, ModelCall, is_gate
from rlhf_spmd.plan.layout import cut, group_name
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import SCORES, TIMEOUTS, actions_of, rewards_of, routes_of
from rlhf_spmd.runtime.execute.iteration import (
    Iteration,
    Place,
    Rows,
    kept_of,
    mask_of,
    row_lengths,
    sequences_of,
    with_routes,
)
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.page_functions import read_loss, read_output
from rlhf_spmd.runtime.execute.parity_gate import corrects, parity_gate, route_gate
from rlhf_spmd.runtime.execute.partial_rollouts import drawn_now
from rlhf_spmd.runtime.execute.passes import Passes
from rlhf_spmd.runtime.generation.episodes import last_turns
from rlhf_spmd.runtime.rewards.response_scores import Judged

ENVIRONMENT = "environment"  # behind the name of scores in the log: the rewards of episodes alone


def begin(job: Job, call: Infer | Measure, run: Run, data: Iteration) -> "Inference | Measurement | None":
    """Returns the forwards of a Run; None if there is nothing left to do: where a function scores in the place of the
    model, and where ZeRO 3 shards its weights, so that each layer runs on all rows before the next one."""
    if job.workload.models[call.model] is None:
        keep_scores(job, call, data, job.place(run), None, run.round)
        return None
    passes = Measurement(job, call, run, data) if isinstance(call, Measure) else Inference(job, call, run, data)
    if job.models.sharded_by_zero(call) is None:
        return passes
    for index, output_nD in enumerate(outputs_of(job, call, passes.batches)):
        passes.read(index, output_nD)
    passes.close()
    return None


def outputs_of(job: Job, call: ModelCall, batches: Sequence[Sequences]) -> Iterator[Tensor]:
    """Yields the output of each batch on this stage, without gradients. Collective where ranks share the model: ZeRO 3
    gathers weights also where there is no batch."""
    if (sharded := job.models.sharded_by_zero(call)) is not None:
        with torch.no_grad():
            yield from forward_by_layer(sharded.model, batches, sharded.gathered)
        return
    with job.models.weights(call) as model:
        for batch in batches:
            yield model.through_stages(batch.tokens_N, batch.context(model))


class Inference(Passes):
    """Makes a readout; `close` stores the results of the last stage."""

    call: Infer

    def __init__(self, job: Job, call: Infer, run: Run, data: Iteration):
        super().__init__(job, call, run, job.models.model(call), [])
        self.data, self.place, self.round, layout = data, job.place(run), run.round, job.layout(call)
        prompts, responses = map(self.rows_at, call.tokens)
        scorer = job.scorer if judges(job, call) and job.scorer is not None and job.scorer.texts is not None else None
        index_MC = data.prompt_MC[self.place]
        reads = job.program.reads(run, job.world.rank) if scorer is not None else ()
        every = {key: data.store.at(key, self.place) for key in reads}

        def batch_of(row: int, columns: Tensor) -> Sequences:
            """Returns the input of some rows."""
            texts = prompts[row, columns], responses[row, columns]
            if scorer is None:
                return Sequences.join(*texts)
            ended_B = job.ended_of({key: value[row, columns] for key, value in every.items()}, call.tokens[1])
            return scorer.batch(*texts, ended_B, index_MC[row, columns.cpu()].tolist())

        self.used_MC = prompts[..., 0] >= 0  # places without a row have no prompt
        self.used_MC &= kept_of(job.workload, {call.tokens[1]: responses}, call.tokens[1:])
        self.used_MC &= data.again(self.place, run.round)
        self.parts: list[tuple[int, Tensor]] = []  # of each micro-batch: its mini-batch and columns
        for row, used_C in enumerate(self.used_MC):
            (columns,) = torch.nonzero(used_C, as_tuple=True)
            if scorer is None:
                lengths = lengths_of(prompts[row, columns], responses[row, columns])
            else:
                lengths = list(batch_of(row, columns).lengths) if len(columns) else []
            self.parts += [(row, columns[part]) for part in cut(lengths, layout, job.micro_batch(layout))]
        self.batches = [batch_of(*part) for part in self.parts]
        if (routes := routes_of(call.responses[0])) in call.inputs:
            given = [data.store.at(routes, self.place)[part] for part in self.parts]
            self.batches = list(map(with_routes, self.batches, given))
        self.results: list[Tensor] = []

    def rows_at(self, key: str) -> Tensor:
        """Returns what the Run reads of a key: [M, C, ...]. A gate also sees responses that go on."""
        carried = self.data.carried
        is_whole = carried is not None and is_gate(self.call) and key in carried.rows.columns
        return (carried.rows if carried is not None and is_whole else self.data.store).at(key, self.place)

    def read(self, index: int, output_nD: Tensor) -> None:
        """Implements `Passes.read`; keeps the readout."""
        word, kept = self.call.function, self.call.kept
        kept_BGK = self.rows_at(kept)[self.parts[index]] if kept else None
        outputs = read_output(self.job, self.model, self.batches[index], output_nD, [word], kept_BGK)
        self.results.append(outputs[word])

    def close(self) -> None:
        """Stores the results."""
        if self.call.drawn and self.model.parallel.shard.tp_index == 0:
            meter, corrected = self.job.meter(self.call, self.data), self.is_corrected()
            for routes in filter(None, (batch.routes for batch in self.batches)):
                route_gate(self.job.config, routes, meter, corrected=corrected)
        if not self.model.parallel.is_last:
            return
        whole = torch.cat(self.results).float() if self.results else None
        if judges(self.job, self.call):
            if whole is not None:
                whole = whole.new_zeros(self.used_MC.shape).masked_scatter(self.used_MC, whole).flatten()
            keep_scores(self.job, self.call, self.data, self.place, whole, self.round)
            return
        if self.call.outputs:
            values_MC = self.data.store.at(self.call.outputs[0], self.place)
            if whole is not None:
                values_MC[self.used_MC] = whole.to(values_MC.dtype)
        if self.call.drawn and whole is not None:
            self.compare(whole)

    def compare(self, new_BG: Tensor) -> None:
        """Compares logprobs where batches are sampled ahead (the parity gate)."""
        call, data, key = self.call, self.data, self.call.responses[0]
        rows = {one: self.rows_at(one)[self.used_MC] for one in call.inputs}
        mask_BG = mask_of(rows, key)
        if data.carried is not None:  # other weights drew what came before this iteration
            mask_BG &= drawn_now(self.job.workload, data, self.place)[self.used_MC]
        given = rows[call.drawn], new_BG, rows[key], mask_BG
        parity_gate(self.job.config, *given, self.job.meter(call, data), corrected=self.is_corrected())

    def is_corrected(self) -> bool:
        """Returns whether a loss corrects differences from the compared logprobs."""
        trained = self.job.workload.workflow.train_calls
        return any(corrects(train) for train in trained if train.drawn == self.call.drawn)


class Measurement(Passes):
    """Only logs a loss (plan/program/evaluation.py)."""

    call: Measure

    def __init__(self, job: Job, call: Measure, run: Run, data: Iteration):
        super().__init__(job, call, run, job.models.model(call), [])
        place, layout, self.meter = job.place(run), job.layout(call), job.meter(call, data)
        rows = {key: data.store.at(key, place).flatten(0, 1) for key in job.program.reads(run, job.world.rank)}
        parts = cut(row_lengths(call, rows), layout, job.micro_batch(layout))
        self.rows: list[Rows] = [{key: value[part] for key, value in rows.items()} for part in parts]
        self.batches = [sequences_of(call, part) for part in self.rows]

    def read(self, index: int, output_nD: Tensor) -> None:
        """Implements `Passes.read`; counts the loss."""
        of_batch = self.batches[index], output_nD, self.rows[index]
        _, sums, _ = read_loss(self.job, self.call, self.model, *of_batch, prepared={})
        for name, (total, weight) in sums.items():
            self.meter.log(name, total, weight, self.job.config.algorithm.over(name))


def judges(job: Job, call: ModelCall) -> bool:
    """Returns whether a call scores whole responses, so that the reward function's scores are added."""
    return call.function == SCORES and job.config.algorithm.roles[call.model].judge


def keep_scores(
    job: Job, call: ModelCall, data: Iteration, place: Place, of_model_B: Tensor | None, number: int = 0
) -> None:
    """Stores the sum of the reward model's scores (None: there is no model, or no row) and the function's, of the rows
    that a round samples."""
    rows = {key: data.store.at(key, place).flatten(0, 1) for key in call.inputs}
    prompts, responses = (rows[key] for key in call.tokens)
    if (actions := actions_of(call.tokens[1])) in rows:
        responses = last_turns(responses, rows[actions])
    again_MC = data.again(place, number)
    kept_B = again_MC.flatten() & kept_of(job.workload, rows, call.inputs)  # nobody judges rows that are dropped
    index_B = data.prompt_MC[place].flatten()[kept_B.cpu().numpy()].tolist()
    of_model_B = None if of_model_B is None else of_model_B[kept_B]
    judged = add_functions(job, call, prompts[kept_B], responses[kept_B], index_B, of_model_B)
    scores_B, logs = judged.scores_B, judged.logs
    if (rewards := rewards_of(call.tokens[1])) in rows:  # of an episode: the sum over its turns
        of_episode_B = rows[rewards][kept_B].sum(1)
        scores_B, logs = scores_B + of_episode_B, logs | {ENVIRONMENT: of_episode_B.tolist()}
    of_all_B = scores_B.new_zeros(len(kept_B)).index_put((kept_B,), scores_B)
    stored_MC, kept_MC = data.store.at(call.outputs[0], place), kept_B.view_as(again_MC)
    stored_MC[:] = torch.where(again_MC, of_all_B.view_as(again_MC), stored_MC)
    name, meter = call.outputs[0].removesuffix("s"), job.meter(call, data)
    if job.config.reward_timeout_s:
        meter.add(TIMEOUTS, len(judged.late), len(scores_B))
    is_first_MC = torch.arange(place[1].start, place[1].stop).expand(again_MC.shape) % job.workload.episode_rows == 0
    is_first_B = is_first_MC[kept_MC.cpu()].tolist()
    for label, values in ({"": scores_B.tolist()} | logs).items():
        counted = [value for value, is_first in zip(values, is_first_B, strict=True) if is_first and value is not None]
        numbers = torch.tensor(counted, dtype=torch.float64)
        logged = f"{name}_{label}" if label else name
        meter.add(logged, numbers.sum(), len(numbers))
        if label and values:
            data.note(logged, place, values, kept_MC)
        if not label or label in function_labels(job.config):
            meter.add(f"{logged}_sq", numbers.square().sum(), len(numbers))


def add_functions(
    job: Job,
    call: ModelCall,
    prompts_BP: Tensor,
    responses_BG: Tensor,
    index_B: Sequence[int],
    of_model_B: Tensor | None,
) -> Judged:
    """Adds the scores of the reward functions to those of the reward model, if there is one. A function runs on one
    rank for each row, which counts it for the log: it may be random or slow, and all ranks with a row must use the same
    score.

    index_B: of the prompts in the data set.
    """
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
    """Scores whole responses outside an iteration; collective where ranks share the reward model. Returns None on the
    ranks of a stage before the last one.

    index_B: of the prompts in the data set.
    """
    of_model_B = None
    if job.workload.models[call.model] is not None:
        assert job.scorer is not None, "this rank judges"
        model, rows = job.models.model(call), (prompts_BP, responses_BG, job.ended(responses_BG), index_B)
        batches = [job.scorer.batch(*rows)] if len(prompts_BP) else []
        for output_nD, batch in zip(outputs_of(job, call, batches), batches, strict=True):
            of_model_B = sequence_scores(model, batch, output_nD) if model.parallel.is_last else None
        if not model.parallel.is_last:
            return None
    return add_functions(job, call, prompts_BP, responses_BG, index_B, of_model_B)
