"""On-policy distillation: the actor writes responses, and learns to give each token the teacher's probability. No
torch, no ranks.

The advantage of a token is -kl_coef (log pi_actor - log pi_teacher): an estimate, from the actor's own samples, of the
reverse KL divergence KL(actor || teacher) of Agarwal et al. 2023 (arXiv 2306.13649), with one number for each token in
the place of distributions. With task_coef, the advantage of GRPO is added. The teacher is a model of any size with the
actor's tokenizer. The tensor math is in group_advantages.py and surrogates.py.
"""

from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms import off_policy
from rlhf_spmd.algorithms.page import Aggregation, Metric, NonNegative
from rlhf_spmd.algorithms.policy_gradient import METRICS as OF_POLICY
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models, Role

TITLE = "distillation"
DATA = {"prompts": "prompt"}
ROLES = {
    "actor": Role("lm", lr=1e-6, saved=True),
    "teacher": Role("lm"),
    "reward": Role("scalar", judge=True),
}


@dataclass(frozen=True, slots=True)
class Options(off_policy.Options):
    """Options of distillation and of the policy loss."""

    kl_coef: NonNegative = 1.0  # weight of the reverse KL divergence from the teacher
    task_coef: NonNegative = 0.0  # weight of the advantage from rewards; 0: no rewards are computed
    scale_eps: NonNegative = 1e-4  # constant added to the standard deviation of a group's rewards, which divides them
    clip_low: NonNegative = 0.2  # probability ratios are clipped at 1 - clip_low
    clip_high: NonNegative = 0.2  # probability ratios are clipped at 1 + clip_high
    # how the losses of tokens become one; seq-mean-token-sum-norm divides sums by the limit on a response
    aggregation: Aggregation = "token-mean"


def workflow(options: Options, model: Models, compute: ComputeFunction, prompts: Data) -> None:
    """Describes one iteration."""
    actor = model("actor")
    responses, logprobs = actor.generate(prompts)
    old = off_policy.old_logprobs(options, actor, prompts, responses, logprobs)
    teacher = model("teacher").infer("logprobs", prompts, responses, output="teacher_logprobs")
    rewards: dict[str, Any] = {}
    if options.task_coef:
        rewards["scores"] = model("reward").infer("scores", prompts, responses)
    advantages = compute(
        "group_advantages.distillation_advantages",
        responses=responses,
        logprobs=old,
        teacher_logprobs=teacher,
        makes={"advantages": "token"},
        scope="group" if rewards else "row",
        **rewards,
    )
    actor.train(
        "surrogates.surrogate_loss",
        prompts,
        responses,
        advantages=advantages,
        divisor="tokens" if options.aggregation == "token-mean" else "responses",
        entropy=True,
        **off_policy.of_loss(options, logprobs, old),
    )


def problem(options: Options, *, samples_per_prompt: int) -> str:
    """Returns why these options make no sense together or with those of the run; empty if they do."""
    if options.task_coef and samples_per_prompt < 2:
        return "task_coef compares a response with the others of its prompt: set samples_per_prompt=8, or at least 2"
    return off_policy.problem(options)


NAMES = ("reward", "reward_std", "policy_loss", "clip_fraction_low", "clip_fraction_high", "entropy", "ratio")
METRICS = {
    # mean per token of log pi_actor - log pi_teacher, nats
    "teacher_kl": Metric("teacher", "to teacher", "{:10.4f}", headline="nats per token"),
    **{name: OF_POLICY[name] for name in (*NAMES, "approx_kl")},
} | off_policy.METRICS
