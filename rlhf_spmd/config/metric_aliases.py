"""Names of metrics in TRL and verl, for TensorBoard and Weights & Biases (`logging.aliases`); metrics.jsonl keeps ours.

A dashboard made for one of these programs then shows a run of this one. Only what is the same quantity has an alias;
`when` says under which options of the algorithm it is. Read in TRL 1.16 (names with the prefix that transformers adds
for both trackers) and verl of 2026. TRL divides variances by n - 1, this program by n.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GROUPS, GRADIENT = ("grpo", "rloo"), ("grpo", "rloo", "remax", "reinforce_plus_plus")
GIVEN = ("sft", "reward_model", "dpo")
FUNCTION = "{function}"  # in a name: that of each reward function


@dataclass(frozen=True, slots=True)
class Alias:
    """A metric of another program.

    ours: metrics of this program.
    algorithms: those that define them so; empty: all.
    when: values of the algorithm's options.
    of: the value, from ours.
    """

    name: str
    ours: tuple[str, ...]
    algorithms: tuple[str, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    of: Callable[[Sequence[float]], float] = sum


def rest(values: Sequence[float]) -> float:
    """Returns the other share: 1 - x."""
    return 1.0 - values[0]


NO_TERMS = {"kl_coef": 0.0, "entropy_coef": 0.0}  # the loss is that of the policy alone
TOKEN_CLIP = {"surrogate": "clip", "ratio_level": "token"}
TABLE: dict[str, tuple[Alias, ...]] = {
    "trl": (
        Alias("train/reward", ("reward",), GROUPS),
        Alias("train/reward_std", ("reward_std",), GROUPS),
        Alias("train/frac_reward_zero_std", ("equal_groups",), ("grpo",), {"scale": "group"}),
        Alias("train/rewards/{function}/mean", ("score_{function}",)),
        Alias("train/rewards/{function}/std", ("score_{function}_std",)),
        Alias("train/kl", ("kl_loss",), ("grpo",), {"kl_estimator": "k3"}),
        Alias("train/kl", ("kl_per_token",), ("rloo",)),
        Alias("train/entropy", ("entropy",), GROUPS),
        Alias("train/clip_ratio/low_mean", ("clip_fraction_low",), GROUPS, TOKEN_CLIP),
        Alias("train/clip_ratio/high_mean", ("clip_fraction_high",), GROUPS, TOKEN_CLIP),
        Alias("train/clip_ratio/region_mean", ("clip_fraction_low", "clip_fraction_high"), GROUPS, TOKEN_CLIP),
        Alias("train/completions/mean_length", ("response_length",)),
        Alias("train/completions/clipped_ratio", ("ended_fraction",), of=rest),
        Alias("train/sampling/sampling_logp_difference/mean", ("parity_mean_abs",)),
        Alias("train/sampling/sampling_logp_difference/max", ("parity_max_abs",)),
        Alias("train/loss", ("policy_loss",), GROUPS),
        Alias("train/loss", ("loss",), GIVEN),
        Alias("train/mean_token_accuracy", ("token_accuracy",), ("sft",)),
        Alias("train/entropy", ("entropy",), ("sft",)),
        Alias("train/accuracy", ("accuracy",), ("reward_model",)),
        Alias("train/margin", ("margin",), ("reward_model",)),
        Alias("train/mean_reward", ("score_mean",), ("reward_model",)),
        Alias("train/rewards/chosen", ("chosen_reward",), ("dpo",)),
        Alias("train/rewards/rejected", ("rejected_reward",), ("dpo",)),
        Alias("train/rewards/accuracies", ("accuracy",), ("dpo",)),
        Alias("train/rewards/margins", ("margin",), ("dpo",)),
        Alias("train/logps/chosen", ("chosen_logprob",), ("dpo",)),
        Alias("train/logps/rejected", ("rejected_logprob",), ("dpo",)),
        Alias("train/grad_norm", ("actor_grad_norm",)),
        Alias("train/learning_rate", ("actor_lr",)),
        Alias("train/step_time", ("iteration_s",)),
    ),
    "verl": (
        Alias("critic/score/mean", ("score",)),
        Alias("critic/rewards/mean", ("reward",), ("grpo",)),
        Alias("critic/returns/mean", ("return",), ("ppo",)),
        Alias("critic/values/mean", ("value",), ("ppo",)),
        Alias("critic/vf_loss", ("value_loss",), ("ppo",)),
        Alias("critic/vf_clipfrac", ("value_clip_fraction",), ("ppo",)),
        Alias("critic/grad_norm", ("critic_grad_norm",)),
        Alias("critic/lr", ("critic_lr",)),
        Alias("actor/pg_loss", ("policy_loss",), ("ppo",)),
        Alias("actor/pg_loss", ("policy_loss",), GRADIENT, NO_TERMS),
        Alias("actor/pg_clipfrac", ("clip_fraction",), ("ppo",)),
        Alias("actor/pg_clipfrac", ("clip_fraction_low", "clip_fraction_high"), GRADIENT, {"surrogate": "clip"}),
        Alias("actor/entropy", ("entropy",), ("ppo", *GRADIENT)),
        Alias("actor/kl_loss", ("kl_loss",), GRADIENT, {"aggregation": "token-mean"}),
        Alias("actor/reward_kl_penalty_coeff", ("kl_coef",), ("ppo",)),
        Alias("actor/grad_norm", ("actor_grad_norm",)),
        Alias("actor/lr", ("actor_lr",)),
        Alias("response_length/mean", ("response_length",)),
        Alias("timing_s/gen", ("generate_s",)),
        Alias("timing_s/step", ("iteration_s",)),
        Alias("perf/time_per_step", ("iteration_s",)),
    ),
}


def aliases_of(
    system: str, algorithm: str, options: Any, functions: Sequence[str] = (), *, parts: bool = False
) -> list[Alias]:
    """Returns the aliases of a run.

    system: a key of TABLE, or `none`.
    options: of the algorithm.
    functions: the names of its reward functions; the score of a single one is `score`.
    parts: whether even a single one is a part of a sum.
    """
    found = []
    for alias in TABLE.get(system, ()):
        if alias.algorithms and algorithm not in alias.algorithms:
            continue
        if any(getattr(options, name, value) != value for name, value in alias.when.items()):
            continue
        if FUNCTION not in alias.name:
            found.append(alias)
            continue
        for function in functions:
            there = "score" if len(functions) == 1 and not parts else f"score_{function}"
            ours = tuple(name.replace(f"score_{FUNCTION}", there) for name in alias.ours)
            found.append(Alias(alias.name.replace(FUNCTION, function), ours, of=alias.of))
    return found


def aliased(aliases: Sequence[Alias], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that have aliases, under these names."""
    return {
        alias.name: alias.of([metrics[name] for name in alias.ours])
        for alias in aliases
        if all(name in metrics for name in alias.ours)
    }
