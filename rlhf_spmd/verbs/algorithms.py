"""The algorithms subcommand: the algorithms that come with the package, with their roles and calls."""

import argparse
import sys
import textwrap

from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm


def run(parsed: argparse.Namespace) -> int:
    """Prints every algorithm and, last, a line of JSON -> the exit status."""
    calls, columns = {}, table_width() or sys.maxsize
    for name in algorithm_names():
        algorithm = load_algorithm(name)
        workflow = algorithm.workflow(algorithm.options())
        roles = ", ".join(f"{role} ({algorithm.roles[role].head} head)" for role in workflow.models)
        numbers = [f"{number.column} (a number)" for number in algorithm.row_numbers.values()]
        data = ", ".join([algorithm.prompts, *algorithm.responses.values(), *numbers])
        title = f"{name}: {algorithm.title}; {roles}; data {data}"
        print(textwrap.fill(title, columns, subsequent_indent="  "))
        for call in workflow.calls:
            model, results = f"{call.model}.{call.kind}" if call.model else "compute", ", ".join(call.outputs)
            print(f"  {call.name:<26}  {model}({call.function})")
            text = f"{', '.join(call.inputs)} -> {results or f'new weights of the {call.model}'}"
            print(textwrap.fill(text, columns, initial_indent=" " * 6, subsequent_indent=" " * 8))
        for one in getattr(algorithm.module, "VARIANTS", ()):
            text = (
                f"{one.name} ({one.source}): {' '.join(f'{name}.{word}' for word in one.words.split()) or 'defaults'}"
            )
            print(textwrap.fill(text, columns, initial_indent="  ", subsequent_indent=" " * 6))
        calls[name] = [call.name for call in workflow.calls]
    print_json({"algorithms": calls, "ok": True}, parsed.json)
    return 0
