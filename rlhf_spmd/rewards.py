"""Reward functions that come with the package, used as `rlhf_spmd.rewards:vader_positive`."""

import functools

from rlhf_spmd.errors import UserError


def vader_positive(prompts: list[str], responses: list[str]) -> list[float]:
    """The sentiment of each response, from -1 (negative) to 1: the compound score of VADER.

    VADER is a lexicon of about 7,500 rated words with rules for negation, emphasis and punctuation (Hutto and Gilbert,
    ICWSM 2014). It needs no network and no weights, so a demonstration of RLHF runs on a laptop.
    """
    analyzer = _vader()
    return [analyzer.polarity_scores(response)["compound"] for response in responses]


@functools.cache
def _vader():
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise UserError("the reward rlhf_spmd.rewards:vader_positive needs VADER: pip install vaderSentiment") from None
    return SentimentIntensityAnalyzer()
