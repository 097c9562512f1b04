"""Models with adapters on one rank: their memory, and the whole model that a run saves."""

import pytest
import torch
from safetensors.torch import load_file

from rlhf_spmd.runtime.weights.weight_sync import merged, whole_state
from tests.folders import write_all
from tests.runs import RunOf, load

WORDS = ["rollout_batch=8", "mini_batch=4", "ppo.epochs=1", "generation.max_new_tokens=4", "lora.rank=4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_bases_that_models_have_in_common(root, dtype):
    run = RunOf(load(write_all(root), *WORDS, f"dtype={dtype}"))
    models, wide = run.job.models, getattr(torch, dtype)
    copies = {name: dict(copy.named_parameters()) for (name, _), copy in models.copies.items()}
    engines = {name: dict(engine.model.named_parameters()) for name, engine in models.engines.items()}
    for name, base in (("reference", "actor"), ("reward", "critic")):
        for key, one in copies[name].items():
            assert one.dtype == wide
            assert (engines[base][key].data_ptr() == one.data_ptr()) == (key != "score.weight"), key
    before = {key: one.clone() for key, one in copies["reference"].items()}
    run.iteration()
    assert all(torch.equal(before[key], one) for key, one in copies["reference"].items())
    for train in run.program.workload.workflow.train_calls:
        state = whole_state(models, train)
        assert {one.dtype for one in state.values()} == {torch.float32}
        assert any(one.any() for key, one in state.items() if key.endswith("lora_B"))
        found, folder = merged(models, train.model, state), models.folders[train.model]
        stored = {key.removeprefix("model."): one for key, one in load_file(folder / "model.safetensors").items()}
        for key, one in stored.items():
            layer, scale = key.removesuffix(".weight"), 32 / 4
            wanted = one.float()
            if f"{layer}.lora_A" in state:
                wanted = wanted + scale * state[f"{layer}.lora_B"] @ state[f"{layer}.lora_A"]
            if key == "score.weight":
                wanted = state[key]
            torch.testing.assert_close(found[key], wanted, rtol=1e-6, atol=1e-6)
