"""Models of different sizes: `shape=actor=llama-70b,critic=llama-7b` in check and plan, and mistakes in it."""

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.config.role_shapes import shape_text, shapes_by_role
from rlhf_spmd.pages.algorithm import load_algorithm

PPO = load_algorithm("ppo").roles
GROWN = {"actor": "llama-70b", "critic": "llama-7b", "reference": "llama-70b", "reward": "llama-7b"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", dict.fromkeys(PPO, "llama-7b")),
        ("llama-13b", dict.fromkeys(PPO, "llama-13b")),
        ("actor=llama-70b", GROWN),
        ("actor = llama-70b, critic=llama-7b", GROWN),
        ("reward=llama-13b", dict.fromkeys(PPO, "llama-7b") | dict.fromkeys(("critic", "reward"), "llama-13b")),
        ("reference=llama-33b", dict.fromkeys(PPO, "llama-7b") | {"reference": "llama-33b"}),
    ],
)
def test_a_role_without_a_shape_has_that_of_the_role_that_it_starts_from(text, expected):
    found = shapes_by_role(text, PPO, "llama-7b")
    assert found == expected
    assert shapes_by_role(shape_text(found), PPO) == expected


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("actr=llama-7b", "unknown role in the option shape 'actr' (did you mean 'actor'?); known: actor, critic"),
        ("actor=lama-7b", "unknown shape 'lama-7b' (did you mean 'llama-7b'?)"),
        ("actor=llama-7b,llama-13b", "is not ROLE=SHAPE"),
        ("actor=llama-7b,actor=llama-7b", "is not ROLE=SHAPE"),
    ],
)
def test_mistakes_are_one_message(shape, words, capsys):
    assert main(["check", "flattening", "--preset", "llama-7b", f"shape={shape}"]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and words in found.err
