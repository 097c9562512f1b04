"""Mixtures of experts: gradients against transformers', routes, ties, and what a row does not depend on."""

import pytest
import torch

from rlhf_spmd.kernels.experts import choose, mixture, router_logits
from rlhf_spmd.kernels.products import DTYPES, LIBRARIES, Choice, packed, use
from rlhf_spmd.kernels.silu_mul import silu_mul, swiglu
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.hf import load_model
from rlhf_spmd.model.routes import RouterLosses, Routes
from rlhf_spmd.model.transformer import Transformer
from tests.unit.model.families.test_mixtures import theirs
from tests.unit.model.test_hf import TOKENS_BT
from tests.unit.model.test_transformer import some_tokens

LENGTHS = 7, 3, 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns transformers' mixture of a case in float64, and ours with the same weights."""

    def made(case):
        folder, model = tmp_path_factory.mktemp("mixture"), theirs(case)
        model.save_pretrained(folder)
        return model.double(), load_model(folder, head="lm", dtype=torch.float64).requires_grad_()

    return made


@pytest.mark.parametrize("case", ["dense first", "norms of all heads", "all of 5"])
def test_gradients_equal_transformers(case, saved):
    model, mine = saved(case)
    model.set_experts_implementation("eager")
    both = model(TOKENS_BT).logits, mine.logits(mine(TOKENS_BT))
    torch.testing.assert_close(*both, atol=2e-6, rtol=0)  # its norms and router are float32 here, too
    for logits in both:
        (logits * logits.detach().cos()).sum().backward()
    theirs_of = {name.removeprefix("model."): one.grad for name, one in model.named_parameters()}
    for name, one in mine.named_parameters():
        expected = theirs_of[name.removesuffix(".weight") if ".experts." in name else name]
        torch.testing.assert_close(one.grad.view_as(expected), expected, atol=1e-5, rtol=1e-5)


def run(mine: Transformer, routes: Routes | None, *, recompute: bool = False) -> list[torch.Tensor]:
    """Returns logits of packed rows, and every gradient of a loss of them."""
    mine.recompute, context = recompute, Packed(LENGTHS)
    context.routes = routes
    mine.zero_grad()
    logits_NV = mine.logits(mine(some_tokens(1, sum(LENGTHS), 61)[0], context=context))
    (logits_NV * logits_NV.detach().cos()).sum().backward()
    return [logits_NV.detach(), *(one.grad.clone() for one in mine.parameters())]


@pytest.mark.parametrize("recompute", [False, True])
def test_routes_are_recorded_and_replayed(recompute, saved):
    """Given ids equal to its own give a layer the same bits; others change outputs, and the router learns from them. A
    layer that is computed again is neither recorded nor counted twice."""
    _, mine = saved("dense first")
    plain, own = run(mine, None), Routes()
    assert all(map(torch.equal, plain, run(mine, own, recompute=recompute)))
    taken, num = own.taken, sum(LENGTHS)
    assert taken.shape == (num, 1, 4) and taken.dtype == torch.uint8  # of sparse layers
    assert (taken.int().diff(dim=-1) > 0).all() and own.num_given == own.num_disagreeing == 0
    again = Routes(taken)
    assert all(map(torch.equal, plain, run(mine, again, recompute=recompute)))
    assert again.num_given == num and again.num_disagreeing == 0 and torch.equal(again.taken, taken)

    other = taken.clone()
    other[2, 0] = torch.tensor([i for i in range(16) if i not in taken[2, 0]][:4])
    given = Routes(other, torch.arange(num) != 5)
    found = run(mine, given, recompute=recompute)
    assert given.num_given == num - 1 and given.num_disagreeing == 1 and torch.equal(given.taken, other)
    changed = ((found[0] - plain[0]).abs() > 1e-4).any(dim=-1)
    assert changed.tolist() == [index == 2 for index in range(num)]  # in the last layer, so no other token
    assert mine.layers["1"].mlp.gate.weight.grad[other[2, 0].long()].abs().min() > 0
    few = Routes(other[:4])  # the rest is padding
    run(mine, few, recompute=recompute)
    assert few.num_disagreeing == 1 and few.num_given == 4 and torch.equal(few.taken[4:], taken[4:])


def test_of_equal_experts_the_first_are_taken():
    router_ED = torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 9.0]])
    logits_NE = router_logits(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), router_ED)
    assert choose(logits_NE.softmax(dim=-1), 2).tolist() == [[1, 2], [0, 4], [0, 4]]


def some_rows(num: int, *, experts: int = 6, hidden: int = 40, inner: int = 24, k: int = 2) -> list:
    """Returns rows, their experts but for the last one, weights, and matrices."""
    generator = torch.Generator().manual_seed(num)
    x_ND = torch.randn(num, hidden, generator=generator)
    ids_Nk = torch.rand(num, experts - 1, generator=generator).argsort()[:, :k].sort().values
    weights_Nk = torch.rand(num, k, generator=generator)
    gate_ups = torch.randn(experts, 2 * inner, hidden, generator=generator).div(7)
    downs = torch.randn(experts, hidden, inner, generator=generator).div(5)
    return [x_ND, ids_Nk, weights_Nk, [*gate_ups], [*downs]]


def test_a_sum_of_slices_is_the_mixture_and_no_expert_lacks_a_gradient():
    x_ND, ids_Nk, weights_Nk, gate_ups, downs = some_rows(9)
    slow_ND = torch.zeros_like(x_ND)
    for n, e in ((n, e) for n in range(9) for e in range(2)):
        gate_I, up_I = (gate_ups[ids_Nk[n, e]] @ x_ND[n]).chunk(2)
        slow_ND[n] += weights_Nk[n, e] * (downs[ids_Nk[n, e]] @ (torch.nn.functional.silu(gate_I) * up_I))
    matrices = [one.requires_grad_() for one in (*gate_ups, *downs)]
    whole_ND = mixture(x_ND, ids_Nk, weights_Nk, gate_ups, downs, gated=swiglu)
    torch.testing.assert_close(whole_ND, slow_ND, atol=1e-5, rtol=1e-5)
    parts = [
        mixture(x_ND, ids_Nk, weights_Nk, gate_ups[i : i + 3], downs[i : i + 3], first=i, gated=swiglu) for i in (0, 3)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole_ND)
    nothing_ND = mixture(x_ND, ids_Nk, weights_Nk, gate_ups[5:], downs[5:], first=5, gated=swiglu)
    (whole_ND + nothing_ND).sum().backward()
    assert not nothing_ND.any() and not matrices[5].grad.any() and all(one.grad is not None for one in matrices[:5])


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["native", "onednn"])
def test_a_row_has_the_same_bits_alone(name, dtype, packs):
    """And by one product for each expert, which gradients need, as by all in one call."""
    if not LIBRARIES[name].exists(DTYPES[dtype]):
        pytest.skip(f"no {name} for {dtype} here")
    x_ND, ids_Nk, weights_Nk, *matrices = some_rows(200)
    x_ND, weights_Nk = x_ND.to(DTYPES[dtype]), weights_Nk.to(DTYPES[dtype])
    use({dtype: Choice(name)})
    try:
        gate_ups, downs = ([one.to(DTYPES[dtype]) for one in of] for of in matrices)
        if packs:
            gate_ups, downs = ([packed(one, 2) for one in of] for of in (gate_ups, downs))
        by_each_ND = mixture(x_ND, ids_Nk, weights_Nk, gate_ups, downs, gated=silu_mul)
        with torch.no_grad():
            for rows in (slice(0, 200), slice(0, 32), *(slice(n, n + 1) for n in range(32))):
                some_ND = mixture(x_ND[rows], ids_Nk[rows], weights_Nk[rows], gate_ups, downs, gated=silu_mul)
                assert torch.equal(some_ND, by_each_ND[rows]), rows
    finally:
        use({})


def test_losses_of_routers_are_those_of_transformers():
    """Their values and gradients, from two micro-batches of tokens of which some do not count."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    layers, num, experts, k, balance, z = 3, 20, 8, 2, 0.3, 0.2
    generator = torch.Generator().manual_seed(5)
    logits_LNE = torch.randn(layers, num, experts, generator=generator, dtype=torch.float64).requires_grad_()
    counts_N = torch.rand(num, generator=generator) < 0.8
    counted_LnE = logits_LNE[:, counts_N]
    theirs_balance = load_balancing_loss_func(tuple(counted_LnE), experts, k)
    theirs_z = counted_LnE.logsumexp(dim=-1).square().mean()
    (balance * theirs_balance + z * theirs_z).backward()

    number = counted_LnE.shape[:2].numel()
    ids = counted_LnE.detach().topk(k).indices
    shares_E = torch.bincount(ids.flatten(), minlength=experts) / number
    sums, found_LNE = torch.zeros(4, dtype=torch.float64), torch.zeros_like(logits_LNE)
    for part in (slice(0, 12), slice(12, num)):
        for layer in range(layers):
            routes = Routes(torch.zeros(num, layers, k, dtype=torch.uint8)[part], counts_N[part])
            routes.losses = RouterLosses(shares_E, number, balance, z)
            logits_nE = logits_LNE[layer, part].detach().requires_grad_()
            made_nE = routes.with_losses(layer, logits_nE)
            assert torch.equal(made_nE, logits_nE)
            made_nE.mul(0.0).sum().backward()
            found_LNE[layer, part] = logits_nE.grad
            sums += routes.losses.sums[layer]
    torch.testing.assert_close(found_LNE, logits_LNE.grad, atol=1e-6, rtol=1e-6)
    expected = torch.stack((theirs_balance, theirs_z)).detach()
    torch.testing.assert_close(sums[:2] / number, expected, atol=1e-6, rtol=1e-6)
    assert sums[3] == number
