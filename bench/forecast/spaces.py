"""The search spaces of the papers' planners, as predicates of the layouts that a call may have.

ReaL's (arXiv 2406.14088) is what its code documents: whole nodes or at least four GPUs of one, activations recomputed,
no ZeRO 2 or 3, as many micro-batches as it uses. APP's (arXiv 2312.11819) is one space for each of its placements: its
strategies tie calls to each other, and a predicate sees one call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlhf_spmd.plan.calls import Call, Generate, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.search.candidates import Allowed
from rlhf_spmd.plan.search.exact import Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.meshes import EIGHTHS
from rlhf_spmd.plan.workload import Workload

NODE, LEAST_MESH, MOST_STAGES = 8, 4, 8  # devices; stages of a model on fewer than eight nodes
APART = ("reference", "reward")  # the pair of models that interleaving puts on ranks of their own


def reals_space(workload: Workload) -> Allowed:
    """Limits the layouts of a workload's calls to those that ReaL's search considers."""

    def allowed(call: Call, layout: Layout, cluster: Cluster) -> bool:
        size, width = len(layout.ranks), layout.dp * layout.tp
        num_nodes = len({cluster.node_of(rank) for rank in layout.ranks})
        whole = size == NODE * num_nodes
        if size < LEAST_MESH or not (whole or num_nodes == 1) or layout.pp > max(len(cluster.nodes), MOST_STAGES):
            return False
        if width > NODE and width % NODE:
            return False
        if not isinstance(call, Train):
            return layout.zero == 0 and workload.num_sequences >= layout.dp * layout.pp
        rows = workload.mini_batch // layout.dp
        number = 2 * layout.pp if layout.pp > 1 else 1  # of micro-batches
        return (
            width <= NODE
            and layout.recompute
            and not layout.offload
            and layout.zero == (layout.dp > 1)
            and rows >= number
            and layout.micro_batch == rows // number
        )

    return allowed


def within(spaces: Sequence[Allowed]) -> Allowed:
    """Returns the space of the layouts that lie in each of some."""
    return lambda call, layout, cluster: all(allowed(call, layout, cluster) for allowed in spaces)


SPACES: dict[str, Callable[[Workload], Allowed]] = {
    "real": reals_space,
    "on_devices": lambda workload: lambda call, layout, cluster: not layout.offload,
    "on_all_ranks": lambda workload: lambda call, layout, cluster: len(layout.ranks) == cluster.num_devices,
}


# ---- APP's -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One of APP's placements. allowed: layouts, wherever their ranks are; place: the places (Candidate.first, stop) on
    which a call may be. Together the parts are a little more than APP's code allows: frozen models and training choose
    their ZeRO stage apart, and every shadow may have several replicas."""

    name: str
    allowed: Allowed
    place: Callable[[Call, int, int], bool]

    def space(self, workload: Workload, cluster: Cluster, calibration: Calibration) -> Space | None:
        """Returns the search space of the placement; None if some call has no layout in it."""
        whole = Space.of(CallModel(Cost(calibration, workload, cluster), self.allowed))
        here = tuple(
            tuple(one for one in of if self.place(call, one.first, one.stop))
            for call, of in zip(whole.model.calls, whole.candidates, strict=True)
        )
        return Space(whole.model, here) if all(here) else None


def apps_parts(cluster: Cluster) -> Iterator[Part]:
    """Yields APP's placements: flattening, and interleaving and separation by ratio in eighths of the ranks."""
    size = cluster.num_devices
    shares = [size * eighth // EIGHTHS for eighth in range(1, EIGHTHS) if size * eighth % EIGHTHS == 0]
    yield Part("flattening", data_parallel, lambda call, first, stop: (first, stop) == (0, size))
    for share in shares:
        yield Part(f"interleaving {share}:{size - share}", data_parallel, interleaved(share, size))
    for share in shares:
        yield Part(f"separation {share}:{size - share}", megatron, separated(share))


def data_parallel(call: Call, layout: Layout, cluster: Cluster) -> bool:
    """Accepts layouts of flattening and interleaving: any ZeRO stage; only generation in slices (Hybrid Engine)."""
    return layout.pp == 1 and (layout.tp == 1 or isinstance(call, Generate)) and not layout.offload


def megatron(call: Call, layout: Layout, cluster: Cluster) -> bool:
    """Accepts layouts of separation: training in slices and stages, all else in slices."""
    if isinstance(call, Train):
        return layout.zero <= 1 and not layout.offload
    return layout.pp == 1 and layout.zero == 0 and not layout.offload


def interleaved(share: int, size: int) -> Callable[[Call, int, int], bool]:
    """Places the reference on the first `share` ranks, the reward model on the others, all else on all ranks."""

    def place(call: Call, first: int, stop: int) -> bool:
        spans = {APART[0]: (0, share), APART[1]: (share, size)}
        return (first, stop) == spans.get(call.model, (0, size))

    return place


def separated(share: int) -> Callable[[Call, int, int], bool]:
    """Places training on the first `share` ranks or a part of them, and all else on the others or a part of them."""

    def place(call: Call, first: int, stop: int) -> bool:
        return stop <= share if isinstance(call, Train) else first >= share

    return place
