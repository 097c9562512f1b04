"""Episodes as text by turns, from their tokens, with the chat templates of several families."""

import json

import pytest

from rlhf_spmd.model.texts.tool_calls import Call
from rlhf_spmd.runtime.environments.renderer import transcript
from tests.templates import write_bytes_tokenizer
from tests.unit.runtime.environments.test_episodes import play, rows_of, scripted
from tests.unit.runtime.environments.test_of_run import of_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def shown(run, rows, *turns) -> list[dict]:
    """Returns the transcript of an episode whose turns are given."""
    episodes = run.episodes(rows, 1)
    renderer, place = episodes.states[0].renderer, len(run.episodes(rows, 1).openings()[0])
    (ids,), *_ = play(episodes, scripted(*turns))
    response, drawn, place = ids[place:], [], 0
    for text in turns:
        said = [*renderer.tokenizer.encode(text, special=False), *renderer.joins.stops]
        while response[place : place + len(said)] != said:
            drawn, place = [*drawn, False], place + 1
        drawn, place = [*drawn, *[True] * len(said)], place + len(said)
    return transcript(renderer, response, drawn)


@pytest.mark.parametrize("name", ["chatml", "qwen3_kept", "llama3", "mistral", "pythonic"])
def test_calls_and_answers_are_apart(name, folder, tmp_path):
    run = of_run(folder, "functions.py:TOOLS", ["prompt"], name)
    try:
        renderer = run.renderers[""]
        call = Call("add", {"a": 1, "b": 2}, "100000000")
        said = renderer.joins.call_text([call.message])
        words = "I add.\n" if name == "chatml" else ""
        thought = "<think>\n\n</think>" if name == "qwen3_kept" else ""  # which this template writes before a call
        first, last = shown(run, rows_of(1), words + said, "It is 3.")
        assert first == {"model": words.strip() or thought, "calls": ['add({"a": 1, "b": 2})'], "answers": ["3"]}
        assert last == {"model": "It is 3.", "calls": [], "answers": []}
    finally:
        run.close()


def test_environments_that_speak_text_and_messages(folder, tmp_path):
    for spec, columns, expected in (
        ("of_openrlhf.py:AgentInstance", {"label": "4"}, None),
        ("functions.py:Rounds", {"rounds": 2}, "1 left of ['a']"),
    ):
        run = of_run(folder, spec, [*columns, "seed", "sample_seed"])
        try:
            first, last = shown(run, rows_of(1, **columns), "a", "b")
            assert (first["model"], last["model"]) == ("a", "b") and len(first["answers"]) == 1
            assert expected is None or first["answers"] == [expected]
            assert json.dumps(first)
        finally:
            run.close()
