"""The reward functions of the package."""

import pytest

from rlhf_spmd import rewards
from rlhf_spmd.errors import UserError


def of(function, pairs: list[tuple[str, object]]) -> list[float]:
    responses, answers = zip(*pairs, strict=True)
    return function(["p"] * len(pairs), list(responses), list(answers))


def test_exact_answers():
    assert of(rewards.exact_answer, [(" 4\n", "4"), ("four", "4"), ("4", 4), ("", "4")]) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["exact_answer", "numeric_answer", "boxed_answer"])
def test_a_row_without_an_answer_has_no_score(name):
    """`null` was the text None."""
    if name == "boxed_answer":
        pytest.importorskip("math_verify")
    pairs = [("None", None), (r"\boxed{None}", None), (r"\boxed{5}", "6")]
    assert of(getattr(rewards, name), pairs) == [None, None, 0.0]


def test_answers_that_are_no_text():
    """A column of whole numbers with gaps holds floats in Parquet, and a list matched nothing, or its last number."""
    assert of(rewards.exact_answer, [("18", 18.0), ("0.5", 0.5), ("18", 18.5)]) == [1.0, 1.0, 0.0]
    for function in (rewards.exact_answer, rewards.numeric_answer):
        with pytest.raises(UserError, match=r"the answer \['18', '20'\] is neither a text nor a number"):
            of(function, [("18", ["18", "20"])])


def test_numeric_answers():
    right = [("it is 1,234.", "#### 1234"), ("5 or 6", "6.0"), ("1e3", 1000), ("so #### -3", "-3"), ("0.50", ".5 0.5")]
    wrong = [("none", "6"), ("6", "six"), ("", "1"), ("6 then 7", "6")]
    assert of(rewards.numeric_answer, right) == [1.0] * 5 and of(rewards.numeric_answer, wrong) == [0.0] * 4


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("9007199254740993", "9007199254740992", 0),
        ("12345678901234567890", "12345678901234567891", 0),
        ("0." + "3" * 40, "0." + "3" * 39, 0),
        ("1e999", "2e999", 0),
        ("1e-999", "0", 0),
        ("1e999", "10E998", 1),
        ("9" * 10_000, "9" * 10_000, 1),
        ("9" * 10_000, "9" * 9_999 + "8", 0),
        ("1,234.50", 1234.5, 1),
        ("1e22", 1e22, 1),
        (".5", "0.5", 1),
        ("$.50", "0.50", 1),
        ("so (-.5).", "-0.5", 1),
        ("+.5e1", 5, 1),
        ("x = \u22125", "-5", 1),
        ("x = \u22125", "5", 0),
        ("5", "\u2212\u22125", 0),
        ("\u2212.5e\u22121", "-0.05", 1),
        ("12.03.2024", "2024", 1),  # a point behind a number, a word or a point begins none
        ("the answer is...5", "5", 1),
        ("So it is.5", "5", 1),
        ("10-4", "-4", 1),
        ("1e9999999999999999999", "2e9999999999999999999", 0),
    ],
)
def test_numbers_are_compared_exactly(response, answer, right):
    assert of(rewards.numeric_answer, [(response, answer)]) == [right]


def test_boxed_answers():
    pytest.importorskip("math_verify")
    right = [(r"so \boxed{\frac{1}{2}}", r"\frac12"), (r"\boxed{0.5}", "1/2"), (r"\boxed{x^2+2x+1}", "(x+1)^2")]
    right += [(r"\boxed{1} no, \boxed{(1,3)}", r"\boxed{(1, 3)}")]
    wrong = [("1/2", "1/2"), (r"\boxed{1/3}", "1/2"), (r"\boxed{1/2", "1/2"), (r"\boxed{}", "2")]
    assert of(rewards.boxed_answer, right) == [1.0] * 4 and of(rewards.boxed_answer, wrong) == [0.0] * 4


def test_formats_and_lengths():
    thinks = rewards.matches(r"<think>.*</think>\s*\S.*")
    assert thinks(["p"] * 3, ["<think>a\nb</think> 4", "4", "<think>a</think>"]) == [1.0, 0.0, 0.0]
    assert rewards.num_words(["p", "p"], ["a b  c", ""]) == [3.0, 0.0]
