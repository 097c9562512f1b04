"""The forecast subcommand: seconds, limits and memory of one strategy, by name or file, and its picture if wanted.

One process; needs neither torch nor MPI.
"""

import argparse
from pathlib import Path

from rlhf_spmd.command_line.checks import check_both, evaluate_of
from rlhf_spmd.command_line.fitting_strategies import compile_all, missing_bytes
from rlhf_spmd.command_line.outputs import check_out, save
from rlhf_spmd.command_line.words import read
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import bubble, call_s
from rlhf_spmd.plan.cost.memory import most_bytes
from rlhf_spmd.plan.text.program_listing import call_table, memory_table, show_evaluation, show_findings
from rlhf_spmd.verbs.draw import picture_of


def run(parsed: argparse.Namespace) -> int:
    """Prints the forecast and a line of JSON, draws the picture -> the exit status, 1 if the program does not fit.
    Raises UserError."""
    if parsed.out:
        check_out(parsed, ".png")
    config, cluster, calibration = read(parsed)
    assert calibration is not None, "required"
    workload = make_workload(config)
    ((name, program),) = compile_all([parsed.strategy], workload, cluster, config.strategy).items()
    made = forecast(program, calibration)
    evaluation = evaluate_of(config)(program)
    evaluation_s = forecast(evaluation, calibration).makespan_s if evaluation else None
    seconds, limit, findings = call_s(made), limits(program, calibration), check_both(program, evaluation)
    rate, idle = workload.num_sequences / made.makespan_s, abs(bubble(made))
    where = f"preset {config.title} on {cluster} ({', '.join(cluster.device_types)})"
    print(f"{name}, {where}, seconds by calibration {calibration.name}")
    print(f"  {made.makespan_s:.4g} s per iteration, {rate:.4g} sequences/s, bubble {idle:.0%}")
    if program.chains:
        print("  Iterations overlap: one begins on some ranks while others still train in the one before")
    columns = table_width()
    by_call, by_rank = call_table(program, seconds, limit, columns), memory_table(program, columns)
    print(f"\nSeconds of each call in an iteration, and what limits it\n{by_call}")
    print(f"\nMemory per rank: resident, and what calls need besides at their peak\n{by_rank}")
    if evaluation:
        print(show_evaluation(evaluation, columns))
        when = f"before training, every {config.eval.every} iterations and at the end"
        print(f"  {evaluation_s:.4g} s per evaluation ({when}), not included in the seconds per iteration")
    print(show_findings(findings) if findings else "")
    if parsed.out:
        stem = Path(name).stem
        by = f"forecast with calibration {calibration.name}"
        picture = picture_of({stem: program}, {stem: made}, title=f"{stem}, {where}", maps=True, by=by)
        save(Path(parsed.out), picture.save)
        print(f"The picture is in {parsed.out}")
    fits = not any(finding.severity == "error" for finding in findings)
    calls = {call: {"seconds": seconds[call], "limit": limit[call]} for call in seconds}
    result = {
        "strategy": name,
        "layout": str(cluster),
        "preset": config.preset,
        "calibration": calibration.name,
        "forecast_s": made.makespan_s,
        "samples_per_s": rate,
        "bubble": idle,
        "chain": program.chains,
        "evaluation_s": evaluation_s,
        "calls": calls,
        "peak_bytes": most_bytes(program),
        "missing_bytes": max(0, missing_bytes(program, evaluation)),
        "out": parsed.out,
        "ok": fits,
    }
    print_json(result, parsed.json)
    return 0 if fits else 1
