"""The network interface of torch.distributed."""

import pytest
from torch import distributed

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.world import groups
from rlhf_spmd.runtime.world.devices import RankDevice


def test_the_interface_is_the_users_choice_or_real(monkeypatch):
    monkeypatch.setattr(
        groups, "interface_addresses", lambda: {"lo": "127.0.0.1", "eth0": "192.0.2.7", "ib0": "198.51.100.7"}
    )
    monkeypatch.delenv(groups.INTERFACE_OPTION, raising=False)
    assert groups.choose_interface([]) == ("eth0", "192.0.2.7")
    assert groups.choose_interface(["127.0.0.1"]) == ("eth0", "192.0.2.7")  # a route by loopback leads nowhere
    monkeypatch.setenv(groups.INTERFACE_OPTION, "ib0")
    assert groups.choose_interface([]) == ("ib0", "198.51.100.7")
    monkeypatch.setenv(groups.INTERFACE_OPTION, "ib1")
    with pytest.raises(UserError, match="RLHF_SPMD_INTERFACE=ib1.*eth0, ib0, lo"):
        groups.choose_interface([])
    monkeypatch.delenv(groups.INTERFACE_OPTION)
    monkeypatch.setattr(groups, "interface_addresses", lambda: {"lo": "127.0.0.1"})
    with pytest.raises(UserError, match="no network interface"):
        groups.choose_interface([])


def test_a_group_of_gloo_beside_nccl_has_all_ranks(monkeypatch):
    """The others would wait for ever: torch lets them split NCCL's communicator, in which its members take no part."""
    made = []
    monkeypatch.setattr(distributed, "init_process_group", lambda **options: None)
    monkeypatch.setattr(distributed, "new_group", lambda ranks, timeout, backend: made.append((ranks, backend)))
    options = {"store": None, "rank": 0, "size": 3, "device": RankDevice("cuda", 0, 1, 3), "timeout_s": 1.0}
    monkeypatch.setenv(groups.HEARTBEAT, "480")
    groups.make_groups({"ranks 0-1": (0, 1), "host 0-2": (0, 1, 2)}, **options)
    assert made == [([0, 1], None), ([0, 1, 2], "gloo")]
    with pytest.raises(AssertionError, match="lacks ranks"):
        groups.make_groups({"host 0-1": (0, 1)}, **options)


def test_this_machines_interfaces():
    assert groups.interface_addresses().get("lo") == "127.0.0.1"
    assert groups.network_stack() == groups.network_stack()
