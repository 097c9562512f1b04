"""What a rank waits for, as a list beside the flight records."""

import pytest

from rlhf_spmd.plan.program.instructions import Post, Wait
from rlhf_spmd.runtime.diagnosis.diagnose import WaitGraph
from rlhf_spmd.runtime.diagnosis.wait_graph import wait_graph_of
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
