"""Diagnoses a hang: from the positions of all ranks in their instruction lists, finds the rank that others wait for.

Used by the watch of a running job (hang_watch.py) and by the subcommands that read a run folder afterwards
(postmortem.py). The program alone determines what a rank waits for (wait_graph.py). No torch, no MPI.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_spmd.files.json_text import json_object
from rlhf_spmd.runtime.guard.failures import name_ranks
from rlhf_spmd.runtime.observe.flight_recorder import FOLDER, NOWHERE
from rlhf_spmd.runtime.observe.position_board import RankStatus

FILE = "program.json"  # in the folder of the flight records
Needs = tuple[tuple[int, int], ...]  # (rank, position in its instruction list)


@dataclass(frozen=True, slots=True)
class InstructionNeeds:
    """An instruction of one rank. needs: the instructions that must begin before this one can end."""

    text: str
    needs: Needs


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The instruction lists of all ranks, [rank][position], with what each instruction waits for."""

    of_rank: tuple[tuple[InstructionNeeds, ...], ...]

    def write(self, folder: Path) -> None:
        """Writes the lists to the run folder, each text once."""
        texts = {instruction.text: None for instructions in self.of_rank for instruction in instructions}
        numbers = {text: number for number, text in enumerate(texts)}
        lists = [
            [[numbers[instruction.text], instruction.needs] for instruction in instructions]
            for instructions in self.of_rank
        ]
        (folder / FOLDER).mkdir(mode=0o750, exist_ok=True)
        (folder / FOLDER / FILE).write_text(
            json.dumps({"texts": list(texts), "ranks": lists}, separators=(",", ":")), encoding="utf-8"
        )

    @classmethod
    def read(cls, folder: Path) -> "WaitGraph | None":
        """Reads the lists of a run folder; None if they are missing or are none. Raises OSError and UserError if they
        can't be read."""
        values = json_object(folder / FOLDER / FILE)
        try:
            texts = [str(text) for text in values["texts"]]
            return cls(
                tuple(
                    tuple(
                        InstructionNeeds(texts[number], tuple((int(rank), int(at)) for rank, at in needs))
                        for number, needs in instructions
                    )
                    for instructions in values["ranks"]
                )
            )
        except (ValueError, KeyError, IndexError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class RankState:
    """The position of a rank.

    trouble: a known problem, e.g. `it is stopped`.
    """

    rank: int
    host: str
    text: str
    iteration: int
    position: int
    for_s: float  # how long it has been at this position
    trouble: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host})"

    def describe(self, num_instructions: int = 0) -> str:
        """Describes a rank for messages: action, position, time and trouble."""
        place = "" if self.position == NOWHERE else f", instruction {self.position}"
        place += f" of {num_instructions}" if place and num_instructions else ""
        trouble = f"; {self.trouble}" if self.trouble else ""
        return f"{self.text or 'nothing'}{place}, for {self.for_s:.1f} s{trouble}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first instruction that some ranks have not reached. late: these ranks; waiting: those that wait for them."""

    late: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str  # one or more sentences for people


def diagnose(states: Sequence[RankState], graph: WaitGraph | None) -> Divergence | None:
    """Returns the ranks that others wait for; None if, according to the program, no rank waits for another."""
    by_rank = {one.rank: one for one in states}
    instructions = [(one, _instruction(one, graph)) for one in states]
    missing = {
        one.rank: late_ranks(instruction.needs, one.iteration, by_rank) if instruction else ()
        for one, instruction in instructions
    }
    troubled = tuple(one.rank for one in states if one.trouble)
    if troubled:
        return _divergence(by_rank, troubled, tuple(rank for rank in by_rank if rank not in troubled), missing, graph)
    awaited = sorted({other for others in missing.values() for other in others})
    if not awaited:
        return _all_arrived(states, graph)
    late = tuple(rank for rank in awaited if not missing[rank]) or _cycle(missing, by_rank)
    waiting = tuple(rank for rank, others in missing.items() if set(others) & set(late))
    return _divergence(by_rank, late, waiting, missing, graph)


def late_ranks(needs: Needs, iteration: int, by_rank: Mapping[int, RankState | RankStatus]) -> tuple[int, ...]:
    """Returns the ranks in `needs` that have not begun what is needed of them in this iteration; unknown ranks are left
    out."""
    return tuple(rank for rank, place in needs if rank in by_rank and _progress(by_rank[rank]) < (iteration, place))


def _progress(one: RankState | RankStatus) -> tuple[int, int]:
    """Returns a rank's progress, comparable with (iteration, position); between iterations, the end of the list."""
    return one.iteration, 10**9 if one.position == NOWHERE else one.position


def _instruction(one: RankState, graph: WaitGraph | None) -> InstructionNeeds | None:
    if graph is None or one.position == NOWHERE or one.rank >= len(graph.of_rank):
        return None
    instructions = graph.of_rank[one.rank]
    return instructions[one.position] if one.position < len(instructions) else None


def _cycle(missing: Mapping[int, Sequence[int]], by_rank: Mapping[int, RankState]) -> tuple[int, ...]:
    """Returns ranks that wait for one another, if every late rank waits itself."""
    rank = min(missing, key=lambda rank: (not missing[rank], by_rank[rank].iteration, rank))
    walked: list[int] = []
    while rank not in walked:
        walked.append(rank)
        rank = missing[rank][0]
    return tuple(sorted(walked[walked.index(rank) :]))


def _divergence(
    by_rank: Mapping[int, RankState],
    late: tuple[int, ...],
    waiting: tuple[int, ...],
    missing: Mapping[int, Sequence[int]],
    graph: WaitGraph | None,
) -> Divergence:
    length = (lambda rank: len(graph.of_rank[rank])) if graph else (lambda rank: 0)
    sentences = []
    for rank in late:
        one, waits_for_it = by_rank[rank], [other for other in waiting if rank in missing[other]]
        if waits_for_it:
            first = min(waits_for_it, key=lambda other: (by_rank[other].iteration, by_rank[other].position))
            others = [other for other in waits_for_it if by_rank[other].text == by_rank[first].text]
            wait = f"{name_ranks(others)} {'wait' if len(others) > 1 else 'waits'}"
            problem = f"{one.name} did not reach {by_rank[first].text}, where {wait} for it"
        else:
            problem = f"{one.name} makes no progress"
        sentences.append(f"{problem}; it is in {one.describe(length(rank))}")
    if late and all(missing[rank] for rank in late) and not any(by_rank[rank].trouble for rank in late):
        sentences.append(f"{name_ranks(late)} wait for one another: they entered different collectives")
    return Divergence(late, waiting, ". ".join(sentences))


def _all_arrived(states: Sequence[RankState], graph: WaitGraph | None) -> Divergence | None:
    """Groups the ranks by their current action, if no rank is missing according to the program."""
    by_text: dict[str, list[RankState]] = {}
    for one in states:
        by_text.setdefault(one.text, []).append(one)
    if len(by_text) == 1 and (graph is None or all(_instruction(one, graph) is None for one in states)):
        return None
    groups = sorted(by_text.values(), key=lambda group: (len(group), -group[0].rank))
    if len(groups) == 1:
        text = f"all ranks reached {states[0].text}, but none makes progress"
        return Divergence((), tuple(one.rank for one in states), text)
    few = tuple(one.rank for one in groups[0]) if len(groups[0]) < len(groups[-1]) else ()
    rest = tuple(one.rank for one in states if one.rank not in few)
    described = [f"{name_ranks([one.rank for one in group])}: {group[0].describe()}" for group in groups]
    return Divergence(few, rest, "ranks are in different places: " + "; ".join(described))
