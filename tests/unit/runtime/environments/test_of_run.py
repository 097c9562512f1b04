"""The environments of a run: what is refused before anything starts, two calls at once, and the end of the workers."""

import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_spmd.config.options import DataOptions, Episode
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.runtime.environments.of_run import RunEnvironments, row_of
from tests.size_rules import REPOSITORY as ROOT
from tests.templates import ENDS, HERE, STARTED, write_bytes_tokenizer
from tests.unit.runtime.environments.test_episodes import ASK, CALL, FILES, play, scripted

SEARCH = CALL.format("search", '{"query": "Bern"}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def of_run(folder: Path, spec: str, columns: list[str], name: str = "chatml", rows: int = 1) -> RunEnvironments:
    tokenizer = load_tokenizer(folder)
    config = SimpleNamespace(
        environment=spec if spec.endswith(("Guess", "search", "Sleepy")) else f"{FILES}/{spec}",
        environment_workers=1,
        seed=1,
        started=STARTED,
        episode=Episode(tool_timeout_s=0.0, rows=rows),
        data=DataOptions(key="prompt", chat_template=str(HERE / f"{name}.jinja")),
        files=lambda: SimpleNamespace(tokenizer=folder),
    )
    return RunEnvironments(config, columns, tokenizer, [tokenizer.vocabulary()[ENDS[name]]])


def test_two_calls_at_once_get_their_own_answers(folder):
    run = of_run(folder, "functions.py:SEVERAL", ["environment", "rounds", "prompt"])
    assert run._workers is None  # a rank that generates nothing has none
    try:
        record = {"environment": "total", "rounds": None, "prompt": ASK}
        one, other = (
            run.episodes([row_of(0, 0, 0, record, "text", "prompt")], 3, name) for name in ("rollout", "evaluation")
        )
        for episodes, by in ((one, 2), (other, 5)):
            (ids,) = episodes.openings()
            drawn = one.states[0].renderer.tokenizer.encode(CALL.format("count", json.dumps({"by": by})), special=False)
            episodes.drew(0, drawn)
        for episodes, total in ((other, "5"), (one, "2")):
            found = []
            while not found:
                found = episodes.answers(1.0)
            text = one.states[0].renderer.tokenizer.decode(found[0].token_ids, special=True)
            assert f"<tool_response>\n{total}\n</tool_response>" in text and ids
        with pytest.raises(UserError, match="the column 'environment' says 'other', which is not one of rounds, total"):
            run.episodes([row_of(0, 0, 0, record | {"environment": "other"}, "text", "prompt")], 3)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("spec", "name", "says"),
    [
        ("functions.py:add", "chatml", "only agents open further rows"),
        ("functions.py:TOOLS", "qwen3_dropped", "template of .*qwen3_dropped.jinja writes a tool call as ''"),
        ("functions.py:Rounds", "qwen3_dropped", "its thinking changes when an answer of the user follows"),
        ("functions.py:TOOLS", "gemma", "gemma.jinja: the chat template does not take this conversation"),
        ("functions.py:untyped", "chatml", "the tool untyped can't be described"),
        ("functions.py:Round", "chatml", "did you mean 'Rounds'"),
    ],
)
def test_bad_input_is_one_message_before_anything_starts(spec, name, says, folder):
    with pytest.raises(UserError, match=says):
        of_run(folder, spec, ["rounds", "seed", "sample_seed"], name, rows=2 if "rows" in says else 1)


def test_an_environment_that_speaks_text_needs_no_template_of_turns(folder):
    run = of_run(folder, "of_openrlhf.py:AgentInstance", ["label"], "qwen3_dropped")
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
        run = of_run(folder, spec, ["prompt"])
        try:
            episodes = run.episodes([row_of(0, 0, 0, {"prompt": ASK}, "text", "prompt")], iteration)
            ids, _, (rewards,) = play(episodes, scripted(*turns))
            text = episodes.states[0].renderer.tokenizer.decode(ids[0], special=True)
            found = "right" if "guess" in spec else "Bern is a city."
            assert f"<tool_response>\n{found}\n</tool_response>" in text and "error" not in text
            assert (0 < sum(rewards) <= 0.05) == ("guess" in spec)
        finally:
            run.close()
