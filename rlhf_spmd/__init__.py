"""RLHF as one SPMD program: a one-page strategy decides which rank does what (docs/architecture.md)."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# setup.cfg installs the top-level folders kernels/ and strategies/ as sub-packages. In a source tree that is not
# installed they are found beside this folder.
if not Path(__file__).with_name("kernels").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))

MOVED = {  # modules of earlier versions that users import -> where they are now
    "algorithm": "pages.algorithm",
    "calibration_file": "machines.calibration_file",
    "cluster_file": "machines.cluster_file",
    "config_file": "config.file",
    "metric_aliases": "config.metric_aliases",
    "presets": "config.presets",
    "strategy": "pages.strategy",
}


class _Moved:
    """A finder of modules that is asked last, and names the new address."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == __name__ and module in MOVED:
            raise ModuleNotFoundError(f"{name} is now {__name__}.{MOVED[module]}; import it from there", name=name)


sys.meta_path.append(_Moved)
