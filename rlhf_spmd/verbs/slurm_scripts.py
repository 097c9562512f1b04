"""The slurm-scripts subcommand: writes the job scripts that come with the package (docs/slurm.md)."""

import argparse
import sys

from rlhf_spmd.verbs.examples import write


def run(parsed: argparse.Namespace) -> int:
    """Writes the scripts -> the exit status. Raises UserError."""
    return write("slurm", parsed, {}, f"; set RLHF_SPMD_VENV={sys.prefix} in ~/.config/rlhf_spmd/site.sh")
