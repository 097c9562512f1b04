"""What the parity gate lets through in bfloat16: single tokens that rounding has moved, and no shift of all of them."""

import pytest
import torch

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.execute.parity_gate import MEAN_TOKENS, corrects, parity_gate
from rlhf_spmd.runtime.world.metric_sums import Meter

SHAPE = (8, 2 * MEAN_TOKENS // 8)


def gate(difference_BG: torch.Tensor, *options: str, corrected: bool = False) -> dict:
    """Passes logprobs that differ by this much through the gate of a bfloat16 run. Returns what is logged of it."""
    config = presets.load("tiny", ["dtype=bfloat16", *options])
    old_BG = torch.full(difference_BG.shape, -3.0)
    responses_BG = torch.zeros(difference_BG.shape, dtype=torch.int64)
    meter = Meter()
    tokens = responses_BG, responses_BG >= 0
    parity_gate(config, old_BG, old_BG + difference_BG, *tokens, meter, corrected=corrected)
    return meter.maxima


def test_a_token_may_be_off_by_rounding():
    """As found with logits near 24 and an error of their last digit: 0.94 nats at most, 0.17 in the mean."""
    torch.manual_seed(0)
    difference_BG = (0.17 * torch.randn(SHAPE)).clamp(-0.6, 0.6)
    difference_BG[3, 5] = 0.94
    gate(difference_BG)


def test_joined_copies_that_round_too_much_are_named():
    """A bfloat16 copy W + s B A generates with other weights than training has."""
    joined = ("lora.rank=4", "lora.generate=joined")
    gate(torch.full(SHAPE, -0.4), *joined)
    for far, *more in ((-0.6,), (-2.1,), (-0.1, "parity_tolerance=0.05")):
        with pytest.raises(UserError, match="joined rounds W . s B A to bfloat16, and lora.generate=apart has no such"):
            gate(torch.full(SHAPE, far), *joined, *more)
        with pytest.raises(UserError) as error:
            gate(torch.full(SHAPE, far), "lora.rank=4", *more)
        assert "joined" not in str(error.value)


def test_all_tokens_may_not_be():
    with pytest.raises(UserError, match="6.00e-01 in the mean of 512 tokens; the limit is .*, and 0.5 for the mean"):
        gate(torch.full(SHAPE, -0.6))
    gate(torch.full(SHAPE, -0.6), "parity_tolerance=1")  # the user's limit is the only one
    gate(torch.full((2, 4), -0.6))  # too few for a mean


def test_a_loss_that_corrects_differences_only_logs_them():
    """Unless the user has set a limit, or a logprob is not a number."""
    far = torch.full(SHAPE, -3.0)
    assert gate(far, corrected=True) == {"parity_max_abs": 3.0}
    with pytest.raises(UserError, match="the limit is parity_tolerance=1 for a token"):
        gate(far, "parity_tolerance=1", corrected=True)
    far[1, 2] = float("nan")
    with pytest.raises(UserError, match="inf nats apart, .*; lower the learning rates"):
        gate(far, corrected=True)


@pytest.mark.parametrize(("options", "expected"), [([], False), (["ppo.rejection=token"], True)])
def test_which_losses_correct(options, expected):
    config = presets.load("tiny", ["ppo.old_logprobs=recompute", *options])
    assert corrects(make_workload(config).workflow.train_call("actor")) == expected
