"""Generation with waits for tools, against rows that are drawn and closed forms."""

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest

from rlhf_spmd.plan.cost.answers import P95, _drawn, generate_s, longest_s
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.workload import Answers, ResponseLengths
from tests.unit.plan.cost.test_seconds import example, machine


def of_sigma(mean_s: float, sigma: float, turns: float, tokens: float = 0.0) -> Answers:
    return Answers(turns, tokens, mean_s, mean_s * math.exp(sigma * P95 - sigma**2 / 2))


def drawn_waits(answers: Answers, sigma: float, size: tuple[int, ...]) -> np.ndarray:
    normal = np.random.default_rng(0).standard_normal(size)
    return answers.mean_s * np.exp(sigma * normal - sigma**2 / 2)


@pytest.mark.parametrize("rows", [8, 64, 512])
@pytest.mark.parametrize(("sigma", "turns"), [(0.6, 2), (1.0, 4), (0.9, 8), (0.7, 4.5)])
def test_the_row_that_waits_longest(sigma, turns, rows):
    """Against 4000 iterations that are drawn; where their number is not whole, rows differ by one."""
    answers, whole = of_sigma(0.3, sigma, turns), math.ceil(turns)
    waits = drawn_waits(answers, sigma, (4000, rows, whole - 1))
    waits[..., 0] *= np.random.default_rng(1).random((4000, rows)) <= 1 - (whole - turns)
    assert longest_s(answers, rows) == pytest.approx(waits.sum(2).max(1).mean(), rel=0.02)
    assert not longest_s(replace(answers, turns=1), rows) and not longest_s(replace(answers, mean_s=0, p95_s=0), rows)


def test_rows_keep_their_tokens_whatever_are_answers(parts):
    """Also a row that is shorter than the mean of the answers."""
    workload = replace(parts[0](None).workload, max_prompt=8, max_response=60)
    lengths = ResponseLengths.of((5, 40, 60), (8, 6, 4))
    drawn = _drawn(replace(workload, forecast_lengths=lengths), 28).forecast_lengths
    assert drawn.rows == (1, 8, 12) and drawn.prompts == (12, 38, 52)


@pytest.fixture
def parts():
    """Returns cost(answers), call, layout, rows of 20 + 30 tokens."""
    program = example("flattening", 1)
    workflow = program.workload.workflow
    call = replace(workflow.generate_calls[0], outputs=(*workflow.generate_calls[0].outputs, "responses.actions"))

    def cost(answers: Answers | None) -> Cost:
        return Cost(machine(layer_s=1e-4), replace(program.workload, answers=answers), program.cluster)

    return cost, call, program.placement.layouts[call.name], [(20, 30)] * 24


def test_without_waits_an_answer_is_a_part_of_the_prompt(parts):
    cost, call, layout, rows = parts
    assert call.has_turns
    plain = cost(None).generate_s(call, layout, 0, rows, 24)
    assert generate_s(cost(None), call, layout, 0, rows, 24) == plain
    assert generate_s(cost(Answers(1, 0, 1.0, 1.0)), call, layout, 0, rows, 24) == pytest.approx(plain)
    answered, same = cost(Answers(3, 20, 0.0, 0.0)), cost(None)
    sizes = {"max_prompt": same.workload.max_prompt + 20, "max_response": max(1, same.workload.max_response - 20)}
    same = replace(same, workload=replace(same.workload, **sizes))
    found = generate_s(answered, call, layout, 0, rows, 24)
    assert found == pytest.approx(same.generate_s(call, layout, 0, [(40, 10)] * 24, 24)) and found != plain


@pytest.mark.parametrize("places", [4, 24])
def test_waits_in_places_that_rows_take_in_turn(places, parts):
    """Waits are much longer than decode steps, so that rows do not slow one another down."""
    cost, call, layout, rows = parts
    answers = of_sigma(20.0, 0.8, 3)
    found = max(generate_s(cost(answers), call, layout, 0, rows, places))
    totals = []
    for waits in drawn_waits(answers, 0.8, (500, len(rows), 2)).sum(2):
        ends = [0.0] * places
        for wait in waits:
            heapq.heapreplace(ends, ends[0] + wait)
        totals.append(max(ends))
    assert found == pytest.approx(np.mean(totals), rel=0.25)
