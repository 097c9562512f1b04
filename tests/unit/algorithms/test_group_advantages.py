"""The algorithms without a critic against the slow twin (tests/slow_policy_gradient.py) and against closed forms.

The fast side is what a rank does: padded batches with junk in the padding, sums, and a division by a global count.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms.advantages import mean_and_variance, moments
from rlhf_spmd.algorithms.group_advantages import (
    batch_advantages,
    batch_advantages_finish,
    batch_advantages_sums,
    equal_groups,
    first_groups,
    greedy_baseline_advantages,
    group_advantages,
    group_advantages_finish,
    group_advantages_sums,
    group_starts,
    leave_one_out_advantages,
    rewards_to_go,
    turn_advantages,
)
from rlhf_spmd.algorithms.surrogates import surrogate_loss
from rlhf_spmd.errors import UserError
from tests import slow_policy_gradient as slow
from tests.slow_policy_gradient import Rules, Sample

LIMIT, GROUPS, SAMPLES = 9, 4, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
OF_LOSS = (
    "ratio_level",
    "surrogate",
    "clip_low",
    "clip_high",
    "dual_clip",
    "gate_temperatures",
    "aggregation",
    "kl_coef",
    "kl_estimator",
    "kl_unbiased",
    "importance_weights",
    "importance_cap",
    "rejection",
    "rejection_range",
    "generator_clip",
)
OF_REWARDS = ("overlong", "overlong_buffer", "overlong_penalty")


@dataclasses.dataclass
class Batch:
    """Groups of samples as padded tensors, [N, S, G]; padding holds NaN."""

    logprobs: Tensor
    old: Tensor
    reference: Tensor
    generator: Tensor
    mask: Tensor
    scores: Tensor
    ended: Tensor


def make_groups(*, noise: float = 0.4, seed: int = 0) -> list[list[Sample]]:
    """Returns responses of 1 to LIMIT tokens, the longest cut off; one group has equal scores."""
    rng, groups = np.random.default_rng(seed), []
    for number in range(GROUPS):
        group = []
        for _ in range(SAMPLES):
            length = int(rng.integers(1, LIMIT + 1))
            new = [torch.tensor(-x, dtype=torch.float64, requires_grad=True) for x in rng.uniform(0.1, 3.0, length)]
            old, reference = (
                [float(x.detach()) + e for x, e in zip(new, noise * rng.standard_normal(length), strict=True)]
                for _ in range(2)
            )
            generator = [x + e for x, e in zip(old, 0.3 * rng.standard_normal(length), strict=True)]
            score = 1.0 if number == 1 else float(rng.integers(0, 3))
            group.append(Sample(new, old, reference, generator, score, ended=length < LIMIT))
        groups.append(group)
    return groups


def padded(groups: list[list[Sample]], name: str) -> Tensor:
    rows = [
        [x.detach() if isinstance(x, Tensor) else x for x in getattr(one, name)] for group in groups for one in group
    ]
    flat = torch.tensor(
        [[float(x) for x in row] + [math.nan] * (LIMIT - len(row)) for row in rows], dtype=torch.float64
    )
    return flat.view(len(groups), -1, LIMIT)


def make_batch(groups: list[list[Sample]]) -> Batch:
    old = padded(groups, "old")
    scores, ended = ([[getattr(one, name) for one in group] for group in groups] for name in ("score", "ended"))
    return Batch(
        logprobs=padded(groups, "logprobs").requires_grad_(True),
        old=old,
        reference=padded(groups, "reference"),
        generator=padded(groups, "generator"),
        mask=~old.isnan(),
        scores=torch.tensor(scores, dtype=torch.float64),
        ended=torch.tensor(ended),
    )


def chosen(rules: Rules, names: tuple[str, ...]) -> dict:
    return {name: getattr(rules, name) for name in names}


def fast_advantages(batch: Batch, rules: Rules, *, min_groups: int = 0) -> tuple[Tensor, Tensor]:
    """Computes advantages as the runtime does: the sums of two ranks are added."""
    shaping, scaling = chosen(rules, OF_REWARDS), chosen(rules, ("scale", "scale_eps"))
    made, sums = [], torch.zeros(4, dtype=torch.float64)
    for part in (slice(0, 1), slice(1, None)):
        scores, mask = batch.scores[part], batch.mask[part]
        logprobs = (batch.old[part], batch.reference[part]) if rules.kl_in == "reward" else (None, None)
        shaping["kl_coef"] = rules.kl_coef
        advantages, used, _ = group_advantages(
            scores, mask, batch.ended[part], *logprobs, drop_equal_groups=rules.drop_equal_groups, **scaling, **shaping
        )
        sums += group_advantages_sums(scores, mask, used, *logprobs, **shaping)
        made.append((advantages, used))
    finished = [group_advantages_finish(*one, sums, min_groups=min_groups, **scaling) for one in made]
    return tuple(torch.cat(parts) for parts in zip(*finished, strict=True))


def fast_loss(batch: Batch, advantages: Tensor, used: Tensor, rules: Rules) -> Tensor:
    """Computes the loss: rows that are left out are taken away; the others lie in two micro-batches."""
    rows = used.flatten() > 0
    names = ("logprobs", "old", "reference", "generator", "mask")
    tensors = {name: getattr(batch, name).flatten(0, 1)[rows] for name in names}
    flat = advantages.flatten(0, 1)[rows]
    count = tensors["mask"].sum() if rules.aggregation == "token-mean" else tensors["mask"].any(1).sum()
    total = torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 5), slice(5, None)):
        corrects = rules.importance_weights != "none" or rules.rejection != "none"
        share, _ = surrogate_loss(
            tensors["logprobs"][part],
            tensors["old"][part],
            flat[part],
            tensors["mask"][part],
            ref_logprobs_BG=tensors["reference"][part] if rules.kl_coef and rules.kl_in == "loss" else None,
            generator_logprobs_BG=tensors["generator"][part] if corrects else None,
            **chosen(rules, OF_LOSS),
        )
        total = total + share / count.clamp(min=1)
    return total


def assert_same(groups: list[list[Sample]], batch: Batch, fast: Tensor, expected: Tensor) -> None:
    """Compares loss and gradient of every logprob."""
    torch.testing.assert_close(fast, expected, **CLOSE)
    (gradient,) = torch.autograd.grad(fast, batch.logprobs)
    assert gradient.isfinite().all() and not gradient[~batch.mask].any()
    leaves = [one.logprobs for group in groups for one in group]
    flat = [x for row in leaves for x in row]
    wanted = torch.autograd.grad(expected, flat, allow_unused=True)
    theirs = torch.stack([torch.zeros((), dtype=torch.float64) if x is None else x for x in wanted])
    torch.testing.assert_close(gradient[batch.mask], theirs, **CLOSE)


VARIANTS = [
    {},
    {"kl_coef": 0.04},
    {"kl_coef": 0.04, "kl_estimator": "k1"},
    {"kl_coef": 0.04, "kl_unbiased": True},
    {"kl_coef": 0.04, "kl_unbiased": True, "ratio_level": "sequence", "aggregation": "seq-mean-token-mean"},
    {"kl_coef": 0.04, "kl_estimator": "k2", "aggregation": "seq-mean-token-mean"},
    {"scale": "none", "aggregation": "seq-mean-token-sum-norm"},  # Dr.GRPO
    {"clip_high": 0.28, "drop_equal_groups": True, "overlong": "shape", "overlong_buffer": 4},  # DAPO
    {"clip_high": 0.28, "drop_equal_groups": True, "overlong": "mask", "scale": "batch"},
    {"overlong": "mask"},
    {"overlong": "mask", "scale": "none", "drop_equal_groups": True},
    {"ratio_level": "sequence", "aggregation": "seq-mean-token-mean", "clip_low": 3e-2, "clip_high": 4e-2},  # GSPO
    {"ratio_level": "sequence"},
    {"ratio_level": "product", "aggregation": "seq-mean-token-mean"},  # RLOO as TRL computes it
    {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.4},
    {"surrogate": "cispo", "clip_low": 0.3, "clip_high": 0.4, "kl_coef": 0.1},
    {"dual_clip": 1.5},
    {"surrogate": "dppo", "clip_low": 0.02, "clip_high": 0.03},
    {"surrogate": "dppo_kl", "clip_low": 0.002, "clip_high": 0.001},
    {"surrogate": "sapo", "gate_temperatures": (1.5, 2.5), "aggregation": "seq-mean-token-mean"},
    {"surrogate": "gmpo", "clip_low": 0.1, "clip_high": 0.1, "aggregation": "seq-mean-token-mean"},
    {"surrogate": "reinforce", "scale": "none", "drop_equal_groups": True},  # GPG
    {"scale": "mean"},  # MaxRL
    {"kl_coef": 0.04, "kl_in": "reward", "scale": "batch", "drop_equal_groups": True},
    {"kl_coef": 0.04, "kl_in": "reward", "overlong": "mask"},
    {"importance_weights": "token", "importance_cap": 1.2},
    {"importance_weights": "sequence", "rejection": "token", "rejection_range": (0.8, 1.3)},
    {"rejection": "sequence", "drop_equal_groups": True},
    {"rejection": "geometric", "rejection_range": (0.9, 1.1), "aggregation": "seq-mean-token-mean"},
    *(
        {"importance_weights": weights, "importance_cap": 1.3, "generator_clip": True, **surrogate}
        for weights, surrogate in (
            ("token", {}),
            ("token", {"surrogate": "cispo", "clip_low": 0.3, "clip_high": 0.4, "kl_coef": 0.1}),
            ("token", {"dual_clip": 1.5, "clip_high": 0.28}),
            ("geometric", {"ratio_level": "sequence", "aggregation": "seq-mean-token-mean", "clip_high": 0.03}),
            ("sequence", {"ratio_level": "product", "rejection": "token", "rejection_range": (0.6, 1.6)}),
        )
    ),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: ",".join(map(str, changes.values())) or "defaults")
def test_grpo_is_what_the_slow_twin_computes(changes):
    """Loss and gradients, with ratios on both sides of both clips, and of that around the generator. Dropped groups are
    really dropped in the twin."""
    rules, groups = Rules(limit=LIMIT, **changes), make_groups()
    batch = make_batch(groups)
    slow.grpo_advantages(groups, rules)
    advantages, used = fast_advantages(batch, rules)
    assert used.flatten().tolist() == [float(one.used) for group in groups for one in group]
    assert_same(groups, batch, fast_loss(batch, advantages, used, rules), slow.loss(groups, rules))


CORRECTED = [
    {},
    {"importance_weights": "token", "importance_cap": 1.2, "rejection": "geometric", "rejection_range": (0.9, 1.1)},
    {"importance_weights": "sequence", "rejection": "token", "rejection_range": (0.8, 1.3)},
    {"importance_weights": "geometric", "generator_clip": True},
]
NAMES = ["plain", "by token", "by response", "by mean"]


@pytest.mark.parametrize("changes", CORRECTED, ids=NAMES)
def test_rloo_is_what_the_slow_twin_computes(changes):
    rules, groups = Rules(limit=LIMIT, **changes), make_groups()
    batch = make_batch(groups)
    slow.rloo_advantages(groups, 0.05)
    advantages, _ = leave_one_out_advantages(batch.scores, batch.mask, batch.old, batch.reference, kl_coef=0.05)
    fast = fast_loss(batch, advantages, torch.ones_like(batch.scores), rules)
    assert_same(groups, batch, fast, slow.loss(groups, rules))


@pytest.mark.parametrize("changes", CORRECTED, ids=NAMES)
def test_remax_is_what_the_slow_twin_computes(changes):
    rules, groups = Rules(limit=LIMIT, **changes), make_groups()
    batch, samples = make_batch(groups), [one for group in groups for one in group]
    greedy = [0.3 * index - 1.0 for index in range(len(samples))]
    slow.remax_advantages(samples, greedy, 0.05)
    old, reference, mask = (x.flatten(0, 1) for x in (batch.old, batch.reference, batch.mask))
    advantages, _ = greedy_baseline_advantages(
        batch.scores.flatten(), torch.tensor(greedy, dtype=torch.float64), mask, old, reference, kl_coef=0.05
    )
    fast = fast_loss(batch, advantages.view_as(batch.mask), torch.ones_like(batch.scores), rules)
    assert_same(groups, batch, fast, slow.loss(groups, rules))


@pytest.mark.parametrize("changes", CORRECTED, ids=NAMES)
@pytest.mark.parametrize("baseline", ["none", "group"])
def test_reinforce_plus_plus_is_what_the_slow_twin_computes(baseline, changes):
    rules, groups = Rules(limit=LIMIT, **changes), make_groups()
    batch = make_batch(groups)
    slow.reinforce_plus_plus_advantages(groups, 0.05, baseline)
    made, _ = batch_advantages(batch.scores, batch.mask, batch.old, batch.reference, baseline=baseline, kl_coef=0.05)
    advantages = batch_advantages_finish(made, batch.mask, batch_advantages_sums(made, batch.mask))
    mean, variance = mean_and_variance(moments(advantages, batch.mask))
    assert abs(float(mean)) < 1e-12 and float(variance) == pytest.approx(1.0, abs=1e-6)
    fast = fast_loss(batch, advantages, torch.ones_like(batch.scores), rules)
    assert_same(groups, batch, fast, slow.loss(groups, rules))


# ---- closed forms ---------------------------------------------------------------------------------------------------


def advantages_of(scores: list[list[float]], **options) -> Tensor:
    """Returns GRPO's advantages of groups of responses of one token."""
    wide = torch.tensor(scores, dtype=torch.float64)
    mask = torch.ones(*wide.shape, 1, dtype=torch.bool)
    return group_advantages(wide, mask, torch.ones_like(wide, dtype=torch.bool), **options)[0]


def test_equal_rewards_give_no_gradient():
    """Exactly none: the rounding of a mean is not scaled up by a tiny standard deviation."""
    assert not advantages_of([[0.1] * 7, [1 / 3] * 7], scale_eps=1e-9).any()


@pytest.mark.parametrize("oversampling", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("overlong", ["keep", "mask"])
def test_the_first_groups_left_are_trained_on(oversampling, overlong):
    """Two mini-batches of eight groups, as the slow twin chooses; the loss of one is the twin's, too."""
    rules = Rules(LIMIT, drop_equal_groups=True, overlong=overlong)
    mini_batches = [make_groups(seed=seed) + make_groups(seed=seed + 9) for seed in range(2)]
    for one in itertools.chain(*mini_batches[1][3:]):
        one.score = 2.0  # too few differ
    made, used = [], []
    for groups in mini_batches:
        slow.grpo_advantages(groups, rules)
        batch = make_batch(groups)
        made.append((batch, fast_advantages(batch, rules)[0]))
        used.append(fast_advantages(batch, rules)[1])
    used_MC = torch.stack([one.flatten() for one in used])
    starts_MC = torch.stack([group_starts(one).flatten() for one in used])
    trained_MC, sums = first_groups(used_MC, starts_MC, oversampling=oversampling)
    num_wanted = round(8 / oversampling)
    slow.first_groups(mini_batches, num_wanted)
    expected = [[float(one.used) for group in groups for one in group] for groups in mini_batches]
    assert trained_MC.tolist() == expected and trained_MC.sum() > 0
    numbers = [sum(any(one.used for one in group) for group in groups) for groups in mini_batches]
    assert float(sums["trained_groups"][0]) == sum(numbers) and max(numbers) <= num_wanted
    assert float(sums["short_steps"][0]) == sum(number < num_wanted for number in numbers)
    batch, advantages = made[0]
    fast = fast_loss(batch, advantages, trained_MC[0].view(8, SAMPLES), rules)
    assert_same(mini_batches[0], batch, fast, slow.loss(mini_batches[0], rules))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_what_is_masked_counts_in_no_baseline(scale):
    """The advantages of the others are those without it. A response that is left alone has no advantage."""
    mask, ended = torch.ones(4, 4, 5, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)
    ended[0, 3] = ended[1, 0] = ended[2, 1:] = ended[3] = False
    scores = torch.tensor([[1.0, 1.0, 1.0, 0.0], [9.0, 1.0, 2.0, 6.0], [3.0, 1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    found = []
    for shift in (0.0, 7.0):
        shifted = torch.where(ended, scores, scores + shift)
        given = {"scale": scale, "overlong": "mask", "drop_equal_groups": True}
        advantages, used, sums = group_advantages(shifted, mask, ended, **given)
        total = group_advantages_sums(shifted, mask, used, overlong="mask")
        found.append(group_advantages_finish(advantages, used, total, scale=scale))
        assert sums["equal_groups"][0].tolist() == [1.0, 0.0, 1.0, 1.0]
        assert equal_groups(shifted, mask, ended, overlong="mask")[:, 3].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].tolist() == [[0.0] * 4, [0.0, 1.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4]
    three = advantages_of([[1.0, 2.0, 6.0]], scale="group" if scale == "batch" else scale)
    torch.testing.assert_close(found[0][0][1, 1:], three[0].float())
    assert not found[0][0][[0, 2, 3]].any()


def test_all_groups_equal():
    """Nothing is used, the loss is 0, and min_groups ends the run."""
    groups = make_groups()
    for one in itertools.chain(*groups):
        one.score = 1.0
    batch, rules = make_batch(groups), Rules(LIMIT, drop_equal_groups=True)
    assert equal_groups(batch.scores, batch.mask, batch.ended).all()
    shaped = {"overlong": "shape", "overlong_buffer": 3}  # which tells responses of other lengths apart
    assert not equal_groups(batch.scores, batch.mask, batch.ended, **shaped).all()
    advantages, used = fast_advantages(batch, rules)
    assert not used.any() and fast_loss(batch, advantages, used, rules).item() == 0.0
    with pytest.raises(UserError, match=r"^0 groups of this iteration remain .* grpo.min_groups is 2"):
        fast_advantages(batch, rules, min_groups=2)


def test_turn_advantages_do_not_price_another_turn():
    """A bandit of two turns, every group of three episodes with its probability: the mean gradient is the exact one
    times 1 - 1/3, the share of the other samples in the group's mean. With the mean of each turn over the episodes that
    still run in it, it is not: a second turn that earns nothing is preferred or avoided for the first turn's reward."""
    first, second = torch.tensor([0.3, -0.2]), torch.tensor([0.1, 0.5])  # logits: stop or go on; one arm or the other
    # what an episode does in its turns, and what these earn: going on earns 1, in the arms then 0.5 or nothing
    episodes = [((0,), (0.2,)), ((1, 0), (1.0, 0.5)), ((1, 1), (1.0, 0.0))]

    def log_probabilities(theta: torch.Tensor) -> torch.Tensor:
        """Returns the log probability of each turn of each episode: [3, 2], 0 where it has no second turn."""
        of_first, of_second = theta[:2].log_softmax(0), theta[2:].log_softmax(0)
        nothing = of_first.new_zeros(())
        rows = [(of_first[one[0]], of_second[one[1]] if len(one) > 1 else nothing) for one, _ in episodes]
        return torch.stack([torch.stack(row) for row in rows])

    theta = torch.cat((first, second)).double().requires_grad_()
    chances = log_probabilities(theta).sum(1).exp()
    rewards_3G = torch.tensor([[*earned, *[0.0] * (2 - len(earned))] for _, earned in episodes], dtype=torch.float64)
    mask_3G = torch.tensor([[True, len(turns) > 1] for turns, _ in episodes])
    (exact,) = torch.autograd.grad((chances * rewards_3G.sum(1)).sum(), theta)
    mean, by_turn = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=3):
        index = torch.tensor(group)
        rewards_NSG, mask_NSG = rewards_3G[index][None], mask_3G[index][None]
        scores_NS = rewards_NSG.sum(-1)
        advantages_NS, _, _ = group_advantages(scores_NS, mask_NSG, torch.ones(1, 3, dtype=torch.bool), scale="none")
        advantages_NSG = turn_advantages(advantages_NS, rewards_NSG, mask_NSG)
        to_go_NSG = rewards_to_go(rewards_NSG)
        num_N1G = mask_NSG.sum(1, keepdim=True).clamp(min=1)  # episodes that run in a turn
        running_NSG = to_go_NSG - (to_go_NSG * mask_NSG).sum(1, keepdim=True) / num_N1G
        chance = float(chances[index].detach().prod())
        for total, one in ((mean, advantages_NSG), (by_turn, torch.where(mask_NSG, running_NSG, 0.0))):
            loss = (one[0] * log_probabilities(theta)[index]).sum() / 3
            total += chance * torch.autograd.grad(loss, theta)[0]
    torch.testing.assert_close(mean, exact * (1 - 1 / 3))
    wrong = (by_turn / (exact * (1 - 1 / 3)))[2:]
    assert (wrong - 1).abs().min() > 0.1  # by a tenth at least
