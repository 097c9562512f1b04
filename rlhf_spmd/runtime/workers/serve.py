"""The start of a worker process (pool.py): what binds it to its rank, and its lines of JSON.

A worker ends with its rank: by PR_SET_PDEATHSIG, and when the socket closes. It has neither MPI nor a GPU.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

from rlhf_spmd.files import output
from rlhf_spmd.runtime.failure import signals
from rlhf_spmd.runtime.failure.processes import PR_SET_PDEATHSIG
from rlhf_spmd.runtime.failure.signals import ASKED_BY

# What launchers and terminals send to every process of a job. The rank decides what happens then, and it may still
# need answers. A handler and not SIG_IGN, which the processes that user code starts would inherit.
LEFT_TO_THE_RANK = ASKED_BY | {signal.SIGUSR1, signal.SIGUSR2}


def connected() -> socket.socket:
    """Prepares this process -> the socket to its rank. Arguments of the process: the socket's descriptor, and the
    process id of the rank."""
    output.prepare(is_work=False, speaks=False)
    descriptor, rank = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # it ended before that
        os._exit(1)
    for number in LEFT_TO_THE_RANK:
        signals.handle(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_RANK)
    return socket.socket(fileno=descriptor)


def lines_of(connection: socket.socket) -> Iterator[str]:
    """Yields the lines that the rank sends, until it ends or closes the connection."""
    # The rank may end without reading our answer.
    with connection.makefile("r", encoding="utf-8", newline="\n") as lines, suppress(ConnectionResetError):
        yield from lines
