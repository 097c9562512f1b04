"""`python -m tools NAME [options]` runs a tool of this repository; `python -m tools` lists them."""

import importlib
import sys

TOOLS = {
    "pages": {
        "pages": "docs/options.md, the rooms in docs/architecture.md and the tables of docs/coming_from_*.md, from the "
        "code",
        "walk": "docs/one_iteration.md: the functions that lead from main to the model, as a run of the demo has them",
    },
    "pictures": {
        "pictures": "the pictures of the documents, drawn anew from bench/results/ and from what the code computes",
    },
    "unchanged": {
        "unchanged": "does the working tree compute, to the bit, what an earlier commit computed? for refactorings",
    },
    "planted": {
        "planted": "do tests find what would make a run silently wrong? plants faults in copies of the sources",
    },
    "calibrations": {
        "fit-published": "five constants of ReaL's runtime, fitted to its published runs, and what hangs on them",
        "derive": "the calibrations derived from data sheets and counted kernels, written anew",
    },
    "embedded": {
        "demo-pipeline": "SFT, a reward model, PPO and DPO on the embedded models, and their curves on one page",
        "make-mixture": "rlhf_spmd/embedded/mixture: a mixture of experts that often forgets to carry",
        "rank-pairs": "pairs of a file of samples, ranked by the grammar, for reward_model and dpo",
    },
}
MODULES = {name: f"tools.{room}.{name.replace('-', '_')}" for room, names in TOOLS.items() for name in names}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        lines = [f"python -m tools {name:<15} {what}" for names in TOOLS.values() for name, what in names.items()]
        print("\n".join(lines))
        return 2
    return importlib.import_module(MODULES[sys.argv[1]]).main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
