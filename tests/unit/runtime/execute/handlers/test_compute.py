"""A function of groups and episodes of several rows."""

import pytest
import torch

from rlhf_spmd.algorithms.group_advantages import leave_one_out_advantages
from rlhf_spmd.runtime.execute.handlers.compute import joined_rows


def test_a_function_of_groups_sees_the_rows_of_an_episode_joined():
    """A divergence from the reference is that of all rows of an episode, blank ones aside."""
    samples, each, generator = 3, 2, torch.Generator().manual_seed(0)
    shape = (2 * samples * each, 5)
    logprobs_BG, ref_BG = torch.randn(2, *shape, generator=generator)
    mask_BG = torch.rand(shape, generator=generator) < 0.6
    mask_BG[5] = False  # a blank row
    scores_B = torch.randn(len(mask_BG) // each, generator=generator).repeat_interleave(each)
    worth = [
        float(scores_B[row]) - 0.5 * float((logprobs_BG - ref_BG)[row : row + each][mask_BG[row : row + each]].sum())
        for row in range(0, len(mask_BG), each)
    ]
    wanted = [
        each_worth
        - sum(other for j, other in enumerate(worth) if j != i and j // samples == i // samples) / (samples - 1)
        for i, each_worth in enumerate(worth)
    ]
    given = [joined_rows(rows, each).unflatten(0, (-1, samples)) for rows in (scores_B, mask_BG, logprobs_BG, ref_BG)]
    advantages_NS, _ = leave_one_out_advantages(*given, kl_coef=0.5)
    assert advantages_NS.flatten().tolist() == pytest.approx(wanted, rel=1e-5)
