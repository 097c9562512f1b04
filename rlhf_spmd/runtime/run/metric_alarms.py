"""Says early that a metric runs away: long before it is infinite it is many times as large as it ever was."""

from collections.abc import Iterable, Mapping

from rlhf_spmd.algorithms.page import Metric

EXPLODED = 10.0  # times the largest value so far
NUM_BEFORE = 3  # iterations that have to be known


class Alarm:
    """Remembers the largest value of each metric; speaks once of each. known: the metrics of the run. history: their
    values in the iterations before, of a run that goes on."""

    def __init__(self, known: Mapping[str, Metric], history: Iterable[Mapping] = ()) -> None:
        self._known = known
        self._largest: dict[str, float] = {}
        self._num_seen, self._told = 0, set()
        for metrics in history:
            self.notes({name: value for name, value in metrics.items() if isinstance(value, int | float)})

    def notes(self, metrics: Mapping[str, float | str]) -> list[str]:
        """Sentences about the metrics of one iteration that are far outside what they were."""
        found = []
        for name, floor in ((name, metric.floor) for name, metric in self._known.items() if metric.floor):
            value = abs(float(metrics.get(name, 0.0)))
            limit = max(EXPLODED * self._largest.get(name, 0.0), floor)
            if self._num_seen >= NUM_BEFORE and value > limit:
                before = self._largest[name]
                found.append((name, f"{name} is {value:.4g}, and was at most {before:.4g} before"))
            self._largest[name] = max(self._largest.get(name, 0.0), value)
        for name, limits in ((name, metric.limits) for name, metric in self._known.items() if metric.limits):
            if name in metrics and not limits[0] <= float(metrics[name]) <= limits[1]:
                found.append((name, f"{name} is {float(metrics[name]):.4g}, not in {limits[0]:g} to {limits[1]:g}"))
        self._num_seen += 1
        new = [(name, text) for name, text in found if name not in self._told]
        self._told |= {name for name, _ in new}
        return [f"warning: {text}: {self._known[name].advice}" for name, text in new]
