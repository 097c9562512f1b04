"""The rollouts subcommand: shows and filters the samples that a run has written (rollouts.every)."""

import argparse
import json
import operator
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_text
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.printing import on_one_line, printable
from rlhf_spmd.files.reading import paths_in
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.runtime.failure.postmortem import check_is_folder
from rlhf_spmd.runtime.records.episode_text import episode_text
from rlhf_spmd.runtime.records.rollout_files import read_part

FOLDER = "rollouts"
FIRST = {"iteration": 1, "evaluation": 0}  # what people call number 0 in the files
PLACES = {"iteration": "iteration", "prompt_index": "prompt", "sample": "sample"}
END, WIDTH = "end", 80
PLACE, TEXTS = tuple(PLACES), ("prompt", "response")
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITION = re.compile(r"\s*([^<>=!~]+?)\s*(>=|<=|!=|=|>|<|~)\s*(.*?)\s*", re.DOTALL)
Row = dict[str, Any]


def run(parsed: argparse.Namespace) -> int:
    """Prints rows -> the exit status. Raises UserError."""
    folder = chosen(Path(parsed.run), parsed.iteration, parsed.evaluation)
    rows = list(read(folder))
    conditions = [condition(text, rows) for text in parsed.where]
    found = [row for row in rows if all(holds(row) for holds in conditions)]
    if parsed.sort:
        key = parsed.sort
        _known(f"--sort {key}", key, rows)
        numbers = [row for row in found if isinstance(row.get(key), int | float)]
        others = [row for row in found if not isinstance(row.get(key), int | float)]
        found = sorted(numbers, key=lambda row: row[key], reverse=parsed.descending) + others
    shown = found[: parsed.limit] if parsed.limit else found
    if parsed.json:
        is_unicode = "utf" in (sys.stdout.encoding or "").lower()
        for row in shown:
            text = json_text(row)
            print(text if is_unicode and text == printable(text) else json.dumps(row, default=str))
        return 0
    first = FIRST[folder.name.partition("-")[0]]
    for row in shown:
        print(text_of(row, first))
    print(f"{len(shown)} of {len(found)} rows that match, of {len(rows)} in {folder}")
    result = {"folder": str(folder), "rows": len(rows), "matching": len(found), "means": means(found)}
    print_json(result, parsed.json)
    return 0


def chosen(folder: Path, iteration: int | None, evaluation: int | None) -> Path:
    """Returns the folder of one iteration or evaluation; by default that of the last iteration. Raises UserError."""
    check_is_folder(folder)
    kind, number = ("iteration", iteration) if evaluation is None else ("evaluation", evaluation)
    known = [path for path in paths_in(folder / FOLDER, f"{kind}-*") if path.name.partition("-")[2].isdecimal()]
    if not known:
        raise UserError(
            f"{folder} has no samples of an {kind} in {FOLDER}/: train with rollouts.every=N"
            + (" and eval.prompts=FILE" if kind == "evaluation" else "")
        )
    if number is None:
        return known[-1]
    found = folder / FOLDER / f"{kind}-{number - FIRST[kind]:06d}"
    if found not in known:
        numbers = ", ".join(str(int(path.name.partition("-")[2]) + FIRST[kind]) for path in known)
        raise UserError(f"--{kind} {number}: {folder} has samples of {numbers}")
    return found


def read(folder: Path) -> Iterator[Row]:
    """Yields the rows of all parts. Raises UserError."""
    for path in sorted([*paths_in(folder, "part-*.jsonl"), *paths_in(folder, "part-*.parquet")]):
        yield from read_part(path)


def condition(text: str, rows: Sequence[Row]) -> Callable[[Row], bool]:
    """Reads `scores>=0.5`, `answer=12` or `response~regular expression` as a function of a row; a row without a value
    does not match. Raises UserError."""
    parts = CONDITION.fullmatch(text)
    if parts is None:
        raise UserError(f"--where {text!r}: write NAME>=NUMBER (or > < <= = !=), or NAME~REGULAR_EXPRESSION")
    name, sign, wanted = parts.groups()
    _known(f"--where {text!r}", name, rows)
    if sign == "~":
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise UserError(f"--where {text!r}: {wanted!r} is not a regular expression ({error})") from None
        return lambda row: row.get(name) is not None and pattern.search(str(row[name])) is not None
    number = _number(wanted)
    if number is None and sign not in ("=", "!="):
        raise UserError(f"--where {text!r}: {wanted!r} is not a number")

    def holds(row: Row) -> bool:
        value = row.get(name)
        if number is not None and isinstance(value, int | float):
            return OPERATORS[sign](value, number)
        text = json_text(value) if isinstance(value, bool) else str(value)
        return value is not None and sign in ("=", "!=") and OPERATORS[sign](text, wanted)

    return holds


def _number(text: str) -> int | float | None:
    """Reads a text as a number, whole numbers exactly; None if it is not one."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def _known(where: str, name: str, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if rows and name not in names:
        raise UserError(f"{where}: there is no {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the mean of every number, over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and name not in PLACE and abs(value) <= sys.float_info.max:
                values.setdefault(name, []).append(float(value))
    found = {}
    for name, some in values.items():
        with suppress(OverflowError):  # the sum may be beyond the largest number
            found[name] = fmean(some)
    return found


def text_of(row: Row, first: int = 1) -> str:
    """Returns a row for people: its numbers, its prompt, its response, other texts; tokens and numbers of tokens only
    with --json. An episode is shown by turns, in 80 columns.

    first: what the iteration with number 0 is called.
    """
    if isinstance(row.get("iteration"), int):
        row = row | {"iteration": row["iteration"] + first}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in PLACE}
    place = ", ".join(f"{name} {row[key]}" for key, name in PLACES.items() if key in row)
    shown = {name: f"{value:.4g}" if abs(value) <= 1e300 else str(value) for name, value in numbers.items()}
    lines = [place + "".join(f", {on_one_line(name)} {text}" for name, text in shown.items())]
    is_episode = _is_episode(row)
    own = [name for name in TEXTS if name in row and not (is_episode and name == "response")]
    others = [name for name, value in row.items() if isinstance(value, str | dict) and name not in (*TEXTS, END)]
    if is_episode:
        lines = textwrap.wrap(lines[0], WIDTH, subsequent_indent="  ")
    for name in (*own, *others):
        value = row[name] if isinstance(row[name], str) else json_text(row[name])
        line = f"  {on_one_line(name)}: {on_one_line(value)}"
        lines += textwrap.wrap(line, WIDTH, subsequent_indent="    ") if is_episode else [line]
    if is_episode:
        lines.append(textwrap.indent(episode_text(row["turns"], str(row.get(END) or ""), WIDTH - 1), " "))
    return "\n".join(lines)


def _is_episode(row: Row) -> bool:
    """Returns whether a run has written the turns of an episode into this row."""
    turns = row.get("turns")
    return isinstance(turns, list) and bool(turns) and all(isinstance(one, dict) and "model" in one for one in turns)
