"""The messages that the train engines send in real steps against those of the forecast: at two ranks, and at four as if
they were on two nodes.

Each kind of collective and group: the same bytes, and within one call for each bucket (a tiny model fits one).
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_spmd.pages.option_tree import with_value
from rlhf_spmd.plan.cost.step_messages import step_messages
from tests.folders import write_all
from tests.mpi.test_allocations import everywhere
from tests.mpi.test_invariance import with_groups
from tests.runs import RunOf, compiled, load

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.ranks(2, 4),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
KINDS = {
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}
ROWS, MICRO_BATCH = 24, 3
STEP = "forward", "backward", "update"


class Counted(TorchDispatchMode):
    """Counts the bytes and the calls of collectives, by kind and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.calls = Counter(), Counter()

    def counting(self, method):
        """Returns a method whose collectives are counted."""

        def counted(*args, **more):
            with self:
                return method(*args, **more)

        return counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            (boxed,) = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
            key = KINDS[function.__name__.split(".")[0]], tuple(ranks)
            self.num_bytes[key] += max(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            self.calls[key] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def settings(written):
    return load(written(write_all), "ppo.epochs=1", f"mini_batch={ROWS}", f"rollout_batch={ROWS}")


@pytest.mark.parametrize(
    ("num_nodes", "options", "methods"),
    [(1, {"zero": zero}, STEP) for zero in range(4)]
    + [(1, {"zero": 2, "each": False}, STEP)]
    + [(1, {"tp": 2}, ("update",)), (1, {"pp": 2}, ("update",))]  # whose passes have messages of their own
    + [(2, {"zero": 2}, STEP)],
    ids=str,
)
def test_a_step_sends_what_the_forecast_counts(settings, world, make_group, monkeypatch, num_nodes, options, methods):
    if num_nodes != world.size // 2:
        pytest.skip("two ranks a node")
    options = dict(options)
    settings = with_value(settings, "optimizer.sum_each_pass", options.pop("each", True))
    place = everywhere(**options, micro_batch=MICRO_BATCH)
    program = compiled(settings, world.size, place, num_nodes=num_nodes)
    run = RunOf(settings, with_groups(world, program, make_group), program)
    run.iteration()  # in its first step, DeepSpeed's stage 3 learns in which order weights are read
    counted = {}
    for model, engine in run.job.models.engines.items():
        counted[model] = mode = Counted()
        for name in methods:
            monkeypatch.setattr(engine, name, mode.counting(getattr(engine, name)))
    run.iteration()
    for call in program.workload.workflow.train_calls:
        layout = program.placement.layouts[call.name]
        num_bytes, calls = Counter(), Counter()
        num_passes = ROWS // layout.dp // MICRO_BATCH
        for one in step_messages(program.workload, call.model, layout, world.rank, num_passes, program.cluster.node_of):
            num_bytes[one.kind, one.ranks] += one.num_bytes * one.number
            calls[one.kind, one.ranks] += one.number
        found = counted[call.model]
        rounding = 8 * program.workload.num_mini_batches  # of parts
        assert found.num_bytes.keys() == num_bytes.keys()
        assert all(abs(found.num_bytes[key] - num_bytes[key]) <= rounding for key in num_bytes)
        assert all(calls[key] <= found.calls[key] <= 2 * calls[key] for key in calls)
