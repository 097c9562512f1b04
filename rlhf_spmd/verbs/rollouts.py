"""The rollouts subcommand: shows and filters the samples that a run has written (rollouts.every)."""

import argparse
import json
import math
import operator
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_text
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.printing import on_one_line
from rlhf_spmd.files.reading import paths_in
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.runtime.failure.postmortem import check_is_folder
from rlhf_spmd.runtime.records.episode_text import episode_text
from rlhf_spmd.runtime.records.rollout_files import read_part

FOLDER = "rollouts"
FIRST = {"iteration": 1, "evaluation": 0}  # what people call number 0 in the files
PLACES = {"iteration": "iteration", "prompt_index": "prompt", "sample": "sample"}
TEXTS = ("prompt", "response")
WIDTH = 80
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
    "~": lambda text, pattern: re.search(pattern, text) is not None,
}
TEXT_SIGNS = ("~", "=", "!=")  # also of texts
CONDITION = re.compile(r"\s*([^<>=!~]+?)\s*(>=|<=|!=|=|>|<|~)\s*(.*?)\s*", re.DOTALL)
Row = dict[str, Any]


def run(parsed: argparse.Namespace) -> int:
    """Prints rows -> the exit status. Raises UserError."""
    folder = chosen(Path(parsed.run), parsed.iteration, parsed.evaluation)
    rows = [row for path in parts_in(folder) for row in read_part(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    conditions = [condition(text, names) for text in parsed.where]
    matching = [row for row in rows if all(holds(row) for holds in conditions)]
    if key := parsed.sort:
        check_known("column", key, names)
        sign = -1 if parsed.descending else 1
        matching.sort(key=lambda row: sign * row[key] if isinstance(row.get(key), int | float) else math.inf)
    shown = matching[: parsed.limit]
    for row in shown:
        print(json.dumps(row, default=str) if parsed.json else text_of(row, FIRST[folder.name.partition("-")[0]]))
    if not parsed.json:
        counts = f"{len(shown)} of {len(matching)} rows that match, of {len(rows)}" if matching else "no row matches"
        print(f"{counts} in {folder}")
        values = {"folder": str(folder), "rows": len(rows), "matching": len(matching), "means": means(matching)}
        print_json(values, parsed.json)
    return 0


def chosen(folder: Path, iteration: int | None, evaluation: int | None) -> Path:
    """Returns the folder of one iteration or evaluation; by default that of the last iteration. Raises UserError."""
    check_is_folder(folder)
    kind, number = ("iteration", iteration) if evaluation is None else ("evaluation", evaluation)
    paths = [path for path in paths_in(folder / FOLDER, f"{kind}-*") if path.name.partition("-")[2].isdecimal()]
    known = {int(path.name.partition("-")[2]) + FIRST[kind]: path for path in paths}
    if not known:
        other = next(
            (f"it has {path.name}, give --iteration or --evaluation" for path in paths_in(folder / FOLDER, "*-*")), ""
        )
        advice = other or "train with rollouts.every=N and eval.prompts=FILE"
        raise UserError(f"{folder} has no samples of an {kind}: {advice}")
    if number is not None and number not in known:
        raise UserError(f"--{kind} {number}: {folder} has samples of {', '.join(map(str, known))}")
    return paths[-1] if number is None else known[number]


def parts_in(folder: Path) -> list[Path]:
    """Returns the files of one iteration or evaluation."""
    return sorted([*paths_in(folder, "part-*.jsonl"), *paths_in(folder, "part-*.parquet")])


def condition(text: str, names: Iterable[str]) -> Callable[[Row], bool]:
    """Reads `scores>=0.5`, `answer=12` or `response~regular expression` as a function of a row; a row without a value
    does not match. Raises UserError."""
    parts = CONDITION.fullmatch(text)
    if parts is None:
        raise UserError(f"--where {text!r}: write NAME>=NUMBER (or > < <= = !=), or NAME~REGULAR_EXPRESSION")
    name, sign, wanted = parts.groups()
    check_known("column", name, names)
    number: float | None = None
    with suppress(ValueError):
        number = float(wanted)
    try:
        re.compile(wanted if sign == "~" else "")
    except re.error as error:
        raise UserError(f"--where {text!r}: {wanted!r} is not a regular expression ({error})") from None
    if number is None and sign not in TEXT_SIGNS:
        raise UserError(f"--where {text!r}: {wanted!r} is not a number")

    def holds(row: Row) -> bool:
        value = row.get(name)
        if isinstance(value, int | float) and number is not None and sign != "~":
            return OPERATORS[sign](value, number)
        shown = value if isinstance(value, str) else json_text(value)
        return value is not None and sign in TEXT_SIGNS and OPERATORS[sign](shown, wanted)

    return holds


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the mean of every number, over the rows that have a finite one; none where their sum is too large."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and name not in PLACES and abs(value) <= sys.float_info.max:
                values.setdefault(name, []).append(value)
    result = {}
    for name, numbers in values.items():
        with suppress(OverflowError):
            result[name] = fmean(numbers)
    return result


def text_of(row: Row, first: int = 1) -> str:
    """Returns a row for people: its numbers, its prompt, its response, other texts; tokens and numbers of tokens only
    with --json. An episode is shown by turns, in 80 columns.

    first: what the iteration with number 0 is called.
    """
    turns: Any = row.get("turns")
    is_episode = isinstance(turns, list) and bool(turns)
    is_episode = is_episode and all(isinstance(turn, dict) and "model" in turn for turn in turns)
    numbers, lines = list[str](), list[str]()
    if isinstance(row.get("iteration"), int):
        row = row | {"iteration": row["iteration"] + first}
    for name in dict.fromkeys([*PLACES, *TEXTS, *row]):
        value, title = row.get(name), PLACES.get(name) or on_one_line(name)
        if isinstance(value, int | float):
            numbers.append(f"{title} {value if name in PLACES or abs(value) > 1e300 else f'{value:.4g}'}")
        elif isinstance(value, str | dict) and not (is_episode and name in ("response", "end")):
            lines.append(f"  {title}: {on_one_line(value if isinstance(value, str) else json_text(value))}")
    lines.insert(0, ", ".join(numbers))
    if is_episode:
        lines = [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ")]
        lines.append(textwrap.indent(episode_text(turns, str(row.get("end") or ""), WIDTH - 1), " "))
    return "\n".join(lines)
