"""What is said when something goes wrong: the kinds of failure and their words. No torch, no MPI."""

import errno
import hashlib
import json
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence

from rlhf_spmd.errors import UserError

SHORT_TEXT = 60  # texts up to this length are quoted when ranks differ
PREFIX = "rlhf_spmd: error: "  # of every message for a user
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK = (*NO_ROOM, errno.EIO, errno.EROFS, errno.ESTALE)
NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
# What torch.distributed's backends raise when a peer is late or gone (they have no exception type of their own).
PEER_ERRORS = ("gloo", "timed out", "timeout", "connection", "nccl", "peer", "socket")
LATE_ERRORS = ("timed out", "timeout")


class Late(Exception):
    """A deadline passed; `ranks` had not arrived (none: all had, but the message did not get through)."""

    def __init__(self, what: str, ranks: tuple[int, ...], waited_s: float):
        super().__init__(what, ranks, waited_s)
        self.what, self.ranks, self.waited_s = what, ranks, waited_s


class Failed(Exception):
    """Some ranks gave up; `failures` holds what each of them sent. Every rank gets this with the same content."""

    def __init__(self, failures: dict[int, bytes]):
        super().__init__(failures)
        self.failures = failures


class DeadlineError(UserError):
    """Some ranks did not arrive in time, so nothing more can be agreed with them."""


class HungError(DeadlineError):
    """No rank goes on any more."""


class PeerError(UserError):
    """A rank that this one was in touch with is late or gone. lost: the connection broke, so it may have died."""

    def __init__(self, text: str, *, lost: bool):
        super().__init__(text)
        self.lost = lost


def is_peer_error(error: BaseException) -> bool:
    """Whether torch.distributed complains of another rank."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in PEER_ERRORS)


def is_lost(error: BaseException) -> bool:
    """Whether a connection broke, rather than that a deadline passed."""
    return not any(word in str(error).lower() for word in LATE_ERRORS)


def in_words(error: BaseException) -> str | None:
    """What a user can mend although it comes without words of ours: memory, disk, network; None for anything else."""
    first = (str(error).splitlines() or [""])[0][:200]
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or any(word in first for word in NO_MEMORY):
        what = f": {first}" if first else ""
        return (
            f"this rank ran out of memory ({kind}{what}); lower micro_batch or generation.max_sequences, raise the "
            "ZeRO stage or tp, or start more ranks"
        )
    if isinstance(error, OSError) and error.errno in DISK:
        where = f" {error.filename}" if error.filename else ""
        mend = "make room there" if error.errno in NO_ROOM else "look at the disk"
        return f"{error.strerror} when writing{where}: {mend}, or put the run elsewhere (--runs FOLDER)"
    if is_peer_error(error):
        return f"the connection to another rank broke or is late ({first})"
    return None


def deadline_error(late: Late, rank: int, hosts: Sequence[str], last: Mapping[int, str]) -> DeadlineError:
    """What a rank says that has waited too long in a control message; last: what the late ranks said last."""
    me = name_ranks([rank], hosts or [socket.gethostname()] * (rank + 1))
    if not late.ranks:
        text = "all ranks arrived, but their messages did not get through: look at the network between the hosts"
    else:
        text = f"{name_ranks(late.ranks, hosts)} did not arrive; find out what holds them up, or raise the deadline"
        for straggler, position in last.items():
            text += f"\n  rank {straggler} last said: {position}"
    return DeadlineError(f"{late.what}: {me} waited {late.waited_s:.1f} s, but {text}")


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """For messages: `ranks 1, 3 (host a) and 5 (host b)`."""
    by_host: dict[str, list[str]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank] if hosts else "", []).append(str(rank))
    parts = [", ".join(numbers) + (f" (host {host})" if host else "") for host, numbers in by_host.items()]
    return ("ranks " if len(ranks) > 1 else "rank ") + " and ".join(parts)


def view_of(values: Mapping[str, str]) -> dict[str, list[str | None]]:
    """What ranks exchange to compare texts by name: name -> [digest, the text itself if it is short]."""
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in values.items()}
    return {name: [digests[name], text if len(text) <= SHORT_TEXT else None] for name, text in values.items()}


def difference(what: str, views: Sequence[Mapping], hosts: Sequence[str]) -> str | None:
    """What to say if the ranks' views (view_of) are not all the same."""
    for name in sorted({name for view in views for name in view}):
        holders: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            holders.setdefault(json.dumps(view.get(name)), []).append(rank)
        if len(holders) > 1:
            groups = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            told = "; ".join(f"{_shown(json.loads(view))} on {name_ranks(ranks, hosts)}" for view, ranks in groups)
            return (
                f"{what}: {name} is not the same on every rank: {told}. Start every rank with the same program, "
                "files and options"
            )
    return None


def _shown(view: list | None) -> str:
    if view is None:
        return "missing"
    digest, value = view
    return repr(value) if value is not None else f"{digest[:8]}..."


def merged(failures: Mapping[int, Mapping[str, str]], hosts: Sequence[str]) -> str:
    """One message from what every rank that failed in the same block had to say."""
    crashed = [rank for rank, failure in failures.items() if "crash" in failure]
    if crashed:
        return failures[crashed[0]]["crash"].rstrip() + f"\n(on {name_ranks(crashed, hosts)} of {len(hosts)})"
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure["error"], []).append(rank)
    lines = []
    for text, ranks in by_text.items():
        suffix = "" if len(ranks) == len(hosts) else f" (on {name_ranks(ranks, hosts)} of {len(hosts)})"
        lines.append(f"{PREFIX}{text}{suffix}")
    return "\n".join(lines)


def report(error: BaseException, reporter: str, where: str, go_on: str) -> str:
    """The message about one rank's failure. reporter: this rank, if the message must name it; where: what it does."""
    text = str(error) if isinstance(error, UserError) else in_words(error)
    said = isinstance(error, DeadlineError | PeerError)  # these name ranks and place themselves
    parts = [f"reported by {reporter}"] * bool(reporter) + [f"in {where}"] * bool(where)
    by = f" ({', '.join(parts)})" if parts and not said else ""
    if text is not None:
        lines = [f"{PREFIX}{text}{by}"]
    else:
        lines = ["".join(traceback.format_exception(error)).rstrip(), by.strip()]
    return "\n".join([*lines, go_on]).rstrip()


def print_error(text: str) -> None:
    """On standard error, after everything on standard output."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
