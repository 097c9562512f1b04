"""The verb `generate` as a user starts it: the same file on any number of ranks, and what is wrong told in one line."""

import json
from pathlib import Path

import pytest

from rlhf_spmd import embedded
from tests import warm
from tests.folders import write_model

NUM = 10
ACTOR = embedded.path_of("actor")
KEYS = ["prompt", "response", "num_tokens", "finish", "logprob"]
STATUS = 2


def start(ranks: int, options: list[str]) -> tuple[int | None, str, str]:
    """Runs `generate` on so many ranks, or without a launcher (0)."""
    return warm.shared().run(["generate", "--json", *options], ranks)


def generate(ranks: int, folder: Path, lines: list[dict], *options: str, name: str = "out") -> list[dict]:
    """Runs the embedded model on these lines -> the lines of its file."""
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ["--model", str(ACTOR), "--prompts", str(folder / "p.jsonl"), "--out", str(folder / name)]
    status, stdout, stderr = start(ranks, [*files, *options])
    assert status == 0, stderr
    found = read(folder / name)
    result = json.loads(stdout.splitlines()[-1])
    assert result["ok"] and result["ranks"] == max(ranks, 1) and result["out"] == str(folder / name)
    assert result["sequences"] == len(found) and result["tokens"] == sum(line["num_tokens"] for line in found)
    ended = sum(line["finish"] != "length" for line in found)
    assert result["ended_share"] == pytest.approx(ended / len(found), abs=1e-4)
    assert not list(folder.glob("*.part"))
    return found


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def embedded_prompts(num: int = NUM) -> list[dict]:
    return read(embedded.path_of("prompts.jsonl"))[:num]


def without_logprob(lines: list[dict]) -> list[dict]:
    return [{name: value for name, value in line.items() if name != "logprob"} for line in lines]


def test_the_same_file_on_any_number_of_ranks(tmp_path):
    """Also with windows of two prompts instead of one window for all; logprobs agree to rounding."""
    options = ["generation.max_new_tokens=12", "samples_per_prompt=2", "generation.top_p=0.9", "--seed", "7"]
    expected = generate(0, tmp_path, embedded_prompts(), *options, name="one")
    assert [list(line) for line in expected] == [KEYS] * (2 * NUM)
    assert [line["prompt"] for line in expected[::2]] == [line["prompt"] for line in embedded_prompts()]
    assert sum(a["response"] != b["response"] for a, b in zip(expected[::2], expected[1::2], strict=True)) > NUM // 2
    assert {line["finish"] for line in expected} == {"eos", "length"}
    for num_ranks, *more in ((2,), (4, "--tp", "2"), (2, "generation.max_sequences=2")):
        found = generate(num_ranks, tmp_path, embedded_prompts(), *options, *more, name=f"{num_ranks}{len(more)}")
        assert without_logprob(found) == without_logprob(expected), (num_ranks, more)
        logprobs = [[line["logprob"] for line in lines] for lines in (found, expected)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def test_a_line_has_sampling_of_its_own(tmp_path):
    """Each prompt gets what a run with its values gives to it; null and other fields change nothing."""
    plain = embedded_prompts(5)
    own = [{"max_new_tokens": 3}, {"temperature": 0}, {"top_k": 1}, {"stop": ["e"], "answer": 7}, {"top_p": None}]
    lines = [line | extra for line, extra in zip(plain, own, strict=True)]
    found = generate(0, tmp_path, lines, "--seed", "3", "generation.max_new_tokens=8")
    common = generate(0, tmp_path, plain, "--seed", "3", "generation.max_new_tokens=8", name="common")
    greedy = generate(0, tmp_path, plain, "generation.max_new_tokens=8", "generation.temperature=0", name="greedy")
    assert (found[0]["num_tokens"], found[0]["finish"]) == (3, "length")
    assert common[0]["response"].startswith(found[0]["response"]) and common[0]["num_tokens"] == 8
    assert [line["response"] for line in found[1:3]] == [line["response"] for line in greedy[1:3]]
    assert found[3]["finish"] == "stop" and found[3]["response"].count("e") == 1
    assert common[3]["response"].startswith(found[3]["response"]) and common[3]["response"] != found[3]["response"]
    assert found[4] == common[4]


GOOD = '{"prompt": "ba be"}\n'
CASES = {  # options, what the message says, the prompt file; tests/unit/runtime/offline/test_generate_file.py has more
    "missing model": (["--model", "{folder}/nowhere"], ["nowhere", "config.json"], GOOD),
    "bad JSON": ([], ["p.jsonl, line 2", "not valid JSON"], GOOD + '{"prompt": "ba\n'),
    "misspelt override": (["temprature=1"], ["unknown option 'temprature'", "'generation.temperature'"], GOOD),
    "existing file": (["--out", "{folder}/p.jsonl.old"], ["p.jsonl.old exists", "--overwrite"], GOOD),
    "no memory": (["generation.cache_fraction=1e-12"], ["KV cache of one sequence of 12 tokens"], GOOD),
    "tp of too many": (["--tp", "3"], ["--tp 3", "2 ranks"], GOOD),
    "misspelt in a file": (
        ["--config", "{folder}/p.jsonl"],
        ["p.jsonl, line 2: unknown option 'generation.temprature' (did you mean 'generation.temperature'?)"],
        "iterations: 3\ngeneration.temprature: 1\n",
    ),
}


LAUNCHED = ("bad JSON", "tp of too many")  # on two ranks; the others on one


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "actor")


@pytest.mark.parametrize("name", CASES)
def test_one_line_says_what_is_wrong(name, model, tmp_path):
    options, says, prompts = CASES[name]
    (tmp_path / "p.jsonl").write_text(prompts, encoding="utf-8")
    (tmp_path / "p.jsonl.old").write_text("old", encoding="utf-8")
    files = ["--model", str(model), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    options = [option.format(folder=tmp_path) for option in options]
    words = [*files, "generation.max_new_tokens=10", *options]
    status, stdout, stderr = start(2 if name in LAUNCHED else 0, words)
    assert status == STATUS, stderr
    assert stderr.count("rlhf_spmd: error:") == 1 and "Traceback" not in stderr, stderr
    assert all(words in stderr for words in says), stderr
    assert stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl", "p.jsonl.old"], "half a file was left"
    assert (tmp_path / "p.jsonl").read_text(encoding="utf-8") == prompts and (tmp_path / "p.jsonl.old").read_text(
        encoding="utf-8"
    ) == "old"
