"""Rows through host memory or, after a notice, through the world's group: the same bits, with a late and an early peer.

CPU ranks carry out programs for GPUs; their world's group stands for NCCL (gloo, or with `--backend` one of
tests/backends.py).
"""

import dataclasses
import time

import pytest
import torch

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import HOST
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import WORLD, Program
from rlhf_spmd.runtime.execute.post_and_wait import Transfers
from tests.folders import write_all
from tests.mpi.test_invariance import with_groups
from tests.programs import errors
from tests.runs import RunOf, load

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
LATE_S = 0.1
TOO_LARGE, FITS = 0, 2**30  # for host memory
COMPARED = ("tokens_sha256", "score", "actor_loss", "critic_loss", "actor_grad_norm")


@pytest.fixture(scope="module")
def settings(written):
    return load(written(write_all), "iterations=1", "rollout_batch=12", "mini_batch=4")


def streaming(settings, device: str, host_bytes: int) -> Program:
    """Makes a placement in which one rank generates, and the other one trains on what arrives."""
    workload, cluster = make_workload(settings), Cluster.parse("1x2", device)
    workload = dataclasses.replace(workload, host_bytes=host_bytes)
    program = compile_program(workload, load_strategy("separation").place(workload, cluster), cluster)
    assert errors(program) == []
    return program


def bits(program: Program, settings, world, make_group) -> tuple[dict, dict[str, torch.Tensor]]:
    """Returns metrics of an iteration, and the weights of the actor after it."""
    run = RunOf(settings, with_groups(world, program, make_group), program)
    buffers = run.executor.transfers.buffers
    num_made = buffers.num_made
    assert bool(num_made) == any(transfer.communicator == HOST for transfer in program.transfers)
    metrics = run.iteration()
    assert buffers.num_made == num_made, "all were made before the iteration"
    return {name: metrics[name] for name in metrics if name in COMPARED}, run.weights("actor")


@pytest.fixture(scope="module")
def expected(settings, world, make_group):
    """Returns what the program for CPUs computes."""
    program = streaming(settings, "cpu", FITS)
    assert {transfer.communicator for transfer in program.transfers} == {WORLD}
    return bits(program, settings, world, make_group)


@pytest.mark.parametrize("late", ["sender", "receiver"])
@pytest.mark.parametrize("host_bytes", [TOO_LARGE, FITS])
def test_the_same_bits(host_bytes, late, settings, expected, world, make_group, monkeypatch):
    program = streaming(settings, "a100-80g", host_bytes)
    rows = [transfer for transfer in program.transfers if transfer.keys]
    assert {transfer.communicator for transfer in rows} == {HOST if host_bytes else WORLD}
    trains = world.rank in program.placement.layouts["actor_train"].ranks
    post = Transfers.post

    def slow(transfers: Transfers, number: int, data) -> None:
        if trains == (late == "receiver"):
            time.sleep(LATE_S)
        post(transfers, number, data)

    monkeypatch.setattr(Transfers, "post", slow)
    metrics, weights = bits(program, settings, world, make_group)
    assert metrics == expected[0] and len(metrics) > 2
    assert weights.keys() == expected[1].keys() and bool(weights) == trains
    assert all(torch.equal(weights[name], expected[1][name]) for name in weights)
