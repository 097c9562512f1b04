"""Invariants of reference/ppo_rules that whole iterations of the runtime must keep, and its guards, in one process."""

import functools
import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms import surrogates
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.execute import optimizer_step
from rlhf_spmd.runtime.execute.optimizer_step import OptimizerStep
from rlhf_spmd.runtime.execute.response_hashes import digests, tokens_sha256
from tests.folders import write_all
from tests.runs import RunOf, load

EOS_IDS = tuple(range(1, 6))
RATIO_LIMIT = 1e-4  # the parity gate's tolerance in float32
PARITY = {"float32": RATIO_LIMIT, "bfloat16": 0.5}
COMPARED = ("policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm", "kl", "reward", "approx_kl")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    return write_all(tmp_path_factory.mktemp("invariants"), eos_token_ids=EOS_IDS)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the largest difference over all weights, relative where they are above 1."""
    assert one.keys() == other.keys() and one
    return max(float(((one[n] - other[n]).abs() / other[n].abs().clamp(min=1.0)).max()) for n in one)


# ---- Invariant 1: nothing has changed before the first step ---------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(["generation.temperature=0.5"], marks=pytest.mark.slow),
        pytest.param(["generation.temperature=1"], marks=pytest.mark.slow),
        ["generation.temperature=1.7"],
        ["generation.temperature=0.8", "generation.top_k=9", "generation.top_p=0.8", "generation.min_new_tokens=3"],
    ],
    ids=["0.5", "1", "1.7", "restricted"],
)
@pytest.mark.parametrize("micro_batch", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_invariant_1_exactly_when_recomputed(micro_batch, sampling, dtype, overrides):
    """The very same bits: ratio 1, nothing clipped, KL 0; in later mini-batches no longer."""
    options = ["ppo.old_logprobs=recompute", f"micro_batch={micro_batch}", f"dtype={dtype}", *sampling]
    run = RunOf(load(overrides, *options))
    for _ in range(2):
        metrics = run.iteration()
        first, second, *_ = run.meter.steps["actor"]
        assert first["ratio"] == 1.0
        assert first["clip_fraction"] == first["approx_kl"] == first["approx_kl_sq"] == 0.0
        assert 0 < metrics["parity_mean_abs"] < metrics["parity_max_abs"] < PARITY[dtype]  # of the generator's
        assert second["approx_kl"] > 0.0


@pytest.mark.parametrize("temperature", [*(pytest.param(one, marks=pytest.mark.slow) for one in (0.5, 1.0)), 1.7])
def test_invariant_1_within_parity_from_the_generator(temperature, overrides):
    run = RunOf(load(overrides, f"generation.temperature={temperature}", "ppo.clip_ratio=0.0005"))
    for _ in range(3):
        metrics = run.iteration()
        first = run.meter.steps["actor"][0]
        assert 0 < metrics["parity_max_abs"] < RATIO_LIMIT
        assert abs(first["ratio"] - 1) < RATIO_LIMIT and first["approx_kl"] < RATIO_LIMIT**2
        assert first["clip_fraction"] == 0.0


# ---- Invariants 2, 4, 5: how the rows are cut, ordered and padded ---------------------------------------------------


@pytest.mark.parametrize("others", [(3, 100), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_invariant_2_micro_batches(others, overrides):
    """Two iterations with other micro-batches: the same tokens, and numbers that differ by rounding only."""
    found = {}
    for micro_batch in (4, *others):
        run = RunOf(load(overrides, f"micro_batch={micro_batch}"))
        metrics = [run.iteration() for _ in range(2)]
        critic = {f"critic {name}": weight for name, weight in run.weights("critic").items()}
        found[micro_batch] = metrics, run.weights("actor") | critic
    metrics, weights = found.pop(4)
    for other_metrics, other_weights in found.values():
        for one, other in zip(metrics, other_metrics, strict=True):
            assert one["tokens_sha256"] == other["tokens_sha256"]
            for name in COMPARED:
                assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name
        assert largest_difference(weights, other_weights) < 1e-5


@pytest.mark.parametrize("pad", ["</s>", pytest.param("<unk>", marks=pytest.mark.slow)])
def test_invariant_5_pad_token(pad, tmp_path):
    """Whichever token the tokenizers (of actor and reward model) pad with, EOS included: the same bits everywhere."""
    plain = RunOf(load(write_all(tmp_path / "plain", eos_token_ids=EOS_IDS)))
    padded_overrides = write_all(tmp_path / "padded", eos_token_ids=EOS_IDS, pad_token_id={"</s>": 1, "<unk>": 2}[pad])
    for folder in ("actor", "reward"):
        path = tmp_path / "padded" / folder / "tokenizer_config.json"
        path.write_text(
            path.read_text(encoding="utf-8").replace('"bos_token"', f'"pad_token": "{pad}", "bos_token"'),
            encoding="utf-8",
        )
    padded = RunOf(load(padded_overrides))
    assert padded.job.tokenizer.pad_token_id == {"</s>": 1, "<unk>": 2}[pad] != plain.job.tokenizer.pad_token_id
    for _ in range(2):
        one, other = plain.iteration(), padded.iteration()
        assert one["tokens_sha256"] == other["tokens_sha256"] and one["reward"] == other["reward"]
        assert plain.data.store.keys() == padded.data.store.keys()
        assert all(torch.equal(plain.data.store[key], padded.data.store[key]) for key in plain.data.store)


def test_tokens_sha256():
    """A hash of the responses in prompt order: who generated which of them, and when, does not matter."""
    rng = np.random.default_rng(0)
    rows = [[p, s, rng.integers(0, 60, rng.integers(1, 9)).tolist()] for p, s in itertools.product(range(7), range(2))]
    whole = hash_of(rows)
    assert re.fullmatch("[0-9a-f]{64}", whole)
    for _ in range(5):
        order = rng.permutation(len(rows))
        assert hash_of(*([rows[i] for i in half] for half in (order[:5], order[5:], order[:0]))) == whole
    swapped = [[rows[1][0], rows[1][1], rows[0][2]], [rows[0][0], rows[0][1], rows[1][2]], *rows[2:]]
    assert hash_of(swapped) != whole
    moved = [[0, 0, rows[0][2] + rows[1][2][:1]], [0, 1, rows[1][2][1:]], *rows[2:]]  # a border moved by one token
    assert hash_of(moved) != whole


def hash_of(*ranks: list[list]) -> str:
    """Returns tokens_sha256 of what ranks have generated: rows of prompt, sample, tokens."""
    said = []
    for rows in ranks:
        responses_BG = torch.full((len(rows), 9), -1)
        for index, (_, _, tokens) in enumerate(rows):
            responses_BG[index, : len(tokens)] = torch.tensor(tokens)
        prompt_B, sample_B = (np.array([row[place] for row in rows], dtype=np.int64) for place in (0, 1))
        said.append(digests(prompt_B[None], sample_B[None], responses_BG[None]))
        assert said[-1]["length"].tolist() == [len(tokens) for _, _, tokens in rows]
    return tokens_sha256(said)


# ---- What the random numbers belong to ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [["rollout_batch=96"], ["rollout_batch=12", "samples_per_prompt=8"]])
def test_samples_of_one_prompt_differ(sizes, overrides):
    """There are 40 prompts: each sample of a prompt has its own numbers, wherever it stands in the batch."""
    run = RunOf(load(overrides, *sizes, "ppo.epochs=1", "generation.temperature=1.5"))
    run.iteration()
    places = list(zip(run.data.prompt_MC.flatten(), run.data.sample_MC.flatten(), strict=True))
    assert len(set(places)) == 96 and max(sample for _, sample in places) == (2 if len(sizes) == 1 else 7)
    bits_BG = run.data.random_bits(0).flatten(0, 1)
    assert len({tuple(row) for row in bits_BG.tolist()}) == 96
    responses: dict[int, list[tuple]] = {}
    for (prompt, _), row in zip(places, run.data.store["responses"].flatten(0, 1).tolist(), strict=True):
        responses.setdefault(int(prompt), []).append(tuple(row))
    assert all(len(set(rows)) > 1 for rows in responses.values() if len(rows) > 2)
    num_same = sum(len(rows) - len(set(rows)) for rows in responses.values())
    assert num_same < 10  # short responses may agree by chance


# ---- Guards ---------------------------------------------------------------------------------------------------------


def disturb(run: RunOf, change) -> None:
    """Calls `change` on the actor's engine right before its first training step."""
    execute = run.executor.run
    trains = run.program.workload.workflow.train_call("actor").name

    def disturbed(step, data):
        if step.call == trains and step.epoch == 0 and step.mini_batch == 0:
            change(run.job.models.engines["actor"])
        return execute(step, data)

    run.executor.run = disturbed


@torch.no_grad()
def scale_weights(engine, factor: float = 1.01) -> None:
    for weight in engine.model.parameters():
        weight.mul_(factor)


def test_parity_gate_stops_other_weights(overrides):
    """The message names the worst token of the first micro-batch that is off: id, position and both logprobs."""
    run = RunOf(load(overrides))
    disturb(run, scale_weights)
    with pytest.raises(UserError, match="generation and training disagree") as caught:
        run.iteration()
    text = str(caught.value)
    token, position, old, new = re.search(
        r"token (\d+) at position (\d+) has logprob (-[\d.]+) from the generator and (-[\d.]+) in training", text
    ).groups()
    store = run.data.store
    rows = (store["responses"][0, :, int(position)] == int(token)).nonzero()[:, 0]
    assert f"{float(old):.4f}" in [f"{x:.4f}" for x in store["logprobs"][0, rows, int(position)].tolist()]
    nats = float(re.search(r"([^ ]+) nats apart", text)[1])
    assert abs(float(old) - float(new)) == pytest.approx(nats, rel=0.01) and nats > 1e-3
    assert "parity_tolerance=0.0001" in text


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_a_gradient_that_is_not_finite_stops_the_run(model, overrides, monkeypatch):
    """Before it reaches the weights, and the message says where."""
    name, num_calls = {"actor": "policy_loss", "critic": "value_loss"}[model], itertools.count()
    loss = getattr(surrogates, name)

    @functools.wraps(loss)  # it is called by the names of its parameters
    def spoiled(**arguments):
        total, sums = loss(**arguments)
        return total * (math.inf if next(num_calls) >= 4 else 1.0), sums  # 3 micro-batches per mini-batch

    monkeypatch.setattr(surrogates, name, spoiled)
    run, before = RunOf(load(overrides)), None
    begin = run.job.models.engines[model].begin

    def remembered():
        nonlocal before
        before = run.weights(model)
        begin()

    run.job.models.engines[model].begin = remembered
    with pytest.raises(UserError, match=rf"{model}_train: .*epoch 0, mini-batch 1.*optimizer\.{model}_lr"):
        run.iteration()
    assert all(torch.equal(weight, before[n]) for n, weight in run.weights(model).items())


def test_kl_early_stop_skips_the_rest_of_an_iteration(overrides):
    """The actor's steps after the one whose KL was too large; not the critic's, and not the next iteration's."""
    everything = RunOf(load(overrides, "ppo.kl_early_stop=1000"))
    limit = 1e-4
    run = RunOf(load(overrides, f"ppo.kl_early_stop={limit}", "optimizer.schedule=linear"))
    for number in range(2):
        everything.iteration()
        assert len(everything.meter.steps["actor"]) == len(everything.meter.steps["critic"]) == 4
        run.iteration()
        kls = [step["approx_kl"] for step in run.meter.steps["actor"]]
        assert len(kls) < 4 and max(kls[:-1]) <= limit < kls[-1], kls
        assert len(run.meter.steps["critic"]) == 4 and run.data.stopped == {"actor"}
        assert run.state.steps == {"actor": 4 * (number + 1), "critic": 4 * (number + 1)}
        # skipped steps count, so that the schedules of actor and critic stay together
        assert run.meter.steps["actor"][0]["actor_lr"] == run.meter.steps["critic"][0]["critic_lr"]


def test_ratio_early_stop(overrides):
    everything = RunOf(load(overrides))
    everything.iteration()
    ratios = [step["ratio"] for step in everything.meter.steps["actor"]]
    limit = sorted(ratios)[1]
    run = RunOf(load(overrides, f"ppo.ratio_early_stop={limit!r}"))
    run.iteration()
    expected = next(number for number, ratio in enumerate(ratios) if ratio > limit) + 1
    assert [step["ratio"] for step in run.meter.steps["actor"]] == ratios[:expected]


def test_the_lag_is_counted_in_steps_that_were_made(overrides, monkeypatch):
    """a = (v_prox - v_mu) / (v_pi - v_mu), where v is the optimizer's own count of steps, which neither an early stop
    nor a mini-batch without a row raises: of 4 steps of an iteration the second has no row, and some are stopped."""
    monkeypatch.setattr("rlhf_spmd.plan.program.compile.validate", lambda *_: None)  # refuses loglinear without a lag
    words = ["ppo.old_logprobs=loglinear", "ppo.importance_weights=token", "ppo.kl_early_stop=1e-3", "micro_batch=100"]
    run, shares, empty = RunOf(load(overrides, *words)), [], []
    of_lag, checked = OptimizerStep.of_lag, optimizer_step.checked_divisor

    def made() -> int:
        return run.job.models.engines["actor"].optimizer_state()[0]

    def recorded(step):
        if step.call.loglinear:
            shares.append((of_lag(step)["lag_share"], made()))
        return of_lag(step)

    def divisor(found, call, name):
        empty.append(call.model == "actor")
        return 0.0 if empty[-1] and sum(empty) == 2 else checked(found, call, name)

    monkeypatch.setattr(OptimizerStep, "of_lag", recorded)
    monkeypatch.setattr(optimizer_step, "checked_divisor", divisor)
    real, history, before = run.executor.iteration, [], [0]

    def late(data):
        data.lag, data.before = int(run.number > 0), history[-1] if history else {}
        return real(data)

    run.executor.iteration = late
    for _ in range(3):
        shares.clear(), empty.clear()
        history.append(run.iteration())
        drawn, start = [before[0], *before][-2:]
        wanted = [(start - drawn) / (now - drawn) if start > drawn else 0.0 for _, now in shares]
        assert [share for share, _ in shares] == pytest.approx(wanted, rel=1e-12)
        assert history[-1]["actor_steps_made"] == (made() - start) / 4 < 1
        before.append(made())
    assert len({later - sooner for sooner, later in itertools.pairwise(before)}) > 1
