"""Whether a program fits the devices, against closed forms."""

import random
from dataclasses import replace

import pytest
import torch

from rlhf_spmd.config.options import make_workload as workload_of
from rlhf_spmd.config.presets import load
from rlhf_spmd.kernels import triton_import
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import (
    activation_bytes,
    cache_bytes,
    caches_alive,
    call_bytes,
    layer_numbers,
    loaded_bytes,
    logits_bytes,
    most_alive_bytes,
    most_rows_bytes,
    peak_bytes,
    rows_bytes,
    sequence_bytes,
    static_bytes,
    trains_beside_cache,
    working_bytes,
)
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.norms import num_norms
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Load, Offload, Program, Run
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.strategies import flattening as flattening_strategy
from rlhf_spmd.strategies import separation
from tests.programs import errors, make_workload, random_program


def flattening(preset: str, layout: str, zero: int = 0) -> Program:
    config = load(preset)
    cluster = Cluster.parse(layout, config.device_type)
    trained, frozen = (Layout.data_parallel(cluster.ranks, zero=stage) for stage in (zero, 0))
    workload = workload_of(config)
    placement = Placement.by_model(workload, actor=trained, critic=trained, reference=frozen, reward=frozen)
    return compile_program(workload, placement, cluster)


def test_65b_fits_8x8_where_inference_gathers_layer_by_layer():
    """A rank holds its slice for generation, its shards, and in inference a layer, the embedding and hidden states."""
    config = load("llama-65b", ["strategy.zero=3", "strategy.tp=8", "strategy.recompute=true"])
    workload, cluster = workload_of(config), Cluster.parse("8x8", config.device_type)
    placement = flattening_strategy.place(workload, cluster, zero=3, tp=8, recompute=True)
    program = compile_program(workload, placement, cluster)
    assert errors(program) == []
    call = workload.workflow.call("critic_infer")
    layer, tokens = 4 * 8192**2 + 3 * 8192 * 22016 + 2 * 8192, 512 // 64 * 512
    besides = 32000 * 8192 + 8192 + 8192  # embedding, final norm, scalar head
    assert call_bytes(program, call, 0) == {"gathered": 2 * (layer + besides + tokens * 8192)}
    frozen = call_bytes(program, workload.workflow.call("reference_infer"), 0)["gathered"]
    besides, tokens = 2 * 32000 * 8192 // 8 + 8192, 512 // 8 * 512
    layer = (layer - 2 * 8192) // 8 + 2 * 8192  # norms are whole in each slice
    assert frozen == 2 * (layer + besides + tokens * 8192 // 8)


def test_logits_are_counted_by_the_chunk():
    """Logits and gradients of few tokens whole; of many, one chunk and the float32 sums of the hidden states'."""
    assert logits_bytes(96, 49152, 576, 2) == 2 * 2 * 96 * 49152
    assert logits_bytes(4096, 49152, 576, 4) == 4096 * (4 * 2048 + 4 * 576)
    assert logits_bytes(8192, 128_256, 4096, 2) == 8192 * (2 * 5376 + 4 * 4096)
    config = load("llama-7b")
    workload = replace(workload_of(config), micro_batch=16)  # 16 x 256 response tokens
    call = workload.workflow.train_call("actor")
    found = []
    for vocab_size in (16000, 32000):
        actor = replace(workload.models["actor"], vocab_size=vocab_size)
        wide = replace(workload, models={**workload.models, "actor": actor})
        found.append(activation_bytes(wide, call, Layout.data_parallel(range(8)), 0))
    assert found[0] == found[1] > logits_bytes(4096, 32000, 4096, 2) == 4096 * (2 * 2048 + 4 * 4096)


@pytest.mark.parametrize("stream", [True, False])
def test_caches_that_are_alive_at_the_same_time_add_up(stream):
    """While streaming, ReMax has two of them, and the plan counted the larger one."""
    workload = workload_of(load("tiny", algorithm="remax"))
    cluster = Cluster.parse("1x4")
    program = compile_program(workload, separation.place(workload, cluster, stream=stream), cluster)
    rank, layouts = program.cluster.ranks[-1], program.placement.layouts
    sizes = [cache_bytes(workload, call, layouts[call.name], rank) for call in workload.workflow.generate_calls]
    assert len(sizes) == 2 and all(sizes)
    assert working_bytes(program, rank)["KV cache"] == (sum(sizes) if stream else max(sizes))
    assert {len(together) for together in caches_alive(program, rank).values()} == {2 if stream else 1}
    call = workload.workflow.generate_calls[0]
    one = sequence_bytes(workload, call, layouts[call.name], rank)
    assert most_alive_bytes(program, rank, sequence_bytes) == (2 * one if stream else one)


@pytest.mark.parametrize("ahead", [0, 1])
def test_rows_are_those_that_a_rank_holds_and_one_ahead_two_batches_of_what_is_drawn(ahead):
    workload, cluster = make_workload(mini_batch=8, num_mini_batches=3), Cluster.parse("1x8")
    program = compile_program(workload, separation.place(workload, cluster, ahead=ahead), cluster)
    trained = set(workload.workflow.call("estimate_advantages").outputs)
    drawn = {key for call in workload.workflow.calls for key in (*call.inputs, *call.outputs)} - trained
    for rank in cluster.ranks:
        held = program.held(rank)
        batches = {key: 1 + ahead * (key in drawn) for key in held}
        rows = {key: 3 * sum(map(len, ranges)) * batches[key] for key, ranges in held.items()}
        assert rows_bytes(program, rank) == sum(num * workload.row_bytes(key) for key, num in rows.items())
        assert 0 < rows_bytes(program, rank) == working_bytes(program, rank)["rows"] <= most_rows_bytes(workload, ahead)
        without = working_bytes(program, rank) | {"rows": 0}
        need = peak_bytes(static_bytes(program, rank), working_bytes(program, rank))
        assert need - peak_bytes(static_bytes(program, rank), without) == rows_bytes(program, rank)


KEPT = {  # hidden, intermediate, heads, key-value heads, head_dim, vocabulary
    "as many key-value heads": ModelShape(3, 64, 176, 4, 4, 16, 256),
    "grouped, with biases": ModelShape(4, 96, 256, 6, 2, 16, 320, qkv_bias=True),
    "tied, few tokens": ModelShape(3, 80, 208, 5, 1, 32, 64, tied=True),
    "norms after blocks": ModelShape(2, 96, 256, 6, 2, 16, 64, norms="after"),
    "norms before and after": ModelShape(2, 96, 256, 6, 2, 16, 64, norms="both"),
    "without a gate": ModelShape(
        2, 96, 384, 6, 6, 16, 64, layer_norm=True, plain_mlp=True, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "wide, with norms of q and k": ModelShape(2, 128, 1024, 4, 2, 32, 128, qk_norm=True),
}
SOME = Adapters(3, 6.0, ("v_proj", "o_proj", "up_proj"))


@pytest.mark.parametrize("adapters", [None, Adapters(4, 8.0), SOME], ids=["full", "all", "some"])
@pytest.mark.parametrize("which", [*KEPT, "critic"])
def test_activations_are_what_a_forward_pass_keeps(which, adapters):
    """Each storage that autograd saves once, without parameters and the batch; recomputation also has a layer at a
    time. On a CPU an RMSNorm whose weight trains keeps its rows before the product with it, too."""
    name, critic = ("tied, few tokens", True) if which == "critic" else (which, False)
    shape = replace(KEPT[name], scalar_head=critic, adapters=adapters)
    rows, prompt, response = 4, 6, 14
    workload = replace(make_workload(shape=shape), param_bytes=4, max_prompt=prompt, max_response=response)
    call = workload.workflow.train_call("critic" if critic else "actor")
    workload = replace(workload, models={**workload.models, call.model: shape})
    sizes = (rows, prompt, response)
    whole, deeper = (kept_bytes_of(replace(shape, num_layers=shape.num_layers + more), *sizes) for more in (0, 1))
    at_norms = 0 if shape.layer_norm else shape.hidden_size
    wide = num_norms(shape.norms) * at_norms + shape.qk_norm * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    for recompute, found in (
        (False, whole),
        (True, kept_bytes_of(shape, *sizes, recompute=True) + deeper - whole),
    ):
        layout = Layout.data_parallel(range(1), micro_batch=rows, recompute=recompute)
        counted = activation_bytes(workload, call, layout, 0)
        if not critic:  # the gradient of logits is no part of the forward pass
            counted -= 4 * rows * response * shape.vocab_size
        if adapters is None:
            layers = 1 if recompute else shape.num_layers
            counted += 4 * rows * (prompt + response) * (layers * wide + at_norms)
        assert found == pytest.approx(counted, rel=0.03), recompute


@pytest.mark.parametrize(
    ("which", "adapters"),
    [
        ("wide, with norms of q and k", None),
        ("grouped, with biases", SOME),
        ("norms before and after", None),
        ("norms after blocks", SOME),
        pytest.param("as many key-value heads", None, marks=pytest.mark.slow),
    ],
)
def test_kernels_keep_what_is_counted(which, adapters, monkeypatch):
    """A layer more, by the kernels of a GPU, which Triton's interpreter runs."""
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu",))
    shape = replace(KEPT[which], adapters=adapters)
    deeper = kept_bytes_of(replace(shape, num_layers=2), 1, 3, 5) - kept_bytes_of(replace(shape, num_layers=1), 1, 3, 5)
    assert deeper == pytest.approx(4 * 8 * layer_numbers(shape, 1, 0), rel=0.03)


def kept_bytes_of(shape: ModelShape, rows: int, prompt: int, response: int, *, recompute: bool = False) -> int:
    """Returns the bytes that autograd saves of the forward pass of a model."""
    sizes = {name: getattr(shape, name) for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads")}
    sizes |= {name: getattr(shape, name) for name in ("num_kv_heads", "head_dim", "vocab_size", "qk_norm", "norms")}
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    sizes |= {"attention_bias": shape.qkv_bias, "tie_embeddings": shape.tied, "mlp_bias": shape.mlp_bias}
    if shape.plain_mlp:
        family, sizes = "gpt_neox", sizes | {"layer_norm": True, "plain_mlp": True, "activation": "gelu"}
    config = ModelConfig(model_type=family, **sizes)
    head = "scalar" if shape.scalar_head else "lm"
    model, kept = Transformer(config, head=head, adapters=shape.adapters, recompute=recompute), dict[int, int]()
    for name, one in model.named_parameters():
        one.requires_grad_(name in model.trained_names())
    batch = Sequences.join(*(torch.ones(rows, num, dtype=torch.int32) for num in (prompt, response)))
    weights, alive = {one.untyped_storage().data_ptr() for one in model.parameters()}, []

    def noted(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        alive.append(one)  # or another would lie at its place
        return one

    with torch.autograd.graph.saved_tensors_hooks(noted, noted):
        output = forward(model, batch)
        if head == "lm":
            response_logprobs(model, batch, output, temperature=1.0, eos_ids=(), min_new_tokens=0)
        else:
            model.scalar(output)
    of_batch = [one for one in alive if not one.dtype.is_floating_point]
    left_out = weights | {one.untyped_storage().data_ptr() for one in of_batch}
    return sum(num_bytes for at, num_bytes in kept.items() if at not in left_out)


# ---- what is in memory at the same time ------------------------------------------------------------------------------


def test_a_cache_that_is_alive_while_a_model_trains_counts_beside_it():
    """While streaming, a rank may train the critic between two mini-batches of generation. Only the larger counted."""
    found = set()
    for seed in range(90, 160):
        program = random_program(random.Random(seed).choice)
        kinds = {call.name: call.kind for call in program.workload.workflow.calls}
        for rank, steps in enumerate(program.instructions):
            alive, is_beside = set(), False
            last = {step.call: place for place, step in enumerate(steps) if isinstance(step, Run)}
            for place, step in enumerate(steps):  # a slow twin
                if isinstance(step, Run) and kinds[step.call] == "generate":
                    (alive.add if place < last[step.call] else alive.discard)(step.call)
                is_beside |= isinstance(step, Run) and kinds[step.call] == "train" and bool(alive)
            assert trains_beside_cache(program, rank) == is_beside, (seed, rank)
            found.add(is_beside)
            static, working = static_bytes(program, rank), working_bytes(program, rank)
            training = working["activations"] + working["gradients"]
            caches = working["KV cache"] + working["copies with adapters"]
            rest = sum(static.values()) - static["offloaded"]
            rest += working["gathered"] + working["buckets"] + working["rows"]
            most = training + caches if is_beside else max(training, caches)
            assert peak_bytes(static, working) == rest + most
    assert found == {True, False}


@pytest.mark.parametrize("together", [True, False])
def test_models_from_host_memory_count_together_where_they_are_there_together(together):
    workload, cluster = workload_of(load("llama-7b")), Cluster.parse("1x1", "a100-80g")
    program = compile_program(workload, flattening_strategy.place(workload, cluster, offload=True), cluster)
    run = next(step for step in program.instructions[0] if isinstance(step, Run))
    names = ("reference", "reward")
    one_by_one = [step for name in names for step in (Load(name), run, Offload(name))]
    overlapping = [*map(Load, names), run, *map(Offload, names)]
    program = replace(program, instructions=(tuple(overlapping if together else one_by_one),))
    sizes = [2 * workload.models[name].num_params for name in names]
    assert loaded_bytes(program, 0) == pytest.approx(sum(sizes) if together else max(sizes), rel=0.01)


def test_states_in_host_memory_leave_parts_of_an_update_on_the_device():
    """12 bytes of each weight are elsewhere; two parts of a bucket, of a rank's share of it, come and go."""
    workload, cluster = workload_of(load("llama-7b")), Cluster.parse("1x2", "a100-80g")
    for zero in (0, 1, 2):
        programs = [
            compile_program(
                workload, flattening_strategy.place(workload, cluster, zero=zero, offload_optimizer=away), cluster
            )
            for away in (False, True)
        ]
        (kept, gone), (without, with_parts) = (
            [count(program, 0) for program in programs] for count in (static_bytes, working_bytes)
        )
        assert gone["optimizer"] == 0 and gone["offloaded"] == kept["optimizer"] > 0
        assert with_parts["gradients"] - without["gradients"] == 2 * 12 * 2**24 // 2
