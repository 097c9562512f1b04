"""The rooms of the code and their files, from the first sentences of these, for docs/architecture.md."""

import ast
import re

from bench.columns import Columns
from bench.rows import REPOSITORY

FOLDERS = ("rlhf_spmd", "kernels", "strategies")
COLUMNS: Columns = {"room": lambda row: row["room"], "file": lambda row: row["file"], "what": lambda row: row["what"]}


def rooms() -> tuple[Columns, list[dict]]:
    """Returns a row for each room, then one for each of its files."""
    rows = []
    for folder in FOLDERS:
        packages = sorted((REPOSITORY / folder).rglob("__init__.py"))
        for package in packages:
            room = package.parent.relative_to(REPOSITORY).as_posix()
            rows.append(
                {"room": f"**`{room}/`**", "file": "", "what": _first_sentence(package.read_text(encoding="utf-8"))}
            )
            for path in sorted(package.parent.glob("*.py")):
                if path != package:
                    rows.append(
                        {
                            "room": "",
                            "file": f"`{path.name}`",
                            "what": _first_sentence(path.read_text(encoding="utf-8")),
                        }
                    )
    return COLUMNS, rows


def _first_sentence(source: str) -> str:
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.?]) ", text)[0].rstrip(".:").replace("|", "\\|")
