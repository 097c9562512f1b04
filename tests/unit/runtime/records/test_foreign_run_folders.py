"""Run folders of somebody else: the verbs that read them run no code of theirs, print no orders to the terminal, end
with one message for what may not be read, and never with a traceback. 8 s."""

import json
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import resolved
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure.records import Record
from rlhf_spmd.runtime.records.run_folder import RunFolder
from tests.run_mpi import environment_alone

READING = ("status", "postmortem", "rollouts", "report")
PLANNING = ("check", "forecast", "plan", "draw")
ORDER = "\x1b]0;owned\x07\x9b2J\u202e"
LINES = {"iteration": 0, "reward": 1.0, "iteration_s": 1.0, "gen_tokens": 8, "generate_s": 0.5}


def readers(name: str) -> tuple[str, ...]:
    """Returns the verbs to try on a file of a run: `report`, which takes longest, reads none of those in folders."""
    return READING[:3] if "/" in name else READING


def words(verb: str, run: Path) -> list[str]:
    """Returns a command line of a verb that reads a run folder or its options."""
    if verb in PLANNING:
        out = run.parent / f"{verb}.{'py' if verb == 'plan' else 'png'}"
        more = ["--out", str(out), "--overwrite"] if verb in ("plan", "draw") else []
        return [verb, "--config", str(run / "config.json"), "--layout", "1x2", *more]
    return [verb, str(run), *(["--out", str(run.parent / "page.html"), "--overwrite"] if verb == "report" else [])]


@pytest.fixture
def run(tmp_path) -> Path:
    """Returns a run of PPO that has done an iteration, with a checkpoint, samples and flight records."""
    folder = tmp_path / "run"
    for name in ("flight", "rollouts/iteration-000000", "checkpoints/iteration-000001"):
        (folder / name).mkdir(parents=True)
    options = resolved(presets.load("tiny"), strategy="flattening")
    (folder / "config.json").write_text(json.dumps(options), encoding="utf-8")
    about = {"strategy": "flattening", "algorithm": "their PPO", "headlines": ["reward"]}
    (folder / "program.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "metrics.jsonl").write_text(json.dumps(LINES) + "\n", encoding="utf-8")
    row = {"iteration": 0, "prompt_index": 0, "sample": 0, "prompt": "Who?", "response": "I.", "scores": 1.0}
    (folder / "rollouts/iteration-000000/part-0000.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (folder / "checkpoints/iteration-000001/manifest.json").write_text("{}", encoding="utf-8")
    (folder / "strategy.py").write_text("def place(workload, cluster): ...\n", encoding="utf-8")
    record = Record.create()
    record.describe(rank=0, size=1, host="here")
    record.begin("iteration 0: Run actor_train", 0, 0)
    (folder / "flight" / "rank-0000.bin").write_bytes(record)
    return folder


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


# Code


@pytest.fixture
def marker(tmp_path, run) -> Path:
    """Returns the file that code of the run would make: it has a page, a strategy, a reward function, and names
    them."""
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')\ndef place(workload, cluster): ...\ndef score(prompts, responses): ...\n"
    for name in ("algorithm.py", "strategy.py", "reward.py", "elsewhere.py"):
        (run / name).write_text(code, encoding="utf-8")
    return marker


@pytest.mark.parametrize("verb", [*READING, *PLANNING])
@pytest.mark.parametrize("page", ["beside", "named"])
def test_no_code_of_a_run_is_run(verb, page, run, marker, capsys):
    options = {"strategy": {"name": str(run / "strategy.py")}, "reward_function": f"{run / 'reward.py'}:score"}
    options["eval"] = {"reward_function": f"{run / 'reward.py'}:score"}
    edit(run / "program.json", algorithm=str(run / "elsewhere.py"), headlines=["reward"], strategy="strategy.py")
    if page == "named":
        (run / "program.json").unlink()
        (run / "algorithm.py").unlink()
        options["algorithm"] = str(run / "elsewhere.py")
    edit(run / "config.json", **options)
    status = main(words(verb, run))
    said = capsys.readouterr()
    assert not marker.exists() and "Traceback" not in said.err
    if verb in READING:
        assert status == 0
    else:
        named = run / ("elsewhere.py" if page == "named" else "algorithm.py")
        assert status == 2 and f"if you trust it, name it yourself: --algorithm {named}" in said.err


def test_check_names_each_kind_of_code(run, marker, capsys):
    (run / "algorithm.py").unlink()
    spec = f"{run / 'reward.py'}:score"
    edit(run / "config.json", strategy={"name": str(run / "strategy.py")}, reward_function=spec)
    assert main(words("check", run)) == 2
    assert f"name it yourself: check {run / 'strategy.py'}" in capsys.readouterr().err
    config = str(run / "config.json")
    assert main(["check", "flattening", "--layout", "1x1", "--config", config]) == 0
    assert f"reward function {spec} is not checked: name it on the command line" in capsys.readouterr().out
    assert not marker.exists()
    assert main(["check", "flattening", "--layout", "1x1", "--config", config, f"reward_function={spec}"]) == 0
    assert marker.exists()  # because the command line names the function


# Text


def test_no_order_reaches_the_terminal_or_the_page(run):
    """In a process of its own, whose streams are prepared."""
    edit(run / "program.json", algorithm=ORDER, strategy=ORDER)
    edit(run / "config.json", models={"actor": ORDER})
    (run / "metrics.jsonl").write_text(json.dumps(LINES | {ORDER: 1.0, "reward": 2.0}) + "\n", encoding="utf-8")
    (run / "flight" / "failure.txt").write_text(f"it failed: {ORDER}\n", encoding="utf-8")
    part = run / "rollouts/iteration-000000/part-0000.jsonl"
    edit(part, **{ORDER: ORDER, "response": ORDER})
    record = Record.create()
    record.describe(rank=0, size=1, host="a\x1b[2J")
    record.begin("loading \x1b[2J", 0, 0)
    (run / "flight" / "rank-0000.bin").write_bytes(record)
    lines = [words(verb, run) for verb in READING] + [["rollouts", str(run), "--where", f"{ORDER}=1", "--json"]]
    program = (
        "import sys\nfrom rlhf_spmd.__main__ import main\nfrom rlhf_spmd.files import output\n"
        f"output.prepare(is_work=True)\nstatuses = [main(line) for line in {lines!r}]\nprint(statuses)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment_alone(), timeout=60)
    out = done.stdout.decode()
    assert out.endswith("[0, 0, 0, 0, 0]\n"), done.stderr.decode()
    page = (run.parent / "page.html").read_text(encoding="utf-8")
    for text in (out, done.stderr.decode(), page):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*text}
    assert "\\x1b]0;owned\\x07\\x9b2J\\u202e" in page and "it failed: \\x1b]0;owned" in out and "a\\x1b[2J" in out


# Shapes

DEEP = "[" * 100_000
HUGE = "1" + "0" * 400
SPOILED = {
    "deep": DEEP,
    "huge": f'{{"iteration": {HUGE}, "iteration_s": {HUGE}, "iterations": {HUGE}, "reward": {HUGE}}}',
    "digits": '{"iteration": ' + "9" * 5000 + "}",
    "texts": '{"iteration": "a", "iteration_s": "b", "iterations": "c", "reward": "d", "headlines": "e"}',
    "lists": "[[1], 2]",
    "nan": '{"iteration": NaN, "iteration_s": Infinity, "iterations": 1e400, "reward": NaN}',
    "objects": ('{"iteration": {}, "models": [1], "data": 3, "strategy": {}, "algorithm": [], "reward": {}}'),
    "bytes": "\udcff\udc80{",
}
FILES = ("config.json", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "program.json", "flight/program.json")
FILES += ("rollouts/iteration-000000/part-0000.jsonl", "checkpoints/iteration-000001/manifest.json")


@pytest.mark.parametrize("kind", SPOILED)
def test_no_shape_is_a_traceback(kind, run, capsys):
    for number, name in enumerate(FILES, [*SPOILED].index(kind)):
        before = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).write_bytes(SPOILED[kind].encode(errors="surrogateescape") + b"\n")
        for verb in readers(name)[: 3 + (number % 4 == 0)]:  # `report`, which takes longest, on pairs
            assert main(words(verb, run)) in (0, 2), (name, verb)
        (run / name).unlink() if before is None else (run / name).write_bytes(before)
    said = capsys.readouterr()
    assert "Traceback" not in said.err and said.err.count("rlhf_spmd: error") <= 4


def test_a_rank_that_has_ended_does_nothing(run, capsys):
    path = run / "flight" / "rank-0000.bin"
    record = Record.from_buffer_copy(path.read_bytes())
    record.end_s, record.status, record.signal = 5.0, 0, 0
    path.write_bytes(record)
    assert main(["status", str(run), "--no-json"]) == 0
    assert record.where and record.where not in capsys.readouterr().out


def test_numbers_of_a_flight_record_may_be_anything(run, capsys):
    path = run / "flight" / "rank-0000.bin"
    whole = path.read_bytes()

    def odd() -> Record:
        return Record.from_buffer_copy(whole)

    record = odd()
    record.signal, record.end_s = 9999, 5.0
    path.write_bytes(record)
    assert main(["status", str(run)]) == main(["postmortem", str(run)]) == 0
    assert "ended by signal 9999" in capsys.readouterr().out
    for time in (float("nan"), -1.0, 1e300):
        record = odd()
        record.beat_s = time
        assert Record.parse(bytes(record)) is None
        record = odd()
        record.actions[0].begin_s = time
        assert Record.parse(bytes(record)).last_actions() == []
    record = odd()
    record.rank, record.num_begun, record.status = 7, 2**62, -(2**31)  # a rank that the program does not have
    path.write_bytes(record)
    (run / "flight" / "program.json").write_text('{"ranks": [[["a", [[0, 0]]]]]}', encoding="utf-8")
    assert main(["status", str(run)]) == main(["postmortem", str(run)]) == 0
    capsys.readouterr()


def test_null_is_nan_and_stays_null(tmp_path):
    folder, path = RunFolder(tmp_path), tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0, "kl": null, "tokens_sha256": "ab"}\n{"iteration": 1, "iter', encoding="utf-8")
    (row,) = folder.metrics(2)
    assert row["kl"] != row["kl"] and row["tokens_sha256"] == "ab"
    folder.keep_metrics([row])
    assert '"kl": null' in path.read_text(encoding="utf-8")


def test_rows_are_checked_before_a_resume_trains(tmp_path):
    folder = RunFolder(tmp_path)
    for text in ('{"iteration": 0}', '{"iteration": 0, "iteration_s": 1.0, "reward": "x"}'):
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="metrics.jsonl, iteration 0 has no number as (iteration_s|reward)"):
            folder.metrics(2, ["iteration_s"])
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_text('{"iteration": 0}\n[]\n', encoding="utf-8")
        with pytest.raises(UserError, match=f"{name}, line 2 is not an object"):
            folder.rows(name)


# Rights, pipes, paths


def test_what_is_no_file_or_too_large_is_named(run, capsys):
    names = (*FILES[:6], "flight/rank-0000.bin", "flight/failure.txt")
    pipes = [("pipe", name) for name in (*FILES[:4], *FILES[5:7], *names[-2:])]
    for kind, name in (*pipes, *zip(cycle(["folder", "loop", "hole"]), names, strict=False)):
        path = run / name
        before = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.touch()
            os.truncate(path, 1 << 40)
        statuses = [main(words(verb, run)) for verb in readers(name)]
        said = capsys.readouterr().err
        assert 2 in statuses and {*statuses} <= {0, 2} and str(path) in said, name
        assert kind != "pipe" or f"{path} is a pipe, a socket or a device, not a file" in said, name
        path.rmdir() if kind == "folder" else path.unlink()
        if before is not None:
            path.write_bytes(before)
