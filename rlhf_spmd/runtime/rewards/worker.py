"""A process that calls reward functions for a rank, one row at a time (workers.py): without MPI, torch or a GPU.

It reads lines of JSON from a socket and answers each with one:

    {"functions": [...], "columns": [...]}    names of functions, to be loaded          {"ready": [note, ...]}
    {"function": 0, "row": 5, "prompt": ...}  a function by its place, and one row      {"score": 1.0, "logs": {...}}

An error in the user's code is answered with {"error": message}. Each answer also has "notes": what the functions
changed in the worker. The functions run in the main thread, so they may use SIGALRM. The process ends with its rank:
by PR_SET_PDEATHSIG, and when the socket closes.

Cost: the start of Python and the import of the user's file. Command: workers.py starts it.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.guard import signals, streams, user_code
from rlhf_spmd.runtime.guard.supervise import ASKED_BY, PR_SET_PDEATHSIG
from rlhf_spmd.runtime.rewards.function import RewardFunction, load_reward_function
from rlhf_spmd.runtime.rewards.styles import Scored

# What launchers and terminals send to every process of a job. The rank decides what happens then, and it may still
# need scores. A handler and not SIG_IGN, which the processes that a reward function starts would inherit.
LEFT_TO_THE_RANK = ASKED_BY | {signal.SIGUSR1, signal.SIGUSR2}


def main() -> None:
    """Serves the rank at the other end of the socket until that closes. Arguments: the socket's descriptor, and the
    process id of the rank."""
    streams.prepare(is_work=False, speaks=False)
    descriptor, rank = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # it ended before that
        os._exit(1)
    for number in LEFT_TO_THE_RANK:
        signals.handle(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_RANK)
    told: list[str] = []  # about the functions, for the rank
    user_code.notes.tell = told.append
    with socket.socket(fileno=descriptor) as connection:
        functions: list[RewardFunction] = []
        for line in _lines(connection):
            try:
                answer = _answer(json.loads(line), functions) | {"notes": told.copy()}
            except UserError as error:
                answer = {"error": str(error), "notes": told.copy()}
            told.clear()
            streams.flush()  # what the function printed, before the rank goes on
            try:
                connection.sendall(json.dumps(answer).encode() + b"\n")
            except (BrokenPipeError, ConnectionResetError):  # the rank has ended
                return
            except OSError:  # a function has closed the connection, so closing it would fail, too
                os._exit(1)


def _lines(connection: socket.socket) -> Iterator[str]:
    """The lines that the rank sends, until it ends or closes the connection."""
    # The rank may end without reading our answer.
    with connection.makefile("r", encoding="utf-8", newline="\n") as lines, suppress(ConnectionResetError):
        yield from lines


def _answer(message: dict[str, Any], functions: list[RewardFunction]) -> dict[str, Any]:
    """What a message asks for. functions: those loaded, filled by the first message. Raises UserError."""
    if "functions" in message:
        functions += [load_reward_function(spec, message["columns"]) for spec in message["functions"]]
        return {"ready": [note for function in functions for note in function.notes]}
    columns = [message["columns"]] if message["columns"] is not None else []
    texts = [message["prompt"]], [message["response"]], [message["tokens"]]
    row = Scored(*texts, columns, first=message["row"], key=message["key"])
    scores, logs = functions[message["function"]].score(row)
    return {"score": scores[0], "logs": {name: values[0] for name, values in logs.items()}}


if __name__ == "__main__":
    main()
