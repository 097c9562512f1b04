"""The FLOPs of an iteration, against those that torch counts in a forward and a backward pass."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhf_spmd import embedded
from rlhf_spmd.config.model_folders import shape_of_folder
from rlhf_spmd.model.hf import load_model
from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.cost.model_flops import iteration_flops
from tests.programs import make_workload

PROMPTS, RESPONSES = [3, 10, 8], [7, 4, 12]


def test_flops_of_an_iteration():
    folder = str(embedded.path_of("tiny/actor"))
    model, shape = load_model(folder, head="scalar"), shape_of_folder(folder)
    lengths = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    with FlopCounterMode(display=False) as forward_pass:
        hidden = forward(model, Sequences.of(torch.ones(1, sum(lengths), dtype=torch.int64)))
    with FlopCounterMode(display=False) as backward_pass:
        hidden.sum().backward()
    products = forward_pass.get_flop_counts()["Global"][torch.ops.aten.mm]
    trained = backward_pass.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert trained == pytest.approx(2 * products, rel=0.02)
    attention = shape.num_layers * 2 * shape.num_heads * shape.head_dim * sum(length**2 for length in lengths)
    workload = make_workload(shape=shape, epochs=2)
    passes = 2 + 2 * 3  # of the actor: generates, trains; its reference scores. And the critic's, with its reward model
    of_heads = 2 * sum(RESPONSES) * shape.hidden_size * (shape.vocab_size + 1)
    expected = passes * (2 * (products + attention) + of_heads)
    assert iteration_flops(workload, PROMPTS, RESPONSES) == pytest.approx(expected, rel=1e-9)
    only_rewards = replace(workload, models=workload.models | {"reward": None})
    assert iteration_flops(only_rewards, PROMPTS, RESPONSES) < expected


def test_gradients_of_a_base_below_adapters_are_not_counted():
    workload = make_workload(epochs=1)
    adapted = {name: shape and replace(shape, adapters=Adapters(4, 8.0)) for name, shape in workload.models.items()}
    whole = iteration_flops(workload, PROMPTS, RESPONSES)
    assert iteration_flops(replace(workload, models=adapted), PROMPTS, RESPONSES) == pytest.approx(
        whole * 8 / 10, rel=0.1
    )
