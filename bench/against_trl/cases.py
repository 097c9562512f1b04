"""The algorithms that are compared with TRL, as options of both programs. Read by both processes: no torch, no TRL.

Conventions that differ are either set by options, or named in `difference`.
"""

from dataclasses import dataclass, field
from typing import Any

KL = 0.04  # weight of the KL divergence in all cases
PLAIN_KL = {"use_bias_correction_kl": False}


@dataclass(frozen=True, slots=True)
class Case:
    """One loss. ours: options of the page. theirs: options of GRPOConfig or RLOOConfig. noise: nats by which old
    logprobs are perturbed, so large that some ratios are clipped on either side. difference: what the programs define
    differently. with_casts: the tolerance in float64 where both programs cast to float32 (widened.py)."""

    name: str
    page: str
    ours: tuple[str, ...]
    theirs: dict[str, Any] = field(default_factory=dict)
    noise: float = 0.3
    difference: str = ""
    with_casts: float = 1e-6

    @property
    def options(self) -> list[str]:
        """Our options as words of the command line."""
        return [f"{self.page}.{option}" for option in (*self.ours, f"kl_coef={KL}")]


CASES = (
    Case(
        "GRPO",
        "grpo",
        ("aggregation=seq-mean-token-mean",),
        {"loss_type": "grpo", **PLAIN_KL},
        difference="TRL's default multiplies the KL term by the ratio; `use_bias_correction_kl` is off here",
    ),
    Case(
        "GRPO, TRL's KL term",
        "grpo",
        ("aggregation=seq-mean-token-mean", "kl_unbiased=true"),
        {"loss_type": "grpo"},
        difference="TRL's default is our `kl_unbiased=true`",
    ),
    Case(
        "Dr.GRPO",
        "grpo",
        ("scale=none", "aggregation=seq-mean-token-sum-norm"),
        {"loss_type": "dr_grpo", "scale_rewards": "none", **PLAIN_KL},
    ),
    Case(
        "DAPO's loss",
        "grpo",
        ("clip_high=0.28",),
        {"loss_type": "dapo", "epsilon_high": 0.28, **PLAIN_KL},
        difference="both divide by the tokens of the whole optimizer step",
    ),
    Case(
        "GSPO",
        "grpo",
        ("ratio_level=sequence", "aggregation=seq-mean-token-mean", "clip_low=3e-4", "clip_high=4e-4"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
        | PLAIN_KL,
        noise=3e-3,
    ),
    Case(
        "CISPO",
        "grpo",
        ("surrogate=cispo", "clip_low=1", "clip_high=0.2"),
        {"loss_type": "cispo", "epsilon_high": 1.2, **PLAIN_KL},
        difference="TRL's `epsilon_high` is the largest ratio, our `clip_high` is added to 1",
    ),
    Case(
        "RLOO",
        "rloo",
        ("ratio_level=product", "aggregation=seq-mean-token-mean"),
        noise=0.12,
        with_casts=2e-5,  # the rounding of a response's logprobs adds up in the exponent
        difference="TRL has one ratio for a response, the product of its tokens'; our default is one for each token",
    ),
)
LOSSES = {case.name: case for case in CASES}
