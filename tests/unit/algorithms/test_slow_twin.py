"""Whole iterations of the real runtime in one process against tests/slow_ppo.py, which is fed with the same tokens.

What is shared is the tokens, the sets they were drawn from, and the order of the mini-batches. All the rest is computed
twice: what the four models say of each response (by forwards of one sequence each), KL penalty, rewards, advantages,
whitening, both losses and their gradients, clipping, AdamW, the KL controller and the running mean of the scores. In
float64 the sets are checked too.
"""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlhf_spmd.algorithms.off_policy import corrects
from rlhf_spmd.algorithms.training_order import epoch_order
from rlhf_spmd.config.options import Config
from rlhf_spmd.model.hf import load_model
from rlhf_spmd.runtime.execute.handlers import generate
from rlhf_spmd.runtime.weights import rank_models
from tests import slow_ppo
from tests.folders import write_all, write_model
from tests.runs import RunOf, load
from tests.trainee import noted_gradients

EOS_IDS = tuple(range(1, 9))  # two thirds of the responses end
STORED = 1e-5  # how far apart may be what both say of the same response
SMALL = ["generation.max_new_tokens=8", "rollout_batch=12", "mini_batch=4", "micro_batch=3", "ppo.kl_coef=0.2"]
VARIANTS = {
    "defaults": [],
    "adaptive bootstrap": [
        "generation.temperature=0.7",
        "generation.min_new_tokens=2",
        "ppo.truncation=bootstrap",
        "ppo.gamma=0.97",
        "ppo.kl_controller=adaptive",
        "ppo.kl_target=0.1",
        "ppo.kl_horizon=100",
    ],
    "scores whole batch": [
        "ppo.whiten=batch",
        "ppo.clip_score=0.8",
        "ppo.normalize_scores=true",
        "ppo.truncation_penalty=-2.5",
        "ppo.clip_ratio=0.05",
        "ppo.clip_value=0.05",
    ],
    "values": ["ppo.normalize_values=true", "ppo.truncation=bootstrap"],
    "recompute restricted": [
        "ppo.old_logprobs=recompute",
        "generation.temperature=1.4",
        "generation.top_k=12",
        "generation.top_p=0.9",
        "generation.min_p=0.15",
        "generation.min_new_tokens=2",
    ],
    "corrected by token": [
        "ppo.old_logprobs=recompute",
        "ppo.importance_weights=token",
        "ppo.importance_cap=1.1",
        "ppo.rejection=sequence",
        "ppo.rejection_range=0.9,1.3",
    ],
    "corrected by response": [
        "ppo.old_logprobs=recompute",
        "ppo.importance_weights=sequence",
        "ppo.rejection=geometric",
        "ppo.rejection_range=0.97,1.05",
        "ppo.clip_ratio=0.05",
    ],
    "four models": ["models.reference={folder}/reference", "models.critic={folder}/critic"],
    "optimizer": [
        "samples_per_prompt=2",
        "rollout_batch=6",
        "ppo.truncation=score",
        "optimizer.max_grad_norm=0.3",
        "optimizer.weight_decay=0.1",
        "optimizer.warmup_steps=7",
    ],
}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("twin")
    write_model(folder / "reference", seed=3)
    write_model(folder / "critic", head="scalar", seed=4)
    return write_all(folder, eos_token_ids=EOS_IDS) + SMALL


@pytest.fixture
def config(overrides, variant) -> Config:
    folder = Path(overrides[0].partition("=")[2]).parent
    return load(overrides, *(text.format(folder=folder) for text in variant))


@pytest.fixture(autouse=True)
def other_generator(config, monkeypatch) -> None:
    """Makes the generator's logprobs differ from training's, where the loss corrects for it, by far more than its gate
    allows a run without corrections."""
    if not corrects(config.options):
        return
    real = generate.generate

    def shifted(job, call, run, data) -> None:
        real(job, call, run, data)
        logprobs = data.store.at("logprobs", job.place(run))
        logprobs += 0.2 * torch.sin(torch.arange(logprobs.numel(), dtype=logprobs.dtype)).view_as(logprobs)

    monkeypatch.setattr(generate, "generate", shifted)


def slow_options(config: Config) -> slow_ppo.Options:
    ppo, optimizer, generation = config.options, config.optimizer, config.generation
    same = ["gamma", "lam", "truncation", "truncation_penalty", "clip_score", "whiten", "clip_ratio", "clip_value"]
    same += ["importance_weights", "importance_cap", "rejection", "rejection_range"]
    return slow_ppo.Options(
        eos_ids=EOS_IDS,
        temperature=generation.temperature,
        min_new_tokens=generation.min_new_tokens,
        kl_coef=ppo.kl_coef,
        **{name: getattr(ppo, name) for name in same},
        actor_lr=optimizer.lr["actor"],
        critic_lr=optimizer.lr["critic"],
        num_warmup_steps=optimizer.warmup_steps,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
    )


class SlowRun:
    """The second implementation from the same checkpoints on: what lives from one iteration to the next."""

    def __init__(self, config: Config):
        self.config, self.options = config, slow_options(config)
        dtype = rank_models.DTYPES[config.dtype]
        folders = config.models
        self.actor = load_model(folders["actor"], head="lm", dtype=dtype)
        self.critic = load_model(folders["critic"] or folders["reward"], head="scalar", dtype=dtype)
        self.reference = load_model(folders["reference"] or folders["actor"], head="lm", dtype=dtype)
        self.reward = load_model(folders["reward"], head="scalar", dtype=dtype)
        self.optimizers = [slow_ppo.AdamW(lr, self.options) for lr in (self.options.actor_lr, self.options.critic_lr)]
        self.kl_coef = config.options.kl_coef
        self.scores: list[float] = []  # all those used so far
        self.returns: list[float] = []  # all so far
        self.kept: dict[tuple[int, ...], list[list[int]]] = {}  # tokens of a sequence -> the sets they were drawn from

    def logits(self, actor: nn.Module, tokens: list[int]) -> Tensor:
        logits_TV = actor.logits(actor(torch.tensor([tokens]))[0])
        for t, kept in enumerate(self.kept.get(tuple(tokens), [])):
            row = len(tokens) - len(self.kept[tuple(tokens)]) + t - 1  # that predicts response token t
            others = torch.ones(logits_TV.shape[1], dtype=torch.bool)
            others[kept] = False
            logits_TV = logits_TV.masked_fill(others & (torch.arange(len(tokens)) == row)[:, None], -math.inf)
        return logits_TV

    def value(self, critic: nn.Module, tokens: list[int]) -> Tensor:
        return critic.scalar(critic(torch.tensor([tokens]))[0])

    @torch.no_grad()
    def judge(self, prompt: list[int], response: list[int]) -> slow_ppo.Rollout:
        """Returns what the four models say of a response, rounded to float32, as which the runtime stores it."""

        def stored(numbers: list[Tensor]) -> list[float]:
            return [number.float().item() for number in numbers]

        def logprobs(actor: nn.Module) -> list[float]:
            return stored(slow_ppo.response_logprobs(self.logits, actor, prompt, response, self.options))

        return slow_ppo.Rollout(
            prompt,
            response,
            logprobs=logprobs(self.actor),
            ref_logprobs=logprobs(self.reference),
            values=stored(slow_ppo.response_values(self.value, self.critic, prompt, response)),
            score=stored([self.value(self.reward, prompt + response)[-1]])[0],
        )

    @torch.no_grad()
    def check_kept(self, prompt: list[int], response: list[int]) -> None:
        """Checks that the sets that generation kept are those of the rule (top-k, top-p, min-p), under the weights as
        they are."""
        rows, generation = self.actor.logits(self.actor(torch.tensor([prompt + response]))[0]), self.config.generation
        limits = {"top_k": generation.top_k, "top_p": generation.top_p, "min_p": generation.min_p}
        for t, kept in enumerate(self.kept[tuple(prompt + response)]):
            assert sorted(kept) == slow_ppo.sampling_support(
                rows[len(prompt) + t - 1].tolist(), t, self.options, **limits
            )

    def options_now(self) -> slow_ppo.Options:
        """Returns the options with what changes between iterations: the KL coefficient, and mean and spread of all
        scores so far."""
        mean, std = 0.0, 1.0
        if self.config.options.normalize_scores and self.scores:
            mean = math.fsum(self.scores) / len(self.scores)
            std = math.sqrt(math.fsum((score - mean) ** 2 for score in self.scores) / len(self.scores))
        options = dataclasses.replace(self.options, kl_coef=self.kl_coef, score_mean=mean, score_std=std)
        if self.config.options.normalize_values and self.returns:
            mean = math.fsum(self.returns) / len(self.returns)
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in self.returns) / len(self.returns))
            options = dataclasses.replace(options, value_mean=mean, value_std=std)
        return options

    def kl(self, rollouts: list[slow_ppo.Rollout]) -> float:
        return math.fsum(a - b for r in rollouts for a, b in zip(r.logprobs, r.ref_logprobs, strict=True))

    def iteration(self, rollouts: list[slow_ppo.Rollout], order: list) -> list[slow_ppo.Step]:
        options = self.options_now()
        steps = slow_ppo.train(
            self.actor, self.critic, self.logits, self.value, rollouts, order, options, *self.optimizers
        )
        for rollout in rollouts:
            values = [value * options.value_std + options.value_mean for value in rollout.values]
            self.returns += [a + v for a, v in zip(slow_ppo.advantages(rollout, options), values, strict=False)]
        truncated_count = self.options.truncation == "score"
        self.scores += [r.score for r in rollouts if truncated_count or r.ended(EOS_IDS)]
        if self.config.options.kl_controller == "adaptive":
            error = max(-0.2, min(0.2, self.kl(rollouts) / len(rollouts) / self.config.options.kl_target - 1))
            self.kl_coef *= 1 + error * len(rollouts) / self.config.options.kl_horizon
        return steps


def rollouts_of(run: RunOf, slow: SlowRun) -> list[slow_ppo.Rollout]:
    """Returns the responses of the runtime's last iteration in row order, judged slowly: as the runtime itself judged
    them."""
    config, store, number = run.config, run.data.store, run.data.number
    num_rows = config.rollout_batch * config.samples_per_prompt
    first = epoch_order(config.seed, number, 0, num_rows, config.mini_batch).tolist()
    picked = run.job.prompts.batch(number, config.rollout_batch)
    rollouts = {}
    for m, mini_batch in enumerate(first):
        for c, row in enumerate(mini_batch):
            prompt = run.job.prompts.prompts[picked[row // config.samples_per_prompt]]
            response = [token for token in store["responses"][m, c].tolist() if token >= 0]
            if "kept_tokens" in store:
                sets = store["kept_tokens"][m, c, : len(response)].tolist()
                slow.kept[tuple(prompt + response)] = [[token for token in kept if token >= 0] for kept in sets]
                if config.dtype == "float64":  # in float32 a set may end between two tokens that are nearly as likely
                    slow.check_kept(prompt, response)
            found = slow.judge(prompt, response)
            generator = store["logprobs"][m, c, : len(response)].tolist() if corrects(config.options) else None
            rollouts[row] = dataclasses.replace(found, generator=generator)
            assert store["scores"][m, c].item() == pytest.approx(found.score, abs=STORED)
            for key, expected in (
                ("logprobs", found.logprobs),
                ("old_logprobs", found.logprobs),
                ("ref_logprobs", found.ref_logprobs),
                ("values", found.values),
            ):
                is_shifted = key == "logprobs" and corrects(config.options)
                if (key in store or key != "old_logprobs") and not is_shifted:
                    assert store[key][m, c, : len(expected)].tolist() == pytest.approx(expected, abs=STORED), key
    return [rollouts[row] for row in range(num_rows)]


def both(run: RunOf, slow: SlowRun) -> list[slow_ppo.Step]:
    """Runs one iteration of the runtime, then the same one slowly; compares what they log of it, returns the slow
    steps."""
    assert run.state.of_algorithm.kl_coef == pytest.approx(slow.kl_coef, rel=1e-5)  # it follows the KL, see below
    metrics = run.iteration()
    rollouts, config = rollouts_of(run, slow), run.config
    order = [
        epoch_order(config.seed, run.data.number, epoch, len(rollouts), config.mini_batch)
        for epoch in range(config.options.epochs)
    ]
    options, kl = slow.options_now(), slow.kl(rollouts)
    num = len(rollouts)
    assert metrics["kl_coef"] == pytest.approx(options.kl_coef, rel=1e-5)
    assert metrics["kl"] == pytest.approx(kl / num, abs=1e-5)
    assert metrics["score"] == pytest.approx(sum(r.score for r in rollouts) / num, abs=1e-5)
    assert metrics["reward"] == pytest.approx(sum(slow_ppo.final_score(r, options) for r in rollouts) / num, abs=1e-5)
    assert metrics["ended_fraction"] == pytest.approx(sum(r.ended(EOS_IDS) for r in rollouts) / num)
    assert metrics["gen_tokens"] == pytest.approx(sum(len(r.response) for r in rollouts))
    if corrects(config.options):
        assert 0 < metrics["rejected"] < 1 and metrics["importance_weight"] != 1 and metrics["parity_max_abs"] > 0.1
        factors = [f for rollout in rollouts for f in slow_ppo.corrections(rollout, options)]
        effective = sum(factors) ** 2 / (len(factors) * sum(f * f for f in factors))
        assert 0 < effective < 1 and metrics["importance_ess"] == pytest.approx(effective, rel=1e-5)
        assert metrics["importance_max"] > 1.05 and 0 <= metrics["importance_truncated"] < 1
    return slow.iteration(rollouts, order)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_losses_and_gradients_in_float64(config, float64, monkeypatch):
    """Every mini-batch of two iterations: losses, statistics, norms, and the gradient before it is clipped."""
    run = RunOf(dataclasses.replace(config, dtype="float64"))
    slow, grads = SlowRun(run.config), noted_gradients(monkeypatch)
    for _ in range(2):
        grads.clear()
        steps = both(run, slow)
        assert len(steps) == 6 and len(grads) == 12 and grads[0].dtype == torch.float64
        for number, step in enumerate(steps):
            epoch, mini_batch = divmod(number, 3)  # in an epoch the actor trains on all mini-batches, then the critic
            first = 6 * epoch + mini_batch
            for model, found in (("actor", grads[first]), ("critic", grads[first + 3])):
                expected = torch.cat([grad.flatten() for grad in getattr(step, f"{model}_grads").values()])
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            actor, critic = run.meter.steps["actor"][number], run.meter.steps["critic"][number]
            for found, expected in (
                (actor["policy_loss"], step.policy_loss),
                (actor["clip_fraction"], step.clip_fraction),
                (actor["approx_kl"], step.approx_kl),
                (actor["actor_grad_norm"], step.actor_grad_norm),
                (critic["value_loss"], step.value_loss),
                (critic["critic_grad_norm"], step.critic_grad_norm),
            ):
                assert found == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert any(step.clip_fraction > 0 for step in steps)


FEW = ("scores whole batch", "optimizer")  # the losses of the others are compared above


@pytest.mark.parametrize(
    "variant",
    [pytest.param(VARIANTS[name], id=name, marks=[] if name in FEW else pytest.mark.slow) for name in VARIANTS],
)
def test_weights_after_three_iterations_in_float32(config):
    run = RunOf(config)
    slow, worst = SlowRun(run.config), 0.0
    start = {"actor": run.weights("actor"), "critic": run.weights("critic")}
    ended = []
    for _ in range(3):
        both(run, slow)
        ended += (run.data.store["responses"][..., -1] < 0).flatten().tolist()
    assert 0.3 < sum(ended) / len(ended) < 0.95
    for name, model in (("actor", slow.actor), ("critic", slow.critic)):
        for key, found in run.weights(name).items():
            expected = dict(model.named_parameters())[key].detach()
            assert not torch.equal(found, start[name][key])
            worst = max(worst, float(((found - expected).abs() / expected.abs().clamp(min=1.0)).max()))
    print(f"largest difference of a weight: {worst:.1e}")
    assert worst < 1e-5
