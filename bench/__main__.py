"""`python -m bench NAME [options]` runs a bench; `python -m bench` lists them."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import check_known

HERE = Path(__file__).parent
ROOMS: dict[str, dict[str, str]] = tomllib.loads((HERE / "benches.toml").read_text(encoding="utf-8"))
SHARED = dict.fromkeys(
    ("demo-seeds", "demo-grpo-seeds", "demo-mixture-seeds", "demo-tools-seeds"), "seeds"
)  # modules of several benches
SHARED |= dict.fromkeys(("ahead-real", "chain-real"), "overlap_real")
MODULES = {
    name: ".".join(filter(None, ("bench", room, SHARED.get(name, name.replace("-", "_")))))
    for room, names in ROOMS.items()
    for name in names
}
USAGE = "python -m bench NAME [--help] [options]\n\nA bench writes its rows into runs/bench, or where --out says.\n"


def cost_of(name: str) -> str:
    """Returns what a bench costs, of its docstring."""
    path = HERE.parent / (MODULES[name].replace(".", "/") + ".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    found = re.search(r"Cost: (.*?)[.;:(]", " ".join(text.split()))
    return found[1] if found else ""


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"{one}: {what}\n    cost: {cost_of(one)}" for of in ROOMS.values() for one, what in of.items()]
        print("\n".join([USAGE, *lines]))
        return 0
    try:
        check_known("bench", name, MODULES, "; `python -m bench` lists them")
        module = importlib.import_module(MODULES[name])
        return module.main(sys.argv[1:] if name in SHARED else arguments)
    except (UserError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"bench {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"bench {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
