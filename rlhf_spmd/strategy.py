"""Finds a strategy module by name or file, and calls its `place()` with typed options from the command line."""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlhf_spmd.strategies
from rlhf_spmd.config import parse_value
from rlhf_spmd.errors import UserError
from rlhf_spmd.option_names import did_you_mean
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.python_file import import_file


@dataclass(frozen=True, slots=True)
class Strategy:
    """A loaded strategy module. `source` is its text, kept in the run folder and compared across ranks."""

    name: str
    source: str
    place: Callable[..., Placement]

    def compile(self, workload: Workload, cluster: Cluster, options: Mapping[str, Any]) -> Program:
        """place() with typed options, then the program. A UserError names this strategy."""
        try:
            placement = self.place(workload, cluster, **self.typed(options))
        except UserError as error:
            raise UserError(f"strategy {self.name}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UserError(f"strategy {self.name}: place() raised {type(error).__name__}: {error}") from error
        if not isinstance(placement, Placement) or not isinstance(placement.layouts, Mapping):
            text = f"place() returned {placement!r:.80}, not a Placement; use Placement.by_model(workload, actor=...)"
            raise UserError(f"strategy {self.name}: {text}")
        try:
            return compile_program(workload, placement, cluster)
        except UserError as error:
            raise UserError(f"strategy {self.name}: {error}") from error

    def typed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as place()'s annotations want them."""
        parameters = list(inspect.signature(self.place, eval_str=True).parameters.values())[2:]  # workload, cluster
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        known = {p.name: p for p in parameters if p.kind in by_name}
        typed = {}
        for name, value in options.items():
            if name not in known:
                hint = did_you_mean(name, known, "strategy.")
                raise UserError(f"it has no option {name!r}{hint}; options: {', '.join(known) or 'none'}")
            annotation = known[name].annotation
            typed[name] = parse_value(
                Any if annotation is inspect.Parameter.empty else annotation, value, f"strategy.{name}"
            )
        return typed


def names() -> list[str]:
    """The strategies that come with the package."""
    found = [module.name for module in pkgutil.iter_modules(rlhf_spmd.strategies.__path__)]
    return sorted(name for name in found if not name.startswith("_"))


def load_strategy(name: str) -> Strategy:
    """By name (`flattening`) or by file (`path/to/mine.py`). Raises UserError naming what is wrong with it."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"strategy file {name} does not exist")
        try:
            module = import_file(path, f"_strategy_{path.stem}")
        except (Exception, SystemExit) as error:
            raise UserError(f"strategy file {name} cannot be imported: {type(error).__name__}: {error}") from error
        title = path.stem
    else:
        if name not in names():
            hint, known = did_you_mean(name, names()), ", ".join(names())
            raise UserError(f"unknown strategy {name!r}{hint}; known: {known}, or give a file path/to/mine.py")
        module = importlib.import_module(f"rlhf_spmd.strategies.{name}")
        path, title = Path(module.__file__), name
    if not callable(getattr(module, "place", None)):
        raise UserError(
            f"strategy {name} has no function place(workload, cluster, *, ...); copy strategies/_template.py"
        )
    return Strategy(title, importlib.util.decode_source(path.read_bytes()), module.place)
