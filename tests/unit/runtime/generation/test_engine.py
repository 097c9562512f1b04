"""The engine: the result of a request depends neither on other requests nor on the layout of the cache."""

import random

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.kv_cache import KVCache, token_bytes
from rlhf_spmd.runtime.generation.requests import Sampling
from tests.draws import random_responses
from tests.unit.runtime.generation.test_rollout import OFTEN, SHAPES, make_model, make_prompts, rows

LONGEST, MAX_NEW = 9 + 16, 16
# what a run may be given: places, tokens of a block, blocks
SETTINGS = {
    "one at a time": {"max_sequences": 1},
    "three places": {"max_sequences": 3},
    "blocks of 1": {"max_sequences": 5, "block_size": 1},
    "blocks of 4": {"max_sequences": 8, "block_size": 4},
    "a block each": {"max_sequences": 8, "block_size": 30},
    "preempting": {"max_sequences": 8, "block_size": 2, "num_blocks": 20},
    "preempting often": {"max_sequences": 16, "block_size": 3, "num_blocks": 9},
}


def make_engine(model, **settings) -> Engine:
    return Engine(model, longest=LONGEST, eos_ids=OFTEN, **settings)


def draws(num: int, seed: int = 0) -> torch.Tensor:
    return random_responses(num, MAX_NEW, seed)


def some_sampling(num: int) -> list[Sampling]:
    """Returns sampling parameters that are all different."""
    return [
        Sampling(
            max_new_tokens=1 + (5 * i) % MAX_NEW,
            min_new_tokens=min(i % 4, (5 * i) % MAX_NEW),
            temperature=(0.0, 0.7, 1.0, 1.6)[i % 4],
            top_k=(0, 5, 0, 30)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            min_p=(0.0, 0.0, 0.1)[i % 3],
        )
        for i in range(num)
    ]


def run(engine: Engine, prompts, bits_RG, sampling) -> tuple[list[list[int]], torch.Tensor]:
    requests = engine.submit(prompts, bits_RG, sampling)
    engine.run()
    responses_RG, logprobs_RG, _ = engine.results(requests)
    return rows(responses_RG), logprobs_RG


@pytest.mark.parametrize(
    ("shape", "each"), [(shape, number % 2 > 0) for number, shape in enumerate(SHAPES.values())], ids=[*SHAPES]
)
def test_responses_do_not_depend_on_the_settings(shape, each):
    model, num = make_model(**shape), 19
    prompts, bits_RG = make_prompts(num), draws(num)
    sampling = some_sampling(num) if each else Sampling(MAX_NEW, min_new_tokens=2, temperature=0.9)
    expected, logprobs_RG = run(make_engine(model, max_sequences=num), prompts, bits_RG, sampling)
    assert len({len(row) for row in expected}) > 5
    for name, settings in SETTINGS.items():
        engine = make_engine(model, **settings)
        found, found_RG = run(engine, prompts, bits_RG, sampling)
        assert found == expected, name
        torch.testing.assert_close(found_RG, logprobs_RG, atol=3e-5, rtol=0)
        assert (engine.num_preempted > 0) == name.startswith("preempting"), (name, engine.num_preempted)


def ahead(monkeypatch) -> list[tuple[int, int]]:
    """Lets engines of a CPU launch a round before they read what ended in the one before, as those of a GPU do ->
    rounds that are left under way and those that are read, at each read."""
    read, reads, make = Engine._read, [], Engine.__init__

    def noted(engine, num_left):
        reads.append((num_left, len(engine._unread)))
        return read(engine, num_left)

    def made(engine, *arguments, **settings):
        make(engine, *arguments, **settings)
        engine.runs_ahead = True

    monkeypatch.setattr(Engine, "__init__", made)
    monkeypatch.setattr(Engine, "_read", noted)
    return reads


@pytest.mark.parametrize("each", [pytest.param(False, marks=pytest.mark.slow), True], ids=["alike", "all different"])
def test_rounds_launched_ahead_draw_the_same(each, monkeypatch):
    """By end of sequence and by length, with admissions, in every order of blocks; what is drawn after an end is not
    in the results, whose memory it has written to."""
    model, num = make_model(), 23
    prompts, bits_RG = make_prompts(num), draws(num)
    sampling = some_sampling(num) if each else Sampling(MAX_NEW, min_new_tokens=2, temperature=0.9, top_k=5)
    engine = make_engine(model, num_stored=30, max_sequences=num)
    responses_RG, logprobs_RG, support_RGK, tokens = of_engine(engine, prompts, bits_RG, sampling)
    reads = ahead(monkeypatch)
    for name, settings in SETTINGS.items():
        reads.clear()
        engine = make_engine(model, num_stored=30, **settings)
        found_RG, found_logprobs_RG, found_RGK, found_tokens = of_engine(engine, prompts, bits_RG, sampling)
        assert torch.equal(found_RG, responses_RG) and torch.equal(found_RGK, support_RGK), name
        torch.testing.assert_close(found_logprobs_RG, logprobs_RG, atol=3e-5, rtol=0)
        assert found_tokens == tokens == (found_RG >= 0).sum(), name
        assert (engine.requests.responses_RG >= 0).sum() > tokens, "nothing was drawn after an end"
        assert (1, 2) in reads and max(reads) == (1, 2), "a round is launched before the one before is read"
        assert engine.num_preempted > 0 or not name.startswith("preempting")
        assert engine.is_idle and engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks


def of_engine(engine: Engine, prompts, bits_RG, sampling) -> tuple:
    """Returns results, and how many tokens the engine tells."""
    told: list[tuple[int, int]] = []
    numbers = engine.submit(prompts, bits_RG, sampling)
    engine.run(progress=lambda *round_: told.append(round_))
    assert sum(ended for ended, _ in told) == len(prompts)
    return *engine.results(numbers), sum(num for _, num in told)


def test_no_round_is_launched_when_all_rows_reach_their_limits(monkeypatch):
    model, num = make_model(), 6
    ahead(monkeypatch)
    engine, told = Engine(model, longest=LONGEST, max_sequences=num), []
    engine.submit(make_prompts(num), draws(num), Sampling(MAX_NEW))
    engine.run(progress=lambda *round_: told.append(round_))
    assert told == [(0, num)] * (MAX_NEW - 1) + [(num, num)]


def test_rounds_ahead_across_mini_batches(monkeypatch):
    """A round may be under way when a mini-batch ends, others come and the first is forgotten."""
    model, num = make_model(), 20
    prompts, bits_RG = make_prompts(num), draws(num)
    expected = run(make_engine(model, max_sequences=num), prompts, bits_RG, Sampling(MAX_NEW))[0]
    reads = ahead(monkeypatch)
    engine, found, before = make_engine(model, max_sequences=4, block_size=4), [], range(0)
    for first in range(0, num + 5, 5):
        part = slice(first, first + 5)
        numbers = engine.submit(prompts[part], bits_RG[part], Sampling(MAX_NEW))
        engine.run(before)
        found += rows(engine.results(before)[0]) if before else []
        engine.requests.forget(before.stop)
        before = numbers
    assert found == expected and max(reads) == (1, 2) and engine.is_idle


def test_stop_texts_are_looked_for_before_the_next_round(monkeypatch):
    model, num = make_model(), 12
    sampling = Sampling(MAX_NEW, stop=("ab", "q"))
    expected = run(make_engine(model, decode=decode), make_prompts(num), draws(num), sampling)[0]
    reads = ahead(monkeypatch)
    assert run(make_engine(model, decode=decode), make_prompts(num), draws(num), sampling)[0] == expected
    assert {left for left, _ in reads} == {0}


@pytest.mark.parametrize("block_size", [0, 3, 4])
def test_samples_of_one_prompt_share_its_prefill(block_size, monkeypatch):
    model, num = make_model(), 12
    three = make_prompts(3, seed=3)
    prompts, bits_RG = [three[i % 3] for i in range(num)], draws(num)
    engine = make_engine(model, max_sequences=7, block_size=block_size)
    prefilled: list[list[int]] = []
    original = engine.decoder.round

    def noted(tokens_B, cached_B, prompts, blocks, answered):
        prefilled.extend(prompts)
        return original(tokens_B, cached_B, prompts, blocks, answered)

    monkeypatch.setattr(engine.decoder, "round", noted)
    found, logprobs_RG = run(engine, prompts, bits_RG, Sampling(MAX_NEW, min_new_tokens=5))
    # a place that becomes free is given to the next sample of a prompt, which is often still there
    assert 3 <= len(prefilled) <= 5
    expected, expected_RG = zip(
        *(
            run(make_engine(model, max_sequences=1), [prompt], bits_RG[i : i + 1], Sampling(MAX_NEW, 5))
            for i, prompt in enumerate(prompts)
        ),
        strict=True,
    )
    assert found == [row for (row,) in expected] and len(set(map(tuple, found))) > 6
    torch.testing.assert_close(logprobs_RG, torch.cat(expected_RG), atol=3e-5, rtol=0)


def test_works_ahead_where_places_are_free():
    """While the first requests run to their end, later ones have taken the places of those that ended before."""
    model, num = make_model(), 20
    prompts, bits_RG = make_prompts(num), draws(num)
    engine = make_engine(model, max_sequences=4)
    first = engine.submit(prompts[:8], bits_RG[:8], Sampling(MAX_NEW))
    then = engine.submit(prompts[8:], bits_RG[8:], Sampling(MAX_NEW))
    engine.run(first)
    assert all(engine.requests.is_ended(n) for n in first) and not engine.is_idle
    assert len(engine.scheduler.waiting) < len(then), "nobody took the places of those that ended early"
    found = rows(engine.results(first)[0])
    engine.requests.forget(first.stop)
    engine.run(then)
    found += rows(engine.results(then)[0])
    assert engine.is_idle
    assert found == run(make_engine(model, max_sequences=num), prompts, bits_RG, Sampling(MAX_NEW))[0]


def decode(tokens, *, special: bool = False) -> str:
    """Returns letters: token 3 is `d`, and so on."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_stop_texts():
    model, num = make_model(), 16
    prompts, bits_RG = make_prompts(num), draws(num)
    free, _ = run(Engine(model, longest=LONGEST, max_sequences=9), prompts, bits_RG, Sampling(MAX_NEW))
    stops = [decode(row)[4:6] for row in free]  # two letters that come by in each
    sampling = [Sampling(MAX_NEW, stop=(stop, "never", decode(row)[7])) for stop, row in zip(stops, free, strict=True)]
    engine = Engine(model, longest=LONGEST, max_sequences=5, decode=decode)
    found, _ = run(engine, prompts, bits_RG, sampling)
    for row, whole, one in zip(found, free, sampling, strict=True):
        ends = [end for end in range(1, MAX_NEW + 1) if any(stop in decode(whole[:end]) for stop in one.stop)]
        assert row == whole[: ends[0]]
    assert min(map(len, found)) < 6


def test_greedy_takes_the_most_likely():
    model = make_model()
    prompts = make_prompts(5)
    found, _ = run(
        Engine(model, longest=LONGEST, max_sequences=2), prompts, draws(5), Sampling(MAX_NEW, temperature=0.0)
    )
    for prompt, response in zip(prompts, found, strict=True):
        for t, token in enumerate(response):
            logits_V = model.logits(model(torch.tensor([prompt + response[:t]]))[0, -1])
            assert token == int(logits_V.argmax())


def test_the_cache_is_sized_by_the_memory():
    model = make_model()
    one_row = LONGEST * token_bytes(model)
    assert make_engine(model, max_sequences=9, free_bytes=2.5 * one_row).scheduler.blocks.num_blocks == 2
    assert make_engine(model, max_sequences=9, free_bytes=99 * one_row).scheduler.blocks.num_blocks == 9
    with pytest.raises(UserError, match="KV cache of one sequence of 25 tokens .* lower generation.max_new_tokens"):
        make_engine(model, free_bytes=0.9 * one_row)
    cache = KVCache(model, 3, LONGEST)
    assert sum(x.nbytes for x in (cache.keys_LnKsd, cache.values_LnKsd)) == 3 * one_row
    found, _ = run(
        make_engine(model, max_sequences=9, free_bytes=2.5 * one_row), make_prompts(6), draws(6), Sampling(9)
    )
    assert found == run(make_engine(model, max_sequences=9), make_prompts(6), draws(6), Sampling(9))[0]


def test_blocks_move_as_if_all_at_once():
    """Chains and cycles; what is behind the tokens of a row stays."""
    chance = random.Random(0)
    for _ in range(50):
        cache = KVCache(make_model(), 6, LONGEST)
        stored = cache.keys_LnKsd, cache.values_LnKsd
        before = [x.copy_(torch.randn(x.shape)).clone() for x in stored]
        sources, targets = chance.sample(range(6), 4), chance.sample(range(6), 4)
        moves = [(*pair, chance.randrange(1, LONGEST + 1)) for pair in zip(sources, targets, strict=True)]
        cache.move(moves)
        for now, was in zip(stored, before, strict=True):
            expected = was.clone()
            for source, to, num in moves:
                expected[:, to, :, :num] = was[:, source, :, :num]
            assert torch.equal(now, expected)
