"""A process that calls reward functions for a rank, one row at a time (workers.py): without MPI, torch or a GPU.

It reads lines of JSON from a socket and answers each with one:

    {"functions": [...], "columns": [...]}    names of functions, to be loaded          {"ready": [note, ...]}
    {"function": 0, "row": 5, "prompt": ...}  a function by its place, and one row      {"score": 1.0, "logs": {...}}

An error in the user's code is answered with {"error": message}. The functions run in the main thread, so they may use
SIGALRM.

Cost: the start of Python and the import of the user's file. Command: workers.py starts it.
"""

import json
import os
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output
from rlhf_spmd.runtime.rewards.function import RewardFunction, load_reward_function
from rlhf_spmd.runtime.rewards.styles import Scored
from rlhf_spmd.runtime.workers.serve import connected, lines_of


def main() -> None:
    """Serves the rank at the other end of the socket until that closes. Arguments: see connected()."""
    with connected() as connection:
        functions: list[RewardFunction] = []
        for line in lines_of(connection):
            try:
                answer = _answer(json.loads(line), functions)
            except UserError as error:
                answer = {"error": str(error)}
            output.flush()  # what the function printed, before the rank goes on
            try:
                connection.sendall(json.dumps(answer).encode() + b"\n")
            except (BrokenPipeError, ConnectionResetError):  # the rank has ended
                return
            except OSError:  # a function has closed the connection, so closing it would fail, too
                os._exit(1)


def _answer(message: dict[str, Any], functions: list[RewardFunction]) -> dict[str, Any]:
    """Answers a message. Raises UserError.

    functions: those loaded, filled by the first message.
    """
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
