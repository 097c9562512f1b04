"""The rules for text files and for words, and how words are counted.

Of text files the encoding is given, whatever the locale, and lines end at "\\n" only: `text_problems`. A word has one
meaning (docs/glossary.md): `word_problems` finds parameters whose name says something else than their type.
tests/import_rules.py asks both about every file. `num_words` counts what people have written on a page;
tests/unit/house/test_documents.py has the limits.
"""

import ast
import re
from collections.abc import Iterable, Iterator

READERS = ("read_text", "write_text", "TextIOWrapper", "FileHandler")  # always text
# Those that take a mode -> the place of the mode among their arguments, and what it is without one.
OPENERS = {"open": (1, "r"), "fdopen": (1, "r"), "makefile": (0, "r")}
OPENERS |= dict.fromkeys(("NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"), (0, "w+b"))
OF_PROCESSES = ("text", "universal_newlines")  # True: their output is read as text
OF_DESCRIPTORS = ("os",)  # os.open opens no text

NAMES = {"Run": "run", "Run | None": "run", "Instruction": "instruction", "Step": "step"}  # type of a parameter -> name
TYPES = {"run": ("Run", "RunFiles")}  # name of a parameter -> its types

WRITTEN_BY_BENCH = re.compile(r"<!-- rows: .*?<!-- end -->", re.DOTALL)  # tables of `python -m bench tables`


def num_words(text: str) -> int:
    """Returns the words of a Markdown page as `wc -w` counts them, without the tables that are written from rows."""
    return len(WRITTEN_BY_BENCH.sub("", text).split())


def word_problems(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.arg, str]]:
    """Yields the parameters that break the rule, and how. One without an annotation may have any name."""
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            types = ast.unparse(node.annotation)
            if NAMES.get(types, node.arg) != node.arg:
                yield node, f"a parameter of the type {types} is named {NAMES[types]}, not {node.arg}"
            elif types not in TYPES.get(node.arg, (types,)):
                yield node, f"a parameter {node.arg} is of the type {' or '.join(TYPES[node.arg])}, not {types}"


def text_problems(nodes: Iterable[ast.AST], *, in_package: bool) -> Iterator[tuple[ast.Call, str]]:
    """Yields the calls that break the rule, and how. in_package: only there is `splitlines` refused."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" not in given and _opens_text(node, name, given):
            yield node, f"{name} without an encoding: say encoding=, since another locale has another one"
        if in_package and name == "splitlines":
            yield node, 'splitlines ends lines at U+0085, U+2028 and others, which are text: split at "\\n"'


def _opens_text(node: ast.Call, name: str, given: dict[str | None, ast.expr]) -> bool:
    """Returns whether this call opens, reads or writes text."""
    if name in READERS:
        return True
    if any(isinstance(given.get(word), ast.Constant) and given[word].value is True for word in OF_PROCESSES):
        return True
    if name not in OPENERS:
        return False
    place, mode = OPENERS[name]
    if isinstance(node.func, ast.Attribute) and name == "open":  # a method of a path
        place = 0
        if isinstance(node.func.value, ast.Name) and node.func.value.id in (*OF_DESCRIPTORS, "io"):
            if node.func.value.id in OF_DESCRIPTORS:
                return False
            place = 1
    said = given.get("mode") or next(iter(node.args[place : place + 1]), None)
    if isinstance(said, ast.Constant):
        mode = str(said.value)
    return "b" not in mode
