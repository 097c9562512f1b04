"""The share of a device's memory that no program may fill: where it comes from, what it refuses, where it is shown."""

from dataclasses import replace

import pytest

from rlhf_spmd.command_line.fitting_strategies import missing_bytes
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration, with_reserve
from rlhf_spmd.machines.cluster_file import read_cluster
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import RESERVE, Cluster, Node
from rlhf_spmd.plan.cost.memory import num_params, offloaded_bytes, peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.text.program_listing import format_bytes, memory_table

A100 = Cluster.parse("2x8", "a100-80g")


def reserving(share: float | None):
    """Returns the calibration of an A100 that reserves a share."""
    known = load_calibration("a100-80g")
    return replace(known, devices={"a100-80g": replace(known.devices["a100-80g"], reserve=share)})


@pytest.mark.parametrize(
    ("option", "calibrated", "expected"),
    [(None, None, 0.06), (None, 0.1, 0.1), (None, 0.01, 0.06), (0.02, 0.1, 0.02), (0.0, None, 0.0), (0.2, 0.1, 0.2)],
)
def test_an_option_counts_more_than_the_calibration(option, calibrated, expected):
    cluster = with_reserve(A100, option, reserving(calibrated))
    assert {node.reserve for node in cluster.nodes} == {expected}
    assert cluster.usable_bytes(3) == int(80 * 2**30 * (1 - expected)) and cluster.device_bytes(3) == 80 * 2**30


def test_without_a_calibration_and_without_a_limit():
    assert with_reserve(A100, None, None) == A100 and A100.nodes[0].reserve == RESERVE
    assert with_reserve(Cluster.parse("1x2"), 0.5, None).usable_bytes(0) is None


def test_what_fills_a_device_is_refused():
    """Exactly the bytes of the device: it has room only without a reserve. The program is the same."""
    workload, strategy = make_workload(load("tiny")), load_strategy("flattening")
    program = strategy.compile(workload, Cluster.parse("1x2"), {})
    need = peak_bytes(static_bytes(program, 0), working_bytes(program, 0))
    full = strategy.compile(workload, Cluster((Node(2, "cpu", need, 0.0),)), {})
    refused = strategy.compile(workload, Cluster((Node(2, "cpu", need),)), {})
    assert memory(full) == [] and full.fingerprint == refused.fingerprint
    assert "reserved" in memory(refused)[0].message


OFFLOADS = {"offload": True, "offload_optimizer": True}


@pytest.mark.parametrize("zero", [0, 1])
def test_what_is_offloaded_needs_memory_of_the_host(zero):
    """By each of a node's 8 ranks, two moments of each weight that trains, unless ZeRO shards them, and frozen weights.
    It is stated, and refused where the host is known to be small."""
    workload, strategy = make_workload(load("tiny")), load_strategy("flattening")
    program = strategy.compile(workload, A100, OFFLOADS | {"zero": zero})
    numbers = {name: num_params(shape, Shard()) for name, shape in workload.models.items()}
    states = 8 * (numbers["actor"] + numbers["critic"]) * 8 // (16 if zero else 1)
    need = states + 8 * 4 * (numbers["reference"] + numbers["reward"])
    assert offloaded_bytes(program, 0) == pytest.approx(need, rel=1e-3)
    assert f"takes up to {format_bytes(offloaded_bytes(program, 0))} of a host's memory" in memory_table(program)
    assert memory(program) == []
    ranks = [offloaded_bytes(program, 0)] * 15 + [offloaded_bytes(program, 1) - 1]
    small = replace(program, cluster=A100.with_hosts(ranks))
    (found,) = memory(small)
    assert found.severity == "error" and "node 1 offloads" in found.message and missing_bytes(small) == 1
    assert program.fingerprint == small.fingerprint
    assert "offloaded" not in memory_table(strategy.compile(workload, A100, {}))


def test_the_memory_of_hosts_from_a_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('[[nodes]]\ndevices = 2\ndevice = "cpu"\nhost_gib = 0.5\n[[nodes]]\ndevices = 1\ndevice = "cpu"\n')
    cluster = read_cluster(str(path))
    assert [node.host_bytes for node in cluster.nodes] == [2**29, None]
    assert [node.host_bytes for node in cluster.with_hosts([7.0, 9.5, 8.5]).nodes] == [2**29, 8]
