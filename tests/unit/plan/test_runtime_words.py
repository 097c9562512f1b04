"""No text in the planner or the runtime names a loss, a role or a key of an algorithm: those stand in its page alone.

What generation makes, and what is read off a model's output, are the runtime's own words
(rlhf_spmd/plan/runtime_words.py).
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_spmd.pages.algorithm import Algorithm, algorithm_names, load_algorithm
from rlhf_spmd.plan import runtime_words
from tests.unit.pages.test_algorithm import variants

ROOT = Path(__file__).parents[3]
ROOMS = ("rlhf_spmd/plan", "rlhf_spmd/runtime")
WORDS = "rlhf_spmd/plan/runtime_words.py"
# Found there when this was written; whoever mends one takes it out of here.


def words_of(algorithm: Algorithm) -> set[str]:
    """Returns names of an algorithm's roles, of the functions that its calls name and of the keys that they make."""
    found = set(algorithm.roles) | set(algorithm.data)
    for changes in variants(algorithm.options):
        for replay in (False, True):
            workflow = algorithm.workflow(algorithm.options(**changes), replay=replay)
            found |= set(workflow.shapes)
            found |= {call.function for call in workflow.calls if call.kind in ("compute", "train")}
    return found


@functools.cache
def forbidden() -> frozenset[str]:
    """Returns the words of all algorithms that come with the package, except for the runtime's own words."""
    own = {value for name, value in vars(runtime_words).items() if name.isupper() and isinstance(value, str)}
    return frozenset(set().union(*(words_of(load_algorithm(name)) for name in algorithm_names())) - own)


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and value of every string but docstrings, also where it is a part of an f-string."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _has(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def _has(node: ast.AST) -> bool:
    """Returns whether the first statement is a text alone, as a docstring is."""
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)


def problems(path: Path) -> list[str]:
    where = str(path.relative_to(ROOT))
    found = [
        (line, text) for line, text in texts_of(ast.parse(path.read_text(encoding="utf-8"))) if text in forbidden()
    ]
    return [f"{where}:{line}: {text!r}" for line, text in found]


def files() -> list[Path]:
    """Returns the files to look at. Environments speak the words of other programs, such as "reward"."""
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if str(path) != str(ROOT / WORDS)]
    return [path for path in found if path.parent.name != "environments"]


@pytest.mark.parametrize("room", ROOMS)
def test_no_text_names_what_an_algorithm_names(room):
    found = [problem for path in files() if path.is_relative_to(ROOT / room) for problem in problems(path)]
    assert found == []
