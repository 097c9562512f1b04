"""data.epochs: a length of a run in passes over its set, beside `iterations`."""

from collections import Counter
from dataclasses import replace

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.epochs import in_iterations
from rlhf_spmd.config.file import read_config_file
from rlhf_spmd.config.options import overridden
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.checkpoint.resume import refuse_changes, refuse_fewer
from rlhf_spmd.runtime.data.prompt_order import PromptOrder
from tests.folders import write_all
from tests.runs import RunOf


def load(*words: str, text: str = "", name: str = "run.yaml", folder=None):
    if not text:
        return presets.load("tiny", words)
    (folder / name).write_text(text, encoding="utf-8")
    return presets.load("tiny", words, file=read_config_file(str(folder / name)))


@pytest.mark.parametrize(
    ("epochs", "num_rows", "rollout_batch", "iterations"),
    [
        (1, 64, 32, 2),
        (3, 64, 32, 6),
        (1, 65, 32, 3),
        (3, 21, 8, 8),
        (0.5, 64, 32, 1),
        (0.1, 30, 1, 3),
        (0.01, 8, 32, 1),
    ],
)
def test_iterations_that_read_every_row_as_often_as_asked(epochs, num_rows, rollout_batch, iterations):
    config = load(f"data.epochs={epochs}", f"rollout_batch={rollout_batch}", "mini_batch=1")
    assert in_iterations(config, num_rows).iterations == iterations
    order = PromptOrder((num_rows,), (1.0,), seed=3)
    read = Counter(row for number in range(iterations) for row in order.batch(number, rollout_batch))
    if epochs >= 1:
        assert len(read) == num_rows and min(read.values()) >= epochs
    more = iterations * rollout_batch - epochs * num_rows
    assert more < rollout_batch  # one iteration less would not do


def test_one_of_the_two_is_given(tmp_path):
    message = "both say how long the run is: give one of them"
    with pytest.raises(UserError, match=message):
        load("iterations=4", "data.epochs=2")
    with pytest.raises(UserError, match=f"run.yaml: .*{message}"):
        load(text="iterations: 4\ndata:\n  epochs: 2\n", folder=tmp_path)
    # words of the command line replace those of a file
    assert load("data.epochs=2", text="iterations: 4\n", folder=tmp_path).data.epochs == 2
    config = load("iterations=4", text="data:\n  epochs: 2\n", folder=tmp_path)
    assert (config.iterations, config.data.epochs) == (4, 0)
    assert load("iterations=4", "data.epochs=0").iterations == 4
    with pytest.raises(UserError, match=r"data.epochs=nan: it should be a finite number"):
        load("data.epochs=nan")
    with pytest.raises(UserError, match="each file has epochs of its own; give iterations"):
        load("data.epochs=2", "data.prompts=a.jsonl,b.jsonl", "data.weights=1,2")


def test_a_run_that_generates_counts_its_prompts(tmp_path):
    words = [word for word in write_all(tmp_path) if not word.startswith("iterations=")]
    run = RunOf(presets.load("tiny", [*words, "data.epochs=1.5"]))
    num, config = len(run.job.prompts), run.job.config
    assert (config.iterations - 1) * config.rollout_batch < 1.5 * num <= config.iterations * config.rollout_batch
    assert run.job.config.iterations == config.iterations  # of learning rates


def test_a_resumed_run_may_go_on_unless_a_schedule_has_ended():
    before = in_iterations(load("data.epochs=2"), 300)
    longer = overridden(before, ["data.epochs=4"])
    refuse_changes(before, longer, "RUN")
    refuse_changes(before, overridden(before, ["iterations=9"]), "RUN")
    linear = replace(before, optimizer=replace(before.optimizer, schedule="linear"))
    message = "data.epochs=4.0 would change every learning rate of RUN, whose schedule linear ends after 5 iterations"
    with pytest.raises(UserError, match=message):
        refuse_changes(linear, overridden(linear, ["data.epochs=4"]), "RUN")
    refuse_fewer(before, 5, "RUN")
    shorter = in_iterations(overridden(before, ["data.epochs=1"]), 300)
    with pytest.raises(UserError, match="data.epochs=1 is 3 iterations, but RUN has done 5; give a larger data.epochs"):
        refuse_fewer(shorter, 5, "RUN")
