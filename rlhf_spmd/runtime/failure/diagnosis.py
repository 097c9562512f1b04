"""Diagnoses a hang: from the positions of all ranks in their instruction lists, finds the rank that others wait for.

Used by the watch of a running job (watch.py), by ranks that lose a peer, and by the subcommands that read a run folder
afterwards (postmortem.py). The program alone determines what a rank waits for, as in plan/proof/deadlock.py. No torch,
no MPI.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_spmd.files.json_text import json_object
from rlhf_spmd.plan.program.instructions import Instruction, Post, Program, Wait
from rlhf_spmd.runtime.failure.failures import PeerError, is_lost, is_peer_error, name_ranks
from rlhf_spmd.runtime.failure.records import FOLDER, NOWHERE, Position

FILE = "program.json"  # in the folder of the records
BETWEEN = 10**9  # the position of a rank between iterations: the end of its list
Needs = tuple[tuple[int, int, int], ...]  # (rank, position in its instruction list, iterations after this one)
Places = Sequence[Mapping[Instruction, int]]  # [rank], instruction -> position in its list


class InstructionNeeds(NamedTuple):
    """An instruction of one rank. needs: the instructions that must begin before this one can end."""

    text: str
    needs: Needs

    @classmethod
    def of(cls, values: Any) -> "InstructionNeeds":
        """Makes one from its values in JSON. Raises ValueError and TypeError."""
        text, needs = values
        return cls(str(text), tuple((int(rank), int(position), int(later)) for rank, position, later in needs))


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The instruction lists of all ranks, [rank][position], with what each instruction waits for."""

    of_rank: tuple[tuple[InstructionNeeds, ...], ...]

    @classmethod
    def of(cls, program: Program) -> "WaitGraph":
        """Returns the wait graph of a compiled program. A Post waits for no rank."""
        places, lists = places_of(program), []
        for rank, instructions in enumerate(program.instructions):
            needs = []
            for instruction in instructions:
                waits = () if isinstance(instruction, Post) else needs_of(program, rank, instruction, places)
                needs.append(InstructionNeeds(text_of(program, instruction), waits))
            lists.append(tuple(needs))
        return cls(tuple(lists))

    def write(self, folder: Path) -> None:
        """Writes the lists to the run folder."""
        (folder / FOLDER).mkdir(mode=0o750, exist_ok=True)
        text = json.dumps({"ranks": self.of_rank}, separators=(",", ":"))
        (folder / FOLDER / FILE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "WaitGraph | None":
        """Reads the lists of a run folder; None if they are missing or are none. Raises OSError and UserError if they
        can't be read."""
        values = json_object(folder / FOLDER / FILE)
        try:
            return cls(tuple(tuple(map(InstructionNeeds.of, instructions)) for instructions in values["ranks"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def instruction(self, rank: int, position: int) -> InstructionNeeds | None:
        """Returns an instruction of a rank; None if there is none at this position."""
        instructions = self.of_rank[rank] if 0 <= rank < len(self.of_rank) else ()
        return instructions[position] if 0 <= position < len(instructions) else None


def text_of(program: Program, instruction: Instruction) -> str:
    """Returns the text of an instruction, the same on all ranks that meet at it; their positions differ."""
    moved = f" ({program.transfers[instruction.transfer].what})" if isinstance(instruction, Post | Wait) else ""
    return f"{instruction}{moved}"


def needs_of(program: Program, rank: int, instruction: Instruction, places: Places) -> Needs:
    """Returns the instructions that other ranks must begin before this one, and the messages that it posts, can end."""
    met, ranks = program.meets(rank, instruction)
    found = ((other, places[other][met]) for other in ranks if met in places[other])
    own = instruction.delay  # in a chain, copies of a model wait for its new weights in the next iteration
    return tuple((other, place, program.instructions[other][place].delay - own) for other, place in found)


def places_of(program: Program) -> Places:
    """Returns the position of every instruction in the list of every rank; of equal ones the first."""
    return [
        {instruction: place for place, instruction in reversed(list(enumerate(instructions)))}
        for instructions in program.instructions
    ]


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

    def describe(self) -> str:
        """Describes a rank for messages: action, position, time and trouble."""
        place = "" if self.position == NOWHERE else f", instruction {self.position}"
        trouble = f"; {self.trouble}" if self.trouble else ""
        return f"{self.text or 'nothing'}{place}, for {self.for_s:.1f} s{trouble}"


class Divergence(NamedTuple):
    """The first instruction that some ranks have not reached. late: these ranks; waiting: those that wait for them."""

    late: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str  # one or more sentences for people


def diagnose(states: Sequence[RankState], graph: WaitGraph | None) -> Divergence | None:
    """Returns the ranks that others wait for; None if, according to the program, no rank waits for another."""
    by_rank = {state.rank: state for state in states}
    missing: dict[int, tuple[int, ...]] = {}  # rank -> those that it waits for
    for state in states:
        instruction = graph.instruction(state.rank, state.position) if graph else None
        missing[state.rank] = late_ranks(instruction.needs, state.iteration, by_rank) if instruction else ()
    awaited = sorted({other for others in missing.values() for other in others})
    late = tuple(state.rank for state in states if state.trouble)
    if not late and not awaited:
        return _all_arrived(states, graph)
    late = late or tuple(rank for rank in awaited if not missing[rank]) or _cycle(missing, by_rank)
    return _divergence(by_rank, late, missing)


def late_ranks(needs: Needs, iteration: int, by_rank: Mapping[int, RankState | Position]) -> tuple[int, ...]:
    """Returns the ranks in `needs` that have not begun what is needed of them in this iteration; unknown ranks are left
    out."""
    late = []
    for rank, place, later in needs:
        if rank in by_rank:
            position = by_rank[rank].position
            reached = by_rank[rank].iteration, BETWEEN if position == NOWHERE else position
            late += [rank] if reached < (iteration + later, place) else []
    return tuple(late)


def _cycle(missing: Mapping[int, Sequence[int]], by_rank: Mapping[int, RankState]) -> tuple[int, ...]:
    """Returns ranks that wait for one another, if every late rank waits itself."""
    rank = min(missing, key=lambda rank: (not missing[rank], by_rank[rank].iteration, rank))
    walked: list[int] = []
    while rank not in walked:
        walked.append(rank)
        rank = missing[rank][0]
    return tuple(sorted(walked[walked.index(rank) :]))


def _divergence(
    by_rank: Mapping[int, RankState], late: tuple[int, ...], missing: Mapping[int, Sequence[int]]
) -> Divergence:
    sentences = []
    for rank in late:
        state, problem = by_rank[rank], "makes no progress"
        waiting = [by_rank[other] for other, needed in missing.items() if rank in needed]
        if waiting:
            first = min(waiting, key=lambda other: (other.iteration, other.position))
            others = [other.rank for other in waiting if other.text == first.text]
            problem = f"did not reach {first.text}, where {name_ranks(others)} wait for it"
        sentences.append(f"{state.name} {problem}; it is in {state.describe()}")
    if late and all(missing[rank] and not by_rank[rank].trouble for rank in late):
        sentences.append(f"{name_ranks(late)} wait for one another: they entered different collectives")
    rest = tuple(rank for rank in by_rank if rank not in late)
    return Divergence(late, tuple(rank for rank in rest if set(missing[rank]) & set(late)), ". ".join(sentences))


def _all_arrived(states: Sequence[RankState], graph: WaitGraph | None) -> Divergence | None:
    """Compares the actions of the ranks, if no rank is missing according to the program."""
    ranks, counts = tuple(state.rank for state in states), Counter(state.text for state in states)
    if len(counts) > 1:
        rare = min(counts.values())
        few = tuple(state.rank for state in states if counts[state.text] == rare < max(counts.values()))
        places = "; ".join(f"rank {state.rank}: {state.describe()}" for state in states)
        rest = tuple(rank for rank in ranks if rank not in few)
        return Divergence(few, rest, f"ranks are at different instructions: {places}")
    if graph is None or not any(graph.instruction(state.rank, state.position) for state in states):
        return None
    return Divergence((), ranks, f"all ranks reached {states[0].text}, but none makes progress")


def peer_error(
    error: Exception, program: Program, world: Any, data: Any, instruction: Instruction, position: int
) -> Exception:
    """Returns the loss or lateness of a peer, inside an instruction, as a UserError that names rank, host, iteration,
    instruction, and the ranks that have not arrived; any other error as it is.

    data: of the iteration.
    position: of the instruction in this rank's list.
    """
    if not is_peer_error(error):
        return error
    needs = needs_of(program, world.rank, instruction, places_of(program))
    late, reason = world.stragglers(needs, data.number), str(error).partition("\n")[0]
    names = "; ".join(f"rank {rank} on {world.hosts[rank]} last reported: {where}" for rank, where in late.items())
    problem = "lost a connection" if is_lost(error) else "gave up waiting"
    return PeerError(
        f"rank {world.rank} on {world.hosts[world.rank]} {problem} in {data.title}, instruction {position}: "
        f"{text_of(program, instruction)}: {names or 'all its peers arrived, but a message did not get through'} "
        f"({reason[:120]})",
        lost=is_lost(error),
    )
