"""Rotary positions: the angles of a model's config."""

import torch

from rlhf_spmd.kernels.rope import rotate
from rlhf_spmd.model import rope


def test_rope_rotates_by_the_angle():
    positions = torch.tensor([[0, 1, 7]])
    frequencies = torch.tensor([1.0, 0.25], dtype=torch.float64)
    cos, sin = rope.cos_sin(positions, frequencies, 1.0, torch.float64)
    x = torch.randn(1, 3, 1, 4, dtype=torch.float64)
    turned = rotate(x, cos, sin)
    pairs, turned_pairs = torch.complex(x[..., :2], x[..., 2:]), torch.complex(turned[..., :2], turned[..., 2:])
    angle = positions[..., None, None] * frequencies
    torch.testing.assert_close(turned_pairs, pairs * torch.exp(1j * angle))
