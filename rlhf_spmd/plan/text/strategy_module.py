"""Writes a placement as a strategy module that people can read, change and give to `check` and `train`.

The text is formatted as by `ruff format` (lines up to 120, but for long lists of ranks), so that a plan can be
committed like any strategy.
"""

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace

from rlhf_spmd.plan.calls import is_gate
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, consecutive
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload

MAX_LINE = 120
KIND_NAMES = {"generate": "generation", "infer": "inference", "train": "training"}

_MODULE = '''"""{docstring}"""

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload

NUM_RANKS = {num_ranks}


def place(workload: Workload, cluster: Cluster) -> Placement:
    """The placement that was planned, for as many ranks as it was planned for."""
    if cluster.num_devices != NUM_RANKS:
        raise UserError(
            f"this plan is for {{NUM_RANKS}} ranks, and this cluster has {{cluster.num_devices}}; start as many, or "
            "plan again for this cluster: python -m rlhf_spmd plan"
        )
{body}
'''


def strategy_source(placement: Placement, workload: Workload, cluster: Cluster, docstring: str) -> str:
    """Returns the source of a module whose `place(workload, cluster)` returns an equal placement on any cluster with
    the same number of ranks, and raises UserError on others.

    docstring: of the module, in lines of at most 120 characters.
    """
    call = workload.workflow.placed_call
    own = {name: layout for name, layout in placement.layouts.items() if not is_gate(call(name))}  # compiling adds them
    placement = replace(placement, layouts=own)
    names = _names(placement, workload)
    lines = []
    for layout, name in names.items():
        options = [_rank_text(layout.ranks, cluster), *_options(layout, ("pp", "tp"))]
        lines += _call_lines(f"{name} = Layout.grid_of", options)
    lines.append("layouts = {")
    lines += [f'    "{call}": {names[layout]},' for call, layout in placement.layouts.items()]
    lines.append("}")
    lines += _call_lines("return Placement", ["layouts", *_options(placement, ())])
    body = "\n".join("    " + line for line in lines)
    return _MODULE.format(
        docstring=_docstring(docstring),
        num_ranks=cluster.num_devices,
        body=body,
    )


def _docstring(text: str) -> str:
    """Returns text between triple quotes, without spaces at the ends of its lines."""
    text = "\n".join(line.rstrip() for line in text.strip().split("\n")).replace("\\", "\\\\")
    text = text.replace('"""', '\\"\\"\\"')
    text = text[:-1] + '\\"' if text.endswith('"') else text
    return text + "\n" if "\n" in text else text


def _names(placement: Placement, workload: Workload) -> dict[Layout, str]:
    """Returns a variable name for every layout, from what its calls have in common."""
    users: dict[Layout, list[str]] = {}
    for name, layout in placement.layouts.items():
        users.setdefault(layout, []).append(name)
    names: dict[Layout, str] = {}
    for layout, calls in users.items():
        own = [workload.workflow.placed_call(name) for name in calls]
        kinds, models = {call.kind for call in own}, {call.model for call in own}
        wishes = ["everywhere"] if len(users) == 1 else []
        wishes += [KIND_NAMES[own[0].kind]] if len(kinds) == 1 else []
        wishes += [own[0].model] if len(models) == 1 else []
        wishes += ["shared"] if len(calls) > 1 else []
        taken = {"workload", "cluster", "layouts", *names.values()}
        names[layout] = next((name for name in wishes if name not in taken), calls[0])
    return names


def _options(record: Layout | Placement, first: Sequence[str]) -> list[str]:
    """Returns fields that differ from their defaults, as keyword arguments."""
    known = {field.name: field.default for field in fields(record) if field.init and field.default is not MISSING}
    order = [*first, *(name for name in known if name not in first)]
    return [f"{name}={_text(value)}" for name in order if (value := getattr(record, name)) != known[name]]


def _text(value: object) -> str:
    """Returns a value as source: names in double quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _rank_text(ranks: tuple[int, ...], cluster: Cluster) -> str:
    """Returns ranks as source: a slice of the cluster's ranks, or ranges and numbers."""
    runs = consecutive(ranks)
    if len(runs) == 1:
        return _slice(ranks, cluster)
    words: list[str] = []
    for run in runs:
        words += [f"*range({run[0]}, {run[-1] + 1})"] if len(run) > 2 else map(str, run)
    return f"({', '.join(words)})"


def _slice(ranks: tuple[int, ...], cluster: Cluster) -> str:
    """Returns consecutive ranks as a slice of all."""
    start, stop = str(ranks[0] or ""), str(ranks[-1] + 1) if ranks[-1] + 1 < cluster.num_devices else ""
    return f"cluster.ranks[{start}:{stop}]" if start or stop else "cluster.ranks"


def _call_lines(function: str, arguments: list[str]) -> list[str]:
    """Returns a call on one line, else with all arguments on one line, else with one line for each."""
    inner, indent = ", ".join(arguments), 4
    if len(line := f"{function}({inner})") + indent <= MAX_LINE:
        return [line]
    if len(inner) + 2 * indent <= MAX_LINE:
        return [f"{function}(", f"    {inner}", ")"]
    return [f"{function}(", *(f"    {argument}," for argument in arguments), ")"]
