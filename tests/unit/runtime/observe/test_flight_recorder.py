"""The flight recorder, and what is made of the records of several ranks."""

import mmap
import time

import pytest

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Agree, Post, Run, Wait
from rlhf_spmd.runtime.diagnosis.diagnose import RankState, WaitGraph, diagnose
from rlhf_spmd.runtime.diagnosis.wait_graph import wait_graph_of
from rlhf_spmd.runtime.guard.last_checkpoint import newest_checkpoint, resume_hint
from rlhf_spmd.runtime.observe import flight_recorder
from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE, NUM_ENTRIES, SIZE, Flight, parse
from rlhf_spmd.strategies import flattening, separation
from tests.programs import make_workload


def program_of(strategy, num_ranks=4):
    workload, cluster = make_workload(mini_batch=8, num_mini_batches=2), Cluster.parse(f"1x{num_ranks}")
    return compile_program(workload, strategy.place(workload, cluster), cluster)


def standing(program, rank, position, iteration=3, **more):
    step = wait_graph_of(program).of_rank[rank][position]
    return RankState(rank, "here", f"iteration {iteration}: {step.text}", iteration, position, 5.0, **more)


def find(program, rank, kind, **fields):
    """The first position of an instruction like this in a rank's list."""
    for position, step in enumerate(program.instructions[rank]):
        if isinstance(step, kind) and all(getattr(step, name) == value for name, value in fields.items()):
            return position
    raise AssertionError((rank, kind, fields))


# The recorder


def test_a_record_says_what_was_begun():
    recorder = Flight(mmap.mmap(-1, SIZE))
    recorder.describe(rank=3, size=8, host="a-host", board=17)
    recorder.describe(run="/somewhere/runs/x", num_instructions=12)
    recorder.begin(b"loading", NOWHERE, NOWHERE)
    recorder.begin("iteration 2: Run actor_train \u2603".encode() + b"x" * 400, 2, 7)
    record = parse(recorder.memory)
    assert (record.rank, record.size, record.host, record.num_begun) == (3, 8, "a-host", 2)
    assert (record.run, record.board, record.num_instructions) == ("/somewhere/runs/x", 17, 12)
    assert record.where.startswith("iteration 2: Run actor_train \u2603xx")
    assert record.where.endswith("x (instruction 7 of 12)") and record.where == recorder.where
    first, second = record.entries
    assert (first.text, first.iteration, first.position) == ("loading", NOWHERE, NOWHERE)
    assert first.end_s == second.begin_s and second.end_s is None and (second.iteration, second.position) == (2, 7)


@pytest.mark.parametrize("num", [0, 1, NUM_ENTRIES - 1, NUM_ENTRIES, NUM_ENTRIES + 1, 3 * NUM_ENTRIES + 5])
def test_the_last_entries_stay(num):
    recorder = Flight()
    for number in range(num):
        recorder.begin(str(number).encode(), number, number)
    record = parse(recorder.memory)
    assert [entry.text for entry in record.entries] == [str(n) for n in range(max(0, num - NUM_ENTRIES), num)]
    assert [entry.end_s is None for entry in record.entries] == [False] * (len(record.entries) - 1) + [True] * bool(num)


def test_what_is_no_record_is_none(tmp_path):
    assert parse(b"") is None and parse(b"x" * SIZE) is None
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank-0000.bin").write_bytes(b"half")
    assert flight_recorder.read_records(tmp_path) == []


@pytest.mark.timed
def test_beginning_is_cheap():
    recorder, text = Flight(), b"iteration 3: Run actor_train epoch 0 mini-batch 2 with ranks 0-1"
    seconds = []
    for _ in range(20):
        start = time.process_time()
        for number in range(1000):
            recorder.begin(text, 3, number)
        seconds.append((time.process_time() - start) / 1000)
    assert min(seconds) < 5e-6  # 0.7 us on the machine where it was written


def test_the_newest_whole_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert "There is no complete checkpoint" in resume_hint(str(tmp_path), 4) and resume_hint("", 4) == ""
    for number, whole in ((2, True), (10, True), (12, False)):
        (tmp_path / "checkpoints" / f"iteration-{number:06d}").mkdir(parents=True)
        if whole:
            (tmp_path / "checkpoints" / f"iteration-{number:06d}" / "manifest.json").write_text("{}", encoding="utf-8")
    assert newest_checkpoint(tmp_path).name == "iteration-000010"
    (tmp_path / "checkpoints" / "iteration-000011.bad").mkdir()  # set aside by its owner
    (tmp_path / "checkpoints" / "iteration-000011.bad" / "manifest.json").write_text("{}", encoding="utf-8")
    assert newest_checkpoint(tmp_path).name == "iteration-000010"
    text = resume_hint(str(tmp_path), 4)
    assert "iteration-000010; resume with: mpirun -n 4 python -m rlhf_spmd train --resume" in text
    (tmp_path / "my run").mkdir()
    (tmp_path / "checkpoints").rename(tmp_path / "my run" / "checkpoints")
    assert resume_hint(str(tmp_path / "my run"), 1).endswith(f"train --resume '{tmp_path}/my run'")


# Who held up whom


def test_the_rank_that_is_missing_is_named():
    program = program_of(flattening)
    train, reward = find(program, 0, Run, call="actor_train"), find(program, 0, Run, call="reward_infer")
    found = diagnose([standing(program, r, reward if r == 1 else train) for r in range(4)], wait_graph_of(program))
    assert found.late == (1,) and found.waiting == (0, 2, 3)
    assert found.text.startswith("rank 1 (host here) did not reach iteration 3: Run actor_train epoch 0 mini-batch 0")
    assert "where ranks 0, 2, 3 wait for it; it is in iteration 3: Run reward_infer, instruction " in found.text


def test_whoever_waits_for_a_rank_that_waits_is_not_to_blame():
    """Rank 0 trains on what rank 2 generates, rank 1 trains with rank 0, and rank 3 has done its part."""
    program = program_of(separation)
    steps = wait_graph_of(program)
    waits = [p for p, step in enumerate(steps.of_rank[0]) if any(rank == 2 for rank, _ in step.needs)]
    places = {
        0: waits[0],
        1: find(program, 1, Run, call="actor_train"),
        2: find(program, 2, Run, call="actor_generate"),
        3: find(program, 3, Agree),
    }
    found = diagnose([standing(program, rank, places[rank]) for rank in range(4)], steps)
    assert found.late == (2,) and set(found.waiting) >= {0, 3}
    assert "rank 2 (host here) did not reach " in found.text and "Run actor_generate" in found.text


def test_an_earlier_iteration_is_missing_too():
    program = program_of(flattening)
    end = find(program, 0, Agree)
    where = [standing(program, rank, end, iteration=2 if rank == 3 else 3) for rank in range(4)]
    where[0] = RankState(0, "here", "iteration 3: over", 3, NOWHERE, 1.0)  # ahead of all
    found = diagnose(where, wait_graph_of(program))
    assert found.late == (3,) and found.waiting == (1, 2)


def test_ranks_that_wait_for_one_another():
    program = program_of(flattening)
    actor, critic = find(program, 0, Run, call="actor_train"), find(program, 0, Run, call="critic_train")
    swapped = wait_graph_of(program).of_rank[1]
    steps = list(swapped)
    steps[actor], steps[critic] = swapped[critic], swapped[actor]
    lists = list(wait_graph_of(program).of_rank)
    lists[1] = tuple(steps)
    # rank 1 entered the critic's collective where all others entered the actor's
    found = diagnose(
        [RankState(r, "here", f"iteration 3: {lists[r][actor].text}", 3, actor, 5.0) for r in range(4)],
        WaitGraph(tuple(lists)),
    )
    assert found is not None and 1 in (*found.late, *found.waiting)
    assert "rank 1" in found.text and "critic_train" in found.text and "actor_train" in found.text


def test_a_stopped_rank_is_to_blame_wherever_it_stands():
    program = program_of(flattening)
    train = find(program, 0, Run, call="actor_train")
    where = [standing(program, rank, train) for rank in (0, 1, 3)]
    where.append(standing(program, 2, train, trouble="it is stopped (SIGSTOP)"))
    found = diagnose(where, wait_graph_of(program))
    assert found.late == (2,) and "it is stopped (SIGSTOP)" in found.text


def test_all_inside_one_collective():
    program = program_of(flattening)
    train = find(program, 0, Run, call="actor_train")
    found = diagnose([standing(program, rank, train) for rank in range(4)], wait_graph_of(program))
    assert found.late == () and "all ranks reached iteration 3: Run actor_train" in found.text


def test_without_a_program_places_are_compared():
    where = [RankState(rank, "here", "loading" if rank == 2 else "meeting", NOWHERE, NOWHERE, 5.0) for rank in range(4)]
    found = diagnose(where, None)
    assert found.late == (2,) and "rank 2: loading, for 5.0 s" in found.text
    assert diagnose(where[:2], None) is None


@pytest.mark.parametrize("strategy", [flattening, separation])
def test_the_lists_survive_a_file(strategy, tmp_path):
    program = program_of(strategy)
    steps = wait_graph_of(program)
    steps.write(tmp_path)
    assert WaitGraph.read(tmp_path) == steps
    assert WaitGraph.read(tmp_path / "nowhere") is None
    waits = [
        (rank, position)
        for rank in range(4)
        for position, s in enumerate(program.instructions[rank])
        if isinstance(s, Wait)
    ]
    for rank, position in waits:  # a Wait needs what its peers have posted
        transfer = program.transfers[program.instructions[rank][position].transfer]
        needs = steps.of_rank[rank][position].needs
        met = Wait if transfer.reallocation is not None else Post
        assert needs and all(isinstance(program.instructions[other][place], met) for other, place in needs)


def test_the_run_folder_may_have_any_name():
    """A path is bytes: in another locale, or by another program, they may be no UTF-8."""
    flight = flight_recorder.Flight()
    flight.describe(run="/runs/l\udce9")
    assert flight_recorder.parse(flight.memory).run == "/runs/l\udce9"
    assert flight_recorder.record_path(flight.memory) == flight_recorder.file_of("/runs/l\udce9", 0)
