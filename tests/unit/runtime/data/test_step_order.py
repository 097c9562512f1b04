"""mini_batch_tokens: optimizer steps with a budget of tokens lose no row, and places without a row cost nothing."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_spmd.config import presets
from rlhf_spmd.errors import UserError
from rlhf_spmd.model import sequences
from rlhf_spmd.runtime.data.step_order import StepOrder
from tests.folders import given_rows, write_model
from tests.runs import RunOf


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    most_rows=st.integers(1, 9),
    more=st.integers(0, 40),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_row_and_every_step_is_full(lengths, most_rows, more, seed, shuffle):
    most_tokens = max(lengths) + more
    order = StepOrder(np.array(lengths), most_tokens, most_rows, seed, shuffle)
    number = 0
    for epoch in range(3):
        read, steps = [], []
        while len(read) < len(lengths):
            steps.append(order.step(number).tolist())
            read += steps[-1]
            number += 1
        assert sorted(read) == list(range(len(lengths)))
        assert shuffle or read == sorted(read)
        assert order.num_steps((epoch + 1) * len(lengths)) == number
        for rows, later in zip(steps, [*steps[1:], None], strict=True):
            tokens = sum(lengths[row] for row in rows)
            assert 0 < len(rows) <= most_rows and tokens <= most_tokens
            if later is not None:  # the next row would not have fitted
                assert len(rows) == most_rows or tokens + lengths[later[0]] > most_tokens
    assert order.num_steps(Fraction(1, 2)) == 1
    again = StepOrder(np.array(lengths), most_tokens, most_rows, seed, shuffle)  # as a resumed run: not from the start
    for one in (number - 1, 0, number // 2):
        assert again.step(one).tolist() == order.step(one).tolist()


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    write_model(folder / "base", seed=1)
    write_model(folder / "reward", head="scalar", seed=2)
    return folder


def write_rows(folder: Path, rows: range) -> Path:
    path, lines = folder / f"rows-{rows.start}-{rows.stop}.jsonl", given_rows(rows.stop)[rows.start :]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def config_of(folder: Path, page: str, path: Path, *words: str):
    sizes = ("data.max_prompt=8", "generation.max_new_tokens=10", "micro_batch=3", "data.shuffle=false")
    model = folder / ("reward" if page == "reward_model" else "base")
    return presets.load(None, [f"data.prompts={path}", *sizes, *words], str(model), algorithm=page)


@pytest.mark.parametrize("page", ["sft", "reward_model", "dpo"])
def test_a_step_is_one_of_its_rows_alone(page, folder, monkeypatch):
    """Losses, gradients and the tokens that the model reads are those of a run on the rows of the step only."""
    read: list[int] = []
    forward = sequences.forward

    def counted(model, batch, *received):
        read.append(len(batch.tokens_N))
        return forward(model, batch, *received)

    monkeypatch.setattr(sequences, "forward", counted)
    path = write_rows(folder, range(20))
    words = ("rollout_batch=8", "mini_batch=8", f"mini_batch_tokens={60 if page == 'sft' else 90}")
    run = RunOf(config_of(folder, page, path, *words))
    metrics = run.iteration()
    rows = run.job.steps.step(0)
    assert 1 < len(rows) < 8 and (run.data.prompt_MC >= 0).sum() == len(rows)
    assert metrics["places_used"] == len(rows) / 8 and metrics["step_tokens"] == sum(read)
    num_read = sum(read)
    alone = (f"rollout_batch={len(rows)}", f"mini_batch={len(rows)}")
    expected = RunOf(config_of(folder, page, write_rows(folder, range(len(rows))), *alone)).iteration()
    assert sum(read) == 2 * num_read
    for name in expected.keys() - {"generate_s", "moved_bytes", "moved_messages"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_epochs_are_whole_numbers_of_steps(folder):
    path = write_rows(folder, range(20))
    words = ("rollout_batch=12", "mini_batch=6", "mini_batch_tokens=30", "data.epochs=2")
    job = RunOf(config_of(folder, "sft", path, *words[:3])).job
    num_steps = job.steps.num_steps(40)
    run = RunOf(config_of(folder, "sft", path, *words))
    assert run.job.config.iterations == -(-num_steps // 2)


@pytest.mark.parametrize(
    ("page", "words", "message"),
    [
        (
            "sft",
            ["mini_batch_tokens=9"],
            "mini_batch_tokens=9: the row of the prompt .* alone has [0-9]+ tokens: raise",
        ),
        ("sft", ["mini_batch_tokens=30", "sft.epochs=2"], "give data.epochs in place of it"),
        ("sft", ["mini_batch_tokens=30", "data.epochs=1001"], "of at most 1,000 epochs; give iterations instead"),
        ("grpo", ["mini_batch_tokens=30"], "for algorithms that only learn from responses of the data set"),
        ("sft", ["mini_batch_tokens=30", "data.weights=1"], "rows of files with weights are not cut into steps"),
    ],
)
def test_what_does_not_go_together_is_refused(page, words, message, folder):
    path = write_rows(folder, range(20))
    with pytest.raises(UserError, match=message):
        RunOf(config_of(folder, page, path, "rollout_batch=8", "mini_batch=8", *words))
