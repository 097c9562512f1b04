"""Before the first iteration every call launches its kernels, and nothing else is different for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.kernels.decode_attention import choose_parts
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.execute import first_launches
from rlhf_spmd.runtime.execute.first_launches import (
    known_width,
    launch_kernels,
    one_layer_of_each_kind,
    windows_of,
)
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


def test_logits_have_every_width_that_a_run_has(tmp_path, monkeypatch):
    """Two tokens are one chunk, so kernels for chunks of many rows were compiled in an iteration; and the ids that the
    tokenizer lacks were not left out."""
    run, widths = RunOf(load(write_all(tmp_path))), set()
    job = replace(run.job, known=KnownTokens(130))
    config = replace(job.models.model(job.workload.workflow.generate_calls[0]).config, vocab_size=257)
    wide = Transformer(config, head="lm", device="meta")
    assert known_width(job, wide) == 256 and known_width(replace(job, known=KnownTokens(257)), wide) == 257
    monkeypatch.setattr(first_launches, "known_width", lambda job, model: 129)
    monkeypatch.setattr(
        first_launches, "_read", lambda job, call, model: widths.add((model.head, len(_embedding(model))))
    )
    monkeypatch.setattr(first_launches, "_draw", lambda job, call, model: None)
    launch_kernels(job)
    assert {width for head, width in widths if head == "lm"} == {129, 1, 128}


def test_attention_has_every_number_of_parts_that_a_batch_has(tmp_path, monkeypatch):
    """The number is a constant of the kernel, and two tokens have one part."""
    job, launched = RunOf(load(write_all(tmp_path), "generation.max_sequences=200")).job, []
    job = replace(job, program=replace(job.program, workload=replace(job.workload, max_response=900)))
    layer = one_layer_of_each_kind(job.models.model(job.workload.workflow.generate_calls[0]))
    kv_heads, block_size = layer.config.num_kv_heads, first_launches.GPU_BLOCK
    monkeypatch.setattr(first_launches, "processors", lambda device: 132)

    def attend(query, keys, values, tables, lengths, *, window, cap, num_parts):
        assert (
            keys.shape == (1, kv_heads, block_size, layer.config.head_dim)
            and int(lengths) == 1
            and lengths.dtype == torch.int64
        )
        launched.append(num_parts)

    monkeypatch.setattr(first_launches, "decode_attention_triton", attend)
    first_launches.attend_in_parts(job, layer, [None])
    blocks = -(-(job.workload.max_prompt + 900) // block_size)
    needed = {choose_parts(rows * kv_heads, blocks * block_size, 132) for rows in (1, 3, 8, 16, 32, 64, 128, 200, 256)}
    assert needed <= set(launched) and len(launched) == len(set(launched)) and len(needed) > 2


def _embedding(model: Transformer) -> torch.Tensor:
    return next(parameter for name, parameter in model.named_parameters() if "embed" in name)


def test_an_uneven_slice_that_is_no_model_of_its_family_has_the_heads_of_the_whole():
    config = ModelConfig("llama", 63, 32, 49, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4)
    parallel = Parallel(Shard(0, 1, 2, 3), SimpleNamespace(size=lambda: 3))  # three heads
    part = Transformer(config, head="scalar", device="meta", parallel=parallel)
    part.take({name: torch.zeros(one.shape) for name, one in part.named_parameters()})
    assert one_layer_of_each_kind(part).config.num_heads == 8


@pytest.mark.parametrize(
    ("sliding", "stage", "windows"),
    [((), 0, [None]), ((2, 3), 0, [None, 9]), ((2, 3), 1, [None]), ((2, 3), 2, [9]), ((0, 1, 2, 3), 0, [9])],
)
def test_a_pass_has_each_kind_of_layer_that_a_stage_has(sliding, stage, windows, monkeypatch):
    """A model with both had only layers with a window, which was larger than the pass and so made no difference."""
    sizes = {"vocab_size": 63, "hidden_size": 32, "intermediate_size": 49, "num_heads": 4, "num_kv_heads": 2}
    of_layers = {"num_layers": 4, "head_dim": 8, "sliding_window": 9, "sliding_layers": sliding}
    config = ModelConfig("qwen2", **sizes, **of_layers, attention_bias=True)
    shard = Shard(stage - 1, 2) if stage else Shard()
    part = Transformer(config, head="scalar", device="meta", parallel=Parallel(shard, SimpleNamespace(size=lambda: 1)))
    part.take({name: torch.zeros(one.shape) for name, one in part.named_parameters()})
    assert windows_of(part) == windows
    seen, attend = [], Packed.attend

    def spied(self, layer, q, k, v, window, cap):
        seen.append(window)
        return attend(self, layer, q, k, v, window, cap)

    monkeypatch.setattr(Packed, "attend", spied)
    token_11 = torch.zeros(1, 1, dtype=torch.int64)
    forward(one_layer_of_each_kind(part), Sequences.join(token_11, token_11))
    assert seen == [window and 1 for window in windows]
