"""What DeepSpeed is told."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.deepspeed_engine import _config


@pytest.mark.parametrize(("zero", "is_cuda", "overlaps"), [(3, True, True), (3, False, False), (2, True, False)])
def test_stage_3_gathers_beside_computation_on_gpus(zero, is_cuda, overlaps):
    weights = [SimpleNamespace(numel=lambda: 6, is_cuda=is_cuda)]
    found = _config(weights, EngineOptions(zero, torch.bfloat16))["zero_optimization"]
    assert (found["stage"], found["overlap_comm"]) == (zero, overlaps)
