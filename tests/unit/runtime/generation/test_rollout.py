"""Sampling with a KV cache against a slow twin: one sequence at a time, a full forward pass for every token."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_spmd.model import transformer
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tests.draws import random_responses
from tests.slow_sample import slow_draw

VOCAB, MAX_RESPONSE = 63, 12
SELDOM, OFTEN = (1,), tuple(range(1, 16))  # end-of-sequence ids: a response ends seldom, or after about four tokens
SHAPES = {
    "llama": {},
    "mha tied": {"num_kv_heads": 4, "tie_embeddings": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 12},
    "mixture": {
        "model_type": "mixtral",
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_size": 20,
        "norm_topk": True,
    },
    "window": {
        **{"model_type": "mistral", "sliding_window": 5, "sliding_layers": (0, 1)},
        **{"attention_cap": 2.0, "logits_cap": 3.0},
    },
}
# Nats per token, with about ten times the largest difference found here: 3.1e-6 in float32, 0.045 in bfloat16 and, as
# logprobs are stored in float32, 2.8e-7 in float64. (The models are wild: with the usual initial weights, std 0.02, it
# is 4.8e-7 and 0.0021.) The parity gate's own limits are 1e-4 and 2.
PARITY = {torch.float32: 3e-5, torch.bfloat16: 0.3, torch.float64: 3e-6}


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0, **sizes) -> Transformer:
    shape = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    model = Transformer(ModelConfig(**(shape | sizes)), head="lm", dtype=torch.float32)
    model.init_weights(seed, std=0.2)
    return model.to(dtype).requires_grad_(False)


def make_prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Makes prompts of 1 to 9 tokens each, any token, the end-of-sequence ids included."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, 1 + (5 * i + seed) % 9).tolist() for i in range(num)]


def draw(num: int, seed: int = 0) -> Tensor:
    return random_responses(num, MAX_RESPONSE, seed)


def run(model: Transformer, prompts: list[list[int]], bits_BG: Tensor, **options):
    return generate_rows(model, pad(prompts), bits_BG, **options)


def slow_response(
    model: Transformer, prompt: list[int], bits_G, *, temperature=1.0, eos_ids=(), min_new_tokens=0, **limits
) -> tuple[list[int], list[float], list[list[int]]]:
    """Returns tokens, logprobs and sampling supports by the textbook, in float64, without a cache."""
    response, logprobs, sets = [], [], []
    for t, bits in enumerate(bits_G.tolist()):
        logits = model.logits(model(torch.tensor([prompt + response]))[0, -1]).double().numpy() / temperature
        if t < min_new_tokens:
            logits[list(eos_ids)] = -np.inf
        kept = slow_kept(softmax(logits), **limits)
        sets.append(kept)
        logits[[v for v in range(VOCAB) if v not in kept]] = -np.inf
        probabilities = softmax(logits)
        token = slow_draw(probabilities.tolist(), bits)
        response.append(token)
        logprobs.append(float(np.log(probabilities[token])))
        if token in eos_ids:
            break
    return response, logprobs, sets


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def slow_kept(probabilities: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Returns the most likely tokens, in that order, until one of the three limits ends the list."""
    likely = [int(v) for v in np.argsort(-probabilities) if probabilities[v] > 0][: top_k or VOCAB]
    whole, kept, mass = sum(probabilities[v] for v in likely), [], 0.0
    for v in likely:
        if kept and (mass >= top_p * whole or probabilities[v] < min_p * probabilities[likely[0]]):
            break
        kept.append(v)
        mass += probabilities[v]
    return kept


def rows(responses_BG: Tensor) -> list[list[int]]:
    """Returns rows without their padding, which must be at the end only."""
    found = []
    for row in responses_BG.tolist():
        tokens = list(itertools.takewhile(lambda token: token >= 0, row))
        assert row[len(tokens) :] == [-1] * (len(row) - len(tokens))
        found.append(tokens)
    return found


CASES = {
    "plain": {},
    "cold": {"temperature": 0.05},  # almost greedy
    "warm": {"temperature": 1.7, "eos_ids": SELDOM},
    "ends early": {"eos_ids": OFTEN, "temperature": 0.7},
    "not before 3": {"eos_ids": OFTEN, "min_new_tokens": 3},
    "never": {"eos_ids": OFTEN, "min_new_tokens": MAX_RESPONSE},
    "top-k": {"eos_ids": OFTEN, "min_new_tokens": 2, "top_k": 7, "temperature": 1.3},
    "top-1": {"eos_ids": OFTEN, "top_k": 1},
    "top-p": {"eos_ids": OFTEN, "top_k": VOCAB + 7, "top_p": 0.6},
    "min-p": {"eos_ids": SELDOM, "top_k": 20, "top_p": 0.95, "min_p": 0.3, "temperature": 1.6},
}


def test_every_norm_of_generation_is_the_kernel(monkeypatch):
    """Those of queries and keys, too."""
    model, prompts, called = make_model(**SHAPES["qwen3"]), make_prompts(3), []
    monkeypatch.setattr(transformer.F, "rms_norm", lambda x, *_: called.append(x.shape) or x)
    run(model, prompts, draw(3))
    assert not called


@pytest.mark.parametrize(
    ("num_rows", "name", "shape"),
    [
        *((5, name, shape) for name, shape in itertools.product(CASES, SHAPES)),
        *((n, "ends early", "llama") for n in (1, 2, 13)),
    ],
)
def test_equals_the_slow_twin(num_rows, name, shape):
    """In batches of any size, so no row depends on the others."""
    options, shape = CASES[name], SHAPES[shape]
    model, prompts = make_model(**shape), make_prompts(num_rows, seed=num_rows)
    bits_BG = draw(num_rows, seed=num_rows)
    responses_BG, logprobs_BG, support_BGK = run(model, prompts, bits_BG, **options)
    assert responses_BG.dtype == torch.int64 and logprobs_BG.dtype == torch.float32
    slow = [slow_response(model, prompt, bits_G, **options) for prompt, bits_G in zip(prompts, bits_BG, strict=True)]
    assert rows(responses_BG) == [tokens for tokens, _, _ in slow]
    for found, (_, expected, _) in zip(logprobs_BG.tolist(), slow, strict=True):
        assert found[: len(expected)] == pytest.approx(expected, abs=1e-5 / min(options.get("temperature", 1.0), 1.0))
        assert not any(found[len(expected) :])
    if "top_k" not in options:
        assert support_BGK is None
        return
    assert support_BGK.shape == (num_rows, MAX_RESPONSE, options["top_k"]) and support_BGK.dtype == torch.int32
    for found_GK, (_, _, expected) in zip(support_BGK, slow, strict=True):
        assert rows(found_GK)[: len(expected)] == expected
        assert (found_GK[len(expected) :] == -1).all()


@pytest.mark.parametrize(("dtype", "std"), list(zip(PARITY, (0.02, 0.2, 0.2), strict=True)))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_invariant_7_logprobs_are_those_of_teacher_forcing(shape, std, dtype):
    """The generator's logprob of every sampled token against one pass over the finished sequences."""
    model = make_model(**shape)
    model.init_weights(1, std=std)
    model.to(dtype)
    prompts, worst = make_prompts(24), 0.0
    cases = [(1.0, OFTEN, 0, 0), (0.6, SELDOM, 2, 0), (1.5, OFTEN, 4, 0), (0.8, OFTEN, 1, 9)]
    for number, (temperature, eos_ids, least, top_k) in enumerate(cases):
        sampling = {"temperature": temperature, "eos_ids": eos_ids, "min_new_tokens": least}
        responses_BG, logprobs_BG, support_BGK = run(
            model, prompts, draw(24, number), **sampling, top_k=top_k, top_p=0.9 if top_k else 1.0
        )
        batch = Sequences.join(pad(prompts), responses_BG)
        forced_BG = response_logprobs(model, batch, forward(model, batch), support_BGK, **sampling)
        assert logprobs_BG.dtype == torch.float32
        assert not logprobs_BG[responses_BG < 0].any() and not forced_BG[responses_BG < 0].any()
        assert (logprobs_BG[responses_BG >= 0] <= 0).all()
        worst = max(worst, float((logprobs_BG.double() - forced_BG.double()).abs().max()))
    print(f"parity {dtype} std {std}: {worst:.1e}")
    assert worst < PARITY[dtype]


def test_uninitialised_memory_cannot_leak(monkeypatch):
    """A masked slot has weight 0, but 0 * NaN is NaN: memory that nobody has written must not reach the products."""
    model, prompts, bits_BG = make_model(), make_prompts(9), draw(9)
    expected = run(model, prompts, bits_BG, eos_ids=OFTEN)

    real_empty = torch.empty

    def dirty(*arguments, **options) -> Tensor:
        tensor = real_empty(*arguments, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", dirty)
    for _ in range(3):  # the allocator hands out what was freed last
        freed = [torch.full((2, 9, 2, 21, 8), torch.nan) for _ in range(8)]
        del freed
        found = run(model, prompts, bits_BG, eos_ids=OFTEN)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
