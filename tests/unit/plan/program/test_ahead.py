"""One iteration ahead: which calls draw, the three lists, what is refused, and that they end one after another."""

import random
from dataclasses import replace
from functools import partial

import pytest

from rlhf_spmd.config import options, presets
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.ahead import with_starts
from rlhf_spmd.plan.program.chain import unrolled
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Post, Program, Run, Wait
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.text.strategy_module import strategy_source
from rlhf_spmd.plan.validate import ahead_problems
from rlhf_spmd.plan.workflow import Role, trace
from tests.ordered import standing
from tests.programs import SPLIT_SHAPE, errors, make_workload


def old(old_logprobs: str) -> dict[str, str]:
    """Returns the options of PPO with these old logprobs: current ones need weights."""
    return {"old_logprobs": old_logprobs} | ({"importance_weights": "token"} if old_logprobs == "current" else {})


def of_separation(size: int, *, old_logprobs: str = "generator", replay: bool = False, **options) -> Program:
    sizes = {"mini_batch": 8, "num_mini_batches": 3, "epochs": 2, "shape": SPLIT_SHAPE}
    workload = make_workload(**sizes, **old(old_logprobs), replay=replay)
    cluster, options = Cluster.parse(f"1x{size}"), {"ahead": 1} | options
    return compile_program(workload, load_strategy("separation").place(workload, cluster, **options), cluster)


OPTIONS = (
    {},
    {"generation_tp": 2},
    {"training_tp": 2, "generation_pp": 2},
    {"zero": 1},
    {"ratios": ("actor=1/2", "critic=1/2")},
    {"old_logprobs": "recompute", "replay": True},
    {"old_logprobs": "current", "training_pp": 2},
    {"old_logprobs": "current", "zero": 3, "recompute": True, "replay": True},
)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_three_lists_are_proved_and_end_in_one_piece(size, options):
    try:
        program = of_separation(size, **options)
    except UserError:
        pytest.skip("too few ranks")
    assert errors(program) == []
    rng = random.Random(size)
    for _ in range(3):
        assert not standing(unrolled(program, 4), rng)


def calls_on(program: Program, rank: int) -> list[tuple[str, int | None]]:
    """Returns the Runs of a rank but training and what only brings it data: call and mini-batch."""
    runs = [one for one in program.instructions[rank] if isinstance(one, Run)]
    return [(run.call, run.mini_batch) for run in runs if not run.call.endswith("_train")]


def test_the_parity_gate_has_the_weights_and_the_ranks_that_drew():
    """One mini-batch, last of what is drawn; where old logprobs are recomputed all rows, in that pass."""
    program = of_separation(2)
    assert calls_on(program, 1)[-1] == ("actor_infer_parity", 0)
    gate = program.workload.workflow.placed_call("actor_infer_parity")
    assert (gate.drawn, gate.outputs, gate.current) == ("logprobs", (), False)
    layouts = program.placement.layouts
    assert layouts["actor_infer_parity"] == layouts["actor_generate"]
    again = compile_program(program.workload, program.placement, program.cluster)
    assert again.fingerprint == program.fingerprint
    source = strategy_source(program.placement, program.workload, program.cluster, "A plan.")
    assert "parity" not in source and "ahead=1" in source
    recomputed = of_separation(2, old_logprobs="recompute")
    assert ("actor_infer", None) in calls_on(recomputed, 1) and "actor_infer_parity" not in recomputed.placement.layouts
    assert recomputed.workload.workflow.placed_call("actor_infer").drawn == "logprobs"
    assert "actor_infer_parity" not in of_separation(2, ahead=0).placement.layouts


def test_current_old_logprobs_belong_to_training():
    """They are inferred where the actor trains, on the batch of the step before, before the weights change."""
    program = of_separation(4, old_logprobs="current", recompute=True, offload_optimizer=True)
    assert calls_on(program, 0)[:2] == [("actor_infer", None), ("estimate_advantages", None)]
    assert not any(call == "actor_infer" for rank in (2, 3) for call, _ in calls_on(program, rank))
    runs = [one for one in program.instructions[0] if isinstance(one, Run) and one.delay]
    assert runs[0].call == "actor_infer"
    inferred = program.placement.layouts["actor_infer"]
    assert not (inferred.recompute or inferred.offload)
    weights = [transfer.reallocation.targets for transfer in program.transfers if transfer.model == "actor"]
    assert {rank for targets in weights for rank, _ in targets} <= {2, 3}  # no copy for it
    now = of_separation(4, old_logprobs="current", ahead=0)
    assert errors(now) == [] and calls_on(now, 0)[0] == ("actor_infer", None)
    assert (
        not now.placement.streams(now.workload) and of_separation(4, ahead=0).placement.streams(now.workload) is False
    )
    assert any("streaming is off, because actor_infer needs all rows" in one.message for one in check(now))


@pytest.mark.parametrize("name", ["generator", "current"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_drawing_waits_for_no_trainer_where_rows_go_by_nccl(size, name):
    """Rows for the next step move when both sides have ended: a send that waits for a trainer would stand in front of
    what a rank sends to others that draw."""
    workload = make_workload(mini_batch=8, num_mini_batches=3, epochs=2, shape=SPLIT_SHAPE, **old(name))
    workload, cluster = replace(workload, host_bytes=0), Cluster.parse(f"1x{size}", "a100-80g")
    program = compile_program(workload, load_strategy("separation").place(workload, cluster, ahead=1), cluster)
    assert errors(program) == []
    trainers = set(range(size // 2))
    for rank, some in enumerate(program.instructions):
        last = max(index for index, one in enumerate(some) if isinstance(one, Run))
        early = {one.transfer for one in some[:last] if isinstance(one, Post)}
        assert not any(trainers & set(program.transfers[number].ranks) for number in early), rank
    rng = random.Random(size)
    for _ in range(3):
        assert not standing(unrolled(program, 4), rng)


def test_lists_that_read_what_is_not_there_are_found():
    """Rows that never reach the trainers, and weights that move while calls still draw with them."""
    program = of_separation(4)
    rows = next(number for number, transfer in enumerate(program.transfers) if "values" in transfer.keys)
    without = tuple(
        tuple(one for one in some if not (isinstance(one, Post | Wait) and one.transfer == rows))
        for some in program.instructions
    )
    emptied = tuple(replace(t, messages=()) if n == rows else t for n, t in enumerate(program.transfers))
    assert any(
        "reads values" in one.message for one in errors(replace(program, transfers=emptied, instructions=without))
    )
    weights = next(n for n, transfer in enumerate(program.transfers) if transfer.model == "actor")
    early = list(program.instructions)
    moved = [one for one in early[2] if one != Post(weights)]
    early[2] = (Post(weights, delay=1), *moved)
    assert any(
        "writes into a copy of actor that iteration 1 still reads" in one.message
        for one in errors(replace(program, instructions=tuple(early)))
    )


NOTHING_CORRECTS = "that nothing corrects that the generator is an iteration older; set importance_weights or rejection"


ROLES = {"actor": Role("lm", lr=1e-6)}


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ({"old": "current"}, NOTHING_CORRECTS),
        ({"old": "current", "generator_logprobs": "mu"}, ""),
        ({"old": "current", "behaviour": "mu"}, ""),  # a correction of its own
        ({"old": "mu"}, ""),
        ({"old": "mu", "loglinear": True}, NOTHING_CORRECTS),
        ({"old": "mu", "loglinear": True, "generator_logprobs": "mu"}, ""),
        ({"old": "mu", "stop": ("kl", 0.1)}, "stops by kl, which counts that the generator is an iteration older"),
        ({"old": "mu", "stop": ("kl", 0.1), "start_logprobs": "mu"}, ""),
        ({"old": "current", "stop": ("kl", 0.1), "generator_logprobs": "mu"}, ""),
        ({"old": "current", "start_logprobs": "current", "stop": ("kl", 0.1)}, NOTHING_CORRECTS),
    ],
    ids=str,
)
def test_a_page_of_a_user_that_ignores_the_lag_is_refused(page, said):
    def workflow(model, compute, prompts):
        responses, mu = model("actor").generate(prompts)
        data = {"mu": mu}
        if "current" in page.values():
            data["current"] = model("actor").infer("logprobs", prompts, responses, output="newest", current=True)
        given = {name: data[of] if of in ("mu", "current") else of for name, of in page.items()}
        model("actor").train("mine", prompts, responses, **given)

    found = list(ahead_problems(1, trace(workflow, ROLES, {"prompts": "prompt"})))
    assert len(found) == bool(said) and all(said in one for one in found)


def test_an_early_stop_measures_from_the_start_of_training():
    """With the generator's logprobs as old ones, one more pass runs where the actor trains, on the batch that trains;
    with current or estimated ones, and without a lag, there is none."""
    config = presets.load("tiny", ["ppo.kl_early_stop=0.1"], algorithm="ppo")
    workload, cluster = options.make_workload(config), Cluster.parse("1x4")
    place = partial(load_strategy("separation").place, workload, cluster)
    program = compile_program(workload, place(ahead=1, recompute=True, offload_optimizer=True), cluster)
    assert errors(program) == [] and compile_program(workload, program.placement, cluster) == program
    again = compile_program(program.workload, program.placement, cluster)
    assert again.fingerprint == program.fingerprint
    start, train = (program.workload.workflow.placed_call(f"actor_{name}") for name in ("infer_start", "train"))
    assert start.current and dict(train.arguments)["start_logprobs"] == start.outputs[0]
    layouts = program.placement.layouts
    assert layouts[start.name] == replace(layouts[train.name], recompute=False, offload=False)
    assert (start.name, None) in calls_on(program, 0)
    assert all(one.delay for one in program.instructions[0] if isinstance(one, Run) and one.call == start.name)
    assert start.name not in compile_program(workload, place(), cluster).placement.layouts
    own = replace(program.placement, layouts={**layouts, start.name: replace(layouts[start.name], micro_batch=1)})
    assert compile_program(workload, own, cluster).placement == own  # as a plan may have it
    for word in ("current", "loglinear"):
        words = [f"ppo.old_logprobs={word}", "ppo.importance_weights=token", "ppo.kl_early_stop=0.1"]
        other = options.make_workload(presets.load("tiny", words, algorithm="ppo"))
        assert with_starts(other) is other
