"""A process that holds the environments of some episodes of a rank (workers.py): without MPI, torch or a GPU.

It reads lines of JSON from a socket and answers each with one, in the order in which they are done:

    {"environment": spec, "columns": [...]}                      to be loaded                     {"ready": [note, ...]}
    {"ticket": 7, "episode": 3, "do": "begin", "start": {...}}   a new object for the episode     {"ticket": 7, ...}
    {"ticket": 8, "episode": 3, "do": "call", "name": ...}       a tool; also step, reward, load  {"ticket": 8, ...}
    {"episode": 3, "do": "close"}                                no answer

`timeout_s` ends a call: {"ticket": 8, "timed_out": true}. An error of the environment is answered with "broken" and its
lines, a result of another form with "misused". Each episode has one call at a time; the calls of several run at once.

Cost: the start of Python and the import of the user's file. Command: workers.py starts it.
"""

import asyncio
import json
import os
import traceback
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output
from rlhf_spmd.runtime.environments.adapters import Environment, chosen, load_environments
from rlhf_spmd.runtime.environments.kinds import Episode, Start, hanging
from rlhf_spmd.runtime.workers.serve import connected

MOST_LINE = 2**30  # bytes of a message
LINES = 12  # of a traceback that a rank is told


class Server:
    """The episodes of this process."""

    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer
        self.environments: dict[str, Environment] = {}
        self.held: dict[int, tuple[Environment, Episode]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answers until the rank closes the connection."""
        while line := await reader.readline():
            message = json.loads(line)
            if "environment" in message:
                try:
                    self.environments = load_environments(message["environment"], message["columns"])
                    self._say({"ready": []})
                except UserError as error:
                    self._say({"error": str(error)})
                continue
            task = asyncio.create_task(self._answer(message))
            self.tasks.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self.tasks.discard)

    async def _answer(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any]
        try:
            async with asyncio.timeout(message.get("timeout_s") or None) as limit:
                answer = await self._done(message)
        except UserError as error:
            answer = {"misused": str(error)}
        except BaseException as error:
            lines = "".join(traceback.format_exception(error)).strip().split("\n")
            answer = {"timed_out": True} if limit.expired() else {"broken": "\n".join(lines[-LINES:])}
        if "ticket" in message:
            self._say(answer | {"ticket": message["ticket"], "hanging": len(hanging)})

    def _say(self, answer: dict[str, Any]) -> None:
        output.flush()  # what the environment printed, before the rank goes on
        self.writer.write(json.dumps(answer).encode() + b"\n")

    async def _done(self, message: dict[str, Any]) -> dict[str, Any]:
        number, do = message["episode"], message["do"]
        if do == "begin":
            environment = chosen(self.environments, message["start"]["columns"])
            episode = environment.make()
            opening = await episode.begin(Start(**message["start"]))
            self.held[number] = environment, episode
            return {"opening": asdict(opening)}
        if do == "close":
            if number in self.held:
                with suppress(Exception):  # nothing depends on it any more
                    await self.held.pop(number)[1].close()
            return {}
        if number not in self.held:  # of an environment without a state
            self.held[number] = (environment := chosen(self.environments, message["columns"])), environment.make()
        environment, episode = self.held[number]
        if do == "reward":
            return {"reward": await episode.reward()}
        if do == "load":
            await episode.load(message["state"])
            return {}
        step = await (
            episode.step(message["text"]) if do == "step" else episode.call(message["name"], message["arguments"])
        )
        return {"step": asdict(step)} | ({"state": await episode.save()} if environment.saves else {})


async def _run() -> None:
    reader, writer = await asyncio.open_connection(sock=connected(), limit=MOST_LINE)
    with suppress(ConnectionResetError):  # the rank has ended
        await Server(writer).serve(reader)


def main() -> None:
    """Serves the rank at the other end of the socket until that closes. Arguments: see connected()."""
    try:
        asyncio.run(_run())
    finally:
        output.flush()
        os._exit(0)  # calls that hang do not keep the process


if __name__ == "__main__":
    main()
