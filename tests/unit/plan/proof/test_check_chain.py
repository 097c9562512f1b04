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


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_a_copy_is_read_before_its_new_weights_came(model):
    program = chained()
    first = "Run actor_generate" if model == "actor" else "Run critic_infer"
    broken = moved(program, GENERATOR, weights_of(program, model), behind=first)
    at = where(broken, GENERATOR, first)
    assert_refused(broken, GENERATOR, first, "reads the weights of iteration 0 before they came", position=at)


def test_a_copy_is_read_while_its_new_weights_come():
    program = chained()
    number, at = weights_of(program, "critic"), where(program, GENERATOR, "Run critic_infer")
    broken = edited(program, GENERATOR, lambda s: s.insert(at, s.pop(s.index(Wait(number)))))
    text = "reads the weights of iteration 0 before they came"
    assert_refused(broken, GENERATOR, "Run critic_infer", text, f"transfer {number}", position=at - 1)


@pytest.mark.parametrize(("kind", "words"), [(Post, "never posts transfer"), (Wait, "but never waits for it")])
def test_a_post_or_wait_of_new_weights_dropped(kind, words):
    program = chained()
    number = weights_of(program, "critic")
    assert_refused(edited(program, GENERATOR, lambda s: s.remove(kind(number))), GENERATOR, words)


def test_new_weights_in_a_copy_that_is_still_read():
    """Of the same iteration, before its last Run that reads the copy."""
    program = chained()
    number = weights_of(program, "critic")
    last = "Run critic_infer epoch 0 mini-batch 1"
    broken = moved(program, GENERATOR, number, before=last, delay=0)
    text = f"Post transfer {number} writes into a copy of critic that iteration 0 still reads"
    assert_refused(broken, GENERATOR, text, last, position=where(broken, GENERATOR, f"Post transfer {number}"))


def test_weights_are_sent_while_the_next_iteration_trains_them():
    program = chained()
    broken = moved(program, TRAINER, weights_of(program, "actor"), behind="Run actor_train")
    at = where(broken, TRAINER, "Run actor_train")
    assert_refused(broken, TRAINER, "trains while its weights of iteration 0 are being sent", position=at)


def test_weights_are_sent_before_they_have_been_trained():
    program = chained()
    broken = moved(program, TRAINER, weights_of(program, "actor"), behind="Run actor_train", delay=0)
    assert_refused(broken, TRAINER, "moves the weights of actor before iteration 0 has trained them")


def test_two_weights_swapped_on_one_rank():
    """Actor and critic send in one order, and one rank waits for them in the other one."""
    program = chained()
    actor, critic = (weights_of(program, model) for model in ("actor", "critic"))
    broken = moved(program, GENERATOR, critic, before=f"Post transfer {actor}")
    at = where(broken, GENERATOR, f"Wait transfer {critic}")
    words = (f"Wait transfer {critic} of iteration 0 waits for ever for ranks", f"Wait transfer {actor} of iteration 0")
    assert_refused(broken, GENERATOR, *words, position=at)


def test_only_weights_and_metrics_are_of_the_iteration_before():
    program = chained()
    rows = next(step for step in program.instructions[GENERATOR] if isinstance(step, Wait) and not step.delay)
    for step, late in ((rows, 1), (Wait(weights_of(program, "actor")), 2), (Agree("metrics"), 0)):
        at = program.instructions[GENERATOR].index(step)
        broken = edited(program, GENERATOR, lambda s, at=at, late=late: s.__setitem__(at, replace(s[at], delay=late)))
        assert_refused(broken, GENERATOR, f"{step} comes {late} iterations late", position=at)
    unchained = replace(program, placement=replace(program.placement, chain=False))
    assert_refused(unchained, TRAINER, "Agree on metrics comes 1 iterations late")


def test_metrics_are_told_before_the_iteration_has_ended():
    broken = edited(chained(), GENERATOR, lambda s: s.insert(0, s.pop(s.index(Agree("metrics")))))
    assert_refused(broken, GENERATOR, "must end with its one Agree")


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
