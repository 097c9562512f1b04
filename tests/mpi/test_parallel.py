"""Shards of a model on several ranks against the whole model on one: outputs, every gradient, and what they draw.

python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_parallel.py
"""

# B sequences, P prompt tokens, G response tokens, K kept tokens

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels import products, token_logprobs
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model import linear
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.parallel import WHOLE, Parallel, is_split, slice_of
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs, response_values, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import make_engine
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tests.draws import random_responses
from tests.steps import engine_step
from tests.trainee import whole_weights

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.slow_at(2)]  # 4 ranks make slices in stages

VOCAB, MAX_RESPONSE, EOS = 37, 6, (3, 30)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LAYOUTS = {2: [(1, 2), (2, 1)], 4: [(1, 3), (2, 2), (1, 4)], 5: [(1, 5)], 8: [(2, 4), (4, 2)]}  # (pp, tp)
SHAPES = {  # uneven everywhere: heads, intermediate 13, vocabulary 37
    "biases": {
        "num_heads": 10,
        "num_kv_heads": 5,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        **{
            "embedding_scale": 1.5,
            "attention_scale": 0.7,
            "residual_scale": 0.6,
            "logits_scale": 1.3,
            "norms": "after",
        },
    },
    "tied": {
        **{"model_type": "qwen3", "num_heads": 5, "num_kv_heads": 5, "qk_norm": True, "tie_embeddings": True},
        **{"scales_embeddings": True, "activation": "gelu_pytorch_tanh", "norm_offset": True},
    },
    "window": {
        "model_type": "qwen2",
        "num_heads": 7,
        "num_kv_heads": 7,
        "attention_bias": True,
        "sliding_window": 3,
        "sliding_layers": (1, 2, 3),
        "layers_without_rope": (0, 3),
        **{"local_rope_theta": 100.0, "norms": "both", "attention_cap": 1.0, "logits_cap": 2.0},
    },
    "gemma 2": {
        **{"model_type": "gemma2", "num_heads": 6, "num_kv_heads": 3, "tie_embeddings": True, "norms": "both"},
        **{"norm_offset": True, "scales_embeddings": True, "activation": "gelu_pytorch_tanh", "attention_size": 9.0},
        **{"attention_cap": 1.0, "logits_cap": 2.0, "sliding_window": 3, "sliding_layers": (0, 2)},
    },
    "beside each other": {
        **{"model_type": "gpt_neox", "num_heads": 6, "num_kv_heads": 6, "parallel_residual": True, "layer_norm": True},
        **{"plain_mlp": True, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        **{"activation": "gelu", "rotary_factor": 0.5},
    },
    "norms of all heads": {
        **{"model_type": "olmo2", "num_heads": 10, "num_kv_heads": 5, "qk_norm": True, "qk_norm_of_all": True},
        **{"norms": "after"},
    },
    "learned positions": {
        **{"model_type": "gpt2", "num_heads": 5, "num_kv_heads": 5, "layer_norm": True, "plain_mlp": True},
        **{"max_position_embeddings": 40, "num_positions": 42, "tie_embeddings": True, "activation": "gelu_new"},
    },
    "three heads": {
        "num_heads": 6,
        "num_kv_heads": 3,
        "norms": "around",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rotary_factor": 0.5,
        "rope_alternates": True,
    },
}


def make_config(name: str) -> ModelConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 30, "intermediate_size": 13, "num_layers": 4, "head_dim": 4}
    return ModelConfig(**({"model_type": "llama", **sizes} | SHAPES[name]))


@dataclass(frozen=True)
class Team:
    """The ranks that hold one copy of a model, stage by stage; the ranks beyond sit the tests out."""

    pp: int
    tp: int
    inside: bool
    parallel: Parallel = WHOLE
    ends: dist.ProcessGroup | None = None  # first and last stage


@pytest.fixture(params=[0, 1, pytest.param(2, marks=pytest.mark.slow)])
def team(world, make_group, request) -> Team:
    layouts = LAYOUTS.get(world.size, [])
    if request.param >= len(layouts):
        pytest.skip(f"no more layouts at {world.size} ranks")
    pp, tp = layouts[request.param]
    grid = np.arange(pp * tp).reshape(pp, tp)
    groups = {tuple(ranks): make_group(ranks.tolist()) for ranks in (*grid, *grid.T)}
    ends = {index: make_group(grid[[0, -1], index].tolist()) for index in range(tp)} if pp > 1 else {}
    if world.rank >= pp * tp:
        return Team(pp, tp, inside=False)
    stage, index = divmod(world.rank, tp)
    parallel = Parallel(
        Shard(stage, pp, index, tp),
        group=groups[tuple(grid[stage])],
        stages=groups[tuple(grid[:, index])],
        previous=int(grid[stage - 1, index]) if stage else None,
        next=int(grid[stage + 1, index]) if stage + 1 < pp else None,
    )
    return Team(pp, tp, True, parallel, ends.get(index))


def fits(team: Team, name: str) -> None:
    if team.tp > make_config(name).num_kv_heads:
        pytest.skip("fewer key-value heads than slices")


def whole_and_shard(team: Team, name: str, head: str, dtype=torch.float64) -> tuple[Transformer, Transformer]:
    """Makes a whole model, random everywhere, norms and biases too, and its shard."""
    config = make_config(name)
    whole = Transformer(config, head=head, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for weight in whole.parameters():
        start = float(weight.dim() == 1 and not config.norm_offset)
        weight.data = (start + 0.3 * torch.randn(weight.shape, generator=generator)).to(dtype)
    mine = Transformer(config, head=head, dtype=dtype, parallel=team.parallel)
    weights = dict(whole.named_parameters())
    for name_, weight in mine.named_parameters():
        weight.data = weights[name_].data[slice_of(name_, config, team.parallel.shard)].clone()
    return whole, mine


def make_batch(num: int = 5, seed: int = 7, stop: int = 29) -> tuple[Sequences, Tensor]:
    """Makes a batch of odd lengths, one-token prompts, a row without response; the sampling supports hold each token
    and some others."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, 1 + (i * 3 + seed) % 4).tolist() for i in range(num)]
    responses = [rng.integers(4, stop, (i * 5 + seed) % (MAX_RESPONSE + 1)).tolist() for i in range(num)]
    support_BGK = torch.full((num, MAX_RESPONSE, 8), -1, dtype=torch.int32)
    for b, response in enumerate(responses):
        for t, token in enumerate(response):
            others = rng.permutation([v for v in range(VOCAB) if v != token])[: int(rng.integers(0, 8))]
            support_BGK[b, t, : 1 + len(others)] = torch.tensor([token, *others])
    return Sequences.join(pad(prompts, 5), pad(responses, MAX_RESPONSE)), support_BGK


def through(team: Team, model: Transformer, batch: Sequences) -> tuple[Tensor | None, Tensor]:
    """Runs all stages, and hands tensors on by plain messages. Returns this stage's input with its gradient to come,
    and its output."""
    hidden, shape = None, model.output_shape(len(batch.tokens_N))
    if team.parallel.previous is not None:
        hidden = torch.empty(shape, dtype=model.dtype)
        dist.recv(hidden, src=team.parallel.previous)
        hidden.requires_grad_()
    output = forward(model, batch, hidden)
    assert output.shape == shape
    if team.parallel.next is not None:
        dist.send(output.detach(), dst=team.parallel.next)
    return hidden, output


def back(team: Team, hidden: Tensor | None, output: Tensor, loss: Tensor | None) -> None:
    if team.parallel.next is not None:
        gradient = torch.empty_like(output)
        dist.recv(gradient, src=team.parallel.next)
        output.backward(gradient)
    else:
        loss.backward()
    if hidden is not None:
        dist.send(hidden.grad, dst=team.parallel.previous)


def check_gradients(team: Team, whole: Transformer, mine: Transformer, close: dict = CLOSE) -> None:
    """Compares gradients after a train engine's sums: partial gradients over tp, tied embeddings over the first and the
    last stage."""
    shard = team.parallel.shard
    expected = dict(whole.named_parameters())
    names = [name for name, _ in mine.named_parameters()]
    assert names == [name for name in expected if name in set(names)]
    for name, weight in mine.named_parameters():
        if not weight.requires_grad:
            assert weight.grad is None, name
            continue
        gradient = weight.grad.clone()
        if shard.tp > 1 and not is_split(name):
            dist.all_reduce(gradient, group=team.parallel.group)
        both_ends = shard.stage in (0, shard.pp - 1) and shard.pp > 1 and whole.config.tie_embeddings
        if name == "embed_tokens.weight" and both_ends and whole.head == "lm":
            dist.all_reduce(gradient, group=team.ends)
        wanted = expected[name].grad
        assert wanted is not None and (wanted.abs().sum() > 0 or name.endswith("k_proj.bias")), name
        part = wanted[slice_of(name, whole.config, shard)]
        torch.testing.assert_close(gradient.to(part.dtype), part, msg=lambda m: name + m, **close)  # noqa: B023


PLAIN = {"temperature": 1.0, "eos_ids": EOS, "min_new_tokens": 0}
BANNED = {"temperature": 0.7, "eos_ids": EOS, "min_new_tokens": 2}
KNOWN = BANNED | {"known": KnownTokens(17, holes=(1, 2))}  # of two slices of 37 tokens, the second has none of them
CASES = {
    "plain": (PLAIN, False),
    "banned": (BANNED, False),
    "kept": (BANNED, True),
    "known": (KNOWN, False),
    "known and kept": (KNOWN, True),
}  # sampling options, whether sampling supports are stored


CHUNKS = {"plain": 1, "banned": 3, "kept": 1, "known": 3, "known and kept": 1}  # in `make test`
QUICK = {  # shape -> cases there
    "biases": ("plain", "known and kept"),
    "tied": ("banned", "known"),
    "window": ("known and kept",),
    "gemma 2": ("plain",),
    "beside each other": ("plain",),
    "norms of all heads": ("plain",),
    "learned positions": ("banned",),
    "three heads": ("known",),
}
CASES_OF_CHUNKS = [
    pytest.param(name, case, num, marks=[] if num == CHUNKS[case] and case in QUICK[name] else pytest.mark.slow)
    for name in SHAPES
    for case in CASES
    for num in (1, 3)
]


def cut_vocabulary(monkeypatch, num_chunks: int) -> None:
    """Cuts logits into so many chunks, which few tokens would not need."""
    if num_chunks > 1:
        for constant, value in {"CHUNK_BYTES": 0, "TILE": 1, "MOST_CHUNKS": num_chunks}.items():
            monkeypatch.setattr(token_logprobs, constant, value)


@pytest.mark.parametrize(("name", "case", "num_chunks"), CASES_OF_CHUNKS)
def test_logprobs_and_gradients(team, name, case, num_chunks, monkeypatch):
    fits(team, name)
    if not team.inside:
        return
    cut_vocabulary(monkeypatch, num_chunks)
    whole, mine = whole_and_shard(team, name, "lm")
    mine.recompute = case != "plain"
    options, kept = CASES[case]
    batch, support_BGK = make_batch(seed=10 if kept else 7, stop=17 if "known" in options else 29)
    assert all(sum(batch.lengths) % tp for tp in (2, 3, 4, 5))  # so that tokens must be added
    sets = support_BGK if kept else None
    weight_BG = torch.randn(batch.responses_BG.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = {**options, "entropy": True}
    expected_BG, entropy_BG = response_logprobs(whole, batch, forward(whole, batch), sets, **options)
    ((expected_BG - 0.7 * entropy_BG) * weight_BG).sum().backward()

    hidden, output = through(team, mine, batch)
    loss = None
    if team.parallel.is_last:
        found_BG, spread_BG = response_logprobs(mine, batch, output, sets, **options)
        torch.testing.assert_close(found_BG, expected_BG, **CLOSE)
        torch.testing.assert_close(spread_BG, entropy_BG, **CLOSE)
        loss = ((found_BG - 0.7 * spread_BG) * weight_BG).sum()
    back(team, hidden, output, loss)
    check_gradients(team, whole, mine)


@pytest.mark.parametrize("name", SHAPES)
def test_values_scores_and_gradients(team, name):
    fits(team, name)
    if not team.inside:
        return
    whole, mine = whole_and_shard(team, name, "scalar")
    batch, _ = make_batch()
    weight_BG1 = torch.randn(5, MAX_RESPONSE + 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    output = forward(whole, batch)
    expected_BG1, expected_B = response_values(whole, batch, output), sequence_scores(whole, batch, output)
    (expected_BG1 * weight_BG1).sum().backward()

    hidden, output = through(team, mine, batch)
    loss = None
    if team.parallel.is_last:
        found_BG1 = response_values(mine, batch, output)
        torch.testing.assert_close(found_BG1, expected_BG1, **CLOSE)
        torch.testing.assert_close(sequence_scores(mine, batch, output), expected_B, rtol=0, atol=1e-6)
        loss = (found_BG1 * weight_BG1).sum()
    back(team, hidden, output, loss)
    check_gradients(team, whole, mine)


@pytest.fixture
def joined(monkeypatch) -> Counter[int]:
    """Multiplies with q, k and v, and with gate and up, at once, as GPUs do -> how often, by the number of rows of what
    was one product."""
    counts: Counter[int] = Counter()
    as_one = linear._as_one

    def count(parts):
        counts[sum(map(len, parts))] += 1
        return as_one(parts)

    monkeypatch.setattr(linear, "fused", lambda x: True)
    monkeypatch.setattr(linear, "_as_one", count)
    return counts


def rows_of_joined(model: Transformer) -> set[int]:
    """Returns the rows of each block's joined matrix on this rank."""
    blocks = [block for layer in model.layers.values() for block in (layer.self_attn, layer.mlp) if block.together]
    return {sum(len(getattr(block, name).weight) for name in block.together) for block in blocks}


@pytest.mark.parametrize("name", ["biases", "tied"])
def test_joined_products_of_slices(team, name, joined):
    """Training's outputs and gradients, and tokens of generation, are those of the whole model's separate products."""
    fits(team, name)
    if not team.inside:
        return
    whole, mine = whole_and_shard(team, name, "lm")
    batch, _ = make_batch()
    expected_BG = response_logprobs(whole, batch, forward(whole, batch), **PLAIN)
    expected_BG.sum().backward()
    assert not joined, "copied weights of the whole model are not adjacent"
    linear.lay_adjacent(mine.layers.values())
    hidden, output = through(team, mine, batch)
    assert {*joined} >= rows_of_joined(mine)
    loss = None
    if team.parallel.is_last:
        found_BG = response_logprobs(mine, batch, output, **PLAIN)
        torch.testing.assert_close(found_BG, expected_BG, **CLOSE)
        loss = found_BG.sum()
    back(team, hidden, output, loss)
    check_gradients(team, whole, mine)
    joined.clear()
    drawn_alike(team, name, GENERATION[name], lambda model: linear.lay_adjacent(model.layers.values()))
    assert {*joined} >= rows_of_joined(mine)


def test_a_batch_without_data(team):
    """One token, fewer than there are ranks: a loss of 0, gradients of 0 for all weights."""
    if not team.inside:
        return
    _, mine = whole_and_shard(team, "biases", "lm")
    batch = Sequences.join(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, MAX_RESPONSE), -1))
    hidden, output = through(team, mine, batch)
    loss = None
    if team.parallel.is_last:
        loss = response_logprobs(mine, batch, output, **PLAIN).sum()
        assert not loss.any()
    back(team, hidden, output, loss)
    assert all(weight.grad is not None and not weight.grad.any() for weight in mine.parameters())


@pytest.mark.parametrize(("library", "dtype"), [("linear", "bfloat16"), ("onednn", "float32")])
def test_lower_precision_stays_near(team, library, dtype):
    """With each library of products, whatever the other ranks use."""
    if not team.inside:
        return
    if not products.LIBRARIES[library].exists(products.DTYPES[dtype]):
        pytest.skip(f"no products by {library} in {dtype} here")
    products.use({dtype: products.Choice(library)} if team.parallel.shard.tp_index % 2 else {})
    whole, mine = whole_and_shard(team, "biases", "lm", products.DTYPES[dtype])
    batch, _ = make_batch()
    exact = Transformer(whole.config, head="lm", dtype=torch.float64)
    exact.load_state_dict(whole.state_dict())
    hidden, output = through(team, mine, batch)
    loss = None
    if team.parallel.is_last:
        expected_BG = response_logprobs(exact, batch, forward(exact, batch), **PLAIN)
        found_BG = response_logprobs(mine, batch, output, **PLAIN)
        assert found_BG.dtype == torch.float32
        assert (found_BG.double() - expected_BG).abs().max() < (0.2 if dtype == "bfloat16" else 1e-4)
        loss = found_BG.sum()
    back(team, hidden, output, loss)
    products.use({})
    if dtype == "float32":
        response_logprobs(exact, batch, forward(exact, batch), **PLAIN).sum().backward()
        check_gradients(team, exact, mine, {"rtol": 1e-3, "atol": 1e-3})


@pytest.mark.parametrize("name", ["biases", "window"])
def test_rows_without_gradient(team, name):
    """Padded rows, as prefill reads them, give every tp rank the whole hidden states."""
    fits(team, name)
    if not team.inside or team.pp > 1:
        return
    whole, mine = whole_and_shard(team, name, "scalar")
    tokens_BT = torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mine.scalar(mine(tokens_BT)), whole.scalar(whole(tokens_BT)), **CLOSE)


GENERATION = {
    "biases": {"eos_ids": tuple(range(8)), "min_new_tokens": 2, "temperature": 0.8},
    "tied": {"eos_ids": EOS, "top_k": 5, "top_p": 0.9, "temperature": 1.3},
    "window": {"eos_ids": EOS, "temperature": 1.5},
    "three heads": {},
    "gemma 2": {"eos_ids": EOS, "temperature": 0.0},
}
PADDED = {  # more rows of embeddings than tokens, with holes
    "biases": {"temperature": 3.0, "top_k": 6},
    "tied": {"temperature": 1.3, "top_p": 0.9},
    "window": {"temperature": 0.0},
    "three heads": {"temperature": 2.0},
}


@pytest.mark.parametrize(("name", "options"), GENERATION.items())
def test_draws_the_same_tokens(team, name, options):
    fits(team, name)
    if team.inside:
        drawn_alike(team, name, options)


@pytest.mark.parametrize(("name", "options"), PADDED.items())
def test_draws_only_known_tokens(team, name, options):
    """The second of two slices is cut as a whole."""
    fits(team, name)
    if team.inside:
        known = KnownTokens(17, holes=(5, 6))
        drawn_BG = drawn_alike(team, name, options | {"eos_ids": (3,), "known": known})
        assert int(drawn_BG.max()) < 17 and not torch.isin(drawn_BG, torch.tensor(known.holes)).any()


def drawn_alike(team, name: str, options: dict, prepare: Callable = lambda mine: None) -> Tensor:
    """Returns the responses, after a comparison of the shards with the whole model."""
    whole, mine = whole_and_shard(team, name, "lm", torch.float32)
    prepare(mine)
    rng = np.random.default_rng(3)
    prompts_BP = pad([rng.integers(0, VOCAB, 1 + 2 * i % 5).tolist() for i in range(6)])
    bits_BG = random_responses(6, 9, seed=7)
    expected, found = (generate_rows(model, prompts_BP, bits_BG, **options) for model in (whole, mine))
    assert torch.equal(found[0], expected[0])
    assert len(expected[0].unique()) > 5
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=2e-5)
    assert (found[2] is None) == (expected[2] is None)
    if expected[2] is not None:
        assert torch.equal(found[2].sort(-1)[0], expected[2].sort(-1)[0])
    return expected[0]


@pytest.mark.ranks(2)
@pytest.mark.slow_at()
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["tied", pytest.param("biases", marks=pytest.mark.slow)])
def test_recomputation_under_zero_3(world, make_group, cheap_garbage_collection, name, monkeypatch):
    """DeepSpeed gathers weights around a module's forward, which now also runs inside the backward pass; there the
    output layer reads its weight again where logits come in chunks."""
    batch, _ = make_batch()
    states = []

    def loss(model, b):
        return response_logprobs(model, b, forward(model, b), **PLAIN).sum()

    for recompute, num_chunks in ((False, 1), (True, 1), (False, 3)):
        cut_vocabulary(monkeypatch, num_chunks)
        model = Transformer(make_config(name), head="lm", recompute=recompute)
        engine = make_engine(model, groups=Groups(data=make_group((0, 1))), options=EngineOptions(zero=3))
        for _ in range(2):
            engine_step(engine, [batch], loss, lr=0.1)
        states.append(whole_weights(engine))
    assert states[0]["norm.weight"].std() > 0.01
    assert all(torch.equal(weight, states[1][key]) for key, weight in states[0].items())
    for key, weight in states[0].items():  # Adam's first steps scale a gradient of rounding alone up to the rate
        torch.testing.assert_close(states[2][key], weight, rtol=0, atol=1e-2)  # of two steps of 0.1
