"""Rounds of drawing: every list that may be executed is proved and ends, and mistakes are found."""

import random
from dataclasses import replace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import call_s
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.chain import unrolled
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Post, Program, Run, Wait
from rlhf_spmd.plan.program.rounds import prefix, round_of
from rlhf_spmd.plan.workflow import Data, trace
from rlhf_spmd.plan.workload import Workload
from tests.ordered import standing
from tests.programs import SPLIT_SHAPE, edited, errors

STRATEGIES = {
    "flattening": {},
    "interleaving1": {},
    "interleaving2": {},
    "separation": {},
    "separation ahead": {"ahead": 1},
    "separation in stages": {"generation_pp": 2},
    "reallocation": {"generation_tp": 2, "training_tp": 1},
}


def workload_of(rounds: int = 3, **options) -> Workload:
    """Returns GRPO in rounds, whose groups are split between ranks and mini-batches."""
    grpo = load_algorithm("grpo")
    values = grpo.options(rounds=rounds, drop_equal_groups=True, kl_coef=0.1, **options)
    return Workload(
        workflow=grpo.workflow(values),
        models={"actor": SPLIT_SHAPE, "reference": SPLIT_SHAPE, "reward": replace(SPLIT_SHAPE, scalar_head=True)},
        rollout_batch=7,
        samples_per_prompt=3,
        mini_batch=7,
        micro_batch=2,
        epochs=1,
        max_prompt=5,
        max_response=7,
        param_bytes=2,
    )


def program_of(name: str, size: int, device: str = "cpu", **more) -> Program:
    workload, cluster = workload_of(**more), Cluster.parse(f"1x{size}", device)
    placement = load_strategy(name.split()[0]).place(workload, cluster, **STRATEGIES[name])
    return compile_program(workload, placement, cluster)


def scattered(size: int = 4) -> Program:
    """Returns every call of a round on other ranks, some of which have nothing to do with the others."""
    workload, cluster = workload_of(old_logprobs="recompute"), Cluster.parse(f"1x{size}")
    layouts = {call.name: Layout.data_parallel(cluster.ranks) for call in workload.workflow.placed_calls}
    layouts |= {"actor_generate": Layout.data_parallel((1, 2)), "reward_infer": Layout.data_parallel((0, 2))}
    joint = (("reference_infer", "reward_infer"),)
    return compile_program(workload, Placement(layouts, ("reward_infer",), joint), cluster)


@pytest.mark.parametrize("device", ["cpu", "a100-80g"])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_prefix_is_proved_and_ends(name, size, device):
    try:
        program = program_of(name, size, device)
    except UserError:
        pytest.skip("too few ranks")
    assert errors(program) == []
    rng = random.Random(0)
    for num in (1, 2, 3):
        some = prefix(program, num)
        assert (some == program) == (num == 3)
        assert not standing(unrolled(some, 2) if program.overlaps else some, rng)


def test_what_is_in_a_round():
    """Generation, the judge and what decides are there three times, all else once; ahead, trainers do not agree."""
    program = scattered()
    assert errors(program) == []
    times = {call: set() for call in ("actor_generate", "reward_infer", "equal_groups", "reference_infer")}
    for steps in program.instructions:
        for step in (step for step in steps if isinstance(step, Run) and step.call in times):
            times[step.call].add(step.round)
    assert times.pop("reference_infer") == {0} and all(rounds == {0, 1, 2} for rounds in times.values())
    ahead = program_of("separation ahead", 4)
    agreeing = [any(isinstance(step, Agree) and step.round for step in steps) for steps in ahead.instructions]
    assert agreeing == [rank not in ahead.placement.layouts["actor_train"].ranks for rank in range(4)]


def moved(program: Program, rank: int, is_moved, before) -> Program:
    """Moves the first of some instructions of a rank in front of the first of others."""

    def edit(steps: list[Instruction]) -> None:
        step = next(step for step in steps if is_moved(step))
        steps.remove(step)
        steps.insert(next(index for index, other in enumerate(steps) if before(other)), step)

    return edited(program, rank, edit)


def carries(program: Program, kind: type, key: str, number: int):
    """Returns whether an instruction is the Post or Wait of a key in a round."""

    def is_one(step: Instruction) -> bool:
        return (
            isinstance(step, kind)
            and round_of(program, step) == number
            and key in program.transfers[step.transfer].keys
        )

    return is_one


def begins(number: int):
    return lambda step: isinstance(step, Agree) and step.round == number


def of_generation(number: int):
    """Returns whether an instruction draws in a round."""
    return lambda step: isinstance(step, Run) and step.call == "actor_generate" and step.round == number


def in_another_round(steps: list[Instruction]) -> None:
    place = next(place for place, step in enumerate(steps) if of_generation(1)(step))
    steps[place] = replace(steps[place], round=2)


MISTAKES = {  # rank, what happens to its list, what is said
    "a message crosses": (
        1,
        lambda program: moved(program, 1, begins(1), carries(program, Wait, "responses", 0)),
        "of rows that may be sampled again is under way",
    ),
    "another call comes too early": (
        1,
        lambda program: moved(program, 1, lambda step: getattr(step, "call", "") == "reference_infer", begins(2)),
        "reads responses of round 2 instead of 3",
    ),
    "rows leave too early": (
        1,
        lambda program: moved(program, 1, carries(program, Post, "logprobs", 0), begins(1)),
        "transfer 4 of rows that may be sampled again is under way",
    ),
    "a rank does not agree": (
        2,
        lambda program: edited(program, 2, lambda steps: steps.remove(next(filter(begins(2), steps)))),
        "waits for ever",
    ),
    "a Run is of another round": (
        0,
        lambda program: edited(program, 1, in_another_round),
        "if 2 of 3 rounds are executed: Run reward_infer round 2 reads responses of round 1 instead of 2",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name):
    program = scattered()
    rank, mistake, text = MISTAKES[name]
    assert any(text in one.message and one.rank == rank for one in errors(mistake(program)))


def test_rounds_that_no_program_has():
    grpo = load_algorithm("grpo")

    def workflow_of(**how):
        def workflow(model, compute, prompts):
            responses, _ = model("actor").generate(prompts)
            scores = model("reward").infer("scores", prompts, responses)
            compute("equal_groups", responses=responses, scores=scores, **({"makes": {"equal": "row"}} | how))
            model("actor").train("surrogate_loss", prompts, responses, advantages=Data("scores"))

        return trace(workflow, grpo.roles, {"prompts": "prompt"})

    assert workflow_of(scope="group", rounds=2).call("equal_groups").rounds == 2
    for how in ({"scope": "row"}, {"scope": "group", "sums": True}, {"scope": "group", "makes": {"equal": "token"}}):
        with pytest.raises(UserError, match="sampled again by one compute with scope='group'"):
            workflow_of(**how, rounds=2)


def test_forecasts_take_the_share_of_groups_that_fail():
    """Without any, a second round costs nothing; the more fail, the longer generation and judging take."""
    calibration = load_calibration("a100-80g-derived")
    workload, cluster = workload_of(), Cluster.parse("1x4", "a100-80g")
    found = []
    for share in (0.0, 0.5, 1.0):
        some = replace(workload, failed_groups=share, rollout_batch=700, mini_batch=700)
        program = compile_program(some, load_strategy("flattening").place(some, cluster), cluster)
        found.append(call_s(forecast(program, calibration)))
    for call in ("actor_generate", "reward_infer"):
        none, half, every = (seconds[call] for seconds in found)
        assert every == pytest.approx(3 * none) and none < half < every
    assert found[0]["reference_infer"] == pytest.approx(found[2]["reference_infer"])
