"""ReaL's searched plans: what this planner finds for the same models, GPUs and lengths, against the published seconds.

The plans that ReaL found were not published, so their rows test the planner: its plan is forecast, and so is
ReaL-Heuristic for the same row; the ratio of the two is compared with the published ratio. Rows are forecast in the
search space that the code of ReaL documents (spaces.py). The plan in the whole space of this planner stands beside it;
it may be faster, because ReaL cannot run it.
"""

from collections.abc import Mapping

from bench.forecast.spaces import reals_space
from bench.forecast.validate_systems import fastest
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.search.candidates import Allowed, anything
from rlhf_spmd.plan.search.planner import Plan, search
from rlhf_spmd.plan.workload import Workload

METHOD = "two_phase"  # all rows were made with it
BASE = "ReaL-Heuristic"  # the system that its ratio is to


def searched(workload: Workload, cluster: Cluster, calibration: Calibration, allowed: Allowed = anything) -> Plan:
    """The planner's best plan in a space. Raises UserError if none fits."""
    return search(workload, cluster, calibration, method=METHOD, keep=5, allowed=allowed).plans[0]


def row_of(
    workload: Workload, cluster: Cluster, calibration: Calibration, *, own_space: bool
) -> dict[str, float | str]:
    """What the planner finds, and the heuristic plan of the same row. own_space: search this planner's, too."""
    plan = searched(workload, cluster, calibration, reals_space(workload))
    base, _ = fastest(BASE, workload, cluster, calibration)
    found = {
        "forecast_s": plan.forecast.makespan_s,
        "plan": text_of(plan.placement),
        "base_s": base.makespan_s,
        "ratio": base.makespan_s / plan.forecast.makespan_s,
    }
    if own_space:
        found["own_space_s"] = searched(workload, cluster, calibration).forecast.makespan_s
    return found


def text_of(placement: Placement) -> str:
    """Each call's layout as dp x pp x tp, and how many ranks that is from which one on."""
    return ", ".join(
        f"{name} {layout.dp}x{layout.pp}x{layout.tp} at {min(layout.ranks)}"
        for name, layout in placement.layouts.items()
    )


def published_ratio(row: Mapping[str, str], rows: list[dict[str, str]], setting: tuple[str, ...]) -> float | None:
    """How many times faster the searched plan of a row was than the heuristic one; None without a row of that. setting:
    the columns that both have in common."""
    for other in rows:
        if other["system"] == BASE and all(other[name] == row[name] for name in setting):
            return float(other["sec_per_iter"]) / float(row["sec_per_iter"])
    return None
