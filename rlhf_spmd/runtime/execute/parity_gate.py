"""Ends a run in which generation and training disagree about the logprobs of the same tokens with the same weights."""

# B sequences of a micro-batch, G response tokens

import math
import sys

from torch import Tensor

from rlhf_spmd.algorithms.logprob_parity import parity
from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.runtime_words import GENERATOR_LOGPROBS
from rlhf_spmd.plan.workflow import LossCall
from rlhf_spmd.runtime.world.metric_sums import Meter

# Limits in nats: of one token, and of the mean over many. In bfloat16 a logit between 16 and 32 has a last digit of
# 0.125, so rounding moves one token in a thousand by half a nat (bench/LOG.md); a fault moves the mean by nats.
PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2.0}
MEAN_TOLERANCE = {"bfloat16": 0.5}
LARGEST = sys.float_info.max
MEAN_TOKENS = 256  # the mean of fewer tokens is not checked


def parity_gate(
    config: Config,
    old_BG: Tensor,
    new_BG: Tensor,
    responses_BG: Tensor,
    mask_BG: Tensor,
    meter: Meter,
    *,
    corrected: bool = False,
) -> None:
    """Raises UserError unless both passes agree on the drawn tokens (mask_BG); called while the weights are still those
    that generated.

    corrected: the loss corrects differences, so only a limit that the user has set ends the run, or a logprob that is
        not a number.
    """
    limit = PARITY_TOLERANCE[config.dtype] if config.parity_tolerance is None else config.parity_tolerance
    found = parity(old_BG, new_BG, mask_BG)
    meter.add("parity_mean_abs", found.sum_abs, found.num_tokens)
    meter.maximum("parity_max_abs", found.max_abs)
    is_free = corrected and config.parity_tolerance is None
    if found.max_abs > (LARGEST if is_free else limit):
        place = found.row, found.position
        fix = (
            f"the limit is parity_tolerance={limit:g}: raise it if this is rounding, use float32, "
            "or let the loss correct it (importance_weights or rejection of the algorithm)" + _apart(config)
        )
        raise UserError(
            f"generation and training disagree: token {int(responses_BG[place])} at position {found.position} has "
            f"logprob {float(old_BG[place]):.6f} from the generator and {float(new_BG[place]):.6f} in training, "
            f"{found.max_abs:.2e} nats apart; "
            + (fix if math.isfinite(found.max_abs) else "lower the learning rates, or look at the model")
        )
    mean_limit = MEAN_TOLERANCE.get(config.dtype, math.inf) if found.num_tokens >= MEAN_TOKENS else math.inf
    if found.mean_abs > mean_limit and not corrected and config.parity_tolerance is None:
        raise UserError(
            f"generation and training disagree by {found.mean_abs:.2e} nats per token in the mean of "
            f"{found.num_tokens:,} tokens, more than rounding gives (the limit is {mean_limit:g} in "
            f"{config.dtype}): use float32 to see whether it goes away, or set parity_tolerance, "
            "which is then the only limit" + _apart(config)
        )


def _apart(config: Config) -> str:
    """Returns what helps where copies with adapters were rounded; empty if there are none."""
    if config.lora.generate == "apart":
        return ""
    return f"; lora.generate=joined rounds W + s B A to {config.dtype}, and lora.generate=apart has no such difference"


def log_lag(old_BG: Tensor, new_BG: Tensor, mask_BG: Tensor, meter: Meter, lag: int) -> None:
    """Logs how far the generator is from the policy with which training begins.

    lag: iterations between them.
    """
    found = parity(old_BG, new_BG, mask_BG)
    meter.maximum("lag", lag)
    if math.isfinite(found.max_abs):  # else the loss is not finite either, and says so
        meter.add("lag_mean_abs", found.sum_abs, found.num_tokens)
        meter.maximum("lag_max_abs", found.max_abs)


def corrects(call: LossCall) -> bool:
    """Returns whether the loss of a call gets the generator's logprobs beside the old ones, to correct the
    difference."""
    return (GENERATOR_LOGPROBS, call.drawn) in call.arguments
