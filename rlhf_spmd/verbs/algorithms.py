"""The algorithms subcommand: the algorithms that come with the package, with their roles and calls."""

import argparse
import sys
import textwrap

from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm


def run(parsed: argparse.Namespace) -> int:
    """Prints every algorithm and, last, a line of JSON -> the exit status."""
    found, columns = {}, table_width() or sys.maxsize
    for name in algorithm_names():
        algorithm = load_algorithm(name)
        workflow = algorithm.workflow(algorithm.options())
        roles = ", ".join(f"{role} ({algorithm.roles[role].head} head)" for role in workflow.models)
        data = [algorithm.prompts, *algorithm.responses.values()]
        data += [f"{number.column} (a number)" for number in algorithm.row_numbers.values()]
        title = f"{name}: {algorithm.title}; {roles}; data {', '.join(data)}"
        print(textwrap.fill(title, columns, subsequent_indent="  "))
        for call in workflow.calls:
            does = f"{call.model}.{call.kind}({call.function})" if call.model else f"compute({call.function})"
            made = ", ".join(call.outputs) or f"new weights of the {call.model}"
            print(f"  {call.name:<26}  {does}")
            text = f"{', '.join(call.inputs)} -> {made}"
            print(textwrap.fill(text, columns, initial_indent=" " * 6, subsequent_indent=" " * 8))
        found[name] = [call.name for call in workflow.calls]
    print_json({"algorithms": found, "ok": True}, parsed.json)
    return 0
