"""RLHF as one SPMD program: a one-page strategy decides which rank does what (docs/architecture.md)."""

from pathlib import Path

__version__ = "0.1.0"

# setup.cfg installs the top-level folders kernels/ and strategies/ as sub-packages. In a source tree that is not
# installed they are found beside this folder.
if not Path(__file__).with_name("kernels").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))
