"""RLHF as one SPMD program: a one-page strategy decides which rank does what (docs/architecture.md)."""

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
FROM_PYTHON = ("check", "find_plan", "forecast", "read", "train")  # of api.py, which is imported when it is needed

# setup.cfg installs the top-level folders kernels/ and strategies/ as sub-packages. In a source tree that is not
# installed they are found beside this folder.
if not Path(__file__).with_name("kernels").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))


def __getattr__(name: str) -> Any:
    if name in FROM_PYTHON:
        return getattr(importlib.import_module("rlhf_spmd.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
