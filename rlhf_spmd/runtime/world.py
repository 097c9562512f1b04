"""The world of ranks: who is where, what they must agree on, and how they leave together when something is wrong.

This is the only file that imports mpi4py. MPI carries discovery and control messages; tensors travel through
torch.distributed, which `start_torch` starts (torch is not imported before that). Every wait has a deadline, and what
expires names the ranks that have not arrived. A mistake of the user is one message from one rank, however many ranks
noticed it, and the whole job ends with a status other than zero.
"""

import atexit
import faulthandler
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime import groups as torch_groups
from rlhf_spmd.runtime import launch
from rlhf_spmd.runtime.board import Board, new_file
from rlhf_spmd.runtime.control import Control, Failed, Late

USER_STATUS, CRASH_STATUS, INTERRUPTED_STATUS = 2, 1, 130
SECOND_REPORT_S = 3.0  # whoever lost the claim to report waits so long to be ended by the one who won it
FORWARD_S = 0.5  # before an abort: mpiexec drops what its pipes still hold (seen once in 60 launches on a busy machine)
ABORT_S = 3  # MPI's abort gets so long before the process ends by itself
SHORT_VALUE = 60  # values up to this length are quoted when ranks differ


class DeadlineError(UserError):
    """Some ranks did not arrive in time, so nothing more can be agreed with them."""


class _Leaving(SystemExit):
    """All ranks end; why has been told. Any other SystemExit comes from code of the user and is a failure."""


@dataclass(eq=False)
class World:
    """All ranks of the job and this one's place among them. Made by `World.discover`."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this node, in world order
    node: int  # nodes are numbered by their lowest rank
    num_nodes: int
    nodes: tuple[int, ...]  # the node of every rank
    hosts: tuple[str, ...]  # the host name of every rank
    deadline_s: float
    threads: int  # this rank's fair share of its node's cores
    device_index: int | None  # None: compute on the CPU
    control: Control
    board: Board
    one_network: bool  # all ranks reach each other by loopback
    _groups: dict[str, Any] | None = None

    @classmethod
    def discover(cls, deadline_s: float = 300.0) -> "World":
        """Meets the other ranks over MPI; also right for a program started without mpiexec, as one rank."""
        mpi = _load_mpi()
        comm = mpi.COMM_WORLD
        launch.refuse_alone(comm.size, os.environ)
        first = Control(comm, deadline_s=deadline_s)
        facts = {
            "host": socket.gethostname(),
            "network": torch_groups.network_stack(),
            "devices": torch_groups.visible_devices(),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        try:
            everyone = [json.loads(text) for text in first.exchange("the start", json.dumps(facts).encode())]
        except Late as late:  # nothing can be agreed yet, and a quiet exit would hang in MPI's own
            if first.rank != min(set(range(comm.size)) - set(late.ranks)):
                time.sleep(SECOND_REPORT_S)
            _print_error(f"rlhf_spmd: error: {_deadline_error(late, first.rank, (), {})}")
            _end_job(USER_STATUS)
        control = Control(comm.Dup(), deadline_s=deadline_s) if comm.size > 1 else first
        # everyone is here, so MPI's own collectives, which know no deadline, may be used for a moment
        node_comm = comm.Split_type(mpi.COMM_TYPE_SHARED)
        node_ranks = tuple(mpi.Group.Translate_ranks(node_comm.group, range(node_comm.size), comm.group))
        path = new_file(len(node_ranks)) if node_ranks[0] == comm.rank else ""
        texts = control.exchange("the nodes", json.dumps([node_ranks[0], path]).encode())
        leaders = [json.loads(text)[0] for text in texts]
        order = sorted(set(leaders))
        nodes = tuple(order.index(leader) for leader in leaders)
        node = nodes[comm.rank]
        shared_path = json.loads(texts[node_ranks[0]])[1]
        board = Board(shared_path, rank=comm.rank, node_ranks=node_ranks, node=node, num_nodes=len(order))
        control.exchange("the board", b"")
        if path:
            os.unlink(path)
            launch.unname_shared_memory()
        of_node = [[everyone[rank] for rank in range(comm.size) if nodes[rank] == index] for index in range(len(order))]
        assigned = [torch_groups.assign_devices([facts["devices"] for facts in ranks]) for ranks in of_node]
        local_rank = node_ranks.index(comm.rank)
        cores = len({core for facts in of_node[node] for core in facts["cores"]})
        return cls(
            rank=comm.rank,
            size=comm.size,
            local_rank=local_rank,
            node=node,
            num_nodes=len(order),
            nodes=nodes,
            hosts=tuple(facts["host"] for facts in everyone),
            deadline_s=deadline_s,
            threads=max(1, min(cores // len(node_ranks), len(everyone[comm.rank]["cores"]))),
            device_index=None if None in assigned else assigned[node][local_rank],
            control=control,
            board=board,
            one_network=len({facts["network"] for facts in everyone}) == 1,
        )

    def set_deadline(self, deadline_s: float) -> None:
        """From now on, no control message waits longer than this."""
        self.deadline_s = self.control.deadline_s = deadline_s

    # Control messages: anything that JSON can hold (a tuple arrives as a list).

    def allgather(self, value: Any, what: str = "a gathering", *, deadline_s: float | None = None) -> list[Any]:
        """Every rank's value, in rank order."""
        return [json.loads(text) for text in self._exchange(what, json.dumps(value).encode(), deadline_s=deadline_s)]

    def bcast(self, value: Any, root: int = 0, what: str = "a broadcast", *, deadline_s: float | None = None) -> Any:
        """The root's value; what other ranks pass is ignored."""
        message = json.dumps(value).encode() if self.rank == root else b""
        return json.loads(self._exchange(what, message, deadline_s=deadline_s)[root])

    def barrier(self, what: str = "a barrier", *, deadline_s: float | None = None) -> None:
        """Returns once every rank has come here."""
        self._exchange(what, b"", deadline_s=deadline_s)

    def agree(self, what: str, values: Mapping[str, str]) -> None:
        """Raises the same UserError on every rank if some of `values` (texts by name) differ between ranks."""
        mine = {}
        for name, value in values.items():
            digest = hashlib.sha256(value.encode()).hexdigest()[:16]
            mine[name] = [digest, value if len(value) <= SHORT_VALUE else None]
        views = self.allgather(mine, f"agreeing on {what}")
        for name in sorted({name for view in views for name in view}):
            holders: dict[str, list[int]] = {}
            for rank, view in enumerate(views):
                holders.setdefault(json.dumps(view.get(name)), []).append(rank)
            if len(holders) > 1:
                groups = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
                told = "; ".join(f"{_shown(json.loads(view))} on {self.name_ranks(ranks)}" for view, ranks in groups)
                raise UserError(
                    f"{what}: {name} is not the same on every rank: {told}. Start every rank with the same program, "
                    "files and options"
                )

    def _exchange(
        self, what: str, message: bytes, *, failed: bool = False, deadline_s: float | None = None
    ) -> list[bytes]:
        if self.size > 1:
            self.board.post(f"waiting for the others: {what}")
        try:
            return self.control.exchange(what, message, failed=failed, deadline_s=deadline_s)
        except Late as late:
            where = self.board.read(late.ranks)
            last = {rank: texts[-1] for rank, texts in where.items() if texts[-1]}
            raise _deadline_error(late, self.rank, self.hosts, last) from None
        except Failed as failed_ranks:
            self._leave({rank: json.loads(text) for rank, text in failed_ranks.failures.items()})

    # Leaving together

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Runs the block on every rank and goes on only if it went well on all.

        Otherwise one rank prints what went wrong, once, and every rank leaves with SystemExit (2 for UserErrors, 1 if
        there was any other exception). The others need not have finished the block: they leave from their next
        control message. Ranks that are blocked in a torch collective are not reached that way; `fail` is for them.
        """
        failure = None
        try:
            yield
        except (DeadlineError, _Leaving):
            raise  # some ranks don't answer: nothing can be agreed; or all know already
        except UserError as error:
            failure = {"error": str(error)}
        except (Exception, SystemExit):
            failure = {"crash": traceback.format_exc()}
        self._exchange(what, json.dumps(failure).encode(), failed=failure is not None)

    def _leave(self, failures: Mapping[int, Mapping[str, str]]) -> NoReturn:
        if self.rank == min(failures):
            _print_error(self._report(failures))
        status = CRASH_STATUS if any("crash" in failure for failure in failures.values()) else USER_STATUS
        with suppress(Late, Failed):  # the first to end ends all, so not before the message is out
            self.control.exchange("leaving", b"", deadline_s=5.0)
        atexit.register(_end_job, status)
        raise _Leaving(status) from None

    def _report(self, failures: Mapping[int, Mapping[str, str]]) -> str:
        crashed = [rank for rank, failure in failures.items() if "crash" in failure]
        if crashed:
            return failures[crashed[0]]["crash"].rstrip() + f"\n(on {self.name_ranks(crashed)} of {self.size})"
        by_text: dict[str, list[int]] = {}
        for rank, failure in failures.items():
            by_text.setdefault(failure["error"], []).append(rank)
        lines = []
        for text, ranks in by_text.items():
            suffix = "" if len(ranks) == self.size else f" (on {self.name_ranks(ranks)} of {self.size})"
            lines.append(f"rlhf_spmd: error: {text}{suffix}")
        return "\n".join(lines)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the whole job from any number of ranks at any time, others being blocked wherever they are.

        One rank reports its error; the status is 2 for a UserError and 1 for anything else, which shows a traceback.
        """
        if isinstance(error, _Leaving):
            raise error
        if isinstance(error, KeyboardInterrupt):
            _end_job(INTERRUPTED_STATUS)
        user = isinstance(error, UserError)
        if not self.board.claim():
            time.sleep(SECOND_REPORT_S)
        alone = self.size == 1 or isinstance(error, DeadlineError)  # the latter names its rank itself
        where = "" if alone else f" (reported by {self.name_ranks([self.rank])} of {self.size})"
        if user:
            _print_error(f"rlhf_spmd: error: {error}{where}")
        else:
            _print_error("".join(traceback.format_exception(error)).rstrip() + "\n" + where.strip())
        _end_job(USER_STATUS if user else CRASH_STATUS)

    # torch.distributed

    def start_torch(
        self, groups: Mapping[str, Sequence[int]], *, deadline_s: float | None = None, threads: int | None = None
    ) -> None:
        """Starts torch.distributed and makes the named groups (ascending world ranks), all with the same deadline.

        gloo on CPUs or where a node has more ranks than devices, else NCCL with a device for each rank. `threads` is
        how many threads torch may use on this rank; by default OMP_NUM_THREADS or a fair share of the cores.
        """
        assert self._groups is None, "torch.distributed starts once"
        timeout_s = self.deadline_s if deadline_s is None else deadline_s
        with self.together("importing torch"):
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            if threads is not None or "OMP_NUM_THREADS" not in os.environ:
                os.environ["OMP_NUM_THREADS"] = str(threads or self.threads)
            import torch

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            if self.device_index is not None:
                torch.cuda.set_device(self.device_index)
        with self.together("starting torch.distributed"):
            store = self._meet(timeout_s)
            self._groups = torch_groups.make_groups(
                groups,
                store=store,
                rank=self.rank,
                size=self.size,
                device_index=self.device_index,
                timeout_s=timeout_s,
            )
            number = torch.ones(1, device=self.device)
            torch.distributed.all_reduce(number)
            assert number.item() == self.size

    def _meet(self, timeout_s: float) -> Any:
        peers = sorted({host for host in self.hosts if host != self.hosts[0]})
        interface, address = torch_groups.LOOPBACK_INTERFACE, torch_groups.LOOPBACK
        if not self.one_network and self.rank == 0:
            interface, address = torch_groups.choose_interface(peers)
        store, port = torch_groups.make_store(address, timeout_s) if self.rank == 0 else (None, 0)
        address, port = self.bcast([address, port], what="the address of the store")
        if store is None:
            if not self.one_network:
                interface, _ = torch_groups.choose_interface([address])
            store = torch_groups.join_store(address, port, timeout_s)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not self.one_network:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if self.num_nodes > 1 or not all(self.allgather(self.board.shared, "the boards")):
            self.board.store = store.clone()
        return store

    @property
    def device(self) -> Any:
        """Where this rank computes, as a torch.device."""
        import torch

        return torch.device("cpu") if self.device_index is None else torch.device("cuda", self.device_index)

    def group(self, name: str) -> Any:
        """The process group of that name, which this rank must belong to; None if this is its only rank."""
        assert self._groups is not None, "start_torch comes first"
        group = self._groups[name]
        if group is not None:
            from torch.distributed import GroupMember

            assert group is not GroupMember.NON_GROUP_MEMBER, f"rank {self.rank} is not in group {name!r}"
        return group

    def shutdown(self) -> None:
        """Ends torch.distributed, all ranks together, so that the process can exit quietly."""
        if self._groups is None:
            return
        from torch import distributed

        self.barrier("the end of the run")
        self._groups = self.board.store = None
        distributed.destroy_process_group()
        self.barrier("the end of torch.distributed")  # rank 0 keeps the store until nobody needs it

    # Who is late

    def progress(self, position: str) -> None:
        """Notes where this rank is, before it may block: a text that is unique in the run and the same on every rank
        that meets there. A few microseconds."""
        self.board.post(position)

    def stragglers(self, ranks: Sequence[int], position: str) -> dict[int, str]:
        """Of `ranks` those that have not come to `position`, with what each last said it was doing.

        Seconds at most, whatever state the others are in. Ranks of which nothing can be known, because rank 0 is late
        and keeps the store, are left out.
        """
        where = self.board.read(tuple(ranks))
        return {rank: texts[-1] or "nothing" for rank, texts in where.items() if position not in texts}

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """For messages: `ranks 1, 3 (host a) and 5 (host b)`."""
        return _name_ranks(ranks, self.hosts)


def _load_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but no MPI library
        if not launch.first_on_node(os.environ):
            raise SystemExit(0) from None
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"no MPI library can be loaded on {socket.gethostname()} ({reason}): `pip install mpi4py mpich` in this "
            "environment, or load the site's MPI module"
        ) from None
    return MPI


def _deadline_error(late: Late, rank: int, hosts: Sequence[str], last: Mapping[int, str]) -> DeadlineError:
    me = _name_ranks([rank], hosts or [socket.gethostname()] * (rank + 1))
    if not late.ranks:
        text = "all ranks arrived, but their messages did not get through: look at the network between the hosts"
    else:
        text = f"{_name_ranks(late.ranks, hosts)} did not arrive; find out what holds them up, or raise the deadline"
        for straggler, position in last.items():
            text += f"\n  rank {straggler} last said: {position}"
    return DeadlineError(f"{late.what}: {me} waited {late.waited_s:.1f} s, but {text}")


def _name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    by_host: dict[str, list[str]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank] if hosts else "", []).append(str(rank))
    parts = [", ".join(numbers) + (f" (host {host})" if host else "") for host, numbers in by_host.items()]
    return ("ranks " if len(ranks) > 1 else "rank ") + " and ".join(parts)


def _shown(view: list | None) -> str:
    if view is None:
        return "missing"
    digest, value = view
    return repr(value) if value is not None else f"{digest[:8]}..."


def _print_error(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _end_job(status: int) -> NoReturn:
    """Ends all processes of the job with this status; the report is out, so MPI's own words go nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FORWARD_S)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)
        _load_mpi().COMM_WORLD.Abort(status)
        os._exit(status)
