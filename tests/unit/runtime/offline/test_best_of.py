"""Best of n: which sample of a prompt is written, and who scores."""

import json

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_model, load_tokenizer
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.offline.best_of import Judge, best_lines
from rlhf_spmd.runtime.offline.options import load_options
from rlhf_spmd.runtime.offline.prompts import Prompt
from tests.folders import WORDS, write_model

DEVICE = torch.device("cpu")
LINES = [{"response": "x", "finish": "eos"}, {"response": "y", "finish": "length"}]


def test_the_best_of_those_that_ended_is_written():
    finish = ["eos", "length", "eos", "eos", "length", "length", "length", "length"]
    lines = [{"prompt": str(row // 4), "response": str(row), "finish": one} for row, one in enumerate(finish)]
    found = best_lines(lines, [1.0, 9.0, 2.0, 2.0, 0.0, 3.0, 1.0, 3.0], 4)
    assert [line["completion"] for line in found] == ["2", "5"]  # the first of equal ones
    assert [(line["score"], line["mean_score"]) for line in found] == [(2.0, 3.5), (3.0, 1.75)]
    assert all("response" not in line for line in found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    for name, head in (("lm", "lm"), ("reward", "scalar")):
        write_model(folder / name, head=head, seed=2)
    return folder


def judge(folder, reward: str, prompts: list[Prompt]) -> Judge:
    options = load_options([f"best_of={reward}", "samples_per_prompt=2"])
    return Judge(options, str(folder / "lm"), load_tokenizer(folder / "lm"), prompts, DEVICE)


def test_a_reward_model_scores_tokens(folders):
    prompts = [Prompt(0, "ba", [3], Sampling(4)), Prompt(1, "be bi", [4, 5], Sampling(4))]
    responses = [[6, 7, 1], [8]]
    judging = judge(folders, str(folders / "reward"), prompts)
    assert judging.model.ropes.longest == 6
    found = judging.scores(prompts, LINES, responses)
    model = load_model(folders / "reward", head="scalar")
    for prompt, response, score in zip(prompts, responses, found, strict=True):
        expected = model.scalar(model(torch.tensor([[*prompt.tokens, *response]]))[0])[-1]
        assert score == pytest.approx(expected.item(), abs=1e-6)
    with pytest.raises(UserError, match="so it is not a reward model; give a folder"):
        judge(folders, str(folders / "lm"), prompts)


def test_a_reward_model_with_another_tokenizer_gets_text(folders, tmp_path):
    """Its end of sequence stands where the response ended, and conversations are rendered by its own chat template."""
    reward = write_model(tmp_path / "reward", head="scalar", seed=2)
    names = json.loads((reward / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = "{% for m in messages %}da {{ m['content'] }} {% endfor %}"
    about = {"eos_token": "ba", "chat_template": template}
    about["added_tokens_decoder"] = {"63": {"content": "<more>", "special": True}}  # so it is another tokenizer
    (reward / "tokenizer_config.json").write_text(json.dumps(names | about), encoding="utf-8")
    chat = Prompt(0, "not read", [4], Sampling(4), {"prompt": [{"role": "user", "content": "be bi"}]})
    prompts = [Prompt(1, "ba", [3], Sampling(4), {"prompt": "ba"})] * 2 + [chat] * 2
    scorer = judge(folders, str(reward), prompts)
    words = {word: index for index, word in enumerate(WORDS, start=3)}
    lines = [{"response": "bo", "finish": finish} for finish in ("stop", "length", "eos", "length")]
    found = scorer.scores(prompts, lines, [[6]] * 4)
    model = load_model(reward, head="scalar")
    for text, score in zip(["ba bo ba", "ba bo", "da be bi da bo ba", "da be bi da bo"], found, strict=True):
        ids = torch.tensor([[words[word] for word in text.split()]])
        assert score == pytest.approx(model.scalar(model(ids)[0])[-1].item(), abs=1e-6)
