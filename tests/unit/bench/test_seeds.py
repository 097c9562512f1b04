"""The bench of `make demo-tools`: which held-out questions have numbers that no prompt has."""

import json

from bench.numbers.seeds import unseen
from rlhf_spmd import embedded


def row(question: str, **table: int) -> dict:
    return {"prompt": [{"role": "user", "content": question}], "table": table}


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
