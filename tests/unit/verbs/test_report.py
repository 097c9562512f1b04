"""The report verb: a page of run folders, whatever state they are in."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm
from rlhf_spmd.runtime.pictures.palette import RUNS
from rlhf_spmd.runtime.records.web_page import NONE
from rlhf_spmd.runtime.world.trace import write_chrome
from tests.unit.runtime.world.test_trace import two_ranks

EMPTY = {"meta", "br", "img"}
LOSSES = [2.0, None, 1.5, float("nan"), 1.25]


class Tags(HTMLParser):
    """Checks that every tag that opens is closed, and keeps what a reader sees."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.seen, self.words, self.links, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        found = dict(attributes)
        assert all(link.startswith("#") for name, link in attributes if name.endswith("href"))
        self.links += [found["href"]] if "href" in found else []
        self.ids += [found["id"]] if "id" in found else []
        assert "src" not in found and tag not in ("script", "link", "iframe"), "the page needs something else"
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def write_run(folder: Path, algorithm: str, **config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"algorithm": algorithm, "iterations": 5} | config), encoding="utf-8"
    )
    write_about(folder, algorithm, {"strategy": "separation"})
    return folder


def write_about(folder: Path, algorithm: str, about: dict) -> None:
    if algorithm in algorithm_names():
        page = load_algorithm(algorithm)
        headlines = [name for name, metric in page.metrics.items() if metric.headline is not None]
        about = {"algorithm": page.title, "headlines": headlines} | about
    (folder / "program.json").write_text(json.dumps(about), encoding="utf-8")


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def stages(tmp_path) -> list[Path]:
    """Returns supervised training, PPO from its model, and a run that has not begun an iteration."""
    sft = write_run(tmp_path / "sft", "sft", models={"actor": "base"}, data={"prompts": "answers.jsonl"})
    write_lines(sft / "metrics.jsonl", [{"iteration": i, "loss": x, "iteration_s": 2} for i, x in enumerate(LOSSES)])
    write_lines(sft / "evaluations.jsonl", [{"iteration": i, "loss": x} for i, x in ((0, 2.25), (5, 1.125))])
    (sft / "actor").mkdir()
    (sft / "actor" / "config.json").write_text("{}", encoding="utf-8")
    models = {"actor": str(sft / "actor"), "reward": "elsewhere", "critic": ""}
    ppo = write_run(tmp_path / "ppo", "ppo", models=models, eval={"prompts": "held_out.jsonl"})
    write_lines(ppo / "metrics.jsonl", [{"iteration": 0, "reward": -0.5, "kl": 0.0, "actor_grad_norm": 3.0}])
    write_lines(ppo / "evaluations.jsonl", [{"iteration": 0, "mean@1": 0.25, "tokens_sha256": "ab"}])
    sample = {"prompt": "<b>Who?</b>", "before": "a\nb\x1b[2J", "reward_before": -0.5}
    write_lines(ppo / "samples.jsonl", [sample | {"after": "</td>done", "reward_after": None}])
    return [sft, ppo, write_run(tmp_path / "begun", "dpo")]


def written(tmp_path, runs: list[Path], *words: str) -> str:
    out = tmp_path / "new" / "page.html"
    assert main(["report", *map(str, runs), "--out", str(out), *words]) == 0
    return out.read_text(encoding="utf-8")


def test_a_page_of_several_stages(stages, tmp_path, capsys):
    text = written(tmp_path, stages, "--title", "Three <stages>")
    found = Tags(text)
    words = " ".join(found.words)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == [str(run) for run in stages]
    assert "Three <stages>" in words and "supervised fine-tuning by separation" in words and "1 of 5" in words
    assert "loss 2.25 → 1.125" in words and "mean@1 0.25 → 0.25" in words and "reward -0.5 → -0.5" in words
    assert "no iteration yet" in words and "reads reward" in words and "reads critic" not in words
    assert found.links.count("#run-0") == 2  # from the table, and from the run that reads its model
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)
    assert found.seen.count("svg") == len(re.findall("<svg", text)) == 6


def test_runs_are_compared_in_one_picture_a_metric(tmp_path):
    made = {"hardware": "8 x H100", "ranks": 8, "software": {"commit": "abc1234", "torch": "2.13.0"}}
    runs = []
    for number, name in enumerate(("slow", "fast")):
        run = write_run(tmp_path / name, "grpo", optimizer={"actor_lr": (1e-6, 1e-5)[number]}, seed=3)
        about = {"strategy": "flattening"} | (made if number else {})
        write_about(run, "grpo", about)
        rows = [{"iteration": i, "reward": i * (number + 1), "iteration_s": 4} for i in range(5)]
        write_lines(run / "metrics.jsonl", rows)
        write_lines(run / "evaluations.jsonl", [{"iteration": i, "mean@1": i / 10} for i in (0, 5)])
        runs.append(run)
    write_chrome(runs[1] / "timeline.json", two_ranks())
    text = written(tmp_path, runs)
    [curve] = [svg for svg in re.findall("(?s)<svg.*?</svg>", text) if 'aria-label="reward: ' in svg]
    assert "0 → 4  slow" in curve and "0 → 8  fast" in curve
    assert {colour for colour in re.findall("#[0-9a-f]{6}", curve) if colour in RUNS} == {*RUNS[:2]}
    found = Tags(text)
    words = [word.strip() for word in found.words if word.strip()]
    differ = words[words.index("Options that differ") + 3 : words.index("Strategy, code and machines")]
    assert differ == ["optimizer.actor_lr", "1e-06", "1e-05"]
    at = words.index("commit")
    assert words[at : at + 3] == ["commit", NONE, "abc1234"] and "8 x H100" in words and "20" in words
    assert 'aria-label="timelines: fast"' in text and "iteration 2: 1 s, ranks busy 100%" in words


def test_text_of_a_model_is_text(stages, tmp_path):
    text = written(tmp_path, stages[1:2])
    assert "&lt;b&gt;Who?&lt;/b&gt;" in text and "&lt;/td&gt;done" in text and "a\nb\\x1b[2J" in text
    assert "<b>" not in text and "\x1b" not in text


BROKEN = ["metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "program.json", "timeline.json"]


@pytest.mark.parametrize("broken", BROKEN)
def test_files_that_are_cut_or_no_json(broken, stages, tmp_path):
    path = stages[1] / broken
    path.write_text(
        (path.read_text(encoding="utf-8") if path.exists() else "") + '[1]\n"x"\n{"iteration": 1, "rew',
        encoding="utf-8",
    )
    Tags(written(tmp_path, stages))
