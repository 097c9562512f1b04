"""Who holds up whom: from where all ranks stand in their instruction lists to the first one missing where others wait.

The same reasoning serves the watch of a running job (watch.py) and the verbs that read a run folder afterwards
(postmortem.py). What a rank waits for follows from the program alone (wait_graph.py). No torch, no MPI.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.runtime.observe.flight_recorder import FOLDER, NOWHERE

FILE = "program.json"  # in the folder of the flight records


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction of one rank. needs: (rank, position in its list) that must have been begun before this can end."""

    text: str
    needs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """The instruction lists of all ranks: [rank][position]."""

    of_rank: tuple[tuple[Step, ...], ...]

    def write(self, folder: Path) -> None:
        """Into the run folder, each text once."""
        texts = {step.text: None for steps in self.of_rank for step in steps}
        numbers = {text: number for number, text in enumerate(texts)}
        lists = [[[numbers[step.text], step.needs] for step in steps] for steps in self.of_rank]
        (folder / FOLDER).mkdir(mode=0o750, exist_ok=True)
        (folder / FOLDER / FILE).write_text(json.dumps({"texts": list(texts), "ranks": lists}, separators=(",", ":")))

    @classmethod
    def read(cls, folder: Path) -> "Steps | None":
        """From a run folder; None if it has none that can be read."""
        try:
            found: Mapping[str, Any] = json.loads((folder / FOLDER / FILE).read_text())
            texts = found["texts"]
            return cls(
                tuple(
                    tuple(Step(texts[number], tuple((rank, place) for rank, place in needs)) for number, needs in steps)
                    for steps in found["ranks"]
                )
            )
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is. trouble: what is known to be wrong with it, e.g. `it is stopped`."""

    rank: int
    host: str
    text: str
    iteration: int
    position: int
    for_s: float  # how long it has been there
    trouble: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host})"

    def told(self, num_instructions: int = 0) -> str:
        place = "" if self.position == NOWHERE else f", instruction {self.position}"
        place += f" of {num_instructions}" if place and num_instructions else ""
        trouble = f"; {self.trouble}" if self.trouble else ""
        return f"{self.text or 'nothing'}{place}, for {self.for_s:.1f} s{trouble}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a rank is missing. text: one or more sentences for people."""

    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str


def diagnose(standings: Sequence[Standing], steps: Steps | None) -> Divergence | None:
    """Who is missing where others wait; None if nobody waits for anybody, as far as the program tells."""
    places = {one.rank: one for one in standings}
    missing = {one.rank: _missing(one, places, steps) for one in standings}
    ill = tuple(one.rank for one in standings if one.trouble)
    if ill:
        return _told(places, ill, tuple(rank for rank in places if rank not in ill), missing, steps)
    awaited = sorted({other for others in missing.values() for other in others})
    if not awaited:
        return _all_arrived(standings, steps)
    culprits = tuple(rank for rank in awaited if not missing[rank]) or _circle(missing, places)
    waiting = tuple(rank for rank, others in missing.items() if set(others) & set(culprits))
    return _told(places, culprits, waiting, missing, steps)


def _missing(one: Standing, places: Mapping[int, Standing], steps: Steps | None) -> tuple[int, ...]:
    """The ranks that have not come to what this one waits for."""
    step = _step(one, steps)
    if step is None:
        return ()
    return tuple(
        rank
        for rank, position in step.needs
        if rank in places and _progress(places[rank], one.iteration) < (one.iteration, position)
    )


def _progress(one: Standing, iteration: int) -> tuple[int, int]:
    """How far a rank has come, comparable with (iteration, position); between iterations, to the end of the list."""
    if one.position == NOWHERE:
        return (one.iteration, 10**9)
    return one.iteration, one.position


def _step(one: Standing, steps: Steps | None) -> Step | None:
    if steps is None or one.position == NOWHERE or one.rank >= len(steps.of_rank):
        return None
    mine = steps.of_rank[one.rank]
    return mine[one.position] if one.position < len(mine) else None


def _circle(missing: Mapping[int, Sequence[int]], places: Mapping[int, Standing]) -> tuple[int, ...]:
    """Ranks that wait for one another, when there is none that waits for nobody."""
    rank = min(missing, key=lambda rank: (not missing[rank], places[rank].iteration, rank))
    walked: list[int] = []
    while rank not in walked:
        walked.append(rank)
        rank = missing[rank][0]
    return tuple(sorted(walked[walked.index(rank) :]))


def _told(
    places: Mapping[int, Standing],
    culprits: tuple[int, ...],
    waiting: tuple[int, ...],
    missing: Mapping[int, Sequence[int]],
    steps: Steps | None,
) -> Divergence:
    length = (lambda rank: len(steps.of_rank[rank])) if steps else (lambda rank: 0)
    sentences = []
    for rank in culprits:
        one, meant = places[rank], [other for other in waiting if rank in missing[other]]
        if meant:
            first = min(meant, key=lambda other: (places[other].iteration, places[other].position))
            others = [other for other in meant if places[other].text == places[first].text]
            came = f"{one.name} did not come to {places[first].text}, where {_ranks(others)} {_waits(others)} for it"
        else:
            came = f"{one.name} does not go on"
        sentences.append(f"{came}; it is in {one.told(length(rank))}")
    if culprits and all(missing[rank] for rank in culprits) and not any(places[rank].trouble for rank in culprits):
        sentences.append(f"{_ranks(culprits)} wait for one another: they entered different collectives")
    return Divergence(culprits, waiting, ". ".join(sentences))


def _all_arrived(standings: Sequence[Standing], steps: Steps | None) -> Divergence | None:
    """Nobody is missing where the program says so: groups of ranks by what they say they do."""
    by_text: dict[str, list[Standing]] = {}
    for one in standings:
        by_text.setdefault(one.text, []).append(one)
    if len(by_text) == 1 and (steps is None or all(_step(one, steps) is None for one in standings)):
        return None
    groups = sorted(by_text.values(), key=lambda group: (len(group), -group[0].rank))
    told = [f"{_ranks([one.rank for one in group])}: {group[0].told()}" for group in groups]
    if len(groups) == 1:
        text = f"all ranks came to {standings[0].text}, and none goes on"
        return Divergence((), tuple(one.rank for one in standings), text)
    few = tuple(one.rank for one in groups[0]) if len(groups[0]) < len(groups[-1]) else ()
    rest = tuple(one.rank for one in standings if one.rank not in few)
    return Divergence(few, rest, "ranks are in different places: " + "; ".join(told))


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _waits(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
