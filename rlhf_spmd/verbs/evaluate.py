"""The evaluate subcommand on the ranks of an MPI world: compares options and program, then evaluates a model once."""

import argparse
from dataclasses import replace
from typing import Any

from rlhf_spmd.command_line.checks import evaluate_of, refuse_errors
from rlhf_spmd.command_line.ranks import cluster_of_run, compare_options, compare_programs, on_device, start_torch
from rlhf_spmd.command_line.words import DEFAULT_STRATEGY, code_note, load_config
from rlhf_spmd.config.evaluation_metrics import titled
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import KNOWN
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.reading import is_folder
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.runtime.world.devices import check_program


def run(world: Any, parsed: argparse.Namespace) -> None:
    """Reads and compares everything that the ranks must agree on, evaluates, and prints the metrics on rank 0. Raises
    UserError."""
    with world.together("reading the configuration"):
        config = load_config(parsed)
        if not config.eval.prompts:
            raise UserError(f"there are no prompts to evaluate: give eval.prompts=FILE ({KNOWN})")
        if parsed.out and is_folder(parsed.out):
            raise UserError(f"--out {parsed.out} exists already; name another folder")
        strategy = load_strategy(parsed.strategy or DEFAULT_STRATEGY)
    config = on_device(world, parsed, config)
    if parsed.out:
        config = replace(config, rollouts=replace(config.rollouts, every=config.rollouts.every or 1))
    config = replace(config, data=replace(config.data, precompute=False))  # which is for the start of a run

    compare_options(world, config)
    with world.together("compiling the program"):
        cluster, _ = cluster_of_run(world, config, parsed.cluster)
        training = strategy.compile(make_workload(config), cluster, config.strategy)
        program = evaluate_of(config)(training)
        assert program is not None, "there are prompts"
        refuse_errors(strategy.name, check(program))
        check_program(world.computes, program)
    compare_programs(world, strategy, [program])
    start_torch(world, config, [program])

    from rlhf_spmd.runtime.run.evaluation import evaluate_once  # torch, which start_torch has prepared for

    if world.rank == 0 and (note := code_note(parsed.file)):
        print(note)
    metrics = evaluate_once(config, program, world, parsed.after, parsed.out)
    if world.rank == 0:
        for name, value in titled(metrics).items():
            if isinstance(value, int | float):
                print(f"{name:24} {value:.6g}")
        if parsed.out:
            print(f"\nThe responses are in {parsed.out}: rlhf-spmd rollouts {parsed.out} --evaluation {parsed.after}")
        print_json(metrics | {"ok": True}, parsed.json)
