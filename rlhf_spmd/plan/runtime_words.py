"""Names that the runtime defines: keys of generated data, readouts of a model's output, and shapes of data.

The file of an algorithm names every other key, role and function.
"""

from typing import Literal

PROMPTS, RESPONSES, LOGPROBS, KEPT = "prompts", "responses", "logprobs", "kept_tokens"
VALUES, SCORES, ENTROPY = "values", "scores", "entropy"
MOST_LIKELY = "most_likely"  # in a loss: bool [B, G], whether no other token was more likely
MASK, ENDED, SUMS = "mask", "ended", "sums"  # parameters of functions: bool [B, G], bool [B], sums over the batch
GENERATOR_LOGPROBS = "generator_logprobs"  # argument of a loss that corrects differences from the generator itself
LAG_SHARE = "lag_share"  # in a loss that interpolates old logprobs: see importance.proximal
START_LOGPROBS = "start_logprobs"  # argument of a loss: those of the policy with which the training of a batch begins
# in the log of steps with a budget of tokens: the share of their places that have a row, and their tokens
PLACES_USED, STEP_TOKENS = "places_used", "step_tokens"
STEPS_MADE = "_steps_made"  # in the log, behind a model: the share of its optimizer steps that were not left out
ACTIONS, REWARDS, OPENED = ".actions", ".rewards", ".prompts"  # of episodes, behind a key of responses
ROUTES = ".routes"  # of a mixture of experts, behind a key of responses
END = "end"  # in the rollouts: why an episode ended
TIMEOUTS = "reward_timeouts"  # in the log: responses for which a reward function ran out of time

# What a row of a key is: tokens of a prompt or a response (int32, -1 on padding); one number for each response token;
# one more than that; one number; the set that each response token was drawn from (int32); the experts that each token
# of the prompt and the response, but for the last one, took in each sparse layer (uint8).
Shape = Literal["prompt", "response", "token", "token+1", "row", "kept", "routes"]
TOKEN_SHAPES = ("prompt", "response", "kept")

# The readouts of `infer`: the head that each needs, and the shape of the result.
READOUTS: dict[str, tuple[str, Shape]] = {
    LOGPROBS: ("lm", "token"),
    VALUES: ("scalar", "token+1"),
    SCORES: ("scalar", "row"),
}


def actions_of(responses: str) -> str:
    """Returns the key that marks which tokens of responses were sampled, and which episodes ended by themselves, if
    responses are episodes of several turns (runtime/generation/episodes.py); else there is no such key."""
    return responses + ACTIONS


def rewards_of(responses: str) -> str:
    """Returns the key of the rewards of turns, each on the last token that the turn sampled."""
    return responses + REWARDS


def opened_of(responses: str) -> str:
    """Returns the key of the prompts of episodes, as their environment has opened them."""
    return responses + OPENED


def routes_of(responses: str) -> str:
    """Returns the key of the experts that tokens took in generation, which training takes, too (model/routes.py); else
    there is no such key."""
    return responses + ROUTES


def generated_keys(name: str, *, replay: bool, episodes: bool = False, routes: bool = False) -> dict[str, Shape]:
    """Returns the keys that a generate call makes, with their shapes.

    name: prefix of a second call's keys.
    replay, episodes: see Recorder.
    routes: whether training takes the experts that generation took.
    """
    before = f"{name}_" if name else ""
    made: dict[str, Shape] = {f"{before}{RESPONSES}": "response", f"{before}{LOGPROBS}": "token"}
    if episodes:
        own = f"{before}{RESPONSES}"
        made |= {actions_of(own): "token", rewards_of(own): "token", opened_of(own): "prompt"}
    made |= {f"{before}{KEPT}": "kept"} if replay else {}
    return made | ({routes_of(f"{before}{RESPONSES}"): "routes"} if routes else {})
