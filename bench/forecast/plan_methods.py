"""The planner's methods side by side, from 8 to 1,024 devices: seconds of the search, and how far from the optimum.

Models grow with the devices as in ReaL's experiments (arXiv 2406.14088): 7B on 8, 13B on 16, 33B on 32, 70B from 64 on.
An iteration has 512 responses, as theirs has with the shortest ones, and from 128 devices on four for each. The
distance is that of the best choice, in the call-level model that all methods share, from the exact optimum; where
`exact` has spent LONG_BUDGET, from the best choice of all methods. APP's space (spaces.py) is searched exactly,
part by part, so what it lacks is due to the space.

Seconds are those of a processor, so that other work on the machine does not count.
"""

import time
from collections.abc import Iterator, Sequence

from bench.forecast.markov_chain import mcmc
from bench.forecast.spaces import apps_parts
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Best, Choice, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.planner import BUDGET, choose, simulated
from rlhf_spmd.plan.workload import Workload

DEVICE = "a100-80g"
FAMILY = (  # preset, layout
    *(("llama-7b", "1x8"), ("llama-13b", "2x8"), ("llama-33b", "4x8")),
    *(("llama-70b", f"{nodes}x8") for nodes in (8, 16, 32, 64, 128)),
)
ROWS, ROWS_OF_DEVICE, MINI_BATCHES = 512, 4, 4  # at least, for each device, and parts of an iteration
EXACT, TWO_PHASE, MCMC, APP = METHODS = ("exact", "two_phase", "mcmc", "APP's space")
LONG_BUDGET = 6 * BUDGET  # of the exact search; APP's parts share it
KEEP = 2  # choices that are simulated
MOST_SIMULATED = 256  # devices: of 1,024 each program takes ten seconds, and those that stream are tried in ten ways
TRACED = "8x8"  # the layout of which every improvement of a method is in its row


class Recorded(Best):
    """Also records every improvement: (processor seconds since the beginning, seconds of an iteration)."""

    def __init__(self, keep: int):
        super().__init__(keep)
        self.began_s, self.steps = time.process_time(), []

    def offer(self, seconds: float, chosen: Choice) -> None:
        if seconds < self.seconds:
            self.steps.append((time.process_time() - self.began_s, seconds))
        super().offer(seconds, chosen)


def setting(preset: str, layout: str) -> tuple[Workload, Cluster]:
    """The workload and the devices of a row."""
    cluster = Cluster.parse(layout, DEVICE)
    rows = max(ROWS, ROWS_OF_DEVICE * cluster.num_devices)
    words = (f"rollout_batch={rows}", f"mini_batch={rows // MINI_BATCHES}")
    return make_workload(presets.load(preset, words)), cluster


def searched(
    method: str, workload: Workload, cluster: Cluster, calibration: Calibration
) -> tuple[Space, Recorded, float | None]:
    """A space, the best choices of a method, and the gap, None if the method proves nothing."""
    best = Recorded(KEEP)
    if method != APP:
        space = Space.of(CallModel(Cost(calibration, workload, cluster)))
        if method == MCMC:
            mcmc(space, best, seed=0)
            return space, best, None
        _, gap = choose(space, method, best, Budget(LONG_BUDGET))
        return space, best, gap
    spaces = [part.space(workload, cluster, calibration) for part in apps_parts(cluster)]
    spaces = [space for space in spaces if space is not None]
    share = LONG_BUDGET // len(spaces)
    gaps = [choose(space, EXACT, best, Budget(share))[1] for space in spaces]
    return spaces[0], best, max(gaps)


def method_row(method: str, preset: str, layout: str) -> dict:
    """One method on one layout."""
    (workload, cluster), calibration = setting(preset, layout), load_calibration(DEVICE)
    clock_s, processor_s = time.perf_counter(), time.process_time()
    space, best, gap = searched(method, workload, cluster, calibration)
    clock_s, processor_s = time.perf_counter() - clock_s, time.process_time() - processor_s
    row = {"what": "method", "method": method, "preset": preset, "layout": layout, "devices": cluster.num_devices}
    row |= {"rows": workload.num_sequences, "seconds": clock_s, "processor_s": processor_s}
    row |= {"num_scored": best.num_scored, "gap": gap, "call_level_s": best.seconds if best.found else None}
    if best.found and cluster.num_devices <= MOST_SIMULATED:
        plans = simulated(space, best, TWO_PHASE if method == APP else method, calibration)  # with exchanges of pairs
        row |= {"plan": plans[0].name, "forecast_s": plans[0].forecast.makespan_s}
    return row | ({"steps": best.steps} if layout == TRACED else {})


def method_rows(layouts: Sequence[str]) -> Iterator[dict]:
    """A row for each method and layout, with its distance."""
    for preset, layout in FAMILY:
        if layout in layouts:
            yield from with_distances([method_row(method, preset, layout) for method in METHODS])


def with_distances(rows: Sequence[dict]) -> list[dict]:
    """The rows of one layout with `proved`, whether the optimum is known, and `distance`: from the optimum or, without
    a proof, from the best choice of all methods. None where a method found nothing."""
    proved = next(row["gap"] for row in rows if row["method"] == EXACT) == 0.0
    least_s = min(row["call_level_s"] for row in rows if row["call_level_s"])
    return [
        row | {"proved": proved, "distance": row["call_level_s"] / least_s - 1 if row["call_level_s"] else None}
        for row in rows
    ]
