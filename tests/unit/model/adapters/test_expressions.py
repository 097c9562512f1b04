"""Expressions that `re` could try for ever are refused."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.config import from_peft, matches
from tests.unit.model.adapters.test_config import LEAST, Q

OF_PEFT = {  # and whether the query projection is a target
    r".*\.(q_proj|v_proj)$": True,
    r"^(?!.*visual).*(?:q_proj|k_proj).*": True,
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|o_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))": True,
    r"model\.layers\.([0-9]|1\d)\.self_attn\.(k|v)_proj": False,
}


ENDLESS = [
    "(([a-z_.0-9]+)+)+X",
    "((((.*)*)*)*)*X",
    "(a?){40}" + "a" * 40,
    "(.|.|.)*X",
    ".*" * 30 + "X",
    "(|.){1000000000}X",
    "((.{0,999}){0,999}){0,999}X",
]


@pytest.mark.parametrize("expression", OF_PEFT)
def test_what_is_written_for_peft_is_read(expression):
    assert matches(expression, Q.format(0)) == OF_PEFT[expression]


@pytest.mark.parametrize("expression", ENDLESS)
def test_an_expression_that_re_would_try_for_ever(expression):
    """In each key that holds one: with `re` these tests do not end."""
    for more in (
        {"target_modules": expression},
        {"exclude_modules": expression},
        {"layers_to_transform": [0], "layers_pattern": expression},
        {"rank_pattern": {expression: 3}, "alpha_pattern": {expression: 3}},
    ):
        with pytest.raises(UserError, match=r"is not a regular expression that is read here \(it"):
            from_peft(LEAST | more, [Q.format(0)])


@pytest.mark.parametrize("wrong", ["(", r"(a)\1", "(?>a)", "(" * 3000 + ")" * 3000, "a{99999999999}"])
def test_what_is_not_read_is_named(wrong):
    with pytest.raises(UserError, match=r"^the pattern '.{,99}' is not a regular expression that is read here \("):
        matches(wrong, "ab")
    assert not matches(".*", "a" * 10**6)
