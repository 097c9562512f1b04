"""A slice of a model on fake CUDA tensors: what it launches, with sums in one shot and without."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_spmd.kernels import one_shot
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.plan.shard import Shard
from tests.cuda_build.fake_gpu import gpu
from tests.cuda_build.test_launches import decode_launches

RANKS, SUM = 2, "symm_mem::one_shot_all_reduce_out"
torch.library.register_fake(SUM, lambda part, operation, group, out: out)  # which torch 2.13 lacks


@pytest.fixture(scope="module")
def parallel():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield Parallel(Shard(tp=RANKS), group=dist.group.WORLD)
    dist.destroy_process_group()


def test_the_operator_computes_on_gpus():
    assert torch._C._dispatch_has_kernel_for_dispatch_key(SUM, "CUDA")


def test_a_machine_without_gpus_says_so(parallel):
    """What the driver or torch raises becomes the reason."""
    assert one_shot._agreed(one_shot._allocated, parallel.group) != ""


@pytest.mark.parametrize("in_one_shot", [False, True])
@pytest.mark.parametrize(("family", "most"), [("llama", 11), ("qwen2", 11), ("qwen3", 13)])
def test_launches_of_a_decode_layer_of_a_slice(family, most, in_one_shot, parallel, monkeypatch):
    """Those of a whole layer, since q, k and v, like gate and up, are one product in a slice, too; and two sums."""
    if in_one_shot:
        with gpu():
            shared = torch.zeros(one_shot.READ_BYTES // RANKS, dtype=torch.uint8, device="cuda")
        monkeypatch.setitem(one_shot._SHARED, parallel.group.group_name, shared)
    layers = [decode_launches(family, layers, parallel=parallel) for layers in (3, 2)]
    of_layer = layers[0] - layers[1]
    sums = {name: of_layer.pop(name, 0) for name in ("one_shot_all_reduce_out", "allreduce_", "copy_")}
    assert of_layer.total() == most, of_layer
    assert [*sums.values()] == ([2, 0, 2] if in_one_shot else [0, 2, 0])
