"""What the profile times of a model."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd import embedded
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.pages.algorithm import algorithm_names
from rlhf_spmd.runtime.profile.model_timings import FEW, MANY, TimedModel
from tests.unit.runtime.profile.test_profile import TOY

MIXTURE = (f"models.actor={embedded.path_of('mixture/actor')}",)
EPISODES = ("environment=m:f", "samples_per_prompt=2")


def test_what_an_engine_captures_is_not_timed():
    """CUDA graphs are captured with the first step of an engine: one engine serves all timings of as many rows, and its
    cache has gone when training is measured."""
    config = presets.load("tiny")
    workload, world = make_workload(config), SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    shape = next(shape for shape in workload.models.values() if not shape.scalar_head)
    subject = TimedModel(world, config, workload, TOY, shape, 1, 1)
    caches = []
    for num_rows, num_tokens in ((2, 4), (2, 1), (2, 3), (1, 4)):
        subject.generate(subject.tokens([4] * num_rows), [num_tokens] * num_rows)
        assert subject.generating.is_idle and not subject.generating.requests.prompts
        caches.append(weakref.ref(subject.generating.cache))
    assert caches[0]() is None and caches[0] == caches[1] == caches[2] and caches[3]() is not None
    subject.engine()
    assert caches[3]() is None


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [*((name, ()) for name in algorithm_names()), ("grpo", EPISODES), ("sft", ("dtype=bfloat16",)), ("grpo", MIXTURE)],
)
def test_a_training_step_of_every_page_is_timed(algorithm, more):
    """Also of one whose loss is divided by the sum of a column, of one that learns from episodes, and of a mixture: the
    rows that a model with few layers makes are those of one with many."""
    words = [f"models.teacher={embedded.path_of('tiny/actor')}"] if algorithm == "distill" else [*more]
    config = presets.load("tiny", words, algorithm=algorithm)
    workload, world = make_workload(config), SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    trained(world, config, workload, workload.models[next(iter(workload.workflow.trained_models))])


def test_a_dense_model_stands_for_a_mixture():
    """As in the probe of a run whose calibration has tables of dense models alone."""
    config = presets.load("tiny", MIXTURE, algorithm="grpo")
    workload, world = make_workload(config), SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    trained(world, config, workload, make_workload(presets.load("tiny", algorithm="grpo")).models["actor"])


def trained(world, config, workload, shape) -> None:
    few, subject = (TimedModel(world, config, workload, TOY, shape, 1, num) for num in (FEW, MANY))
    engine, rows = subject.engine(), few.rows([(4, 4), (4, 2)])
    for _ in range(2):
        subject.train(engine, rows)  # it raises if no row counts
    subject.train(engine, rows, update=True)
