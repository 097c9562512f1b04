"""The coming-from subcommand: prints a configuration of TRL, verl or OpenRLHF as a file of options."""

import argparse
import sys

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file
from rlhf_spmd.migration.sources import read_file, read_words
from rlhf_spmd.migration.translate import translate
from rlhf_spmd.pages.other_names import PROGRAMS


def run(parsed: argparse.Namespace) -> int:
    """Prints the file -> the exit status: 1 if it is not a whole job. Raises UserError."""
    of_words = parsed.file_there in PROGRAMS
    if not of_words and not is_file(parsed.file_there):
        raise UserError(f"{parsed.file_there}: there is no such file, and no program of that name")
    if of_words:
        source = read_words(parsed.file_there, parsed.words)
    else:
        source = read_file(parsed.file_there, parsed.overrides, parsed.program)
    translation = translate(source, parsed.algorithm)
    print(translation.text("a command line" if of_words else parsed.file_there))
    if translation.lacks:
        print(
            f"rlhf_spmd: error: {translation.lacks}: complete the file, which is printed all the same", file=sys.stderr
        )
    return int(bool(translation.lacks))
