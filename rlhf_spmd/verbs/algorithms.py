"""The algorithms verb: the algorithms that come with the package, with their roles and calls."""

import argparse

from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm
from rlhf_spmd.runtime.guard.terminal import print_json


def run(parsed: argparse.Namespace) -> int:
    """Prints every algorithm and, last, a line of JSON -> the exit status."""
    found = {}
    for name in algorithm_names():
        algorithm = load_algorithm(name)
        workflow = algorithm.workflow(algorithm.options())
        roles = ", ".join(f"{role} ({algorithm.roles[role].head} head)" for role in workflow.models)
        columns = [algorithm.prompts, *algorithm.responses.values()]
        columns += [f"{number.column} (a number)" for number in algorithm.row_numbers.values()]
        print(f"{name}: {algorithm.title}; {roles}; data {', '.join(columns)}")
        for call in workflow.calls:
            does = f"{call.model}.{call.kind}({call.function})" if call.model else f"compute({call.function})"
            made = ", ".join(call.outputs) or f"new weights of the {call.model}"
            print(f"  {call.name:<22} {does:<34} {', '.join(call.inputs)} -> {made}")
        found[name] = [call.name for call in workflow.calls]
    print_json({"algorithms": found, "ok": True}, parsed.json)
    return 0
