"""ReaL's searched plans: what this planner finds for the same models, GPUs and lengths, against the published seconds.

The plans that ReaL found were not published, so their rows test the planner: its plan is forecast, and so is
ReaL-Heuristic for the same row; the ratio of the two is compared with the published ratio. Rows are forecast in the
search space that the code of ReaL documents (arXiv 2406.14088 and its repository): whole nodes or at least four GPUs
of one, activations recomputed, no ZeRO 2 or 3, and as many micro-batches as it uses. The plan in the whole space of
this planner stands beside it; it may be faster, because ReaL cannot run it.
"""

from collections.abc import Mapping

from bench.forecast.validate_systems import fastest
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.search.candidates import Allowed, anything
from rlhf_spmd.plan.search.planner import Plan, search
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.plan.workload import Workload

METHOD = "two_phase"  # whose result does not depend on the speed of this machine; that of exact does
BASE = "ReaL-Heuristic"  # the system that its ratio is to
NODE, LEAST_MESH, MOST_STAGES = 8, 4, 8  # devices; stages of a model on fewer than eight nodes


def reals_space(workload: Workload) -> Allowed:
    """The layouts that ReaL's search considers for the calls of a workload."""

    def allowed(call: Call, layout: Layout, cluster: Cluster) -> bool:
        size, width = len(layout.ranks), layout.dp * layout.tp
        num_nodes = len({cluster.node_of(rank) for rank in layout.ranks})
        whole = size == NODE * num_nodes
        if size < LEAST_MESH or not (whole or num_nodes == 1) or layout.pp > max(len(cluster.nodes), MOST_STAGES):
            return False
        if width > NODE and width % NODE:
            return False
        if call.kind != "train":
            return layout.zero == 0 and workload.num_sequences >= layout.dp * layout.pp
        rows = workload.mini_batch // layout.dp
        number = 2 * layout.pp if layout.pp > 1 else 1  # of micro-batches
        return (
            width <= NODE
            and layout.recompute
            and layout.zero == (layout.dp > 1)
            and rows >= number
            and layout.micro_batch == rows // number
        )

    return allowed


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
