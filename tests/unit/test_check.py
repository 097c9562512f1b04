"""`check` refuses broken programs, names the rank and the instruction, and its proof agrees with brute force."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlhf_spmd.config import load
from rlhf_spmd.config import make_workload as workload_of
from rlhf_spmd.plan.blocking import deadlocks
from rlhf_spmd.plan.check import Finding, check
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.compile import compile_program
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program import Agree, Instruction, Message, Post, Program, Run, Transfer, Wait
from tests.programs import make_workload, place_calls, place_models, random_program


def errors(program: Program) -> list[Finding]:
    return [finding for finding in check(program) if finding.severity == "error"]


def warnings(program: Program) -> list[str]:
    return [finding.message for finding in check(program) if finding.severity == "warning"]


def with_list(program: Program, rank: int, steps: list[Instruction]) -> Program:
    lists = list(program.instructions)
    lists[rank] = tuple(steps)
    return replace(program, instructions=tuple(lists))


def edited(program: Program, rank: int, edit: Callable[[list[Instruction]], object]) -> Program:
    """The program after `edit` has changed the list of one rank in place."""
    steps = list(program.instructions[rank])
    edit(steps)
    return with_list(program, rank, steps)


def halves() -> Program:
    """Actor and critic on four ranks, reference on the first two, reward on the others: groups and transfers."""
    return place_models(make_workload(), 4, reference=(0, 1), reward=(2, 3))


def separation() -> Program:
    """Generation on two ranks, the rest on two others: data go there, the actor's weights come back."""
    inference = ("reference_infer", "reward_infer", "critic_infer", "actor_train", "critic_train")
    return place_calls(make_workload(), "1x4", actor_generate=(0, 1), **dict.fromkeys(inference, (2, 3)))


def where(program: Program, rank: int, text: str) -> int:
    """Position of the first instruction of a rank that reads like this."""
    return next(i for i, step in enumerate(program.instructions[rank]) if str(step).startswith(text))


def number_of(program: Program, what: str) -> int:
    return next(number for number, transfer in enumerate(program.transfers) if transfer.what.startswith(what))


def assert_refused(program: Program, rank: int, *words: str, position: int | None = None) -> None:
    """There is an error for that rank (at that instruction) whose text holds all the words."""
    found = errors(program)
    assert found, "check lets it pass"
    fitting = [f for f in found if f.rank == rank and (position is None or f.position == position)]
    assert any(all(word in str(f) for word in words) for f in fitting), [str(finding) for finding in found]


@pytest.mark.parametrize("program", [halves(), separation()], ids=["halves", "separation"])
def test_the_programs_that_are_broken_below_are_sound(program):
    assert check(program) == []


# ---- collectives ---------------------------------------------------------------------------------------------------


def test_two_collectives_swapped_on_one_rank():
    program = halves()
    at = where(program, 2, "Run actor_train")
    broken = edited(program, 2, lambda s: s.__setitem__(slice(at, at + 2), [s[at + 1], s[at]]))
    assert_refused(broken, 2, "Run critic_train epoch 0 mini-batch 0", "waits for ever", "0-1,3", position=at)
    assert_refused(broken, 0, "Run actor_train epoch 0 mini-batch 0", "rank 2 stands at", "critic_train")


@pytest.mark.parametrize("call", ["actor_train epoch 0 mini-batch 1", "reference_infer", "estimate_advantages"])
def test_a_run_dropped_on_one_rank(call):
    program = halves()
    broken = edited(program, 1, lambda s: s.pop(where(program, 1, f"Run {call}")))
    assert_refused(broken, 1, "never executes", f"Run {call}")
    if "train" in call:
        assert_refused(broken, 0, f"Run {call}", "waits for ever for ranks 1")


def test_a_run_dropped_where_nobody_waits_for_it():
    """A model that trains on one rank enters no group, and nothing reads what it makes: only counting helps."""
    program = place_models(make_workload(), 2, critic=(0,))
    at = where(program, 0, "Run critic_train epoch 0 mini-batch 1")
    assert program.instructions[0][at].group is None
    broken = edited(program, 0, lambda s: s.pop(at))
    assert_refused(broken, 0, "never executes Run critic_train epoch 0 mini-batch 1")


@pytest.mark.parametrize("call", ["actor_train", "critic_infer", "estimate_advantages"])
def test_an_extra_run_on_one_rank(call):
    program = halves()
    at = where(program, 3, f"Run {call}")
    broken = edited(program, 3, lambda s: s.insert(at, s[at]))
    assert_refused(broken, 3, f"Run {call}", "second time", position=at + 1)


def test_an_extra_step_beyond_the_last_mini_batch():
    program = place_models(make_workload(num_mini_batches=2), 1)
    broken = edited(program, 0, lambda s: s.insert(-1, Run("critic_train", None, 2, 0)))
    assert_refused(
        broken, 0, "Run critic_train epoch 0 mini-batch 2", "no iteration", position=len(broken.instructions[0]) - 2
    )


def test_training_out_of_order():
    """Alike on both ranks, so that nothing hangs: but the epochs are not what the algorithm says."""
    program = place_models(make_workload(num_mini_batches=2), 2)
    for rank in (0, 1):
        at = where(program, rank, "Run actor_train")
        program = edited(
            program, rank, lambda s, i=at: s.__setitem__(slice(i, i + 4), [*s[i + 2 : i + 4], *s[i : i + 2]])
        )
    assert_refused(program, 1, "Run actor_train epoch 0 mini-batch 0", "comes after epoch 0 mini-batch 1")


def test_a_run_in_a_group_that_the_rank_is_not_in():
    program = replace(halves(), groups={"ranks 0-3": (0, 1, 2, 3), "ranks 0-1": (0, 1)})
    at = where(program, 2, "Run actor_train")
    broken = edited(program, 2, lambda s: s.__setitem__(at, replace(s[at], group="ranks 0-1")))
    assert_refused(broken, 2, "Run actor_train", "group that this rank is not in", position=at)


def test_a_run_in_an_unknown_group():
    program = halves()
    at = where(program, 2, "Run actor_train")
    broken = edited(program, 2, lambda s: s.__setitem__(at, replace(s[at], group="ranks 7-9")))
    assert_refused(broken, 2, "with ranks 7-9", "group that this rank is not in", position=at)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Run("actor_guess"), ["no call actor_guess"]),
        (Run("critic_infer", reader="critic_train"), ["no place"]),
        (Run("estimate_advantages"), ["no place"]),
        (Run("estimate_advantages", reader="nobody"), ["no place"]),
        (Run("reward_infer"), ["its place is ranks 2-3"]),
        (Wait(9), ["Wait transfer 9", "does not exist"]),
        (Post(-1), ["Post transfer -1", "does not exist"]),
        ("Run", ["no instruction"]),
    ],
)
def test_an_instruction_that_makes_no_sense_on_the_rank(step, words):
    broken = edited(halves(), 1, lambda s: s.insert(3, step))
    assert_refused(broken, 1, *words, position=3)


def test_agreement_dropped_on_one_rank():
    program = halves()
    broken = edited(program, 2, lambda s: s.pop())
    at = len(program.instructions[0]) - 1
    assert_refused(broken, 0, "Agree on metrics", "ranks 2;", "rank 2 has ended its list", position=at)


# ---- transfers -----------------------------------------------------------------------------------------------------


def test_a_post_dropped():
    program = halves()
    at = where(program, 2, "Post transfer 1")
    broken = edited(program, 2, lambda s: s.pop(at))
    assert_refused(broken, 2, "never posts transfer 1", "responses to ranks 2-3", "would wait for ever")
    assert_refused(broken, 2, "Wait transfer 1 comes before its Post")


def test_a_wait_dropped():
    program = halves()
    broken = edited(program, 3, lambda s: s.pop(where(program, 3, "Wait transfer 1")))
    assert_refused(broken, 3, "posts transfer 1 but never waits for it")


def test_a_wait_before_its_post():
    program = halves()

    def hurry(steps):
        post, wait = steps.index(Post(1)), steps.index(Wait(1))
        steps.insert(post, steps.pop(wait))

    broken = edited(program, 2, hurry)
    assert_refused(broken, 2, "Wait transfer 1 comes before its Post", position=where(program, 2, "Post transfer 1"))


@pytest.mark.parametrize("step", [Post(1), Wait(1)])
def test_a_transfer_used_twice(step):
    broken = edited(halves(), 2, lambda s: s.insert(s.index(step), step))
    assert_refused(broken, 2, f"{step} appears twice", position=broken.instructions[2].index(step) + 1)


def test_a_transfer_that_passes_the_rank_by():
    program = separation()
    weights = number_of(program, "weights of actor")
    broken = replace(program, transfers=(*program.transfers, Transfer("spare", (1,), ("responses",), ())))
    broken = edited(broken, 1, lambda s: s.insert(2, Post(weights + 1)))
    assert_refused(broken, 1, f"Post transfer {weights + 1} has nothing for this rank", position=2)


def test_the_posts_of_two_transfers_in_opposite_orders_at_the_two_ends():
    """Ranks 1 and 2 exchange both kinds of responses; a backend without tags would mix them up."""
    program = halves()

    def swap(steps):
        one, other = steps.index(Post(0)), steps.index(Post(1))
        steps[one], steps[other] = steps[other], steps[one]

    broken = edited(program, 2, swap)
    at = program.instructions[2].index(Post(0))
    assert_refused(broken, 2, "posts transfer 1 here", "posts transfer 0 first", position=at)
    assert_refused(broken, 0, "posts transfer 0 here", "rank 2 posts transfer 1 first")


def ring(orders: list[tuple[str, ...]]) -> Program:
    """Three ranks that each send to the next: transfer n goes from rank n to rank n + 1. The letters of an order are
    p0 (Post), w0 (Wait); all computing is left out of the program."""
    program = place_models(make_workload(), 3)
    transfers = []
    for number in range(3):
        message = Message(number, (number + 1) % 3, range(4), 1)
        transfers.append(Transfer(f"transfer {number}", (message.destination,), ("responses",), (message,)))
    kinds = {"p": Post, "w": Wait}
    lists = tuple(tuple(kinds[kind](int(number)) for kind, number in order) for order in orders)
    return replace(program, transfers=tuple(transfers), instructions=lists)


def test_ranks_that_wait_for_each_other_in_a_circle():
    """Each pair has only one transfer, so no two ends disagree on an order: 0 waits for 1, 1 for 2, 2 for 0."""
    program = ring([("p0", "w0", "p2", "w2"), ("p1", "w1", "p0", "w0"), ("p2", "w2", "p1", "w1")])
    for rank, peer in ((0, 1), (1, 2), (2, 0)):
        assert_refused(program, rank, f"Wait transfer {rank} waits for ever for ranks {peer}", position=1)
    calm = ring([("p0", "p2", "w0", "w2"), ("p0", "p1", "w0", "w1"), ("p1", "p2", "w1", "w2")])
    assert deadlocks(calm) == []


def test_posts_in_a_circle_hang_a_backend_that_carries_them_out_in_order():
    """Nobody waits before having posted all, but each rank's first transfer is its neighbour's second."""
    program = ring([("p0", "p2", "w0", "w2"), ("p1", "p0", "w0", "w1"), ("p2", "p1", "w1", "w2")])
    assert deadlocks(program) == [] and hangs(program, random.Random(0), in_order=True)
    assert_refused(program, 0, "posts transfer 0 here", "rank 1 posts transfer 1 first", position=0)


def test_two_waits_swapped_so_that_two_ranks_wait_for_each_other():
    """Two transfers between two ranks; each rank posts the other's transfer only after its own wait."""
    program = place_calls(make_workload(), "1x2", reference_infer=(1,), reward_infer=(0,))
    there, back = program.transfers[0].peers(0), program.transfers[1].peers(1)
    assert there == {1} and back == {0}
    orders = [[Post(0), Wait(0), Post(1), Wait(1)], [Post(1), Wait(1), Post(0), Wait(0)]]
    others = [
        [s for s in steps if not (isinstance(s, Post | Wait) and s.transfer < 2)] for steps in program.instructions
    ]
    broken = replace(program, instructions=tuple(tuple(a[:1] + o + a[1:]) for a, o in zip(others, orders, strict=True)))
    assert_refused(broken, 0, "Wait transfer 0 waits for ever for ranks 1", "stands at instruction 2", position=2)
    assert_refused(broken, 1, "Wait transfer 1 waits for ever for ranks 0", "stands at instruction 2", position=2)


# ---- data and weights ----------------------------------------------------------------------------------------------


def test_a_run_before_the_wait_that_brings_its_data():
    program = halves()

    def hurry(steps):
        wait = steps.index(Wait(1))
        assert str(steps[wait + 1]) == "Run reward_infer"
        steps[wait], steps[wait + 1] = steps[wait + 1], steps[wait]

    broken = edited(program, 3, hurry)
    at = where(broken, 3, "Run reward_infer")
    text = f"they come only by instruction {at + 1}, Wait transfer 1"
    assert_refused(broken, 3, "Run reward_infer reads responses of columns 2", text, position=at)


def test_a_run_whose_data_nobody_sends():
    program = halves()
    kept = [message for message in program.transfers[1].messages if message.destination != 3]
    transfers = (program.transfers[0], replace(program.transfers[1], messages=tuple(kept)), *program.transfers[2:])
    broken = edited(replace(program, transfers=transfers), 3, lambda s: [s.remove(Post(1)), s.remove(Wait(1))])
    assert_refused(broken, 3, "Run reward_infer reads responses of columns 2", "nothing brings them")


def test_a_sender_that_posts_before_the_run_that_makes_its_data():
    program = halves()
    scores = number_of(program, "scores")

    def hurry(steps):
        steps.insert(where(program, 2, "Run reward_infer"), steps.pop(steps.index(Post(scores))))

    broken = edited(program, 2, hurry)
    at = where(program, 2, "Run reward_infer")
    assert_refused(broken, 2, f"Post transfer {scores} sends scores to rank 0 before it is here", position=at)


def test_weights_sent_before_the_last_step_of_training():
    program = separation()
    weights = number_of(program, "weights of actor")
    last = where(program, 2, "Run actor_train epoch 0 mini-batch 1")
    broken = edited(program, 2, lambda s: s.insert(last, s.pop(s.index(Post(weights)))))
    assert_refused(
        broken, 2, f"Post transfer {weights} moves the weights of actor before", "Run actor_train", position=last
    )


def test_weights_that_arrive_while_a_shadow_still_uses_the_old_ones():
    program = separation()
    weights = number_of(program, "weights of actor")
    broken = edited(program, 0, lambda s: s.insert(0, s.pop(s.index(Post(weights)))))
    assert_refused(broken, 0, f"Post transfer {weights} moves the weights", "Run actor_generate", position=0)


@pytest.mark.parametrize("copies", [0, 2])
def test_a_shadow_gets_its_weights_exactly_once(copies):
    program = separation()
    weights = number_of(program, "weights of actor")
    move = program.transfers[weights]
    messages = [m for m in move.messages for _ in range(copies if m.destination == 1 else 1)]
    transfers = [*program.transfers[:weights], replace(move, messages=tuple(messages))]
    broken = replace(program, transfers=tuple(transfers))
    if not copies:
        gone = next(m.source for m in move.messages if m.destination == 1)
        for rank in (1, gone):
            broken = edited(broken, rank, lambda s: [s.remove(Post(weights)), s.remove(Wait(weights))])
    assert_refused(broken, 1, f"new weights of actor {copies} times")


def test_weights_from_a_rank_that_does_not_train_them():
    program = separation()
    weights = number_of(program, "weights of actor")
    messages = [Message(0, 1, range(0), 1), Message(2, 0, range(0), 1)]
    move = replace(program.transfers[weights], messages=tuple(messages))
    broken = replace(program, transfers=(*program.transfers[:weights], move))
    broken = edited(broken, 3, lambda s: [s.remove(Post(weights)), s.remove(Wait(weights))])
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
        ({"transfers": (Transfer("x", (1,), ("guesses",), ()),)}, ["transfer 0", "guesses", "no call makes"]),
        ({"transfers": (Transfer("x", (1,), (), ()),)}, ["transfer 0", "no keys"]),
        ({"transfers": (Transfer("x", (1,), (), (), model="reward"),)}, ["weights of reward", "no call trains"]),
        ({"transfers": (Transfer("x", (1,), (), (), model="nobody"),)}, ["weights of nobody", "no call trains"]),
        ({"transfers": (Transfer("x", (1,), RESPONSES, (Message(0, 9, range(1), 4),)),)}, ["rank 0 to rank 9"]),
        ({"transfers": (Transfer("x", (1,), RESPONSES, (Message(1, 1, range(1), 4),)),)}, ["rank 1 to rank 1"]),
    ],
)
def test_declarations_that_leave_the_world_or_the_workflow(change, words):
    found = errors(replace(halves(), **change))
    assert any(all(word in str(finding) for word in words) for finding in found), [str(f) for f in found]


def test_nothing_at_all_is_no_program():
    assert_refused(replace(halves(), instructions=((), (), (), ())), 0, "never posts transfer 0")


# ---- memory and waste ----------------------------------------------------------------------------------------------


def flattening(preset: str, layout: str, zero: int = 0) -> Program:
    config = load(preset)
    cluster = Cluster.parse(layout, config.device)
    trained, frozen = (Layout.data_parallel(cluster.ranks, zero=stage) for stage in (zero, 0))
    workload = workload_of(config)
    placement = Placement.by_model(workload, actor=trained, critic=trained, reference=frozen, reward=frozen)
    return compile_program(workload, placement, cluster)


def test_65b_does_not_fit_by_flattening_and_the_numbers_say_so():
    """Two bytes for each of four models' weights; gradients (4) and AdamW with master weights (12) of two of them."""
    program = flattening("llama-65b", "8x8")
    lm = 80 * (4 * 8192**2 + 3 * 8192 * 22016 + 2 * 8192) + 8192 + 2 * 32000 * 8192
    scalar = lm - 32000 * 8192 + 8192
    gib = (2 * (2 * lm + 2 * scalar) + (4 + 12) * (lm + scalar)) / 2**30
    found = errors(program)
    assert len(found) == 1 and found[0].rank is None
    assert f"ranks 0-63 need {gib:.1f} GiB" in found[0].message and "the device has 80 GiB" in found[0].message
    assert "raise the ZeRO stage" in found[0].message
    assert f"{gib:.1f}" == "2427.2"


def test_sharding_brings_the_bytes_down_until_it_fits():
    needs = []
    for zero in (0, 1, 2, 3):
        found = errors(flattening("llama-13b", "8x8", zero))
        needs.append(float(found[0].message.split(" need ")[1].split()[0]) if found else 0.0)
    assert needs[0] > needs[1] > needs[2] > needs[3] >= 0
    assert errors(flattening("llama-7b", "8x8", zero=3)) == []


def test_ranks_that_differ_are_told_apart():
    workload = workload_of(load("llama-7b"))
    everyone, half = Layout.data_parallel(range(4)), Layout.data_parallel((0, 1))
    placement = Placement.by_model(workload, actor=half, critic=everyone, reference=half, reward=half)
    found = [
        finding.message for finding in errors(compile_program(workload, placement, Cluster.parse("1x4", "a100-80g")))
    ]
    assert [text.split(" need")[0] for text in found] == ["ranks 0-1", "ranks 2-3"]


def test_a_reward_function_has_no_bytes_and_a_cpu_no_limit():
    workload = replace(make_workload(), models={**make_workload().models, "reward": None})
    assert check(place_models(workload, 2)) == []
    config = load("llama-65b")
    everyone = Layout.data_parallel(range(2))
    placement = Placement.by_model(workload_of(config), **dict.fromkeys(workload.workflow.models, everyone))
    assert check(compile_program(workload_of(config), placement, Cluster.parse("1x2", "cpu"))) == []


def test_more_ranks_than_columns_is_a_warning():
    program = place_models(make_workload(mini_batch=3), 4)
    assert errors(program) == []
    texts = warnings(program)
    assert len(texts) == 6 and "actor_generate: ranks 0 get no sequence" in texts[0]
    assert "mini_batch 3 is smaller than dp 4; raise mini_batch" in texts[0]


def test_idle_ranks_are_a_warning():
    program = place_models(make_workload(), 4, **dict.fromkeys(("actor", "critic", "reference", "reward"), (0, 2)))
    assert errors(program) == [] and warnings(program) == ["ranks 1,3 run no call in this placement"]


def test_errors_come_before_warnings_and_read_well():
    program = place_models(make_workload(mini_batch=1), 2)
    found = check(edited(program, 1, lambda s: s.pop()))
    assert [finding.severity for finding in found] == sorted(finding.severity for finding in found)
    assert str(Finding("error", "text", 3, 4)) == "error: rank 3, instruction 4: text"
    assert str(Finding("warning", "text")) == "warning: text" and str(Finding("error", "x", 1)) == "error: rank 1: x"


# ---- the proof against brute force ---------------------------------------------------------------------------------


def hangs(program: Program, rng: random.Random, *, in_order: bool = False) -> dict[int, int]:
    """Steps ranks at random until none can move; -> where the others are left standing, empty if all lists end.

    Collectives match as libraries match them: the n-th of a group on each of its ranks. A transfer is finished on a
    rank when its peers have posted it; with `in_order` a rank works on its transfers one after another, as posted.
    """
    size = len(program.instructions)
    at = [0] * size
    entered: list[dict] = [{} for _ in range(size)]  # group -> what was entered so far
    blocked = [False] * size  # inside a collective
    queue: list[list[int]] = [[] for _ in range(size)]  # transfers in posted order
    done: set[tuple[int, int]] = set()

    def group_of(step) -> tuple[object, tuple[int, ...]] | None:
        if isinstance(step, Agree):
            return "everyone", tuple(range(size))
        if isinstance(step, Run) and step.group is not None:
            return step.group, program.groups[step.group]
        return None

    def started(rank: int, number: int) -> bool:
        mine = queue[rank]
        return number in mine and (not in_order or all((rank, n) in done for n in mine[: mine.index(number)]))

    def progress() -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(size):
                for number in queue[rank]:
                    peers = program.transfers[number].peers(rank)
                    ready = started(rank, number) and all(started(p, number) or (p, number) in done for p in peers)
                    if ready and (rank, number) not in done:
                        done.add((rank, number))
                        moved = True

    def try_step(rank: int) -> bool:
        step = program.instructions[rank][at[rank]]
        if (group := group_of(step)) is not None:
            name, members = group
            if not blocked[rank]:
                entered[rank].setdefault(name, []).append(step)
                blocked[rank] = True
                return True
            turn = len(entered[rank][name])
            theirs = [entered[member].get(name, [])[turn - 1 : turn] for member in members]
            if any(they != [step] for they in theirs):
                return False
            blocked[rank] = False
        elif isinstance(step, Wait):
            peers = program.transfers[step.transfer].peers(rank)
            progress()
            if in_order and (rank, step.transfer) not in done:
                return False
            if not in_order and not all(step.transfer in queue[peer] for peer in peers):
                return False
        elif isinstance(step, Post):
            queue[rank].append(step.transfer)
        at[rank] += 1
        return True

    while True:
        left = [rank for rank in range(size) if at[rank] < len(program.instructions[rank])]
        rng.shuffle(left)
        if not any(try_step(rank) for rank in left):
            return {rank: at[rank] for rank in left}


def mutated(program: Program, rng: random.Random) -> Program:
    """One to three small changes: two instructions swapped, one moved, dropped or doubled on some rank."""
    for _ in range(rng.randint(1, 3)):
        rank = rng.randrange(len(program.instructions))
        steps = list(program.instructions[rank])
        if not steps:
            continue
        one, other = rng.randrange(len(steps)), rng.randrange(len(steps))
        change = rng.choice(["swap", "move", "drop", "double"])
        if change == "swap":
            steps[one], steps[other] = steps[other], steps[one]
        elif change == "move":
            steps.insert(other, steps.pop(one))
        elif change == "drop":
            del steps[one]
        else:
            steps.insert(other, steps[one])
        program = with_list(program, rank, steps)
    return program


def jumble(rng: random.Random) -> Program:
    """Ranks that post, wait and meet in groups without a plan, though mostly in the order of one list."""
    size = rng.randint(2, 4)
    ranks = tuple(range(size))
    groups = {f"group {i}": tuple(sorted(rng.sample(ranks, rng.randint(1, size)))) for i in range(2)}
    transfers = []
    for number in range(3):
        pairs = {tuple(rng.sample(ranks, 2)) for _ in range(rng.randint(1, 3))}
        messages = tuple(Message(source, destination, range(1), 4) for source, destination in sorted(pairs))
        transfers.append(Transfer(f"transfer {number}", ranks, RESPONSES, messages))
    lists: list[list[Instruction]] = [[] for _ in ranks]
    for number in rng.sample(range(6), 6):
        name = f"group {number % 2}"
        for rank in groups[name]:
            lists[rank].append(Run(f"call {number // 3}", name))
        if number < 3:
            for rank in transfers[number].ranks:
                early = rng.random() < 0.1  # now and then the wait comes first
                lists[rank] += [Wait(number), Post(number)] if early else [Post(number), Wait(number)]
    program = replace(place_models(make_workload(), size), groups=groups, transfers=tuple(transfers))
    return replace(program, instructions=tuple(tuple(steps) for steps in lists))


@pytest.mark.parametrize("make", [lambda rng: random_program(rng.choice), jumble], ids=["compiled", "jumble"])
def test_the_proof_agrees_with_brute_force(make):
    """Which ranks are left standing, and where, for 400 programs and changed programs; and check's word is good."""
    rng = random.Random(1)
    hanging = calm = 0
    for number in range(400):
        program = make(rng)
        if number % 4:
            program = mutated(program, rng)
        standing = hangs(program, rng)
        assert {rank: position for rank, position, _ in deadlocks(program)} == standing
        hanging, calm = hanging + bool(standing), calm + (not standing)
        if make is not jumble and not errors(program):
            assert not standing and not hangs(program, rng, in_order=True)
    assert min(hanging, calm) > 60, (hanging, calm)


def test_the_order_of_posts_is_what_backends_without_tags_need():
    """Whatever passes check also runs on a backend that carries out each rank's transfers one after another; programs
    with two posts swapped on a rank that would hang there are all refused."""
    rng = random.Random(2)
    refused = 0
    for _ in range(200):
        program = random_program(rng.choice)
        ranks = [rank for rank, steps in enumerate(program.instructions) if sum(isinstance(s, Post) for s in steps) > 1]
        if not ranks:
            continue
        rank = rng.choice(ranks)
        posts = [i for i, step in enumerate(program.instructions[rank]) if isinstance(step, Post)]
        one, other = rng.sample(posts, 2)
        steps = list(program.instructions[rank])
        steps[one], steps[other] = steps[other], steps[one]
        broken = with_list(program, rank, steps)
        if hangs(broken, rng, in_order=True):
            assert errors(broken)
            refused += 1
    assert refused > 20
