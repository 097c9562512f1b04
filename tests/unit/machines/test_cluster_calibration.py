"""The share of a device's memory that no program may fill: where it comes from, what it refuses, where it is shown."""

from dataclasses import replace

import pytest

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration, with_reserve
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import RESERVE, Cluster, Node
from rlhf_spmd.plan.cost.memory import peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.proof.memory_check import memory

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
