"""The embedded default: small models, prompts, answers and pairs, so that `--preset tiny` needs no download.

bench/LOG.md says how they were made; the `made.json` of each folder holds quality measurements.
"""

from pathlib import Path

from rlhf_spmd.errors import UserError


def path_of(name: str) -> Path:
    """Returns the path of an embedded model folder or file. Raises UserError if the package lacks it."""
    folder = Path(__file__).parent
    for path in (folder / "tiny" / name, folder / name):
        if path.exists():
            return path
    raise UserError(f"the embedded {name} is not in {folder}: reinstall the package")
