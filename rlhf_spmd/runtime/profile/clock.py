"""Times what all ranks of a world, or a group of them, do at the same moment."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tqdm import tqdm

from rlhf_spmd.runtime.world.world import World

BUDGET_S = 0.2  # of repeating one thing
FEWEST, MOST = 3, 20  # times that it is repeated
CPU_CACHE_BYTES = 1 << 24  # about what a core has to itself


@dataclass(slots=True)
class Clock:
    """Times things that all ranks, or a group, do at the same moment."""

    world: World
    num_workers: float | None
    synchronize: Callable[[], object]  # waits until the device is done
    cool: Callable[[], object]  # what has been used just now leaves the caches, as between the calls of an iteration
    bar: tqdm
    budget_s: float = BUDGET_S

    def seconds(self, *works: Callable[[], object], idle: bool = False, together: int = 0) -> tuple[float, ...]:
        """Seconds of each of these on a rank with a core to itself, the mean of all ranks that do it. Its repetitions
        take turns. idle: this rank only waits. together: ranks of a node that wait for each other in it.

        Where ranks share cores, these are processor seconds, since what a rank waits for, others use: their mean, as an
        iteration is a sum. But ranks that wait for each other also wait until the processor turns to them, so that
        together they take their share of the clock: the median.
        """
        by_clock = self.num_workers is None or together > 1
        timer, middle = (time.perf_counter, median) if by_clock else (time.process_time, fmean)
        share = min(1.0, self.num_workers / together) if self.num_workers is not None and together > 1 else 1.0
        first = 0.0
        if not idle:
            self._once(works, time.perf_counter)
            first = sum(self._once(works, time.perf_counter))
        longest = max(self.world.allgather(first, "a first measurement"))
        number = min(max(int(self.budget_s / max(longest, 1e-9)), FEWEST), MOST)
        found = [] if idle else list(map(middle, zip(*(self._once(works, timer) for _ in range(number)), strict=True)))
        everyone = [one for one in self.world.allgather(found, "a measurement") if one]
        self.bar.update()
        return tuple(share * fmean(of_ranks) for of_ranks in zip(*everyone, strict=True))

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


def cache_bytes(index: int | None) -> int:
    """The last cache of a GPU (None: of the CPU)."""
    import torch

    return CPU_CACHE_BYTES if index is None else torch.cuda.get_device_properties(index).L2_cache_size
