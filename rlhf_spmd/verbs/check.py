"""The check subcommand: a placement, its program and the proof that it cannot hang, without MPI and torch."""

import argparse

from rlhf_spmd.command_line.checks import (
    check_both,
    check_inputs,
    evaluate_of,
    packs,
    print_report,
    tokenizer_findings,
)
from rlhf_spmd.command_line.words import config_text, length_note, read_config_and_cluster
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.cluster_calibration import calibration_for, with_reserve
from rlhf_spmd.pages.strategy import load_strategy


def run(parsed: argparse.Namespace) -> int:
    """Prints the report -> the exit status. Raises UserError."""
    config, cluster = read_config_and_cluster(parsed)
    if set(cluster.device_types) != {"cpu"}:  # whose memory has no limit
        cluster = with_reserve(cluster, config.reserve, calibration_for(None, cluster))
    strategy = load_strategy(parsed.strategy)
    if not 0 <= parsed.rank < cluster.num_devices:
        raise UserError(f"--rank {parsed.rank} is not in the layout {cluster} (0-{cluster.num_devices - 1})")
    program = strategy.compile(make_workload(config), cluster, config.strategy)
    length = length_note(config)
    title = f"{strategy.name} on {cluster}, preset {config.title}"
    evaluate = evaluate_of(config)
    findings = check_both(program, evaluate(program)) + tokenizer_findings(config)
    findings += check_inputs(config, program.workload.workflow, parsed.overrides)
    text = config_text(parsed, config, parsed.strategy, length) if parsed.show_config else None
    may_pack, rank = packs(config, program), parsed.rank
    return print_report(
        program, findings, strategy.name, title, text, may_pack, rank, evaluate, length, as_json=parsed.json
    )
