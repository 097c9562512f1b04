"""The executor without other ranks: where ranks meet, message tags, and which rank is named as late."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Agree, Post, Program, Run, Wait
from rlhf_spmd.runtime.execute import post_and_wait
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.iteration import Iteration, Store
from rlhf_spmd.runtime.failure.diagnosis import Needs, late_ranks, peer_error
from rlhf_spmd.runtime.failure.records import Position
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.strategies import separation
from tests.programs import make_workload, place_calls

PLACEMENTS = {
    "reference on one": {"reference_infer": (3,)},
    "apart": {"actor_train": (0, 1), "critic_train": (0, 1), "actor_generate": (2, 3), "critic_infer": (2, 3)},
    # rank 2 has the middle columns when it needs all: two messages from rank 0 in one transfer
    "with a hole": {"actor_generate": (0,), "reference_infer": (1, 2, 3), "reward_infer": (2,)},
}


class Board:
    """What all ranks have said, in order, and where they are."""

    def __init__(self, num_ranks: int):
        self.texts: dict[int, list[str]] = {rank: [] for rank in range(num_ranks)}
        self.places = dict.fromkeys(range(num_ranks), Position.of())


class RankOf:
    """One rank's world, which only notes what it says."""

    def __init__(self, rank: int, board: Board):
        self.rank, self.board, self.hosts = rank, board, ("here",) * len(board.texts)
        self.device = torch.device("cpu")

    def progress(self, position: str, iteration: int = -1, place: int = -1) -> None:
        self.board.texts[self.rank].append(position)
        if place >= 0:  # tests cut lists short: whoever is over with such a list stands where it ends
            self.board.places[self.rank] = Position.of(position, iteration, place)

    def will_execute(self, program: Program) -> None:
        pass

    def barrier(self, what: str) -> None:
        pass

    def stragglers(self, needs: Needs, iteration: int) -> dict[int, str]:
        return {rank: self.board.places[rank].text for rank in late_ranks(needs, iteration, self.board.places)}

    def allgather_bytes(self, message, what="", **_):
        return [message]


def job_of(program: Program, world: RankOf) -> SimpleNamespace:
    return SimpleNamespace(program=program, world=world, models=None)


def executors(program: Program, board: Board) -> list[Executor]:
    """Returns an executor for every rank whose instructions do nothing."""
    made = []
    for rank in program.cluster.ranks:
        executor = Executor(job_of(program, RankOf(rank, board)), Tracer())
        executor.run = lambda *_: None
        executor.transfers.post = executor.transfers.wait = lambda *_: None
        executor.agree = lambda data, what, world=executor.world: world.allgather_bytes(b"", what)
        made.append(executor)
    return made


def explained(executor: Executor, error: Exception, step, position: int) -> Exception:
    return peer_error(error, executor.program, executor.world, iteration(), step, position)


def iteration(number: int = 0, store: Store | None = None) -> Iteration:
    nothing = np.zeros((1, 1), dtype=np.int64)
    return Iteration(number, 0, nothing, nothing, torch.zeros(1), store)


@pytest.mark.parametrize("ranks", PLACEMENTS.values(), ids=PLACEMENTS)
def test_ranks_that_meet_say_the_same(ranks):
    """A diagnosis compares these texts, so they must not hold what differs from rank to rank (e.g. a position in the
    list), and no two meetings of a run may sound alike."""
    program = place_calls(make_workload(num_mini_batches=2, epochs=2, whiten="batch"), "1x4", **ranks)
    board = Board(4)
    for number, executor in itertools.product(range(2), executors(program, board)):
        executor.iteration(iteration(number))
    for rank, texts in board.texts.items():
        assert max(Counter(texts).values()) == 1, rank
    for step in {step for steps in program.instructions for step in steps if not isinstance(step, Post | Wait)}:
        members = range(4) if isinstance(step, Agree) else program.groups.get(step.group, ())
        said = [{text for text in board.texts[rank] if text.endswith(str(step))} for rank in members]
        assert all(texts == said[0] and len(texts) == 2 for texts in said), step


@pytest.mark.parametrize("ranks", PLACEMENTS.values(), ids=PLACEMENTS)
def test_only_the_late_rank_is_named(ranks):
    """Rank 1 stops somewhere; whoever waits for it names rank 1 alone, and where it stands."""
    program = place_calls(make_workload(num_mini_batches=2), "1x4", **ranks)
    step = next(step for step in program.instructions[0] if isinstance(step, Run) and step.group)
    board = Board(4)
    everyone = executors(program, board)
    for executor in everyone:
        where = program.instructions[executor.world.rank].index(step) if step in executor.instructions else 0
        executor.instructions = executor.instructions[: where + 1]
    everyone[1].instructions = everyone[1].instructions[:-1]
    for executor in everyone:
        executor.iteration(iteration())

    def lost(*_) -> None:
        raise RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete")

    everyone[0].run = lost
    everyone[0].instructions = (step,)
    with pytest.raises(UserError, match="rank 1 on here last reported: iteration 1: ") as caught:
        everyone[0].iteration(iteration())
    assert caught.value.args[0].count("last reported") == 1
    assert f"gave up waiting in iteration 1, instruction 0: {step}" in str(caught.value)


def test_a_peer_that_posted_long_ago_is_not_late():
    """While streaming a rank posts much before it waits, and the board shows its last position alone."""
    workload, cluster = make_workload(mini_batch=8, num_mini_batches=4), Cluster.parse("1x8")
    program = compile_program(workload, separation.place(workload, cluster, chain=False), cluster)
    board = Board(8)
    everyone = executors(program, board)
    for rank, executor in enumerate(everyone):
        for position, step in enumerate(program.instructions[rank]):
            if not isinstance(step, Wait):
                continue
            peers = program.transfers[step.transfer].peers(rank)
            for peer in peers:
                steps = program.instructions[peer]
                weights = program.transfers[step.transfer].reallocation is not None  # all stand at the Wait for them
                posted = steps.index(step if weights else Post(step.transfer))
                for stopped in range(len(steps)):
                    board.places[peer] = Position.of("a text", 0, stopped)
                    error = explained(executor, RuntimeError("gloo: timed out"), step, position)
                    late = f"rank {peer} on here last reported: a text" in str(error)
                    assert late == (stopped < posted), (step, stopped)


@pytest.mark.parametrize("ranks", PLACEMENTS.values(), ids=PLACEMENTS)
def test_no_two_messages_of_a_pair_share_a_tag(ranks, monkeypatch):
    """Both ends list the same tags and sizes in the same order, whatever is under way between them."""
    program = place_calls(make_workload(mini_batch=7, num_mini_batches=2), "1x4", **ranks)
    monkeypatch.setattr(
        post_and_wait.dist, "P2POp", lambda call, tensor, peer, tag, group: (call.__name__, tensor.nbytes, peer, tag)
    )
    listed: dict[int, list] = {}
    monkeypatch.setattr(
        post_and_wait.dist, "batch_isend_irecv", lambda operations: listed[rank].extend(operations) or []
    )
    num_bytes = 0
    for rank in program.cluster.ranks:
        listed[rank] = []
        data = iteration(store=Store(program.workload, program.held(rank)))
        executor = Executor(job_of(program, RankOf(rank, Board(4))), Tracer())
        for step in program.instructions[rank]:
            if isinstance(step, Post) and not program.transfers[step.transfer].model:
                executor.transfers.post(step.transfer, data)
        num_bytes += data.num_bytes_sent
    assert num_bytes == sum(transfer.num_bytes for transfer in program.transfers if not transfer.model) > 0
    for one, other in itertools.permutations(range(4), 2):
        sent = [(size, tag) for call, size, peer, tag in listed[one] if call == "isend" and peer == other]
        received = [(size, tag) for call, size, peer, tag in listed[other] if call == "irecv" and peer == one]
        assert sent == received
        assert len({tag for _, tag in sent}) == len(sent)
