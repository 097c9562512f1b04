"""The budget of code: statements and nodes of every room, and names that say nothing. tests/size_budget.toml has the
numbers, which may only fall; a larger one needs a page in docs/decisions.

Statements are ast.stmt, nodes ast.stmt and ast.expr; docstrings count as neither. Lowering it after a change:
python -m tests.size_rules > tests/size_budget.toml
"""

import ast
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BUDGET = REPOSITORY / "tests" / "size_budget.toml"
TREES = ("rlhf_spmd", "kernels", "strategies", "bench", "tests", "tools")
MOST_LINES = 500  # of a file
VAGUE = ("one", "found", "own", "mine", "what")  # names of values that say nothing, unless for a line or two
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def size_of(tree: ast.AST) -> tuple[int, int]:
    """Returns the statements and the nodes of a module."""
    nodes = list(ast.walk(tree))
    documented = sum(isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None for node in nodes)
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    expressions = sum(isinstance(node, ast.expr) for node in nodes)
    return statements - documented, statements + expressions - 2 * documented


def room_of(path: Path) -> str:
    """Returns the folder of a file of the package; of other files its first folder."""
    return path.parent.as_posix() if path.parts[0] == "rlhf_spmd" else path.parts[0]


def measure(root: Path) -> dict[str, dict[str, list[int] | int]]:
    """Returns statements and nodes by room, assignments by vague name (in the package), and lines of long files."""
    rooms: dict[str, list[int]] = {}
    names: Counter[str] = Counter(dict.fromkeys(VAGUE, 0))
    long: dict[str, int] = {}
    for path in sorted(path.relative_to(root) for name in TREES for path in (root / name).rglob("*.py")):
        text = (root / path).read_text(encoding="utf-8")
        tree = ast.parse(text)
        room = rooms.setdefault(room_of(path), [0, 0])
        room[:] = (before + size for before, size in zip(room, size_of(tree), strict=True))
        if (lines := text.count("\n")) > MOST_LINES:
            long[path.as_posix()] = lines
        if path.parts[0] == "rlhf_spmd":
            stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
            names.update(node.id for node in stored if node.id in VAGUE)
    return {"rooms": rooms, "names": names, "long": long}


if __name__ == "__main__":
    for table, numbers in measure(REPOSITORY).items():
        print(f"[{table}]", *(f'"{name}" = {number}' for name, number in sorted(numbers.items())), "", sep="\n")
