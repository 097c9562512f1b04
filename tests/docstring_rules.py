"""The rules for docstrings that `make lint` checks beside those of ruff (pyproject.toml):

- the docstring of a function begins with a verb in the third person (`VERBS`), as in "Returns the ranks of a group.".
  A property is named like a value, and a test says what holds, so theirs need not;
- where a function has four parameters or more, or a class as many fields, each that the docstring explains as
  `name: meaning` has a line of its own. A docstring of `__init__` may consist of such lines alone;
- "is not a", never "is no";
- no line ends within a word, `code` or a paragraph that goes on, and none begins with a closing sign.

Command: `python -m tests.docstring_rules FOLDER ...`
"""

import ast
import re
import sys
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

WORDS = """
Accepts Adds Advises Aligns All-gathers Allocates Answers Appends Applies Asks Asserts Assigns Averages Awaits Begins
Binds Bounds Breaks Brings Broadcasts Calls Captures Carries Changes Checks Chooses Clamps Closes Collects Combines
Compares Compiles Computes Confirms Connects Converts Copies Counts Creates Cuts Deals Deletes Descends Describes
Detects Distinguishes Does Draws Drops Edits Embeds Emits Ends Enqueues Escapes Evaluates Exchanges Excludes Executes
Expands Explains Finds Finishes Forecasts Forgets Forks Formats Frees Gathers Generates Gives Goes Groups Handles
Hangs Implements Imports Improves Joins Keeps Kills Labels Launches Lets Limits Lists Loads Locks Logs Looks Lowers
Makes Maps Marks Measures Meets Merges Mixes Moves Multiplies Names Normalises Notes Opens Packs Parses Passes Places
Plans Plays Posts Prefills Prepares Prints Processes Profiles Publishes Puts Queries Queues Raises Reads Receives
Recognises Records Registers Rehearses Removes Renders Renews Reorders Replaces Reports Reserves Resets Restores
Returns Rewrites Rotates Rounds Routes Runs Samples Saves Says Scales Scores Searches Selects Sends Serves Sets
Shortens Shows Simulates Sleeps Sorts Splits Spreads Stacks Standardises Stands Starts Steps Stops Stores Submits
Summarises Sums Takes Tells Tests Thins Trains Translates Tries Turns Undoes Unlinks Updates Uses Views Visits Waits
Warns Whitens Wraps Writes Yields Zeroes
"""
VERBS = frozenset(WORDS.split())
# functions of rlhf_spmd/rewards.py whose text, docstring included, checkpoints have a hash of: a new one would end runs
HASHED = ("exact_answer", "numeric_answer", "last_number", "boxed_answer", "last_boxed", "num_words", "vader_positive")
MANY = 4  # parameters, from which on each that is explained has a line of its own
LEAST_COLUMNS = 80  # a line that is shorter, though the next word fits, is what an edit has left
FIELD = re.compile(r"\*{0,2}(\w+(?:, \*{0,2}\w+)*): \S")
INLINE_FIELD = re.compile(r"(?<=[.;:)]) \*{0,2}(\w+(?:, \*{0,2}\w+)*): (?=\S)")
COMPARED = "longer|shorter|faster|slower|larger|smaller|less|more|better|worse"
NOT_PLAIN = re.compile(rf"(?<!\bthere )\b(?:is|are) no\b(?! (?:{COMPARED})\b)", re.IGNORECASE)
ITEM = re.compile(
    r"\s|[-*|>#:\[] ?|\d+\. |\S+ = |\*{0,2}\w+(?:, \*{0,2}\w+)*: "
)  # begins a line of its own, not a continuation
TORN_WORD = re.compile(r"(?<![\s-])-$")
CLOSING = re.compile(r"[,.;:)\]}](?!\.)")


def docstring_problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line of each docstring that breaks a rule, and how it does."""
    for node in ast.walk(tree):
        if not isinstance(node, Documented) or (text := ast.get_docstring(node)) is None:
            continue
        line = node.body[0].lineno
        if isinstance(node, ast.ClassDef):
            yield from ((line, problem) for problem in _inline_fields(node.name, _fields(node), text))
        elif not isinstance(node, ast.Module):
            yield from ((line, problem) for problem in _function_problems(node, text))
        if found := NOT_PLAIN.search(re.sub(r'"[^"]*"', "", " ".join(text.split()))):
            yield line, f"say 'is not a', not '{found[0]}'"
        yield from ((line + number, problem) for number, problem in _torn_lines(text))


def _function_problems(node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> Iterator[str]:
    names = _parameters(node)
    first = text.split()[0].rstrip(",:;.")
    only_fields = node.name == "__init__" and _field_names(text) and _field_names(text) <= names
    is_free = only_fields or node.name.startswith("test_") or node.name in HASHED or _is_property(node)
    if first not in VERBS and not is_free:
        yield f"{node.name}: begin with a verb, not with '{first}' (VERBS in tests/docstring_rules.py)"
    yield from _inline_fields(node.name, names, text)


def _inline_fields(owner: str, names: set[str], text: str) -> Iterator[str]:
    """Yields a problem for each of many parameters, or fields of a class, that is explained within a line."""
    for found in INLINE_FIELD.finditer(text) if len(names) >= MANY else ():
        if set(re.findall(r"\w+", found[1])) <= names:
            yield f"{owner}: explain {found[1]} on a line of its own"


def _torn_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the number of each line, from 0, that does not begin or end where a line may, and why it may not."""
    lines = text.split("\n")
    short = set(_short_lines(lines))
    for number, (line, after) in enumerate(zip(lines, [*lines[1:], ""], strict=True)):
        if line.startswith("    "):  # code, formulas, and continuations of items
            continue
        if line.count("`") % 2:
            yield number, "code in backticks is torn"
        if CLOSING.match(line):
            yield number, "a line begins with a closing sign"
        if after and TORN_WORD.search(line):
            yield number, "a word is torn at its hyphen"
        if number in short:
            yield number, "a line is short though its paragraph goes on"


def _short_lines(lines: list[str]) -> Iterator[int]:
    """Yields the numbers of short lines in paragraphs; where most lines are short it is a list, such as of commands."""
    for is_blank, group in groupby(enumerate(lines), key=lambda one: not one[1] or one[1].startswith("    ")):
        paragraph = list(group)
        pairs = [] if is_blank else list(pairwise(paragraph))
        short = [
            number
            for (number, line), (_, after) in pairs
            if not ITEM.match(after) and len(line) + 1 + len(after.split()[0]) <= LEAST_COLUMNS and line[-1] != ":"
        ]
        if 2 * len(short) <= len(pairs) or len(pairs) == 1:
            yield from short


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = node.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {one.arg for one in found if one is not None} - {"self", "cls"}


def _fields(node: ast.ClassDef) -> set[str]:
    """Returns the fields that a class declares."""
    return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}


def _field_names(text: str) -> set[str]:
    """Returns the parameters that a docstring explains with its first words; empty if it begins with a sentence."""
    found = FIELD.match(text)
    return set(re.findall(r"\w+", found[1])) if found else set()


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [ast.unparse(one).rpartition(".")[2] for one in node.decorator_list]
    return any(name in ("property", "cached_property", "setter") for name in names)


def main(folders: list[str]) -> int:
    """Prints the problems of all Python files in some folders; returns the exit status."""
    paths = [path for folder in folders for path in (sorted(Path(folder).rglob("*.py")) or [Path(folder)])]
    found = [
        f"{path}:{line}: {problem}"
        for path in paths
        for line, problem in docstring_problems(ast.parse(path.read_text(encoding="utf-8")))
    ]
    print("\n".join(found) or f"docstrings of {len(paths)} files: no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
