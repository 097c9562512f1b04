"""Detects a hung job: a thread on every rank checks, a few times per deadline, whether any rank is active.

A rank is active when it begins an instruction, uses its processor or a disk, or waits for processes of its own that are
active (`beat`); it reports this on the board. What threads use while they wait does not count (`waiting`). A
rank that has been inactive for the deadline checks the others. If all have been inactive that long, the job hangs, and
one rank reports which rank the others wait for. A rank that computes is not considered late, however long its peers
wait, until torch's own timeouts end the wait after LONGEST_WAIT deadlines.
"""

from __future__ import annotations

import resource
import threading
import time
from typing import Any, NamedTuple

from rlhf_spmd.files import output
from rlhf_spmd.runtime.failure.diagnosis import RankState, WaitGraph, diagnose
from rlhf_spmd.runtime.failure.failures import PREFIX, DeadlineError, name_ranks
from rlhf_spmd.runtime.failure.postmortem import STOPPED
from rlhf_spmd.runtime.failure.processes import process_fields, waiting, waits_for_disk
from rlhf_spmd.runtime.failure.records import NOWHERE, Position

LONGEST_WAIT = 10  # deadlines after which a wait ends although the late rank is active
CHECKS = 20  # per deadline
SHORTEST_CHECK_S, LONGEST_CHECK_S = 0.05, 3.0
BUSY_SHARE = 0.01  # of the deadline: a rank that used this much processor time is active
IDLE_LOOP_SHARE = 0.02  # of a processor: what a thread of gloo may use without a message (0.005 were measured)
STOP_S = 5.0
SILENT_CHECKS = 4  # a rank that has not reported for this many checks may be stopped


class Seen(NamedTuple):
    """What a rank had done at its last activity."""

    begun: tuple[int, int]  # actions and beats
    work_s: float
    loops_s: float
    disk: int


class Watch:
    """The thread of one rank's World. `graph` is set once the program is known."""

    def __init__(self, world: Any):
        self.world = world
        self.graph: WaitGraph | None = None
        self._beats, self._seen = 0, Seen((-1, -1), 0.0, 0.0, -1)
        self._active = self._checked = time.monotonic()
        self._used: dict[int, float] = {}  # rank -> processor seconds at the last check
        self._own_s = 0.0  # processor seconds of the checks themselves
        self._over, self._has_failed = threading.Event(), False
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
        while not self._over.wait(self.interval_s):
            try:
                self._check()
            except Exception as error:  # no error may end the watch silently
                if not self._has_failed:
                    me, why = name_ranks([self.world.rank], self.world.hosts), f"{type(error).__name__}: {error}"
                    output.say(f"{PREFIX}{me} could not check whether the job hangs ({why}); it tries again")
                self._has_failed = True
            self._own_s = time.thread_time()

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
        now, world, before = time.monotonic(), self.world, self._seen
        used, threads = resource.getrusage(resource.RUSAGE_SELF), waiting()
        seen = Seen(
            (world.record.num_begun, self._beats),
            used.ru_utime + used.ru_stime - threads.spun_s - threads.loops_s - self._own_s,
            threads.loops_s,
            used.ru_majflt + used.ru_inblock + used.ru_oublock,
        )
        carried_s = seen.loops_s - before.loops_s - IDLE_LOOP_SHARE * threads.num_loops * (now - self._active)
        work_s = seen.work_s - before.work_s + max(carried_s, 0.0)
        is_busy = work_s >= BUSY_SHARE * world.deadline_s or seen.disk != before.disk
        if now - self._active > world.deadline_s / 2 and not world.is_meeting:
            is_busy = is_busy or waits_for_disk()
        was_stopped = now - self._checked > (SILENT_CHECKS + 1) * self.interval_s + 1.0  # perhaps with the whole job
        if seen.begun != before.begun or (is_busy and not world.is_meeting) or was_stopped:
            self._active, self._seen = now, seen
        self._checked = now
        world.positions.report(active_s=time.time() - (now - self._active), is_meeting=world.is_meeting)
        return now - self._active

    def is_alive(self, ranks: tuple[int, ...]) -> bool:
        """Returns whether any of these ranks may still arrive: it was active within the deadline, or its position is
        unknown."""
        positions = self.world.positions
        reported = positions.reported(ranks)
        hosts_store = {0} if positions.store is not None else set()
        if set(ranks) - set(reported) - hosts_store:
            return True
        return any(not self._is_quiet(rank, position) for rank, position in reported.items())

    def _is_quiet(self, rank: int, position: Position) -> bool:
        """Returns whether a rank has been inactive for the deadline. If it does not even report, it is stopped or busy
        in code that blocks all other threads; the kernel's processor time tells which."""
        if time.time() - position.active_s < self.world.deadline_s:
            return False
        if self._is_silent(position) and self.world.nodes[rank] == self.world.node:
            fields = process_fields(position.process)
            used_s = fields[1] if fields else 0.0
            before = self._used.get(rank)
            self._used[rank] = max(used_s, before or 0.0)  # beside threads that spin it may fall by some ticks
            return before is not None and used_s <= before
        return True

    def _is_silent(self, position: Position) -> bool:
        return time.time() - position.reported_s > SILENT_CHECKS * self.interval_s + 0.5

    def _hang_message(self, quiet_s: float) -> str | None:
        """Returns the message if no rank is active; None if one is, or if another rank can report the hang better."""
        world = self.world
        reported = world.positions.reported(tuple(range(world.size)))
        unseen = set(range(world.size)) - set(reported)
        if unseen and (world.positions.store is None or (0 in reported and not self._is_silent(reported[0]))):
            return None
        for rank, position in reported.items():
            is_meeting = position.is_meeting and not self._is_silent(position)
            if rank != world.rank and (is_meeting or not self._is_quiet(rank, position)):
                return None
        states = [self._state_of(rank, position) for rank, position in reported.items()]
        if 0 in unseen:  # it hosts the store, which publishes the ranks of other nodes
            trouble = "its store does not answer"
            states.insert(0, RankState(0, world.hosts[0], "", NOWHERE, NOWHERE, quiet_s, trouble))
        divergence = diagnose(states, self.graph)
        lines = [f"  rank {state.rank} last reported: {state.describe()}" for state in states]
        me, why = name_ranks([world.rank], world.hosts), f"{divergence.text}\n" if divergence else "\n"
        quiet = f"no rank has been active for {quiet_s:.0f} s (deadline_s={world.deadline_s:g}), reports {me}: "
        hint = "If an instruction legitimately idles that long, e.g. in a reward function, raise deadline_s."
        return quiet + why + "\n".join([*lines, hint])

    def _state_of(self, rank: int, position: Position) -> RankState:
        now, trouble = time.time(), ""
        if self._is_silent(position):
            fields = process_fields(position.process) if self.world.nodes[rank] == self.world.node else None
            trouble = f"it has not reported for {now - position.reported_s:.0f} s"
            trouble = "it is stopped (SIGSTOP)" if fields is not None and fields[0] in STOPPED else trouble
        place = position.text, position.iteration, position.position
        return RankState(rank, self.world.hosts[rank], *place, now - position.active_s, trouble)
