"""What a rank waits for, as a list beside the flight records."""

import pytest

from rlhf_spmd.plan.program.instructions import Post, Wait
from rlhf_spmd.runtime.diagnosis.diagnose import WaitGraph
from rlhf_spmd.runtime.diagnosis.postmortem import full_text
from rlhf_spmd.runtime.diagnosis.wait_graph import wait_graph_of
from rlhf_spmd.runtime.observe.flight_recorder import Entry
from rlhf_spmd.strategies import flattening, separation
from tests.unit.runtime.observe.test_flight_recorder import program_of


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


@pytest.mark.parametrize("title", ["iteration 12, drawing 13", "drawing iteration 1", "evaluation after iteration 3"])
def test_a_flight_record_names_what_its_iteration_is_called(title):
    """The recorder keeps 40 bytes of a text; the rest comes from the instruction lists."""
    program = program_of(flattening)
    graph = wait_graph_of(program)
    place, whole = next((i, one.text) for i, one in enumerate(graph.of_rank[0]) if len(one.text) > 20)
    entry = Entry(11, place, 0.0, 1.0, f"{title}: {whole}"[:40])
    assert full_text(entry, 0, graph) == f"{title}: {whole}"
    other = entry._replace(text=f"{title}: something else"[:40])
    assert full_text(other, 0, graph) == other.text
