"""Row 21: the critic starts as the reward model if that has the actor's tokenizer, else as the actor with a head of
zeros. Compared with the very bytes in the folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf_spmd.config.options import Config
from tests.folders import write_all, write_model
from tests.runs import RunOf, load

FUNCTION = ["reward_function={root}/length.py:score"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Returns folders `actor` and `reward` with one tokenizer, and more models beside them."""
    root = tmp_path_factory.mktemp("critic")
    write_all(root)
    for name, head, seed in (("critic", "scalar", 3), ("lm", "lm", 4), ("foreign", "scalar", 5), ("bare", "scalar", 6)):
        write_model(root / name, head=head, seed=seed)
    tokenizer = root / "foreign" / "tokenizer.json"  # two words trade their ids
    values = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    vocabulary["ba"], vocabulary["be"] = vocabulary["be"], vocabulary["ba"]
    tokenizer.write_text(json.dumps(values), encoding="utf-8")
    (root / "bare" / "tokenizer.json").unlink()
    (root / "length.py").write_text(
        "def score(prompts, responses):\n    return [float(len(r)) for r in responses]\n", encoding="utf-8"
    )
    return root


def config_of(root: Path, *overrides: str) -> Config:
    own = ["rollout_batch=12", "data.max_prompt=8", "generation.max_new_tokens=4", "mini_batch=12", "iterations=1"]
    folders = [f"models.{name}={root / name}" for name in ("actor", "reward")]
    prompts = f"data.prompts={root / 'prompts.jsonl'}"
    return load([*folders, prompts, *own], *(text.format(root=root) for text in overrides))


CASES = {  # overrides, folder of the critic, whether that has a head
    "reward model with the actor's tokenizer": ([], "reward", True),
    "beside a reward function": ([*FUNCTION, "reward_function_mode=add"], "reward", True),
    "instead of which a reward function scores": (FUNCTION, "reward", True),
    "no reward model": ([*FUNCTION, "models.reward="], "actor", False),
    "reward model with another tokenizer": (["models.reward={root}/foreign"], "actor", False),
    "reward model without a tokenizer": ([*FUNCTION, "models.reward={root}/bare"], "actor", False),
    "own critic": (["models.critic={root}/critic"], "critic", True),
    "own critic without a head": (["models.critic={root}/lm"], "lm", False),
    "own critic, foreign reward": (["models.reward={root}/foreign", "models.critic={root}/critic"], "critic", True),
}


def body_of(folder: Path) -> dict[str, Tensor]:
    """Returns a checkpoint's weights without heads, under our names."""
    tensors = load_file(folder / "model.safetensors")
    heads = ("lm_head.weight", "score.weight")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name not in heads}


@pytest.mark.parametrize(("overrides", "source", "has_head"), CASES.values(), ids=CASES)
def test_first_weights(root, overrides, source, has_head):
    config = config_of(root, *overrides)
    assert Path(config.files("critic").folder) == root / source
    run = RunOf(config)
    weights = run.weights("critic")
    score_1D = weights.pop("score.weight")
    expected = body_of(root / source)
    assert weights.keys() == expected.keys() and len(expected) > 10
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    if has_head:
        assert torch.equal(score_1D, load_file(root / source / "model.safetensors")["score.weight"])
        assert score_1D.abs().max() > 0.1
    else:
        assert score_1D.shape == (1, 32) and (score_1D == 0).all()
    run.iteration()
    responses_MCG, values_MCG1 = run.data.store["responses"], run.data.store["values"]
    assert bool((values_MCG1[..., :-1][responses_MCG >= 0] != 0).all()) == has_head
    assert has_head or (values_MCG1 == 0).all()
    assert not torch.equal(run.weights("critic")["score.weight"], score_1D)  # but it learns from there
