"""`python -m bench NAME [options]` runs a bench; `python -m bench` lists them."""

import importlib
import sys
import tomllib
from pathlib import Path

ROOMS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("benches.toml").read_text(encoding="utf-8"))
SHARED = dict.fromkeys(("demo-seeds", "demo-grpo-seeds", "demo-tools-seeds"), "seeds")  # modules of several benches
MODULES = {
    name: ".".join(filter(None, ("bench", room, SHARED.get(name, name.replace("-", "_")))))
    for room, names in ROOMS.items()
    for name in names
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        lines = [f"python -m bench {name:<14} {what}" for names in ROOMS.values() for name, what in names.items()]
        print("\n".join(lines))
        return 2
    name = sys.argv[1]
    return importlib.import_module(MODULES[name]).main(sys.argv[1:] if name in SHARED else sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
