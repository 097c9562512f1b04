"""Scores of rows: by a reward model's own tokens, by its text, by a function, and by both."""

import json

import pytest
import torch

from rlhf_spmd.model.hf import load_model, load_tokenizer
from rlhf_spmd.model.sequences import forward, sequence_scores
from rlhf_spmd.runtime.rewards.response_scores import Scorer, reads_text
from tests.folders import write_all
from tests.runs import RunOf, load

PROMPTS_BP = torch.tensor([[0, 5, 9, -1], [0, 7, -1, -1], [0, 8, 30, 31]])  # <s> and words
RESPONSES_BG = torch.tensor([[12, 13, 14], [40, -1, -1], [-1, -1, -1]])
FUNCTION = "def f(prompts, responses):\n    seen.append((prompts, responses))\n    return [len(r) for r in responses]\n"


@pytest.fixture
def score(tmp_path):
    """Returns score(more overrides): scores of the rows above, by a scorer of that config."""
    overrides = write_all(tmp_path)
    (tmp_path / "r.py").write_text("seen = []\n" + FUNCTION, encoding="utf-8")

    @torch.no_grad()
    def score(*more: str) -> torch.Tensor:
        config = load(overrides, *(word.format(folder=tmp_path) for word in more))
        folder = config.models["reward"]
        model = load_model(folder, head="scalar") if config.reward_function_mode == "add" else None
        model = model if config.reward_function else load_model(folder, head="scalar")
        scorer = Scorer(config, "reward", load_tokenizer(config.main_folder))
        assert scorer.shape == (model and model.config)
        scores_B = torch.zeros(3)
        if model is not None:
            batch = scorer.batch(PROMPTS_BP, RESPONSES_BG, torch.zeros(3, dtype=torch.bool), range(3))
            scores_B += sequence_scores(model, batch, forward(model, batch))
        return scores_B + (scorer.of_functions(PROMPTS_BP, RESPONSES_BG, range(3)).scores_B if scorer.specs else 0.0)

    return score


def test_a_run_gives_text_with_the_end_where_responses_ended(tmp_path):
    """A whole run: the tokens that the reward model reads are those of the words, as the heading says."""
    overrides = write_all(tmp_path, eos_token_ids=(1, 5))
    file = tmp_path / "reward" / "tokenizer.json"
    file.write_text(_with_a_beginning(file.read_text(encoding="utf-8")), encoding="utf-8")
    read: list[list[int]] = []
    run = RunOf(load(overrides, "generation.stop=da"))
    scorer = run.job.scorer
    assert reads_text(run.config, "reward") and scorer.texts is not None
    original = scorer.texts.tokens
    object.__setattr__(scorer.texts, "tokens", lambda *row, **how: read.append(original(*row, **how)) or read[-1])
    run.iteration()
    wanted, stop = set(), load_tokenizer(tmp_path / "actor").encode("da", special=False)[0]
    prompts_BP, responses_BG = (run.data.store[key].flatten(0, 1).tolist() for key in ("prompts", "responses"))
    for prompt, response in zip(prompts_BP, responses_BG, strict=True):
        tokens = [token for token in [*prompt, *response] if token >= 0]
        has_ended = tokens[-1] in (1, 5, stop)
        words = tokens[:-1] if tokens[-1] == 1 else tokens  # the other end is a word
        wanted.add((0, *(token for token in words if token > 2), *[1] * has_ended))
    assert wanted == set(map(tuple, read)) and len({row[-1] == 1 for row in wanted}) == 2


def _with_a_beginning(text: str) -> str:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(text)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def test_a_function_gets_the_text_and_is_added_on_request(score):
    lengths_B = torch.tensor([9.0, 3.0, 0.0])  # " li lo lu", " se" and nothing
    by_function_B = score("reward_function={folder}/r.py:f")
    torch.testing.assert_close(by_function_B, lengths_B)
    torch.testing.assert_close(
        score("reward_function={folder}/r.py:f", "reward_function_mode=add"), score() + lengths_B
    )


def test_columns_that_no_function_reads_are_named(tmp_path):
    overrides = write_all(tmp_path)
    (tmp_path / "r.py").write_text("def f(responses, answer):\n    return [0.0 for _ in responses]\n", encoding="utf-8")
    rows = [{"prompt": "da", "answer": "de", "source": "web", "difficulty": 3} for _ in range(8)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = RunOf(load(overrides, f"data.prompts={tmp_path / 'p.jsonl'}", f"reward_function={tmp_path / 'r.py'}:f"))
    assert run.job.scorer.notes == ["nothing reads the columns source, difficulty"]
