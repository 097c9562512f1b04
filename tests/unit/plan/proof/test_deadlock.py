"""The proof that nothing can hang agrees with brute force: ranks stepped at random, on sound and on broken programs."""

import random
from dataclasses import replace

import pytest

from rlhf_spmd.plan.program.instructions import Agree, Instruction, Message, Post, Program, Run, Transfer, Wait
from rlhf_spmd.plan.proof.deadlock import hangs
from tests.programs import errors, make_workload, mutated, place_models, random_program

RESPONSES = ("responses",)


def peers(transfer: Transfer, rank: int, *, chained: bool) -> set[int]:
    """Returns whom a rank needs for a transfer, or for what goes on of it at the Wait."""
    if chained:
        return set(transfer.ranks) - {rank}
    if transfer.reallocation is None:
        return transfer.peers(rank)
    links = [set(route.ranks[:2]) for route in transfer.reallocation.routes]
    return set().union(*(link for link in links if rank in link)) - {rank}


def standing(program: Program, rng: random.Random, *, in_order: bool = True) -> dict[int, int]:
    """Steps ranks at random until none can move. Returns where the others are left standing, empty if all lists end.

    Collectives match as libraries match them: the n-th of a group on each of its ranks. A transfer is finished on a
    rank when its peers have posted it; with `in_order` a rank works on its transfers one after another, as posted. The
    chains of a reallocation begin with their first links when they are posted, and go on when all ranks of the
    reallocation wait for it.
    """
    size = len(program.instructions)
    at = [0] * size
    entered: list[dict] = [{} for _ in range(size)]  # group -> what was entered so far
    blocked = [False] * size  # inside a collective
    queue: list[list[tuple[int, bool]]] = [[] for _ in range(size)]  # transfers (or what goes on at a Wait) as posted
    done: set[tuple[int, tuple[int, bool]]] = set()
    met: set[tuple[int, tuple[int, bool]]] = set()  # chains, at whose second Wait nobody else would be

    def peers_of(rank: int, number: int, chained: bool) -> set[int]:
        return peers(program.transfers[number], rank, chained=chained)

    def group_of(step) -> tuple[object, tuple[int, ...]] | None:
        if isinstance(step, Agree):
            return ("everyone", step.ranks), step.ranks or tuple(range(size))
        if isinstance(step, Run) and step.group is not None:
            return step.group, program.groups[step.group]
        return None

    def started(rank: int, what: tuple[int, bool]) -> bool:
        mine = queue[rank]
        return what in mine and (not in_order or all((rank, other) in done for other in mine[: mine.index(what)]))

    def progress() -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(size):
                for what in queue[rank]:
                    needed = peers_of(rank, *what)
                    ready = started(rank, what) and all(started(p, what) or (p, what) in done for p in needed)
                    if ready and (rank, what) not in done:
                        done.add((rank, what))
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
            what = step.transfer, program.transfers[step.transfer].reallocation is not None
            if what[1] and what not in queue[rank]:
                queue[rank].append(what)
                return True
            progress()
            if (rank, what) not in done or (rank, what) in met:
                return False
            if what[1]:
                met.add((rank, what))
        elif isinstance(step, Post) and peers_of(rank, step.transfer, False):
            queue[rank].append((step.transfer, False))
        at[rank] += 1
        return True

    while True:
        left = [rank for rank in range(size) if at[rank] < len(program.instructions[rank])]
        rng.shuffle(left)
        if not any(try_step(rank) for rank in left):
            return {rank: at[rank] for rank in left}


def ring(orders: list[tuple[str, ...]]) -> Program:
    """Returns three ranks that each send to the next: transfer n goes from rank n to rank n + 1. The letters of an
    order are p0 (Post), w0 (Wait); all computing is left out of the program."""
    program = place_models(make_workload(), 3)
    transfers = []
    for number in range(3):
        message = Message(number, (number + 1) % 3, RESPONSES, range(4), 1)
        transfers.append(Transfer(f"transfer {number}", (message,)))
    kinds = {"p": Post, "w": Wait}
    lists = tuple(tuple(kinds[kind](int(number)) for kind, number in order) for order in orders)
    return replace(program, transfers=tuple(transfers), instructions=lists)


def test_ranks_that_wait_for_each_other_in_a_circle():
    """Each pair has only one transfer, so no two ends disagree on an order: 0 waits for 1, 1 for 2, 2 for 0."""
    program = ring([("p0", "w0", "p2", "w2"), ("p1", "w1", "p0", "w0"), ("p2", "w2", "p1", "w1")])
    for rank, position, text in hangs(program):
        assert position == 1 and f"Wait transfer {rank} waits for ever for ranks {(rank + 1) % 3};" in text
    assert len(hangs(program)) == 3
    assert errors(program)
    calm = ring([("p0", "p2", "w0", "w2"), ("p0", "p1", "w0", "w1"), ("p1", "p2", "w1", "w2")])
    assert hangs(calm) == []


def test_posts_in_a_circle_hang_a_backend_that_carries_them_out_in_order():
    """Nobody waits before having posted all, but each rank's first transfer is its neighbour's second."""
    program = ring([("p0", "p2", "w0", "w2"), ("p1", "p0", "w0", "w1"), ("p2", "p1", "w1", "w2")])
    assert not standing(program, random.Random(0), in_order=False)
    assert {rank: position for rank, position, _ in hangs(program)} == standing(program, random.Random(0)) != {}
    assert errors(program)


def jumble(rng: random.Random) -> Program:
    """Returns ranks that post, wait and meet in groups without a plan, though mostly in the order of one list."""
    size = rng.randint(2, 4)
    ranks = tuple(range(size))
    groups = {f"group {i}": tuple(sorted(rng.sample(ranks, rng.randint(1, size)))) for i in range(2)}
    transfers = []
    for number in range(3):
        pairs = {tuple(rng.sample(ranks, 2)) for _ in range(rng.randint(1, 3))}
        messages = tuple(Message(source, destination, RESPONSES, range(1), 4) for source, destination in sorted(pairs))
        transfers.append(Transfer(f"transfer {number}", messages))
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
    """Which ranks are left standing, and where, for 200 programs and changed programs; and check's word is good, also
    where transfers need not keep the order of their posts."""
    rng = random.Random(1)
    hanging = calm = 0
    for number in range(200):
        program = make(rng)
        if number % 4:
            program = mutated(program, rng)
        left = standing(program, rng)
        assert {rank: position for rank, position, _ in hangs(program)} == left
        hanging, calm = hanging + bool(left), calm + (not left)
        if not left:
            assert not standing(program, rng, in_order=False)
        if make is not jumble and not errors(program):
            assert not left
    assert min(hanging, calm) > 30, (hanging, calm)
