"""A worker process by itself: what binds it to its rank (pool.py), and the messages of JSON between the two.

A worker ends with its rank: by PR_SET_PDEATHSIG, and when the connection closes. It has neither MPI nor a GPU.
"""

import ctypes
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output
from rlhf_spmd.runtime.failure import signals
from rlhf_spmd.runtime.failure.launcher import without_launcher
from rlhf_spmd.runtime.failure.processes import PR_SET_PDEATHSIG
from rlhf_spmd.runtime.failure.signals import ASKED_BY

# What launchers and terminals send to every process of a job. The rank decides what happens then, and it may still
# need answers. A handler and not SIG_IGN, which the processes that user code starts would inherit.
LEFT_TO_THE_RANK = ASKED_BY | {signal.SIGUSR1, signal.SIGUSR2}
NO_DEVICES = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")


class Link:
    """The connection of a worker to its rank."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields the messages of the rank, until it ends or closes the connection."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            except OSError:  # user code has closed the connection
                os._exit(1)
            yield json.loads(data)

    def send(self, answer: Mapping[str, Any]) -> None:
        """Sends an answer, after what user code printed."""
        output.flush()
        try:
            self._connection.send_bytes(json.dumps(answer).encode())
        except (BrokenPipeError, ConnectionResetError):  # the rank has ended
            return
        except OSError:
            os._exit(1)


def run(
    connection: Connection, rank: int, program: Callable[[Link, Mapping[str, Any]], None], opening: Mapping[str, Any]
) -> None:
    """Runs a worker until the connection to its rank closes; the first answer is {"ready": True} or {"error": text}.

    rank: its process id.
    program: loads the user's code and answers messages.
    opening: what program begins with.
    """
    os.setsid()  # so that it is killed together with what it started
    output.prepare(is_work=False, speaks=False)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # it ended before that
        os._exit(1)
    kept = without_launcher(os.environ)
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]
    os.environ.update(NO_DEVICES)
    for number in LEFT_TO_THE_RANK:
        signals.handle(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_RANK)
    link = Link(connection)
    try:
        program(link, opening)
    except UserError as error:
        link.send({"error": str(error)})
    output.flush()
