"""The ranks of a job: discovery, agreement, and a common exit on errors.

This is the only file that imports mpi4py. MPI carries discovery and control messages; tensors are sent by
torch.distributed, which `start_torch` starts (torch is not imported before that). Every wait has a deadline, and its
error names the ranks that have not arrived. A user's error is reported once, by one rank, however many ranks noticed
it, and the whole job ends with a nonzero status.
"""

import atexit
import faulthandler
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output, progress
from rlhf_spmd.runtime.failure import failures, launcher
from rlhf_spmd.runtime.failure.diagnosis import Needs, WaitGraph, late_ranks
from rlhf_spmd.runtime.failure.failures import (
    PREFIX,
    DeadlineError,
    Failed,
    Late,
    PeerError,
    deadline_error,
    name_ranks,
)
from rlhf_spmd.runtime.failure.last_checkpoint import resume_hint
from rlhf_spmd.runtime.failure.launcher import SECOND_REPORT_S
from rlhf_spmd.runtime.failure.records import NOWHERE, Positions, Record, forget, keep_message
from rlhf_spmd.runtime.failure.signals import INTERRUPTED_STATUS
from rlhf_spmd.runtime.failure.surroundings import check_answer, raise_open_files
from rlhf_spmd.runtime.failure.watch import LONGEST_WAIT, Watch
from rlhf_spmd.runtime.world import devices
from rlhf_spmd.runtime.world import groups as torch_groups
from rlhf_spmd.runtime.world.control_messages import Control

if TYPE_CHECKING:
    from rlhf_spmd.plan.program.instructions import Program

USER_STATUS, CRASH_STATUS = 2, 1
LOST_S = 5.0  # a rank that lost a connection waits this long for a better explanation
FORWARD_S = 0.5  # before an abort: mpiexec drops unread output (seen once in 60 launches on a busy machine)
ABORT_S = 3  # time for MPI's abort before the process ends itself


class _Leaving(SystemExit):
    """All ranks exit; the reason has been reported. Any other SystemExit comes from user code and is a failure."""


@dataclass(eq=False)
class World:
    """This rank's view of all ranks of the job. Made by `World.discover`."""

    rank: int
    size: int
    node: int  # nodes are numbered by their lowest rank
    num_nodes: int
    nodes: tuple[int, ...]  # the node of every rank
    hosts: tuple[str, ...]  # the host name of every rank
    deadline_s: float
    threads: int  # this rank's fair share of its node's cores
    control: Control
    positions: Positions
    one_network: bool  # all ranks reach each other by loopback
    record: Record
    is_meeting: bool = False  # waits in a control message
    watch: Watch = field(init=False)
    chosen: Sequence[devices.RankDevice] = ()  # the device of every rank, once chosen
    _groups: dict[str, Any] | None = None
    _wait_graphs: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # program and its graph, by the program's id
    _device_bytes: Callable[[], int] | None = None  # returns the bytes that torch has reserved on the device

    def __post_init__(self) -> None:
        self.watch = Watch(self)

    @classmethod
    def discover(cls, deadline_s: float = 300.0, record: Record | None = None) -> "World":
        """Meets the other ranks over MPI; without mpiexec, a world of one rank.

        record: shared with a supervisor.
        """
        mpi, record = _load_mpi(), record or Record.create()
        rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
        launcher.check_world_size(size, os.environ)
        try:
            return cls._meet(mpi, deadline_s, record)
        except Exception as error:  # nothing can be agreed yet, and a normal exit would hang in MPI_Finalize
            late = error.ranks if isinstance(error, Late) else ()
            time.sleep(0 if rank == min(set(range(size)) - set(late)) else SECOND_REPORT_S)
            error = deadline_error(error, rank, (), {}) if isinstance(error, Late) and late else error
            is_known = isinstance(error, UserError) or failures.explain(error)
            output.say(failures.report(error, f"rank {rank} of {size}", "", ""))
            _end_job(USER_STATUS if is_known else CRASH_STATUS, record)

    @classmethod
    def _meet(cls, mpi: Any, deadline_s: float, record: Record) -> "World":
        comm, host = mpi.COMM_WORLD, socket.gethostname()
        first = Control(comm, record, deadline_s=deadline_s)  # for one message: nothing else uses COMM_WORLD
        facts = {"host": host, "network": torch_groups.network_stack(), "cores": sorted(os.sched_getaffinity(0))}
        everyone = [json.loads(text) for text in first.exchange("the start", json.dumps(facts).encode())]
        # all ranks are here, so MPI's own collectives, which have no deadline, are safe
        control = Control(comm.Dup(), record, deadline_s=deadline_s)
        node_comm = comm.Split_type(mpi.COMM_TYPE_SHARED)
        node_ranks = tuple(mpi.Group.Translate_ranks(node_comm.group, range(node_comm.size), comm.group))
        record.describe(rank=comm.rank, size=comm.size, host=host)
        place = json.dumps([node_ranks[0], record.process, record.descriptor]).encode()
        places = [json.loads(text) for text in control.exchange("the records", place)]
        leaders = sorted({leader for leader, _, _ in places})
        nodes = tuple(leaders.index(leader) for leader, _, _ in places)
        node = nodes[comm.rank]
        of_node = {rank: Record.of_process(*places[rank][1:]) for rank in node_ranks} | {comm.rank: record}
        # a rank in a container of its own sees another process by the number, or none
        records = {rank: other for rank, other in of_node.items() if other is not None and other.rank == rank}
        is_shared = len(records) == len(of_node)
        positions = Positions(record, records if is_shared else None, node=node, num_nodes=len(leaders))
        _, first_process, first_descriptor = places[node_ranks[0]]
        record.describe(first_process=first_process, first_descriptor=first_descriptor)
        if comm.rank == node_ranks[0]:
            launcher.unlink_shared_memory()
        cores = len({core for rank in range(comm.size) if nodes[rank] == node for core in everyone[rank]["cores"]})
        world = cls(
            rank=comm.rank,
            size=comm.size,
            node=node,
            num_nodes=len(leaders),
            nodes=nodes,
            hosts=tuple(facts["host"] for facts in everyone),
            deadline_s=deadline_s,
            threads=max(1, min(cores // len(node_ranks), len(everyone[comm.rank]["cores"]))),
            control=control,
            positions=positions,
            one_network=len({facts["network"] for facts in everyone}) == 1,
            record=record,
        )
        control.positions, control.may_arrive = positions, world.watch.is_alive
        control.longest_wait = LONGEST_WAIT
        world.watch.start()
        return world

    def use_device(self, wanted: str) -> None:
        """Chooses the device of every rank (the option `device`, see devices.py), before the first use of `computes`.
        Collective; errors are reported once."""
        with self.together("looking for devices"):
            report = devices.find_devices(wanted, self.hosts[self.rank], self.threads, self.size)
        reports = self.allgather(report, "the devices")
        with self.together("choosing devices"):
            unseen = next((report["unseen"] for report in reports if report["unseen"]), "")
            visible = [[devices.VisibleDevice(**device) for device in report["seen"]] for report in reports]
            self.chosen = devices.choose_devices(wanted, visible, unseen, self.nodes, self.hosts)

    @property
    def computes(self) -> devices.RankDevice:
        """The device of this rank, after `use_device`."""
        assert self.chosen, "call use_device first: all ranks choose their devices together"
        return self.chosen[self.rank]

    def set_deadline(self, deadline_s: float) -> None:
        """Sets the longest wait for an inactive rank; active ranks are waited for LONGEST_WAIT times as long."""
        self.deadline_s = self.control.deadline_s = deadline_s

    # Control messages: anything that JSON can hold (a tuple arrives as a list).

    def allgather(self, value: Any, what: str = "a gathering", *, deadline_s: float | None = None) -> list[Any]:
        """Gathers every rank's value, in rank order."""
        return [json.loads(text) for text in self._exchange(what, json.dumps(value).encode(), deadline_s=deadline_s)]

    def allgather_bytes(self, message: bytes, what: str) -> list[bytes]:
        """Gathers every rank's bytes, in rank order, without JSON."""
        return self._exchange(what, message)

    def bcast(self, value: Any, root: int = 0, what: str = "a broadcast") -> Any:
        """Broadcasts the root's value; values of other ranks are ignored."""
        message = json.dumps(value).encode() if self.rank == root else b""
        return json.loads(self._exchange(what, message)[root])

    def barrier(self, what: str = "a barrier") -> None:
        """Returns once every rank has arrived."""
        self._exchange(what, b"")

    def agree(self, what: str, values: Mapping[str, str]) -> None:
        """Raises the same UserError on every rank if some of `values` (texts by name) differ between ranks."""
        views = self.allgather(failures.view_of(values), f"agreeing on {what}")
        text = failures.difference(what, views, self.hosts)
        if text is not None:
            raise UserError(text)

    def _exchange(
        self, what: str, message: bytes, *, failed: bool = False, deadline_s: float | None = None
    ) -> list[bytes]:
        self._note(f"waiting for: {what}")  # postmortem knows waits by this beginning
        self.is_meeting = True
        try:
            return self.control.exchange(what, message, failed=failed, deadline_s=deadline_s)
        except Late as late:
            last = {rank: position.text for rank, position in self.positions.read(late.ranks).items() if position.text}
            raise deadline_error(late, self.rank, self.hosts, last) from None
        except Failed as failed_ranks:
            self._leave({rank: json.loads(text) for rank, text in failed_ranks.failures.items()})
        finally:
            self.is_meeting = False
            self._note(f"after {what}")

    def messages(self) -> Any:
        """Returns an MPI communicator of its own. Collective; all ranks are here, so that MPI does not wait for
        long."""
        self.barrier("a communicator")
        return self.control.comm.Dup()

    # Common exit

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Runs the block on every rank and continues only if it succeeded on all.

        Otherwise one rank prints the error, once, and every rank exits with SystemExit (2 for UserErrors, 1 for any
        other exception). The others need not have finished the block: they exit from their next control message. Ranks
        blocked in a torch collective are not reached that way; use `fail` for them.
        """
        failure = None
        self._note(what)
        try:
            yield
        except (DeadlineError, _Leaving):
            raise  # some ranks do not answer, so nothing can be agreed; or all ranks know already
        except UserError as error:
            failure = {"error": str(error)}
        except (Exception, SystemExit) as error:
            text = failures.explain(error)
            failure = {"crash": traceback.format_exc()} if text is None else {"error": text}
        self._exchange(what, json.dumps(failure).encode(), failed=failure is not None)

    def _leave(self, by_rank: Mapping[int, Mapping[str, str]]) -> NoReturn:
        progress.stop()  # or its line would come back below the message
        if self.rank == min(by_rank):
            go_on = resume_hint(self.record.run, self.size)
            text = "\n".join(filter(None, (failures.merge_messages(by_rank, self.hosts), go_on)))
            keep_message(self.record.run, text.removeprefix(PREFIX))
            output.say(text)
        status = CRASH_STATUS if any("crash" in failure for failure in by_rank.values()) else USER_STATUS
        with suppress(Late, Failed):  # the first exit ends the job, so print the message before
            self.control.exchange("leaving", b"", deadline_s=5.0)
        atexit.register(_end_job, status, self.record)
        raise _Leaving(status) from None

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the whole job; any number of ranks may call it at any time, even if others are blocked.

        One rank reports its error, its position and how to continue. The status is 2 for errors that a user can fix,
        130 for an interrupt (SIGINT), and 1, with a traceback, for all others.
        """
        if isinstance(error, _Leaving):
            assert isinstance(error.code, int)  # the status of _leave()
            _end_job(error.code, self.record)
        status = INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else CRASH_STATUS
        progress.stop()
        try:
            if failures.is_peer_error(error) or (isinstance(error, PeerError) and error.lost):
                time.sleep(LOST_S)  # if a rank died, its supervisor reports the cause
            if not self.positions.claim():
                time.sleep(SECOND_REPORT_S)
            text = self._report(error)
            keep_message(self.record.run, text.removeprefix(PREFIX))
            output.say(text)
            if isinstance(error, UserError) or failures.explain(error) is not None:
                status = USER_STATUS
        except Exception:  # memory, the disk and the store may be what failed
            output.say("".join(traceback.format_exception(error)))
        finally:
            _end_job(status, self.record)

    def _report(self, error: BaseException) -> str:
        """Returns the message about this rank's failure."""
        reporter = "" if self.size == 1 else f"{name_ranks([self.rank], self.hosts)} of {self.size}"
        go_on = resume_hint(self.record.run, self.size)
        inside = self.record.now.iteration != NOWHERE or (self.size > 1 and self.record.num_begun)
        return failures.report(error, reporter, self.record.where if inside else "", go_on)

    # torch.distributed

    def start_torch(
        self,
        groups: Mapping[str, Sequence[int]],
        pairs: Mapping[str | None, Sequence[tuple[int, int]]] | None = None,
        *,
        deadline_s: float | None = None,
        threads: int | None = None,
    ) -> None:
        """Starts torch.distributed and makes the named groups (ascending world ranks), all with the same deadline.

        pairs: the ranks that will exchange messages, by group (Program.pairs).
        threads: of torch on this rank; by default OMP_NUM_THREADS or a fair share of the cores.
        """
        assert self._groups is None, "torch.distributed starts once"
        timeout_s = LONGEST_WAIT * self.deadline_s if deadline_s is None else deadline_s
        with self.together("importing torch"):
            if self.one_network:
                check_answer(torch_groups.LOOPBACK)  # torch would try for a minute, and not tell why
            of_rank = [ranks for ranks in groups.values() if self.rank in ranks]
            raise_open_files(self.size + sum(map(len, of_rank)))
            devices.import_torch(threads, self.threads)
            self._device_bytes = devices.select_device(self.computes)
        with self.together("connecting to the store"):
            store = torch_groups.connect_store(self, timeout_s)
        with self.together("starting torch.distributed"):
            try:
                self._groups = torch_groups.start_groups(self, groups, pairs or {}, store, timeout_s)
            except Exception as error:  # others may wait in torch, where no control message reaches them
                self.fail(error)

    @property
    def device(self) -> Any:
        """The device of this rank, as a torch.device."""
        import torch

        return torch.device("cpu") if self.computes.index is None else torch.device("cuda", self.computes.index)

    def group(self, name: str) -> Any:
        """Returns the process group of that name, which must include this rank; None if it is the only rank."""
        assert self._groups is not None, "call start_torch first"
        group = self._groups[name]
        if group is not None:
            from torch.distributed import GroupMember

            assert group is not GroupMember.NON_GROUP_MEMBER, f"rank {self.rank} is not in group {name!r}"
        return group

    def shutdown(self) -> None:
        """Ends torch.distributed and the control messages, so that the process can exit normally. Collective."""
        self.barrier("ending the run")
        if self._groups is not None:
            from torch import distributed

            self._groups = self.positions.store = self.positions.second_store = None
            distributed.destroy_process_group()
            self.barrier("closing torch.distributed")  # rank 0 keeps the store until then
        self.watch.stop()

    def finalize(self, status: int = 0) -> None:
        """Ends MPI. Collective. mpi4py would do so at exit, but would not report errors. status: that this process
        will end with; from now on its supervisor sees to it that it ends."""
        self.record.leave(status)
        _load_mpi().Finalize()

    # Positions and late ranks

    def progress(self, where: str, iteration: int = NOWHERE, position: int = NOWHERE) -> None:
        """Publishes this rank's position before it may block: a text that is the same on every rank that meets there,
        and the index in this rank's instruction list. Takes a few microseconds."""
        self.record.begin(where, iteration, position)
        self.positions.post()
        if self._device_bytes is not None:  # not in the watch, which would block on a lock that a hung rank holds
            self.record.device_bytes = self._device_bytes()

    @property
    def doing(self) -> str:
        """What this rank does, for people who wait."""
        where = self.record.where
        where = f"at work, {where}" if where.startswith("after ") else where  # between two actions
        return f"{where}, {max(time.time() - self.record.now.since_s, 0.0):.0f} s"

    def will_execute(self, program: "Program") -> None:
        """Sets the program that the ranks execute from now on; it determines which rank waits for which."""
        self.progress("the beginning of a program")  # iterations of an earlier program may have the same numbers
        if id(program) not in self._wait_graphs:  # two programs may alternate; each is kept, so no id is used again
            self._wait_graphs[id(program)] = program, WaitGraph.of(program)
        _, self.watch.graph = self._wait_graphs[id(program)]
        self.record.describe(num_instructions=len(program.instructions[self.rank]))

    def keep_records(self, folder: str | Path) -> None:
        """Writes the flight records and instruction lists to this run folder from now on; call it on all ranks."""
        if self.rank == 0 and self.watch.graph is not None:
            forget(folder, self.size)
            self.watch.graph.write(Path(folder))
        self.record.describe(folder=str(Path(folder).absolute()))

    def _note(self, what: str) -> None:
        """Records an action of this rank outside its instructions, or within one."""
        self.progress(what, self.record.now.iteration, self.record.now.position)

    def stragglers(self, needs: Needs, iteration: int) -> dict[int, str]:
        """Returns the ranks in `needs` that have not begun what is needed of them in this iteration, with the last
        position of each. Takes seconds at most, whatever state the others are in. Ranks whose position is unknown,
        because rank 0 is late and hosts the store, are left out."""
        positions = self.positions.read(tuple(rank for rank, *_ in needs))
        return {rank: positions[rank].text or "nothing" for rank in late_ranks(needs, iteration, positions)}


def _load_mpi() -> Any:
    try:
        torch_groups.choose_for_mpi(os.environ)
        from mpi4py import MPI
    except (UserError, ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
        if not launcher.reports(os.environ, on_node=True):
            raise SystemExit(0) from None
        raise error if isinstance(error, UserError) else launcher.without_library(error) from None
    if type(MPI.COMM_WORLD) is MPI.Intracomm:
        _refuse_to_abort(MPI)
    return MPI


def _refuse_to_abort(MPI: Any) -> None:
    """Makes code of the user fail that would end the job with the status of success, which its launcher believes."""

    class Communicator(MPI.Intracomm):
        def Abort(self, errorcode: int = 0) -> NoReturn:
            if errorcode % 256:
                super().Abort(errorcode)
            raise UserError(
                f"it called Abort({errorcode}) of an MPI communicator, which ends all ranks as if their work were "
                "done: raise an exception"
            )

    MPI.COMM_WORLD, MPI.COMM_SELF = Communicator(MPI.COMM_WORLD), Communicator(MPI.COMM_SELF)


def _is_alone() -> bool:
    MPI = sys.modules.get("mpi4py.MPI")
    return not launcher.is_launched(os.environ) and (MPI is None or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1)


def _end_job(status: int, record: Record) -> NoReturn:
    """Ends this process, and the others of its job, with this status; the error has been reported, so MPI's output is
    discarded."""
    try:
        record.leave(status)
        output.flush()
        if not _is_alone():
            time.sleep(FORWARD_S)
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), 2)
                with suppress(RuntimeError):  # no further thread may start
                    faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)
                _load_mpi().COMM_WORLD.Abort(status)
    finally:  # even if memory or a descriptor for any of this is missing
        os._exit(status)
