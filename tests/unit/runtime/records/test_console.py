"""The console of a run: its heading and lines, and the last line that machines read."""

import io
import json
import math

from rlhf_spmd.runtime.records.console import Console, Result
from rlhf_spmd.runtime.records.run_folder import RunFolder
from tests.unit.runtime.records.test_run_folder import METRICS, SAMPLES


def result(**changes):
    values = {
        "strategy": "flattening", "ranks": 4, "iterations": 2, "saved": ("actor",), "wall_s": 7.5,
        "headlines": {"reward": (-0.5, 0.25), "kl": (0.0, 0.01)}, "gen_tokens_per_s": 1234.5,
        "parity_max_abs": 1e-6, "iteration_s": 0.5, "forecast_s": 0.4, "scaled_by": 1.2, "run_dir": "runs/a",
    }  # fmt: skip
    return Result(**values | changes)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_console_of_rank_0(tmp_path):
    stream = io.StringIO()
    console = Console(METRICS, stream=stream)
    folder = RunFolder(tmp_path)
    folder.notes.append("no picture")
    console.heading("rlhf_spmd", {"actor": "tiny", "prompts": 512})
    console.iteration(1, 10, {"reward": -0.5, "kl": 0.001, "gen_tokens_per_s": 12345.6})
    console.iteration(10, 10, {"reward": 0.25, "gen_tokens_per_s": 1.0, "unknown": 3})
    console.samples(SAMPLES)
    console.closing(result(), folder, {"chat with the actor": "python chat.py"})
    text = stream.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[1:3] == ["  actor    tiny", "  prompts  512"]
    heading, first, last = lines[3:6]
    assert heading.split() == ["iteration", "reward", "kl", "gen", "tok/s"]
    assert first.split() == ["1/10", "-0.5000", "0.0010", "12,346"] and last.split() == ["10/10", "+0.2500", "-", "1"]
    assert len(heading) == len(first) == len(last)
    for expected in (
        "The film was",
        "note: no picture",
        "timeline.png",
        "tensorboard --logdir",
        "python chat.py",
        f"  trained actor  {tmp_path / 'actor'} (a Hugging Face folder)",
        "  reward         -0.5000 -> +0.2500\n",
        "  kl             0.0000 -> 0.0100 nats per response\n",
    ):
        assert expected in text
    machine = json.loads(lines[-1])
    assert list(machine) == [
        "strategy", "ranks", "iterations", "gen_tokens_per_s", "parity_max_abs", "iteration_s", "forecast_s",
        "scaled_by", "wall_s", "run_dir", "reward_timeouts", "saved", "reward_first", "reward_last",
        "kl_first", "kl_last",
    ]  # fmt: skip
    assert (machine["reward_first"], machine["reward_last"], machine["kl_last"]) == (-0.5, 0.25, 0.01)
    assert machine["saved"] == ["actor"]
    Console(METRICS, stream=stream).closing(result(saved=()), RunFolder(tmp_path))
    assert "Hugging Face" not in stream.getvalue().removeprefix(text)


def test_what_was_not_measured_is_null():
    assert json.loads(result(parity_max_abs=math.nan).to_json())["parity_max_abs"] is None


def test_other_ranks_are_silent(capsys, tmp_path):
    console = Console(METRICS, enabled=False)
    console.heading("t", {})
    console.iteration(1, 2, {"reward": 1.0})
    console.note("n")
    console.samples(SAMPLES)
    console.closing(result(), RunFolder(tmp_path))
    assert capsys.readouterr() == ("", "")


def test_colour_only_in_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    Console(METRICS, stream=stream).heading("title", {})
    assert stream.getvalue() == "\x1b[1mtitle\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Console(METRICS, stream=stream).heading("title", {})
    assert stream.getvalue() == "title\n"


def test_a_log_that_only_knows_ascii_does_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(METRICS, stream=stream).note("naïve \U0001f600")
    assert raw.getvalue() == b"na\\xefve \\U0001f600\n"
