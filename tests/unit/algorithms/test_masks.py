"""Which tokens of a response count (row 17)."""

import torch

from rlhf_spmd.algorithms import masks

EOS = 7


def test_mask_and_end():
    responses_BG = torch.tensor([[3, 4, EOS, -1], [3, 4, 5, 6], [EOS, -1, -1, -1], [-1, -1, -1, -1], [1, 2, 3, 8]])
    mask_BG = masks.response_mask(responses_BG)
    assert mask_BG.sum(1).tolist() == [3, 4, 1, 0, 4]
    assert masks.last_index(mask_BG).tolist() == [2, 3, 0, -1, 3]
    assert masks.ended(responses_BG, (EOS, 8)).tolist() == [True, False, True, False, True]
    assert masks.ended(responses_BG, ()).tolist() == [False] * 5
    assert masks.ended(responses_BG[:0], (EOS,)).shape == (0,)
