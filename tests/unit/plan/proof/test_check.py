"""`check` refuses broken programs and names the rank and the instruction."""

from dataclasses import replace

import pytest

from rlhf_spmd.plan.program.instructions import Agree, Message, Post, Program, Run, Transfer, Wait
from rlhf_spmd.plan.proof.check import check
from tests.programs import (
    assert_refused,
    edited,
    errors,
    everywhere,
    halves,
    make_workload,
    place_models,
    separation,
    warnings,
    where,
    with_list,
)


def number_of(program: Program, what: str) -> int:
    return next(number for number, transfer in enumerate(program.transfers) if transfer.what.startswith(what))


@pytest.mark.parametrize("program", [halves(), separation()], ids=["halves", "separation"])
def test_the_programs_that_are_broken_below_are_sound(program):
    assert check(program) == []


def swap(steps: list, at: int) -> None:
    steps[at], steps[at + 1] = steps[at + 1], steps[at]


def drop(steps: list, at: int) -> None:
    del steps[at]


def double(steps: list, at: int) -> None:
    steps.insert(at, steps[at])


def to(text: str):
    """Returns a change that moves an instruction in front of the first with this text."""

    def move(steps: list, at: int) -> None:
        step = steps.pop(at)
        steps.insert(next(place for place, other in enumerate(steps) if str(other).startswith(text)), step)

    return move


WEIGHTS = number_of(separation(), "weights of actor")
SCORES = number_of(halves(), "scores")
EPOCH = "Run actor_train epoch 0 mini-batch"
BROKEN = [  # program, rank, an instruction, what happens to it; what is said, and of which instruction then
    (halves, 2, f"{EPOCH} 1", swap, ("Run critic_train epoch 0 mini-batch 0", "waits for ever", "0-1,3"), 0),
    (halves, 1, f"{EPOCH} 1", drop, ("never executes", f"{EPOCH} 1"), None),
    (halves, 1, "Run reference_infer", drop, ("never executes", "Run reference_infer"), None),
    (halves, 1, "Run estimate_advantages", drop, ("never executes", "Run estimate_advantages"), None),
    (halves, 3, "Run actor_train", double, ("Run actor_train", "second time"), 1),
    (halves, 3, "Run critic_infer", double, ("Run critic_infer", "second time"), 1),
    (halves, 3, "Run estimate_advantages", double, ("Run estimate_advantages", "second time"), 1),
    (halves, 2, "Post transfer 1", drop, ("never posts transfer 1", "responses to ranks 2-3", "would wait"), None),
    (halves, 2, "Post transfer 1", drop, ("Wait transfer 1 comes before its Post",), None),
    (halves, 3, "Wait transfer 1", drop, ("posts transfer 1 but never waits for it",), None),
    (halves, 2, "Post transfer 1", double, ("Post transfer 1 appears twice",), 1),
    (halves, 2, "Wait transfer 1", double, ("Wait transfer 1 appears twice",), 1),
    (halves, 3, "Wait transfer 1", swap, ("Run reward_infer reads responses of columns 2", "not here"), 0),
    (
        *(halves, 2, f"Post transfer {SCORES}", to("Run reward_infer")),
        *((f"Post transfer {SCORES} sends scores to rank 0 before it is here",), "Post"),
    ),
    (
        *(separation, 2, f"Post transfer {WEIGHTS}", to(f"{EPOCH} 1")),
        *((f"Post transfer {WEIGHTS} moves the weights of actor before", "Run actor_train"), "Post"),
    ),
    (
        *(separation, 0, f"Post transfer {WEIGHTS}", lambda steps, at: steps.insert(0, steps.pop(at))),
        *((f"Post transfer {WEIGHTS} writes into a copy of actor", "Run actor_generate"), "Post"),
    ),
]


@pytest.mark.parametrize(("make", "rank", "text", "change", "words", "then"), BROKEN)
def test_an_instruction_that_is_elsewhere_twice_or_not_there(make, rank, text, change, words, then):
    """then: how far behind the old place the error is; Post: where the instruction is now."""
    program = make()
    at = where(program, rank, text)
    broken = edited(program, rank, lambda steps: change(steps, at))
    at = where(broken, rank, text) if then == "Post" else None if then is None else at + then
    assert_refused(broken, rank, *words, position=at)
    if change in (swap, drop) and text.startswith(EPOCH):  # and the others wait for it
        assert_refused(broken, 0, f"{EPOCH} 1", "rank 2 stands at" if change is swap else "waits for ever for ranks 1")


def test_training_out_of_order():
    """Alike on both ranks, so that nothing hangs: but the epochs are not what the algorithm says."""
    program = place_models(make_workload(num_mini_batches=2), 2)
    broken = everywhere(program, lambda steps: swap(steps, where(program, 0, "Run actor_train")))
    assert_refused(broken, 1, "Run actor_train epoch 0 mini-batch 0", "comes after epoch 0 mini-batch 1")


def test_a_run_in_a_group_that_the_rank_is_not_in():
    program = replace(halves(), groups={"ranks 0-3": (0, 1, 2, 3), "ranks 0-1": (0, 1)})
    at = where(program, 2, "Run actor_train")
    broken = edited(program, 2, lambda s: s.__setitem__(at, replace(s[at], group="ranks 0-1")))
    assert_refused(broken, 2, "Run actor_train", "group that this rank is not in", position=at)


def test_runs_without_their_groups():
    """Alike on both ranks: nothing hangs, but each rank would train on its own gradients."""
    program = place_models(make_workload(), 2)
    for rank in (0, 1):
        alone = [replace(step, group=None) if isinstance(step, Run) else step for step in program.instructions[rank]]
        program = with_list(program, rank, alone)
    at = where(program, 1, "Run critic_train epoch 0 mini-batch 1")
    words = ("Run critic_train epoch 0 mini-batch 1 enters no group", "its collectives need all of ranks 0-1")
    assert_refused(program, 1, *words, position=at)


def test_a_group_of_another_name_or_of_other_ranks_than_its_layout():
    program = halves()
    others = {"ranks 0-3": (0, 1, 2), "some": (0, 1, 2, 3)}
    at = where(program, 1, "Run actor_train")
    broken = replace(program, groups=others)
    assert_refused(broken, 1, "Run actor_train", "a group of ranks 0-2", "all of ranks 0-3", position=at)
    at = where(program, 3, "Run actor_train")
    broken = edited(broken, 3, lambda s: s.__setitem__(at, replace(s[at], group="some")))
    assert_refused(broken, 3, "Run actor_train", "enters some", "all of ranks 0-3", position=at)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Run("actor_guess"), ["no call actor_guess"]),
        (Run("critic_infer", consumer="critic_train"), ["has no ranks"]),
        (Run("estimate_advantages"), ["has no ranks"]),
        (Run("estimate_advantages", consumer="nobody"), ["has no ranks"]),
        (Run("reward_infer"), ["its ranks are 2-3"]),
        (Wait(9), ["Wait transfer 9", "does not exist"]),
        (Post(-1), ["Post transfer -1", "does not exist"]),
        ("Run", ["not an instruction"]),
    ],
)
def test_an_instruction_that_makes_no_sense_on_the_rank(step, words):
    broken = edited(halves(), 1, lambda s: s.insert(3, step))
    assert_refused(broken, 1, *words, position=3)


@pytest.mark.parametrize("twice", [False, True])
def test_agreement_that_does_not_come_once_and_last(twice):
    program = halves()
    broken = everywhere(program, lambda s: s.insert(0, s[-1] if twice else s.pop()))
    assert_refused(broken, 3, "must end with its one Agree")
    assert errors(everywhere(program, lambda s: s.append(Agree("metrics")))) != []


# ---- weights ----


@pytest.mark.parametrize("copies", [0, 2])
def test_a_shadow_gets_its_weights_exactly_once(copies):
    program = separation()
    weights = number_of(program, "weights of actor")
    plan = program.transfers[weights].reallocation
    targets = [target for target in plan.targets for _ in range(copies if target[0] == 1 else 1)]
    plan = replace(plan, targets=tuple(targets), routes=plan.routes if copies else ())
    messages = program.transfers[weights].messages if copies else ()
    move = replace(program.transfers[weights], reallocation=plan, messages=messages)
    broken = replace(program, transfers=(*program.transfers[:weights], move))
    if not copies:  # nobody sends anything
        for rank in program.transfers[weights].ranks:
            broken = edited(broken, rank, lambda s: [s.remove(Post(weights)), s.remove(Wait(weights))])
    assert_refused(broken, 1, f"new weights of actor (the whole model) {copies} times")


def test_weights_from_a_rank_that_does_not_train_them():
    program = separation()
    weights = number_of(program, "weights of actor")
    plan = program.transfers[weights].reallocation
    routes = [replace(route, ranks=(0, *route.ranks[1:])) for route in plan.routes[:1]]
    plan = replace(plan, routes=(*routes, *plan.routes[1:]))
    broken = replace(
        program, transfers=(*program.transfers[:weights], replace(program.transfers[weights], reallocation=plan))
    )
    assert_refused(broken, 0, f"Post transfer {weights} sends the weights of actor, which trains on ranks 2-3")


# ---- what is declared ----------------------------------------------------------------------------------------------

RESPONSES = ("responses",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"instructions": ()}, ["0 instruction lists for 4 ranks"]),
        ({"instructions": halves().instructions[:3]}, ["3 instruction lists for 4 ranks"]),
        ({"groups": {"g": (0, 9)}}, ["group 'g'", "[0, 9]", "(0-3)"]),
        ({"groups": {"g": ()}}, ["group 'g'", "[]"]),
        ({"groups": {"g": (1, 1)}}, ["group 'g'", "[1, 1]"]),
        ({"groups": {"g": (1, 0)}}, ["group 'g'", "ascending", "[1, 0]"]),
        (
            {"transfers": (Transfer("x", (Message(0, 1, ("guesses",), range(1), 4),)),)},
            ["transfer 0", "guesses", "no call makes"],
        ),
        ({"transfers": (Transfer("x", (Message(0, 1, (), range(1), 4),)),)}, ["transfer 0", "no keys"]),
        ({"transfers": (Transfer("x", (), model="reward"),)}, ["weights of reward", "no call trains"]),
        ({"transfers": (Transfer("x", (), model="nobody"),)}, ["weights of nobody", "no call trains"]),
        ({"transfers": (Transfer("x", (Message(0, 9, RESPONSES, range(1), 4),)),)}, ["rank 0 to rank 9"]),
        ({"transfers": (Transfer("x", (Message(1, 1, RESPONSES, range(1), 4),)),)}, ["rank 1 to rank 1"]),
        ({"transfers": (Transfer("x", (), mini_batch=2),)}, ["transfer 0 moves mini-batch 2, which does not exist"]),
    ],
)
def test_declarations_that_leave_the_world_or_the_workflow(change, words):
    found = errors(replace(halves(), **change))
    assert any(all(word in str(finding) for word in words) for finding in found), [str(f) for f in found]


# ---- waste ----------------------------------------------------------------------------------------------------------


def test_more_ranks_than_columns_is_a_warning():
    program = place_models(make_workload(mini_batch=3), 4)
    assert errors(program) == []
    texts = warnings(program)
    assert len(texts) == 6 and "actor_generate: rank 0 gets no sequence" in texts[0]
    assert "mini_batch 3 is smaller than dp 4; raise mini_batch" in texts[0]
