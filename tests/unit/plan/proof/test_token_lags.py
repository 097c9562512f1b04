"""How old tokens are where responses take several iterations: what is proved, and what is refused."""

from dataclasses import replace

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Wait
from rlhf_spmd.plan.proof.token_lags import lag_problems, most
from rlhf_spmd.plan.text.program_listing import lag_note
from rlhf_spmd.strategies import separation
from tests import programs

REFUSED = [
    ("ppo", ("partial_steps=5",), {"ahead": 0}, "give strategy.ahead=1"),
    ("ppo", ("partial_steps=5", "ppo.old_logprobs=recompute"), {}, "not supported with old_logprobs=recompute"),
    (
        *("ppo", ("partial_steps=5", "ppo.old_logprobs=loglinear", "ppo.importance_weights=token"), {}),
        "not supported with old_logprobs=loglinear",
    ),
    ("ppo", ("partial_steps=5", "samples_per_prompt=2"), {}, "2 samples of a prompt that nothing compares"),
    ("remax", ("partial_steps=5",), {}, "not supported with several generate calls"),
    ("grpo", ("partial_steps=5", "grpo.rounds=2", "grpo.drop_equal_groups=true"), {}, "not supported with rounds"),
    ("grpo", ("partial_steps=5", "mini_batch=20", "rollout_batch=10"), {}, "as a multiple of 8"),
    ("ppo", ("partial_steps=1", "generation.max_new_tokens=300"), {}, "would take 300 iterations, at most 256; give 2"),
]


@pytest.mark.parametrize(("algorithm", "words", "options", "text"), REFUSED)
def test_what_has_no_further_iterations_is_refused(algorithm, words, options, text):
    workload = make_workload(presets.load("tiny", words, algorithm=algorithm))
    placement = separation.place(workload, Cluster.parse("1x3"), **{"ahead": 1} | options)
    with pytest.raises(UserError, match=text):
        compile_program(workload, placement, Cluster.parse("1x3"))


def program(partial_steps: int, **options):
    workload = replace(programs.make_workload(**options), partial_steps=partial_steps)
    cluster = Cluster.parse("1x3")
    return compile_program(workload, separation.place(workload, cluster, ahead=1), cluster)


def test_tokens_are_as_old_as_the_options_say():
    """A response of 7 tokens takes 3 iterations of 3 steps, and one more trains meanwhile."""
    partial = program(3)
    assert most(partial) == 3 and not programs.errors(partial)
    assert "at most 3 iterations old" in lag_note(partial) and not lag_note(program(0))


def test_a_generator_that_misses_weights_is_found():
    partial = program(3)
    rank = partial.placement.layouts["actor_generate"].ranks[0]
    weights = {number for number, move in enumerate(partial.transfers) if move.model == "actor"}
    lists = list(partial.instructions)
    lists[rank] = tuple(one for one in lists[rank] if not (isinstance(one, Wait) and one.transfer in weights))
    (text, *_) = (text for _, _, text in lag_problems(replace(partial, instructions=tuple(lists))))
    assert "samples tokens that train 4 iterations later, which is more than 3" in text
