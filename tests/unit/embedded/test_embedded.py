"""The embedded default: small, loadable by us and by transformers, fluent, judged by a reward model that is right."""

import json
import random
import re

import pytest
import torch

from rlhf_spmd import embedded
from rlhf_spmd.model.hf import load_model, load_tokenizer
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tests.draws import random_responses
from tools.embedded import grammar

ACTOR, REWARD = embedded.path_of("actor"), embedded.path_of("reward")


def words() -> frozenset[str]:
    """Returns every word that the grammar can produce, in lower case."""
    tables = [
        grammar.WOMEN,
        grammar.MEN,
        grammar.COMPANIONS,
        grammar.TIMES,
        grammar.CITIES,
        [who for who, _ in grammar.OTHERS],
        [word for row in grammar.PRONOUNS.values() for word in row],
    ]
    for kind in grammar.KINDS:
        tables += [kind.openings, kind.places, kind.items, [noun for noun, _ in kind.things]]
    text = " ".join(phrase for table in tables for phrase in table)
    text += " ".join(["", *grammar.VALENCES, "the and but with felt was were"])
    return frozenset(re.findall(r"[a-z']+", re.sub(r"\{\w+\}", " ", text).lower()))


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def final_scores(model, rows):
    """Returns the reward model's score at each row's last token, [B]."""
    tokens_BT = padded(rows)
    with torch.no_grad():
        return model.scalar(model(tokens_BT))[torch.arange(len(rows)), (tokens_BT >= 0).sum(1) - 1]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ACTOR)


@pytest.fixture(scope="module")
def prompts():
    lines = embedded.path_of("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="module")
def reward():
    return load_model(REWARD, head="scalar")


@pytest.fixture(scope="module")
def samples(tokenizer, prompts):
    """Samples (prompt ids, response ids, response text) of the actor on 256 prompts."""
    ids = [tokenizer.encode(prompt) for prompt in prompts[:256]]
    bits_BG = random_responses(len(ids), 24)
    actor = load_model(ACTOR, head="lm")
    responses_BG, *_ = generate_rows(actor, padded(ids), bits_BG, eos_ids=(tokenizer.eos_token_id,))
    responses = [[token for token in row if token >= 0] for row in responses_BG.tolist()]
    return [(start, end, tokenizer.decode(end)) for start, end in zip(ids, responses, strict=True)]


def test_grammar_gives_the_same_text_for_the_same_seed():
    first, again = ([grammar.scene(random.Random(seed)) for seed in range(20)] for _ in range(2))
    assert first == again
    assert len({text for _, text in first}) > 15


def test_tokenizer_reads_any_text(tokenizer):
    ids = tokenizer.encode("Žluťoučký kůň 🐎\n<|end|>")
    assert tokenizer.decode(ids).startswith("Žluťoučký kůň 🐎")
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert ids[0] == tokenizer.bos_token_id


def test_samples_are_whole_sentences_of_the_grammar(samples, tokenizer):
    known = words()
    fluent = [set(re.findall(r"[a-z']+", text.lower())) <= known and text.endswith(".") for *_, text in samples]
    ended = [response[-1] == tokenizer.eos_token_id for _, response, _ in samples]
    assert sum(fluent) / len(samples) > 0.9
    assert sum(ended) / len(samples) > 0.9


def test_reward_scores_are_standardised(samples, reward, tokenizer):
    rows = [start + end for start, end, _ in samples if end[-1] == tokenizer.eos_token_id]
    scores_B = final_scores(reward, rows)
    assert abs(scores_B.mean()) < 0.2 and abs(scores_B.std() - 1) < 0.2


def test_reward_ranks_fresh_pairs_like_the_grammar(reward, tokenizer):
    rng = random.Random(20_240)
    better, worse = [], []
    while len(better) < 500:
        start = grammar.opening(rng)
        low, high = sorted((grammar.continuation(rng, start) for _ in range(2)), key=grammar.score)
        if grammar.score(high) - grammar.score(low) > 0.1:
            better.append(tokenizer.encode(start.text + high) + [tokenizer.eos_token_id])
            worse.append(tokenizer.encode(start.text + low) + [tokenizer.eos_token_id])
    assert (final_scores(reward, better) > final_scores(reward, worse)).float().mean() >= 0.9


def test_transformers_loads_and_agrees(prompts, reward, tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(ACTOR)
    assert theirs(prompts[0])["input_ids"] == tokenizer.encode(prompts[0])
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    causal = transformers.AutoModelForCausalLM.from_pretrained(ACTOR, dtype=torch.float32)
    actor = load_model(ACTOR, head="lm")
    tokens_BT = torch.tensor([tokenizer.encode(prompts[0])])
    with torch.no_grad():
        torch.testing.assert_close(causal(tokens_BT).logits, actor.logits(actor(tokens_BT)), atol=1e-4, rtol=1e-4)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(REWARD, dtype=torch.float32)
    rows = [tokenizer.encode(prompt + " The day was good.") + [tokenizer.eos_token_id] for prompt in prompts[:4]]
    tokens_BT = padded(rows)
    real_BT = tokens_BT >= 0
    tokens_BT = tokens_BT.where(real_BT, torch.tensor(tokenizer.pad_token_id))
    with torch.no_grad():
        scores_B = classifier(tokens_BT, attention_mask=real_BT.long()).logits[:, 0]
    torch.testing.assert_close(scores_B, final_scores(reward, rows), atol=1e-4, rtol=1e-4)
