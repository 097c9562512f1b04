"""The losses of given responses that are compared with TRL, and the rows of each. Read by both processes: no TRL.

Conventions that differ are either set by options, or named in `difference`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
ROWS = 16
PAD = "<unk>"  # TRL's padding: a token that no row has
MOST_TOKENS = 48  # of a prompt, and of a response
CUT = 9  # tokens of a text that is cut
TEMPLATE = (  # of conversations, with TRL's marks of what the assistant says
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'ba ' + message['content'] + ' ' }}"
    "{% else %}{{ 'be ' }}{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}{{ ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'be ' }}{% endif %}"
)


# ---- rows -----------------------------------------------------------------------------------------------------------

Words = Callable[[int, int], str]  # which text, number of its words


def completions(words: Words) -> list[Row]:
    return [{"prompt": words(i, 1 + i % 6), "completion": " " + words(3 * i + 1, 1 + i * i % 11)} for i in range(ROWS)]


def texts(words: Words) -> list[Row]:
    return [{"text": words(i, 2 + 5 * i % 13)} for i in range(ROWS)]


def conversations(words: Words) -> list[Row]:
    """Of one to three turns of the assistant."""
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
    """The prompt is the common beginning of the responses, which end inside of no word."""
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
class GivenCase:
    """One loss. rows: what both programs read. ours: options of ours. theirs: options of TRL's config. difference: what
    the programs define differently."""

    name: str
    page: str
    rows: Callable[[Words], list[Row]]
    ours: tuple[str, ...] = ()
    theirs: dict[str, Any] = field(default_factory=dict)
    difference: str = ""

    @property
    def options(self) -> list[str]:
        """Our options as words of the command line."""
        return [
            option if option.startswith(("data.", "generation.")) else f"{self.page}.{option}" for option in self.ours
        ]

    @property
    def role(self) -> str:
        """The model that is trained."""
        return "reward" if self.page == "reward_model" else "actor"


SMOOTHED = 0.2
GIVEN_CASES = (
    GivenCase(
        "SFT",
        "sft",
        completions,
        difference="both divide by the learned tokens of the whole optimizer step",
    ),
    GivenCase(
        "SFT, TRL packs",
        "sft",
        completions,
        theirs={"packing": True, "max_length": 40},
        difference="packing is always on here",
    ),
    GivenCase(
        "SFT, texts that are cut",
        "sft",
        texts,
        (f"generation.max_new_tokens={CUT - 1}", "data.long_prompts=truncate"),
        {"max_length": CUT},
        difference="TRL limits prompt and completion together, this program each of them; a cut text has no end token",
    ),
    GivenCase(
        "SFT, all turns of the assistant",
        "sft",
        conversations,
        ("data.turns=all",),
        {"assistant_only_loss": True},
        difference="without `assistant_only_loss` TRL learns what the user says, too; our default is the last turn",
    ),
    GivenCase(
        "reward model",
        "reward_model",
        pairs,
        difference="TRL pads with the end token where the tokenizer has no padding, and transformers then scores the "
        "token before the end; here the end token is scored. The comparison pads with another token",
    ),
    GivenCase("reward model, margins", "reward_model", with_margins),
    GivenCase(
        "reward model, margins, centred",
        "reward_model",
        with_margins,
        ("centering_coef=0.05",),
        {"center_rewards_coefficient": 0.05},
    ),
    GivenCase("reward model, conversations", "reward_model", pairs_of_messages),
    GivenCase("DPO", "dpo", pairs),
    GivenCase("DPO, prompts in the responses", "dpo", without_prompts),
    GivenCase("DPO, conversations", "dpo", pairs_of_messages),
    GivenCase(
        "cDPO",
        "dpo",
        pairs,
        (f"label_smoothing={SMOOTHED}", "beta=0.3"),
        {
            "loss_type": ["sigmoid", "robust"],
            "loss_weights": [2 * (1 - SMOOTHED), -(1 - 2 * SMOOTHED)],
            "label_smoothing": SMOOTHED,
            "beta": 0.3,
        },
        difference="TRL's `sigmoid` ignores `label_smoothing`; 2 (1 - e) of it less (1 - 2e) of its `robust` is cDPO",
    ),
    GivenCase(
        "IPO",
        "dpo",
        pairs,
        ("loss=ipo", "per_token=true"),
        {"loss_type": "ipo"},
        difference="TRL's IPO takes means over tokens, our `per_token=true`; our default takes sums, as the paper does",
    ),
    GivenCase(
        "DPO, length-normalised",
        "dpo",
        pairs,
        ("per_token=true", "beta=2"),
        {"loss_type": "sigmoid_norm", "beta": 2.0},
        difference="TRL's `sigmoid_norm` is our `per_token=true`",
    ),
)
GIVEN_LOSSES = {case.name: case for case in GIVEN_CASES}
