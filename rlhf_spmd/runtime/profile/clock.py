"""Times work that all ranks of a world, or a group of them, do at the same time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rlhf_spmd.runtime.world.world import World

BUDGET_S = 0.2  # for the repetitions of one measurement
FEWEST, MOST = 3, 20  # repetitions
CPU_CACHE_BYTES = 1 << 24  # approximate cache per core


@dataclass(slots=True)
class Clock:
    """Times work that all ranks, or a group, do at the same time."""

    world: World
    num_workers: float | None  # ranks of a node that compute at full speed at the same time; None: all
    synchronize: Callable[[], object]  # waits until the device has finished
    cool: Callable[[], object]  # evicts recently used data from the caches, as between the calls of an iteration
    budget_s: float = BUDGET_S
    num_points: int = 0  # measurements so far

    def seconds(self, *works: Callable[[], object], idle: bool = False, together: int = 0) -> tuple[float, ...]:
        """Measures the seconds of each work on a rank with its own core, the mean over all ranks that do it. The works
        are repeated in turns.

        idle: this rank only waits.
        together: number of ranks of a node that wait for each other in it.

        If ranks share cores, these are processor seconds, because other ranks use the time that a rank waits; their
        mean, because an iteration is a sum. Where ranks wait for each other, the time in which processors had nothing
        to do is added in proportion. Elapsed seconds of each work would mostly tell when the scheduler ran it.
        """
        shared = self.num_workers is not None
        timer = time.process_time if shared else time.perf_counter
        middle: Callable[[Sequence[float]], float] = fmean if shared else median
        first = 0.0
        if not idle:
            self._once(works, time.perf_counter)
            first = sum(self._once(works, time.perf_counter))
        longest = max(self.world.allgather(first, "a first measurement"))
        number = min(max(int(self.budget_s / max(longest, 1e-9)), FEWEST), MOST)
        began, began_processor = time.perf_counter(), time.process_time()
        turns = [] if idle else [self._once(works, timer) for _ in range(number)]
        mine = list(map(middle, zip(*turns, strict=True)))
        if sum(mine) > 0 and self.num_workers is not None and together > 1:
            elapsed_s = (time.perf_counter() - began) * min(1.0, self.num_workers / together)
            idle_s = max(0.0, elapsed_s - (time.process_time() - began_processor)) / number
            mine = [one + idle_s * one / sum(mine) for one in mine]
        everyone = [one for one in self.world.allgather(mine, "a measurement") if one]
        self.num_points += 1
        return tuple(map(fmean, zip(*everyone, strict=True)))

    def _once(self, works: Sequence[Callable[[], object]], timer: Callable[[], float]) -> list[float]:
        taken = []
        for work in works:
            self.cool()
            self.synchronize()
            began = timer()
            work()
            self.synchronize()
            taken.append(timer() - began)
        return taken


def last_level_cache_bytes(index: int | None) -> int:
    """Returns the size of the last-level cache of a GPU (None: of the CPU)."""
    import torch

    return CPU_CACHE_BYTES if index is None else torch.cuda.get_device_properties(index).L2_cache_size
