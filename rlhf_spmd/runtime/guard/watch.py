"""Notices that a job hangs: a thread on every rank that asks, a few times per deadline, whether anybody does anything.

A rank shows life when it begins something, or uses its processor or a disk. It says so on the board, where all others
see it. A rank that has shown none for the deadline looks at the others: once all have been quiet for as long, nobody
can free anybody, and one of them reports who is missing where the others wait. A rank that computes is never called
late, however long its peers wait for it, until LONGEST_WAIT deadlines have passed, when torch's own timeouts end the
wait whatever the reason.
"""

from __future__ import annotations

import resource
import threading
import time
from typing import NoReturn, Protocol

from rlhf_spmd.runtime.guard.diagnose import Standing, Steps, diagnose
from rlhf_spmd.runtime.guard.failures import PREFIX, HungError, name_ranks, print_error
from rlhf_spmd.runtime.guard.supervise import process_fields, waits_for_disk
from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE, Flight
from rlhf_spmd.runtime.observe.positions import Board, Said

LONGEST_WAIT = 10  # deadlines: a wait ends after so long, although the late rank shows life
LOOKS = 20  # per deadline
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.05, 3.0
BUSY_SHARE = 0.01  # of the deadline: a rank that used so much of a processor has shown life
STOP_S = 5.0
SILENT_LOOKS = 4  # a rank that has not spoken for so many looks may be stopped


class Watched(Protocol):
    """What a watch needs of a rank's World."""

    rank: int
    size: int
    node: int
    nodes: tuple[int, ...]  # the node of every rank
    hosts: tuple[str, ...]
    deadline_s: float
    is_meeting: bool  # waits in a control message
    board: Board
    flight: Flight

    def fail(self, error: BaseException) -> NoReturn: ...


class Watch:
    """The thread of one rank. `steps`, once known, are the instruction lists of all ranks."""

    def __init__(self, world: Watched):
        self.world = world
        self.steps: Steps | None = None
        self._begun, self._work, self._disk = -1, 0.0, -1
        self._life = self._looked = time.monotonic()
        self._used: dict[int, float] = {}  # rank -> processor seconds when last looked at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Says at once that this rank is there, and looks from now on."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """No more looks."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return min(max(self.world.deadline_s / LOOKS, SHORTEST_LOOK_S), LONGEST_LOOK_S)

    def _run(self) -> None:
        is_told = False
        while not self._over.wait(self.look_s):
            try:
                self._check()
            except Exception as error:  # whatever it is must not end the watch without a word
                if not is_told:
                    me, what = name_ranks([self.world.rank], self.world.hosts), f"{type(error).__name__}: {error}"
                    print_error(f"{PREFIX}{me} could not look whether the job hangs ({what}); it tries again")
                is_told = True

    def _check(self) -> None:
        """One look, and the end of the job if it hangs."""
        quiet_s = self._look()
        if quiet_s >= self.world.deadline_s and not self.world.is_meeting and self.world.size > 1:
            text = self._hang(quiet_s)
            if text is not None and not self._over.is_set():
                self.world.fail(HungError(text))
            self._looked = time.monotonic()  # a store that does not answer takes seconds

    def _look(self) -> float:
        """Notes whether this rank has shown life since the last look -> seconds since it last did."""
        now, world = time.monotonic(), self.world
        used = resource.getrusage(resource.RUSAGE_SELF)
        work, disk = used.ru_utime + used.ru_stime, used.ru_majflt + used.ru_inblock + used.ru_oublock
        begun = world.flight.count
        busy = work - self._work >= BUSY_SHARE * world.deadline_s or disk != self._disk
        if now - self._life > world.deadline_s / 2 and not world.is_meeting:
            busy = busy or waits_for_disk()
        was_stopped = now - self._looked > (SILENT_LOOKS + 1) * self.look_s + 1.0  # the whole job may have been
        if begun != self._begun or (busy and not world.is_meeting) or was_stopped:
            self._life, self._begun, self._work, self._disk = now, begun, work, disk
        self._looked = now
        world.board.speak(life_s=time.time() - (now - self._life), meets=world.is_meeting)
        return now - self._life

    def is_alive(self, ranks: tuple[int, ...]) -> bool:
        """Whether any of these may still come: it has shown life within the deadline, or cannot be seen."""
        said = self.world.board.said(ranks)
        seen = {rank for rank in ranks if rank in said or (rank == 0 and self.world.board.store is not None)}
        return len(seen) < len(ranks) or any(not self._is_quiet(rank, one) for rank, one in said.items())

    def _is_quiet(self, rank: int, said: Said) -> bool:
        """Whether a rank has shown no life for the deadline. One that does not even speak may be stopped, or busy in
        code that lets no other thread run: the kernel knows."""
        now = time.time()
        if now - said.life_s < self.world.deadline_s:
            return False
        if self._is_silent(said) and self.world.nodes[rank] == self.world.node:
            fields = process_fields(said.process)
            used_s = fields[1] if fields else 0.0
            before, self._used[rank] = self._used.get(rank), used_s
            return before is not None and used_s <= before
        return True

    def _is_silent(self, said: Said) -> bool:
        return time.time() - said.spoke_s > SILENT_LOOKS * self.look_s + 0.5

    def _hang(self, quiet_s: float) -> str | None:
        """What to say if nobody does anything; None if somebody does, or will notice it better."""
        world = self.world
        said = world.board.said(tuple(range(world.size)))
        unseen = set(range(world.size)) - set(said)
        if unseen and (world.board.store is None or (0 in said and not self._is_silent(said[0]))):
            return None
        others = {rank: one for rank, one in said.items() if rank != world.rank}
        quiet = [self._is_quiet(rank, one) for rank, one in others.items()]
        meeting = any(one.meets and not self._is_silent(one) for one in others.values())
        if meeting or not all(quiet):
            return None
        standings = [self._standing(rank, one) for rank, one in said.items()]
        if 0 in unseen:  # it keeps the store, by which ranks of other nodes are seen
            trouble = "its store does not answer"
            standings.insert(0, Standing(0, world.hosts[0], "", NOWHERE, NOWHERE, quiet_s, trouble))
        found = diagnose(standings, self.steps)
        me = name_ranks([world.rank], world.hosts)
        text = f"no rank has done anything for {quiet_s:.0f} s (deadline_s={world.deadline_s:g}), says {me}: "
        if found is None:
            told = "; ".join(f"rank {one.rank} is in {one.told()}" for one in standings)
            return text + told
        last = [f"  rank {one.rank} last said: {one.told()}" for one in standings]
        hint = "\nIf it only takes that long without any computing, e.g. in a reward function, raise deadline_s."
        return "\n".join([text + found.text, *last]) + hint

    def _standing(self, rank: int, said: Said) -> Standing:
        now, trouble = time.time(), ""
        if self._is_silent(said):
            fields = process_fields(said.process) if self.world.nodes[rank] == self.world.node else None
            stopped = fields is not None and fields[0] in "Tt"
            trouble = "it is stopped (SIGSTOP)" if stopped else f"it has not spoken for {now - said.spoke_s:.0f} s"
        host = self.world.hosts[rank]
        return Standing(rank, host, said.text, said.iteration, said.position, now - said.life_s, trouble)
