"""The precompute subcommand on the ranks of an MPI world: compares options and program, then computes once what frozen
models say of the rows of a data set."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_spmd.command_line.outputs import refuse_existing
from rlhf_spmd.command_line.ranks import on_device, start_without_training
from rlhf_spmd.command_line.words import DEFAULT_STRATEGY, code_note, load_config
from rlhf_spmd.config import options as configs
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import every_file
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.reading import is_folder
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.program.evaluation import precompute_program
from rlhf_spmd.runtime.data.precomputed import try_to_write


def check_out(parsed: argparse.Namespace, config: configs.Config) -> None:
    """Raises UserError for an output that is not a file of its own."""
    out, rows = Path(parsed.out), every_file(configs.prompt_files(config))
    if not parsed.out.strip() or is_folder(out):
        raise UserError(f"--out {parsed.out!r} is not the name of a file; name one, e.g. --out logprobs.safetensors")
    if out.resolve() in [file.resolve() for file in rows]:
        raise UserError(f"--out {out} is the file of the rows, which would be lost; name another file")
    refuse_existing(parsed, out)


def run(world: Any, parsed: argparse.Namespace) -> None:
    """Reads and compares everything that the ranks must agree on, then computes, and writes FILE on rank 0. Raises
    UserError."""
    out = Path(parsed.out)
    with world.together("reading the configuration"):
        config = load_config(parsed)
        if config.data.precomputed_logprobs:
            raise UserError(
                "data.precomputed_logprobs names a file to read, and precompute writes one; drop the option"
            )
        strategy = load_strategy(parsed.strategy or DEFAULT_STRATEGY)
        check_out(parsed, config)
    with world.together("looking at the output file"):
        if world.rank == 0:
            try_to_write(out).unlink()  # now rather than after all passes
    config = on_device(world, parsed, config)
    make = partial(precompute_program, num_rows=config.rollout_batch)
    program = start_without_training(world, parsed, config, strategy, make, {"the file": str(out)})

    from rlhf_spmd.runtime.offline.precompute import precompute  # torch, which start_torch has prepared for

    if world.rank == 0 and (note := code_note(parsed.file)):
        print(note)
    result = precompute(config, program, world, out)
    if world.rank == 0:
        print(
            f"logprobs of {result['rows']:,} rows are written to {out}; use them with data.precomputed_logprobs={out}"
        )
        print_json(result | {"ok": True}, parsed.json)
