"""The environments of a run: what is refused before anything starts, two calls at once, and the end of the workers."""

import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.runtime.environments.of_run import RunEnvironments, row_of
from rlhf_spmd.runtime.environments.rows import Limits
from rlhf_spmd.runtime.failure.processes import below
from tests.import_rules import ROOT
from tests.run_mpi import environment_alone
from tests.templates import ENDS, HERE, STARTED, write_bytes_tokenizer
from tests.unit.runtime.environments.test_episodes import ASK, CALL, FILES, SLEEPY, play, scripted

SEARCH = CALL.format("search", '{"query": "Bern"}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def of_run(folder: Path, tmp_path: Path, spec: str, columns: list[str], name: str = "chatml") -> RunEnvironments:
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(folder, str(HERE / f"{name}.jinja"), started=STARTED)
    stops = [tokenizer.vocabulary()[ENDS[name]]]
    how = {
        "template": name,
        "num_workers": 1,
        "limits": Limits(),
        "seed": 1,
        "key": "prompt",
        "rank": 0,
    }
    run = RunEnvironments(
        spec if spec.endswith(("Guess", "search", "Sleepy")) else f"{FILES}/{spec}",
        columns,
        tokenizer,
        template.render,
        stops,
        **how,
    )
    run.journal = tmp_path / "answers"
    return run


def test_two_calls_at_once_get_their_own_answers(folder, tmp_path):
    run = of_run(folder, tmp_path, "functions.py:SEVERAL", ["environment", "rounds", "prompt"])
    assert run._workers is None  # a rank that generates nothing has none
    try:
        record = {"environment": "saved", "rounds": None, "prompt": ASK}
        one, other = (
            run.episodes([row_of(0, 0, 0, record, "text", "prompt")], 3, name) for name in ("rollout", "evaluation")
        )
        for episodes, by in ((one, 2), (other, 5)):
            (ids,) = episodes.openings()
            drawn = one.lives[0].speech.tokenizer.encode(CALL.format("count", json.dumps({"by": by})), special=False)
            episodes.drew(0, drawn)
        for episodes, total in ((other, "5"), (one, "2")):
            found = []
            while not found:
                found = episodes.answers(1.0)
            text = one.lives[0].speech.tokenizer.decode(found[0].token_ids, special=True)
            assert f"<tool_response>\n{total}\n</tool_response>" in text and ids
        assert len(list((tmp_path / "answers").iterdir())) == 2
        run.forget(4)
        assert not list((tmp_path / "answers").iterdir())
        with pytest.raises(UserError, match="the column 'environment' says 'other', which is not one of rounds, saved"):
            run.episodes([row_of(0, 0, 0, record | {"environment": "other"}, "text", "prompt")], 3)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("spec", "name", "says"),
    [
        ("functions.py:TOOLS", "qwen3_dropped", "template of qwen3_dropped writes a tool call as ''"),
        ("functions.py:Rounds", "qwen3_dropped", "its thinking changes when an answer of the user follows"),
        ("functions.py:TOOLS", "gemma", "gemma: the chat template does not take this conversation"),
        ("functions.py:untyped", "chatml", "the tool untyped can't be described"),
        ("functions.py:Round", "chatml", "did you mean 'Rounds'"),
    ],
)
def test_bad_input_is_one_message_before_anything_starts(spec, name, says, folder, tmp_path):
    with pytest.raises(UserError, match=says):
        of_run(folder, tmp_path, spec, ["rounds", "seed", "sample_seed"], name)


def test_an_environment_that_speaks_text_needs_no_template_of_turns(folder, tmp_path):
    run = of_run(folder, tmp_path, "of_openrlhf.py:AgentInstance", ["label"], "qwen3_dropped")
    try:
        episodes = run.episodes([row_of(0, 0, 0, {"label": "4", "prompt": "Go."}, "Go.", "prompt")], 1)
        assert play(episodes, scripted("4", "5"))[2] == [[1.0, 0.0]]
    finally:
        run.close()


def test_what_the_documents_show_runs(folder, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "write_an_environment.md").read_text(encoding="utf-8")
    guess, search = re.findall(r"^ *```python\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "guess.py").write_text(textwrap.dedent(guess), encoding="utf-8")
    (tmp_path / "look.py").write_text(search, encoding="utf-8")
    (tmp_path / "passages.jsonl").write_text('{"text": "Bern is a city."}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    guesses = [CALL.format("guess", json.dumps({"number": number})) for number in range(1, 21)]
    made = (("guess.py:Guess", [*guesses, "ok"]), ("look.py:search", [SEARCH, "ok"]))
    for iteration, (spec, turns) in enumerate(made):
        run = of_run(folder, tmp_path, spec, ["prompt"])
        try:
            episodes = run.episodes([row_of(0, 0, 0, {"prompt": ASK}, "text", "prompt")], iteration)
            ids, _, (rewards,) = play(episodes, scripted(*turns))
            text = episodes.lives[0].speech.tokenizer.decode(ids[0], special=True)
            found = "right" if "guess" in spec else "Bern is a city."
            assert f"<tool_response>\n{found}\n</tool_response>" in text and "error" not in text
            assert (0 < sum(rewards) <= 0.05) == ("guess" in spec)
        finally:
            run.close()


PROGRAM = """
import json, sys
from pathlib import Path
from tests.unit.runtime.environments.test_of_run import *
from tests.unit.runtime.environments.test_episodes import by_ids
run = of_run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], ["prompt"])
episodes = run.episodes([row_of(n // 2, n % 2, n // 2, {"prompt": ASK}, "text", "prompt") for n in range(4)], 1)
found = play(episodes, by_ids)
run.close()
print(json.dumps([*found, episodes.num_repeated, sum(len(life.seconds) for life in episodes.lives)]))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_in_calls_goes_on_with_the_same_bits(folder, tmp_path):
    """SIGKILL at four places; no worker is left, and what was answered is not asked again."""
    (tmp_path / "e.py").write_text(SLEEPY.replace("random.random() * 0.01", "0.2"), encoding="utf-8")

    alone = environment_alone() | {"PYTHONPATH": str(ROOT)}

    def start(place: str) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / place), f"{tmp_path}/e.py:Sleepy"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", env=alone, cwd=ROOT)

    def made(place: str) -> list:
        with start(place) as process:
            return json.loads(process.communicate(timeout=120)[0])

    *expected, repeated, num_calls = made("whole")
    assert repeated == 0
    for lines in (5, 9, 13, 17):
        place, path = f"killed{lines}", tmp_path / f"killed{lines}" / "answers" / "rollout-1-rank0.jsonl"
        with start(place) as process:
            while not path.exists() or path.read_bytes().count(b"\n") < lines:
                assert process.poll() is None
                time.sleep(0.01)
            children = below(process.pid)
            process.send_signal(signal.SIGKILL)
        known = len([line for line in path.read_bytes().split(b"\n")[:-1] if b'"step"' in line])
        *found, repeated, num_made = made(place)
        assert found == expected and num_made == num_calls - known and 0 <= repeated <= 4
        assert children and not any(Path(f"/proc/{child}").exists() for child in children)
