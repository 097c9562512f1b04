"""Texts become values of a type, or one message."""

from collections.abc import Sequence

import pytest
import torch

from rlhf_spmd.config.options import parse_value
from rlhf_spmd.errors import UserError


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (list[float], "0.5,0.5", [0.5, 0.5]),
        (list[float], "[0.5, 0.5]", [0.5, 0.5]),
        (list[float], "0.5", [0.5]),
        (list[str], "actor, critic", ["actor", "critic"]),
        (Sequence[int], "1,2", [1, 2]),
        (tuple[int, ...], "3", (3,)),
        (dict[str, float], '{"actor": 1}', {"actor": 1.0}),
        (int | None, "none", None),
        (int | str, "x", "x"),
    ],
)
def test_lists_and_unions(annotation, text, value):
    assert parse_value(annotation, text, "k") == value


def test_a_type_that_no_text_can_give():
    with pytest.raises(UserError, match="strategy.net cannot be set from text.*Module"):
        parse_value(torch.nn.Module, "x", "strategy.net")


def test_endless_brackets_are_just_wrong():
    with pytest.raises(UserError, match="^k="):
        parse_value(int, "[" * 100_000, "k")
