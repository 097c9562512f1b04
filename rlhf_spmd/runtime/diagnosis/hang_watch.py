"""Detects a hung job: a thread on every rank checks, a few times per deadline, whether any rank is active.

A rank is active when it begins an instruction, uses its processor or a disk, or waits for processes of its own that are
active (`beat`); it reports this on the board. What threads use that spin while they wait does not count (`spun_s`). A
rank that has been inactive for the deadline checks the others. If all have been inactive that long, the job hangs, and
one rank reports which rank the others wait for. A rank that computes is not considered late, however long its peers
wait, until torch's own timeouts end the wait after LONGEST_WAIT deadlines.
"""

from __future__ import annotations

import resource
import threading
import time
from typing import Any

from rlhf_spmd.runtime.diagnosis.diagnose import RankState, WaitGraph, diagnose
from rlhf_spmd.runtime.guard import streams
from rlhf_spmd.runtime.guard.failures import PREFIX, DeadlineError, name_ranks
from rlhf_spmd.runtime.guard.supervise import process_fields, spun_s, waits_for_disk
from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE
from rlhf_spmd.runtime.observe.position_board import RankStatus

LONGEST_WAIT = 10  # deadlines after which a wait ends although the late rank is active
CHECKS = 20  # per deadline
SHORTEST_CHECK_S, LONGEST_CHECK_S = 0.05, 3.0
BUSY_SHARE = 0.01  # of the deadline: a rank that used this much processor time is active
STOP_S = 5.0
SILENT_CHECKS = 4  # a rank that has not reported for this many checks may be stopped


class Watch:
    """The thread of one rank's World. `graph` is set once the program is known."""

    def __init__(self, world: Any):
        self.world = world
        self.graph: WaitGraph | None = None
        self._begun, self._work, self._disk = -1, 0.0, -1
        self._beats, self._beats_seen = 0, 0
        self._active = self._checked = time.monotonic()
        self._used: dict[int, float] = {}  # rank -> processor seconds at the last check
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Reports this rank's first status and starts the checks."""
        self._update()
        self._thread.start()

    def stop(self) -> None:
        """Stops the checks."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def beat(self) -> None:
        """Notes that this rank is active although it only waits: other processes work for it."""
        self._beats += 1

    @property
    def interval_s(self) -> float:
        """Seconds between two checks."""
        return min(max(self.world.deadline_s / CHECKS, SHORTEST_CHECK_S), LONGEST_CHECK_S)

    def _run(self) -> None:
        is_reported = False
        while not self._over.wait(self.interval_s):
            try:
                self._check()
            except Exception as error:  # no error may end the watch silently
                if not is_reported:
                    me, what = name_ranks([self.world.rank], self.world.hosts), f"{type(error).__name__}: {error}"
                    streams.say(f"{PREFIX}{me} could not check whether the job hangs ({what}); it tries again")
                is_reported = True

    def _check(self) -> None:
        """Checks once; ends the job if it hangs."""
        quiet_s = self._update()
        if quiet_s >= self.world.deadline_s and not self.world.is_meeting and self.world.size > 1:
            text = self._hang_message(quiet_s)
            if text is not None and not self._over.is_set():
                self.world.fail(DeadlineError(text))
            self._checked = time.monotonic()  # a store that does not answer takes seconds

    def _update(self) -> float:
        """Notes and reports whether this rank was active since the last check -> seconds since its last activity."""
        now, world = time.monotonic(), self.world
        used = resource.getrusage(resource.RUSAGE_SELF)
        work, disk = used.ru_utime + used.ru_stime - spun_s(), used.ru_majflt + used.ru_inblock + used.ru_oublock
        begun, beats = world.flight.count, self._beats
        busy = work - self._work >= BUSY_SHARE * world.deadline_s or disk != self._disk
        if now - self._active > world.deadline_s / 2 and not world.is_meeting:
            busy = busy or waits_for_disk()
        was_stopped = now - self._checked > (SILENT_CHECKS + 1) * self.interval_s + 1.0  # perhaps with the whole job
        has_begun = begun != self._begun or beats != self._beats_seen
        if has_begun or (busy and not world.is_meeting) or was_stopped:
            self._active, self._begun, self._work, self._disk = now, begun, work, disk
            self._beats_seen = beats
        self._checked = now
        world.board.report(active_s=time.time() - (now - self._active), is_meeting=world.is_meeting)
        return now - self._active

    def is_alive(self, ranks: tuple[int, ...]) -> bool:
        """Returns whether any of these ranks may still arrive: it was active within the deadline, or its status is
        unknown."""
        statuses = self.world.board.statuses(ranks)
        seen = {rank for rank in ranks if rank in statuses or (rank == 0 and self.world.board.store is not None)}
        return len(seen) < len(ranks) or any(not self._is_quiet(rank, one) for rank, one in statuses.items())

    def _is_quiet(self, rank: int, status: RankStatus) -> bool:
        """Returns whether a rank has been inactive for the deadline. If it does not even report, it is stopped or busy
        in code that blocks all other threads; the kernel's processor time tells which."""
        now = time.time()
        if now - status.active_s < self.world.deadline_s:
            return False
        if self._is_silent(status) and self.world.nodes[rank] == self.world.node:
            fields = process_fields(status.process)
            used_s = fields[1] if fields else 0.0
            before = self._used.get(rank)
            self._used[rank] = max(used_s, before or 0.0)  # beside threads that spin it may fall by some ticks
            return before is not None and used_s <= before
        return True

    def _is_silent(self, status: RankStatus) -> bool:
        return time.time() - status.reported_s > SILENT_CHECKS * self.interval_s + 0.5

    def _hang_message(self, quiet_s: float) -> str | None:
        """Returns the message if no rank is active; None if one is, or if another rank can report the hang better."""
        world = self.world
        statuses = world.board.statuses(tuple(range(world.size)))
        unseen = set(range(world.size)) - set(statuses)
        if unseen and (world.board.store is None or (0 in statuses and not self._is_silent(statuses[0]))):
            return None
        others = {rank: one for rank, one in statuses.items() if rank != world.rank}
        quiet = [self._is_quiet(rank, one) for rank, one in others.items()]
        meeting = any(one.is_meeting and not self._is_silent(one) for one in others.values())
        if meeting or not all(quiet):
            return None
        states = [self._state_of(rank, one) for rank, one in statuses.items()]
        if 0 in unseen:  # it hosts the store, which publishes the ranks of other nodes
            trouble = "its store does not answer"
            states.insert(0, RankState(0, world.hosts[0], "", NOWHERE, NOWHERE, quiet_s, trouble))
        divergence = diagnose(states, self.graph)
        me = name_ranks([world.rank], world.hosts)
        text = f"no rank has been active for {quiet_s:.0f} s (deadline_s={world.deadline_s:g}), reports {me}: "
        if divergence is None:
            return text + "; ".join(f"rank {one.rank} is in {one.describe()}" for one in states)
        last = [f"  rank {one.rank} last reported: {one.describe()}" for one in states]
        hint = "\nIf an instruction legitimately idles that long, e.g. in a reward function, raise deadline_s."
        return "\n".join([text + divergence.text, *last]) + hint

    def _state_of(self, rank: int, status: RankStatus) -> RankState:
        now, trouble = time.time(), ""
        if self._is_silent(status):
            fields = process_fields(status.process) if self.world.nodes[rank] == self.world.node else None
            stopped = fields is not None and fields[0] in "Tt"
            silent = f"it has not reported for {now - status.reported_s:.0f} s"
            trouble = "it is stopped (SIGSTOP)" if stopped else silent
        host = self.world.hosts[rank]
        return RankState(rank, host, status.text, status.iteration, status.position, now - status.active_s, trouble)
