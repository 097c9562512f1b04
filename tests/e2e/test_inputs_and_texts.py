"""What a run reads and writes: a change of its inputs ends a resume, any text comes back as it was, in any locale."""

import json
import math
import sys
from pathlib import Path

import pytest

from rlhf_spmd.__main__ import main
from tests.folders import write_model
from tests.run_mpi import environment_alone, run_limited

NO_UTF8 = {"LC_ALL": "C"}
NAN = math.nan
SEPARATED = "ba\u2028da\u0085de"
# What JSON can hold, and Arrow, UTF-8 or a reader of lines may not.
COLUMNS = [
    {"answer": "18", "big": 2**70, "empty": {}, "half": "cut \ud83d", "response": "mine", "sum": NAN},
    {"answer": 18, "big": 1, "empty": {}, "half": "whole", "text": SEPARATED, "nested": {"a": 1}, "sum": 1},
    {"answer": 1.5, "nested": {"a": 1, "b": None}, "scores": [1, 2], "sum": math.inf},
    {"answer": None, "nested": [1, "ü"], "half \ud83d": True, "truth": "é"},
]
REWARD = """
# für
def length(prompts, responses, truth, half):
    print("größe", half)
    return {"score": [float(len(one)) for one in responses], "größe": [1.5] * len(responses)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns prompts with odd texts and columns, and a file of options."""
    folder = tmp_path_factory.mktemp("texts")
    write_model(folder / "actor", seed=1)
    rows = [{"prompt": prompt} | row for prompt, row in zip((SEPARATED, "ba é 😀", "ba", "da"), COLUMNS, strict=True)]
    for name in ("zeilen für.jsonl", "prüfung.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    options = {
        "algorithm": "grpo",
        "models.actor": str(folder / "actor"),
        "data.shuffle": "false",
        "eval.prompts": str(folder / "prüfung.jsonl"),
        "generation.max_new_tokens": 6,
        "reward_function": f"{folder / 'rewards.py'}:length",
        "rollout_batch": 4,
        "samples_per_prompt": 2,
        "mini_batch": 8,
        "iterations": 1,
        "checkpoint.every": 1,
        "rollouts.every": 1,
        "num_samples": 2,
        "grpo.kl_coef": 0,
    }
    text = "# für alle\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items())
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return folder


def test_any_text_in_any_locale(folder, warm):
    """A run in the locale C writes the bytes of one with UTF-8; a resume reads them."""
    words = ["train", "--config", folder / "run.yaml", "--runs", folder, f"data.prompts={folder / 'zeilen für.jsonl'}"]
    status, stdout, stderr = warm.run([*words, "--name", "utf8"])
    assert status == 0, stderr
    command = [sys.executable, "-m", "rlhf_spmd", *map(str, words), "--name", "ascii"]
    status, _, stderr = run_limited(command, limit_s=120, environment=environment_alone(**NO_UTF8))
    assert status == 0, stderr
    names = ["config.json", "strategy.py", "samples.jsonl", "samples.txt"]
    for name in [*names, *(f"rollouts/{kind}/part-00000.jsonl" for kind in ("iteration-000000", "evaluation-000001"))]:
        assert (folder / "utf8" / name).read_bytes() == (folder / "ascii" / name).read_bytes(), name
    status, _, stderr = warm.run(["train", "--resume", folder / "ascii", "iterations=2", "rollouts.format=parquet"])
    assert status == 0, stderr
    status, _, _ = warm.run(["report", folder / "ascii", "--out", folder / "page.html"])
    assert status == 0 and "da\\x85de" in (folder / "page.html").read_text(encoding="utf-8")


def test_rollouts_hold_every_column_in_both_formats(folder, capsys):
    """After the test above, whose second iteration is in Parquet."""

    def lines(number: int, *words: str) -> list[str]:
        assert main(["rollouts", str(folder / "ascii"), "--iteration", str(number), *words]) == 0
        return capsys.readouterr().out.split("\n")[:-1]

    found = [{row["prompt_index"]: row for row in map(json.loads, lines(number, "--json"))} for number in (1, 2)]
    taken = {"response": "data.response", "scores": "data.scores"}
    renamed = [taken, taken | {"half \ud83d": "half \\ud83d"}]
    for index, columns in enumerate(COLUMNS):
        for of_file, names in zip(found, renamed, strict=True):
            got = {name: of_file[index].get(names.get(name, name)) for name in columns}
            wanted = {
                name: None if one in (NAN, math.inf) else one for name, one in columns.items()
            }  # as JSON has none
            assert repr(got).replace("1.0", "1") == repr(wanted), index
    for condition, matching in (("answer=18", 4), ("big=1180591620717411303424", 2), ("truth=é", 2)):
        for number in (1, 2):
            assert json.loads(lines(number, "--where", condition)[-1])["matching"] == matching, (condition, number)
