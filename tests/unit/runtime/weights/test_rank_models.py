"""Refused before anything is computed: models with different tokenizers, and a reward model that is none."""

import json
from pathlib import Path

import pytest

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.runtime.weights.rank_models import RankModels, shared_vocabulary
from tests.folders import write_all, write_model
from tests.runs import OneRank, RunOf, compiled, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_all(folder)
    write_model(folder / "small", vocab_size=40)
    write_model(folder / "small reward", head="scalar", vocab_size=40)
    write_model(folder / "large", vocab_size=70)
    write_model(folder / "other")
    write_model(folder / "other reward", head="scalar")
    write_model(folder / "other small reward", head="scalar", vocab_size=40)
    for name in ("other", "other reward", "other small reward"):  # the words mean other ids
        change_tokenizer(folder / name, lambda words: {word: (index * 2) % 61 for word, index in words.items()})
    return folder


def change_tokenizer(folder: Path, change) -> None:
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    values["model"]["vocab"] = change(values["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")


def config_of(folder: Path, *more: str, **models: str) -> Config:
    chosen = {"actor": "actor", "reward": "reward"} | models
    base = [f"data.prompts={folder / 'prompts.jsonl'}", "data.max_prompt=8", "generation.max_new_tokens=10"]
    base += ["rollout_batch=8", "mini_batch=4", "micro_batch=4", "iterations=1"]
    return load(base, *(f"models.{name}={folder / value}" for name, value in chosen.items()), *more)


def refused(config: Config) -> str:
    with pytest.raises(UserError) as error:
        RunOf(config)
    return str(error.value)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"actor": "small", "reward": "small reward"}, ["the prompt ", "have 40 tokens", "/small"]),
        ({"reference": "small"}, ["the reference ", "/small has a vocabulary of 40", "/actor samples from 63"]),
        ({"critic": "small"}, ["the critic ", "/small has a vocabulary of 40", "resize_token_embeddings(63)"]),
        ({"reward": "small reward"}, ["the reward ", "/small reward has a vocabulary of 40", "/actor samples from 63"]),
        ({"reference": "other"}, ["the reference ", "/other has another tokenizer than the actor "]),
        ({"critic": "other"}, ["the critic ", "/other has another tokenizer", "give a critic with"]),
    ],
)
def test_vocabularies_that_do_not_fit(folder, models, words):
    text = refused(config_of(folder, **models))
    assert all(word in text for word in words), text


def test_text_that_a_reward_model_of_another_tokenizer_has_no_embedding_of(folder):
    text = refused(config_of(folder, reward="other small reward"))
    assert "the tokenizer of the reward has token 60, but the model has 40 tokens" in text


def test_the_same_tokenizer_in_other_words(folder, tmp_path):
    """Another version of tokenizers writes another file; what counts is which token has which id."""
    write_model(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(values, indent=7), encoding="utf-8")
    config = config_of(folder, reference=str(tmp_path))
    shared_vocabulary(config, load_tokenizer(config.main_folder))
    (tmp_path / "tokenizer.json").unlink()  # and a folder of weights alone says nothing about tokens
    shared_vocabulary(config, load_tokenizer(config.main_folder))


def test_a_reward_model_without_a_head_is_none_but_a_critic_may_start_at_zero(folder):
    text = refused(config_of(folder, reward="actor"))
    assert "/actor/model.safetensors has no tensor score.weight" in text
    assert "AutoModelForSequenceClassification" in text
    config = config_of(folder, critic="actor")
    models = RankModels(compiled(config), config, OneRank())
    models.start()
    here = [*(engine.model for engine in models.engines.values()), *models.copies.values()]
    assert {model.ropes.longest for model in here} == {config.data.max_prompt + config.row_tokens}
    assert not models.engines["critic"].model.score.weight.any()
