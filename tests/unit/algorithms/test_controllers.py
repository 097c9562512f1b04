"""Coefficients, learning rates and running moments: rows 2, 5 and 20."""

import pytest
import torch

from rlhf_spmd.algorithms import controllers
from rlhf_spmd.algorithms.advantages import moments
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError


def test_row_02_kl_coef():
    assert controllers.next_kl_coef(0.1, 6.0, 512) == 0.1
    assert controllers.next_kl_coef(0.1, 6.6, 500) == pytest.approx(0.1 * (1 + 0.1 * 0.05))
    assert controllers.next_kl_coef(0.1, 60.0, 500) == pytest.approx(0.1 * (1 + 0.2 * 0.05))
    assert controllers.next_kl_coef(0.1, -60.0, 500) == pytest.approx(0.1 * (1 - 0.2 * 0.05))
    assert controllers.next_kl_coef(0.1, 4.0, 10, target=2.0, horizon=100) == pytest.approx(0.1 * (1 + 0.2 * 0.1))


@pytest.mark.parametrize("prompts", [1, 4, 5, 32, 512, 65_536])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_coefficient_stays_positive(prompts, samples):
    """The least horizon is the least one: at one sequence less the coefficient may become 0 or negative."""
    num, adaptive = prompts * samples, ["ppo.kl_controller=adaptive", f"samples_per_prompt={samples}"]
    adaptive += [f"rollout_batch={prompts}", f"mini_batch={num}"]
    least = controllers.least_horizon(num)
    assert controllers.next_kl_coef(0.05, 0.0, num, horizon=least) > 0
    assert load("tiny", [*adaptive, f"ppo.kl_horizon={least}"]).options.kl_horizon == least
    if least > 1:
        assert controllers.next_kl_coef(0.05, 0.0, num, horizon=least - 1) <= 1e-12
        with pytest.raises(UserError, match=f"= {num} sequences may lower .* set kl_horizon to at least {least}$"):
            load("tiny", [*adaptive, f"ppo.kl_horizon={least - 1}"])
        assert load("tiny", [*adaptive[1:], f"ppo.kl_horizon={least - 1}"]).options.kl_controller == "fixed"


def test_row_05_running_moments():
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 100
    every = torch.ones(50, dtype=torch.bool)
    running = controllers.RunningMoments()
    assert (running.mean, running.std) == (0.0, 1.0)
    for part in (x[:7], x[7:8], x[8:8], x[8:]):
        running = running.updated(*moments(part, every[: len(part)]).tolist())
    assert running.count == 50
    assert running.mean == pytest.approx(float(x.mean()), rel=1e-13)
    assert running.std == pytest.approx(float(x.std(correction=0)), rel=1e-10)
    # Scores that are all alike so far say nothing about their scale.
    constant = controllers.RunningMoments().updated(*moments(torch.full((9,), 0.1), every[:9]).tolist())
    assert (round(constant.mean, 6), constant.std) == (0.1, 1.0)
    for scale in (1e-9, 1e9):  # of large numbers that are alike, rounding is no spread; small ones may have any scale
        constant = controllers.RunningMoments().updated(*moments(torch.full((9,), 0.1 * scale), every[:9]).tolist())
        assert constant.std == 1.0
        some = controllers.RunningMoments().updated(*moments(x * scale, every).tolist())
        assert some.std == pytest.approx(float(x.std(correction=0)) * scale, rel=1e-9)


@pytest.mark.parametrize(("least", "peak"), [(0.0, 1.0), (0.1, 3e-4), (0.5, 1e-6)])
def test_schedules_are_those_of_transformers(least, peak):
    """Theirs counts from 0, so that the first step has the rate 0; ours counts from 1 while it warms up."""
    from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    steps = {"num_warmup_steps": 5, "num_training_steps": 40}
    cosine = get_cosine_with_min_lr_schedule_with_warmup(optimizer, **steps, min_lr_rate=least)
    linear = get_scheduler("linear", optimizer, **steps)
    for step in range(44):
        shifted = step + 1 if step < 5 else step
        for decay, theirs in {"cosine": cosine.lr_lambdas[0](shifted), "linear": linear.lr_lambdas[0](shifted)}.items():
            own = least if decay == "cosine" or step >= 5 else 0.0
            theirs = own + (1 - own) * theirs if decay == "linear" and step >= 5 else theirs
            if decay == "cosine" and step >= 40:
                theirs = least  # beyond the run theirs would rise again
            rate = controllers.learning_rate(
                step, peak=peak, num_warmup_steps=5, num_steps=40, decay=decay, least=least
            )
            assert rate == pytest.approx(peak * theirs, rel=1e-12, abs=1e-18), (step, decay)


def test_warm_up_as_a_share_is_rounded_up():
    """As by transformers, but of the share as it is written: 0.07 * 100 is above 7 in floating point."""
    shares = {(0.0, 40): 0, (0.03, 40): 2, (0.1, 40): 4, (0.1, 7): 1, (0.25, 1): 1, (0.07, 100): 7, (1e-5, 1000): 1}
    assert {one: controllers.warmup_steps_of(*one) for one in shares} == shares
