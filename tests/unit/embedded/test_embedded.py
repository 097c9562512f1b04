"""The embedded default: small, loadable by us and by transformers, fluent, judged by a reward model that is right."""

import json

import pytest
import torch

from rlhf_spmd import embedded
from rlhf_spmd.model.hf import load_model, load_tokenizer

ACTOR, REWARD = embedded.path_of("actor"), embedded.path_of("reward")


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


def test_tokenizer_reads_any_text(tokenizer):
    ids = tokenizer.encode("Žluťoučký kůň 🐎\n<|end|>")
    assert tokenizer.decode(ids).startswith("Žluťoučký kůň 🐎")
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert ids[0] == tokenizer.bos_token_id


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
