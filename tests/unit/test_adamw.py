"""The optimizer's step against torch's own class, bit by bit; the runtime is imported without torch's compiler."""

import subprocess
import sys

import pytest
import torch

from rlhf_spmd.runtime.engines.adamw import AdamW

SETTINGS = dict(betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


def masters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=numbers, dtype=dtype)) for shape in ((7, 3), (5,), (1,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(dtype):
    ours, theirs = masters(dtype), masters(dtype)
    optimizer, expected = AdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    numbers = torch.Generator().manual_seed(1)
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=numbers, dtype=dtype)
            b.grad = a.grad.clone()
        expected.param_groups[0]["lr"] = 0.1 / (step + 1)
        expected.step()
        optimizer.step(lr=0.1 / (step + 1))
        assert optimizer.num_steps == step + 1
        for a, b, moments in zip(ours, theirs, optimizer.moments, strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(value, expected.state[b][kind]) for kind, value in moments.items())


def test_goes_on_after_so_many_steps():
    whole, second = AdamW(masters(torch.float32), **SETTINGS), AdamW(masters(torch.float32), **SETTINGS)
    for optimizer in (whole, second):
        for master in optimizer.masters:
            master.grad = torch.ones_like(master)
    whole.step(lr=0.1)
    second.begin(whole.num_steps)
    with torch.no_grad():
        for place, master in enumerate(second.masters):
            master.copy_(whole.masters[place])
            for kind, value in second.moments[place].items():
                value.copy_(whole.moments[place][kind])
    whole.step(lr=0.1)
    second.step(lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(whole.masters, second.masters, strict=True))


def test_a_rank_starts_without_torchs_compiler():
    code = """if True:
        import sys, torch
        from rlhf_spmd.runtime.run import train
        from rlhf_spmd.runtime.engines.adamw import AdamW
        p = torch.nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        AdamW([p], betas=(0.9, 0.9), eps=1e-5, weight_decay=0.0).step(lr=0.1)
        print([name for name in ("torch._dynamo", "deepspeed", "matplotlib") if name in sys.modules])"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout
    assert found.strip() == "[]"
