"""The losses that are compared with TRL, as options of both programs, and the rows that both read. Read by both
processes: no torch, no TRL.

Conventions that differ are either set by options, or named in `difference`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Words = Callable[[int, int], str]  # which text, number of its words
ROWS = 16  # of given responses
PAD = "<unk>"  # TRL's padding: a token that no row has
MOST_TOKENS = 48  # of a prompt, and of a given response
CUT = 9  # tokens of a text that is cut
KL = 0.04  # weight of the KL divergence where responses are generated
PLAIN_KL = {"use_bias_correction_kl": False}
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
class Case:
    """One loss. ours: options of our page, or of `data` and `generation`. theirs: options of TRL's config. difference:
    what the programs define differently. rows: of given responses; None: responses are generated. noise: nats by which
    the old logprobs of generated ones are perturbed, so large that some ratios are clipped on either side. with_casts:
    the tolerance where both programs cast to float32 (widened.py), if the usual one is too small."""

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


GENERATED = (
    Case(
        "GRPO",
        "grpo",
        ("aggregation=seq-mean-token-mean",),
        {"loss_type": "grpo", **PLAIN_KL},
        "TRL's default multiplies the KL term by the ratio; `use_bias_correction_kl` is off here",
    ),
    Case(
        "GRPO, TRL's KL term",
        "grpo",
        ("aggregation=seq-mean-token-mean", "kl_unbiased=true"),
        {"loss_type": "grpo"},
        "TRL's default is our `kl_unbiased=true`",
    ),
    Case(
        "Dr.GRPO",
        "grpo",
        ("scale=none", "aggregation=seq-mean-token-sum-norm"),
        {"loss_type": "dr_grpo", "scale_rewards": "none", **PLAIN_KL},
    ),
    Case(
        "DAPO's loss",
        "grpo",
        ("clip_high=0.28",),
        {"loss_type": "dapo", "epsilon_high": 0.28, **PLAIN_KL},
        "both divide by the tokens of the whole optimizer step",
    ),
    Case(
        "GSPO",
        "grpo",
        ("ratio_level=sequence", "aggregation=seq-mean-token-mean", "clip_low=3e-4", "clip_high=4e-4"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
        | PLAIN_KL,
        noise=3e-3,
    ),
    Case(
        "CISPO",
        "grpo",
        ("surrogate=cispo", "clip_low=1", "clip_high=0.2"),
        {"loss_type": "cispo", "epsilon_high": 1.2, **PLAIN_KL},
        "TRL's `epsilon_high` is the largest ratio, our `clip_high` is added to 1",
    ),
    Case(
        "RLOO",
        "rloo",
        ("ratio_level=product", "aggregation=seq-mean-token-mean"),
        difference="TRL has one ratio for a response, the product of its tokens'; our default is one for each token",
        noise=0.12,
        with_casts=2e-5,  # the rounding of a response's logprobs adds up in the exponent
    ),
)
SMOOTHED = 0.2
GIVEN = (
    Case(
        "SFT",
        "sft",
        difference="both divide by the learned tokens of the whole optimizer step",
        rows=completions,
    ),
    Case(
        "SFT, TRL packs",
        "sft",
        theirs={"packing": True, "max_length": 40},
        difference="packing is always on here",
        rows=completions,
    ),
    Case(
        "SFT, texts that are cut",
        "sft",
        (f"generation.max_new_tokens={CUT - 1}", "data.long_prompts=truncate"),
        {"max_length": CUT},
        "TRL limits prompt and completion together, this program each of them; a cut text has no end token",
        texts,
    ),
    Case(
        "SFT, all turns of the assistant",
        "sft",
        ("data.turns=all",),
        {"assistant_only_loss": True},
        "without `assistant_only_loss` TRL learns what the user says, too; our default is the last turn",
        conversations,
    ),
    Case(
        "reward model",
        "reward_model",
        difference="TRL pads with the end token where the tokenizer has no padding, and transformers then scores the "
        "token before the end; here the end token is scored. The comparison pads with another token",
        rows=pairs,
    ),
    Case("reward model, margins", "reward_model", rows=with_margins),
    Case(
        "reward model, margins, centred",
        "reward_model",
        ("centering_coef=0.05",),
        {"center_rewards_coefficient": 0.05},
        rows=with_margins,
    ),
    Case("reward model, conversations", "reward_model", rows=pairs_of_messages),
    Case("DPO", "dpo", rows=pairs),
    Case("DPO, prompts in the responses", "dpo", rows=without_prompts),
    Case("DPO, conversations", "dpo", rows=pairs_of_messages),
    Case(
        "cDPO",
        "dpo",
        (f"label_smoothing={SMOOTHED}", "beta=0.3"),
        {
            "loss_type": ["sigmoid", "robust"],
            "loss_weights": [2 * (1 - SMOOTHED), -(1 - 2 * SMOOTHED)],
            "label_smoothing": SMOOTHED,
            "beta": 0.3,
        },
        "TRL's `sigmoid` ignores `label_smoothing`; 2 (1 - e) of it less (1 - 2e) of its `robust` is cDPO",
        pairs,
    ),
    Case(
        "IPO",
        "dpo",
        ("loss=ipo", "per_token=true"),
        {"loss_type": "ipo"},
        "TRL's IPO takes means over tokens, our `per_token=true`; our default takes sums, as the paper does",
        pairs,
    ),
    Case(
        "DPO, length-normalised",
        "dpo",
        ("per_token=true", "beta=2"),
        {"loss_type": "sigmoid_norm", "beta": 2.0},
        "TRL's `sigmoid_norm` is our `per_token=true`",
        pairs,
    ),
)
LOSSES = {case.name: case for case in GENERATED}
GIVEN_LOSSES = {case.name: case for case in GIVEN}
