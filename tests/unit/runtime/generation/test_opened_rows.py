"""Rows that answers open while others wait for them: tokens equal those of a slow twin, in engines of any size."""

import random

import pytest
import torch

from rlhf_spmd.runtime.generation.episodes import LAST, Answer, Episodes
from rlhf_spmd.runtime.generation.rollout import Rollout
from tests.draws import random_responses
from tests.unit.runtime.generation.test_rollout import OFTEN, SHAPES, VOCAB, make_model, make_prompts, slow_response

ROWS, NUM, WIDTH, PROMPT = 3, 5, 8, 9  # rows of an episode, episodes, tokens of a response and of a prompt
SETTINGS = {
    "one place": {"max_sequences": 1},
    "two places": {"max_sequences": 2},
    "all": {"max_sequences": 32},
    "few blocks": {"max_sequences": 32, "block_size": 3, "num_blocks": 9},
}


class Delegating(Episodes):
    """The first row of an episode asks what it drew of another row, whose turn answers it; then both are over. Which
    rows are taken for these is random, as are the delays; the third row stays blank."""

    def __init__(self, prompts, seed: int):
        self.prompts, self.random = prompts, random.Random(seed)
        self.rows = [self.random.sample(range(ROWS), ROWS) for _ in prompts]  # first, second, blank
        self.turns = [0] * ROWS * len(prompts)
        self.ready = [self.opened(episode, 0, prompt) for episode, prompt in enumerate(prompts)]

    def opened(self, episode: int, index: int, prompt) -> Answer:
        return Answer(self.number(episode, index), tuple(prompt), stream=1 + 2 * episode + index)

    def number(self, episode: int, index: int) -> int:
        return episode * ROWS + self.rows[episode][index]

    def ended(self, episode: int, *indices: int) -> None:
        self.ready += [Answer(self.number(episode, index), None, "tool_stopped") for index in indices]

    def drew(self, row: int, token_ids: list[int]) -> None:
        episode, self.turns[row] = row // ROWS, self.turns[row] + 1
        index = self.rows[episode].index(row % ROWS)
        if index:
            self.answered(episode, token_ids)
            self.ended(episode, 1)
        elif self.turns[row] == 1:
            self.ready.append(self.opened(episode, 1, delegated(token_ids)))
        else:
            self.ended(episode, 0, 2)

    def answered(self, episode: int, token_ids: list[int]) -> None:
        self.ready.append(Answer(self.number(episode, 0), tuple(token_ids[:2])))

    def cut(self, row: int, token_ids: list[int]) -> None:
        """Goes on without the row."""
        episode = row // ROWS
        if row == self.number(episode, 1):
            self.answered(episode, [7])
        elif row == self.number(episode, 0):
            self.ended(episode, 2, *([] if self.turns[row] else [1]))

    def answers(self, wait_s: float) -> list[Answer]:
        assert not wait_s or self.ready, "nothing can go on"
        self.random.shuffle(self.ready)
        num = self.random.randint(bool(wait_s), len(self.ready)) if self.ready else 0
        given, self.ready = self.ready[:num], self.ready[num:]
        return given

    def rewards(self, row: int, reason: str) -> list[float]:
        return [float(row // ROWS)]


def delegated(token_ids: list[int]) -> list[int]:
    return [(3 * token + 1) % VOCAB for token in token_ids[:4]]


def slow_rows(model, episode: int, prompt: list[int], bits_SG) -> list[tuple[list[int], list[int], bool]]:
    """Returns prompt, response and whether it was cut, of the rows of an episode that are not blank."""

    def said(prompt, response, stream):
        bits_G = bits_SG[stream, len(response) :]
        drawn, _, _ = slow_response(model, prompt + response, bits_G, eos_ids=OFTEN)
        return response + drawn, drawn[-1] not in OFTEN

    own = 1 + 2 * episode
    first, is_cut = said(prompt, [], own)
    rows = []
    if not is_cut:
        asked = delegated(first)
        other, other_is_cut = said(asked, [], own + 1)
        rows.append((asked, other, other_is_cut))
        answer = [7] if other_is_cut else other[:2]
        is_cut = len(first) + len(answer) >= WIDTH
        if not is_cut:
            first, is_cut = said(prompt, first + answer, own)
    return sorted([(prompt, first, is_cut), *rows], key=lambda row: (len(row[0]), own + (row[0] is not prompt)))


@pytest.fixture(scope="module")
def world():
    """Returns the model, the prompts, the bits by stream and the rows of each episode."""
    model, prompts, bits_SG = (
        make_model(**SHAPES["llama"]),
        make_prompts(NUM, seed=5),
        random_responses(1 + 2 * NUM, WIDTH),
    )
    expected = [slow_rows(model, episode, prompt, bits_SG) for episode, prompt in enumerate(prompts)]
    assert {len(rows) for rows in expected} == {1, 2} and {row[2] for rows in expected for row in rows} == {True, False}
    return model, prompts, bits_SG, expected


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_that_are_opened_equal_the_slow_twin(name, world):
    model, prompts, bits_SG, expected = world

    def bits_of(row, stream):
        return bits_SG[stream]

    prompts_MBP = torch.full((1, NUM * ROWS, PROMPT), -1)
    how = {"episodes": Delegating(prompts, seed=len(name)), "episode_rows": ROWS, "bits_of": bits_of, "eos_ids": OFTEN}
    rollout = Rollout(model, prompts_MBP, torch.zeros(1, NUM * ROWS, WIDTH, dtype=int), **how, **SETTINGS[name])
    responses_BG, logprobs_BG, _ = rollout.of(slice(0, 1))
    actions_BG, rewards_BG = rollout.of_turns(slice(0, 1))
    assert rollout.is_over and not rollout.num_left
    for episode, rows in enumerate(expected):
        for index in range(ROWS):
            prompt, response, is_cut = rows[index] if index < len(rows) else ([], [], False)
            row = episode * ROWS + index
            assert [token for token in prompts_MBP[0, row].tolist() if token >= 0] == prompt, row
            assert [token for token in responses_BG[row].tolist() if token >= 0] == response, row
            assert (actions_BG[row] == LAST).sum() == (bool(response) and not is_cut)
            assert (actions_BG[row] > 0).any() == bool(response) and rewards_BG[row].sum() == episode * bool(response)
            assert (logprobs_BG[row][actions_BG[row] == 0] == 0).all()
    assert sum(map(len, expected)) == len(rollout.ends(slice(0, 1)))
