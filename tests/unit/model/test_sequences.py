"""Packed batches against one sequence at a time: where tokens go, and which hidden state belongs to which."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs, response_values, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.prompts import pad

VOCAB, HIDDEN, EOS, MAX_PROMPT, MAX_RESPONSE = 29, 16, 3, 7, 6
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def make_model(head: str) -> Transformer:
    config = ModelConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
    )
    model = Transformer(config, head=head, dtype=torch.float64)
    model.init_weights(5, std=0.3, score_std=0.5)
    return model


def make_pairs(num: int = 9, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Makes prompts of 1 to 7 tokens with responses of 1 to 6, some full, some ended; one without a response."""
    rng = np.random.default_rng(seed)
    pairs = []
    for i in range(num):
        prompt = rng.integers(0, VOCAB, 1 + (i * 3 + seed) % MAX_PROMPT).tolist()
        response = rng.integers(4, VOCAB, (i * 5 + seed) % (MAX_RESPONSE + 1)).tolist()
        if response and i % 2:
            response[-1] = EOS
        pairs.append((prompt, response))
    return pairs


def join(pairs, max_prompt: int = MAX_PROMPT, max_response: int = MAX_RESPONSE) -> Sequences:
    prompts, responses = zip(*pairs, strict=True)
    return Sequences.join(pad(prompts, max_prompt), pad(responses, max_response))


def hidden(model: Transformer, tokens: list[int]) -> Tensor:
    """Returns [T, D] of one sequence alone, without any padding."""
    return model(torch.tensor([tokens]))[0]


def logprobs(model: Transformer, batch: Sequences, *arguments, **options) -> Tensor:
    return response_logprobs(model, batch, forward(model, batch), *arguments, **options)


def values(model: Transformer, batch: Sequences) -> Tensor:
    return response_values(model, batch, forward(model, batch))


def scores(model: Transformer, batch: Sequences) -> Tensor:
    return sequence_scores(model, batch, forward(model, batch))


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_response_logprobs(temperature, least):
    model, pairs = make_model("lm"), [p for p in make_pairs() if len(p[1]) > least or not p[1]]
    options = {"temperature": temperature, "eos_ids": (EOS, 11), "min_new_tokens": least}
    found_BG, entropy_BG = logprobs(model, join(pairs), **options, entropy=True)
    assert torch.equal(logprobs(model, join(pairs), **options), found_BG)
    for found_G, entropy_G, (prompt, response) in zip(found_BG, entropy_BG, pairs, strict=True):
        logits_TV = model.logits(hidden(model, prompt + response)) / temperature
        for t, token in enumerate(response):
            row_V = logits_TV[len(prompt) + t - 1].clone()
            if t < least:
                row_V[[EOS, 11]] = -math.inf
            torch.testing.assert_close(found_G[t], row_V.log_softmax(0)[token], **CLOSE)
            expected = torch.distributions.Categorical(logits=row_V[row_V > -math.inf]).entropy()
            torch.testing.assert_close(entropy_G[t], expected, **CLOSE)
        assert not found_G[len(response) :].any() and not entropy_G[len(response) :].any()


@pytest.mark.parametrize("kept", [False, True])
def test_a_row_without_response_has_no_gradient(kept):
    """What a rank without data passes (Calls._micro_batches): loss 0 and gradients that are 0, not NaN nor missing."""
    batch = Sequences.join(pad([[0]], MAX_PROMPT), torch.full((1, MAX_RESPONSE), -1))
    support_BGK = torch.zeros(1, MAX_RESPONSE, 4, dtype=torch.int32) if kept else None
    model = make_model("lm")
    found_BG = logprobs(model, batch, support_BGK, temperature=0.7, eos_ids=(0,), min_new_tokens=2)
    assert not found_BG.any()
    found_BG.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    critic = make_model("scalar")
    values(critic, batch)[:, 1:].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in critic.parameters())


def everything(pairs, extra: int = 0) -> list[Tensor]:
    """Returns logprobs, values and scores of a batch, with `extra` columns of padding in prompts and responses."""
    batch = join(pairs, MAX_PROMPT + extra, MAX_RESPONSE + extra)
    logprobs_BG = logprobs(make_model("lm"), batch, temperature=0.9, eos_ids=(EOS,), min_new_tokens=0)
    critic = make_model("scalar")
    return [logprobs_BG, values(critic, batch), scores(critic, batch)]


@pytest.mark.parametrize("extra", [1, 9])
def test_invariant_4_padding(extra):
    pairs = make_pairs()
    for wide, narrow in zip(everything(pairs, extra), everything(pairs), strict=True):
        if wide.dim() == 1:
            torch.testing.assert_close(wide, narrow, **CLOSE)
            continue
        torch.testing.assert_close(wide[:, : narrow.shape[1]], narrow, **CLOSE)
        assert not wide[:, narrow.shape[1] :].any()
