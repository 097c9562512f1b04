"""The losses that are compared with TRL, as options of both programs (cases.toml), and the rows of given responses.

Conventions that differ are either set by options, or named in `difference`.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Words = Callable[[int, int], str]  # which text, number of its words
ROWS = 16  # of given responses
PAD = "<unk>"  # TRL's padding: a token that no row has
MOST_TOKENS = 48  # of a prompt, and of a given response
KL = 0.04  # weight of the KL divergence where responses are generated
TEMPLATE = (  # of conversations, with TRL's marks of what the assistant says
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'ba ' + message['content'] + ' ' }}"
    "{% else %}{{ 'be ' }}{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}{{ ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'be ' }}{% endif %}"
)


# ---- rows of given responses ----------------------------------------------------------------------------------------


def completions(words: Words) -> list[Row]:
    return [{"prompt": words(i, 1 + i % 6), "completion": " " + words(3 * i + 1, 1 + i * i % 11)} for i in range(ROWS)]


def texts(words: Words) -> list[Row]:
    return [{"text": words(i, 2 + 5 * i % 13)} for i in range(ROWS)]


def conversations(words: Words) -> list[Row]:
    """Makes conversations of one to three turns of the assistant."""
    roles = ("user", "assistant")
    return [
        {"messages": [_message(roles[j % 2], words(5 * i + j, 1 + (i + j) % 4)) for j in range(2 * (1 + i % 3))]}
        for i in range(ROWS)
    ]


def pairs(words: Words) -> list[Row]:
    return [
        {
            "prompt": words(i, 1 + i % 6),
            "chosen": " " + words(3 * i + 1, 1 + i * i % 11),
            "rejected": " " + words(5 * i + 2, 1 + 7 * i % 9),
        }
        for i in range(ROWS)
    ]


def with_margins(words: Words) -> list[Row]:
    return [row | {"margin": 0.25 * (i % 4)} for i, row in enumerate(pairs(words))]


def without_prompts(words: Words) -> list[Row]:
    """Makes pairs whose prompt is the common beginning of the responses, which end inside of no word."""
    both = ("chosen", "rejected")
    rows = [row for row in pairs(words) if row["chosen"][1] != row["rejected"][1]]
    return [{name: row["prompt"] + row[name] for name in both} for row in rows]


def pairs_of_messages(words: Words) -> list[Row]:
    return [
        {"prompt": [_message("user", row["prompt"])]}
        | {name: [_message("assistant", row[name].strip())] for name in ("chosen", "rejected")}
        for row in pairs(words)
    ]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# ---- losses ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One loss.

    ours: options of our page, or of `data` and `generation`.
    theirs: options of TRL's config.
    difference: what the programs define differently.
    rows: of given responses; None: responses are generated.
    noise: nats by which the old logprobs of generated ones are perturbed, so large that some ratios are clipped on
        either side.
    with_casts: the tolerance where both programs cast to float32 (widened.py), if the usual one is too small.
    """

    name: str
    page: str
    ours: tuple[str, ...] = ()
    theirs: dict[str, Any] = field(default_factory=dict)
    difference: str = ""
    rows: Callable[[Words], list[Row]] | None = None
    noise: float = 0.3
    with_casts: float = 0.0

    @property
    def options(self) -> list[str]:
        """Our options as words of the command line."""
        options = self.ours if self.rows else (*self.ours, f"kl_coef={KL}")
        return [one if one.startswith(("data.", "generation.")) else f"{self.page}.{one}" for one in options]

    @property
    def casts_tolerance(self) -> float:
        return self.with_casts or (3e-6 if self.rows else 1e-6)

    @property
    def role(self) -> str:
        """The model that is trained."""
        return "reward" if self.page == "reward_model" else "actor"


ROWS_OF = {
    make.__name__: make
    for make in (completions, texts, conversations, pairs, with_margins, without_prompts, pairs_of_messages)
}


def _read(path: Path) -> dict[str, Case]:
    """Reads the losses of a file, by their names."""
    found = {}
    for name, one in tomllib.loads(path.read_text(encoding="utf-8")).items():
        rows = ROWS_OF[one.pop("rows")] if "rows" in one else None
        found[name] = Case(name, one.pop("page"), tuple(one.pop("ours", ())), rows=rows, **one)
    return found


CASES = _read(Path(__file__).with_suffix(".toml"))
LOSSES = {name: case for name, case in CASES.items() if not case.rows}
GIVEN_LOSSES = {name: case for name, case in CASES.items() if case.rows}
