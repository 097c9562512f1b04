"""Logprobs from hidden states in chunks of the vocabulary, against the twin that holds all logits, with gradients.

The slices of tensor parallelism are in tests/mpi/test_parallel.py.
"""

# N tokens, D hidden, V vocabulary, K kept tokens

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_spmd.kernels import softmax_chunk, token_logprobs
from rlhf_spmd.kernels.known_tokens import KnownTokens

BANNED = (3, 100)
FORMS = {"dispatch": token_logprobs.token_logprobs, "triton": token_logprobs.token_logprobs_triton}
CHUNKS = [1, 3]


def cut(monkeypatch, num_rows: int, vocab_size: int, num_chunks: int) -> None:
    """Makes that many chunks, the last one shorter if the numbers allow it."""
    columns = -(-vocab_size // num_chunks)
    monkeypatch.setattr(token_logprobs, "TILE", 1)
    monkeypatch.setattr(token_logprobs, "MOST_CHUNKS", num_chunks)
    monkeypatch.setattr(token_logprobs, "CHUNK_BYTES", 4 * num_rows * columns)
    assert -(-vocab_size // token_logprobs.columns_per_chunk(num_rows, vocab_size)) == num_chunks


@dataclass
class Case:
    hidden_ND: Tensor
    weight_VD: Tensor
    tokens_N: Tensor
    options: dict

    def outputs(self, form, **more) -> list[Tensor]:
        found = form(self.hidden_ND, self.weight_VD, self.tokens_N, **self.options, **more)
        return list(found) if isinstance(found, tuple) else [found]

    def everything(self, form, **more) -> list[Tensor]:
        """Returns outputs, and the gradients of a random combination of them."""
        outputs = self.outputs(form, **more)
        generator = torch.Generator().manual_seed(5)
        factors = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
        return [*outputs, *torch.autograd.grad(outputs, (self.hidden_ND, self.weight_VD), factors)]


def make_case(num_rows, size, vocab_size, dtype, device, *, banned=False, kept=False, known=False, **options) -> Case:
    """Makes a case: row 1, if there is one, has no token; no token is banned where it stands, and each is in its
    set."""
    generator = torch.Generator().manual_seed(num_rows)
    hidden_ND = torch.randn(num_rows, size, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(vocab_size, size, generator=generator, dtype=torch.float64)
    tokens_N = torch.randint(vocab_size, (num_rows,), generator=generator)
    if known:
        options["known"] = KnownTokens(vocab_size - 30, holes=(0, 5, 6, 60))
        free = [token for token in range(vocab_size - 30) if token not in options["known"].holes]
        tokens_N = torch.tensor(free)[tokens_N % len(free)]
    early_N = torch.rand(num_rows, generator=generator) < 0.5
    if banned:
        early_N &= ~torch.isin(tokens_N, torch.tensor(BANNED))
        ids = tuple(token for token in BANNED if token < vocab_size)
        options["banned"] = (ids, early_N.to(device))
    tokens_N[1:2] = -1
    if kept:
        sets = torch.full((num_rows, 6), -1, dtype=torch.int32)
        for n, token in enumerate(tokens_N.tolist()):
            others = [v for v in torch.randperm(vocab_size, generator=generator).tolist() if v != token]
            own = ([token] + others[: n % 6])[:6] if token >= 0 else []
            sets[n, : len(own)] = torch.tensor(own, dtype=torch.int32)
        options["support_NK"] = sets.to(device)
    hidden_ND, weight_VD = (x.to(device, dtype).requires_grad_() for x in (hidden_ND, weight_VD))
    return Case(hidden_ND, weight_VD, tokens_N.to(device), options)


def tolerance(dtype: torch.dtype, expected: Tensor) -> dict:
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    relative = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    return {"rtol": 0, "atol": relative * max(largest, 1.0)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("num_chunks", "entropy", "dtype"),
    [
        (1, False, torch.float64),
        (3, True, torch.float64),
        (1, True, torch.float32),
        (3, False, torch.float32),
        (3, True, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "banned", "kept", "banned and kept", "known", "known and kept"])
def test_equals_the_twin(monkeypatch, device, form, num_chunks, entropy, kind, dtype):
    if dtype == torch.float64 and form == "triton":
        pytest.skip("float64 is plain torch everywhere")
    more = {"temperature": 0.7, "entropy": entropy, "banned": "banned" in kind, "kept": "kept" in kind}
    more["known"] = "known" in kind
    case = make_case(9, 6, 131, dtype, device, **more)
    cut(monkeypatch, 9, 131, num_chunks)
    expected = case.everything(token_logprobs.token_logprobs_ref)
    for found, twin in zip(case.everything(FORMS[form]), expected, strict=True):
        assert found.dtype == twin.dtype
        torch.testing.assert_close(found, twin, **tolerance(dtype, twin))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_chunks", "kept"), [(1, False), (3, False), (3, True)])
def test_logits_with_a_cap(monkeypatch, device, form, num_chunks, kept):
    """Also where a banned token is kept."""
    for dtype in (torch.float32, torch.bfloat16):
        options = {"kept": kept, "known": not kept, "temperature": 0.7, "entropy": True}
        case = make_case(9, 6, 131, dtype, device, banned=True, **options)
        cut(monkeypatch, 9, 131, num_chunks)
        expected = case.everything(token_logprobs.token_logprobs_ref, cap=1.5)
        assert (expected[0] - case.outputs(token_logprobs.token_logprobs_ref)[0]).abs().max() > 0.5
        for found, twin in zip(case.everything(FORMS[form], cap=1.5), expected, strict=True):
            torch.testing.assert_close(found, twin, **tolerance(dtype, twin))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 2), (1, 4, 129), (5, 2, 4097), (3, 2, 9001)])
def test_odd_shapes(monkeypatch, device, form, shape):
    """Also rows longer than a block of the kernels, and chunks of a single column."""
    for num_chunks in {1, min(shape[2], 3)}:
        case = make_case(*shape, torch.float32, device, entropy=True)
        cut(monkeypatch, shape[0], shape[2], num_chunks)
        expected = case.everything(token_logprobs.token_logprobs_ref)
        for found, twin in zip(case.everything(FORMS[form]), expected, strict=True):
            torch.testing.assert_close(found, twin, **tolerance(torch.float32, twin))


@pytest.mark.parametrize("num_chunks", CHUNKS)
@pytest.mark.parametrize("kind", ["plain", "banned", "kept", "capped", "capped and kept"])
def test_gradients_against_differences(monkeypatch, device, num_chunks, kind):
    more = {"banned": "banned" in kind, "kept": "kept" in kind, "cap": 0.7 if "capped" in kind else None}
    case = make_case(4, 3, 7, torch.float64, device, **more, temperature=1.3)
    cut(monkeypatch, 4, 7, num_chunks)

    def run(hidden_ND, weight_VD):
        return token_logprobs.token_logprobs(hidden_ND, weight_VD, case.tokens_N, **case.options, entropy=True)

    assert torch.autograd.gradcheck(run, (case.hidden_ND, case.weight_VD), eps=1e-6, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_chunks", CHUNKS)
@pytest.mark.parametrize("kept", [False, True])
def test_same_bits_whoever_asks(monkeypatch, device, form, num_chunks, kept):
    """Old logprobs are made without gradient, and training alone asks for entropy: the first ratio is still 1."""
    case = make_case(9, 16, 200, torch.float32, device, kept=kept)
    cut(monkeypatch, 9, 200, num_chunks)
    (trained,) = case.outputs(FORMS[form])
    with torch.no_grad():
        assert torch.equal(case.outputs(FORMS[form])[0], trained)
    assert trained.requires_grad and torch.equal(case.outputs(FORMS[form], entropy=True)[0], trained)


@pytest.mark.parametrize("num_chunks", CHUNKS)
def test_backward_twice_and_in_part(monkeypatch, device, num_chunks):
    """What is kept for the backward pass survives it; a frozen weight or hidden state gets nothing."""
    case = make_case(5, 4, 50, torch.float32, device, entropy=True)
    cut(monkeypatch, 5, 50, num_chunks)
    inputs = case.hidden_ND, case.weight_VD
    logprobs_N, entropy_N = case.outputs(token_logprobs.token_logprobs)
    total = logprobs_N.sum() - 2 * entropy_N.sum()
    first, second = (torch.autograd.grad(total, inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for frozen in (0, 1):
        case.hidden_ND, case.weight_VD = (x.detach().requires_grad_(i != frozen) for i, x in enumerate(inputs))
        logprobs_N, entropy_N = case.outputs(token_logprobs.token_logprobs)
        (logprobs_N.sum() - 2 * entropy_N.sum()).backward()
        found = case.hidden_ND.grad, case.weight_VD.grad
        assert found[frozen] is None and torch.equal(found[1 - frozen], first[1 - frozen])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [False, True])
def test_rows_without_token(device, form, kept):
    """-1, as in padding: 0 without gradient. No rows at all: gradients of 0, not missing ones."""
    case = make_case(4, 3, 11, torch.float32, device, kept=kept, entropy=True)
    outputs = case.outputs(FORMS[form])
    assert all(x[1] == 0 and (x[[0, 2, 3]].abs() > 0).any() for x in outputs)
    gradient_ND, _ = torch.autograd.grad([x[1] for x in outputs], (case.hidden_ND, case.weight_VD))
    assert not gradient_ND.any()
    empty = make_case(0, 3, 11, torch.float32, device, kept=kept, entropy=True)
    for found in empty.everything(FORMS[form]):
        assert not found.any() and found.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_extremes(monkeypatch, device, form, num_chunks):
    """Logits of +-1e4, a chunk of nothing but banned tokens, a token outside its set, a NaN."""
    cut(monkeypatch, 4, 8, num_chunks)
    weight_VD = torch.eye(8, device=device).requires_grad_()
    hidden_ND = torch.zeros(4, 8, device=device)
    hidden_ND[0, 2], hidden_ND[1, 3], hidden_ND[3, 7] = 1e4, -1e4, math.nan
    tokens_N = torch.tensor([2, 5, 0, 0], device=device)
    banned = ((4, 5, 6, 7), torch.tensor([False, False, True, False], device=device))
    run = FORMS[form]
    logprobs_N, entropy_N = run(hidden_ND, weight_VD, tokens_N, banned=banned, entropy=True)
    expected = torch.tensor([0.0, -math.log(7), -math.log(4)], device=device)
    torch.testing.assert_close(logprobs_N[:3], expected)
    torch.testing.assert_close(entropy_N[:3], -expected)
    assert logprobs_N[3].isnan()
    case = Case(hidden_ND[:3].requires_grad_(), weight_VD, tokens_N[:3], {"banned": (banned[0], banned[1][:3])})
    twin = case.everything(token_logprobs.token_logprobs_ref, entropy=True)
    for found, expected in zip(case.everything(run, entropy=True), twin, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected)
    support_NK = torch.tensor([[2, 1, -1], [4, 0, -1], [1, 2, 3], [0, 1, 2]], device=device)
    found_N = run(hidden_ND, weight_VD, tokens_N, support_NK=support_NK)
    assert found_N[0] == 0 and torch.isneginf(found_N[1:3]).all()
    with pytest.raises(AssertionError):
        run(hidden_ND, weight_VD, tokens_N, temperature=0.0)


def test_kernels_leave_memory_beyond_their_columns_alone(device):
    """Chunks are views into a wider buffer, and gradients overwrite the logits."""
    for num_columns in (1, 7, 4097):
        wide_NC = torch.randn(3, num_columns + 5, device=device)
        logits_NC, rest_N5 = wide_NC[:, :num_columns], wide_NC[:, num_columns:].clone()
        tokens_N = torch.tensor([0, num_columns - 1, num_columns + 2], device=device)
        expected_4N = softmax_chunk.statistics_ref(logits_NC, tokens_N, temperature=0.7, entropy=True)
        found_4N = softmax_chunk.statistics_triton(logits_NC, tokens_N, temperature=0.7, entropy=True)
        torch.testing.assert_close(found_4N, expected_4N, rtol=1e-5, atol=1e-5)
        rows = [torch.rand(3, device=device) for _ in range(4)]
        out_NC = torch.empty(3, num_columns, device=device)
        softmax_chunk.gradients_ref(logits_NC, tokens_N, *rows, temperature=0.7, out=out_NC)
        softmax_chunk.gradients_triton(logits_NC, tokens_N, *rows, temperature=0.7, out=logits_NC)
        torch.testing.assert_close(logits_NC, out_NC, rtol=1e-5, atol=1e-5)
        assert torch.equal(wide_NC[:, num_columns:], rest_N5)


class Largest(TorchDispatchMode):
    """Notes the most numbers that any tensor has that an operation makes or writes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.numel = max(self.numel, x.numel() if isinstance(x, Tensor) else 0)
        return out


@pytest.mark.parametrize("kept", [False, True])
def test_logits_never_exist_at_once(monkeypatch, device, kept):
    num_rows, vocab_size = 64, 1000
    case = make_case(num_rows, 3, vocab_size, torch.float32, device, kept=kept, banned=True, entropy=True)
    cut(monkeypatch, num_rows, vocab_size, 10)
    with Largest() as largest:
        case.everything(token_logprobs.token_logprobs)
    assert largest.numel == num_rows * vocab_size // 10
    with Largest() as largest:
        case.everything(token_logprobs.token_logprobs_ref)
    assert largest.numel >= num_rows * vocab_size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_chunks", CHUNKS)
@pytest.mark.parametrize("kind", ["plain", "banned", "kept"])
def test_which_tokens_are_the_likeliest(monkeypatch, device, form, num_chunks, kind):
    """Half of the tokens are the likeliest; to ask for it changes no bit of the logprobs."""
    case = make_case(9, 6, 131, torch.float32, device, banned=kind == "banned", kept=kind == "kept", temperature=0.7)
    cut(monkeypatch, 9, 131, num_chunks)
    if kind != "kept":
        best_N = (case.hidden_ND @ case.weight_VD.T).argmax(1)
        case.tokens_N[::2] = torch.where(case.tokens_N >= 0, best_N, -1)[::2]
    logprobs_N, top_N = case.outputs(FORMS[form], top=True)
    _, expected_N = case.outputs(token_logprobs.token_logprobs_ref, top=True)
    assert torch.equal(top_N, expected_N) and top_N.any() and not top_N.all() and top_N.dtype == torch.bool
    assert torch.equal(logprobs_N, case.outputs(FORMS[form])[0])
    (logprobs_N.sum() + 0 * top_N.sum()).backward()
    everything = case.outputs(FORMS[form], top=True, entropy=True)
    assert len(everything) == 3 and torch.equal(everything[2], top_N)
