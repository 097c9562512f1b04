"""The program of an evaluation under every strategy, its options and its memory."""

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import evaluated, make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.evaluation import evaluation_program
from rlhf_spmd.plan.program.instructions import Offload, Program, Run
from rlhf_spmd.plan.proof.check import check

# ---- options --------------------------------------------------------------------------------------------------------


# ---- programs -------------------------------------------------------------------------------------------------------

PLACEMENTS = {
    "flattening": {},
    "flattening with ZeRO 3": {"zero": 3},
    "interleaving1": {},
    "interleaving2": {"zero": 3},
    "separation": {"generation_tp": 2, "training_pp": 2},
    "reallocation": {"training_tp": 2, "training_pp": 2, "offload": True},
    "reallocation with ZeRO 2": {"zero": 2, "training_tp": 1},
}


def programs(name: str, num_ranks: int = 8, num_prompts: int = 13, samples: int = 3, **more) -> tuple[Program, Program]:
    """Returns the program of training and that of its evaluation."""
    cluster = Cluster.parse(f"1x{num_ranks}", more.pop("device_type", "cpu"))
    workload = make_workload(presets.load("llama-7b", []))
    training = load_strategy(name.partition(" ")[0]).compile(workload, cluster, PLACEMENTS[name])
    options = {"num_prompts": num_prompts, "samples_per_prompt": samples, "temperature": 1.0, "max_response": 64}
    return training, evaluation_program(training, **(options | {"by_function": False} | more))


@pytest.mark.parametrize("algorithm", ["sft", "reward_model", "dpo"])
@pytest.mark.parametrize("name", [name for name in PLACEMENTS if not name.startswith("interleaving")])
def test_losses_are_measured_in_the_layout_of_training(name, algorithm):
    """All calls of training, of which none trains."""
    config = presets.load("llama-7b", [], algorithm=algorithm)
    cluster, strategy = Cluster.parse("1x8", "cpu"), load_strategy(name.partition(" ")[0])
    if algorithm == "dpo" or name.partition(" ")[0] != "separation":
        training = strategy.compile(make_workload(config), cluster, PLACEMENTS[name])
        options = {"samples_per_prompt": 1, "temperature": 1.0, "max_response": 256, "by_function": False}
        evaluation = evaluation_program(training, num_prompts=13, **options)
        assert check(evaluation, beside=training) == []
        measured, trained = evaluation.workload.workflow.calls, training.workload.workflow.calls
        assert [call.name for call in measured] == [call.name for call in trained]
        assert {call.kind for call in measured} == {"infer"}
        for call in measured:
            layouts = (program.placement.layouts[call.name] for program in (evaluation, training))
            assert len({(one.ranks, one.dp, one.pp, one.tp) for one in layouts}) == 1
        assert sum(call.function == trained[-1].function for call in measured) == 1


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_strategy_evaluates_where_it_generates_and_scores(name, by_function):
    training, evaluation = programs(name, by_function=by_function)
    assert check(evaluation, beside=training) == []
    assert [call.name for call in evaluation.workload.workflow.calls] == ["actor_generate", "reward_infer"]
    for call in evaluation.workload.workflow.calls:
        ranks = training.placement.layouts[call.name].ranks
        assert evaluation.placement.layouts[call.name].ranks == ranks
        ran = {
            r for r, steps in enumerate(evaluation.instructions) for s in steps if getattr(s, "call", "") == call.name
        }
        assert ran == set(ranks)
        made = sum(
            len(evaluation.placement.layouts[call.name].columns(rank, 39))
            for rank in ranks
            if evaluation.placement.layouts[call.name].reports(rank)
        )
        assert made == 39, "each row is made and reported once"
    if not by_function:  # ranks that meet in training meet in the evaluation: the engines gather weights together
        for rank, steps in enumerate(evaluation.instructions):
            met = {step.call: step.group for step in training.instructions[rank] if isinstance(step, Run)}
            assert all(step.group == met[step.call] for step in steps if isinstance(step, Run))


def test_an_evaluation_of_episodes_makes_what_its_scores_read():
    """Actions, rewards of turns and opened prompts, but no sampling support."""
    words = ["environment=m:f", "episode.max_row_tokens=300", "generation.top_k=5"]
    config = presets.load("llama-7b", words)
    cluster = Cluster.parse("1x8", "cpu")
    training = load_strategy("flattening").compile(make_workload(config), cluster, {})
    options = {"num_prompts": 13, "samples_per_prompt": 2, "temperature": 1.0, "by_function": config.only_function}
    evaluation = evaluation_program(training, **options, max_response=evaluated(config).row_tokens)
    assert check(evaluation, beside=training) == []
    generating, scoring = evaluation.workload.workflow.calls
    own = ("responses.actions", "responses.rewards", "responses.prompts")
    assert generating.outputs == ("responses", "logprobs", *own)
    assert {*scoring.inputs} == {"responses", *own} and evaluation.workload.row_shape("responses.actions") == (300,)


def test_an_offloaded_reward_model_is_loaded_for_it():
    _, evaluation = programs("reallocation")
    offloads = [step for step in evaluation.instructions[0] if isinstance(step, Offload)]
    assert [step.model for step in offloads] == ["reward"]
