"""The bench of `make demo-tools`: which held-out questions have numbers that no prompt has."""

import json

from bench.numbers.seeds import numbers_of, unseen
from rlhf_spmd import embedded


def row(question: str, **table: int) -> dict:
    return {"prompt": [{"role": "user", "content": question}], "table": table}


def test_unseen_are_questions_with_other_numbers_or_another_sign():
    prompts = [row("amo*tiv", amo=12, tiv=34, xyz=9), row("amo-tiv", amo=3, tiv=4)]
    held_out = [row("bup*cit", bup=12, cit=34), row("bup+cit", bup=12, cit=34), row("cit*bup", bup=12, cit=34)]
    said = [{"prompt_index": index, "scores": index / 2} for index in (2, 0, 1)]
    assert numbers_of(prompts[0]) == (12, "*", 34)
    assert unseen(said, held_out, prompts) == [1.0, 0.5]


def test_no_word_of_the_held_out_questions_is_in_a_prompt():
    """Those of the package, of which most have numbers of their own, too."""
    prompts, held_out = (
        [
            json.loads(line)
            for line in embedded.path_of(f"tools/{name}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        ]
        for name in ("prompts", "held_out")
    )
    known = {word for one in prompts for word in one["table"]}
    assert not any(word in known for one in held_out for word in one["table"])
    said = [{"prompt_index": index, "scores": 1.0} for index in range(len(held_out))]
    assert len(unseen(said, held_out, prompts)) > len(held_out) / 2
