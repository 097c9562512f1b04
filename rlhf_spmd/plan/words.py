"""The runtime's own words: what generation makes, what is read off a model's output, and the shapes of data.

Every other key, role and function is named by the page of an algorithm.
"""

from typing import Literal

PROMPTS, RESPONSES, LOGPROBS, KEPT = "prompts", "responses", "logprobs", "kept_tokens"
VALUES, SCORES, ENTROPY = "values", "scores", "entropy"
MASK, ENDED, SUMS = "mask", "ended", "sums"  # that functions may ask for: bool [B, G], bool [B], what was added up

# What a row of a key is: tokens of a prompt or a response (int32, -1 on padding); a number for each response token, and
# for each and the one after the last; a number; the set that each response token was drawn from (int32).
Shape = Literal["prompt", "response", "token", "token+1", "row", "kept"]
TOKEN_SHAPES = ("prompt", "response", "kept")

# What `infer` reads off a model's output: the head that it needs, and the shape of the result.
READOUTS: dict[str, tuple[str, Shape]] = {
    LOGPROBS: ("lm", "token"),
    VALUES: ("scalar", "token+1"),
    SCORES: ("scalar", "row"),
}


def generated_keys(name: str, *, replay: bool) -> dict[str, Shape]:
    """The keys that a generating call makes, with their shapes. name: of a second one. replay: as of Recorder."""
    before = f"{name}_" if name else ""
    made: dict[str, Shape] = {f"{before}{RESPONSES}": "response", f"{before}{LOGPROBS}": "token"}
    return made | ({f"{before}{KEPT}": "kept"} if replay else {})
