"""The check subcommand: a placement, its program and the proof that it cannot hang, without MPI and torch."""

import argparse
from collections.abc import Sequence

from rlhf_spmd.command_line.checks import Compiled, check_inputs, compiled, tokenizer_findings
from rlhf_spmd.command_line.words import config_text, length_note, read
from rlhf_spmd.config.options import Config, why_all_meet
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.text.program_listing import (
    chain_note,
    lag_note,
    show_evaluation,
    show_findings,
    show_packed,
    show_program,
    verdict,
)

CONFIG_HEADING = "# The configuration, which can be given back as a file: --config FILE.yaml"


def run(parsed: argparse.Namespace) -> int:
    """Prints the report -> the exit status. Raises UserError."""
    config, cluster, _ = read(parsed, required=False)
    strategy = load_strategy(parsed.strategy)
    if not 0 <= parsed.rank < cluster.num_devices:
        raise UserError(f"--rank {parsed.rank} is not in the layout {cluster} (0-{cluster.num_devices - 1})")
    programs = compiled(config, strategy, cluster)
    more = tokenizer_findings(config) + check_inputs(config, programs.program.workload.workflow, parsed.overrides)
    return report(parsed, config, programs, more, strategy.name, parsed.strategy)


def report(
    parsed: argparse.Namespace,
    config: Config,
    programs: Compiled,
    more: Sequence[Finding],
    name: str,
    strategy: str,
) -> int:
    """Prints a program, the findings about it, the verdict and, last, a line of JSON. Returns the exit status.

    more: findings besides those about the programs.
    name: of the strategy.
    strategy: the strategy as it is named in the configuration that is printed on request.
    """
    program, findings = programs.program, [*programs.findings, *more]
    columns, length = table_width(), length_note(config)
    notes = [programs.phases_note, chain_note(program, why_all_meet(config)), lag_note(program)]
    parts = [f"{name} on {program.cluster}, preset {config.title}", length, *notes]
    title = "\n".join(filter(None, parts))
    print(show_program(program, title=title, rank=getattr(parsed, "rank", 0), columns=columns))
    may_pack = any(shape and shape.has_large_matrices for shape in program.workload.models.values())
    if config.products != "linear" and may_pack and (packed := show_packed(program)):  # for generation
        print(packed)
    if programs.evaluation:
        print(show_evaluation(programs.evaluation, columns))
    if parsed.show_config:
        print(f"\n{CONFIG_HEADING}\n{config_text(parsed, config, strategy, length)}")
    if findings:
        print(show_findings(findings))
    if programs.advice:
        print(f"\n{programs.advice}")
    print(f"\n{verdict(findings)}")
    errors = sum(finding.severity == "error" for finding in findings)
    result = {
        "strategy": name,
        "layout": str(program.cluster),
        "fingerprint": program.fingerprint,
        "bytes_per_iteration": sum(transfer.num_bytes for transfer in program.transfers),
        "messages_per_iteration": sum(transfer.num_messages for transfer in program.transfers),
        "findings": list(map(str, findings)),
        "errors": errors,
        "warnings": len(findings) - errors,
        "ok": not errors,
    }
    print_json(result, parsed.json)
    return 1 if errors else 0
