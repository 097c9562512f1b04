"""Episodes against an engine of a few lines, whose turns depend on every token of the row so far."""

import hashlib
import json
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer, tool_schema
from rlhf_spmd.runtime.environments.adapters import chosen, load_environments
from rlhf_spmd.runtime.environments.episodes import Episodes
from rlhf_spmd.runtime.environments.journal import Journal
from rlhf_spmd.runtime.environments.rows import Limits, Row, seed_of
from rlhf_spmd.runtime.environments.speech import speech_of
from rlhf_spmd.runtime.environments.workers import EnvironmentWorkers
from tests import environments
from tests.templates import ENDS, HERE, STARTED, write_bytes_tokenizer

FILES = Path(environments.__file__).parent
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


class Killed(BaseException):
    """Instead of SIGKILL."""


class Mortal(Journal):
    """A journal whose rank is killed at a write, of which it leaves a part."""

    left = 10**9

    def _write(self, line):
        if self.left == 0:
            with self.path.open("ab") as file:
                file.write(json.dumps(line).encode()[:9])
            raise Killed
        self.left -= 1
        super()._write(line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def world(folder, tmp_path):
    """Returns world(spec, ...), which makes episodes, on workers that are closed afterwards."""
    pools: dict[str, EnvironmentWorkers] = {}

    def world(spec: str, rows: list[Row], *, name="chatml", journal=None, iteration=3, limits=None, **more) -> Episodes:
        spec = spec if spec.startswith("/") else f"{FILES}/{spec}"
        pools[spec] = pools.get(spec) or EnvironmentWorkers(spec, [*rows[0].columns], num=2)
        template, tokenizer = ChatTemplate(folder, str(HERE / f"{name}.jinja"), started=STARTED), load_tokenizer(folder)
        stops, found = [tokenizer.vocabulary()[ENDS[name]]], load_environments(spec)
        how = {"template": name, "describe": tool_schema}
        speeches = [speech_of(chosen(found, row.columns), tokenizer, template.render, stops, **how) for row in rows]
        journal = journal or Journal(tmp_path / "journal", iteration, 0)
        return Episodes(rows, speeches, pools[spec], journal, limits or Limits(), seed=1, iteration=iteration, **more)

    def end_calls() -> None:
        """Waits for calls of a run that was killed, whose workers would have been killed, too."""
        for pool in pools.values():
            while any(worker.tickets for worker in pool._workers):
                pool.answers(0.1, [])

    world.end_calls = end_calls
    yield world
    for pool in pools.values():
        pool.close()


def rows_of(num: int, samples: int = 1, **columns) -> list[Row]:
    return [Row(n // samples, n % samples, n // samples, {"n": n, **columns}, "Go.", ASK) for n in range(num)]


def play(episodes: Episodes, says, *, is_cut=False) -> tuple[list[list[int]], list[str], list[list[float]]]:
    """Plays the engine: returns ids, reasons and rewards of the rows. says(row, turn, ids) -> text of a turn; None: a
    limit."""
    ids = episodes.openings()
    tokenizer, (stop,) = episodes.lives[0].speech.tokenizer, episodes.lives[0].speech.joins.stops
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
    return episodes.lives[0].speech.tokenizer.decode(ids, special=True)


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
    assert "error: there is no tool 'no'; there are: add, shout, nap, send" in second
    assert third.startswith("<tool_call>{<|im_end|>\n<|im_start|>user\n<tool_response>\nerror: this tool call cannot")
    assert last == "4." and answers and reasons == ["completed"] and rewards == [[0.0] * 4]
    (result,) = episodes.results()
    assert (result.num_turns, result.num_calls, result.num_failures, len(result.seconds)) == (4, 4, 2, 3)
    assert episodes.is_exact


@pytest.mark.parametrize(
    ("limits", "reason", "num_calls"),
    [(Limits(turns=2), "max_turns", 2), (Limits(calls=1), "max_tool_calls", 1), (Limits(), "max_sampled_tokens", 3)],
)
def test_limits_end_an_episode(limits, reason, num_calls, world):
    call = CALL.format("add", '{"a": 1, "b": 2}')
    episodes = world("functions.py:add", rows_of(1), limits=limits)
    _, reasons, _ = play(episodes, scripted(call, call, call))
    assert reasons == [reason] and episodes.lives[0].num_calls == num_calls


def test_an_environment_of_trl_opens_the_prompt_and_gives_the_reward(world):
    episodes = world("of_trl.py:Guess", rows_of(2, answer=7))
    guesses = [CALL.format("guess", json.dumps({"number": one})) for one in (9, 7)]
    ids, reasons, rewards = play(episodes, scripted(*guesses, "It is 7."))
    assert "Go. Begin.<|im_end|>" in text_of(episodes, ids[0]) and ids[0] == ids[1]
    assert reasons == ["completed"] * 2 and rewards == [[0.0, 0.0, 0.5]] * 2


def test_text_that_no_tokenizer_takes_is_replaced(world):
    """Halves of surrogate pairs, in what the model writes and in what a tool answers; and names without an end."""
    call = CALL.format("shout", r'{"text": "a\ud800"}') + CALL.format(r"\udc80", "{}") + CALL.format("x" * 9999, "{}")
    episodes = world("functions.py:TOOLS", rows_of(1))
    (ids,), reasons, _ = play(episodes, scripted(call, "ok"))
    assert "<tool_response>\nA?\n</tool_response>" in text_of(episodes, ids) and reasons == ["completed"]


def test_an_environment_with_steps_answers_as_the_user(world):
    episodes = world("of_skyrl.py:TurnsEnv", rows_of(1, reward_spec={"ground_truth": "4"}))
    (ids,), reasons, rewards = play(episodes, scripted("3", "4"), is_cut=True)
    assert text_of(episodes, ids) == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
        "3<|im_end|>\n<|im_start|>user\nNo. 2 left.<|im_end|>\n<|im_start|>assistant\n4"
    )
    assert reasons == ["tool_stopped"] and rewards == [[0.1, 1.0]]


def test_an_agent_of_openrlhf_speaks_without_a_template(world):
    episodes = world("of_openrlhf.py:AgentInstance", rows_of(1, label="4"))
    (ids,), reasons, rewards = play(episodes, scripted("4?", "5"), is_cut=True)
    assert text_of(episodes, ids) == "Go.4?\n\nHuman: 3\n\nAssistant: 5"
    assert reasons == ["tool_stopped"] and rewards == [[1.0, 0.0]] and episodes.results()[0].logs == {"correct": 1.0}


def test_a_tool_of_verl(world):
    given = {"check_answer": {"create_kwargs": {"ground_truth": "4"}}}
    episodes = world("of_verl.yaml", rows_of(1, tools_kwargs=given))
    calls = [CALL.format("check_answer", json.dumps({"answer": one})) for one in "34"]
    _, reasons, rewards = play(episodes, scripted(*calls, "4"))
    assert reasons == ["completed"] and rewards == [[-0.05, 0.0, 1.0]]


def test_several_environments_in_one_call(world):
    rows = [
        Row(0, 0, 0, {"environment": "rounds", "rounds": 2}, "Go.", ASK),
        Row(1, 0, 1, {"environment": "saved"}, "Go.", ASK),
    ]
    episodes = world("functions.py:SEVERAL", rows)
    says = lambda row, turn, ids: ("ab", "c")[turn] if row == 0 else (CALL.format("count", '{"by": 3}'), "3")[turn]  # noqa: E731
    _, reasons, rewards = play(episodes, says)
    assert reasons == ["tool_stopped", "completed"] and rewards == [[2.0, 1.0], [0.0, 3.0]]
    assert not any("dropped" in name for name in episodes.counts())
    episodes = world("functions.py:SEVERAL", rows, iteration=4, on_failure="drop_group")
    play(episodes, lambda row, turn, ids: "break" if row == 0 else says(row, turn, ids))
    dropped = {name: count for name, count in episodes.counts().items() if "dropped" in name}
    of_each = {"dropped_episodes/rounds": (1, 1), "dropped_episodes/saved": (0, 1)}
    assert dropped == {"dropped_episodes": (1, 2), **of_each}


def test_a_prompt_that_is_text_is_refused_where_turns_need_a_template(world):
    with pytest.raises(
        UserError, match="p.jsonl, line 3: the prompt is text, and turns are joined by the chat template"
    ):
        world("functions.py:add", [Row(0, 0, 0, {}, "Go.", None, "p.jsonl, line 3")]).openings()


# ---- journal and resume ---------------------------------------------------------------------------------------------


def by_ids(row: int, turn: int, ids: list[int]) -> str | None:
    """Returns a turn that depends on every token so far; most end after three."""
    number = int(hashlib.sha256(repr(ids).encode()).hexdigest()[:6], 16)
    return (
        f"so {number}" if turn and number % 3 == 0 else None if turn == 4 else CALL.format("add", f'{{"x": {number}}}')
    )


def played(world, spec, journals, rows) -> dict:
    """Returns the rows, drawn by ranks one after the other; what each came to."""
    found = {}
    for rank, journal in enumerate(journals):
        mine = rows[rank :: len(journals)]
        for row, *what in zip(mine, *play(world(spec, mine, journal=journal), by_ids), strict=True):
            found[row.prompt, row.sample] = what
    return found


def test_a_rank_that_is_killed_at_any_write_goes_on_with_the_same_bits(world, tmp_path):
    """Also with other ranks; what has an answer is not asked again."""
    (tmp_path / "e.py").write_text(SLEEPY, encoding="utf-8")
    spec, log, rows = f"{tmp_path}/e.py:Sleepy", tmp_path / "e.py.log", rows_of(4, samples=2)
    whole = Mortal(tmp_path / "whole", 3, 0)
    expected = played(world, spec, [whole], rows)
    assert len({tuple(ids) for ids, *_ in expected.values()}) == 4 and len({one[1] for one in expected.values()}) == 2
    num_calls, writes = log.read_bytes().count(b"\n"), 10**9 - whole.left
    assert writes > 20
    for left in range(0, writes, 3):
        folder = tmp_path / f"killed{left}"
        mortal = Mortal(folder, 3, 0)
        mortal.left = left
        with pytest.raises(Killed):
            played(world, spec, [mortal], rows)
        world.end_calls()
        known = len([key for key in Journal(folder, 3, 9).answers if key[2] > 0])
        log.write_bytes(b"")
        again = [Journal(folder, 3, rank) for rank in range(1 + left % 2)]
        assert played(world, spec, again, rows) == expected, left
        assert log.read_bytes().count(b"\n") <= num_calls  # unfinished ones are rebuilt by their calls
        log.write_bytes(b"")
        assert played(world, spec, [Journal(folder, 3, 4)], rows) == expected  # all are finished
        assert log.read_bytes() == b"" and known <= num_calls


def test_an_answered_call_of_a_stateless_tool_is_never_made_again_and_an_unanswered_one_is_counted(world, tmp_path):
    says = scripted(CALL.format("shout", '{"text": "a"}'), CALL.format("add", '{"a": 1, "b": 2}'), "3")
    expected = play(world("functions.py:TOOLS", rows_of(1), journal=Journal(tmp_path / "a", 3, 0)), says)
    mortal = Mortal(tmp_path / "b", 3, 0)
    mortal.left = 3  # the second call is asked, and its answer is lost
    with pytest.raises(Killed):
        play(world("functions.py:TOOLS", rows_of(1), journal=mortal), says)
    episodes = world("functions.py:TOOLS", rows_of(1), journal=Journal(tmp_path / "b", 3, 1))
    assert play(episodes, says) == expected and episodes.num_repeated == 1
    assert len(episodes.results()[0].seconds) == 1


def test_a_call_that_must_not_be_made_again_stops_the_run_and_is_named(world, tmp_path):
    says, mortal = scripted(CALL.format("send", '{"text": "a"}'), "ok"), Mortal(tmp_path / "b", 3, 0)
    mortal.left = 1
    with pytest.raises(Killed):
        play(world("functions.py:TOOLS", rows_of(1), journal=mortal), says)
    with pytest.raises(UserError, match="prompt 0, sample 0, turn 1: the call of send was made before .* .once."):
        play(world("functions.py:TOOLS", rows_of(1), journal=Journal(tmp_path / "b", 3, 0)), says)


def test_a_call_that_must_not_be_made_again_is_not_when_its_worker_has_ended(world):
    says = scripted(CALL.format("post", '{"text": "a"}'), "ok")
    with pytest.raises(UserError, match="prompt 0, sample 0, turn 1: .*the call of post would be made again.*once"):
        play(world("functions.py:TOOLS", rows_of(1)), says)


def test_an_object_with_save_and_load_is_loaded_and_one_that_answers_otherwise_is_named(world, tmp_path):
    says = scripted(*[CALL.format("count", f'{{"by": {by}}}') for by in (1, 2, 3)], "6")
    expected = play(world("functions.py:Saved", rows_of(1), journal=Journal(tmp_path / "a", 3, 0)), says)
    assert expected[2] == [[0.0, 0.0, 0.0, 6.0]]
    for name in ("Saved", "Restless"):
        mortal = Mortal(tmp_path / name, 3, 0)
        mortal.left = 5
        with pytest.raises(Killed):
            play(world(f"functions.py:{name}", rows_of(1), journal=mortal), says)
    saved = world("functions.py:Saved", rows_of(1), journal=Journal(tmp_path / "Saved", 3, 0))
    assert play(saved, says) == expected
    with pytest.raises(
        UserError, match="prompt 0, sample 0, turn 3: count of .*Restless gave .* where it gave .* before"
    ):
        play(world("functions.py:Restless", rows_of(1), journal=Journal(tmp_path / "Restless", 3, 0)), says)


def test_a_journal_of_other_draws_is_named(world, tmp_path):
    play(world("functions.py:add", rows_of(1)), scripted(CALL.format("add", '{"a": 1, "b": 2}'), "3"))
    with pytest.raises(UserError, match="prompt 0, sample 0, turn 1: the model draws something else than when"):
        play(world("functions.py:add", rows_of(1)), scripted(CALL.format("add", '{"a": 2, "b": 2}'), "3"))


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
    for is_again in (False, True):  # then by the journal: nothing is called
        episodes = world("functions.py:Rounds", rows, on_failure="drop_group")
        _, reasons, rewards = play(episodes, lambda row, turn, ids: text if (row, turn) == (1, 1) else "ab")
        assert reasons == ["tool_stopped"] * 4 and rewards == [[2.0, 2.0], [2.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
        assert [one.is_dropped for one in episodes.results()] == [True, True, False, False]
        assert episodes.counts()["dropped_episodes"] == (2, 4) and episodes.lives[1].tries == (0 if is_again else 4)
    said = capfd.readouterr().err
    assert said.count("Rounds broke 4 times, so the group of an episode is dropped") == 1
    assert ("RuntimeError: broken" if text == "break" else "its worker process exited with status 3") in said


def test_the_neighbours_of_a_call_that_ends_its_worker_are_not_charged_with_it(world):
    """Nor with its further tries, whatever they wait for: their objects are made anew from what they answered."""
    rows = rows_of(12, rounds=3)
    episodes = world("functions.py:Rounds", rows, on_failure="drop_group")
    _, reasons, rewards = play(episodes, lambda row, turn, ids: "exit" if (row, turn) == (1, 1) else "ab" * (turn + 1))
    assert [life.tries for life in episodes.lives] == [0, 4, *[0] * 10] and reasons == ["tool_stopped"] * 12
    assert rewards == [[2.0, 4.0, 6.0] if row != 1 else [2.0, 0.0] for row in range(12)]


def test_a_result_of_another_form_names_its_row_and_its_environment(world, tmp_path):
    text = "class E:\n    def reset(self): ...\n    def step(self, text): return 3\n"
    (tmp_path / "e.py").write_text(text, encoding="utf-8")
    with pytest.raises(
        UserError, match=r"prompt 0, sample 0, turn 1: environment '.*e.py:E': step\(\) returned an int"
    ):
        play(world(f"{tmp_path}/e.py:E", rows_of(1)), scripted("a"))


def test_a_group_is_dropped_wherever_its_environment_breaks(world):
    breaks = ("reset", "get_reward", "get_reward is nan", "step is inf")
    rows = [Row(n, 0, n, {"at": at}, "Go.", ASK) for n, at in enumerate((*breaks, ""))]
    for num in (4, 0):  # the second time by the journal
        episodes = world("functions.py:Broken", rows, on_failure="drop_group")
        _, reasons, rewards = play(episodes, scripted("ab", "c"))
        assert reasons == ["tool_stopped"] * 5 and rewards[::4] == [[0.0], [1.0, 3.0]]
        found = [(one.is_dropped, one.num_broken) for one in episodes.results()]
        assert found == [(True, num)] * 4 + [(False, 0)] and episodes.counts()["dropped_episodes"] == (4, 5)
    told = ("RuntimeError: no reset", "RuntimeError: no reward", r"get_reward\(\) is nan: return", r"step\(\) is inf")
    for row, says in zip(rows, told, strict=False):
        with pytest.raises(UserError, match=f"(?s)prompt {row.prompt}, sample 0.*Broken broke 4 times.*{says}"):
            play(world("functions.py:Broken", [row], iteration=4), scripted("c"))


@pytest.mark.timed
def test_the_time_of_an_episode_is_over_while_its_reward_is_asked_for(world):
    """It has ended by itself, and stays so in the journal."""
    for _ in range(2):
        episodes = world("functions.py:SlowReward", rows_of(1), limits=Limits(episode_s=0.4))
        _, reasons, rewards = play(episodes, scripted("a"))
        assert reasons == ["tool_stopped"] and rewards == [[3.0]] and episodes.answers(0.5) == []


@pytest.mark.timed
def test_a_call_that_takes_too_long_is_answered_so_and_marks_the_run(world, tmp_path):
    limits, says = Limits(tool_s=0.3), scripted(CALL.format("nap", '{"seconds": 30}'), "no")
    episodes = world("functions.py:TOOLS", rows_of(1), limits=limits)
    (ids,), reasons, _ = play(episodes, says)
    assert "<tool_response>\nerror: timed out after 0.3 s\n</tool_response>" in text_of(episodes, ids)
    assert reasons == ["completed"] and not episodes.is_exact and episodes.results()[0].num_timeouts == 1
    again = world("functions.py:TOOLS", rows_of(1), limits=limits)
    assert play(again, says)[0] == [ids] and not again.is_exact and not again.results()[0].seconds


@pytest.mark.timed
def test_an_episode_that_takes_too_long_ends_and_the_others_go_on(world):
    limits = Limits(episode_s=0.5)
    says = lambda row, turn, ids: (CALL.format("nap", f'{{"seconds": {0 if row else 30}}}'), "no")[turn]  # noqa: E731
    for _ in range(2):  # the second time from the journal
        episodes = world("functions.py:TOOLS", rows_of(3), limits=limits)
        _, reasons, rewards = play(episodes, says)
        assert reasons == ["rollout_timeout", "completed", "completed"] and not episodes.is_exact
        assert rewards[0] == [0.0]


def test_seeds_are_of_the_group_and_of_the_sample():
    assert (seed_of(1, 3, 0), seed_of(1, 3, 0, 1)) == (1410065689, 2027960600)
    assert len({seed_of(1, 3, 0), seed_of(1, 3, 0, 0), seed_of(1, 3, 0, 1), seed_of(1, 4, 0), seed_of(2, 3, 0)}) == 5
