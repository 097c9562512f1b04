"""Reward functions: Python callables such as `reward(prompts, responses) -> list of numbers`, named in the config.

styles.py binds them, by the names of their parameters. A bad score would corrupt training silently, so every
result is checked. An error in the user's code is reported in one message with the function, the prompt, the
exception and its line.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file
from rlhf_spmd.model.config import naming
from rlhf_spmd.pages.named_objects import extend_import_path, load_named
from rlhf_spmd.pages.user_module import described, pass_on_interrupt
from rlhf_spmd.runtime.data.readers import FLOAT32_MAX
from rlhf_spmd.runtime.rewards.styles import Bound, Scored, bind

Scores = tuple[list[float | None], dict[str, list[float | None]]]  # of rows, and further numbers for the log


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function. Calling it gives one finite float per response, None where it does not apply, or raises
    UserError."""

    name: str  # as the user wrote it
    bound: Bound

    @property
    def asks_for_columns(self) -> bool:
        """Whether the data set must have columns for it."""
        return bool(self.bound.columns) or "ground_truth" in self.bound.words

    def bound_to(self, columns: Sequence[str] | None) -> RewardFunction:
        """Binds the function to these columns, see reward_styles.bind. Raises UserError."""
        with naming(f"reward function {self.name!r}"):
            return RewardFunction(self.name, bind(self.bound.function, columns))

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
        """Returns the scores of rows without further columns."""
        return self.score(Scored(prompts, responses))[0]

    def score(self, rows: Scored) -> Scores:
        """Returns the scores of rows, and further numbers for the log."""
        if not len(rows):
            return [], {}  # a rank without data does not call the user's code
        where = f"a batch of {len(rows)} responses" if len(rows) > 1 else response_of(rows, 0)
        try:
            scores, logs = self.bound.call(rows)
        except UserError as error:  # it already states the fix, e.g. a package to install
            raise UserError(f"reward function {self.name}: {error}") from error
        except BaseException as error:
            pass_on_interrupt(error)
            raise UserError(
                f"reward function {self.name} raised {described(error, _code_of(self.bound.function))} on {where}: fix "
                "the function, or return a score for such a response"
            ) from error
        scores = scores.tolist() if hasattr(scores, "tolist") else scores  # a numpy array or a torch tensor
        is_list = isinstance(scores, list | tuple)
        if not is_list or len(scores) != len(rows):
            returned = f"{len(scores)} scores" if is_list else f"a {type(scores).__name__}"
            raise UserError(
                f"reward function {self.name} returned {returned} for {len(rows)} responses: return a list with one "
                "number for each, in order"
            )
        for row, score in enumerate(scores):
            value = _float(score)
            if score is not None and (value is None or abs(value) > FLOAT32_MAX):
                raise UserError(
                    f"reward function {self.name} returned {shortened(score)} for {response_of(rows, row)}: return a "
                    "finite number that float32 holds for every response, also for an empty one"
                )
        of_log = {}
        for name, values in logs.items():
            numbers = [*map(_float, values), *[None] * len(rows)][: len(rows)]
            if any(number is not None for number in numbers):  # texts are not logged
                of_log[f"{label_of(self.name)}_{name}"] = numbers
        return [_float(score) for score in scores], of_log


def response_of(rows: Scored, row: int) -> str:
    """Returns a response and its prompt, for messages."""
    return f"response {shortened(rows.responses[row])} (prompt {shortened(rows.prompts[row])})"


def _float(value: Any) -> float | None:
    """Returns a number, also one of numpy or torch, as a float; None if it is not a number, or not finite."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    try:
        return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None
    except OverflowError:
        return None


def _code_of(function: Callable) -> Callable:
    """Returns the function with the code of a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(inspect.unwrap(function), "__code__") else type(function).__call__


def label_of(spec: str) -> str:
    """Returns the name of a function in the log: without the module."""
    return spec.rpartition(":")[2]


def load_reward_function(spec: str, columns: Sequence[str] | None = ()) -> RewardFunction:
    """Loads `module:function` or `file.py:function`, and binds it. columns: as of reward_styles.bind. Raises UserError
    naming the wrong part and the fix, also if the function cannot be called by names.

    The file's folder (for a module: the working folder) is appended to the import path, so the function can import
    modules there.
    """
    with naming(f"reward function {spec!r}"):
        function = load_named(spec, "function")
        if not callable(function):
            raise UserError(f"it is {shortened(function)}, not a function")
        return RewardFunction(spec, bind(function, columns))


def source_file(spec: str) -> Path | None:
    """Returns the file of a reward function, or None; the same on every rank, whether or not it loads the function."""
    target = spec.rpartition(":")[0]
    if not target or target.endswith(".py") or "/" in target:
        return Path(target) if is_file(target) else None
    extend_import_path(Path.cwd())
    try:
        module = importlib.util.find_spec(target)
    except BaseException as error:
        pass_on_interrupt(error)
        return None  # the module's package does not load: reported by the ranks that score
    return Path(module.origin) if module is not None and module.origin and Path(module.origin).is_file() else None


def shortened(value: object) -> str:
    """Returns a value as it is written in Python, with 60 characters at most."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
