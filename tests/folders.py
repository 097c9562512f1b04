"""Checkpoint folders, prompts and configs small enough for tests: random weights, a tokenizer of words."""

import json
from pathlib import Path

import torch

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import save_state
from rlhf_spmd.model.texts.tokenizer_files import Texts
from rlhf_spmd.model.transformer import Transformer

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]  # 60 words


def given_rows(num: int) -> list[dict]:
    """Returns rows of a prompt, a completion and a pair of responses."""
    rows = []
    for index in range(num):
        words = [WORDS[(7 * index + 3 * place) % 60] for place in range(14)]
        row = {"prompt": words[: 1 + index % 5], "completion": words[3 : 5 + index % 6]}
        row |= {"chosen": words[2 : 4 + index % 4], "rejected": words[5 : 7 + index % 5]}
        rows.append({name: " ".join(some) for name, some in row.items()})
    return rows


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token per word; ids 0 <s>, 1 </s>, 2 <unk>, then the words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


def save_model(model: Transformer, folder: Path, **options) -> None:
    """Writes a whole model as a Hugging Face folder. options: of save_state."""
    save_state(model.state_dict(), model.config, model.head, folder, **options)


def write_model(folder: Path, *, head: str = "lm", seed: int = 0, **sizes) -> Path:
    """Writes a random Llama of about 20,000 parameters, saved as a Hugging Face folder."""
    shape = {
        "model_type": "llama",
        "vocab_size": 63,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_ids": (1,),
    }
    model = Transformer(ModelConfig(**(shape | sizes)), head=head, dtype=torch.float32)
    model.init_weights(seed, std=0.2, score_std=0.3)
    write_tokenizer(folder)
    save_model(model, folder, beside=Texts(folder))
    return folder


def write_prompts(path: Path, num: int = 40) -> Path:
    """Writes prompts of 1 to 6 words."""
    lines = [{"prompt": " ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(1 + i % 6))} for i in range(num)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_all(folder: Path, **actor_sizes) -> list[str]:
    """Writes actor, reward model and prompts to `folder`; returns overrides for a small, fast run on them.

    More eos_token_ids for the actor let more of its responses end: with one, a seventh of them.
    """
    actor = write_model(folder / "actor", seed=1, **actor_sizes)
    reward = write_model(folder / "reward", head="scalar", seed=2)
    prompts = write_prompts(folder / "prompts.jsonl")
    return [
        f"models.actor={actor}",
        f"models.reward={reward}",
        f"data.prompts={prompts}",
        "data.max_prompt=8",
        "generation.max_new_tokens=10",
        "iterations=3",
        "rollout_batch=24",
        "mini_batch=12",
        "micro_batch=4",
        "ppo.epochs=2",
        "optimizer.actor_lr=1e-3",
        "optimizer.critic_lr=1e-3",
    ]
