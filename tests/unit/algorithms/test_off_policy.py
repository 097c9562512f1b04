"""The corrections that docs/algorithms.md names, against their formulas, and the options that contradict each other."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms.importance import off_policy_weights
from rlhf_spmd.algorithms.policy_gradient import loss_problem
from rlhf_spmd.algorithms.surrogates import policy_loss, surrogate_loss
from rlhf_spmd.config.presets import load
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.runtime.world.metric_sums import Meter, combine
from tests import slow_policy_gradient as slow
from tests.slow_policy_gradient import Rules, Sample
from tests.unit.algorithms.test_group_advantages import LIMIT, assert_same, fast_loss, make_batch, make_groups

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
EPS = 0.2


def within(x: float, low: float, high: float) -> float:
    return x if low <= x <= high else 0.0


# name in the docs -> the factor of a token with the log-ratio d, of a response with the log-ratios ds
FORMULAS: dict[str, Callable[[float, list[float]], float]] = {
    "TIS": lambda d, ds: min(math.exp(d), 2.0),
    "sequence TIS": lambda d, ds: min(math.exp(sum(ds)), 2.0),
    "decoupled PPO": lambda d, ds: math.exp(d),
    "IcePop": lambda d, ds: within(math.exp(d), 0.5, 5.0),
    "geometric weights": lambda d, ds: min(math.exp(sum(ds) / len(ds)), 2.0),
    "sequence MIS": lambda d, ds: within(math.exp(sum(ds)), 0.5, 2.0),
    "geometric mask": lambda d, ds: float(0.999 <= math.exp(sum(ds) / len(ds)) <= 1.001),
    "seq-mask-tis": lambda d, ds: math.exp(d) * (0.999 <= math.exp(sum(ds) / len(ds)) <= 1.001),
}


def recipes() -> dict[str, tuple[str, ...]]:
    """Returns name -> options, of the table in the docs."""
    rows = re.findall(
        r"^\| ([\w -]+) \| `((?:importance_weights|rejection)=[^`]*)` \|", PAGE.read_text(encoding="utf-8"), re.M
    )
    return {name: tuple(options.split()) for name, options in rows}


def rules_of(words: tuple[str, ...]) -> Rules:
    """Reads these options of GRPO as a run does."""
    given = [f"grpo.{word}" for word in (*words, "old_logprobs=recompute")]
    options = load("tiny", given, algorithm="grpo").options
    names = ("importance_weights", "importance_cap", "rejection", "rejection_range")
    return Rules(LIMIT, **{name: getattr(options, name) for name in names})


def drawn_elsewhere() -> list[list[Sample]]:
    """Returns responses of a generator that differs from the old policy by little or by much, by response."""
    groups = make_groups(seed=3)
    gen = torch.Generator().manual_seed(5)
    for number, one in enumerate(one for group in groups for one in group):
        d = torch.randn(len(one.old), generator=gen, dtype=torch.float64) * (0.4, 1.2)[number % 2]
        if number % 3 == 0 and len(d) > 1:
            d -= d.mean() - 5e-4
        one.generator = [old - float(x) for old, x in zip(one.old, d, strict=True)]
        one.advantages = [float(x) for x in torch.randn(len(one.old), generator=gen, dtype=torch.float64)]
    return groups


def by_formula(groups: list[list[Sample]], factor: Callable[[float, list[float]], float]) -> Tensor:
    """Returns -E[factor min(u A, clip(u, 1 +- e) A)], u = pi / pi_old: what a factor leaves out stays in the
    denominator."""
    terms: list[Tensor] = []
    for one in (one for group in groups for one in group):
        ds = [old - drawn for old, drawn in zip(one.old, one.generator, strict=True)]
        for d, new, old, a in zip(ds, one.logprobs, one.old, one.advantages, strict=True):
            u = torch.exp(new - old)
            terms.append(-factor(d, ds) * torch.minimum(u * a, u.clamp(1 - EPS, 1 + EPS) * a))
    return torch.stack(terms).mean()


def test_the_docs_name_every_correction():
    assert recipes().keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_a_correction_is_its_formula(name):
    """Loss and gradients; the factors differ between tokens, and the slow twin agrees."""
    rules, groups = rules_of(recipes()[name]), drawn_elsewhere()
    samples = [one for group in groups for one in group]
    factors = {f for one in samples for f in slow.weights(one, rules)}
    assert len(factors) > 1 and (min(factors) == 0) == (rules.rejection != "none")
    batch = make_batch(groups)
    advantages = torch.zeros_like(batch.old)
    advantages[batch.mask] = torch.tensor([a for one in samples for a in one.advantages], dtype=torch.float64)
    fast = fast_loss(batch, advantages, torch.ones_like(batch.scores), rules)
    expected = by_formula(groups, FORMULAS[name])
    torch.testing.assert_close(slow.loss(groups, rules), expected, rtol=1e-10, atol=1e-12)
    assert_same(groups, batch, fast, expected)


@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_logged_of_weights_on_any_ranks(name):
    """Sums and maxima of one, two and three ranks, one of them with a blank row, against the slow twin."""
    rules, groups = rules_of(recipes()[name]), drawn_elsewhere()
    expected = slow.weight_metrics([one for group in groups for one in group], rules)
    batch, found = make_batch(groups), []
    over = {key: metric.over for key, metric in load_algorithm("grpo").metrics.items()}
    old, drawn, mask = (x.flatten(0, 1) for x in (batch.old, batch.generator, batch.mask))
    blank = (torch.full_like(old[:1], math.nan), torch.full_like(old[:1], math.nan), torch.zeros_like(mask[:1]))
    for cuts in ((0, 16), (0, 5, 16), (0, 3, 3, 16)):
        messages = []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            rows = (old[start:stop], drawn[start:stop], mask[start:stop]) if stop > start else blank
            options = {key: getattr(rules, key) for key in ("importance_weights", "importance_cap", "rejection")}
            _, sums = off_policy_weights(*rows, **options, rejection_range=rules.rejection_range)
            meter = Meter()
            for key, (total, weight) in sums.items():
                meter.log(key, total, weight, over.get(key, "mean"))
            messages.append(meter.to_message())
        means, _ = combine(messages)
        means["importance_ess"] = means["importance"] ** 2 / means["importance_sq"]
        found.append({key: means[key] for key in expected})
    assert all(one == pytest.approx(expected, rel=1e-12) for one in found)
    assert 0 < expected["importance_ess"] < 1
    assert (expected["importance_truncated"] > 0) == (rules.importance_cap is not None and "TIS" in name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"importance_weights": "token"}, "set old_logprobs=recompute"),
        ({"rejection": "geometric"}, "set old_logprobs=recompute"),
        ({"old_logprobs": "loglinear"}, "set importance_weights or rejection, or old_logprobs=generator"),
        ({"old_logprobs": "loglinear", "rejection": "token"}, "^$"),
        ({"old_logprobs": "current"}, "^$"),
        ({"old_logprobs": "recompute", "rejection_range": (0.5, 2.0)}, "but rejection=none"),
        *(
            (
                {"old_logprobs": "recompute", "importance_weights": "token", "ratio_level": level},
                f"ratio_level={level} takes a response as a whole, .* set importance_weights={own}, or",
            )
            for level, own in (("sequence", "geometric"), ("product", "sequence"))
        ),
        *(
            ({"old_logprobs": "recompute", "importance_weights": weights, "ratio_level": "sequence"}, "^$")
            for weights in ("geometric", "sequence")
        ),
        *(
            ({"old_logprobs": old, "generator_clip": True}, "generator_clip=true is for a loss with importance_weights")
            for old in ("generator", "current", "recompute")
        ),
        ({"old_logprobs": "current", "rejection": "token", "generator_clip": True}, "^$"),
        ({"old_logprobs": "recompute", "rejection": "geometric", "ratio_level": "sequence"}, "^$"),
    ],
)
def test_contradictions_are_refused(given, said):
    assert re.search(said, loss_problem(load_algorithm("grpo").options(**given)))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_clip_against_the_generator_leaves_out_one_side(level):
    """Of tokens that have left the range around the generator those that their advantage pushes on, and no others:
    IcePop's mask would leave out both sides. PPO's loss is that of tokens; the KL term stays."""
    new = torch.tensor([[-1.0], [-1.0], [-1.0], [-1.0], [-1.0]], dtype=torch.float64)
    drawn = new - torch.tensor([[0.5], [0.5], [-0.5], [-0.5], [0.1]], dtype=torch.float64)
    advantages, mask = (
        torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64),
        torch.ones(5, 1, dtype=torch.bool),
    )
    options = {"importance_weights": "token", "generator_clip": True}
    leaf = new.clone().requires_grad_()
    rest = {"ratio_level": level, "ref_logprobs_BG": new - 1, "kl_coef": 0.1, "kl_estimator": "k2"}
    total, sums = surrogate_loss(leaf, new, advantages, mask, generator_logprobs_BG=drawn, **options, **rest)
    total.backward()
    kept = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    weights = (new - drawn).exp().clamp(max=2.0).flatten()
    torch.testing.assert_close(leaf.grad.flatten(), -kept * weights * advantages + 0.1)
    assert [float(x) for x in sums["generator_clip_fraction"]] == [2.0, 5.0]
    leaf = new.clone().requires_grad_()
    of_ppo, sums = policy_loss(leaf, new, advantages[:, None], mask, generator_logprobs_BG=drawn, **options)
    of_ppo.backward()
    torch.testing.assert_close(leaf.grad.flatten(), -kept * weights * advantages)
    assert [float(x) for x in sums["generator_clip_fraction"]] == [2.0, 5.0]


@pytest.mark.parametrize("loss", [policy_loss, surrogate_loss])
@pytest.mark.parametrize("share", [1.0, 0.25, 0.0])
def test_loglinear_old_logprobs(loss, share):
    """ln prox = ln mu + a (ln pi - ln mu) without a gradient ([A3PO], importance.py): loss, gradient and log are those
    with such old logprobs; at the first step, where a = 1, every ratio is exactly 1."""
    gen = torch.Generator().manual_seed(2)
    mu, new, advantages = (torch.randn(3, 5, generator=gen) for _ in range(3))
    mask, options = torch.ones(3, 5, dtype=torch.bool), {"importance_weights": "token", "importance_cap": None}
    old = mu + share * (new - mu)
    made = []
    for given in ({"old": mu, "lag_share": share}, {"old": new if share == 1.0 else old}):
        leaf = new.clone().requires_grad_()
        rest = {key: value for key, value in given.items() if key != "old"} | options
        total, sums = loss(leaf, given["old"], advantages, mask, generator_logprobs_BG=mu, **rest)
        total.backward()
        made.append((total.detach(), leaf.grad, sums))
    torch.testing.assert_close(made[0][:2], made[1][:2], rtol=1e-5, atol=1e-6)
    for name, (value, _) in made[1][2].items():
        assert float(made[0][2][name][0]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    if share == 1.0:
        assert float(made[0][2]["ratio"][0]) == 15.0 and float(made[0][2]["approx_kl"][0]) == 0.0
