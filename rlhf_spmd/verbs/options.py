"""The options subcommand: the KEY=VALUE options of a run, with their defaults and meanings."""

import argparse

from rlhf_spmd.command_line.help import described, matching, of_page
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.pages.strategy import load_strategy


def run(parsed: argparse.Namespace) -> int:
    """Prints the options that match and, last, a line of JSON -> the exit status. Raises UserError if none does."""
    algorithm, strategy = load_algorithm(parsed.algorithm or "ppo"), load_strategy(parsed.strategy)
    texts = matching(described(of_page(algorithm), strategy), parsed.pattern)
    if not texts:
        where = f"{algorithm.name} and {strategy.name}"
        raise UserError(f"no option of {where} has {parsed.pattern!r} in its name or meaning")
    for key, one in texts.items():
        print(one.lines(key))
    print_json({"options": {key: one._asdict() for key, one in texts.items()}, "ok": True}, parsed.json)
    return 0
