"""The optimizer's states in host memory: large parts, so that copies overlap with updates.

Where there is no GPU these tests run on the CPU, so that they are at least known to run.
"""

import pytest
import torch

from rlhf_spmd.runtime.engines.adamw import AdamW
from rlhf_spmd.runtime.engines.host_memory import host_zeros, visits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUMEL = 1 << 24 if DEVICE.type == "cuda" else 1 << 12


class Owner:
    """What pinned memory belongs to."""


def test_each_part_comes_and_goes():
    owner, sizes = Owner(), [NUMEL, NUMEL, NUMEL // 2, 3, NUMEL]
    parts = [host_zeros(owner, 2 * size, torch.float32, DEVICE).split(size) for size in sizes]
    for number, (first, second) in enumerate(parts):
        first.fill_(number)
        second.fill_(10 * number)
    for _ in range(2):
        for first, second in visits(parts, DEVICE):
            assert first.device.type == DEVICE.type
            first.add_(second).mul_(second.add_(1))
    if DEVICE.type == "cuda":
        torch.cuda.current_stream().synchronize()
    for number, (first, second) in enumerate(parts):
        once = 11 * number * (10 * number + 1)
        assert (first == (once + 10 * number + 1) * (10 * number + 2)).all() and (second == 10 * number + 2).all()


@pytest.mark.parametrize("wide", [True, False])
def test_steps_have_the_bits_of_states_on_the_device(wide):
    numbers, sizes = torch.Generator().manual_seed(0), [NUMEL, 5, NUMEL // 3]
    drawn = [torch.randn(size, generator=numbers) for size in sizes]
    found = []
    for offload in (False, True):
        owner = Owner()
        weights = [one.to(DEVICE, torch.bfloat16 if wide else torch.float32, copy=True) for one in drawn]
        masters = weights
        if wide and offload:
            whole = host_zeros(owner, sum(sizes), torch.float32, DEVICE).split(sizes)
            masters = [one.copy_(weight) for one, weight in zip(whole, weights, strict=True)]
        elif wide:
            masters = [one.float() for one in weights]
        optimizer = AdamW(
            masters,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            bare=[(0, slice(3, 9))],
            weights=weights if wide else (),
            device=DEVICE if offload else None,
        )
        for step in range(3):
            optimizer.step([one.to(DEVICE) * (step - 0.5) for one in drawn], lr=1e-2)
        if DEVICE.type == "cuda":
            torch.cuda.current_stream().synchronize()
        states = [value.cpu() for state in optimizer.states for value in state.values()]
        found.append([*(one.cpu() for one in weights), *states])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
