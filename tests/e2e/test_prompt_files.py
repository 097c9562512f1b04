"""Runs on several files of prompts with weights: the same on any number of ranks, and when they are resumed."""

import json
from pathlib import Path

import pytest

from bench.rows import TIMED
from tests.folders import WORDS, write_all

REWARD = """
def score(prompts, responses, data_source):
    assert set(data_source) <= {"prompts", "more"}, data_source
    return {"score": [len(one) / 50 for one in responses], "of_more": [float(one == "more") for one in data_source]}
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    words = write_all(folder)
    (folder / "more.txt").write_text("\n".join(WORDS[:7]) + "\n", encoding="utf-8")
    (folder / "r.py").write_text(REWARD, encoding="utf-8")
    words += [f"data.prompts={folder / 'prompts.jsonl'},{folder / 'more.txt'}", "data.weights=3,1", "iterations=2"]
    return [*words, f"reward_function={folder / 'r.py'}:score", "--runs", str(folder / "runs")]


def run_alone(warm, words: list) -> None:
    status, _, stderr = warm.run(["train", *words])
    assert status == 0, stderr


def rows(options: list[str], name: str) -> list[dict]:
    return [
        json.loads(line)
        for line in (Path(options[-1]) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture(scope="module")
def whole(options, warm) -> list[dict]:
    run_alone(warm, [*options, "--name", "whole"])
    return rows(options, "whole")


def test_each_iteration_has_the_mixture_of_the_weights(whole):
    assert len(whole) == 2 and [row["score_score_of_more"] for row in whole] == [0.25] * 2  # 6 of 24, and there are 7


def test_a_resumed_run_goes_on_with_the_same_prompts(options, warm, whole):
    run_alone(warm, [*options, "iterations=1", "checkpoint.every=1", "--name", "resumed"])
    run_alone(warm, ["--resume", Path(options[-1]) / "resumed", "iterations=2"])
    for one, other in zip(rows(options, "resumed"), whole, strict=True):
        assert {name: one[name] for name in one if name not in TIMED} == {
            name: other[name] for name in other if name not in TIMED
        }
    status, _, stderr = warm.run(["train", "--resume", Path(options[-1]) / "resumed", "data.weights=1,1"])
    assert status == 2 and "data.weights=[1.0, 1.0] would change the results" in stderr


def test_two_ranks_draw_the_same_tokens(options, warm, whole):
    status, stdout, stderr = warm.run(["train", *options, "--strategy", "separation", "--name", "two"], 2)
    assert status == 0, stdout + stderr
    assert [row["tokens_sha256"] for row in rows(options, "two")] == [row["tokens_sha256"] for row in whole]


def test_without_shuffling_the_first_iterations_read_the_files_from_their_beginnings(options, warm, whole):
    run_alone(warm, [*options, "data.shuffle=false", "--name", "in-order"])
    assert [row["score_score_of_more"] for row in rows(options, "in-order")] == [0.25] * 2
    assert rows(options, "in-order")[0]["tokens_sha256"] != whole[0]["tokens_sha256"]
