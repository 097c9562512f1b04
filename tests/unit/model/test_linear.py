"""Linear layers: weights that are joined where they lie, adapters beside them, copies of a frozen base."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.kernels import triton_import
from rlhf_spmd.kernels.products import DTYPES, LIBRARIES, Choice, use
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.linear import MOST_JOINED, Adapted, Copies, lay_adjacent, sum_bytes, together
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.cost.memory import copied_bytes, packed_bytes
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.engines.flat_layout import lay_out
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tests.unit.kernels.test_products import CASES, _linear_afterwards, small  # noqa: F401

PACKS = {"plain_s": 3.0, "packed_s": 2.0, "pack_s": 10.0}  # earned by eleven steps


def adapted(base: Transformer, rank: int, targets: tuple[str, ...] = Adapters(1, 1.0).targets) -> Transformer:
    """Makes a model with a random adapter."""
    model, generator = base.with_adapters(Adapters(rank, 2.0 * rank, targets)), torch.Generator().manual_seed(4)
    for name, one in model.named_parameters():
        if name.endswith("lora_B"):
            one.normal_(0.0, 0.05, generator=generator)
    return model


QKV = ("q_proj", "k_proj", "v_proj")


def with_biases() -> Transformer:
    config = ModelConfig("qwen2", 70, 64, 96, 2, num_heads=4, num_kv_heads=2, head_dim=16, attention_bias=True)
    model = Transformer(config, head="lm", dtype=torch.float64)
    for one in model.parameters():
        one.data += torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel()))
    return model


@pytest.mark.parametrize("frozen", [(), ("k_proj.weight",), ("weight",), ("bias",)], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_adjacent_weights_are_one_product_on_gpus(frozen, split, monkeypatch):
    """With the gradients of separate ones, whether those of the products are side by side or not."""
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu",))
    monkeypatch.setattr(triton_import, "DTYPES", (torch.float64,))
    block, generator = with_biases().layers["1"].self_attn, torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 64, generator=generator, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(10, 128, generator=generator, dtype=torch.float64)
    grads = [one.view(2, 5, -1) for one in whole.split([64, 32, 32], dim=-1)]
    grads = [one.clone() for one in grads] if split else grads
    for name, one in block.named_parameters():
        one.requires_grad_(not name.endswith(frozen) if frozen else True)
    inputs = [x, *(one for name in QKV for one in getattr(block, name).parameters() if one.requires_grad)]
    found, wanted = together(x, block, QKV), [getattr(block, name)(x) for name in QKV]
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1
    of_found, of_wanted = (torch.autograd.grad(outputs, inputs, grads) for outputs in (found, wanted))
    for got, one in zip((*found, *of_found), (*wanted, *of_wanted), strict=True):
        torch.testing.assert_close(got, one, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        (joined,) = together(x, block, QKV)
    torch.testing.assert_close(joined, torch.cat(wanted, dim=-1), rtol=1e-12, atol=1e-12)


def test_weights_elsewhere_are_multiplied_one_by_one(monkeypatch):
    """Those that DeepSpeed partitions, and biases or weights that are not adjacent; flat buffers keep them adjacent."""
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu",))
    monkeypatch.setattr(triton_import, "DTYPES", (torch.float64,))
    model, x = with_biases(), torch.ones(3, 64, dtype=torch.float64)
    layout = lay_out(list(model.named_parameters()), replicas=2, in_slices=False, is_tied=False)
    for one, view in zip(layout.weights, layout.views(torch.zeros(layout.numel, dtype=torch.float64)), strict=True):
        one.data = view.copy_(one.data)
    block = model.layers["1"].self_attn
    with torch.no_grad():
        assert len(together(x, block, QKV)) == 1
        block.q_proj.weight.ds_id = 1
        assert len(together(x, block, QKV)) == 3
        del block.q_proj.weight.ds_id
        block.k_proj.bias.data = block.k_proj.bias.data.clone()
        assert len(together(x, block, QKV)) == 3
        assert len(together(x, model.layers["1"].mlp, ("gate_proj", "up_proj"))) == 1
        monkeypatch.undo()
        assert len(together(x, model.layers["1"].mlp, ("gate_proj", "up_proj"))) == 2


@pytest.mark.parametrize("rank", [5, MOST_JOINED // 2 + 1])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_adapters_give_the_same_bits_in_training_and_generation(name, dtype, rank):
    """Where the products of the library do, with plain, joined and packed weights, for every number of rows."""
    use({dtype: Choice(name, **PACKS)})
    layers = small(DTYPES[dtype]).layers
    for targets in (Adapters(1, 1.0).targets, ("q_proj", "v_proj", "up_proj", "o_proj")):
        model = adapted(small(DTYPES[dtype]), rank, targets)
        copies = Copies(model, num_rows=8, num_steps=50)
        for block in (model.layers["1"].self_attn, model.layers["1"].mlp):
            x = torch.randn(33, block.low_rank.layers[0].in_features, generator=torch.manual_seed(2)).to(DTYPES[dtype])
            trained = block.low_rank(x.requires_grad_(), *(one(x) for one in block.low_rank.layers))
            assert all(one.requires_grad for one in trained)
            with torch.no_grad():
                wanted = torch.cat(trained, dim=-1)
                joined = torch.cat([one(x) for one in block.low_rank.layers], dim=-1)
                found = block.low_rank(x, *(one(x) for one in block.low_rank.layers))
                assert torch.equal(torch.cat(found, dim=-1), wanted)
                if LIBRARIES[name].packs:
                    (found,) = copies.forwards[block.low_rank](x[:8], joined[:8].clone())
                    assert torch.equal(found, wanted[:8])
    assert layers["1"].self_attn.low_rank is None


def test_a_frozen_base_is_packed_once_and_keeps_its_bytes():
    """Over iterations of generation and training, which change the factors alone; a changed base is packed anew."""
    use({"float32": Choice("onednn", **PACKS)})
    if not LIBRARIES["onednn"].exists(torch.float32):
        pytest.skip("no oneDNN")
    plain = small(torch.float32)
    Copies(plain, num_steps=50)
    assert plain.kept is None  # its weights may change
    model = adapted(plain, 3)
    before = {name: one.clone() for name, one in plain.named_parameters()}
    for name, one in model.named_parameters():
        one.requires_grad_(name in model.trained_names())
    prompts_BP, bits_BG = torch.arange(12).view(4, 3), torch.randint(2**62, (4, 16), generator=torch.manual_seed(0))
    kept, drawn = [], []
    for _ in range(10):
        tokens_BG, logprobs_BG, _ = generate_rows(model, prompts_BP, bits_BG, eos_ids=())
        kept.append(model.kept)
        drawn.append(logprobs_BG)
        tokens_BT = torch.cat((prompts_BP, tokens_BG), 1)
        logprobs_BTV = model.logits(model(tokens_BT)).log_softmax(-1)
        found_BG = logprobs_BTV[:, 2:-1].gather(-1, tokens_BG[..., None].long()).squeeze(-1)
        torch.testing.assert_close(found_BG, logprobs_BG, rtol=0, atol=1e-5)  # by the factors as they are now
        found_BG.sum().backward()
        with torch.no_grad():
            for one in model.parameters():
                if one.grad is not None:
                    one -= 0.003 * one.grad
                    one.grad = None
    assert kept[0] is not None and all(one is kept[0] for one in kept)
    assert not torch.equal(drawn[0], drawn[-1])
    assert all(
        torch.equal(before[name].view(torch.int32), one.view(torch.int32)) for name, one in plain.named_parameters()
    )
    with torch.no_grad():
        model.layers["0"].mlp.down_proj.weight.mul_(2.0)
    Copies(model, num_steps=50)
    assert model.kept is not kept[0]


SHAPE = ModelShape(2, 64, 96, 4, 2, 16, 70)  # of `small`


def program_of(adapters: Adapters | None, *, adds_adapters: bool = False) -> SimpleNamespace:
    """Returns what the bytes of copies depend on."""
    shape, call = replace(SHAPE, adapters=adapters), SimpleNamespace(name="generate", model="actor")
    made = {"workflow": SimpleNamespace(generate_calls=[call]), "shape": lambda model: shape, "param_bytes": 4}
    workload = SimpleNamespace(**made, adds_adapters=adds_adapters)
    placement = SimpleNamespace(layouts={"generate": Layout((0,), dp=1)})
    return SimpleNamespace(workload=workload, placement=placement, call=call)


SOME = ("k_proj", "o_proj")  # whose copies are joined with those of q and v


@pytest.mark.parametrize(
    ("packs", "targets"), [(False, Adapters(1, 1.0).targets), (True, SOME)], ids=["plain, all", "packed, some"]
)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_joined_copies_are_a_model_with_these_weights(name, dtype, packs, targets):
    """The same tokens and logprobs; and after any number of iterations the base has the bits that it had."""
    use({dtype: Choice(name, **PACKS)})
    if packs and not LIBRARIES[name].packs:
        pytest.skip("it has no order of its own")
    base = small(DTYPES[dtype])
    before, model = [one.clone() for one in base.parameters()], adapted(base, 3, targets)
    prompts_BP, bits_BG = torch.arange(12).view(4, 3), torch.randint(2**62, (4, 16), generator=torch.manual_seed(0))
    options = {"eos_ids": (), "max_sequences": 4 if packs else 64}  # steps that earn packing, or too few
    drawn = []
    for _ in range(4):
        dense, scale = small(DTYPES[dtype]), model.adapters.scale
        for path, layer in model.named_modules():
            if isinstance(layer, Adapted):
                weight = dense.get_submodule(path).weight
                weight.data = (layer.weight.float() + scale * (layer.lora_B @ layer.lora_A)).to(weight.dtype)
        lay_adjacent(dense.layers.values())
        wanted, found = (
            generate_rows(one, prompts_BP, bits_BG, adds_adapters=one is model, **options) for one in (dense, model)
        )
        assert torch.equal(found[0], wanted[0])
        close = 1e-5 if name == "linear" and dtype == "float32" else 0.0  # F.linear may sum joined matrices otherwise
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=close)
        drawn.append(found[1])
        assert model.kept is None  # nothing stays
        for one in model.parameters():
            if one.dtype == torch.float32 and one.shape[0] == 3:
                one.data *= 1.5
    assert not torch.equal(drawn[0], drawn[-1])
    assert all(map(torch.equal, base.parameters(), before))
    apart, _, _ = generate_rows(model, prompts_BP, bits_BG, **options)
    assert apart.shape == found[0].shape


@pytest.mark.parametrize("targets", [Adapters(1, 1.0).targets, SOME, ("down_proj",)], ids=["all", "some", "one"])
def test_joined_copies_are_counted(targets):
    use({})
    model = adapted(small(torch.float32), 3, targets)
    lay_adjacent(model.layers.values())
    mine = {one.untyped_storage().data_ptr() for one in model.parameters()}
    copies = Copies(model, adds_adapters=True)
    made = [one for one, _ in copies.joined.values()]
    made += [one.keywords["weight"] for one in copies.forwards.values() if one is not None]
    held = sum(one.nbytes for one in made if one.untyped_storage().data_ptr() not in mine)
    program = program_of(model.adapters, adds_adapters=True)
    layout = program.placement.layouts["generate"]
    assert held == sum_bytes(model) == copied_bytes(program.workload, program.call, layout, 0) > 0
    whole = packed_bytes(program_of(None), 0)  # packed, they are these copies
    assert packed_bytes(program, 0) == whole - held
    assert copied_bytes(program_of(model.adapters).workload, program.call, layout, 0) == 0
