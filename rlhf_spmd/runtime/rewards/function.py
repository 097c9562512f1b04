"""Reward functions: Python callables such as `reward(prompts, responses) -> list of numbers`, named in the config.

styles.py binds them, by the names of their parameters. A bad score would corrupt training silently, so every
result is checked. An error in the user's code is reported in one message with the function, the prompt, the
exception and its line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file
from rlhf_spmd.model.config import naming
from rlhf_spmd.pages.named_objects import extend_import_path, load_named
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.pages.user_module import described
from rlhf_spmd.runtime.data.readers import FLOAT32_MAX
from rlhf_spmd.runtime.failure.signals import pass_on_interrupt
from rlhf_spmd.runtime.rewards.styles import Bound, Result, Scored, bind

SEARCH_S = 10.0  # after which the search for the response on which a function raises stops


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
        assert len(rows.prompts) == len(rows.responses), (len(rows.prompts), len(rows.responses))
        if not len(rows):
            return [], {}  # a rank without data does not call the user's code
        try:
            result = self._call(rows)
        except UserError as error:  # it already states the fix, e.g. a package to install
            text = str(error)
            named = f"reward function {self.name} {text.removeprefix('it ')}"
            raise UserError(named if text.startswith("it ") else text) from error
        except BaseException as error:
            pass_on_interrupt(error)
            raise UserError(self._raised(error, rows)) from error
        scores = self._as_list(result.scores, len(rows))
        found = [self._as_float(rows.first + index, score, rows.prompts[index]) for index, score in enumerate(scores)]
        logs = {f"{self.label}_{name}": self._logged(values, rows) for name, values in result.logs.items()}
        return found, {name: values for name, values in logs.items() if any(one is not None for one in values)}

    def _call(self, rows: Scored) -> Result:
        return self.bound.call(rows)

    def _logged(self, values: Sequence[Any], rows: Scored) -> list[float | None]:
        """Returns numbers for the log; None for texts and whatever else is not a finite number."""
        numeric = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
        good = [_finite(one) if isinstance(one, numbers.Real) else None for one in numeric]
        return (good + [None] * len(rows))[: len(rows)]

    def _as_list(self, scores: Any, num_responses: int) -> list[Any]:
        if hasattr(scores, "tolist"):  # a numpy array or a torch tensor
            scores = scores.tolist()
        if not isinstance(scores, list | tuple):
            hint = ": finish it with list(...)" if inspect.isgenerator(scores) else ""
            raise UserError(
                f"reward function {self.name} returned a {type(scores).__name__}, "
                f"not a list with one number per response{hint}"
            )
        if len(scores) != num_responses:
            raise UserError(
                f"reward function {self.name} returned {len(scores)} scores for {num_responses} responses: "
                "return one number per response, in order"
            )
        return list(scores)

    def _as_float(self, number: int, score: Any, prompt: str) -> float | None:
        if score is None:
            return None
        value = score.item() if getattr(score, "ndim", None) == 0 else score  # a numpy or torch scalar
        where = f"reward function {self.name} returned {shortened(score)} for response {number}"
        where += f" (prompt {shortened(prompt)})"
        if not isinstance(value, numbers.Real):
            raise UserError(f"{where}, which is not a number: return a finite float for every response")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
            why = "is too large for float32" if abs(value) > FLOAT32_MAX and math.isfinite(value) else "is not finite"
            raise UserError(f"{where}, which {why}: return a finite float, also for an empty response")
        return value

    def _raised(self, error: BaseException, rows: Scored) -> str:
        return (
            f"reward function {self.name} raised {described(error, _code_of(self.bound.function))} "
            f"{self._where(error, rows)}: fix the function, or return a score for such a response"
        )

    def _where(self, error: BaseException, rows: Scored) -> str:
        """Returns the first response that raises the same type of error, also alone, in words; else the batch. Halves
        of the rows are tried, so the function is called for about as many responses as there are."""
        first, stop, end_s = 0, len(rows), time.perf_counter() + SEARCH_S
        batch = f"on a batch of {stop} responses"
        while stop - first > 1:
            if time.perf_counter() > end_s:
                return f"{batch} (the search for the one stopped after {SEARCH_S:g} s)"
            middle = (first + stop) // 2
            first, stop = (first, middle) if self._raises(error, rows.part(first, middle)) else (middle, stop)
        if len(rows) > 1 and not self._raises(error, rows.part(first, stop)):
            return batch
        where = f"on response {rows.first + first} {shortened(rows.responses[first])}"
        return f"{where} (prompt {shortened(rows.prompts[first])})"

    def _raises(self, error: BaseException, rows: Scored) -> bool:
        """Returns whether the function raises the same type of error on these rows."""
        try:
            self._call(rows)
        except BaseException as again:
            pass_on_interrupt(again)
            return type(again) is type(error)
        return False


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


def _names_in(code: CodeType) -> list[str]:
    """Returns the names that a function uses, also in the functions and comprehensions inside it."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [*code.co_names, *(name for one in inner for name in _names_in(one))]


def package_source(spec: str) -> str:
    """Returns what a function of the package does: its text and what it uses of its module; empty if there is none."""
    target, _, name = spec.rpartition(":")
    try:
        module = importlib.import_module(target)
    except ImportError:
        return ""
    names, parts = [name], {}
    for one in names:
        value = getattr(module, one, None)
        if inspect.isfunction(value) and value.__module__ == target and one not in parts:
            parts[one] = inspect.getsource(value)
            names += _names_in(value.__code__)
        elif one not in parts and isinstance(value, str | int | float | tuple | re.Pattern):
            parts[one] = repr(value)
    return "\n".join(f"{one} {parts[one]}" for one in sorted(parts)) if name in parts else ""


def _finite(value: numbers.Real) -> float | None:
    """Returns a number as a float; None if it is not finite, or too large."""
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def shortened(value: object) -> str:
    """Returns a value as it is written in Python, with 60 characters at most."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
