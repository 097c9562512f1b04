"""Ranks find out together how they sum: without GPUs by the other way, whatever a single rank finds.

python tests/run_mpi.py 2 4 -- tests/mpi/test_one_shot.py
"""

import pytest
import torch

from rlhf_spmd.kernels import one_shot

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def group(world, make_group, monkeypatch):
    monkeypatch.setattr(one_shot, "_DESCRIPTIONS", {})
    monkeypatch.setenv(one_shot.VARIABLE, "1")
    return make_group(range(world.size))


def test_ranks_without_gpus(world, group):
    one_shot.connect(group)
    assert one_shot.description() == "", "gloo's ranks do not ask"
    one_shot._connect(group)
    assert one_shot.description().startswith("NCCL (") and group.group_name not in one_shot._SHARED
    assert len({*world.allgather(one_shot.description())}) == 1
    assert not one_shot.sum_in_place(torch.ones(8), group)


def test_what_one_rank_lacks_all_ranks_are_told(world, group, monkeypatch):
    if world.rank == 0:
        monkeypatch.delenv(one_shot.VARIABLE)
    one_shot._connect(group)
    assert one_shot.description() == f"NCCL ({one_shot.VARIABLE}=1 is not set)"


def test_an_error_of_one_rank_stops_no_other(world, group, monkeypatch):
    def fails_on_the_last(group):
        assert world.rank < world.size - 1, "no memory\nand a trace"
        return ""

    assert one_shot._agreed(fails_on_the_last, group) == "no memory"
