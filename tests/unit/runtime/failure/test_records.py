"""The record of a rank: what it says, whatever the rank's end, what other ranks see of it, and what beginning an action
costs."""

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.runtime.failure import records
from rlhf_spmd.runtime.failure.records import NOWHERE, NUM_ACTIONS, Position, Positions, Record
from tests.programs import make_workload


def program_of(strategy, num_ranks=4):
    workload, cluster = make_workload(mini_batch=8, num_mini_batches=2), Cluster.parse(f"1x{num_ranks}")
    return compile_program(workload, strategy.place(workload, cluster), cluster)


def test_a_record_says_what_was_begun():
    live = Record.create()
    live.describe(rank=3, size=8, host="a-host")
    live.describe(folder="/somewhere/runs/x", num_instructions=12)
    live.begin("loading")
    live.begin("iteration 2: Run actor_train \u2603" + "x" * 400, 2, 7)
    record = Record.parse(bytes(live))
    assert (record.rank, record.size, record.host, record.num_begun) == (3, 8, "a-host", 2)
    assert (record.run, record.num_instructions) == ("/somewhere/runs/x", 12)
    assert record.where.startswith("iteration 2: Run actor_train \u2603xx")
    assert record.where.endswith("x (instruction 7 of 12)") and record.where == live.where
    first, second = record.last_actions()
    assert (first.text, first.iteration, first.position) == ("loading", NOWHERE, NOWHERE)
    assert first.end_s == second.begin_s and not second.end_s and (second.iteration, second.position) == (2, 7)


@pytest.mark.parametrize("num", [0, 1, NUM_ACTIONS, NUM_ACTIONS + 1, 3 * NUM_ACTIONS + 5])
def test_the_last_actions_stay(num):
    record = Record.create()
    for number in range(num):
        record.begin(str(number), number, number)
    actions = record.last_actions()
    assert [action.text for action in actions] == [str(n) for n in range(max(0, num - NUM_ACTIONS), num)]
    assert [bool(action.end_s) for action in actions] == [True] * (len(actions) - 1) + [False] * bool(num)


def test_the_position_of_a_killed_process_can_be_read(tmp_path):
    record = Record.create()
    if not (child := os.fork()):
        record.describe(folder=str(tmp_path))
        record.begin("iteration 1: Run actor_train", 1, 4)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    record.keep()
    (found,) = records.read_records(tmp_path)
    assert (found.process, found.where) == (child, "iteration 1: Run actor_train (instruction 4)")


def test_what_is_no_record_is_none(tmp_path):
    assert Record.parse(b"") is None and Record.parse(b"x" * ctypes.sizeof(Record)) is None
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank-0000.bin").write_bytes(b"half")
    assert records.read_records(tmp_path) == []


def test_ranks_see_the_positions_of_their_node_and_one_of_them_may_report():
    own = {4: Record.create(), 6: Record.create()}
    for rank, record in own.items():
        record.describe(rank=rank)
    seen = {rank: Record.of_process(os.getpid(), record.descriptor) for rank, record in own.items()}
    assert Record.of_process(os.getpid(), 10_000) is None
    first, second = (Positions(own[rank], seen | {rank: own[rank]}, node=0, num_nodes=1) for rank in own)
    assert [(at.text, at.iteration) for at in first.read((4, 6)).values()] == [("", NOWHERE)] * 2
    own[6].begin("iteration 2 \u2603" + "x" * 2000, 2, 0)
    text = first.read((6,))[6].text
    assert text.startswith("iteration 2 \u2603xxx") and 400 < len(text) < 512
    assert first.reported((6,)) == {}  # its watch has not reported yet
    own[6].begin("iteration 3", 3, 7)
    second.report(active_s=1.0, is_meeting=True)
    position = first.reported((4, 6))[6]
    assert (position.text, position.iteration, position.position) == ("iteration 3", 3, 7)
    assert position.active_s == 1.0 and position.is_meeting and position.process == os.getpid()
    assert first.read((5,)) == {}  # on another node, and there is no store to ask
    assert [first.claim(), second.claim(), first.claim()] == [True, False, False]


def test_positions_of_other_nodes_come_from_the_store():
    stored: dict[str, bytes] = {"at/1": bytes(Position.of("iteration 1", 1, 2))}

    class Store:
        get = staticmethod(stored.__getitem__)
        set = staticmethod(stored.__setitem__)

        def check(self, keys):
            return all(key in stored for key in keys)

    positions = Positions(Record.create(), None, node=0, num_nodes=2)
    positions.store = Store()
    found = positions.read((1, 2))
    assert (found[1].text, found[1].position, found[2].text) == ("iteration 1", 2, "")
    positions.record.begin("here", 5, 6)
    positions.post()
    assert Position.from_buffer_copy(stored["at/0"]).text == "here"


def test_processes_that_are_forked_after_the_import_have_files_of_their_own():
    imports = "import os; from rlhf_spmd.runtime.failure.records import prefix"
    code = f"{imports}; os.fork(); os.write(1, prefix().encode() + b' ')"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(set(names)) == 2
