"""Expressions mean what they mean to `re`, and none takes long."""

import random
import re

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.config import from_peft, matches
from tests.unit.model.adapters.test_config import LEAST, Q

PARTS = ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\.", "^", "$", r"\b", "(?!a)", "(?=b)", "(?<=a)", "(?<!b)", "(?i:A)"]
TIMES = ["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}?"]
ENDLESS = [
    "(([a-z_.0-9]+)+)+X",
    "((((.*)*)*)*)*X",
    "(a?){40}" + "a" * 40,
    "(.|.|.)*X",
    ".*" * 30 + "X",
    "(|.){1000000000}X",
    "((.{0,999}){0,999}){0,999}X",
]


def drawn(draw: random.Random, depth: int) -> str:
    kind = draw.random() if depth else 0
    if kind < 0.3:
        return draw.choice(PARTS)
    one, other = drawn(draw, depth - 1), drawn(draw, depth - 1)
    return one + other if kind < 0.55 else f"(?:{one}|{other})" if kind < 0.7 else f"({one}){draw.choice(TIMES)}"


def test_random_expressions():
    draw, num = random.Random(0), 0
    while num < 2000:
        expression, text = drawn(draw, 4), "".join(draw.choices("ab.1", k=draw.randrange(7)))
        try:
            expected = bool(re.fullmatch(expression, text))
        except re.error:
            continue
        assert matches(expression, text) == expected, (expression, text)
        num += 1


@pytest.mark.parametrize("expression", ENDLESS)
def test_an_expression_that_re_would_try_for_ever(expression):
    """In each key that holds one: with `re` these tests do not end."""
    for more in (
        {"target_modules": expression},
        {"exclude_modules": expression},
        {"layers_to_transform": [0], "layers_pattern": expression},
        {"rank_pattern": {expression: 3}, "alpha_pattern": {expression: 3}},
    ):
        try:
            config = from_peft(LEAST | more, [Q.format(0)])
        except UserError as error:
            assert "does not name" in str(error)
        else:
            assert (config.rank_of(Q.format(0)), config.alpha_of(Q.format(0))) == (8, 8)


@pytest.mark.parametrize("wrong", ["(", r"(a)\1", "(?>a)", "(" * 3000 + ")" * 3000, "a{99999999999}"])
def test_what_is_not_read_is_named(wrong):
    with pytest.raises(UserError, match=r"^the pattern '.{,99}' is not a regular expression that is read here \("):
        matches(wrong, "ab")
    assert not matches(".*", "a" * 10**6)
