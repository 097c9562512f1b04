"""The check subcommand: a placement, its program and the proof that it cannot hang, without MPI and torch."""

import argparse
from collections.abc import Sequence

from rlhf_spmd.command_line.checks import (
    check_both,
    check_inputs,
    evaluate_of,
    first_phases,
    phases_note,
    tokenizer_findings,
)
from rlhf_spmd.command_line.fitting_strategies import Evaluate, advice
from rlhf_spmd.command_line.words import config_text, length_note, read
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.text.program_listing import show_evaluation, show_findings, show_packed, show_program, verdict

CONFIG_HEADING = "# The configuration, which can be given back as a file: --config FILE.yaml"


def run(parsed: argparse.Namespace) -> int:
    """Prints the report -> the exit status. Raises UserError."""
    config, cluster, _ = read(parsed, required=False)
    strategy = load_strategy(parsed.strategy)
    if not 0 <= parsed.rank < cluster.num_devices:
        raise UserError(f"--rank {parsed.rank} is not in the layout {cluster} (0-{cluster.num_devices - 1})")
    program = strategy.compile(make_workload(config), cluster, config.strategy)
    evaluate, phases = evaluate_of(config), first_phases(config, strategy, cluster)
    findings = check_both(program, evaluate(program), phases) + tokenizer_findings(config)
    findings += check_inputs(config, program.workload.workflow, parsed.overrides)
    return report(parsed, config, program, findings, evaluate, strategy.name, parsed.strategy, phases_note(phases))


def report(
    parsed: argparse.Namespace,
    config: Config,
    program: Program,
    findings: Sequence[Finding],
    evaluate: Evaluate,
    name: str,
    strategy: str,
    note: str = "",
) -> int:
    """Prints a program, the findings about it, the verdict and, last, a line of JSON. Returns the exit status.

    evaluate: makes the program of the run's evaluations.
    name: of the strategy.
    strategy: the strategy as it is named in the configuration that is printed on request.
    note: what the start of the run needs besides.
    """
    columns, length = table_width(), length_note(config)
    title = "\n".join(filter(None, [f"{name} on {program.cluster}, preset {config.title}", length, note]))
    print(show_program(program, title=title, rank=getattr(parsed, "rank", 0), columns=columns))
    may_pack = any(shape and shape.has_large_matrices for shape in program.workload.models.values())
    if config.products != "linear" and may_pack and (packed := show_packed(program)):  # for generation
        print(packed)
    if evaluation := evaluate(program):
        print(show_evaluation(evaluation, columns))
    if parsed.show_config:
        print(f"\n{CONFIG_HEADING}\n{config_text(parsed, config, strategy, length)}")
    if findings:
        print(show_findings(findings))
    if advised := advice(program, evaluate):
        print(f"\n{advised}")
    print(f"\n{verdict(findings)}")
    errors = sum(finding.severity == "error" for finding in findings)
    result = {
        "strategy": name,
        "layout": str(program.cluster),
        "fingerprint": program.fingerprint,
        "bytes_per_iteration": sum(transfer.num_bytes for transfer in program.transfers),
        "messages_per_iteration": sum(transfer.num_messages for transfer in program.transfers),
        "errors": errors,
        "warnings": len(findings) - errors,
        "ok": not errors,
    }
    print_json(result, parsed.json)
    return 1 if errors else 0
