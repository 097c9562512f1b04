"""The train subcommand on the ranks of an MPI world: compares options, devices and program among the ranks, then
trains."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_spmd.command_line.checks import check_inputs, compiled, refuse_errors
from rlhf_spmd.command_line.plans import auto
from rlhf_spmd.command_line.ranks import cluster_of_run, compare_options, compare_programs, start_torch
from rlhf_spmd.command_line.words import (
    DEFAULT_STRATEGY,
    code_note,
    load_config,
)
from rlhf_spmd.config import options as configs
from rlhf_spmd.config.model_folders import write_random_model
from rlhf_spmd.config.options import Config
from rlhf_spmd.config.role_shapes import shapes_by_role
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import progress
from rlhf_spmd.files.reading import is_file
from rlhf_spmd.pages.strategy import Strategy, load_strategy
from rlhf_spmd.plan.text.program_listing import show_program
from rlhf_spmd.runtime.checkpoint.resume import CONFIG, Resumed, read_run, refuse_other_start
from rlhf_spmd.runtime.failure.signals import TERMINATED_STATUS, Asked
from rlhf_spmd.runtime.world.devices import check_program
from rlhf_spmd.verbs.check import report

AUTO = "auto"  # of --resume
RUNS = "runs"  # the default of --runs


def run(world: Any, parsed: argparse.Namespace, asked: Asked) -> int:
    """Reads and compares everything that the ranks must agree on, then trains -> the exit status. Raises UserError."""
    with world.together("reading the configuration"):
        config, strategy, resumed = _read(parsed)
    if parsed.random_weights:
        config = _with_random_weights(world, config, Path(parsed.runs or RUNS) / "random-weights")
    world.use_device(config.device)
    if config.preset == "model" and not resumed and world.computes.index is not None:
        with world.together("reading the configuration for a GPU"):
            config = load_config(parsed, on_gpu=True)
    source = strategy.source if strategy else "auto"
    compare_options(world, config, {"the checkpoint": str(resumed.iteration if resumed else 0), "the strategy": source})
    with world.together("compiling the program"):
        path = parsed.cluster or (resumed.cluster if resumed else None)
        described = Path(path).read_text(encoding="utf-8") if path and is_file(path) else ""
        is_auto = parsed.strategy == "auto"
        cluster, calibration = cluster_of_run(world, config, path, parsed.calibration, required=is_auto)
        if strategy is None:  # it is to be planned
            assert calibration is not None, "required"
            strategy = auto(config, configs.make_workload(config), cluster, calibration)
        programs = compiled(config, strategy, cluster)
        program = programs.program
        more = []
        if parsed.dry_run and world.rank == 0:
            more = check_inputs(config, program.workload.workflow, runs=True)
        elif not parsed.dry_run:
            refuse_errors(strategy.name, programs.findings, programs.advice)
            check_program(world.computes, program)
    compare_programs(world, strategy, programs.programs)
    if parsed.dry_run:
        status = 0
        if world.rank == 0:
            stored = str(resumed.folder / "strategy.py") if resumed else ""
            named = strategy.name if strategy.comes_with_package or not resumed else stored
            status = report(parsed, config, programs, more, strategy.name, parsed.strategy or named)
        with world.together("comparing program and devices"):
            check_program(world.computes, program)
        return status
    start_torch(world, config, programs.programs)

    with progress.during("importing the training loop"):
        from rlhf_spmd.runtime.run.recorded import Origin  # torch, which start_torch has prepared for
        from rlhf_spmd.runtime.run.train import train

    result = train(
        config,
        program,
        world,
        origin=Origin(
            strategy.name,
            strategy.source,
            described,
            parsed.runs or RUNS,
            parsed.name,
            resumed,
            comes_with_package=strategy.comes_with_package,
            note=code_note(parsed.file),
        ),
        summary=show_program(program, title=f"{strategy.name} on {cluster}, preset {config.preset}", rank=0),
        evaluation=programs.evaluation,
        phases=programs.phases,
        calibration=calibration,
        asked=asked,
        as_json=parsed.json,
    )
    return TERMINATED_STATUS if result is None else 0


def _with_random_weights(world: Any, config: Config, parent: Path) -> Config:
    """Returns the options of a preset without weights with folders of random ones, which rank 0 writes. Collective;
    raises UserError for a model that has a folder."""
    roles = config.algorithm.roles
    needed = [role for role in roles if not (roles[role].judge and config.only_function)]
    shapes = {role: shape for role, shape in shapes_by_role(config.shape, roles).items() if role in needed}
    with world.together("writing models with random weights"):
        if config.main_folder or not all(shapes.values()):
            raise UserError("--random-weights is for presets without weights, such as --preset llama-7b")
        if world.rank == 0:
            for shape in {*shapes.values()}:
                write_random_model(parent / shape, shape, config.dtype)
    return replace(config, shape="", models={role: str(parent / shape) for role, shape in shapes.items()})


def _read(parsed: argparse.Namespace) -> tuple[Config, Strategy | None, Resumed | None]:
    """Returns config, strategy (None: to be planned) and the run to resume, if there is one. Raises UserError."""
    resumed, is_auto = None, parsed.resume == AUTO
    folder = _begun(parsed) if is_auto else parsed.resume
    if folder:
        for name in () if is_auto else ("config", "preset", "model", "algorithm", "runs", "name"):
            if getattr(parsed, name) is not None:
                raise UserError(f"--{name} and --resume: {parsed.resume} has its own; drop --{name}")
        other = parsed.strategy is not None
        resumed = read_run(folder, parsed.overrides, other_strategy=other, file=parsed.file if is_auto else None)
        if is_auto:
            words = parsed.file.words if parsed.file else {}
            refuse_other_start(resumed, load_config(parsed), names_model=bool(parsed.model or words.get("model")))
    config = resumed.config if resumed else load_config(parsed)
    if resumed and parsed.strategy is None:
        strategy = load_strategy(str(resumed.folder / "strategy.py"))
        return config, replace(strategy, name=resumed.strategy), resumed
    return config, None if parsed.strategy == "auto" else load_strategy(parsed.strategy or DEFAULT_STRATEGY), resumed


def _begun(parsed: argparse.Namespace) -> str | None:
    """Returns the folder of the run that `--resume auto` continues; None if there is none yet. Raises UserError."""
    if parsed.name is None:
        raise UserError("--resume auto starts the run --name, or continues it: give --name NAME")
    folder = Path(parsed.runs or RUNS) / parsed.name
    return str(folder) if is_file(folder / CONFIG) else None
