"""The strategies that overlap transfers with work: where models are, what moves when, and what they refuse."""

from collections import Counter

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Post, Program, Run, Wait
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.deadlock import hangs
from rlhf_spmd.plan.workload import Workload
from tests.programs import make_workload, where, with_list

LAYOUTS = ["1x2", "1x4", "1x5", "1x8", "2x8"]
NUM = 5  # mini-batches


def program_of(name: str, layout: str, *, workload: Workload | None = None, **options) -> Program:
    cluster = Cluster.parse(layout)
    if workload is None:
        workload = make_workload(mini_batch=2 * cluster.num_devices, num_mini_batches=NUM, epochs=2)
    return load_strategy(name).compile(workload, cluster, options)


def ranks_of(program: Program, call: str) -> tuple[int, ...]:
    return program.placement.layouts[call].ranks


def first_wait(program: Program, rank: int) -> int:
    return next(index for index, step in enumerate(program.instructions[rank]) if isinstance(step, Wait))


def refused(make, *arguments, **options) -> str:
    with pytest.raises(UserError) as error:
        make(*arguments, **options)
    return str(error.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["interleaving1", "interleaving2", "separation"])
@pytest.mark.parametrize("options", [{}, {"epochs": 1}, {"old_logprobs": "recompute", "replay": True}], ids=str)
def test_nothing_to_find(name, layout, options):
    size = Cluster.parse(layout).num_devices
    workload = make_workload(mini_batch=2 * size, num_mini_batches=NUM, **{"epochs": 2, **options})
    assert check(program_of(name, layout, workload=workload)) == []


@pytest.mark.parametrize("name", ["flattening", "interleaving1", "interleaving2", "separation", "reallocation"])
def test_a_budget_of_tokens_is_that_of_every_pass(name):
    program = program_of(name, "1x4", tokens=40)
    calls = [call for call in program.workload.workflow.placed_calls if call.kind != "generate"]
    assert {program.placement.layouts[call.name].tokens for call in calls} == {40} and check(program) == []
    assert "give one of them" in refused(program_of, name, "1x4", tokens=40, micro_batch=2)


# ---- interleaving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["interleaving1", "interleaving2"])
def test_reference_and_reward_share_out_all_ranks(name, layout):
    program = program_of(name, layout)
    reference, reward = ranks_of(program, "reference_infer"), ranks_of(program, "reward_infer")
    assert reference + reward == program.cluster.ranks and 0 <= len(reference) - len(reward) <= 1
    for call in ("actor_generate", "critic_infer", "actor_train", "critic_train"):
        assert sorted(ranks_of(program, call)) == list(program.cluster.ranks)
    assert len({ranks_of(program, call) for call in ("actor_generate", "critic_infer", "actor_train")}) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_owner_begins_with_its_own_columns(layout):
    """Also with 5 = 3 + 2 ranks: what a rank has generated lies within what it has to infer."""
    program = program_of("interleaving1", layout)
    mini_batch, layouts = program.workload.mini_batch, program.placement.layouts
    for rank, steps in enumerate(program.instructions):
        call = "reference_infer" if rank in ranks_of(program, "reference_infer") else "reward_infer"
        own = layouts["actor_generate"].columns(rank, mini_batch)
        assert len(own) > 0 and set(own) < set(layouts[call].columns(rank, mini_batch))
        runs = [index for index, step in enumerate(steps) if isinstance(step, Run) and step.call == call]
        assert steps[runs[0]].columns == own and runs[0] < first_wait(program, rank) < runs[1]
        rest = [column for index in runs[1:] for column in steps[index].columns]
        assert sorted([*own, *rest]) == list(layouts[call].columns(rank, mini_batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_waited_for_only_where_training_needs_them(layout):
    """The critic's values are computed while scores and logprobs travel."""
    program = program_of("interleaving1", layout)
    results = [n for n, t in enumerate(program.transfers) if set(t.keys) & {"ref_logprobs", "scores"}]
    assert results
    for rank, steps in enumerate(program.instructions):
        gets = [n for n in results if any(m.destination == rank for m in program.transfers[n].messages)]
        needed = where(program, rank, "Run estimate_advantages")
        assert gets
        for number in gets:
            assert steps.index(Post(number)) < where(program, rank, "Run critic_infer") < steps.index(Wait(number))
            assert steps.index(Wait(number)) < needed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("replay", [False, True])
def test_the_concurrent_mode_exchanges_once_before_and_once_after(layout, replay):
    size = Cluster.parse(layout).num_devices
    workload = make_workload(mini_batch=2 * size, num_mini_batches=2, replay=replay)
    one, two = (program_of(f"interleaving{number}", layout, workload=workload) for number in (1, 2))
    before, after = two.transfers
    assert before.keys == ("responses", "kept_tokens")[: 1 + replay] and set(after.keys) == {"ref_logprobs", "scores"}
    assert len(one.transfers) == 4
    assert sum(t.num_bytes for t in two.transfers) == sum(t.num_bytes for t in one.transfers) > 0
    for rank, steps in enumerate(two.instructions):
        infers = [
            i for i, s in enumerate(steps) if isinstance(s, Run) and s.call in ("reference_infer", "reward_infer")
        ]
        assert len(infers) == 1 and steps[infers[0]].columns is None  # all rows in one batch
        order = [steps.index(step) for step in (Post(0), Wait(0), Post(1), Wait(1))]
        assert order == sorted(order) and order[1] < infers[0] < order[2]
        assert order[3] < where(two, rank, "Run estimate_advantages")


# ---- separation ----------------------------------------------------------------------------------------------------

SEPARATIONS = [(layout, in_flight) for layout in LAYOUTS for in_flight in (1, 2, 3)]
separations = pytest.mark.parametrize(("layout", "in_flight"), SEPARATIONS)


@separations
def test_training_goes_on_while_the_last_mini_batch_is_generated(layout, in_flight):
    """Where every generator stops before mini-batch k, the trainers still get through epoch 0 of all before it, even if
    each Wait blocks until its peers have posted."""
    program = program_of("separation", layout, in_flight=in_flight, chain=False)
    for stop in range(1, NUM):
        halted = program
        for rank in ranks_of(program, "actor_generate"):
            at = where(program, rank, f"Run actor_generate epoch 0 mini-batch {stop}")
            halted = with_list(halted, rank, program.instructions[rank][:at])
        standing = {rank: position for rank, position, _ in hangs(halted)}
        for rank in ranks_of(program, "actor_train"):
            done = where(program, rank, f"Run critic_train epoch 0 mini-batch {stop - 1}")
            assert done < standing[rank] < where(program, rank, f"Run actor_train epoch 0 mini-batch {stop}")


@separations
def test_no_more_than_in_flight_mini_batches_are_under_way(layout, in_flight):
    """Senders wait for the one that lies in_flight back before they post the next, and trainers open as many ahead."""
    program = program_of("separation", layout, in_flight=in_flight)
    names = [transfer.what for transfer in program.transfers if transfer.mini_batch == 0]
    assert len(set(names)) == len(names)  # the name tells a move
    most: dict[str, int] = {"out": 0, "in": 0}
    for rank, steps in enumerate(program.instructions):
        under_way: Counter = Counter()
        for step in steps:
            if not isinstance(step, Post | Wait) or program.transfers[step.transfer].model is not None:
                continue
            transfer = program.transfers[step.transfer]
            ends = {"out" for message in transfer.messages if message.source == rank}
            ends |= {"in" for message in transfer.messages if message.destination == rank}
            for end in ends:
                under_way[end, transfer.what] += 1 if isinstance(step, Post) else -1
                most[end] = max(most[end], under_way[end, transfer.what])
        if rank in ranks_of(program, "actor_train"):
            for mini_batch in range(NUM):  # when it begins to wait for one
                waits = (i for i, s in enumerate(steps) if isinstance(s, Wait))
                at = next(i for i in waits if program.transfers[steps[i].transfer].mini_batch == mini_batch)
                opened = {program.transfers[s.transfer].mini_batch for s in steps[:at] if isinstance(s, Post)}
                assert opened == set(range(min(NUM, mini_batch + in_flight)))
    assert most == {"out": in_flight, "in": in_flight}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_actor_s_weights_leave_while_the_critic_still_trains(layout, epochs):
    workload = make_workload(mini_batch=32, num_mini_batches=3, epochs=epochs)
    program = program_of("separation", layout, workload=workload)
    number = {t.model: n for n, t in enumerate(program.transfers) if t.model}
    assert set(number) == {"actor", "critic"}
    senders = {message.source for message in program.transfers[number["actor"]].messages}
    assert senders <= set(ranks_of(program, "actor_train"))
    for rank in senders:
        post = program.instructions[rank].index(Post(number["actor"]))
        last = where(program, rank, f"Run actor_train epoch {epochs - 1} mini-batch 2")
        assert post == last + 1
        first = 2 if epochs == 1 else 0  # streamed mini-batches are trained on by both models in turn
        assert post < where(program, rank, f"Run critic_train epoch {epochs - 1} mini-batch {first}")
        assert post < program.instructions[rank].index(Wait(number["actor"]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whitening_over_the_batch_turns_streaming_off_and_says_so(layout):
    workload = make_workload(mini_batch=32, num_mini_batches=3, whiten="batch")
    program = program_of("separation", layout, workload=workload)
    (finding,) = check(program)
    assert finding.severity == "warning"
    assert "streaming is off, because estimate_advantages needs all rows of the iteration" in finding.message
    assert all(transfer.mini_batch is None for transfer in program.transfers)
    runs = [step for steps in program.instructions for step in steps if isinstance(step, Run)]
    assert all(run.mini_batch is None for run in runs if not run.call.endswith("_train"))


# ---- what is refused -----------------------------------------------------------------------------------------------


def placed(workload: Workload, how: dict, **ranks) -> Program:
    """Returns training on ranks 0 and 1, everything else on ranks 2 and 3, but for `ranks`."""
    home = dict.fromkeys(("actor_train", "critic_train"), (0, 1))
    layouts = {c.name: Layout.data_parallel((home | ranks).get(c.name, (2, 3))) for c in workload.workflow.placed_calls}
    return compile_program(workload, Placement(layouts, **how), Cluster.parse("1x4"))


@pytest.mark.parametrize("call", ["actor_generate", "actor_infer", "critic_infer"])
def test_streaming_where_training_changes_the_weights_meanwhile(call):
    workload = make_workload(old_logprobs="recompute")
    text = refused(placed, workload, {"stream": True}, **{call: (1, 2)})
    assert f"stream: {call} is on ranks 1" in text and f"where {call.split('_')[0]}_train runs meanwhile" in text
    assert "or drop stream" in text
    assert check(placed(workload, {}, **{call: (1, 2)})) == []
    assert check(placed(workload, {"stream": True}, reference_infer=(0, 1), reward_infer=(0, 1))) == []
    whole = make_workload(old_logprobs="recompute", whiten="batch")
    placed(whole, {"stream": True}, **{call: (1, 2)})  # nothing streams, nothing changes


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"joint": (("actor_generate", "reward_infer"),)},
            ["actor_generate and reward_infer exchange together", "none reads another one"],
        ),
        (
            {"joint": (("reward_infer", "actor_train"),)},
            ["joint names reward_infer, actor_train; name calls before training"],
        ),
        (
            {"joint": (("reward_infer", "critic_infer"), ("critic_infer", "reference_infer"))},
            ["joint names reward_infer, critic_infer, critic_infer", "each once"],
        ),
        ({"own_first": ("critic_train",)}, ["own_first names critic_train; name calls before training"]),
        ({"in_flight": 0}, ["in_flight 0 is less than 1", "raise it"]),
    ],
)
def test_overlaps_that_cannot_be(how, words):
    text = refused(placed, make_workload(), how)
    assert all(word in text for word in words), text
