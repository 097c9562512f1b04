"""Streams of random numbers are a format: their values are fixed, and every use of random numbers has its own."""

import numpy as np
import pytest

from rlhf_spmd.kernels.cdf_tree import level_numbers
from rlhf_spmd.kernels.philox import STREAM_BITS, random_bits
from rlhf_spmd.plan.workflow import Role, trace
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.run.samples import sample_responses
from tests.folders import write_all
from tests.runs import RunOf, load


def test_the_layout_is_fixed():
    """A change of any of these draws other tokens: raise RANDOM_LAYOUT with it."""
    assert random_streams.RANDOM_LAYOUT == 2
    assert (random_streams.NUM_ROLLOUTS, random_streams.EVALUATION, random_streams.SAMPLES, random_streams.OFFLINE) == (
        128,
        128,
        129,
        130,
    )
    bits_BG = random_bits(2**40 + 3, random_streams.OFFLINE, 7, [5], [2], 2)
    assert bits_BG.tolist() == [[1403147271555343479, 4846617932641639363]]
    words_BL = level_numbers(bits_BG[0], 3) * 2**32
    assert words_BL.tolist() == [[1620927607, 3347110193, 274946650], [3441728451, 2894124884, 3248344483]]


def test_streams_are_apart():
    last = random_streams.NUM_ROLLOUTS - 1
    used = [0, 1, last, random_streams.EVALUATION, random_streams.SAMPLES, random_streams.OFFLINE]
    assert len(set(used)) == len(used) and max(used) < 2**STREAM_BITS
    bits = [random_bits(0, stream, 0, np.arange(20), np.zeros(20, int), 30) for stream in used]
    assert len(np.unique(bits)) == 20 * 30 * len(used)


def test_generate_calls_have_their_place_as_stream():
    def twice(model, compute, prompts) -> None:
        for name, other in (("actor", ""), ("other", "other")):
            responses, _ = model(name).generate(prompts, name=other)
            model(name).infer("logprobs", prompts, responses, output=f"{name} logprobs")
        model("actor").train("loss", prompts, responses)

    workflow = trace(twice, dict.fromkeys(("actor", "other"), Role("lm", lr=1e-5)), {"prompts": "prompt"})
    assert [call.name for call in workflow.generate_calls] == ["actor_generate", "other_generate_other"]
    assert [random_streams.of_call(workflow, call) for call in workflow.generate_calls] == [0, 1]
    with pytest.raises(ValueError):
        random_streams.of_call(workflow, workflow.call("actor_infer"))


def test_a_run_draws_from_its_streams(tmp_path, monkeypatch):
    """Rollouts from that of the call, with the iteration; the samples shown from their own."""
    asked = []

    def noted(seed, stream, iteration, *rows):
        asked.append((seed, stream, iteration))
        return random_bits(seed, stream, iteration, *rows)

    monkeypatch.setattr("rlhf_spmd.runtime.execute.iteration.random_bits", noted)
    run = RunOf(load(write_all(tmp_path), "iterations=2", "seed=9"))
    before = sample_responses(run.job)
    run.iterations()
    assert asked == [(9, random_streams.SAMPLES, 0), (9, 0, 0), (9, 0, 1)]
    assert sample_responses(run.job) != before
