"""The transformer against transformers' own models: every family, rope scaling, window and head layout."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from rlhf_spmd.kernels import triton_import
from rlhf_spmd.model import attention, transformer
from rlhf_spmd.model.attention import attend
from rlhf_spmd.model.config import from_hf
from rlhf_spmd.model.norm import RMSNorm
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.sequences import Sequences
from rlhf_spmd.model.stored_parts import ours_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard

TINY = 1e-11
SMALL = {
    "vocab_size": 61,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA3 = {
    **{"sliding_window": 5, "sliding_window_pattern": 2},
    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}},
}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 0.8}
SLIDING = {"sliding_window": 5, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": None}
MULTIPLIERS = {
    **{"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 1.3},
    "tie_word_embeddings": True,
}
NEOX = {"num_key_value_heads": 6, "pad_token_id": 0, "eos_token_id": None}
OPT = {"num_key_value_heads": 6, "ffn_dim": 84, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.5, 4.0, 6.0],
    "partial_rotary_factor": 0.8,
    "rope_theta": 1e4,
}
CASES = {
    "llama": ("llama", {}),
    "llama mha": ("llama", {"num_key_value_heads": 6}),
    "llama mqa tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 14, "rms_norm_eps": 1e-3}),
    "llama one layer": ("llama", {"num_hidden_layers": 1, "vocab_size": 7}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral head_dim": ("mistral", {"sliding_window": None, "head_dim": 22}),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "mistral window 1": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 biases tied": ("qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3 window": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 0, 1],  # of the three layers, and one more
            "use_sliding_window": True,
            "sliding_window": 4,
            "pad_token_id": 0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma biases": ("gemma", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", CAPS | {"sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 9}),
    "gemma2 wide": ("gemma2", CAPS | {"sliding_window": 50, "head_dim": 16, "num_hidden_layers": 2}),
    "gemma2 no cap": ("gemma2", {"head_dim": 8, "attention_bias": True, "sliding_window": 4} | dict.fromkeys(CAPS)),
    "vaultgemma": ("vaultgemma", CAPS | {"sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 9}),
    "gemma3": ("gemma3_text", GEMMA3 | {"head_dim": 16, "query_pre_attn_scalar": 9}),
    "gemma3 biases": (
        "gemma3_text",
        {"final_logit_softcapping": 0.8, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "granite": ("granite", MULTIPLIERS),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 3}),
    "phi3": ("phi3", {"sliding_window": 6, "pad_token_id": 0}),
    "phi3 partial": ("phi3", {"tie_word_embeddings": True, "partial_rotary_factor": 0.61, "pad_token_id": 0}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 60, "pad_token_id": 0}),
    "longrope beyond": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "pad_token_id": 0},
    ),
    "olmo2": ("olmo2", {"pad_token_id": 0, "eos_token_id": None}),
    "olmo2 biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 6, "pad_token_id": 0}),
    "olmo3": ("olmo3", SLIDING | {"rope_parameters": {"full_attention": YARN | {"rope_theta": 1e4}}}),
    "seed_oss": ("seed_oss", {"head_dim": 10, "attention_out_bias": True, "pad_token_id": 0}),
    "ernie4_5": ("ernie4_5", {"head_dim": 10, "use_bias": True}),
    "glm": ("glm", {"head_dim": 12, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 16, "pad_token_id": 0, "attention_bias": False}),
    "gpt_neox": ("gpt_neox", NEOX | {"rotary_pct": 0.41}),
    "gpt_neox no biases": ("gpt_neox", NEOX | {"use_parallel_residual": False, "attention_bias": False}),
    "gpt_neox 20B": ("gpt_neox", NEOX | {"hidden_act": "gelu_fast"}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "starcoder2 no biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {"num_key_value_heads": 6, "n_inner": 84}),
    "opt": ("opt", OPT),
    "opt no biases": ("opt", OPT | {"enable_bias": False, "tie_word_embeddings": False}),
    "theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "dynamic beyond": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 16},
    ),
    "yarn": ("qwen2", {"rope_parameters": YARN | {"rope_theta": 1e6}}),
    "yarn options": (
        "qwen3",
        {
            "head_dim": 32,
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        },
    ),
    "yarn mscale": ("llama", {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "llama3": ("llama", {"head_dim": 32, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "mistral yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN | {"rope_theta": 1e4}}),
}


def theirs(case: str, *, head: str = "lm", seed: int = 0, attention: str = "eager", **more):
    """Returns a small random model of transformers, every parameter (biases and norms too) away from its initial
    value."""
    import transformers

    family, options = CASES[case]
    auto = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    if head == "scalar":
        more = {"num_labels": 1, "pad_token_id": 0} | more
    config = transformers.AutoConfig.for_model(family, **SMALL | options | more)
    model = auto.from_config(config, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        start = round(weight.mean().item()) if "norm" in name else 0.0
        weight.data = start + 0.15 * torch.randn(weight.shape, generator=generator)
    return model


def ours(model, *, head: str = "lm", dtype: torch.dtype = torch.float32) -> Transformer:
    """Returns the same weights in our transformer."""
    mine = Transformer(from_hf(model.config.to_dict()), head=head, dtype=dtype)
    mine.load_state_dict(by_our_names(model.state_dict(), mine))
    return mine


def by_our_names(stored, mine: Transformer):
    return ours_of(stored, {name: weight.shape for name, weight in mine.state_dict().items()}, mine.config)


def some_tokens(batch: int, length: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    model = theirs(case)
    mine = ours(model)
    tokens_BT = some_tokens(3, 41, model.config.vocab_size)
    with torch.no_grad():
        expected = model(tokens_BT).logits
        got = mine.logits(mine(tokens_BT))
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


SAME = ("llama biases", "mistral window", "qwen2 window", "qwen3 window", "smollm3 window", "gemma", "olmo2", "olmo3")
SAME += ("seed_oss", "gpt_neox", "starcoder2", "linear", "dynamic", "yarn", "llama3")  # whose operations are theirs


@pytest.mark.parametrize("case", SAME)
def test_the_bits_of_transformers(case):
    model = theirs(case, attention="sdpa")
    mine, tokens_BT = ours(model), some_tokens(3, 41, model.config.vocab_size)
    with torch.no_grad():
        assert torch.equal(mine.logits(mine(tokens_BT)), model(tokens_BT).logits)


class Wide:
    """torch for the modules of transformers, which compute norms, ropes and softmax in float32 in any model."""

    float = float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.mark.parametrize("case", [case for case in CASES if case != "dynamic beyond"])  # whose theta is a float32
def test_gradients_equal_transformers(case, monkeypatch):
    """In float64, which transformers' modules are made to compute in."""
    for name in (type(theirs(case)).__module__, "transformers.modeling_rope_utils"):
        monkeypatch.setattr(sys.modules[name], "torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = theirs(case).double()
    mine = ours(model, dtype=torch.float64)
    tokens_BT = some_tokens(2, 19, model.config.vocab_size)
    weight_BTV = torch.randn(2, 19, model.config.vocab_size, generator=torch.Generator().manual_seed(3)).double()
    logits = [model(tokens_BT).logits, mine.logits(mine(tokens_BT))]
    torch.testing.assert_close(*logits, atol=TINY, rtol=0)
    for one in logits:
        (one * weight_BTV).sum().backward()
    expected = by_our_names({name: weight.grad for name, weight in model.named_parameters()}, mine)
    for name, weight in mine.named_parameters():
        scale = max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(weight.grad, expected[name], atol=TINY * scale, rtol=0, msg=name)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2 tied", "qwen3", "mistral window", "gpt_neox"])
def test_scalar_head_equals_sequence_classification(case):
    model = theirs(case, head="scalar")
    mine = ours(model, head="scalar")
    tokens_BT = some_tokens(4, 13, model.config.vocab_size)
    lengths_B = torch.tensor([13, 1, 7, 12])
    padding_BT = torch.arange(13) >= lengths_B[:, None]
    with torch.no_grad():
        expected = model(tokens_BT.masked_fill(padding_BT, 0), attention_mask=(~padding_BT).long()).logits[:, 0]
        values_BT = mine.scalar(mine(tokens_BT.masked_fill(padding_BT, -1)))
    assert values_BT.shape == (4, 13)
    torch.testing.assert_close(values_BT[torch.arange(4), lengths_B - 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma", "gemma2", "gpt_neox", "yarn", "mistral window"])
def test_precisions(case):
    """float64 is float64 throughout; bfloat16 keeps exact rope angles and stays near."""
    model = theirs(case)
    tokens_BT = some_tokens(2, 33, model.config.vocab_size)
    logits = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mine = ours(model).to(dtype)
        with torch.no_grad():
            logits[dtype] = mine.logits(mine(tokens_BT))
        assert logits[dtype].dtype == dtype
        assert all(weight.dtype == dtype for weight in mine.parameters())
    exact = logits[torch.float64]
    assert 0 < (logits[torch.float32] - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (logits[torch.bfloat16] - exact).abs().max() < 0.1 * exact.abs().max()


def test_norms_of_half_precision_are_computed_in_float32():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).mul(1e-2).bfloat16()
    norm = RMSNorm(300, 1e-6)
    norm.weight.data.fill_(1.5)
    wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * 1.5
    torch.testing.assert_close(norm.bfloat16()(x).double(), wide, atol=0, rtol=2**-8)


def test_norms_with_an_offset_round_once(monkeypatch):
    """Bit for bit as Gemma's, also with a weight that is lost if it is rounded after 1 is added."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm, theirs = RMSNorm(64, 1e-6, offset=True), GemmaRMSNorm(64)
    for one in (norm, theirs):
        one.weight.data = torch.linspace(-0.5, 0.5, 64)
        one.bfloat16()
    expected = theirs(x)
    rounded = RMSNorm(64, 1e-6)
    rounded.weight.data = 1 + norm.weight.data
    assert not torch.equal(rounded(x), expected)
    for fast in (False, True):
        with torch.no_grad():
            assert torch.equal(norm(x, fast=fast), expected)
            assert torch.equal(norm(x - 1, torch.ones_like(x), fast=fast)[0], theirs(x - 1 + 1))
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu",))
    torch.testing.assert_close(norm(x), expected, rtol=2**-7, atol=0)  # the interpreter cuts
    norm(x).sum().backward()
    assert norm.weight.grad.dtype == torch.bfloat16


def test_initial_weights_follow_from_the_seed_alone():
    config = from_hf({"model_type": "llama", **SMALL})
    state = torch.get_rng_state()
    first, again, other = (Transformer(config, head="lm", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert math.isclose(first.lm_head.weight.std().item(), 0.02, rel_tol=0.05)
    residual_std = 0.02 / math.sqrt(2 * config.num_layers)
    assert math.isclose(first.layers["1"].mlp.down_proj.weight.std().item(), residual_std, rel_tol=0.05)
    assert torch.equal(first.norm.weight, torch.ones(config.hidden_size))
    assert not Transformer(config, head="scalar").score.weight.any()
    assert not Transformer(replace(config, norm_offset=True), head="lm").norm.weight.any()


@pytest.mark.parametrize(("in_place", "cap"), [(True, None), (False, None), (True, 0.7)])
@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_attention_against_the_formula(in_place, cap, window, num_tokens, monkeypatch):
    """Both ways to group heads: the CPU's, and the one that GPUs without a kernel for it take; with a cap in blocks of
    two queries."""
    monkeypatch.setattr(attention, "reads_groups", lambda *_, **__: in_place)
    monkeypatch.setattr(attention, "CAPPED_BYTES", 4 * 2 * 6 * num_tokens * 2)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, num_tokens, 8) for heads in (6, 2, 2))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    hidden = torch.ones(num_tokens, num_tokens).triu(1).bool()
    for query in range(num_tokens):
        hidden[query, : max(0, query + 1 - (window or num_tokens))] = True
    scores = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(3, 1)) / math.sqrt(8)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    expected = torch.einsum(
        "bhts,bhsd->bhtd", scores.masked_fill(hidden, -math.inf).softmax(-1), v.repeat_interleave(3, 1)
    )
    found = attend(q, k, v, window, cap)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(one.sin().sum(), (q, k, v)) for one in (found, expected))
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted)
    if cap is not None:
        last = attention.attend_capped(q[:, :, -2:], k, v, window, cap)
        torch.testing.assert_close(last, expected[:, :, -2:])


def test_messages_between_stages_are_batched(monkeypatch):
    """As those by which the ranks were connected: NCCL gives others a communicator of their own."""
    found = []
    monkeypatch.setattr(
        transformer.dist, "P2POp", lambda direction, tensor, peer, group: (direction, peer, tensor.shape)
    )
    monkeypatch.setattr(transformer.dist, "batch_isend_irecv", lambda operations: found.append(operations) or [])
    place = Parallel(Shard(pp=3, stage=1), previous=0, next=2)
    config = from_hf({"model_type": "llama", "rms_norm_eps": 1e-5} | SMALL)
    model = Transformer(config, head="lm", parallel=place).requires_grad_(False)
    batch = Sequences.join(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    model.through_stages(batch.tokens_N, batch.context(model))
    shape = model.output_shape(len(batch.tokens_N))
    assert found == [[(torch.distributed.irecv, 0, shape)], [(torch.distributed.isend, 2, shape)]]
