"""Buffers for rows through host memory are made before the first iteration, and used again."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.execute.post_and_wait import HostBuffers, most_under_way
from rlhf_spmd.strategies import separation
from tests.programs import make_workload

CPU = torch.device("cpu")


def streaming() -> Program:
    workload, cluster = replace(make_workload(num_mini_batches=4), host_bytes=2**20), Cluster.parse("1x2", "a100-80g")
    return compile_program(workload, separation.place(workload, cluster), cluster)


def test_what_the_device_has_not_copied_yet_is_not_overwritten(monkeypatch):
    """And more buffers than needed are not kept."""
    program = streaming()
    rank = program.placement.layouts["actor_train"].ranks[0]
    buffers = HostBuffers(program, rank, CPU)
    num_made = buffers.num_made
    size, num = next(iter(most_under_way(program, rank).items()))
    taken = [buffers.take(size) for _ in range(num)]
    done = []
    for buffer in taken:
        buffers.give_back(buffer, SimpleNamespace(query=lambda: bool(done)))
    late = buffers.take(size)
    assert buffers.num_made == num_made + 1 and all(late is not buffer for buffer in taken)
    buffers.give_back(late)
    done.append(True)
    again = [buffers.take(size) for _ in range(num)]
    assert buffers.num_made == num_made + 1 and {id(one) for one in again} == {id(one) for one in taken}
