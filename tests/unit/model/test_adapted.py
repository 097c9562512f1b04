"""Models with adapters against a slow twin, whose dense weights are W + s B A."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from rlhf_spmd.kernels.dropout import Dropout
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.linear import AdaptedLinear, Copies, Linear, LowRank
from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tests.unit.kernels.test_products import small

SIZES = {"num_heads": 10, "num_kv_heads": 5, "hidden_size": 30, "intermediate_size": 13, "num_layers": 2, "head_dim": 4}
CONFIG = ModelConfig(model_type="llama", vocab_size=37, attention_bias=True, attention_output_bias=True, **SIZES)
ADAPTERS = {
    "all": Adapters(3, 6.0),
    "some": Adapters(2, 8.0, ("v_proj", "o_proj", "up_proj"), rslora=True),
}


def made(adapters: Adapters, head="lm", dtype=torch.float64, base: Transformer | None = None) -> Transformer:
    """Makes a model with random factors."""
    base = base or Transformer(CONFIG, head=head, dtype=dtype, seed=1)
    model, generator = base.with_adapters(adapters, seed=3), torch.Generator().manual_seed(5)
    for name, one in model.named_parameters():
        if name in model.trained_names():
            one.data = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.dtype).mul_(0.3)
            one.requires_grad_(True)
    return model


def dense(model: Transformer) -> dict[str, Tensor]:
    """Returns plain weights by name, differentiable in the factors."""
    weights = dict(model.named_parameters())
    layers = [name.removesuffix(".lora_A") for name in weights if name.endswith(".lora_A")]
    scale = model.adapters.scale
    merged = {
        f"{name}.weight": weights[f"{name}.weight"] + scale * (weights[f"{name}.lora_B"] @ weights[f"{name}.lora_A"])
        for name in layers
    }
    return {name: one for name, one in weights.items() if ".lora_" not in name} | merged


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("which", ADAPTERS)
def test_outputs_and_gradients_of_the_dense_twin(which, head, recompute):
    model = made(ADAPTERS[which], head)
    model.recompute = recompute
    tokens_BT = torch.arange(18).view(3, 6) * 5 % 37
    plain = Transformer(CONFIG, head=head, dtype=torch.float64)

    def read(of: Transformer, hidden: Tensor) -> Tensor:
        return (of.logits(hidden) if head == "lm" else of.scalar(hidden)).sin().sum()

    loss = read(model, model(tokens_BT))
    loss.backward()
    names = sorted(model.trained_names())
    found = {name: dict(model.named_parameters())[name].grad for name in names}
    weights = dense(model)
    hidden = functional_call(plain, weights, (tokens_BT,))
    head_VD = weights["lm_head.weight" if head == "lm" else "score.weight"]
    twin = (hidden @ head_VD.T).sin().sum()
    wanted = torch.autograd.grad(twin, [dict(model.named_parameters())[name] for name in names])
    torch.testing.assert_close(loss, twin, rtol=1e-12, atol=1e-12)
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: name + m)
    assert all(p.grad is None for name, p in model.named_parameters() if name not in found)


def test_a_fresh_adapter_changes_no_bit_and_shares_the_base():
    for dtype in (torch.float32, torch.bfloat16):
        base = Transformer(CONFIG, head="lm", dtype=dtype, seed=1)
        before = {name: one.clone() for name, one in base.named_parameters()}
        model = base.with_adapters(ADAPTERS["all"], seed=3)
        tokens_BT = torch.arange(18).view(3, 6)
        assert torch.equal(model(tokens_BT), base(tokens_BT))
        own = dict(model.named_parameters())
        assert all(own[name].data_ptr() == one.data_ptr() for name, one in base.named_parameters())
        assert {own[name].dtype for name in model.trained_names()} == {torch.float32}
        other = made(ADAPTERS["all"], base=base)
        assert not torch.equal(other(tokens_BT), base(tokens_BT))
        assert all(torch.equal(before[name], one) for name, one in base.named_parameters())


def test_factors_of_a_layer_depend_on_no_other_target():
    base = Transformer(CONFIG, head="lm")
    some, every = (
        dict(base.with_adapters(one, seed=3).named_parameters())
        for one in (Adapters(3, 1.0, ("o_proj",)), Adapters(3, 1.0))
    )
    name = "layers.1.self_attn.o_proj.lora_A"
    assert torch.equal(some[name], every[name])
    assert not torch.equal(every[name], every["layers.0.self_attn.o_proj.lora_A"])
    assert every[name].abs().max() <= every[name].shape[1] ** -0.5
    assert every[name].std() == pytest.approx((3 * every[name].shape[1]) ** -0.5, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ADAPTERS)
def test_generation_has_the_logprobs_of_a_forward_pass(which, dtype):
    """In bfloat16 decode steps join the weights of a layer."""
    model = made(ADAPTERS[which], base=small(dtype)).requires_grad_(False)
    assert (Copies(model).joined is not None) == (dtype == torch.bfloat16)
    prompts_BP, bits_BG = torch.arange(12).view(4, 3), torch.randint(2**62, (4, 5), generator=torch.manual_seed(0))
    responses_BG, found_BG, _ = generate_rows(model, prompts_BP, bits_BG, eos_ids=())
    tokens_BT = torch.cat((prompts_BP, responses_BG), 1)
    logits = model.logits(model(tokens_BT)).float().log_softmax(-1)
    wanted_BG = logits[:, 2:-1].gather(-1, responses_BG[..., None].long()).squeeze(-1)
    torch.testing.assert_close(found_BG, wanted_BG, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("tied_rank", [2, 50], ids=["joined", "apart"])
def test_dropout_of_a_slow_twin(tied_rank, again):
    """y = W x + s B A (x m / (1 - p)), with another m for each adapter; the middle layer has none."""
    generator = torch.Generator().manual_seed(6)
    layers = [AdaptedLinear(11, 5), Linear(11, 4), AdaptedLinear(11, 3)]
    for layer in (layers[0], layers[2]):
        layer.adapt(Adapters(tied_rank, 6.0), torch.float64)
    for one in (part for layer in layers for part in (layer, *layer.parameters(recurse=False))):
        if isinstance(one, Tensor):
            one.data = torch.randn(one.shape, generator=generator, dtype=torch.float64)
    dropout = Dropout(3, 0.25, torch.arange(7) // 4, torch.arange(7) % 4)
    x = torch.randn(7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    low_rank, sites = LowRank(layers, [8, 9], range(11)), iter((8, 9))
    parts = [layer(x) for layer in layers]
    found = low_rank(x, *parts, dropout=dropout, again=(torch.clone, (x,)) if again else None)
    wanted = []
    for layer in layers:
        y = x @ layer.weight.T + layer.bias
        if isinstance(layer, AdaptedLinear):
            kept = x * ~dropout.mask(range(11), next(sites)) / 0.75
            y = y + 6.0 / tied_rank * (kept @ layer.lora_A.T) @ layer.lora_B.T
        wanted.append(y)
    inputs = [x, *(one for layer in layers for one in layer.parameters())]
    mine, theirs = (torch.autograd.grad(sum(y.sin().sum() for y in ys), inputs) for ys in (found, wanted))
    for one, other in zip((*found, *mine), (*wanted, *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_depends_on_a_row_and_not_on_its_company(recompute):
    """A batch, and each of its rows alone, in any order: the same gradients."""
    model = made(ADAPTERS["all"])
    model.recompute = recompute
    tokens_BT = torch.arange(18).view(3, 6) * 5 % 37
    tokens_BT[1, 4:] = -1

    def gradients(rows: list[int], numbers: list[int], rate: float = 0.4) -> list[Tensor]:
        batch = replace(Sequences.of(tokens_BT[rows]), dropout=(5, rate, torch.tensor(numbers)))
        loss = model.logits(forward(model, batch)).sin().sum()
        return list(torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad]))

    whole = gradients([0, 1, 2], [0, 1, 2])
    apart = [sum(some) for some in zip(*(gradients([row], [row]) for row in (2, 0, 1)), strict=True)]
    turned, others = gradients([2, 0, 1], [2, 0, 1]), gradients([0, 1, 2], [3, 4, 5])
    for one, two, three, other in zip(whole, apart, turned, others, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(three, one, rtol=1e-10, atol=1e-10)
        assert (other - one).abs().max() > 1e-3
