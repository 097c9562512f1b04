"""Reward functions that come with the package, used as `rlhf_spmd.rewards:numeric_answer`, and makers of some.

`answer` is a column of the data set. A row without an answer (null) has no score: these functions do not apply to it.
Functions that execute code are not among them: docs/rewards.md says how to call a sandbox.
"""

import asyncio
import functools
import importlib
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rlhf_spmd.errors import UserError

# A number may begin with its point only where that is not the end of a sentence, a word or another number.
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?")
MINUS = "\N{MINUS SIGN}"
GIVEN = "####"  # what stands before the answer in GSM8K


def exact_answer(prompts: list[str], responses: list[str], answer: list[Any]) -> list[float | None]:
    """1 if the response, without space around it, is the answer; else 0. None where the answer is null."""
    return _matches(responses, answer, lambda response, right: response.strip() == right.strip())


def numeric_answer(prompts: list[str], responses: list[str], answer: list[Any]) -> list[float | None]:
    """1 if the last number of the response is exactly the last number of the answer; else 0. None where the answer is
    null.

    Numbers may have thousands separators, a sign and an exponent, and may begin with their point. An answer that holds
    no number never matches; text after `####` counts alone, as in GSM8K.
    """

    def is_right(response: str, right: str) -> bool:
        number = last_number(response)
        return number is not None and number == last_number(right)

    return _matches(responses, answer, is_right)


def _matches(responses: list[str], answer: list[Any], is_right: Callable[[str, str], bool]) -> list[float | None]:
    """Returns 1 or 0 for each response by its answer; None where that is null."""
    pairs = zip(responses, answer, strict=True)
    return [None if right is None else float(is_right(response, _text_of(right))) for response, right in pairs]


def _text_of(answer: Any) -> str:
    """Returns an answer as text; 18.0, as tables hold 18 in a column with gaps, as 18. Raises UserError for lists and
    objects, which no response would match."""
    if not isinstance(answer, str | int | float):
        raise UserError(f"the answer {answer!r:.60} is neither a text nor a number: write one answer into each row")
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, exactly, after `####` if there is one; None if there is no number, or one whose
    exponent has more than 18 digits."""
    numbers = NUMBER.findall(text.rpartition(GIVEN)[2].replace(MINUS, "-"))
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def boxed_answer(prompts: list[str], responses: list[str], answer: list[Any]) -> list[float | None]:
    r"""1 if the last \boxed{} of the response is mathematically equal to the answer; else 0. None where the answer is
    null.

    Equality is that of math-verify: symbolic, by SymPy, but of decimal fractions to six places. The answer is LaTeX or
    plain text, with or without \boxed{}. An expression may take SymPy very long. The time limits of math-verify itself
    are off, because a score of 0 after one would depend silently on the speed of the machine; reward_workers with
    reward_timeout_s limits and counts them.
    """
    math_verify = _imported("math_verify", "math-verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

    def is_right(response: str, right: str) -> bool:
        boxed = last_boxed(response)
        if boxed is None:
            return False
        wanted = last_boxed(right) or right
        sides = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (wanted, boxed)]
        return bool(wanted.strip() == boxed.strip() or math_verify.verify(*sides, timeout_seconds=None))

    return _matches(responses, answer, is_right)


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} of a text holds, braces counted; None if there is none that ends."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[first:place]
    return None


def matches(pattern: str) -> Callable[[list[str], list[str]], list[float]]:
    """Returns a reward function that scores 1 if the whole response, without space around it, matches a regular
    expression, in which a dot stands for line breaks, too; else 0."""
    compiled = re.compile(pattern, re.DOTALL)

    def matches_pattern(prompts: list[str], responses: list[str]) -> list[float]:
        return [float(compiled.fullmatch(response.strip()) is not None) for response in responses]

    return matches_pattern


def remote(
    *urls: str, batch: int = 64, at_once: int = 8, timeout_s: float = 30.0, tries: int = 5, columns: Sequence[str] = ()
) -> Callable[..., Any]:
    """Returns a reward function that asks servers, in the protocol of OpenRLHF: the request is a POST of the JSON
    object {"query": [...], "prompts": [...], "labels": [...]}, and the answer {"rewards": [...]}, one number for each
    query. A request that fails raises UserError, so the run ends.

    urls: of servers that give the same scores; requests go to them in turns.
    batch: responses of a request.
    at_once: requests of a rank that are under way.
    timeout_s: seconds for one try; keep it below `deadline_s`.
    tries: of a request, each at the next server, after pauses of 1, 2, 4, ... seconds; refusals (statuses 400 to 428
        and 430 to 499) are not tried again.
    columns: of the data set, which are sent under their names, too.
    """
    if not urls:
        raise UserError("rlhf_spmd.rewards.remote has no server: name one, such as remote('http://host:5000/score')")
    if taken := {"query", "prompts", "labels"} & {*columns}:
        raise UserError(f"rlhf_spmd.rewards.remote sends its own {', '.join(taken)}: leave them out of columns")
    turns = itertools.count()

    async def remote_reward(queries: list[str], prompts: list[str], labels: list[Any], **others: Any) -> list[float]:
        import httpx

        sent = {"query": queries, "prompts": prompts, "labels": labels} | {name: others[name] for name in columns}
        parts = [
            {name: values[start : start + batch] for name, values in sent.items()}
            for start in range(0, len(queries), batch)
        ]
        free = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(timeout=timeout_s) as client:

            async def answered(part: dict[str, list[Any]]) -> list[float]:
                first = next(turns)
                async with free:
                    return await _asked(client, [urls[(first + more) % len(urls)] for more in range(tries)], part)

            return [score for scores in await asyncio.gather(*map(answered, parts)) for score in scores]

    return remote_reward


async def _asked(client: Any, urls: Sequence[str], part: dict[str, list[Any]]) -> list[float]:
    """Asks one server after the other for the rewards of one request."""
    import httpx

    said = ""
    for number, url in enumerate(urls):
        if number:
            await asyncio.sleep(2.0 ** (number - 1))
        try:
            answer = await client.post(url, json=part)
        except httpx.HTTPError as error:
            said = f"{url}: {error or type(error).__name__}"
            continue
        if answer.is_success:
            return _rewards_of(url, answer.text, len(part["query"]))
        said = f"{url}: status {answer.status_code}, {answer.text[:200]!r}"
        if answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
            break
    raise UserError(f"the reward server gave no scores, the last answer, after {number + 1} tries, is: {said}")


def _rewards_of(url: str, text: str, num: int) -> list[float]:
    """Returns the numbers of an answer."""
    try:
        scores = [float(score) for score in json.loads(text)["rewards"]]
    except (ValueError, TypeError, KeyError):
        scores = []
    if len(scores) != num or not all(map(math.isfinite, scores)):
        raise UserError(f"{url}: {text[:200]!r} is not a JSON object with `rewards`, {num} finite numbers")
    return scores


def num_words(prompts: list[str], responses: list[str]) -> list[float]:
    """The number of words of each response; with a negative weight a penalty for length."""
    return [float(len(response.split())) for response in responses]


def vader_positive(prompts: list[str], responses: list[str]) -> list[float]:
    """The sentiment of each response, from -1 (negative) to 1: the compound score of VADER.

    VADER is a lexicon of about 7,500 rated words with rules for negation, emphasis and punctuation (Hutto and Gilbert,
    ICWSM 2014). It needs no network and no weights, so a demonstration of RLHF runs on a laptop.
    """
    analyzer = _vader()
    return [analyzer.polarity_scores(response)["compound"] for response in responses]


@functools.cache
def _vader() -> Any:
    return _imported("vaderSentiment.vaderSentiment", "vaderSentiment").SentimentIntensityAnalyzer()


def _imported(module: str, package: str) -> Any:
    """Returns a module of a package that need not be installed. Raises UserError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"this reward of rlhf_spmd.rewards needs {package}: pip install {package}") from None
