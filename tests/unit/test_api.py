"""The program from Python: results that the command line prints, the rows of a run, messages of runs that fail."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import rlhf_spmd
from rlhf_spmd.__main__ import main
from rlhf_spmd.errors import UserError

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
OPTIONS = {"preset": "llama-7b", "micro_batch": 2, "strategy": {"name": "flattening", "zero": 3}}


def cells() -> list[str]:
    """Returns the code of the notebook."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("verb", ["check", "forecast"])
def test_results_are_those_of_the_command_line(verb, capsys):
    words = [verb, "flattening", "--layout", "1x8", "--preset", "llama-7b", "micro_batch=2", "strategy.zero=3"]
    assert main([*words, "--json"]) == 0
    text, _, values = capsys.readouterr().out.rstrip().rpartition("\n")
    result = getattr(rlhf_spmd, verb)(config=OPTIONS, layout="1x8")
    assert (dict(result), result.text) == (json.loads(values), text) and result["ok"]
    same = getattr(rlhf_spmd, verb)("flattening", "micro_batch=2", "strategy.zero=3", layout="1x8", preset="llama-7b")
    assert same == result and capsys.readouterr().out == ""


def test_a_program_that_does_not_fit_has_findings():
    found = rlhf_spmd.check("flattening", preset="llama-65b", layout="1x1")
    assert not found["ok"] and found["errors"] == 1 and "GiB" in found["findings"][0]


@pytest.mark.parametrize(
    ("call", "words", "arguments", "says"),
    [
        ("check", ["flatening"], {}, "did you mean 'flattening'"),
        ("forecast", ["flattening", "itertions=3"], {}, "did you mean 'iterations'"),
        ("find_plan", [], {"method": "best"}, "invalid choice"),
        ("train", [{"iterations": 3}], {"algorthm": "grpo"}, "did you mean '--algorithm'"),
        ("train", [{"iterations": 3}], {"ranks": 0}, "ranks=0: give a whole number"),
        ("check", [], {"config": {"reward_function": print}}, "functions are named, as in mine.py:score"),
    ],
)
def test_mistakes_are_user_errors_at_once(call, words, arguments, says):
    with pytest.raises(UserError, match=says):
        getattr(rlhf_spmd, call)(*words, **arguments)


def test_numbers_of_numpy_are_numbers():
    values = {"iterations": np.int64(3), "optimizer": {"actor_lr": np.float32(0.5)}, "deterministic": np.bool_(True)}
    assert rlhf_spmd.check(config=values, layout="1x2")["ok"]


class Ended:
    """A process that has ended well."""

    returncode = 0

    def __init__(self, *_, **__):
        pass

    def poll(self):
        return 0


def test_rows_are_those_of_the_run_that_was_started(tmp_path, monkeypatch):
    """And not of an earlier one with its name, or from before a resume."""
    monkeypatch.setattr("rlhf_spmd.api.subprocess.Popen", Ended)
    rows = [json.dumps({"iteration": number, "reward": 1.0}) for number in range(3)]
    metrics = tmp_path / "old" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("\n".join(rows[:2]) + "\n", encoding="utf-8")
    how = {"runs": tmp_path, "show": False}
    with pytest.raises(UserError, match=r"old is a run already: give another name, or resume='.*old'$"):
        rlhf_spmd.train({"iterations": 3}, name="old", **how)
    runs = [rlhf_spmd.train(None, resume=metrics.parent, show=False)]
    runs.append(rlhf_spmd.train({"iterations": 3}, name="old", resume="auto", **how))
    metrics.write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert [[row["iteration"] for row in run] for run in runs] == [[2], [2]]
    first, second = (rlhf_spmd.train({"iterations": 3}, **how) for _ in range(2))
    assert first.folder != second.folder


def test_a_run_is_not_left_behind(tmp_path):
    code = f"import rlhf_spmd; rlhf_spmd.train({{'iterations': 3}}, runs={str(tmp_path)!r}, name='run')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    note = f"rlhf_spmd: note: {tmp_path / 'run'} is stopped, because this process ends, and nobody waited for it: "
    assert (ended.returncode, ended.stderr) == (0, f"{note}call wait()\n")
    assert not list(tmp_path.glob("run/metrics.jsonl"))


def test_threads_have_results_of_their_own(monkeypatch):
    both, shown = threading.Barrier(2), sys.stdout

    def run(parsed) -> None:
        """Prints twice; meanwhile the other thread does, if it may."""
        print(parsed.layout)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        print(json.dumps({"layout": parsed.layout}))

    monkeypatch.setattr("rlhf_spmd.verbs.check.run", run)
    layouts = ["1x1", "1x2"]
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda layout: rlhf_spmd.check("flattening", layout=layout), layouts)]
    assert [(one["layout"], one.text) for one in found] == [(one, one) for one in layouts] and sys.stdout is shown


def test_a_run_that_fails_raises_its_message(tmp_path):
    run = rlhf_spmd.train({"iterations": 1}, "data.prompts=none.jsonl", runs=tmp_path, show=False)
    with pytest.raises(UserError, match=r"^prompt file none\.jsonl does not exist"):
        run.wait()


def test_the_import_is_cheap():
    code = "import sys, rlhf_spmd; rlhf_spmd.check('flattening'); print({'torch', 'mpi4py'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        rlhf_spmd.trian  # noqa: B018


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """All of its cells, one after another, as in an empty folder."""
    script = tmp_path / "notebook.py"
    script.write_text("\n".join(["import matplotlib", "matplotlib.use('Agg')", *cells()]), encoding="utf-8")
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = rlhf_spmd.read(tmp_path / "runs" / "sums").metrics
    assert len(rows) == 10 and rows[-1]["score_right"] > rows[0]["score_right"]


@pytest.mark.slow
def test_leaving_the_loop_stops_the_run(tmp_path):
    run = rlhf_spmd.train({"iterations": 1000}, ranks=2, runs=tmp_path, name="run", show=False)
    for row in run:
        assert row["iteration"] == 0
        break
    assert run.process.wait(120) and "ended by SIGTERM after" in run.log
    again = rlhf_spmd.train(None, "iterations=3", ranks=1, resume=tmp_path / "run", show=False).wait()
    assert len(again.metrics) >= 3 and again.config["iterations"] >= 3
