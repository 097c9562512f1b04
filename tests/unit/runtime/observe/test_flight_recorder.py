"""The flight recorder: what a record says, whatever its end, and what beginning an entry costs."""

import mmap
import time

import pytest

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.runtime.observe import flight_recorder
from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE, NUM_ENTRIES, SIZE, Flight, parse
from tests.programs import make_workload


def program_of(strategy, num_ranks=4):
    workload, cluster = make_workload(mini_batch=8, num_mini_batches=2), Cluster.parse(f"1x{num_ranks}")
    return compile_program(workload, strategy.place(workload, cluster), cluster)


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


# Who held up whom


def test_the_run_folder_may_have_any_name():
    """A path is bytes: in another locale, or by another program, they may be no UTF-8."""
    flight = flight_recorder.Flight()
    flight.describe(run="/runs/l\udce9")
    assert flight_recorder.parse(flight.memory).run == "/runs/l\udce9"
    assert flight_recorder.record_path(flight.memory) == flight_recorder.file_of("/runs/l\udce9", 0)
