"""What a loss is divided by: the sum of a key, whatever its size; and optimizer steps without a row."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_spmd.config import presets
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.execute.optimizer_step import checked_divisor
from rlhf_spmd.runtime.run.metrics import Alarm, metrics_of
from tests.folders import WORDS, write_all, write_model
from tests.runs import RunOf

PAGE = str(Path(__file__).parents[3] / "toy_pages" / "weighted.py")


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "actor", seed=1)


def run_of(actor: Path, path: Path, weights: list[float], *more: str) -> RunOf:
    """Returns a run whose iterations read four rows each, in the order of the weights."""
    rows = [
        {"prompt": WORDS[i % 4], "completion": " ".join(WORDS[5 : 7 + i % 4]), "weight": weight}
        for i, weight in enumerate(weights)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [f"data.prompts={path / 'rows.jsonl'}", "data.shuffle=false", "generation.max_new_tokens=8"]
    words += ["rollout_batch=4", "mini_batch=4", "micro_batch=3", f"iterations={len(weights) // 4}"]
    return RunOf(presets.load(None, [*words, *more], str(actor), algorithm=PAGE))


def state_of(run: RunOf) -> tuple[int, list[Tensor]]:
    """Returns a copy of all that an optimizer step changes."""
    num_steps, slices = run.job.models.engines["actor"].optimizer_state()
    return num_steps, [x.clone() for kinds in slices.values() for x in kinds.values()]


@pytest.mark.parametrize("weight", [1e-30, 0.01, 0.25, 3.0, 1e20])
def test_the_divisor_is_the_sum(weight, actor, tmp_path):
    """Equal weights change neither loss nor gradient, whatever their size."""
    expected, found = (run_of(actor, tmp_path, [one] * 4).iteration() for one in (1.0, weight))
    for name in ("loss", "actor_grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_sum_that_cannot_divide(actor, tmp_path):
    run = run_of(actor, tmp_path, [1.0, -2.0, 0.5, 0.25])
    wanted = "algorithm weighted: actor_train divides the loss of a mini-batch by the sum of weights, which is -0.25, "
    with pytest.raises(UserError, match=wanted):
        run.iteration()
    call = run.program.workload.workflow.call("actor_train")
    for divisor in (math.inf, math.nan, -1e-9):
        with pytest.raises(UserError, match=f"which is {divisor:g}, .*; give rows numbers of at least 0"):
            checked_divisor([divisor, abs(divisor)], call, "weighted")
    for numbers in ([0.0, 4.0], [1e-8, 1.2]):
        with pytest.raises(UserError, match="give rows numbers of at least 0"):
            checked_divisor(numbers, call, "weighted")
    assert checked_divisor([0.5, 3.5], call, "weighted") == 0.5 and checked_divisor([0.0, 0.0], call, "weighted") == 0.0


@pytest.mark.parametrize(
    "options",
    [
        ["generation.max_new_tokens=2", "generation.min_new_tokens=2", "grpo.overlong=mask"],
        ["grpo.drop_equal_groups=true"],
    ],
    ids=["all truncated", "all equal"],
)
def test_an_iteration_that_learns_nothing_is_told(options, tmp_path):
    """All responses are cut and left out; or all rewards are equal, and the groups left out."""
    words = [word for word in write_all(tmp_path) if not word.startswith(("ppo.", "optimizer."))]
    (tmp_path / "r.py").write_text(
        "def one(prompts, responses):\n    return [1.0] * len(responses)\n", encoding="utf-8"
    )
    words += [f"reward_function={tmp_path / 'r.py'}:one", "samples_per_prompt=2", "rollout_batch=4", "mini_batch=4"]
    config = presets.load("tiny", [*words, "generation.max_new_tokens=6", *options], algorithm="grpo")
    run = RunOf(config)
    start, metrics = state_of(run), run.iteration()
    assert metrics["used"] == 0 and metrics["actor_grad_norm"] == 0 and "policy_loss" not in metrics
    assert state_of(run)[0] == 0 and all(map(torch.equal, state_of(run)[1], start[1]))
    (text,) = Alarm(metrics_of(config.algorithm, run.program.workload.workflow)).notes(metrics)
    assert text.startswith(
        "warning: actor_grad_norm is 0: the actor learned nothing in this iteration: no response remains"
    )
