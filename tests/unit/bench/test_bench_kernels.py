"""The bench of the kernels runs: every case, also those for a GPU, at a small size; and its promises can break."""

import pytest
import torch

from bench.speed import kernel_cases as cases
from bench.speed.kernels import measure

CPU = torch.device("cpu")
HEADS = (4, 2, 16)
CEILINGS = {"memory_bytes_per_s": 1e10, "matrix_flops_per_s": {"float32": 1e11, "bfloat16": 1e11}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: cases.projection(CPU, 6, 1000, 16, torch.float32),
        lambda: cases.attending(CPU, 2, 40, HEADS, torch.bfloat16, block_size=16, spread=True),
        lambda: cases.normalising(CPU, 4, 64, torch.bfloat16),
        lambda: cases.turning(CPU, 4, HEADS, torch.bfloat16),
        lambda: cases.gating(CPU, 4, 64, torch.bfloat16),
        lambda: cases.writing(CPU, 4, HEADS, torch.bfloat16),
        lambda: cases.prefilling(CPU, [3, 9, 4], HEADS, torch.float32),
    ],
)
def test_every_case_is_measured(make):
    row = measure(make(), CPU, CEILINGS)
    assert row["ours_s"] > 0 and all(ratio > 0 for ratio in row["times_faster"].values()) and row["times_faster"]
