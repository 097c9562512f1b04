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
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.pages.user_module import described
from rlhf_spmd.runtime.data.readers import FLOAT32_MAX
from rlhf_spmd.runtime.failure.signals import pass_on_interrupt
from rlhf_spmd.runtime.rewards.styles import Bound, Scored, bind


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function. Calling it gives one finite float per response, None where it does not apply, or raises
    UserError."""

    name: str  # as the user wrote it
    bound: Bound

    @property
    def label(self) -> str:
        return label_of(self.name)

    @property
    def asks_for_columns(self) -> bool:
        """Whether the data set must have columns for it."""
        return bool(self.bound.columns) or "ground_truth" in self.bound.words

    def bound_to(self, columns: Sequence[str] | None) -> RewardFunction:
        """Binds the function to these columns, see reward_styles.bind. Raises UserError."""
        with naming(f"reward function {self.name!r}"):
            return RewardFunction(self.name, bind(self.bound.function, columns))

    @property
    def notes(self) -> list[str]:
        """Which of its parameters have the name of a column that they do not get."""
        names = ", ".join(self.bound.hidden)
        return [f"{self.name} gets the program's {names}, not the data set's"] if names else []

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
        """Returns the scores of rows without further columns."""
        return self.score(Scored(prompts, responses))[0]

    def score(self, rows: Scored) -> tuple[list[float | None], dict[str, list[float | None]]]:
        """Returns the scores of rows, and further numbers for the log."""
        if not len(rows):
            return [], {}  # a rank without data does not call the user's code
        try:
            result = self.bound.call(rows)
        except UserError as error:  # it already states the fix, e.g. a package to install
            text = str(error)
            named = f"reward function {self.name} {text.removeprefix('it ')}"
            raise UserError(named if text.startswith("it ") else text) from error
        except BaseException as error:
            pass_on_interrupt(error)
            raise UserError(
                f"reward function {self.name} raised {described(error, _code_of(self.bound.function))} "
                f"on {_where(rows)}: fix the function, or return a score for such a response"
            ) from error
        scores = [self._number(rows, row, score) for row, score in enumerate(self._list(result.scores, len(rows)))]
        logs = {f"{self.label}_{name}": _logged(values, len(rows)) for name, values in result.logs.items()}
        return scores, {name: values for name, values in logs.items() if any(value is not None for value in values)}

    def _list(self, scores: Any, num: int) -> list[Any]:
        """Returns the scores of so many rows as a list. Raises UserError."""
        if hasattr(scores, "tolist"):  # a numpy array or a torch tensor
            scores = scores.tolist()
        returned = f"reward function {self.name} returned"
        if not isinstance(scores, list | tuple):
            hint = ": finish it with list(...)" if inspect.isgenerator(scores) else ""
            raise UserError(f"{returned} a {type(scores).__name__}, not a list with one number per response{hint}")
        if len(scores) != num:
            raise UserError(f"{returned} {len(scores)} scores for {num} responses: return one for each, in order")
        return list(scores)

    def _number(self, rows: Scored, row: int, score: Any) -> float | None:
        """Returns a score as a float that float32 holds; None where the function does not apply. Raises UserError."""
        value = _float(score)
        if score is None or (value is not None and abs(value) <= FLOAT32_MAX):
            return value
        raise UserError(
            f"reward function {self.name} returned {shortened(score)} for {_where(rows.part(row, row + 1))}: return a "
            "finite number that float32 holds for every response, also for an empty one"
        )


def _where(rows: Scored) -> str:
    """Returns the rows of a call, for messages."""
    if len(rows) > 1:
        return f"a batch of {len(rows)} responses (rows {rows.first} to {rows.first + len(rows) - 1})"
    return f"response {rows.first} {shortened(rows.responses[0])} (prompt {shortened(rows.prompts[0])})"


def _float(value: Any) -> float | None:
    """Returns a number, also one of numpy or torch, as a float; None if it is not a number, or not finite."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    try:
        return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None
    except OverflowError:
        return None


def _logged(values: Sequence[Any], num: int) -> list[float | None]:
    """Returns numbers for the log of so many rows; None for texts and whatever else is not a finite number."""
    logged = [_float(value) for value in values]
    return (logged + [None] * num)[:num]


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
        return RewardFunction(spec, bind(_load(spec), columns))


def _load(spec: str) -> Callable:
    module, name = load_named(spec, "function", "score")
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_")
        there = f": it has {', '.join(functions[:10])}" if functions else ": it defines no function"
        target = spec.rpartition(":")[0]
        raise UserError(f"{target} has no function {name!r}{did_you_mean(name, functions) or there}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{name} is {shortened(function)}, not a function")
    return function


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


def _no_function(target: str, name: str, functions: Sequence[str]) -> UserError:
    """Returns the error for a module without a function of this name, with those that it has."""
    own = [one for one in functions if not one.startswith("_")]
    there = f": it has {', '.join(sorted(own)[:10])}" if own else ": it defines no function"
    return UserError(f"{target} has no function {name!r}{did_you_mean(name, own) or there}")


def shortened(value: object) -> str:
    """Returns a value as it is written in Python, with 60 characters at most."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
