"""Forecasts of the stages that generate nothing: rows against what they are made of, and the part of a suite."""

import pytest

from bench.cells import number
from bench.forecast.own_ideas import own_cases
from bench.forecast.scan import run_suite
from bench.forecast.suites import STAGES, SUITES
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.plan.workload import SHAPES
from tests.unit.bench.test_own_ideas import words

ZERO3 = "zero3"
WORK = {"sft": 2048, "reward_model": 1024, "dpo": 1024}  # tokens of a sequence
CASES = SUITES["stages"].cases


def rows_of(algorithm: str, *strategies: str, preset: str = "llama-7b", layout: str = "1x8") -> list[dict]:
    cases = own_cases(CASES, words(algorithm=algorithm, preset=preset, layout=layout))
    return run_suite([case for case in cases if (case.called or case.strategy) in strategies])


@pytest.mark.parametrize("algorithm", STAGES)
def test_a_step_takes_what_its_products_take(algorithm):
    """Six operations for each weight and token, two more for those of the reference; attention on top."""
    (row,) = rows_of(algorithm, ZERO3)
    devices, params = 8, SHAPES["llama-7b"].num_params
    tokens = 128 * WORK[algorithm] * (1 if algorithm == "sft" else 2)  # of a step
    flops = (6 + 2 * (algorithm == "dpo")) * params * tokens
    rate = load_calibration("a100-80g").devices["a100-80g"].matrix_flops
    assert 0.95 < row["without_messages_s"] / 4 / (flops / devices / rate) < 1.15
    assert row["step_s"] == pytest.approx(row["iteration_s"] / 4)
    assert row["tokens_per_s_device"] == pytest.approx(tokens / row["step_s"] / devices)
    assert row["options"]["zero"] == 3 and not row["options"]["recompute"] and row["strategy"] == ZERO3
    assert row["without_messages_s"] <= number("overlapped_s", row) < row["iteration_s"]
    assert (
        number("train_limit", row) == "compute"
        and set(row["limits"])
        == {
            "sft": {"actor_train"},
            "reward_model": {"reward_train"},
            "dpo": {"reference_infer", "reference_infer_logprobs", "actor_train"},
        }[algorithm]
    )
