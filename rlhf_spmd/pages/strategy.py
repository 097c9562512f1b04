"""Finds a strategy module by name or file, and calls its `place()` with typed options from the command line."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.pages.option_tree import comments_of
from rlhf_spmd.pages.option_values import parse_value
from rlhf_spmd.pages.user_module import calling, load_module, modules_in, naming
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.workload import Workload

GIVEN = ("workload", "cluster")  # what place() is called with besides its options, by name


@dataclass(frozen=True, slots=True)
class Strategy:
    """A loaded strategy module. `source` is its text, kept in the run folder and compared across ranks.

    further: a dataclass whose fields are further options, which place() takes by keyword; None: there are none.
    """

    name: str
    source: str
    place: Callable[..., Placement]
    further: type | None = None

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Its options, as parameters of functions."""
        callables: list[Callable[..., Any]] = [self.place, *([self.further] if self.further else [])]
        known: dict[str, inspect.Parameter] = {}
        for part in callables:
            known |= inspect.signature(part, eval_str=True).parameters
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return {name: part for name, part in known.items() if part.kind in by_name and name not in GIVEN}

    @property
    def meanings(self) -> dict[str, str]:
        """What the docstring of place() says of its options (`NAME: meaning.`), and the comments of OPTIONS."""
        text = " ".join((inspect.getdoc(self.place) or "").split())
        parts = re.split(rf"(?:^|(?<=\. ))({'|'.join(self.parameters)}): ", text)[1:] if self.parameters else []
        told = {name: meaning.strip() for name, meaning in zip(parts[::2], parts[1::2], strict=True)}
        return told | (comments_of(self.further) if self.further else {})

    @property
    def comes_with_package(self) -> bool:
        """Whether its name stands for this source in every run."""
        return self.name in strategy_names() and load_strategy(self.name).source == self.source

    def placement(self, workload: Workload, cluster: Cluster, options: Mapping[str, Any]) -> Placement:
        """Calls place() with typed options. A UserError names this strategy."""
        with naming(f"strategy {self.name}: "):
            typed = self.typed(options)
            with calling(f"strategy {self.name}: place()", self.place, "fix the file"):
                placement = self.place(workload=workload, cluster=cluster, **typed)
            if not isinstance(placement, Placement) or not isinstance(placement.layouts, Mapping):
                text = f"place() returned {placement!r:.160}, not a Placement; use "
                raise UserError(f"{text}Placement.by_model(workload, actor=...)")
        return placement

    def compile(self, workload: Workload, cluster: Cluster, options: Mapping[str, Any]) -> Program:
        """Compiles the program of the placement. A UserError names this strategy."""
        placement = self.placement(workload, cluster, options)
        with naming(f"strategy {self.name}: "):
            return compile_program(workload, placement, cluster)

    def typed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Converts options to the types of place()'s annotations. Raises UserError for an unknown or wrong one."""
        known, typed = self.parameters, {}
        for name, value in options.items():
            check_known("option", name, known)
            annotation = known[name].annotation
            wanted = Any if annotation is inspect.Parameter.empty else annotation
            typed[name] = parse_value(wanted, value, f"strategy.{name}")
        return typed


def strategy_names() -> list[str]:
    """Returns the strategies that come with the package."""
    return modules_in("rlhf_spmd.strategies")


def load_strategy(name: str) -> Strategy:
    """Loads a strategy by name (`flattening`) or by file (`path/to/mine.py`). Raises UserError naming the error."""
    module, source = load_module("strategy", name, "rlhf_spmd.strategies", strategy_names())
    try:
        inspect.signature(module.place).bind_partial(**dict.fromkeys(GIVEN))
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"strategy {name} has no function place(workload, cluster, *, ...) ({error}); copy strategies/_template.py"
        ) from None
    further = getattr(module, "OPTIONS", None)
    return Strategy(
        Path(name).stem, source, module.place, further if isinstance(further, type) and is_dataclass(further) else None
    )
