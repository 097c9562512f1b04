"""What each call of the workflow computes on a rank: the bridge from names ("logprobs", "policy_loss") to tensor math.

Rows of an iteration lie in a matrix [M mini-batches, C columns]; a Run works on this rank's columns, which the ranks of
one data-parallel shard share. Numbers for the log are added by the one of them that reports (`Layout.reports`).
"""

# M mini-batches, C columns (= mini_batch), B sequences, P prompt tokens, G response tokens

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms import ppo_math
from rlhf_spmd.config import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs, response_values, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.layout import Layout, group_name
from rlhf_spmd.plan.program.instructions import MINI_BATCHES_AT_ONCE, Program, Run
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.runtime.data.scorer import Scorer
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, Place
from rlhf_spmd.runtime.execute.micro_batches import cut, lengths_of
from rlhf_spmd.runtime.execute.optimizer_step import Step, Training, summed
from rlhf_spmd.runtime.execute.pipeline_runtime import Inference, Optimization, Passes, through_stages
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.kvcache import free_bytes
from rlhf_spmd.runtime.generation.rows import Rollout
from rlhf_spmd.runtime.observe.meter import Meter
from rlhf_spmd.runtime.weights.models import RankModels
from rlhf_spmd.runtime.world.world import World


@dataclass(slots=True)
class State:
    """What changes between iterations, the same on every rank."""

    kl_coef: float
    scores: ppo_math.RunningMoments = ppo_math.RunningMoments()
    steps: dict[str, int] = field(default_factory=dict)  # optimizer steps per model


class Calls:
    """Runs calls on this rank's columns. Collectives are entered here, in the models and the engines."""

    def __init__(
        self,
        program: Program,
        config: Config,
        world: World,
        models: RankModels,
        scorer: Scorer | None,
        eos_ids: Sequence[int],
        num_known: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        """eos_ids: what ends a response. num_known: how many token ids every model that reads them knows. decode: token
        ids to text, for stop texts."""
        self.num_known = num_known
        self.program, self.config, self.world, self.models = program, config, world, models
        self.workload, self.scorer, self.eos_ids = program.workload, scorer, tuple(eos_ids)
        self.sampling = {
            "temperature": config.generation.temperature,
            "eos_ids": self.eos_ids,
            "min_new_tokens": config.generation.min_new_tokens,
        }
        generation = config.generation
        self.drawing = self.sampling | {  # what is restricted is found when generating, and replayed afterwards
            "top_k": generation.top_k,
            "top_p": generation.top_p,
            "min_p": generation.min_p,
            "stop": generation.stop,
            "decode": decode,
        }
        self.training = Training(config, world.rank, self.sampling)

    def run(self, step: Run, data: Iteration, state: State) -> None:
        """Executes one Run without stages."""
        call = self.workload.workflow.call(step.call)
        if call.kind == "generate":
            self._generate(call, step, data)
        elif call.kind == "compute":
            self._estimate_advantages(call, step, data, state)
        elif call.kind == "train":
            begun = self._begin(call, step, data, state)
            if begun is not None:
                self.training.whole(begun)
                self._end(begun, data)
        elif self.workload.models[call.model] is None:
            self._keep_scores(call, data, self._place(step), None)
        else:
            with self.models.weights(call) as model:
                batches, finish, close = self._inference(call, step, data, model)
                for index, batch in enumerate(batches):
                    finish(index, forward(model, batch))
                close()

    def passes(self, step: Run, data: Iteration, state: State) -> Passes | None:
        """The passes of a Run with stages; None if there is nothing to do."""
        call = self.workload.workflow.call(step.call)
        if call.kind == "train":
            begun = self._begin(call, step, data, state)
            if begun is None:
                return None

            def update() -> None:
                self.training.update(begun)
                self._end(begun, data)

            return Optimization(self.training, begun, update)
        with self.models.weights(call) as model:  # without ZeRO 3, which has no stages, they stay
            return Inference(model, *self._inference(call, step, data, model))

    def _layout(self, call: Call) -> Layout:
        return self.program.placement.layouts[call.name]

    def _place(self, step: Run) -> Place:
        """The rows of a Run on this rank: slices of mini-batches and of columns."""
        rows, columns = self.program.mini_batches_of(step), self.program.columns_of(step, self.world.rank)
        return slice(rows.start, rows.stop), slice(columns.start, columns.stop)

    def _micro_batch(self, layout: Layout) -> int:
        return layout.micro_batch or self.workload.micro_batch

    def _meter(self, call: Call, data: Iteration) -> Meter:
        """Where to count rows: nowhere, if another rank of the same shard reports them."""
        return data.meter if self._layout(call).reports(self.world.rank) else Meter()

    # ---- generation and inference -----------------------------------------------------------------------------------

    def _generate(self, call: Call, step: Run, data: Iteration) -> None:
        place = self._place(step)
        shape = tuple(part.stop - part.start for part in place)
        started = time.perf_counter()
        with self.models.weights(call) as model:
            if data.generation is None:
                data.generation = self._generation(model, step, data, place[1])
            responses, logprobs, kept = data.generation.of(place[0])
            if data.generation.is_over:
                data.generation = None  # its memory is for training now
        if responses.numel() and (drawn := int(responses.max())) >= self.num_known:
            raise UserError(
                f"the actor drew token {drawn}, which no text has (its embeddings are padded), and other models know "
                f"only {self.num_known} tokens; give them as many by transformers' resize_token_embeddings"
            )
        made = {"responses": responses, "logprobs": logprobs, "kept_tokens": kept}
        for key in self.program.makes(step, self.world.rank):  # a stage before the last one goes on with none of it
            self._keep(data, key, place, made[key].unflatten(0, shape))
        mask, meter = responses >= 0, self._meter(call, data)
        meter.add("response_length", mask.sum(), len(responses))
        meter.add("ended_fraction", self._ended(responses).sum(), len(responses))
        data.generate_s += time.perf_counter() - started
        meter.maximum("generate_s", data.generate_s)

    def _generation(self, model: Transformer, step: Run, data: Iteration, columns: slice) -> Rollout:
        """All that this rank generates in an iteration, in the order in which it will be asked for."""
        generation, num_rows = self.config.generation, columns.stop - columns.start
        places = generation.max_sequences
        if step.mini_batch is not None:
            # streaming: the first mini-batch must not wait for all others
            places = min(places, MINI_BATCHES_AT_ONCE * num_rows)
        workflow = self.program.workload.workflow
        return Rollout(
            model,
            data.store.at("prompts", (ALL, columns)),
            data.random_bits(random_streams.of_call(workflow, workflow.call(step.call)), columns),
            max_sequences=max(min(places, num_rows * self.workload.num_mini_batches), 1),
            block_size=generation.block_size,
            free_bytes=generation.cache_fraction * free_bytes(self.world.device, self.world.computes.num_ranks),
            **self.drawing,
        )

    def _inference(
        self, call: Call, step: Run, data: Iteration, model: Transformer
    ) -> tuple[list[Sequences], Callable[[int, Tensor], None], Callable[[], None]]:
        """The micro-batches of a Run, what makes a result of the last stage's output, and what keeps the results."""
        place, layout = self._place(step), self._layout(call)
        prompts, responses = (self._held(data, key, place) for key in ("prompts", "responses"))
        last = model.parallel.is_last
        kept = self._held(data, "kept_tokens", place) if last and "kept_tokens" in call.inputs else None
        join, lengths = Sequences.join, lengths_of
        if call.function == "scores":
            join, lengths = self.scorer.batch, self.scorer.lengths
        parts = [
            (row, part)
            for row in range(len(prompts))
            for part in cut(lengths(prompts[row], responses[row]), layout, self._micro_batch(layout))
        ]
        batches = [join(prompts[part], responses[part]) for part in parts]
        results: list[Tensor] = []

        def finish(index: int, output: Tensor) -> None:
            if call.function == "logprobs":
                sets = None if kept is None else kept[parts[index]]
                results.append(response_logprobs(model, batches[index], output, sets, **self.sampling))
            else:
                made = {"values": response_values, "scores": sequence_scores}[call.function]
                results.append(made(model, batches[index], output))

        def close() -> None:
            whole = torch.cat(results).float() if results else None
            if call.function == "scores":
                self._keep_scores(call, data, place, whole)
            elif whole is not None:
                self._keep(data, call.outputs[0], place, whole.unflatten(0, prompts.shape[:2]))

        return batches, finish, close if last else _nothing

    def _keep_scores(self, call: Call, data: Iteration, place: Place, of_model_B: Tensor | None) -> None:
        """Stores the sum of the reward model's scores (None: there is no model, or no row) and the function's."""
        prompts, responses = (self._held(data, key, place).flatten(0, 1) for key in ("prompts", "responses"))
        scores_B = self.add_function(call, prompts, responses, of_model_B)
        shape = tuple(part.stop - part.start for part in place)
        self._keep(data, call.outputs[0], place, scores_B.unflatten(0, shape))
        wide_B, used_B = scores_B.double(), self._ended(responses)
        if self.config.ppo.truncation == "score":
            used_B = torch.ones_like(used_B)
        meter = self._meter(call, data)
        for name, counted_B in (("score", wide_B), ("used_score", wide_B[used_B])):
            meter.add(name, counted_B.sum(), len(counted_B))
            meter.add(f"{name}_sq", counted_B.square().sum(), len(counted_B))

    def add_function(self, call: Call, prompts_BP: Tensor, responses_BG: Tensor, of_model_B: Tensor | None) -> Tensor:
        """scores_B: the reward model's, if there is one, plus the reward function's. The function runs once for each
        row: what is random or slow in it must not differ between ranks that go on with the same row."""
        scores_B = torch.zeros(len(prompts_BP), device=prompts_BP.device) if of_model_B is None else of_model_B
        if self.scorer.function is None:
            return scores_B
        layout = self._layout(call)
        slices = layout.tensor_ranks(self.world.rank)
        if self.world.rank == slices[0] and len(prompts_BP):
            scores_B = scores_B + self.scorer.of_function(prompts_BP, responses_BG)
        if len(slices) > 1:
            dist.broadcast(scores_B, src=slices[0], group=self.world.group(group_name(slices)))
        return scores_B

    def scores(self, call: Call, prompts_BP: Tensor, responses_BG: Tensor) -> Tensor | None:
        """Scores [B] of whole responses outside an iteration; collective where ranks share the reward model. None on
        the ranks of a stage before the last one."""
        of_model_B = None
        if self.workload.models[call.model] is not None:
            with torch.no_grad(), self.models.weights(call) as model:
                batch = self.scorer.batch(prompts_BP, responses_BG) if len(prompts_BP) else None
                output = through_stages(model, batch) if batch is not None else None
                if not model.parallel.is_last:
                    return None
                of_model_B = sequence_scores(model, batch, output) if batch is not None else None
        return self.add_function(call, prompts_BP, responses_BG, of_model_B)

    def _ended(self, responses_BG: Tensor) -> Tensor:
        """True where a response ended by itself, False where it was truncated: bool [B]. A stop text in the very last
        place does not count."""
        ended_B = ppo_math.ended(responses_BG, self.eos_ids)
        return ended_B | (responses_BG[:, -1] < 0) if self.config.generation.stop else ended_B

    def _keep(self, data: Iteration, key: str, place: Place, value: Tensor) -> None:
        """Puts the rows of a Run into the store."""
        data.store.at(key, place)[:] = value

    def _held(self, data: Iteration, key: str, place: Place) -> Tensor:
        """The rows of a key at a place. A rank without columns may have nothing of the key."""
        assert key in data.store or place[1].start == place[1].stop, f"{key} is read before it is there"
        return data.store.at(key, place)

    # ---- advantages -------------------------------------------------------------------------------------------------

    def _estimate_advantages(self, call: Call, step: Run, data: Iteration, state: State) -> None:
        """Rewards, GAE and returns of this rank's columns; whitened here only if whiten=batch."""
        ppo, layout = self.config.ppo, self.program.layout_of(step)
        place, reports = self._place(step), layout.reports(self.world.rank)
        responses, logprobs, ref_logprobs, scores, values = (
            self._held(data, key, place).flatten(0, 1) for key in call.inputs
        )
        mask, ended = ppo_math.response_mask(responses), self._ended(responses)
        shaped = ppo_math.shaped_scores(
            scores,
            ended,
            truncation=ppo.truncation,
            truncation_penalty=ppo.truncation_penalty,
            clip_score=ppo.clip_score,
            mean=state.scores.mean if ppo.normalize_scores else 0.0,
            std=state.scores.std if ppo.normalize_scores else 1.0,
        )
        kl = ppo_math.token_kl(logprobs, ref_logprobs, mask)
        rewards = ppo_math.token_rewards(shaped, kl, mask, state.kl_coef)
        bootstrap = ~ended if ppo.truncation == "bootstrap" else None
        advantages, returns = ppo_math.gae(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam, bootstrap_B=bootstrap)
        if ppo.whiten == "batch":
            moments = ppo_math.moments(advantages, mask)
            group = self.world.group(step.group) if step.group else None
            moments = summed(moments if reports else torch.zeros_like(moments), group=group)
            advantages = ppo_math.whiten(advantages, mask, moments)
        shape = tuple(part.stop - part.start for part in place)
        self._keep(data, "advantages", place, advantages.unflatten(0, shape))
        self._keep(data, "returns", place, returns.unflatten(0, shape))
        if reports and step.reader == self.program.placement.sites(call, self.workload.workflow)[0]:
            data.meter.add("reward", shaped.double().sum(), len(shaped))
            data.meter.add("reward_sq", shaped.double().square().sum(), len(shaped))
            data.meter.add("kl", kl.double().sum(), len(shaped))
            data.meter.add("kl_per_token", kl.double().sum(), mask.sum())
            data.meter.add("return", returns.double().sum(), mask.sum())
            data.meter.add("value", torch.where(mask, values[:, :-1], 0.0).double().sum(), mask.sum())

    # ---- training ---------------------------------------------------------------------------------------------------

    def _begin(self, call: Call, step: Run, data: Iteration, state: State) -> Step | None:
        """One optimizer step on one global mini-batch begins; None if the actor has been stopped early."""
        number = state.steps.get(call.model, 0)
        state.steps[call.model] = number + 1
        if call.model == "actor" and data.stopped:
            return None
        layout = self._layout(call)
        _, columns = self._place(step)
        source_B = data.source_EMC[step.epoch, step.mini_batch, columns]
        places = (source_B, torch.arange(len(source_B), device=source_B.device))
        keys = self.program.reads(step, self.world.rank)
        return self.training.begin(
            step,
            call,
            layout,
            self.models.engines[call.model],
            {key: self._held(data, key, (ALL, columns))[places] for key in keys},
            rate=self._learning_rate(call.model, number),
            micro_batch=self._micro_batch(layout),
            mini_batch=self.workload.mini_batch,
            meter=data.meter,
            group=self.world.group(step.group) if step.group else None,
        )

    def _end(self, begun: Step, data: Iteration) -> None:
        """Whether this was the actor's last step of the iteration."""
        group = self.world.group(begun.run.group) if begun.run.group else None
        if begun.call.function == "policy_loss":
            data.stopped = self.training.kl_exceeds(begun, group=group, device=self.world.device)

    def _learning_rate(self, model: str, step: int) -> float:
        optimizer, workload = self.config.optimizer, self.workload
        return ppo_math.learning_rate(
            step,
            peak=optimizer.actor_lr if model == "actor" else optimizer.critic_lr,
            num_warmup_steps=optimizer.warmup_steps,
            num_steps=self.config.iterations * workload.epochs * workload.num_mini_batches,
            decay=optimizer.schedule,
        )


def _nothing() -> None:
    """A stage before the last one has no results."""
