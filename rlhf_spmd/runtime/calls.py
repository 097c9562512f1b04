"""What each call of the workflow computes on a rank: the bridge from names ("logprobs", "policy_loss") to tensor math.

Rows of an iteration lie in a matrix [M mini-batches, C columns]; a Run works on this rank's columns. Every pass over
the data is cut into the same micro-batches (mini-batch by mini-batch, then micro_batch rows), so a logprob that is
recomputed in the layout of training has the same shapes, and hence the same bits, as the one that it computes first.
"""

# M mini-batches, C columns (= mini_batch), B sequences, P prompt tokens, G response tokens

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms import ppo_math
from rlhf_spmd.config import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.program import Program, Run
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.runtime.batch import Sequences, response_logprobs, response_values
from rlhf_spmd.runtime.generate import generate
from rlhf_spmd.runtime.metrics import Meter
from rlhf_spmd.runtime.models import Models
from rlhf_spmd.runtime.scorer import Scorer
from rlhf_spmd.runtime.world import World

Place = tuple[slice, slice]  # of a tensor [M, C, ...]
PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}  # nats per token


@dataclass(slots=True)
class State:
    """What changes between iterations, the same on every rank."""

    kl_coef: float
    scores: ppo_math.RunningMoments = ppo_math.RunningMoments()
    steps: dict[str, int] = field(default_factory=dict)  # optimizer steps per model


@dataclass(slots=True)
class Iteration:
    """One iteration's data on a rank. store: key -> tensor [M, C, ...], filled where this rank holds columns."""

    number: int
    prompt_MC: Tensor  # prompt index of each place
    sample_MC: Tensor  # sample index
    source_EMC: Tensor  # [epochs, M, C]: the mini-batch of epoch 0 whose row stands here in epoch e
    uniforms_MCG: Tensor
    store: dict[str, Tensor]
    meter: Meter = field(default_factory=Meter)
    generate_s: float = 0.0  # on this rank so far
    stopped: bool = False  # KL early stop of the actor


class Calls:
    """Runs calls on this rank's columns. Collectives are entered here and in the engines, nowhere else."""

    def __init__(
        self,
        program: Program,
        config: Config,
        world: World,
        models: Models,
        scorer: Scorer | None,
        eos_ids: Sequence[int],
        num_known: int,
    ):
        """eos_ids: what ends a response. num_known: how many token ids every model that reads them knows."""
        self.num_known = num_known
        self.program, self.config, self.world, self.models = program, config, world, models
        self.workload, self.scorer, self.eos_ids = program.workload, scorer, tuple(eos_ids)
        self.sampling = {
            "temperature": config.generation.temperature,
            "eos_ids": self.eos_ids,
            "min_new_tokens": config.generation.min_new_tokens,
        }
        generation = config.generation
        limits = {"top_k": generation.top_k, "top_p": generation.top_p, "min_p": generation.min_p}
        self.restricted = self.sampling | limits  # the kept sets are found when generating, and replayed afterwards
        tolerance = config.parity_tolerance
        self.parity_tolerance = PARITY_TOLERANCE[config.dtype] if tolerance is None else tolerance

    def run(self, step: Run, data: Iteration, state: State) -> None:
        """Executes one Run."""
        call = self.workload.workflow.call(step.call)
        if call.kind == "generate":
            self._generate(call, step, data)
        elif call.function == "scores":
            self._score(call, step, data)
        elif call.kind == "infer":
            self._infer(call, step, data)
        elif call.kind == "compute":
            self._estimate_advantages(call, step, data, state)
        else:
            self._train(call, step, data, state)

    def _layout(self, call: Call) -> Layout:
        return self.program.placement.layouts[call.name]

    def _place(self, step: Run) -> Place:
        """The rows of a Run on this rank: slices of mini-batches and of columns."""
        rows, columns = self.program.mini_batches_of(step), self.program.columns_of(step, self.world.rank)
        return slice(rows.start, rows.stop), slice(columns.start, columns.stop)

    def _micro_batch(self, layout: Layout) -> int:
        return layout.micro_batch or self.workload.micro_batch

    # ---- generation and inference -----------------------------------------------------------------------------------

    def _generate(self, call: Call, step: Run, data: Iteration) -> None:
        place = self._place(step)
        prompts_MBP = data.store["prompts"][place]
        started = time.perf_counter()
        with self.models.weights(call.model) as model:
            responses, logprobs, kept = generate(
                model, prompts_MBP.flatten(0, 1), data.uniforms_MCG[place].flatten(0, 1), **self.restricted
            )
        if responses.numel() and (drawn := int(responses.max())) >= self.num_known:
            raise UserError(
                f"the actor drew token {drawn}, which no text has (its embeddings are padded), and other models know "
                f"only {self.num_known} tokens; give them as many by transformers' resize_token_embeddings"
            )
        shape = prompts_MBP.shape[:2]
        self._keep(data, "responses", place, responses.unflatten(0, shape))
        self._keep(data, "logprobs", place, logprobs.unflatten(0, shape))
        if kept is not None:
            self._keep(data, "kept_tokens", place, kept.unflatten(0, shape))
        mask = responses >= 0
        num_ended = ppo_math.ended(responses, self.eos_ids).sum()
        data.meter.add("response_length", mask.sum(), len(responses))
        data.meter.add("ended_fraction", num_ended, len(responses))
        data.generate_s += time.perf_counter() - started
        data.meter.maximum("generate_s", data.generate_s)

    def _infer(self, call: Call, step: Run, data: Iteration) -> None:
        """A forward pass over the rows of a Run, micro-batch by micro-batch."""
        place = self._place(step)
        prompts, responses = (self._held(data, key, place) for key in ("prompts", "responses"))
        kept = self._held(data, "kept_tokens", place) if "kept_tokens" in call.inputs else None
        results = []
        with self.models.weights(call.model) as model:
            for mini_batch in range(len(prompts)):
                for rows in self._chunks(prompts.shape[1], self._layout(call)):
                    batch = Sequences.join(prompts[mini_batch, rows], responses[mini_batch, rows])
                    if call.function == "logprobs":
                        sets = None if kept is None else kept[mini_batch, rows]
                        results.append(response_logprobs(model, batch, sets, **self.sampling))
                    else:
                        results.append(response_values(model, batch))
        if results:
            self._keep(data, call.outputs[0], place, torch.cat(results).float().unflatten(0, prompts.shape[:2]))

    def _score(self, call: Call, step: Run, data: Iteration) -> None:
        """Scores of the rows of a Run by reward model or function."""
        place = self._place(step)
        prompts, responses = (self._held(data, key, place) for key in ("prompts", "responses"))
        scores_B = self.scores(call, prompts.flatten(0, 1), responses.flatten(0, 1))
        self._keep(data, call.outputs[0], place, scores_B.unflatten(0, prompts.shape[:2]))
        wide_B, used_B = scores_B.double(), ppo_math.ended(responses.flatten(0, 1), self.eos_ids)
        if self.config.ppo.truncation == "score":
            used_B = torch.ones_like(used_B)
        for name, counted_B in (("score", wide_B), ("used_score", wide_B[used_B])):
            data.meter.add(name, counted_B.sum(), len(counted_B))
            data.meter.add(f"{name}_sq", counted_B.square().sum(), len(counted_B))

    def scores(self, call: Call, prompts_BP: Tensor, responses_BG: Tensor) -> Tensor:
        """Scores [B] of whole responses; collective where ZeRO 3 shards the reward model."""
        weights = self.models.weights(call.model) if call.model in self.models.copies else nullcontext()
        with torch.no_grad(), weights:
            return self.scorer(prompts_BP, responses_BG, self._micro_batch(self._layout(call)))

    def _chunks(self, num_rows: int, layout: Layout) -> list[slice]:
        size = self._micro_batch(layout)
        return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]

    def _keep(self, data: Iteration, key: str, place: Place, value: Tensor) -> None:
        """Puts the rows of a Run into the store."""
        self.place_for(data, key)[place] = value

    def place_for(self, data: Iteration, key: str) -> Tensor:
        """The store's tensor [M, C, ...] of a key, made when first needed; integers for tokens, float32 otherwise."""
        if key not in data.store:
            shape: tuple[int, ...] = (self.workload.num_mini_batches, self.workload.mini_batch)
            if key != "scores":
                shape += (self.workload.max_response + (key == "values"),)
            if key == "kept_tokens":
                shape += (self.workload.max_kept,)
            if key in ("responses", "kept_tokens"):
                dtype = torch.int64 if key == "responses" else torch.int32
                data.store[key] = torch.full(shape, -1, dtype=dtype, device=self.world.device)
            else:
                data.store[key] = torch.zeros(shape, device=self.world.device)
        return data.store[key]

    def _held(self, data: Iteration, key: str, place: Place) -> Tensor:
        """The rows of a key at a place. A rank without columns may have nothing of the key."""
        assert key in data.store or place[1].start == place[1].stop, f"{key} is read before it is there"
        return self.place_for(data, key)[place]

    # ---- advantages -------------------------------------------------------------------------------------------------

    def _estimate_advantages(self, call: Call, step: Run, data: Iteration, state: State) -> None:
        """Rewards, GAE and returns of this rank's columns; whitened here only if whiten=batch."""
        ppo = self.config.ppo
        place = self._place(step)
        responses, logprobs, ref_logprobs, scores, values = (
            self._held(data, key, place).flatten(0, 1) for key in call.inputs
        )
        mask, ended = ppo_math.response_mask(responses), ppo_math.ended(responses, self.eos_ids)
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
            moments = self._summed(ppo_math.moments(advantages, mask), step.group)
            advantages = ppo_math.whiten(advantages, mask, moments)
        shape = tuple(part.stop - part.start for part in place)
        self._keep(data, "advantages", place, advantages.unflatten(0, shape))
        self._keep(data, "returns", place, returns.unflatten(0, shape))
        if step.reader == self.program.placement.sites(call, self.workload.workflow)[0]:  # each row is counted once
            data.meter.add("reward", shaped.double().sum(), len(shaped))
            data.meter.add("reward_sq", shaped.double().square().sum(), len(shaped))
            data.meter.add("kl", kl.double().sum(), len(shaped))
            data.meter.add("kl_per_token", kl.double().sum(), mask.sum())
            data.meter.add("return", returns.double().sum(), mask.sum())
            data.meter.add("value", torch.where(mask, values[:, :-1], 0.0).double().sum(), mask.sum())

    def _summed(self, tensor: Tensor, group: str | None) -> Tensor:
        """The sum over a group, the tensor itself on one rank."""
        if group is not None:
            dist.all_reduce(tensor, group=self.world.group(group))
        return tensor

    # ---- training ---------------------------------------------------------------------------------------------------

    def _train(self, call: Call, step: Run, data: Iteration, state: State) -> None:
        """One optimizer step on one global mini-batch."""
        number = state.steps.get(call.model, 0)
        state.steps[call.model] = number + 1
        if call.model == "actor" and data.stopped:
            return
        layout, engine = self._layout(call), self.models.engines[call.model]
        _, columns = self._place(step)
        source_B = data.source_EMC[step.epoch, step.mini_batch, columns]
        places = (source_B, torch.arange(columns.start, columns.stop, device=source_B.device))
        everything = (slice(None), slice(columns.start, columns.stop))
        for key in call.inputs:
            self._held(data, key, everything)
        rows = {key: data.store[key][places] for key in call.inputs}
        if call.function == "policy_loss":
            mask = ppo_math.response_mask(rows["responses"])
            moments = self._summed(ppo_math.moments(rows["advantages"], mask), step.group)
            num_tokens = float(moments[0])
            if self.config.ppo.whiten == "mini_batch":
                rows["advantages"] = ppo_math.whiten(rows["advantages"], mask, moments)
        else:
            num_tokens = float(self._summed((rows["responses"] >= 0).sum().double(), step.group))

        stats: list[dict[str, Tensor]] = []
        first = step.epoch == 0 and step.mini_batch == 0
        loss = {"policy_loss": self._policy_loss, "value_loss": self._value_loss}[call.function]

        def share(model, micro: dict[str, Tensor]) -> Tensor:
            total, sums = loss(model, micro, first, data)
            stats.append(sums)
            return total / max(num_tokens, 1.0)

        rate = self._learning_rate(call.model, number)
        result = engine.step(self._micro_batches(rows, layout), share, lr=rate)
        if not math.isfinite(result.grad_norm):
            raise UserError(
                f"{call.name}: the gradient norm is {result.grad_norm} at epoch {step.epoch}, mini-batch "
                f"{step.mini_batch}; lower optimizer.{call.model}_lr or look at the rewards of this iteration"
            )
        for sums in stats:
            weight = sums.pop("num_tokens")
            for name, total in sums.items():
                data.meter.add(name, total, weight)
        if layout.dp_index(self.world.rank) == 0:
            data.meter.add(f"{call.model}_grad_norm", result.grad_norm, 1)
            data.meter.add(f"{call.model}_lr", rate, 1)
        if call.function == "policy_loss" and self.config.ppo.kl_early_stop is not None:
            kl = self._summed(sum(sums["approx_kl"] for sums in stats).clone(), step.group)
            data.stopped = ppo_math.kl_exceeds(float(kl), num_tokens, self.config.ppo.kl_early_stop)

    def _micro_batches(self, rows: dict[str, Tensor], layout: Layout) -> list[dict[str, Tensor]]:
        """Equal number on every rank of the layout; a rank that runs out passes blank rows, whose loss is 0."""
        most = -(-self.workload.mini_batch // layout.dp)
        num = -(-most // self._micro_batch(layout))
        chunks = [
            {key: value[chunk] for key, value in rows.items()} for chunk in self._chunks(len(rows["responses"]), layout)
        ]
        while len(chunks) < num:
            blank = {key: value.new_zeros(1, *value.shape[1:]) for key, value in rows.items()}
            blank["prompts"][:, 1:] = -1
            blank["responses"][:] = -1
            chunks.append(blank)
        return chunks

    def _policy_loss(self, model, rows: dict[str, Tensor], first: bool, data: Iteration) -> tuple[Tensor, dict]:
        batch = Sequences.join(rows["prompts"], rows["responses"])
        logprobs_BG = response_logprobs(model, batch, rows.get("kept_tokens"), **self.sampling)
        mask_BG = ppo_math.response_mask(rows["responses"])
        old_BG = rows.get("logprobs", rows.get("old_logprobs"))
        if first:
            self._parity_gate(old_BG, logprobs_BG.detach(), mask_BG, rows, data)
        return ppo_math.policy_loss_sum(
            logprobs_BG, old_BG, rows["advantages"], mask_BG, clip_ratio=self.config.ppo.clip_ratio
        )

    def _value_loss(self, model, rows: dict[str, Tensor], first: bool, data: Iteration) -> tuple[Tensor, dict]:
        batch = Sequences.join(rows["prompts"], rows["responses"])
        values_BG1 = response_values(model, batch)
        return ppo_math.value_loss_sum(
            values_BG1[:, :-1],
            rows["values"][:, :-1],
            rows["returns"],
            ppo_math.response_mask(rows["responses"]),
            clip_value=self.config.ppo.clip_value,
        )

    def _parity_gate(self, old_BG: Tensor, new_BG: Tensor, mask_BG: Tensor, rows: dict, data: Iteration) -> None:
        """On the first mini-batch the weights are still those that generated: both passes must agree."""
        found = ppo_math.parity(old_BG, new_BG, mask_BG)
        data.meter.add("parity_mean_abs", found.sum_abs, found.num_tokens)
        data.meter.maximum("parity_max_abs", found.max_abs)
        if found.max_abs > self.parity_tolerance:
            token = int(rows["responses"][found.row, found.position])
            raise UserError(
                f"generation and training disagree: token {token} at position {found.position} has logprob "
                f"{float(old_BG[found.row, found.position]):.6f} from the generator and "
                f"{float(new_BG[found.row, found.position]):.6f} in training, {found.max_abs:.2e} nats apart; "
                f"the limit is parity_tolerance={self.parity_tolerance:g}: raise it if this is rounding, or use float32"
            )

    def _learning_rate(self, model: str, step: int) -> float:
        optimizer, workload = self.config.optimizer, self.workload
        return ppo_math.learning_rate(
            step,
            peak=optimizer.actor_lr if model == "actor" else optimizer.critic_lr,
            num_warmup_steps=optimizer.warmup_steps,
            num_steps=self.config.iterations * workload.epochs * workload.num_mini_batches,
            decay=optimizer.schedule,
        )
