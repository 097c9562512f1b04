"""Ends a run in which generation and training disagree about the logprobs of the same tokens with the same weights."""

# B sequences of a micro-batch, G response tokens

import math
import sys

from torch import Tensor

from rlhf_spmd.algorithms.logprob_parity import parity
from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.routes import Routes
from rlhf_spmd.plan.calls import LossCall
from rlhf_spmd.plan.runtime_words import GENERATOR_LOGPROBS
from rlhf_spmd.runtime.world.metric_sums import Meter

# Limits in nats: of one token, and of the mean over many. In bfloat16 a logit between 16 and 32 has a last digit of
# 0.125, so rounding moves one token in a thousand by half a nat (bench/LOG.md); a fault moves the mean by nats.
PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2.0}
MEAN_TOLERANCE = {"bfloat16": 0.5}
FEW_ROUTES, ROUTE_TOLERANCE = 2, 1e-4  # choices that may differ, at least, and their share, in float32
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
    """Raises UserError unless both passes agree on the sampled tokens (mask_BG); called while weights are still those
    that generated.

    corrected: the loss corrects differences, so only a limit that the user has set ends the run, or a logprob that is
        not a number.
    """
    given = config.parity_tolerance
    limit, mean_limit = PARITY_TOLERANCE[config.dtype], MEAN_TOLERANCE.get(config.dtype, math.inf)
    found = parity(old_BG, new_BG, mask_BG)
    meter.add("parity_mean_abs", found.sum_abs, found.num_tokens)
    meter.maximum("parity_max_abs", found.max_abs)
    if given is not None or corrected:
        limit, mean_limit = sys.float_info.max if given is None else given, math.inf
    elif found.num_tokens < MEAN_TOKENS:
        mean_limit = math.inf
    if found.max_abs <= limit and found.mean_abs <= mean_limit:
        return
    place = found.row, found.position
    fix = "lower the learning rates, or look at the model"
    if math.isfinite(found.max_abs):
        fix = (
            f"the limit is parity_tolerance={limit:g} for a token, and {mean_limit:g} for the mean: raise it if this "
            "is rounding, use float32, or let the loss correct it (importance_weights or rejection of the algorithm)"
        )
        if config.lora.generate != "apart":
            fix += f"; lora.generate=joined rounds W + s B A to {config.dtype}, and lora.generate=apart has no such "
            fix += "difference"
    raise UserError(
        f"generation and training disagree: token {int(responses_BG[place])} at position {found.position} has "
        f"logprob {float(old_BG[place]):.6f} from the generator and {float(new_BG[place]):.6f} in training, "
        f"{found.max_abs:.2e} nats apart, and {found.mean_abs:.2e} in the mean of {found.num_tokens:,} tokens; {fix}"
    )


def route_gate(config: Config, routes: Routes, meter: Meter, *, corrected: bool = False) -> None:
    """Raises UserError if more than a few tokens would have taken other experts than in generation, which in float32
    only rounding makes a difference to; called where `parity_gate` is.

    corrected: as there.
    """
    num, num_given = routes.num_disagreeing, routes.num_given
    meter.add("route_disagreement", num, num_given)
    if config.dtype != "float32" or corrected or config.parity_tolerance is not None:
        return
    if num > max(FEW_ROUTES, ROUTE_TOLERANCE * num_given):
        raise UserError(
            f"generation and training disagree: the routers of training would have chosen other experts in {num:,} of "
            f"{num_given:,} cases, which is more than rounding explains; lower the learning rates, or look at the model"
        )


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
