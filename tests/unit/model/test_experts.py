"""Mixtures of experts against transformers' own: logits, gradients, routes, and what a row does not depend on."""

import pytest
import torch

from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.routes import Routes
from rlhf_spmd.model.transformer import Transformer
from tests.unit.model.test_transformer import some_tokens

SIZES = {"vocab_size": 61, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
QWEN = {"intermediate_size": 40, "head_dim": 10}
CASES = {  # family, experts, of a token, inner size, norm_topk_prob, dense layers, more
    "qwen3": ("qwen3_moe", 8, 2, 24, True, 0, {}),
    "qwen3 dense first, tied": ("qwen3_moe", 16, 4, 12, False, 1, {"tie_word_embeddings": True}),
    "qwen3 one of four": ("qwen3_moe", 4, 1, 24, False, 2, {}),
    "qwen3 all": ("qwen3_moe", 6, 6, 16, True, 0, {}),
    "qwen3 many": ("qwen3_moe", 128, 8, 7, True, 0, {}),
    "mixtral": ("mixtral", 4, 2, 30, True, 0, {"head_dim": 10}),
    "mixtral tied": ("mixtral", 5, 3, 30, True, 0, {"head_dim": 10, "tie_word_embeddings": True}),
    "olmoe": ("olmoe", 12, 5, 18, False, 0, {"clip_qkv": None, "eos_token_id": 1}),
}


def theirs(case: str):
    """Returns a small random mixture of transformers, every parameter away from its initial value."""
    import transformers

    family, num_experts, k, inner, norm, dense, more = CASES[case]
    sizes = SIZES | more | {"num_experts_per_tok": k, "norm_topk_prob": norm}
    if family == "qwen3_moe":
        sizes |= QWEN | {"num_experts": num_experts, "moe_intermediate_size": inner, "decoder_sparse_step": 1}
        sizes["mlp_only_layers"] = [*range(dense)]
    else:
        sizes |= {"num_local_experts": num_experts, "num_experts": num_experts, "intermediate_size": inner}
    config = transformers.AutoConfig.for_model(family, **sizes)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        weight.data = (1.0 if "norm" in name else 0.0) + 0.15 * torch.randn(weight.shape, generator=generator)
    return model


def config_of(case: str, model) -> ModelConfig:
    family, num_experts, k, inner, norm, dense, _ = CASES[case]
    values = model.config
    return ModelConfig(
        "qwen3",
        *(values.vocab_size, values.hidden_size, values.intermediate_size, values.num_hidden_layers),
        *(values.num_attention_heads, values.num_key_value_heads),
        getattr(values, "head_dim", None) or values.hidden_size // values.num_attention_heads,
        rms_norm_eps=values.rms_norm_eps,
        rope_theta=values.rope_parameters["rope_theta"],
        tie_embeddings=values.tie_word_embeddings,
        qk_norm=family != "mixtral",
        qk_norm_of_all=family == "olmoe",
        num_experts=num_experts,
        experts_per_token=k,
        expert_size=inner,
        num_dense_layers=dense,
        norm_topk=norm,
    )


def ours(case: str, model) -> Transformer:
    """Returns the same weights in our transformer."""
    mine = Transformer(config_of(case, model), head="lm")
    state = {}
    for name, weight in model.state_dict().items():
        name = name.removeprefix("model.")
        is_of_experts = ".experts." in name
        state[f"{name}.weight" if is_of_experts else name] = weight.flatten(0, 1) if is_of_experts else weight
    if mine.config.tie_embeddings:
        del state["lm_head.weight"]
    mine.load_state_dict(state)
    return mine


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    model = theirs(case)
    mine = ours(case, model)
    tokens_BT = some_tokens(3, 41, 61)
    with torch.no_grad():
        expected = model(tokens_BT).logits
        got = mine.logits(mine(tokens_BT))
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


LENGTHS = (7, 3, 5)


def run(mine: Transformer, routes: Routes | None, *, recompute: bool = False) -> list[torch.Tensor]:
    """Returns logits of packed rows, and every gradient of a loss of them."""
    mine.recompute, context = recompute, Packed(LENGTHS)
    context.routes = routes
    mine.zero_grad()
    logits_NV = mine.logits(mine(some_tokens(1, sum(LENGTHS), 61)[0], context=context))
    (logits_NV * logits_NV.detach().cos()).sum().backward()
    return [logits_NV.detach(), *(one.grad.clone() for one in mine.parameters())]


@pytest.mark.parametrize("recompute", [False, True])
def test_routes_are_recorded_and_replayed(recompute):
    """Given ids equal to its own give a layer the same bits; others change outputs, and the router learns from them. A
    layer that is computed again is neither recorded nor counted twice."""
    case = "qwen3 dense first, tied"
    mine = ours(case, theirs(case)).requires_grad_()
    plain, own = run(mine, None), Routes()
    assert all(map(torch.equal, plain, run(mine, own, recompute=recompute)))
    taken = own.taken
    assert taken.shape == (sum(LENGTHS), 2, 4) and taken.dtype == torch.uint8  # of sparse layers
    assert (taken.int().diff(dim=-1) > 0).all() and own.num_given == own.num_disagreeing == 0
    again = Routes(taken)
    assert all(map(torch.equal, plain, run(mine, again, recompute=recompute)))
    assert again.num_given == 2 * sum(LENGTHS) and again.num_disagreeing == 0 and torch.equal(again.taken, taken)

    other = taken.clone()
    other[2, 1] = torch.tensor([i for i in range(16) if i not in taken[2, 1]][:4])
    given = Routes(other, torch.arange(sum(LENGTHS)) != 5)
    found = run(mine, given, recompute=recompute)
    assert given.num_given == 2 * sum(LENGTHS) - 2 and given.num_disagreeing == 1 and torch.equal(given.taken, other)
    changed = ((found[0] - plain[0]).abs() > 1e-4).any(dim=-1)
    assert changed.tolist() == [index == 2 for index in range(sum(LENGTHS))]  # in the last layer, so no other token
    assert mine.layers["2"].mlp.gate.weight.grad[other[2, 1].long()].abs().min() > 0
    few = Routes(other[:4])  # the rest is padding
    run(mine, few, recompute=recompute)
    assert few.num_disagreeing == 1 and few.num_given == 8 and torch.equal(few.taken[4:], taken[4:])
