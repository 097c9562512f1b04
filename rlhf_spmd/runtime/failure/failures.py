"""The kinds of failure and their messages. No torch, no MPI."""

import errno
import hashlib
import socket
import traceback
from collections.abc import Mapping, Sequence

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure.signals import INTERRUPTED

SHORT_TEXT = 60  # texts up to this length are quoted when ranks differ
PREFIX = "rlhf_spmd: error: "  # of every message for a user
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
WRITING = (*NO_ROOM, errno.EFBIG, errno.EROFS)  # nothing that is read fails with these
DISK = (*WRITING, errno.EIO, errno.ESTALE)
NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
NO_MEMORY = ("MemoryError", "not enough memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")  # Python's RuntimeError; C++'s and gloo's
NO_DESCRIPTOR = ("Too many open files", "File table overflow")
NO_DEVICE = ("unsupported gloo device", "Unable to find address for")
MEANINGS = {  # words in the first line of a foreign error -> what it means
    NO_MEMORY: "this process ran out of memory ({}); lower micro_batch or generation.max_sequences, raise the ZeRO "
    "stage or tp, start more ranks, or raise the limit (`ulimit -v`, the job's control group)",
    NO_DESCRIPTOR: "this process has too many open files ({}); raise the limit (`ulimit -n`)",
    NO_THREAD: "this process ran out of memory, or may not start another thread ({}); compare the limits `ulimit -u` "
    "and pids.max of the job's control group with the threads that run, or lower micro_batch",
    NO_DEVICE: "gloo can't open a network device ({}); check GLOO_DEVICE_TRANSPORT and GLOO_SOCKET_IFNAME",
}
ADVICE = {
    (errno.EMFILE, errno.ENFILE): "raise the limit of open files (`ulimit -n`)",
    (errno.EFBIG,): "raise the limit of the size of a file (`ulimit -f`)",
    NO_ROOM: "make room there",
    (errno.EACCES, errno.EPERM): "ask its owner for the rights (chmod g+rX, also for the folders around it)",
    NO_FILE: "put a file there",
}
# In messages that torch.distributed's backends raise if a peer is late or gone (they have no own exception type).
PEER_ERRORS = ("gloo", "timed out", "timeout", "connection", "nccl", "peer", "socket")
LATE_ERRORS = ("timed out", "timeout")


class Late(Exception):
    """A deadline passed; `ranks` had not arrived (if empty: it is not known which)."""

    def __init__(self, what: str, ranks: tuple[int, ...], waited_s: float):
        super().__init__(what, ranks, waited_s)
        self.what, self.ranks, self.waited_s = what, ranks, waited_s


class Failed(Exception):
    """Some ranks failed; `failures` holds the message of each. Raised on every rank with the same content."""

    def __init__(self, failures: dict[int, bytes]):
        super().__init__(failures)
        self.failures = failures


class DeadlineError(UserError):
    """Some ranks did not arrive in time, so nothing more can be agreed with them."""


class PeerError(UserError):
    """A rank that this one communicates with is late or gone. lost: the connection broke, so it may have died."""

    def __init__(self, text: str, *, lost: bool):
        super().__init__(text)
        self.lost = lost


def _has(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


def is_peer_error(error: BaseException) -> bool:
    """Returns whether torch.distributed raised this because of another rank, and not for lack of something on this
    one."""
    text = str(error)
    is_own = not isinstance(error, RuntimeError) or _has(text, (*NO_DESCRIPTOR, *NO_THREAD, *NO_DEVICE))
    return not is_own and _has(text.lower(), PEER_ERRORS)


def is_lost(error: BaseException) -> bool:
    """Returns whether a connection broke; otherwise a deadline passed."""
    return not _has(str(error).lower(), LATE_ERRORS)


def explain(error: BaseException) -> str | None:
    """Explains foreign errors that a user can fix: memory, limits, disk, network; None for all others."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    for words, meaning in MEANINGS.items():
        if _has(text, words):
            return meaning.format(text)
    if isinstance(error, OSError) and error.errno in DISK:
        elsewhere = ", or write elsewhere (--runs or --out)" if error.errno in WRITING else ""
        return f"{error.strerror} when reading or writing {error.filename or 'a file'}: {advice(error)}{elsewhere}"
    if isinstance(error, OSError) and error.errno in NO_FILE and error.filename:
        return f"{error.filename} can't be opened: {error.strerror}; {advice(error)}, or name another file"
    return f"the connection to another rank broke or is late ({text})" if is_peer_error(error) else None


def advice(error: OSError) -> str:
    """Advises how to make it possible to open or write a file."""
    fitting = (text for numbers, text in ADVICE.items() if error.errno in numbers)
    return next(fitting, "check the disk and the rights")


def deadline_error(late: Late, rank: int, hosts: Sequence[str], last: Mapping[int, str]) -> DeadlineError:
    """Returns the error of a rank that waited too long in a control message.

    late: the ranks that it waited for.
    last: the last known positions of these ranks.
    """
    me = name_ranks([rank], hosts or [socket.gethostname()] * (rank + 1))
    text = "not all others arrived: find out what keeps them from starting, or check the network between the hosts"
    if late.ranks:
        text = f"{name_ranks(late.ranks, hosts)} did not arrive; find out what delays them, or raise the deadline"
    reports = [f"\n  rank {straggler} last reported: {position}" for straggler, position in last.items()]
    return DeadlineError(f"{late.what}: {me} waited {late.waited_s:.1f} s, but {text}{''.join(reports)}")


def name_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Names ranks in messages: `ranks 1, 3 (host a) and 5 (host b)`, or `ranks 1, 3` without hosts."""
    by_host: dict[str, list[str]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank] if hosts else "", []).append(str(rank))
    parts = [", ".join(numbers) + (f" (host {host})" if host else "") for host, numbers in by_host.items()]
    return ("ranks " if len(ranks) > 1 else "rank ") + " and ".join(parts)


def view_of(values: Mapping[str, str]) -> dict[str, str]:
    """Returns the message by which ranks compare texts: name -> the text quoted, or its digest if it is long."""
    views = {}
    for name, text in values.items():
        # a word of the command line may hold surrogates, for bytes that the locale's encoding lacks
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        views[name] = repr(text) if len(text) <= SHORT_TEXT else f"{digest[:16]}..."
    return views


def difference(what: str, views: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    """Returns the error message if the ranks' views (view_of) differ; None if they agree."""
    for name in sorted({name for view in views for name in view}):
        holders: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            holders.setdefault(view.get(name, "missing"), []).append(rank)
        if len(holders) > 1:
            groups = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            values = "; ".join(f"{view} on {name_ranks(ranks, hosts)}" for view, ranks in groups)
            return (
                f"{what}: {name} is not the same on every rank: {values}. Start every rank with the same program, "
                "files and options"
            )
    return None


def merge_messages(failures: Mapping[int, Mapping[str, str]], hosts: Sequence[str]) -> str:
    """Merges the messages of all ranks that failed in the same block: a traceback, else each error once."""
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure.get("crash") or f"{PREFIX}{failure['error']}", []).append(rank)
    crashes = [failure["crash"] for failure in failures.values() if "crash" in failure]
    lines = []
    for text in crashes[:1] or by_text:
        ranks = sorted(by_text[text])
        suffix = "" if len(ranks) == len(hosts) else f" (on {name_ranks(ranks, hosts)} of {len(hosts)})"
        lines.append(f"{text.rstrip()}{suffix}")
    return "\n".join(lines)


def within(where: str) -> str:
    """Returns a position of a rank as the end of a sentence."""
    return where if where.startswith("after ") else f"in {where}"  # between two actions


def report(error: BaseException, reporter: str, where: str, go_on: str) -> str:
    """Returns the message about one rank's failure.

    reporter: this rank, if the message must name it.
    where: its position.
    """
    text = str(error) if isinstance(error, UserError) else explain(error)
    if isinstance(error, KeyboardInterrupt):
        text = INTERRUPTED
    parts = [f"reported by {reporter}"] * bool(reporter) + [within(where)] * bool(where)
    is_complete = isinstance(error, DeadlineError | PeerError)  # these name ranks and position themselves
    by = f" ({', '.join(parts)})" if parts and not is_complete else ""
    trace = "".join(traceback.format_exception(error)).rstrip()
    message = f"{trace}\n{by.strip()}" if text is None else f"{PREFIX}{text}{by}"
    return f"{message}\n{go_on}".rstrip()
