"""A page with a second generating call and a group advantage: each sample's score against its group's mean, and the
group's mean against the score of a greedy response."""

from dataclasses import dataclass

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.plan.workflow import Role

TITLE = "groups"
DATA = {"prompts": "prompt"}
ROLES = {"actor": Role("lm", lr=1e-4), "judge": Role("scalar", judge=True)}
METRICS = {
    "surrogate": Metric("actor", "loss"),
    "gain": Metric("actor", "gain", headline=""),
    "spread": Metric("actor"),
}


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    epochs: int = 2
    clip: float = 0.2


def workflow(options, model, compute, prompts):
    actor, judge = model("actor"), model("judge")
    responses, logprobs = actor.generate(prompts)
    greedy_responses, _ = actor.generate(prompts, name="greedy", temperature=0.0)
    scores = judge.infer("scores", prompts, responses)
    greedy_scores = judge.infer("scores", prompts, greedy_responses, output="greedy_scores")
    advantages = compute(
        "group_advantages", scores=scores, baseline=greedy_scores, makes={"advantages": "row"}, scope="group"
    )
    actor.train("surrogate", prompts, responses, old_logprobs=logprobs, advantages=advantages)


def group_advantages(scores_NS, baseline_NS):
    mean_N1, gain_NS = scores_NS.mean(1, keepdim=True), scores_NS - baseline_NS
    spread_N = scores_NS.std(1) if scores_NS.shape[1] > 1 else scores_NS.new_zeros(len(scores_NS))
    ones = gain_NS.new_ones(gain_NS.shape)
    return scores_NS - mean_N1 + gain_NS.mean(1, keepdim=True), {
        "gain": (gain_NS, ones),
        "spread": (spread_N, ones[:, 0]),
    }


def surrogate(logprobs_BG, old_logprobs_BG, advantages_B, mask_BG, *, clip):
    zero = logprobs_BG.new_zeros(())
    ratio_BG = (logprobs_BG - old_logprobs_BG).where(mask_BG, zero).exp()
    free_BG, clipped_BG = (-advantages_B[:, None] * r for r in (ratio_BG, ratio_BG.clamp(1 - clip, 1 + clip)))
    total = free_BG.maximum(clipped_BG).where(mask_BG, zero).sum()
    return total, {"surrogate": (total.detach().double(), mask_BG.sum())}
