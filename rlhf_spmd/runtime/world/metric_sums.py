"""Metrics of one iteration: every rank adds up sums and weights; one control message per iteration combines them."""

from collections.abc import Iterable, Mapping


class Meter:
    """Weighted means, maxima and minima of one iteration on one rank."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}  # name -> [sum, weight]
        self.maxima: dict[str, float] = {}
        self.minima: dict[str, float] = {}

    def add(self, name: str, total: float, weight: float) -> None:
        """Adds `total`, a sum with the total weight `weight`, to the mean called `name`."""
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(weight)

    def maximum(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, float(value)), float(value))

    def minimum(self, name: str, value: float) -> None:
        self.minima[name] = min(self.minima.get(name, float(value)), float(value))

    def log(self, name: str, total: float, weight: float, over: str) -> None:
        """Adds what a function of a page returned for the log.

        over: `mean`, `max` or `min` (page.Metric).
        """
        if over == "mean":
            self.add(name, total, weight)
        elif weight:
            {"max": self.maximum, "min": self.minimum}[over](name, total)

    def part(self, names: Iterable[str]) -> "Meter":
        """Returns the sums of some names."""
        part = Meter()
        part.sums = {name: self.sums[name] for name in names if name in self.sums}
        return part

    def to_message(self) -> dict:
        return {"sums": self.sums, "maxima": self.maxima, "minima": self.minima}

    def include(self, message: Mapping) -> None:
        """Adds what another meter has counted, from its message."""
        for name, (value, weight) in message["sums"].items():
            self.add(name, value, weight)
        for name, value in message["maxima"].items():
            self.maximum(name, value)
        for name, value in message["minima"].items():
            self.minimum(name, value)


def summed(messages: Iterable[Mapping]) -> Meter:
    """Adds up what ranks have counted, in their order."""
    total = Meter()
    for message in messages:
        total.include(message)
    return total


def combine(messages: Iterable[Mapping]) -> tuple[dict[str, float], dict[str, float]]:
    """Combines the sums of all ranks to global means, maxima and minima, and the weight of each mean. Summed in rank
    order, so all ranks get the same bits."""
    total = summed(messages)
    means = {name: value / weight for name, (value, weight) in total.sums.items() if weight}
    return total.maxima | total.minima | means, {name: weight for name, (_, weight) in total.sums.items()}
