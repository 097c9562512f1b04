"""The slurm-scripts subcommand: writes the job scripts that come with the package (docs/slurm.md)."""

import argparse

from rlhf_spmd.verbs.examples import write


def run(parsed: argparse.Namespace) -> int:
    """Writes the scripts -> the exit status. Raises UserError."""
    return write("slurm", parsed)
