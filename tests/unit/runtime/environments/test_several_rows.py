"""Episodes of agents that have several rows: which request opens a row, and that nothing depends on when it comes."""

import hashlib
import os
import random
import signal
from dataclasses import replace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.runtime.environments.adapters import load_environments
from rlhf_spmd.runtime.environments.agents import Conversation
from rlhf_spmd.runtime.environments.episode_states import Row
from rlhf_spmd.runtime.environments.episodes import Episodes
from rlhf_spmd.runtime.environments.renderer import extending, renderer_of
from tests.environments.several_rows import MORE
from tests.templates import ENDS, HERE, STARTED
from tests.unit.runtime.environments.test_episodes import ASK, FILES
from tests.unit.runtime.environments.test_episodes import folder as folder
from tests.unit.runtime.environments.test_episodes import world as world


def rows_of(num: int, each: int) -> list[Row]:
    """Returns the rows of two samples of each prompt."""
    return [
        Row(n // (2 * each), n % (2 * each), n // (2 * each), {"prompt": ASK, "answer": f"{n // each}"}, "Go.", ASK)
        for n in range(num * each)
    ]


def by_ids(ids: list[int], stream: int) -> str:
    """Returns a turn that depends on every token so far, and on the random numbers."""
    return "so " + hashlib.sha256(repr((ids, stream)).encode()).hexdigest()[:6]


def play(episodes: Episodes, says=by_ids, before=lambda: None) -> tuple[list[dict[int, str]], list[str], list[float]]:
    """Plays the engine, which draws turns in any order. Returns of each episode its rows by their streams, as text; and
    of each row why it ended, and its reward.

    says: see by_ids; None: a limit.
    before: called before each turn.
    """
    num, each = len(episodes.states), episodes.num_rows
    assert episodes.openings() == [[]] * num
    tokenizer, (stop,) = episodes.states[0].renderer.tokenizer, episodes.states[0].renderer.joins.stops
    ids: list[list[int]] = [[] for _ in range(num)]
    reasons, streams, over, running = [""] * num, [0] * num, [False] * num, []

    while not all(over):
        for answer in episodes.answers(0.0 if running else 1.0):
            if answer.token_ids is None:
                assert not over[answer.row]
                over[answer.row], reasons[answer.row] = True, answer.reason if streams[answer.row] else ""
                continue
            assert bool(answer.stream) == (not ids[answer.row])
            streams[answer.row] = streams[answer.row] or answer.stream
            ids[answer.row] += answer.token_ids
            running.append(answer.row)
        if running:
            before()
            row = running.pop(random.randrange(len(running)))
            said = says(ids[row], streams[row])
            drawn = tokenizer.encode(said or "cut", special=False)
            if said is None:
                over[row], reasons[row] = True, "max_sampled_tokens"
                episodes.cut(row, drawn)
            else:
                episodes.drew(row, [*drawn, stop])
            ids[row] += [*drawn, stop]
    rewards = [sum(episodes.rewards(row, reason)) for row, reason in enumerate(reasons)]
    texts = [tokenizer.decode(tokens, special=True) for tokens in ids]
    found = [{streams[row]: texts[row] for row in range(at, at + each) if streams[row]} for at in range(0, num, each)]
    return found, reasons, rewards


def test_a_sub_agent_has_a_row_of_its_own(world):
    episodes = world("several_rows.py:delegates", rows_of(2, 4), num=1, options={"rows": 4}, max_prompt=99)
    found, reasons, rewards = play(episodes)
    for of_episode in found:
        own, *subs = sorted(of_episode.values(), key=lambda text: "8*9" in text)
        assert len(subs) == 2 and own.count("<|im_start|>assistant") == 3 and "8*9" not in own
        assert all(text.count("<|im_start|>assistant") == 1 for text in subs)
    assert sorted(reasons) == [""] * 2 + ["tool_stopped"] * 6
    assert len({*rewards[:4]}) == 2 and rewards[:4].count(0.0) == 1 and rewards[0] > 0  # blank rows have none
    counted = episodes.counts()
    assert counted["episode_rows"] == (6, 2) and counted["agent_mismatches"] == (0, 2)


def test_a_conversation_that_is_changed_goes_on_in_another_row(world):
    found, reasons, _ = play(world("several_rows.py:drops", rows_of(1, 3), num=1, options={"rows": 3}, max_prompt=99))
    texts = sorted(found[0].values(), key=len)
    assert [text.count("<|im_start|>assistant") for text in texts] == [1, 2, 3] and reasons == ["tool_stopped"] * 3
    assert all(text.count("so ") == 1 for text in texts)


@pytest.mark.parametrize("name", ["gathers", pytest.param("by_openai", marks=pytest.mark.slow)])
def test_nothing_depends_on_when_requests_come(name, world):
    """Of rows that are alike, too; also if workers are killed, which ask for rows again in another order."""
    if name == "by_openai":
        pytest.importorskip("openai")
    spec, rows, how = f"several_rows.py:{name}", rows_of(2, 5), {"options": {"rows": 5}, "max_prompt": 99}
    expected = play(world(spec, rows, **how))
    assert [len(of_episode) for of_episode in expected[0]] == [4, 4] and expected[1].count("") == 2
    assert len({*expected[0][0]} | {*expected[0][1]}) == 8
    episodes = world(spec, rows, **how)
    draws = iter(range(99))

    def before() -> None:
        if next(draws) in (3, 9):
            worker = next(worker for worker in episodes.workers._workers if worker.keys and worker.is_ready)
            os.kill(worker.process.pid, signal.SIGKILL)

    found = play(episodes, before=before)
    assert found[0] == expected[0] and sorted(found[2]) == sorted(expected[2])
    assert any(state.num_lost for state in episodes.states)


def test_limits_end_a_row_and_not_its_episode(world):
    """A row that is cut says so, and goes on no more; nor are there more rows than episode.rows."""
    episodes = world("several_rows.py:goes_on", rows_of(1, 2), num=1, options={"rows": 2}, max_prompt=99)
    tokenizer = episodes.states[0].renderer.tokenizer

    def says(ids: list[int], stream: int) -> str | None:
        text = tokenizer.decode(ids, special=True)
        return None if "8*9" in text else by_ids(ids, stream)

    for state in episodes.states:
        state.start.columns["answer"] = "cut"
    found, reasons, rewards = play(episodes, says)
    assert sorted(reasons) == ["max_sampled_tokens", "tool_stopped"] and rewards == [0.5, 0.5]
    own = next(text for text in found[0].values() if "8*9" not in text)
    assert "cut context_length_exceeded context_changed context_changed" in own
    assert episodes.counts()["agent_mismatches"] == (2, 1)


def test_a_prompt_that_is_too_long_opens_no_row(world):
    """The agent is told; of a first row it is an error."""
    rows, how = rows_of(1, 3), {"num": 1, "options": {"rows": 3}, "max_prompt": 70}
    rows = [replace(row, columns=row.columns | {"answer": "x" * 90}) for row in rows]
    (found,), reasons, rewards = play(world("several_rows.py:goes_on", rows, **how))
    own = next(text for text in found.values() if "8*9" not in text and "Go." in text)
    assert "context_length_exceeded" in own and len(found) == 2
    assert rewards == [0.5] * 3 and sorted(reasons) == ["", "tool_stopped", "tool_stopped"]
    with pytest.raises(UserError, match="the agent opens its first row with .* tokens; raise data.max_prompt=5"):
        play(world("several_rows.py:goes_on", rows, **how | {"max_prompt": 5}))


@pytest.mark.slow
def test_an_agent_that_hangs_ends_all_rows(world):
    episodes = world("several_rows.py:naps", rows_of(1, 3), options={"rows": 3, "tool_timeout_s": 2.0}, max_prompt=99)
    _, reasons, rewards = play(episodes)
    assert reasons == ["rollout_timeout"] * 2 + [""] and rewards == [0.0] * 3
    assert episodes.counts()["tool_timeouts"] == (1, 1)


@pytest.mark.slow
def test_an_agent_that_breaks_is_begun_anew_and_dropped(world, capfd):
    rows = rows_of(4, 3)
    with pytest.raises(UserError, match=r"(?s)breaks broke 4 times.*OSError"):
        play(world("several_rows.py:breaks", rows, options={"rows": 3}, max_prompt=99))
    episodes = world("several_rows.py:breaks", rows, options={"rows": 3, "on_failure": "drop_group"}, max_prompt=99)
    play(episodes)
    assert all(map(episodes.is_dropped, range(12))) and capfd.readouterr().err.count("so the group of an episode") == 4


@pytest.mark.parametrize(("name", "roles"), [("chatml", ["user", "tool"]), ("qwen3_dropped", [])])
def test_what_a_template_changes_begins_another_row(name, roles, folder):
    template, tokenizer = ChatTemplate(folder, str(HERE / f"{name}.jinja"), started=STARTED), load_tokenizer(folder)
    stops = [tokenizer.vocabulary()[ENDS[name]]]
    environment = load_environments(f"{FILES}/several_rows.py:drops")[""]
    assert extending([renderer_of(environment, tokenizer, template.render, stops, template=name)]) == roles
    conversation = Conversation(roles, [*ASK, {"role": "assistant", "content": "a"}])
    assert conversation.is_extended_by([*conversation.messages, MORE], None) == ("user" in roles)
