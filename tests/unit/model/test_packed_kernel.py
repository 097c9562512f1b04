"""torch's kernel for packed sequences, by a stand-in: what it is called with, whatever its version takes."""

import pytest
import torch

from rlhf_spmd.model import attention
from rlhf_spmd.model.attention import Packed

LENGTHS = (5, 1, 9)


def one_by_one(q, k, v, cuts_q, cuts_k, longest_q, longest_k, *, window_size, enable_gqa=False):
    """Sequence by sequence, as the kernel is documented: heads of keys are repeated only if it is told so."""
    assert torch.equal(cuts_q, cuts_k) and longest_q == longest_k == max(LENGTHS) and window_size[1] == 0
    assert enable_gqa or q.shape[1] == k.shape[1]
    out = []
    for start, end in zip(cuts_q[:-1].tolist(), cuts_q[1:].tolist(), strict=True):
        parts = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        window = None if window_size[0] < 0 else window_size[0] + 1
        out.append(attention.attend(*parts, window)[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("options", [{"window_size", "enable_gqa"}, {"window_size"}], ids=["torch 2.13", "torch 2.11"])
def test_every_version_of_the_kernel_gets_what_it_takes(options, num_kv_heads, window, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8) for heads in (6, num_kv_heads, num_kv_heads))
    packed = Packed(LENGTHS)
    expected = packed.attend(0, q, k, v, window)

    def kernel(*tensors, **given):
        assert given.keys() <= options
        return one_by_one(*tensors, **given)

    monkeypatch.setattr(attention, "has_packed_kernel", lambda q: True)
    monkeypatch.setattr(attention, "_varlen_attn", lambda: (kernel, frozenset(options)))
    torch.testing.assert_close(packed.attend(0, q, k, v, window), expected)
