"""`check` of a chain of iterations: faults in the versions of weights and between iterations, and how many of these
have to be in a row."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.chain import unrolled
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Agree, Message, Post, Program, Run, Transfer, Wait
from rlhf_spmd.plan.program.reallocate import Reallocation, Route
from rlhf_spmd.plan.proof.deadlock import enough, hangs
from tests.chains import jumbled_chain, moved, random_chain_plan, weights_of, with_weights_moved
from tests.ordered import standing
from tests.programs import (
    SHAPE,
    assert_refused,
    edited,
    errors,
    everywhere,
    make_workload,
    place_models,
    random_plan,
    random_split_plan,
    where,
    with_list,
)

TRAINER, GENERATOR = 0, 2


def chained(**options) -> Program:
    """Returns a program on four GPUs, of which the first two train actor and critic, and the others have copies."""
    workload = replace(make_workload(num_mini_batches=2, **options), host_bytes=2**40, state_sums=("kl",))
    cluster = Cluster.parse("1x4", "a100-80g")
    return compile_program(workload, load_strategy("separation").place(workload, cluster, chain=True), cluster)


def test_the_program_that_is_broken_below_is_sound():
    program = chained()
    assert program.chains and errors(program) == []
    steps = program.instructions[GENERATOR]
    critic = weights_of(program, "critic")
    scored = where(program, GENERATOR, "Run reward_infer")
    assert isinstance(steps[scored + 1], Post) and steps[scored + 2 : scored + 4] == (Post(critic), Wait(critic))
    assert [step for step in steps if isinstance(step, Post | Wait) and step.delay][-1] == Wait(critic)


PROGRAM = chained()
ACTOR, CRITIC = (weights_of(PROGRAM, model) for model in ("actor", "critic"))
LAST = "Run critic_infer epoch 0 mini-batch 1"  # that reads the copy
BEFORE = "reads the weights of iteration 0 before they came"
SENT = "trains while its weights of iteration 0 are being sent"


def at_the_reader(steps: list) -> None:
    steps.insert(where(PROGRAM, GENERATOR, "Run critic_infer"), steps.pop(steps.index(Wait(CRITIC))))


BROKEN = {  # rank, its program, what is said, and of which instruction
    "read before": (
        *(GENERATOR, moved(PROGRAM, GENERATOR, ACTOR, behind="Run actor_generate")),
        *(("Run actor_generate", BEFORE), "Run actor_generate"),
    ),
    "read before, by the critic": (
        *(GENERATOR, moved(PROGRAM, GENERATOR, CRITIC, behind="Run critic_infer")),
        *(("Run critic_infer", BEFORE), "Run critic_infer"),
    ),
    "read while they come": (
        *(GENERATOR, edited(PROGRAM, GENERATOR, at_the_reader)),
        *(("Run critic_infer", BEFORE, f"transfer {CRITIC}"), "Run critic_infer"),
    ),
    "no Post": (
        *(GENERATOR, edited(PROGRAM, GENERATOR, lambda steps: steps.remove(Post(CRITIC)))),
        *(("never posts transfer",), None),
    ),
    "no Wait": (
        *(GENERATOR, edited(PROGRAM, GENERATOR, lambda steps: steps.remove(Wait(CRITIC)))),
        *(("but never waits for it",), None),
    ),
    "into a copy that is still read": (
        *(GENERATOR, moved(PROGRAM, GENERATOR, CRITIC, before=LAST, delay=0)),
        (f"Post transfer {CRITIC} writes into a copy of critic that iteration 0 still reads", LAST),
        f"Post transfer {CRITIC}",
    ),
    "sent while the next iteration trains them": (
        *(TRAINER, moved(PROGRAM, TRAINER, ACTOR, behind="Run actor_train")),
        *((SENT,), "Run actor_train"),
    ),
    "sent before they have been trained": (
        *(TRAINER, moved(PROGRAM, TRAINER, ACTOR, behind="Run actor_train", delay=0)),
        *(("moves the weights of actor before iteration 0 has trained them",), None),
    ),
    "swapped on one rank": (  # actor and critic send in one order, and one rank waits for them in the other one
        *(GENERATOR, moved(PROGRAM, GENERATOR, CRITIC, before=f"Post transfer {ACTOR}")),
        (f"Wait transfer {CRITIC} of iteration 0 waits for ever for ranks", f"Wait transfer {ACTOR} of iteration 0"),
        f"Wait transfer {CRITIC}",
    ),
    "metrics before the iteration has ended": (
        GENERATOR,
        edited(PROGRAM, GENERATOR, lambda steps: steps.insert(0, steps.pop(steps.index(Agree("metrics"))))),
        *(("must end with its one Agree",), None),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_new_weights_that_come_or_leave_at_the_wrong_time(name):
    rank, broken, words, text = BROKEN[name]
    assert_refused(broken, rank, *words, position=text and where(broken, rank, text))


def test_only_weights_and_metrics_are_of_the_iteration_before():
    program = chained()
    rows = next(step for step in program.instructions[GENERATOR] if isinstance(step, Wait) and not step.delay)
    for step, late in ((rows, 1), (Wait(weights_of(program, "actor")), 2), (Agree("metrics"), 0)):
        at = program.instructions[GENERATOR].index(step)
        broken = edited(program, GENERATOR, lambda s, at=at, late=late: s.__setitem__(at, replace(s[at], delay=late)))
        assert_refused(broken, GENERATOR, f"{step} comes {late} iterations late", position=at)
    unchained = replace(program, placement=replace(program.placement, chain=False))
    assert_refused(unchained, TRAINER, "Agree on metrics comes 1 iterations late")


def test_the_state_is_agreed_on_once_when_all_of_it_has_been_counted():
    program = chained()
    (state,) = (step for step in program.instructions[TRAINER] if isinstance(step, Agree) and step.ranks)
    assert state.ranks == (0, 1)
    broken = edited(program, TRAINER, lambda s: s.remove(state))
    assert_refused(broken, TRAINER, "must end with its one Agree")
    assert_refused(broken, 1, "Agree on state", "waits for ever")
    early = program
    for rank in state.ranks:
        early = edited(early, rank, lambda s: s.insert(0, s.pop(s.index(state))))
    text = "Run estimate_advantages epoch 0 mini-batch 1 for actor_train, that counts for it"
    assert_refused(early, 1, "Agree on state", text, position=0)
    assert errors(everywhere(program, lambda s: s.insert(0, state)))


def test_a_run_does_not_meet_one_of_the_next_iteration():
    """One rank has the Runs of two iterations in the other order; without numbers of iterations they would meet."""
    program = unrolled(chained(), 3)
    steps = list(program.instructions[TRAINER])
    first = "Run actor_train epoch 0 mini-batch 0"
    one, other, _ = (at for at, step in enumerate(steps) if str(step).startswith(first))
    steps[one], steps[other] = steps[other], steps[one]
    broken = with_list(program, TRAINER, steps)
    assert hangs(program) == [] != hangs(broken)
    forgotten = [[replace(s, iteration=0) if isinstance(s, Run) else s for s in some] for some in broken.instructions]
    assert hangs(replace(broken, instructions=tuple(map(tuple, forgotten)))) == []


# ---- how many iterations are enough --------------------------------------------------------------------------------


def test_two_iterations_are_not_enough_for_two_models():
    """Rank 0 sends weights to 1, rank 2 to 3. Rank 1 first needs rows that rank 4 sends when it has got those of the
    iteration before from rank 2; rank 3 first needs rows that rank 0 sends behind its weights."""
    rows = [(0, 3), (2, 4), (4, 1)]
    transfers = [Transfer("rows", (Message(*pair, ("responses",), range(1), 4, through_host=True),)) for pair in rows]
    for pair in ((0, 1), (2, 3)):
        plan = Reallocation(SHAPE, (), (), 2, (), (Route(pair, (), 1),))
        transfers.append(Transfer("weights", (Message(*pair, (), range(0), 1),), str(pair), reallocation=plan))
    behind, late, early, actor, critic = ((Post(number), Wait(number)) for number in range(5))
    actor_late, critic_late = ((Post(number, delay=1), Wait(number, delay=1)) for number in (3, 4))
    lists = (actor + behind, early + actor_late, late + critic, behind + critic_late, early + late)
    program = replace(place_models(make_workload(), 5), transfers=tuple(transfers), instructions=lists)
    assert [bool(hangs(program, num)) for num in (1, 2, 3, 4, 5)] == [False, False, True, True, True]
    assert enough(program) == 3
    assert {text.partition(" waits")[0] for _, _, text in hangs(program, 3)} >= {"Wait transfer 2 of iteration 2"}


def test_more_iterations_hang_only_if_enough_do():
    """Lists without a plan, of up to four models."""
    rng, first = random.Random(1), Counter()
    for _ in range(300):
        program = jumbled_chain(rng)
        verdicts = [bool(hangs(program, num)) for num in range(1, enough(program) + 3)]
        assert verdicts == sorted(verdicts)
        assert verdicts[-1] == verdicts[enough(program) - 1], program.instructions
        first[verdicts.index(True) + 1 if any(verdicts) else 0] += 1
    assert min(first[num] for num in (0, 1, 2)) > 12, first


def test_compiled_chains_end_and_damaged_ones_are_refused_by_enough_iterations():
    """Random workflows and placements, on CPUs and GPUs: what is sound without a chain is so with one."""
    rng, counts = random.Random(2), Counter()
    while counts["sound"] < 45:
        plan = rng.choice([random_chain_plan, random_chain_plan, random_plan, random_split_plan])
        workload, placement, cluster = plan(rng.choice)
        placement = replace(placement, chain=True)
        if (limit := rng.choice([None, 2**40, 0, 50])) is not None:
            cluster = Cluster.parse(str(cluster), "a100-80g")
            workload = replace(workload, host_bytes=limit)
        try:
            program = compile_program(workload, placement, cluster)
        except UserError:
            continue
        if found := errors(program):
            assert errors(compile_program(workload, replace(placement, chain=False), cluster)), (placement, found)
            continue
        counts["sound"] += 1
        counts["delayed"] += any(isinstance(s, Post) and s.delay for steps in program.instructions for s in steps)
        if counts["sound"] % 3 == 0:
            assert not standing(unrolled(program, 3), rng)
        damaged = with_weights_moved(program, rng)
        refused = errors(damaged)
        counts["refused"] += bool(refused)
        for num in () if refused else (1, 3, 5):
            assert not hangs(damaged, num)
            assert not standing(unrolled(damaged, num), rng)
    assert counts["delayed"] > 18 and counts["refused"] > 9, counts
