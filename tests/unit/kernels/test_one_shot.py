"""Sums in one shot: which messages and ranks take part, the order of the sum, and torch's operators that it calls."""

import pytest
import torch

from rlhf_spmd.kernels import one_shot

BYTES = 2**20


@pytest.mark.parametrize(
    ("x", "takes"),
    [
        (torch.zeros(8, 4), True),
        (torch.zeros(8, 4, dtype=torch.bfloat16), True),
        (torch.zeros(BYTES // 4), True),
        (torch.zeros(BYTES // 4 + 4), False),
        (torch.zeros(0), False),
        (torch.zeros(8, 3, dtype=torch.bfloat16)[:1], False),  # 6 bytes
        (torch.zeros(9)[1:], False),  # begins at 4 bytes
        (torch.zeros(12)[4:], True),
        (torch.zeros(8, 8)[:, :4], False),  # has gaps
        (torch.zeros(8, 4, dtype=torch.float64), False),
    ],
)
def test_messages_that_the_kernel_takes(x, takes):
    assert one_shot.fits(x, BYTES) == takes


@pytest.mark.parametrize(
    ("places", "links", "why"),
    [
        ([("a", 0), ("a", 1)], [[0, 4], [4, 0]], ""),
        ([("a", 2), ("a", 0)], [[0, 0, 1], [0, 0, 0], [1, 0, 0]], ""),
        ([("a", 0), ("b", 1)], [[0, 4], [4, 0]], "several hosts"),
        ([("a", 0), ("a", 0)], [[0]], "one GPU alone"),
        ([("a", 0), ("a", 1), ("a", 2)], [[0, 1, 1], [1, 0, 0], [1, 0, 0]], one_shot.NO_LINKS),
    ],
)
def test_ranks_that_can_read_each_other(places, links, why):
    found = one_shot.lack(places, links)
    assert why in found and bool(why) == bool(found)


def test_the_order_of_the_sum():
    """Rounds to bfloat16 after each rank: 256 + 1 is 256, and 1 + 1 + 256 is 258."""
    parts = torch.tensor([[256.0, 1.0], [1.0, 1.0], [1.0, 256.0]], dtype=torch.bfloat16)
    assert one_shot.in_order(parts).tolist() == [256.0, 258.0]


def test_a_tensor_on_a_cpu_is_not_summed():
    class Group:
        group_name = "any"

    assert not one_shot.sum_in_place(torch.zeros(4), Group())


def test_torch_has_what_is_called():
    schema = torch._C._get_schema("symm_mem::one_shot_all_reduce_out", "")
    arguments = [(one.name, str(one.type), one.alias_info is not None) for one in schema.arguments]
    assert arguments == [
        ("input", "Tensor", False),
        ("reduce_op", "str", False),
        ("group_name", "str", False),
        ("out", "Tensor", True),
    ]
    memory = torch._C._distributed_c10d._SymmetricMemory
    assert "group_name: str | None" in memory.empty_strided_p2p.__doc__.replace("Optional[str]", "str | None")
    assert "group_name: str | None" in memory.rendezvous.__doc__.replace("Optional[str]", "str | None")
