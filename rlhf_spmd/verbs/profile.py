"""The profile subcommand on the ranks of an MPI world: measures this machine and writes the calibration."""

import argparse
import time
from pathlib import Path

from rlhf_spmd.command_line.outputs import check_out
from rlhf_spmd.command_line.ranks import compare_options, on_device
from rlhf_spmd.command_line.words import load_config
from rlhf_spmd.files.output import print_json
from rlhf_spmd.machines.calibration_file import write_calibration
from rlhf_spmd.runtime.profile.profile import last_line, profile, summary
from rlhf_spmd.runtime.world.devices import describe_device
from rlhf_spmd.runtime.world.world import World


def run(world: World, parsed: argparse.Namespace) -> None:
    """Measures, and writes FILE.json on rank 0. Raises UserError."""
    began = time.perf_counter()
    with world.together("reading the configuration"):
        config = load_config(parsed)
        check_out(parsed, ".json")
    config = on_device(world, parsed, config)
    compare_options(world, config)
    world.set_deadline(config.deadline_s)
    calibration = profile(world, config, name=Path(parsed.out).stem)
    with world.together("writing the calibration"):
        if world.rank == 0:
            write_calibration(calibration, parsed.out)
    if world.rank == 0:
        print(f"{summary(calibration)}\nmeasured on: {describe_device(world.computes, world.size)}")
        print_json(last_line(calibration, parsed.out, time.perf_counter() - began), parsed.json)
