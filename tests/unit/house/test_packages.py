"""The package is installed whole: setup.cfg lists every folder that has code."""

import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = {"rlhf_spmd.kernels", "rlhf_spmd.strategies"}  # by package_dir, from the top level


def test_setup_cfg_lists_every_package():
    """An editable install does not miss a package that is not listed, a wheel does."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "rlhf_spmd").rglob("*.py")}
    assert listed - ELSEWHERE == {".".join(folder.parts) for folder in folders}
