"""Before the first iteration every call launches its kernels, and nothing else is different for it."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.execute import first_launches
from rlhf_spmd.runtime.execute.first_launches import launch_kernels, one_layer
from tests.folders import write_all
from tests.runs import RunOf, load

READ = ("forward", "generate_rows", "response_logprobs", "response_values", "sequence_scores")


def test_every_call_launches_its_kernels_and_leaves_the_run_alone(tmp_path, monkeypatch):
    seen = set()
    for name in READ:
        function = getattr(first_launches, name)

        def spied(model, *arguments, name=name, function=function, **options):
            seen.add((name, model.head, model.training))
            return function(model, *arguments, **options)

        monkeypatch.setattr(first_launches, name, spied)
    run = RunOf(load(write_all(tmp_path), "generation.top_k=5", "generation.min_new_tokens=1"))
    weights, random_state = run.weights("actor") | run.weights("critic"), torch.get_rng_state()
    launch_kernels(run.job)
    assert {name for name, _, _ in seen} == set(READ)
    expected = {("generate_rows", "lm", False), ("response_logprobs", "lm", True), ("response_values", "scalar", True)}
    assert expected <= seen
    assert torch.equal(torch.get_rng_state(), random_state)
    after = run.weights("actor") | run.weights("critic")
    assert all(torch.equal(one, weights[name]) for name, one in after.items())
    gradients = [p.grad for engine in run.job.models.engines.values() for p in engine.model.parameters()]
    assert not any(gradient.any() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize(("family", "index", "tp"), [("llama", 1, 2), ("llama", 0, 4), ("qwen2", 2, 3)])
def test_a_layer_has_the_sizes_of_a_slice(family, index, tp):
    sizes = {"vocab_size": 63, "hidden_size": 32, "intermediate_size": 49, "num_heads": 8, "num_kv_heads": 4}
    config = ModelConfig(family, **sizes, num_layers=3, head_dim=8, attention_bias=family == "qwen2")
    parallel = Parallel(Shard(1, 2, index, tp), SimpleNamespace(size=lambda: tp))
    part = Transformer(config, head="lm", device="meta", parallel=parallel)
    part.take({name: torch.zeros(one.shape) for name, one in part.named_parameters()})
    expected = {name: one.shape for name, one in next(iter(part.layers.values())).named_parameters()}
    assert {name: one.shape for name, one in one_layer(part).layers["0"].named_parameters()} == expected


def test_an_uneven_slice_that_is_no_model_of_its_family_has_the_heads_of_the_whole():
    config = ModelConfig("llama", 63, 32, 49, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4)
    parallel = Parallel(Shard(0, 1, 2, 3), SimpleNamespace(size=lambda: 3))  # three heads
    part = Transformer(config, head="scalar", device="meta", parallel=parallel)
    part.take({name: torch.zeros(one.shape) for name, one in part.named_parameters()})
    assert one_layer(part).config.num_heads == 8
