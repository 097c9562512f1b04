"""Products of every library: bits, gradients, and the weights of a model that learns."""

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rlhf_spmd.kernels import products
from rlhf_spmd.kernels.products import BACKWARD, DTYPES, LIBRARIES, Choice, packed, product, product_in, use
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.linear import Copies
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.cost.memory import packed_bytes
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.workload import ModelShape

SHAPES = ((576, 192), (320, 256), (33, 100), (7, 3))  # [O, I], also of uneven slices
CASES = [(name, dtype) for name, one in LIBRARIES.items() for dtype in DTYPES if one.exists(DTYPES[dtype])]


@pytest.fixture(autouse=True)
def _linear_afterwards() -> Iterator[None]:
    yield
    use({})


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(shape, generator=generator) * 0.2).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_plain_packed_and_joined_weights_give_the_same_bits(name, dtype):
    use({dtype: Choice(name)})
    far = 16 * torch.finfo(DTYPES[dtype]).eps
    for num_out, num_in in SHAPES:
        x, weight, other, bias = tensors(DTYPES[dtype], (65, num_in), (num_out, num_in), (64, num_in), (num_out,))
        both = torch.cat((weight, other))
        for rows in (1, 2, 8, 33, 65) if LIBRARIES[name].packs else (65,):
            wanted = product(x[:rows], weight, bias)
            exact = F.linear(x[:rows].double(), weight.double(), bias.double())
            torch.testing.assert_close(wanted.double(), exact, atol=far, rtol=far)
            if LIBRARIES[name].packs:
                assert torch.equal(product(x[:rows], packed(weight, 32), bias), wanted)
                assert torch.equal(product(x[:rows], packed(both, 32))[:, :num_out], product(x[:rows], weight))
                assert torch.equal(product(x[:rows], both)[:, :num_out], product(x[:rows], weight))
            assert torch.equal(product(x[:rows, None], weight, bias)[:, 0], wanted)
            out = torch.empty(rows, num_out, dtype=x.dtype)
            assert torch.equal(product_in(out, x[:rows], weight), product(x[:rows], weight))
        assert product(x[:0], weight, bias).shape == (0, num_out)


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[0] != "linear"])
def test_a_row_does_not_depend_on_the_rows_beside_it(name, dtype):
    use({dtype: Choice(name)})
    for num_out, num_in in SHAPES:
        x, weight = tensors(DTYPES[dtype], (513, num_in), (num_out, num_in))
        whole = product(x, weight)
        for first, last in ((0, 1), (5, 6), (0, 2), (3, 35), (1, 513)):
            assert torch.equal(product(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backward", BACKWARD)
def test_gradients(name, dtype, bias, backward):
    """Against float64, for rows [B, T, I] that are a view, a weight that is used twice, and inputs without gradient."""
    if (backward, dtype) not in CASES:
        pytest.skip(f"no products by {backward} in {dtype} here")
    use({dtype: Choice(name, backward)})
    for num_out, num_in in SHAPES:
        given = tensors(DTYPES[dtype], (4, num_in, 3), (num_out, num_in), (num_out,))
        wide, own = ([one.to(to).requires_grad_() for one in given] for to in (torch.float64, DTYPES[dtype]))
        losses = []
        for x, weight, bias_O in (wide, own):
            y = product(x.transpose(1, 2), weight, bias_O if bias else None)
            (y * y.detach().cos() + product(x.detach().transpose(1, 2)[:, 1], weight)[:, None]).sum().backward()
            losses.append(y)
        far = 8 * num_out * torch.finfo(DTYPES[dtype]).eps
        torch.testing.assert_close(losses[1].double(), losses[0], atol=far, rtol=far)
        for mine, exact in zip(own[: 2 + bias], wide[: 2 + bias], strict=True):
            torch.testing.assert_close(mine.grad.double(), exact.grad, atol=far * 4, rtol=far)
        frozen = product(own[0].detach().transpose(1, 2), own[1].detach(), own[2] if bias else None)
        assert frozen.requires_grad == bias


def small(dtype: torch.dtype, **options) -> Transformer:
    sizes = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}
    biases = {"mlp_bias": True, "attention_bias": True, "attention_output_bias": True}
    config = ModelConfig("llama", vocab_size=70, head_dim=16, max_position_embeddings=64, **sizes, **biases)
    model = Transformer(config, head="lm", dtype=dtype, seed=1, **options)
    return model


def of_responses(model: Transformer, batch: Sequences) -> torch.Tensor:
    return response_logprobs(model, batch, forward(model, batch), temperature=1.0, eos_ids=(), min_new_tokens=0)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_weight_of_a_model_learns(name, dtype):
    """oneDNN's operators leave gradients None with a warning only. Recomputed layers give the same bits."""
    use({dtype: Choice(name)})
    batch, found = Sequences.join(torch.arange(1, 13).view(3, 4), torch.arange(13, 28).view(3, 5)), []
    for recompute in (False, True):
        model = small(DTYPES[dtype], recompute=recompute).requires_grad_()
        logprobs_BG = of_responses(model, batch)
        logprobs_BG.sum().backward()
        assert all(one.grad is not None and one.grad.abs().max() > 0 for one in model.parameters())
        found.append([logprobs_BG, *(one.grad for one in model.parameters())])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_what_cannot_be_had_does_not_exist(monkeypatch):
    """An operator that raises, and one that computes something else."""

    def raises(*_):
        raise RuntimeError("could not create a primitive descriptor")

    for multiply in (raises, lambda self, x_NI, weight, bias: F.linear(x_NI, torch.ones(40, 48), bias)):
        monkeypatch.setattr(products.OneDNN, "multiply", multiply)
        assert not LIBRARIES["onednn"].exists(torch.float32)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_copies_take_the_bytes_of_the_forecast(name, dtype):
    """As this process grows."""
    use({dtype: Choice(name)})
    sizes = {"hidden_size": 768, "intermediate_size": 1600, "vocab_size": 8000, "head_dim": 96, "num_kv_heads": 4}
    config = ModelConfig("llama", num_layers=2, num_heads=8, max_position_embeddings=64, **sizes)
    model = Transformer(config, head="lm", dtype=DTYPES[dtype], device="meta")
    weights = {key: torch.ones(one.shape, dtype=one.dtype) for key, one in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    shape = ModelShape(2, 768, 1600, 8, 4, 96, 8000)
    call = SimpleNamespace(name="generate", model="actor")
    workload = SimpleNamespace(
        workflow=SimpleNamespace(generate_calls=[call]), shape=lambda model: shape, param_bytes=DTYPES[dtype].itemsize
    )
    layouts = {"generate": Layout((0,), dp=1)}
    program = SimpleNamespace(workload=workload, placement=SimpleNamespace(layouts=layouts))
    wanted, before = packed_bytes(program, 0) if LIBRARIES[name].packs else 0, resident_bytes()
    copies = Copies(model, num_rows=8, num_steps=1e6, num_logits=8000)
    stacked = 2 * 1600 * 768 * DTYPES[dtype].itemsize  # gate and up before packing, which malloc may keep
    assert -0.05 * wanted - 2**21 < resident_bytes() - before - wanted < 0.05 * wanted + stacked + 2**21
    assert (copies.joined is None) == (wanted == 0)


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests have freed would be taken again
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
