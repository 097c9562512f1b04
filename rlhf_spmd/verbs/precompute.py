"""The precompute verb on the ranks of an MPI world: compares options and program, then computes once what frozen models
say of the rows of a data set."""

import argparse
import json
from pathlib import Path
from typing import Any

from rlhf_spmd.command_line.clusters import cluster_of
from rlhf_spmd.command_line.outputs import refuse_existing
from rlhf_spmd.command_line.words import DEFAULT_STRATEGY, code_note, load_config
from rlhf_spmd.config import options as configs
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_folder
from rlhf_spmd.machines.cluster_calibration import calibration_for, with_reserve
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.program.evaluation import precompute_program
from rlhf_spmd.plan.program.instructions import communicators
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.runtime.data.precomputed import try_to_write
from rlhf_spmd.runtime.world.devices import check_program


def check_out(parsed: argparse.Namespace, config: configs.Config) -> None:
    """Raises UserError for an output that is no file of its own."""
    out, rows = Path(parsed.out), configs.prompt_files(config)
    if not parsed.out.strip() or is_folder(out):
        raise UserError(f"--out {parsed.out!r} is no name of a file; name one, e.g. --out logprobs.safetensors")
    if out.resolve() in [Path(file).resolve() for file in rows]:
        raise UserError(f"--out {out} is the file of the rows, which would be lost; name another file")
    refuse_existing(parsed, out)


def run(world: Any, parsed: argparse.Namespace) -> None:
    """Reads and compares everything that the ranks must agree on, then computes, and writes FILE on rank 0. Raises
    UserError."""
    out = Path(parsed.out)
    with world.together("reading the configuration"):
        config = load_config(parsed)
        if config.data.precomputed_logprobs:
            raise UserError("data.precomputed_logprobs names a file that exists, and this verb writes one; drop it")
        strategy = load_strategy(parsed.strategy or DEFAULT_STRATEGY)
        check_out(parsed, config)
    with world.together("looking at the output file"):
        if world.rank == 0:
            try_to_write(out).unlink()  # now rather than after all passes
    world.use_device(config.device)
    with world.together("reading the configuration for this device"):
        config = load_config(parsed, on_gpu=world.computes.index is not None)
    with world.together("comparing the configuration"):
        options = {f"option {key}": value for key, value in configs.leaves(config).items()}
        world.agree("the start", options | {"the algorithm": config.algorithm.source, "the file": str(out)})
    with world.together("compiling the program"):
        if not config.main_folder:
            raise UserError(f"preset {config.preset} has no weights; pass --model FOLDER")
        cluster = cluster_of(world, parsed.cluster, config.device_type)
        cluster = with_reserve(cluster, config.reserve, calibration_for(None, cluster))
        training = strategy.compile(configs.make_workload(config), cluster, config.strategy)
        program = precompute_program(training, num_rows=config.rollout_batch)
        if errors := [str(finding) for finding in check(program) if finding.severity == "error"]:
            raise UserError(f"strategy {strategy.name} is refused by check: {'; '.join(errors[:3])}")
        check_program(world.computes, program)
    with world.together("comparing the program"):
        world.agree("the start", {"the program": program.fingerprint, "the strategy": strategy.source})
    world.set_deadline(config.deadline_s)
    world.start_torch(*communicators([program]))

    from rlhf_spmd.runtime.run.precompute import precompute  # torch, which start_torch has prepared for

    if world.rank == 0 and (note := code_note(parsed.file)):
        print(note)
    result = precompute(config, program, world, out)
    if world.rank == 0:
        print(
            f"logprobs of {result['rows']:,} rows are written to {out}; use them with data.precomputed_logprobs={out}"
        )
        print(json.dumps(result | {"ok": True}))
