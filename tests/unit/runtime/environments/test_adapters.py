"""Environments of each program are recognised by their methods, do what they do there, and are refused by name."""

import asyncio
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import tool_schema
from rlhf_spmd.runtime.environments.adapters import load_environments
from rlhf_spmd.runtime.environments.native import Opening, Start, Step
from tests import environments

FILES = Path(environments.__file__).parent
ASK = [{"role": "user", "content": "Go."}]


def only(name: str, columns=None):
    return load_environments(f"{FILES}/{name}" if not name.startswith("/") else name, columns)[""]


def begun(environment, **columns):
    episode = environment.make()
    start = Start(columns, "Go.", ASK, seed=5, sample_seed=6)
    return episode, asyncio.run(episode.begin(start))


def test_functions_are_tools_without_a_state():
    tools = only("functions.py:TOOLS")
    assert (tools.speaks, (*tools.tools,)) == ("tools", ("add", "shout", "nap", "end"))
    assert tools.is_stateless and [one["function"]["name"] for one in tools.schemas(tool_schema)] == [*tools.tools]
    episode = tools.make()
    assert asyncio.run(episode.call("add", {"a": 1, "b": 2.5})) == Step("3.5")
    assert asyncio.run(episode.call("shout", {"text": "a"})) == Step("A")
    wrong = asyncio.run(episode.call("add", {"a": 1}))
    assert wrong.has_failed and wrong.observation.startswith("error: TypeError: add() missing")
    unknown = asyncio.run(episode.call("sub", {}))
    assert unknown == Step("error: there is no tool 'sub'; there are: add, shout, nap, end", has_failed=True)
    assert [*only("functions.py:add").tools] == ["add"]


def test_an_environment_of_trl():
    guess = only("of_trl.py:Guess", ["answer", "prompt"])
    assert (guess.speaks, (*guess.tools,), guess.is_stateless) == ("tools", ("give_up", "guess"), False)
    schema = guess.schemas(tool_schema)[1]["function"]
    assert schema["name"] == "guess" and schema["parameters"]["required"] == ["number"]
    episode, opening = begun(guess, answer=7)
    assert opening == Opening(add=" Begin.")
    backs = [asyncio.run(episode.call("guess", {"number": one})) for one in (9, 99, 7)]
    assert [one.observation for one in backs] == ["too high", "error: ValueError: 99 is not between 1 and 20", "right"]
    assert asyncio.run(episode.call("give_up", {})) == Step('{"number": 7}')
    assert asyncio.run(episode.call("get_reward", {})).has_failed
    assert asyncio.run(episode.reward()) == 1 / 3
    assert begun(guess)[0].object.answer == begun(guess)[0].object.answer  # by the seed


def test_a_class_with_steps_gets_columns_and_seeds_by_their_names():
    rounds = only("functions.py:Rounds", ["rounds"])
    episode, opening = begun(rounds, rounds=2, other=3)
    assert opening == Opening() and episode.object.seeds == [5, 6]
    assert asyncio.run(episode.step("ab")) == Step("1 left of ['ab']", 2.0)
    assert asyncio.run(episode.step("c")).is_done
    assert [*only("functions.py:Total").tools] == ["count"]


REFUSED = {
    "no_such.py:A": "no_such.py does not exist",
    "functions.py": "write it as module:Name or file.py:Name",
    "functions.py:Round": r"has no 'Round' \(did you mean 'Rounds'",
    "x = 3\n": "it is 3 .int.: name a class, a function",
    "x = [3]\n": "it is .3. .list.: name a class",
    "class x:\n    def go(self): ...\n": r"it has no reset\(\) \(it has go\): add reset",
    "class x:\n    def reset(self): ...\n": r"it has reset\(\) and nothing to call",
    "class x:\n    def reset(self): ...\n    def step(self, a, b): ...\n": r"its step\(\) takes self, a, b: take",
    "class x:\n    def reset(self, rows): ...\n    def step(self, text): ...\n": r"asks for rows, which .*mean 'row'",
    "class x:\n    def env_response(self, messages): ...\n": "it calls the model itself",
    "async def x(args, sample, sampling_params): ...\n": "x calls the model itself",
    "def x(a: int):\n    '''Does.'''\nx.once = True\n": "tool x says once=True, but a resumed run.*episode_id",
    "import no_such_module\n": "ModuleNotFoundError.*install no_such_module",
    "of_openrlhf.py:AgentExecutor": "calls the model itself, as .*executors of OpenRLHF do: .*AgentInstance",
    "of_verl.py:CheckTool": "CheckTool does not describe itself .* name a file of tools",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_is_not_supported_is_refused_by_name_with_a_fix(given, tmp_path):
    spec = f"{FILES}/{given}"
    if "\n" in given:
        (tmp_path / "e.py").write_text(given, encoding="utf-8")
        spec = f"{tmp_path}/e.py:x"
    with pytest.raises(UserError, match=f"environment .*{REFUSED[given]}"):
        load_environments(spec, ["row"])


@pytest.mark.parametrize(("name", "why"), [("untyped", "missing a type hint"), ("silent", "no docstring")])
def test_a_tool_without_types_or_docstring_is_refused(name, why):
    with pytest.raises(UserError, match=f"functions.py:{name}.*the tool {name} can't be described .*{why}.*Args:"):
        only(f"functions.py:{name}").schemas(tool_schema)


TOOL = '''
import asyncio

async def sound(what: str):
    """Does something.

    Args:
        what: The Python of it.
    """
    {}
'''


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("source", "back"),
    [
        ("return next(iter([]))", "error: RuntimeError: coroutine raised StopIteration"),
        ("raise asyncio.CancelledError", "error: CancelledError"),
        ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "error: Mute"),
        ("return 'caf\\u00e9'.encode() + b'\\xff'", "caf\u00e9\ufffd"),
        ("return {'b', 'a', 'c'}", '["a", "b", "c"]'),
    ],
)
def test_what_a_tool_raises_or_returns_is_a_text(source, back, is_async, tmp_path):
    """The same text in each process, so that an episode can be continued."""
    text = TOOL.format(source)
    (tmp_path / "e.py").write_text(text if is_async else text.replace("async def", "def"), encoding="utf-8")
    answer = asyncio.run(only(f"{tmp_path}/e.py:sound").make().call("sound", {"what": ""}))
    assert answer == Step(back, has_failed=back.startswith("error"))
