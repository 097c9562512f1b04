"""The coming-from subcommand: prints a configuration of TRL, verl or OpenRLHF as a file of options."""

import argparse

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file
from rlhf_spmd.migration.sources import read_source
from rlhf_spmd.migration.translate import translate


def run(parsed: argparse.Namespace) -> int:
    """Prints the file -> the exit status. Raises UserError."""
    if not is_file(parsed.file_there):
        raise UserError(f"{parsed.file_there}: there is no such file")
    source = read_source(parsed.file_there, parsed.overrides, parsed.program)
    print(translate(source, parsed.algorithm).text(parsed.file_there))
    return 0
