"""The rollouts verb: which rows it finds, and what it says about words that find none."""

import json

import pytest

from rlhf_spmd.__main__ import main

SAMPLES = [("2+2", "4", 1.0, "4"), ("2+2", "five\n", 0.0, "4"), ("3+3", "6", None, "6"), ("3+3", "six", 0.5, "6")]
ROWS = [
    {"iteration": 2, "prompt_index": index // 2, "sample": index % 2, "prompt": prompt, "response": response}
    | {"scores": score, "answer": answer}
    for index, (prompt, response, score, answer) in enumerate(SAMPLES)
]


@pytest.fixture
def run(tmp_path):
    for number in (0, 2):
        folder = tmp_path / "rollouts" / f"iteration-{number:06d}"
        folder.mkdir(parents=True)
        for part in range(2):
            lines = (json.dumps(row) + "\n" for row in ROWS[2 * part : 2 * part + 2])
            (folder / f"part-{part:05d}.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def responses(run, capsys, *words: str) -> list[str]:
    assert main(["rollouts", str(run), "--json", *words]) == 0
    return [json.loads(line)["response"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], ["4", "five\n", "6", "six"]),
        (["--where", "scores>=0.5"], ["4", "six"]),
        (["--where", "scores < 1", "--where", "response~^s"], ["six"]),
        (["--where", "answer=6"], ["6", "six"]),
        (["--where", "answer!=6", "--where", "scores!=1"], ["five\n"]),
        (["--where", "response = six"], ["six"]),
        (["--sort", "scores"], ["five\n", "six", "4", "6"]),
        (["--sort", "scores", "--descending", "--limit", "2"], ["4", "six"]),
    ],
)
def test_rows_that_match(words, found, run, capsys):
    assert responses(run, capsys, *words) == found


def test_text_and_means(run, capsys):
    assert main(["rollouts", str(run), "--iteration", "3", "--where", "prompt=2+2"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0] == "iteration 3, prompt 0, sample 0, scores 1" and "  response: five\\n" in lines
    assert json.loads(last)["means"] == {"scores": 0.5} and json.loads(last)["matching"] == 2


def test_parquet_parts(run, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = run / "rollouts" / "iteration-000004"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "part-00000.parquet")
    assert responses(run, capsys) == ["4", "five\n", "6", "six"]


def test_what_is_not_there_is_said(run, capsys):
    assert main(["rollouts", str(run), "--where", "prompt=9+9"]) == 0
    assert "no row matches in " in capsys.readouterr().out
    assert main(["rollouts", str(run), "--evaluation", "0"]) == 2
    assert "it has iteration-000000, give --iteration or --evaluation" in capsys.readouterr().err
