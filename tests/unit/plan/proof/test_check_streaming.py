"""`check` refuses broken programs that stream or compute in parts, and names the rank and the instruction."""

from dataclasses import replace

import pytest

from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.instructions import Agree, Post, Program, Run
from rlhf_spmd.plan.proof.check import check
from tests.programs import assert_refused, edited, errors, make_workload, place_models, where, with_list

TRAINER, GENERATOR = 0, 1


def streaming(**options) -> Program:
    """Returns a program in which rank 0 trains, rank 1 does the rest, and three mini-batches stream."""
    workload = make_workload(num_mini_batches=3, epochs=2)
    return load_strategy("separation").compile(workload, Cluster.parse("1x2"), {"chain": False} | options)


def interleaving() -> Program:
    return load_strategy("interleaving1").compile(make_workload(mini_batch=8), Cluster.parse("1x4"), {})


def transfer_of(program: Program, key: str, mini_batch: int) -> int:
    numbered = enumerate(program.transfers)
    return next(number for number, t in numbered if key in t.keys and t.mini_batch == mini_batch)


def test_the_programs_that_are_broken_below_are_sound():
    assert check(streaming()) == check(streaming(in_flight=1)) == check(interleaving()) == []


# ---- senders and trainers ------------------------------------------------------------------------------------------


def test_the_right_key_of_the_wrong_mini_batch_is_not_enough():
    """Both mini-batches of the scores exist, but the one that is sent is a transfer too early."""
    program = streaming()
    first, second = (transfer_of(program, "scores", mini_batch) for mini_batch in (0, 1))
    swap = {first: second, second: first}

    def exchange(steps):
        steps[:] = [
            replace(s, transfer=swap.get(s.transfer, s.transfer)) if hasattr(s, "transfer") else s for s in steps
        ]

    broken = edited(edited(program, GENERATOR, exchange), TRAINER, exchange)
    at = program.instructions[GENERATOR].index(Post(first))
    assert_refused(broken, GENERATOR, f"Post transfer {second} sends scores to rank 0 before", position=at)
    at = where(program, TRAINER, "Run estimate_advantages epoch 0 mini-batch 0")
    assert_refused(broken, TRAINER, "reads scores of columns 0-3", position=at)


# ---- parts ---------------------------------------------------------------------------------------------------------


def test_a_run_with_columns_left_out():
    program = streaming()
    at = where(program, GENERATOR, "Run actor_generate epoch 0 mini-batch 1")
    number = transfer_of(program, "responses", 1)
    for columns, missing in ((range(3), "3"), (range(1, 4), "0"), (range(1, 3), "0,3")):
        broken = edited(program, GENERATOR, lambda s, c=columns: s.__setitem__(at, replace(s[at], columns=c)))
        assert_refused(broken, GENERATOR, "never executes Run actor_generate")
        reader = where(program, GENERATOR, "Run reference_infer epoch 0 mini-batch 1")
        text = f"reads responses of columns {missing}, which are not here"
        assert_refused(broken, GENERATOR, text, position=reader)
        post = program.instructions[GENERATOR].index(Post(number))
        assert_refused(broken, GENERATOR, f"Post transfer {number} sends responses", position=post)


def test_parts_that_overlap():
    program = interleaving()
    at = where(program, 0, "Run reference_infer columns")
    broken = edited(program, 0, lambda steps: steps.insert(at + 1, steps[at]))
    assert_refused(broken, 0, f"{program.instructions[0][at]} is there a second time", position=at + 1)
    own = program.instructions[0][at].columns
    wider = edited(program, 0, lambda steps: steps.__setitem__(at, replace(steps[at], columns=range(own.stop + 1))))
    assert_refused(wider, 0, "Run reference_infer", "second time")


@pytest.mark.parametrize(
    "step",
    [
        Run("critic_infer", columns=range(0)),
        Run("critic_infer", columns=range(99, 101)),
        Run("critic_infer", mini_batch=7),
        Run("critic_train", mini_batch=0, columns=range(1)),
    ],
    ids=str,
)
def test_parts_that_belong_to_no_iteration(step):
    program = place_models(make_workload(), 1)
    at = where(program, 0, "Run critic_infer") + 1
    broken = edited(program, 0, lambda steps: steps.insert(at, step))
    assert_refused(broken, 0, "belongs to no iteration of this workload", position=at)


# ---- weights that change meanwhile -----------------------------------------------------------------------------------


def by_hand(*order: tuple[int, bool]) -> Program:
    """Returns one rank that does all; each pair names a mini-batch to prepare (False) or to train on (True)."""
    program = place_models(make_workload(num_mini_batches=2), 1)
    steps: list = []
    for mini_batch, trains in order:
        for step in dict.fromkeys(replace(s, mini_batch=None) for s in program.instructions[0] if isinstance(s, Run)):
            if step.call.endswith("_train") == trains:
                steps.append(replace(step, mini_batch=mini_batch))
    return with_list(program, 0, [*steps, Agree("metrics")])


@pytest.mark.parametrize("call", ["actor_generate", "critic_infer"])
def test_a_model_that_is_used_where_it_began_to_train(call):
    assert errors(by_hand((0, False), (1, False), (0, True), (1, True))) == []
    broken = by_hand((0, False), (0, True), (1, False), (1, True))
    at = where(broken, 0, f"Run {call} epoch 0 mini-batch 1")
    words = (f"Run {call} epoch 0 mini-batch 1", f"comes after {call.split('_')[0]} began to train here", "old ones")
    assert_refused(broken, 0, *words, position=at)
    assert len(errors(broken)) == 2  # the reference and the reward model do not change
