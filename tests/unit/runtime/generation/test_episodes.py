"""Episodes in the engine, with a scripted outside: rows of several turns equal those of a slow twin, whatever the
engine's settings and however late answers come."""

import random

import pytest
import torch

from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.episodes import DRAWN, LAST, Answer, Episodes, Turns
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.generation.rollout import Rollout
from tests.draws import random_responses
from tests.unit.runtime.generation.test_rollout import OFTEN, SHAPES, VOCAB, make_model, make_prompts, slow_response

WIDTH, MOST = 18, 14  # tokens of a row, and drawn ones
SETTINGS = {
    "one at a time": {"max_sequences": 1},
    "three places": {"max_sequences": 3},
    "blocks of 4": {"max_sequences": 8, "block_size": 4},
    "one block each": {"max_sequences": 16, "block_size": 40},
    "preempting": {"max_sequences": 8, "block_size": 2, "num_blocks": 26},
    "preempting often": {"max_sequences": 16, "block_size": 3, "num_blocks": 12},
}


def answer_to(row: int, turn: int, token_ids: list[int]) -> Answer:
    """Returns a function of the call alone: 1 to 4 tokens, or the end after a few turns."""
    if turn >= 1 + row % 4:
        return Answer(row, None, "tool_stopped" if row % 2 else "max_turns")
    return Answer(row, tuple((7 * token + 3 * turn + i) % VOCAB for i, token in enumerate(token_ids[:4])))


class Scripted(Episodes):
    """Answers after a random number of rounds, in any order."""

    def __init__(self, seed: int = 0, latest: int = 6):
        self.random, self.latest = random.Random(seed), latest
        self.turns: dict[int, int] = {}
        self.pending: list[tuple[int, Answer]] = []  # rounds left
        self.most = 0  # waiting at one time

    def drew(self, row: int, token_ids: list[int]) -> None:
        turn = self.turns[row] = self.turns.get(row, 0) + 1
        self.pending.append((self.random.randint(0, self.latest), self.answer(row, turn, token_ids)))
        self.most = max(self.most, len(self.pending))

    def answer(self, row: int, turn: int, token_ids: list[int]) -> Answer:
        return answer_to(row, turn, token_ids)

    def answers(self, wait_s: float) -> list[Answer]:
        if wait_s and self.pending:
            soonest = min(left for left, _ in self.pending)
            self.pending = [(left - soonest, one) for left, one in self.pending]
        ready = [one for left, one in self.pending if left <= 0]
        self.pending = [(left - 1, one) for left, one in self.pending if left > 0]
        self.random.shuffle(ready)
        return ready

    def openings(self) -> list[list[int]]:
        raise AssertionError("an engine asks for none")

    def rewards(self, row: int, reason: str) -> list[float]:
        return [row + turn / 10 for turn in range(self.turns.get(row, 0))]


def slow_episode(model, row: int, prompt: list[int], bits_G) -> tuple[list[int], list[tuple[int, int]], str]:
    """Returns the response, begin and end of each turn, and why it ended."""
    response: list[int] = []
    turns: list[tuple[int, int]] = []
    while True:
        begin, drawn = len(response), sum(b - a for a, b in turns)
        most = min(WIDTH, begin + MOST - drawn)
        said, _, _ = slow_response(model, prompt + response, bits_G[begin:most], eos_ids=OFTEN)
        response += said
        turns.append((begin, len(response)))
        drawn += len(said)
        if said[-1] not in OFTEN:
            return response, turns, "max_sampled_tokens" if drawn >= MOST else "context_overflow"
        answer = answer_to(row, len(turns), said)
        if answer.token_ids is None:
            return response, turns, answer.reason
        if drawn >= MOST:
            return response, turns, "max_sampled_tokens"
        if len(response) + len(answer.token_ids) >= WIDTH:
            return response, turns, "context_overflow"
        response += answer.token_ids


def run(model, prompts, bits_RG, outside, **settings):
    turns = Turns(outside, MOST, WIDTH)
    engine = Engine(model, longest=9 + WIDTH, eos_ids=OFTEN, turns=turns, **settings)
    requests = engine.submit(prompts, bits_RG, Sampling(MOST))
    engine.run(requests)
    assert engine.is_idle and engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    responses_RG, logprobs_RG, _ = engine.results(requests)
    return engine, responses_RG, logprobs_RG


@pytest.mark.parametrize("name", ["llama", pytest.param("window", marks=pytest.mark.slow)])
def test_rows_of_several_turns_equal_the_slow_twin_at_any_delay(name):
    """Tokens and logprobs, in batches and caches of any size: answers come back late, in any order, to rows that were
    moved, preempted or put last in the cache."""
    model, num = make_model(**SHAPES[name]), 13
    three = make_prompts(5, seed=3)
    prompts, bits_RG = [three[i % 5] for i in range(num)], random_responses(num, WIDTH)
    expected = [slow_episode(model, row, prompts[row], bits_RG[row]) for row in range(num)]
    reasons = {reason for _, _, reason in expected}
    assert len(reasons) == 4 and max(len(t) for _, t, _ in expected) >= 3
    batch = Sequences.join(pad(prompts), pad([response for response, _, _ in expected], WIDTH))
    forced_RG = response_logprobs(model, batch, forward(model, batch), temperature=1.0, eos_ids=OFTEN, min_new_tokens=0)
    for name, settings in SETTINGS.items():
        for seed, latest in ((1, 6), (2, 40)):
            outside = Scripted(seed, latest)
            engine, responses_RG, logprobs_RG = run(model, prompts, bits_RG, outside, **settings)
            actions_RG = engine.turns.actions(range(num))
            for row, (response, turns, reason) in enumerate(expected):
                where = name, seed, row
                assert responses_RG[row].tolist() == response + [-1] * (WIDTH - len(response)), where
                drawn = {place for begin, end in turns for place in range(begin, end)}
                marks = [float(place in drawn) for place in range(WIDTH)]
                if reason == "tool_stopped":
                    marks[turns[-1][1] - 1] = LAST
                assert actions_RG[row].tolist() == marks, where
                assert engine.turns.reason(row) == reason, where
            assert torch.where(actions_RG > 0, (logprobs_RG - forced_RG).abs(), 0).max() < 3e-5, name
            assert (logprobs_RG[actions_RG == 0] == 0).all()
    assert outside.most > 5  # of "preempting often" at long delays: most rows were outside at once


def test_a_decode_step_computes_no_waiting_row():
    """On a CPU a batch is the first blocks of the cache; rows outside are behind it, and keep what was computed."""
    model, num = make_model(), 6
    prompts, bits_RG = make_prompts(num), random_responses(num, WIDTH)
    outside = Scripted(latest=10**6)  # answers only when nothing else is to be done
    turns = Turns(outside, MOST, WIDTH)
    engine = Engine(model, longest=9 + WIDTH, eos_ids=OFTEN, turns=turns, max_sequences=num)
    sizes, prefilled = [], []
    original = engine.decoder.round

    def noted(tokens_B, cached_B, prompts, blocks, answered):
        assert [row.blocks for row in engine.scheduler.rows] == [[i] for i in range(len(engine.scheduler.rows))]
        sizes.append((len(tokens_B), len(engine.scheduler.outside)))
        prefilled.extend(map(len, prompts))
        return original(tokens_B, cached_B, prompts, blocks, answered)

    engine.decoder.round = noted
    engine.run(engine.submit(prompts, bits_RG, Sampling(MOST)))
    assert sum(prefilled) == sum(map(len, prompts))  # only prompts, each once
    assert all(running + waiting <= num for running, waiting in sizes) and max(waiting for _, waiting in sizes) >= 3


def test_a_rollout_gives_actions_rewards_and_reasons():
    """By mini-batches; the reward of a turn is on its last drawn token."""
    model, prompts, bits_RG, outside = make_model(), make_prompts(8), random_responses(8, WIDTH), Scripted(5)
    bits_MBG = bits_RG.unflatten(0, (2, 4))
    rollout = Rollout(
        model, pad(prompts).unflatten(0, (2, 4)), bits_MBG, episodes=outside, max_new_tokens=MOST, eos_ids=OFTEN
    )
    row = 0
    for mini_batch in range(2):
        part = slice(mini_batch, mini_batch + 1)
        responses_BG, *_ = rollout.of(part)
        (actions_BG, rewards_BG), ends = rollout.of_turns(part), rollout.ends(part)
        assert ((actions_BG > 0) <= (responses_BG >= 0)).all() and (actions_BG > 0).any(1).all()
        assert not rewards_BG[actions_BG == 0].any()
        for actions_G, rewards_G, (reason, num_turns) in zip(actions_BG, rewards_BG, ends, strict=True):
            prompt, bits_G = prompts[row], bits_RG[row]
            _, turns, expected = slow_episode(model, row, prompt, bits_G)
            assert (reason, num_turns) == (expected, len(turns))
            assert actions_G.nonzero()[:, 0].tolist() == [place for turn in turns for place in range(*turn)]
            by_turn = torch.tensor(outside.rewards(row, reason))
            places = [end - 1 for _, end in turns][: len(by_turn)]
            assert torch.equal(rewards_G[places], by_turn) and abs(rewards_G.sum() - by_turn.sum()) < 1e-4
            row += 1
    assert rollout.is_over and DRAWN == 1.0


def test_stop_texts_are_searched_in_what_was_drawn():
    """An observation that holds the stop text does not end the turn after it."""
    model, prompts, bits_RG = make_model(), make_prompts(3), random_responses(3, WIDTH)
    stop = chr(65 + 5)

    class Repeating(Scripted):
        def drew(self, row: int, token_ids: list[int]) -> None:
            self.turns[row] = turn = self.turns.get(row, 0) + 1
            self.pending.append((0, Answer(row, (5, 5)) if turn < 3 else Answer(row, None, "completed")))

    turns = Turns(Repeating(), MOST, WIDTH)
    engine = Engine(
        model, longest=9 + WIDTH, turns=turns, decode=lambda ids, **_: "".join(chr(65 + i) for i in ids if i >= 0)
    )
    requests = engine.submit(prompts, bits_RG, Sampling(MOST, stop=(stop,)))
    engine.run(requests)
    responses_RG, *_ = engine.results(requests)
    for row, actions_G in enumerate(turns.actions(requests)):
        drawn = responses_RG[row][actions_G > 0].tolist()
        assert turns.reason(row) in ("completed", "max_sampled_tokens")
        if turns.num_turns(row) > 1:
            begin, end = turns._rows[row].turns[1]
            assert 5 not in responses_RG[row, begin : end - 1].tolist()
        assert len(drawn) <= MOST
