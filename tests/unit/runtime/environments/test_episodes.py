"""Episodes against an engine of a few lines, whose turns depend on every token of the row so far."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from rlhf_spmd.config.options import Episode
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.runtime.environments.adapters import chosen, load_environments
from rlhf_spmd.runtime.environments.episode_states import Row
from rlhf_spmd.runtime.environments.episodes import Episodes, id_of, seed_of
from rlhf_spmd.runtime.environments.renderer import renderer_of
from rlhf_spmd.runtime.environments.workers import environment_workers
from rlhf_spmd.runtime.generation.episodes import Answer
from rlhf_spmd.runtime.workers.pool import WorkerPool
from tests import environments
from tests.templates import ENDS, HERE, STARTED, write_bytes_tokenizer

FILES = Path(environments.__file__).parent
AGENTS = tuple(f"{FILES}/{name}.py" for name in ("agents", "several_rows"))
ASK = [{"role": "user", "content": "Go."}]
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
SLEEPY = '''
import random, time
class Sleepy:
    """Sleeps at random before it answers."""
    def reset(self, seed, sample_seed):
        self.values = [seed % 100, sample_seed % 100]
    def add(self, x: int) -> str:
        """Adds.

        Args:
            x: A number.
        """
        time.sleep(random.random() * 0.01)
        with open(__file__ + ".log", "a") as file:
            file.write("call\\n")
        self.values.append(x)
        return str(sum(self.values))
    def get_reward(self):
        return float(len(self.values))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def world(folder):
    """Returns world(spec, ...), which makes episodes, on workers that are closed afterwards."""
    pools: dict[tuple[str, int], WorkerPool] = {}

    def world(spec: str, rows: list[Row], *, name="chatml", num=2, options=None, max_prompt=0, **more) -> Episodes:
        options = Episode(**{"tool_timeout_s": 0.0} | (options or {}))
        spec = spec if spec.startswith("/") else f"{FILES}/{spec}"
        if (spec, num) not in pools:
            how = {"drawing": {"max_new_tokens": 64}} if spec.startswith(AGENTS) else {}
            pools[spec, num] = environment_workers(spec, [*rows[0].columns], num=num, num_rows=options.rows, **how)
        template, tokenizer = ChatTemplate(folder, str(HERE / f"{name}.jinja"), started=STARTED), load_tokenizer(folder)
        stops, found = [tokenizer.vocabulary()[ENDS[name]]], load_environments(spec)
        how = tokenizer, template.render, stops
        renderers = [renderer_of(chosen(found, row.columns), *how, template=name) for row in rows]
        more = {"seed": 1, "iteration": 3, "name": "run", "max_prompt": max_prompt, **more}
        return Episodes(rows, renderers, pools[spec, num], options, **more)

    yield world
    workers = [worker.process for pool in pools.values() for worker in pool._workers]
    for pool in pools.values():
        pool.close()
    assert not any(process.is_alive() for process in workers)


def rows_of(num: int, samples: int = 1, **columns) -> list[Row]:
    return [Row(n // samples, n % samples, n // samples, {"n": n, **columns}, "Go.", ASK) for n in range(num)]


def play(episodes: Episodes, says, *, is_cut=False) -> tuple[list[list[int]], list[str], list[list[float]]]:
    """Plays the engine: returns ids, reasons and rewards of the rows. says(row, turn, ids) -> text of a turn; None: a
    limit."""
    ids = episodes.openings()
    tokenizer, (stop,) = episodes.states[0].renderer.tokenizer, episodes.states[0].renderer.joins.stops
    reasons, turns, running = [""] * len(ids), [0] * len(ids), set(range(len(ids)))

    def draw(row: int) -> None:
        text = says(row, turns[row], ids[row])
        turns[row] += 1
        if text is None:
            reasons[row] = "max_sampled_tokens"
            running.discard(row)
            return
        drawn = [*tokenizer.encode(text, special=False), *([] if is_cut else [stop])]
        ids[row] += drawn
        episodes.drew(row, drawn)

    for row in range(len(ids)):
        draw(row)
    while running:
        for answer in episodes.answers(1.0):
            if answer.token_ids is None:
                reasons[answer.row] = answer.reason
                running.discard(answer.row)
            else:
                ids[answer.row] += answer.token_ids
                draw(answer.row)
    return ids, reasons, [episodes.rewards(row, reason) for row, reason in enumerate(reasons)]


def scripted(*turns):
    return lambda row, turn, ids: turns[turn] if turn < len(turns) else None


def text_of(episodes: Episodes, ids: list[int]) -> str:
    return episodes.states[0].renderer.tokenizer.decode(ids, special=True)


def test_tools_of_a_model_with_chatml(world):
    episodes = world("functions.py:TOOLS", rows_of(1))
    both = CALL.format("add", '{"a": 1, "b": 2}') + "\n" + CALL.format("shout", '{"text": "a"}')
    (ids,), reasons, rewards = play(episodes, scripted("x " + both, CALL.format("no", "{}"), "<tool_call>{", "4."))
    whole, text = text_of(episodes, ids), text_of(episodes, ids).partition("<|im_start|>assistant\n")[2]
    assert '"name": "add"' in whole.partition("<|im_start|>user")[0]  # the tools reach the template
    answers = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    first, second, third, last = (part.removesuffix("<|im_end|>") for part in text.split("<|im_start|>assistant\n"))
    assert first == "x " + both + "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n" + (
        "<tool_response>\nA\n</tool_response><|im_end|>\n"
    )
    assert "error: there is no tool 'no'; there are: add, shout, nap, end" in second
    assert third.startswith("<tool_call>{<|im_end|>\n<|im_start|>user\n<tool_response>\nerror: this tool call cannot")
    assert last == "4." and answers and reasons == ["completed"] and rewards == [[0.0] * 4]
    (state,) = episodes.states
    assert (state.turn, state.num_calls, state.num_failures, len(state.seconds)) == (4, 4, 2, 3)


@pytest.mark.parametrize(
    ("limits", "reason", "num_calls"),
    [({"max_turns": 2}, "max_turns", 2), ({"max_calls": 1}, "max_tool_calls", 1), ({}, "max_sampled_tokens", 3)],
)
def test_limits_end_an_episode(limits, reason, num_calls, world):
    call = CALL.format("add", '{"a": 1, "b": 2}')
    episodes = world("functions.py:add", rows_of(1), options=limits)
    _, reasons, _ = play(episodes, scripted(call, call, call))
    assert reasons == [reason] and episodes.states[0].num_calls == num_calls


BY_STEPS = (
    "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    "3<|im_end|>\n<|im_start|>user\nNo. 2 left.<|im_end|>\n<|im_start|>assistant\n4"
)
GUESSES = [CALL.format("guess", json.dumps({"number": one})) for one in (9, 7)]
CHECKS = [CALL.format("check_answer", json.dumps({"answer": one})) for one in "34"]
OF_VERL = {"tools_kwargs": {"check_answer": {"create_kwargs": {"ground_truth": "4"}}}}


@pytest.mark.parametrize(
    ("spec", "columns", "turns", "says", "rewards"),
    [
        ("of_trl.py:Guess", {"answer": 7}, [*GUESSES, "It is 7."], "Go. Begin.<|im_end|>", [0.0, 0.0, 0.5]),
        ("of_skyrl.py:TurnsEnv", {"reward_spec": {"ground_truth": "4"}}, ["3", "4"], BY_STEPS, [0.1, 1.0]),
        (
            "of_openrlhf.py:AgentInstance",
            {"label": "4"},
            ["4?", "5"],
            "Go.4?\n\nHuman: 3\n\nAssistant: 5",
            [1.0, 0.0],
        ),
        ("of_verl.yaml", OF_VERL, [*CHECKS, "4"], "Go.", [-0.05, 0.0, 1.0]),
    ],
)
def test_environments_of_other_programs(spec, columns, turns, says, rewards, world):
    """One of TRL opens the prompt, one of SkyRL answers as the user, and one of OpenRLHF speaks without a template."""
    episodes, steps = world(spec, rows_of(2, **columns)), spec.startswith(("of_skyrl", "of_openrlhf"))
    ids, reasons, found = play(episodes, scripted(*turns), is_cut=steps)
    text = text_of(episodes, ids[0])
    assert (text == says if steps else says in text) and ids[0] == ids[1]
    assert reasons == ["tool_stopped" if steps else "completed"] * 2 and found == [rewards] * 2


def test_several_environments_in_one_call(world):
    rows = [
        Row(0, 0, 0, {"environment": "rounds", "rounds": 2}, "Go.", ASK),
        Row(1, 0, 1, {"environment": "total"}, "Go.", ASK),
    ]
    episodes = world("functions.py:SEVERAL", rows)
    says = lambda row, turn, ids: ("ab", "c")[turn] if row == 0 else (CALL.format("count", '{"by": 3}'), "3")[turn]  # noqa: E731
    _, reasons, rewards = play(episodes, says)
    assert reasons == ["tool_stopped", "completed"] and rewards == [[2.0, 1.0], [0.0, 3.0]]
    assert not any("dropped" in name for name in episodes.counts())
    episodes = world("functions.py:SEVERAL", rows, options={"on_failure": "drop_group"})
    play(episodes, lambda row, turn, ids: "break" if row == 0 else says(row, turn, ids))
    dropped = {name: count for name, count in episodes.counts().items() if "dropped" in name}
    of_each = {"dropped_episodes/rounds": (1, 1), "dropped_episodes/total": (0, 1)}
    assert dropped == {"dropped_episodes": (1, 2), **of_each}


# ---- again ----------------------------------------------------------------------------------------------------------


def by_ids(row: int, turn: int, ids: list[int]) -> str | None:
    """Returns a turn that depends on every token so far; most end after three."""
    number = int(hashlib.sha256(repr(ids).encode()).hexdigest()[:6], 16)
    return (
        f"so {number}" if turn and number % 3 == 0 else None if turn == 4 else CALL.format("add", f'{{"x": {number}}}')
    )


def test_calls_that_are_made_again_give_the_same_tokens(world, tmp_path):
    """Whenever answers come, and also if workers are killed, which rebuild their episodes by the earlier calls."""
    (tmp_path / "e.py").write_text(SLEEPY, encoding="utf-8")
    spec, rows = f"{tmp_path}/e.py:Sleepy", rows_of(4, samples=2)
    expected = play(world(spec, rows), by_ids)
    assert len({tuple(ids) for ids in expected[0]}) == 4 and len({*expected[1]}) == 2
    assert play(world(spec, rows, num=1), by_ids) == expected
    episodes = world(spec, rows)

    def killing(row: int, turn: int, ids: list[int]) -> str | None:
        worker = episodes.workers._workers[row % 2]
        if turn == 1 and row < 3 and worker.is_ready:  # no more often than an episode may be lost
            os.kill(worker.process.pid, signal.SIGKILL)
        return by_ids(row, turn, ids)

    assert play(episodes, killing) == expected and any(state.num_lost for state in episodes.states)


NAMED = '''
from rlhf_spmd.tools import episode_id
class Named:
    """Gives the id of its episode."""
    def reset(self):
        self.ids = [episode_id()]
    def name(self, episode_id: str) -> str:
        """Gives the id.

        Args:
            episode_id: A name of a parameter like any other.
        """
        return self.other()
    def other(self) -> str:
        """Gives the id."""
        return episode_id()
async def later() -> str:
    """Gives the id."""
    return episode_id()
'''


@pytest.mark.parametrize(("name", "call"), [("Named", "other"), ("later", "later"), ("Named", "name")])
def test_an_episode_has_an_id_that_is_the_same_in_a_resumed_run(name, call, world, tmp_path):
    (tmp_path / "e.py").write_text(NAMED, encoding="utf-8")
    says, rows = scripted(CALL.format(call, '{"episode_id": "x"}' if call == "name" else "{}"), "ok"), rows_of(3, 2)

    episodes = world(f"{tmp_path}/e.py:{name}", rows)
    play(episodes, says)
    found = [state.made[-1][1]["step"]["observation"] for state in episodes.states]
    assert found == [id_of("run", 1, 3, row.prompt, row.sample) for row in rows] and len({*found}) == 3


def test_an_object_that_answers_otherwise_when_it_is_made_anew_is_named(world):
    episodes = world("functions.py:Restless", rows_of(1), num=1)
    calls = [CALL.format("count", f'{{"by": {by}}}') for by in (1, 2, 3)]

    def killing(row: int, turn: int, ids: list[int]) -> str:
        if turn == 2:
            os.kill(episodes.workers._workers[0].process.pid, signal.SIGKILL)
        return calls[turn]

    with pytest.raises(UserError, match="prompt 0, sample 0, turn 3: .*Restless': count gave .* where it gave .* made"):
        play(episodes, killing)


# ---- what breaks, and clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "is_over"), [(3, False), (4, True)])
def test_an_environment_that_breaks_is_tried_three_times_anew(times, is_over, world, tmp_path):
    rows, says = rows_of(1, rounds=2, path=str(tmp_path / "log")), scripted("ab", f"fragile {times}")
    if not is_over:
        (_,), reasons, rewards = play(world("functions.py:Fragile", rows), says)
        assert reasons == ["tool_stopped"] and rewards == [[2.0, 9.0]]
        assert (tmp_path / "log").read_text(encoding="utf-8").count("ab\n") == 4  # the earlier turn, each time
        return
    with pytest.raises(UserError, match=r"(?s)prompt 0, sample 0, turn 2: .*Fragile broke 4 times.*RuntimeError: brok"):
        play(world("functions.py:Fragile", rows), says)


@pytest.mark.parametrize("text", ["break", "exit"])
def test_a_group_whose_environment_breaks_may_be_dropped(text, world, capfd):
    """Also if it ends its process, with the others in it, which go on in other objects."""
    rows = rows_of(4, samples=2, rounds=2)
    episodes = world("functions.py:Rounds", rows, options={"on_failure": "drop_group"})
    _, reasons, rewards = play(episodes, lambda row, turn, ids: text if (row, turn) == (1, 1) else "ab")
    assert reasons == ["tool_stopped"] * 4 and rewards == [[2.0, 2.0], [2.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
    assert [episodes.is_dropped(row) for row in range(4)] == [True, True, False, False]
    assert episodes.counts()["dropped_episodes"] == (2, 4)
    said = capfd.readouterr().err
    assert said.count("Rounds broke 4 times, so the group of an episode is dropped") == 1
    assert ("RuntimeError: broken" if text == "break" else "its worker process exited with status 3") in said


def test_the_neighbours_of_a_call_that_ends_its_worker_go_on(world):
    """The last try of each runs alone, so the one that ends it is known; objects are made anew by their calls."""
    rows = rows_of(12, rounds=3)
    episodes = world("functions.py:Rounds", rows, options={"on_failure": "drop_group"})
    _, reasons, rewards = play(episodes, lambda row, turn, ids: "exit" if (row, turn) == (1, 1) else "ab" * (turn + 1))
    assert [state.num_lost for state in episodes.states][1] == 4 and episodes.dropped == {1}
    assert max(state.num_lost for state in episodes.states if state.row.prompt != 1) <= 3
    assert rewards == [[2.0, 4.0, 6.0] if row != 1 else [2.0, 0.0] for row in range(12)]
    assert reasons == ["tool_stopped"] * 12


ENDS_IN_REWARD = '''
import os, time
class Ends:
    def reset(self, n): self.n = n
    def look(self, word: str) -> str:
        """Looks.

        Args:
            word: A word.
        """
        time.sleep(0.02 * (self.n + 1))
        return word
    def get_reward(self): os._exit(1)
'''


@pytest.mark.parametrize("num", [1, 2, 3])
def test_workers_that_are_lost_again_and_again_are_one_message(num, world, tmp_path):
    """Each episode is begun anew three times at most, whichever of them ended the worker."""
    (tmp_path / "e.py").write_text(ENDS_IN_REWARD, encoding="utf-8")
    calls = [CALL.format("look", f'{{"word": "w{turn}"}}') for turn in range(2)]
    episodes = world(f"{tmp_path}/e.py:Ends", rows_of(num), num=1)
    with pytest.raises(UserError, match=r"(?s)turn 3: .*Ends broke 4 times.*its worker process exited with status 1"):
        play(episodes, scripted(*calls, "done"))
    assert [state.num_lost for state in episodes.states].count(4) == 1


HIDDEN = '''
import os, time
from pathlib import Path
def look(word: str) -> str:
    """Has a child, which keeps the connection of the worker open, when its process ends; once.

    Args:
        word: A word.
    """
    try:
        Path(__file__ + ".once").touch(exist_ok=False)
    except FileExistsError:
        return word
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os._exit(3)
'''


def test_the_end_of_a_worker_is_seen_although_its_child_keeps_the_connection(world, tmp_path):
    (tmp_path / "e.py").write_text(HIDDEN, encoding="utf-8")
    episodes = world(f"{tmp_path}/e.py:look", rows_of(1), options={"tool_timeout_s": 30})
    (ids,), *_ = play(episodes, scripted(CALL.format("look", '{"word": "w0"}'), "done"))
    assert "<tool_response>\nw0\n</tool_response>" in text_of(episodes, ids) and episodes.states[0].num_lost == 1
    assert episodes.states[0].seconds[0] < 20


def test_a_group_is_dropped_wherever_its_environment_breaks(world):
    breaks = ("reset", "get_reward", "get_reward is nan", "step is inf")
    rows = [Row(n, 0, n, {"at": at}, "Go.", ASK) for n, at in enumerate((*breaks, ""))]
    episodes = world("functions.py:Broken", rows, options={"on_failure": "drop_group"})
    _, reasons, rewards = play(episodes, scripted("ab", "c"))
    assert reasons == ["tool_stopped"] * 5 and rewards[::4] == [[0.0], [1.0, 3.0]]
    assert [state.num_broken for state in episodes.states] == [4] * 4 + [0] and episodes.dropped == {0, 1, 2, 3}
    assert episodes.counts()["dropped_episodes"] == (4, 5)
    told = ("RuntimeError: no reset", "RuntimeError: no reward", "a reward is nan: return", "a reward is inf")
    for row, says in zip(rows, told, strict=False):
        with pytest.raises(UserError, match=f"(?s)prompt {row.prompt}, sample 0.*Broken broke 4 times.*{says}"):
            play(world("functions.py:Broken", [row]), scripted("c"))


@pytest.mark.timed
def test_a_call_that_takes_too_long_is_answered_so_and_marks_the_run(world):
    episodes = world("functions.py:TOOLS", rows_of(1), options={"tool_timeout_s": 0.3})
    (ids,), reasons, _ = play(episodes, scripted(CALL.format("nap", '{"seconds": 30}'), "no"))
    assert "<tool_response>\nerror: timed out after 0.3 s\n</tool_response>" in text_of(episodes, ids)
    assert reasons == ["completed"] and episodes.states[0].num_timeouts == 1


@pytest.mark.timed
def test_an_episode_that_takes_too_long_ends_and_the_others_go_on(world):
    says = lambda row, turn, ids: (CALL.format("nap", f'{{"seconds": {0 if row else 30}}}'), "no")[turn]  # noqa: E731
    episodes = world("functions.py:TOOLS", rows_of(3), options={"timeout_s": 0.5})
    _, reasons, rewards = play(episodes, says)
    assert reasons == ["rollout_timeout", "completed", "completed"]
    assert rewards[0] == [0.0]


def test_a_late_episode_ends_also_while_other_answers_are_there(world):
    episodes = world("functions.py:TOOLS", rows_of(2), options={"timeout_s": 0.01})
    episodes.openings()
    (stop,), tokenizer = episodes.states[0].renderer.joins.stops, episodes.states[0].renderer.tokenizer
    episodes.drew(0, [*tokenizer.encode(CALL.format("nap", '{"seconds": 5}'), special=False), stop])
    time.sleep(0.02)
    episodes._ready.append(Answer(1, None, "completed"))
    assert [(answer.row, answer.reason) for answer in episodes.answers(0.0)] == [
        (1, "completed"),
        (0, "rollout_timeout"),
    ]


def test_seeds_are_of_the_group_and_of_the_sample():
    assert (seed_of(1, 3, 0), seed_of(1, 3, 0, 1)) == (1410065689, 2027960600)
    assert len({seed_of(1, 3, 0), seed_of(1, 3, 0, 0), seed_of(1, 3, 0, 1), seed_of(1, 4, 0), seed_of(2, 3, 0)}) == 5
