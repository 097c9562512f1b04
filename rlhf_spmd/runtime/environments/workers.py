"""Environments in worker processes: each of these holds the sessions of many episodes, whose calls run at once.

    {"key": 3, "do": "begin"}                       -> {"opening": {...}}
    {"key": 3, "do": "call", "name": ...}           -> {"step": {...}}; also step, with the text of a turn
    {"key": 3, "do": "reward"}                      -> {"reward": 1.0}
    {"key": 3, "do": "close"}                       no answer

The first message of an episode in a worker also has what it begins with and, if another worker has lost it, the steps
that bring a new object to where the old one was. An error of the environment is answered with "broken" and its lines, a
result of another form with "misused", a call whose time is over with "timed_out".
"""

import asyncio
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.environments.adapters import chosen, load_environments
from rlhf_spmd.runtime.environments.native import Session, Start, Step
from rlhf_spmd.runtime.workers.pool import WorkerPool
from rlhf_spmd.runtime.workers.serve import Link
from rlhf_spmd.tools import set_episode_id

GRACE_S = 5.0  # for a worker to say itself that the time of a call is over
LINES = 12  # of a traceback that a rank gets


def environment_workers(
    spec: str, columns: Sequence[str], *, num: int, beat: Callable[[], None] = lambda: None
) -> WorkerPool:
    """Starts workers for environments. Raises UserError if one cannot load them.

    spec, columns: as in load_environments.
    beat: see WorkerPool.
    """
    opening = {"environment": spec, "columns": list(columns)}
    how: dict[str, Any] = {"name": f"environment {spec}", "option": "environment_workers"}
    return WorkerPool(serve, opening, num=num, grace_s=GRACE_S, beat=beat, **how)


def serve(link: Link, opening: Mapping[str, Any]) -> None:
    """Loads the environments in a worker, and answers the messages of the rank. Raises UserError."""
    server = Server(link, opening["environment"], opening["columns"])
    link.send({"ready": []})
    asyncio.run(server.serve())


class Server:
    """The episodes of a worker."""

    def __init__(self, link: Link, spec: str, columns: Sequence[str]):
        """Raises UserError, as load_environments."""
        self.link, self.environments = link, load_environments(spec, columns)
        self.sessions: dict[int, tuple[Session, Start]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answers until the rank closes the connection."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()

        def begin(message: dict[str, Any]) -> None:
            task = loop.create_task(self._answer(message))
            self.tasks.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self.tasks.discard)

        def read() -> None:
            for message in self.link.messages():
                loop.call_soon_threadsafe(begin, message)
            loop.call_soon_threadsafe(is_over.set)

        threading.Thread(target=read, daemon=True).start()  # in which a large message waits for nothing
        await is_over.wait()

    async def _answer(self, message: dict[str, Any]) -> None:
        if message["do"] == "close":
            if message["key"] in self.sessions:
                with suppress(Exception):  # nothing depends on it any more
                    await self.sessions.pop(message["key"])[0].close()
            return
        answer: dict[str, Any]
        try:
            answer = await self._done(message)
        except UserError as error:
            answer = {"misused": str(error)}
        except BaseException as error:
            lines = "".join(traceback.format_exception(error)).strip().split("\n")
            answer = {"broken": "\n".join(lines[-LINES:])}
        self.link.send(answer | {"ticket": message["ticket"]})

    async def _done(self, message: dict[str, Any]) -> dict[str, Any]:
        limit_s, do = message["limit_s"], message["do"]
        if "start" in message:
            start = Start(**message["start"])
            set_episode_id(start.episode_id)
            session = chosen(self.environments, start.columns).make()
            opening = asdict(await in_time(session.begin(start), limit_s, "reset()"))
            self.sessions[message["key"]] = session, start
            if message["opening"] is not None:
                compare("reset()", opening, message["opening"])
            for asked, before in message["made"]:
                again = await in_time(step_of(session, asked), limit_s, asked["do"])
                compare(asked.get("name", "step()"), asdict(again), before)
            if do == "begin":
                return {"opening": opening}
        session, start = self.sessions[message["key"]]
        set_episode_id(start.episode_id)
        if do == "reward":
            return {"reward": await in_time(session.reward(), limit_s, "get_reward()")}
        try:
            return {"step": asdict(await in_time(step_of(session, message), limit_s, do))}
        except Late:
            return {"timed_out": True}


class Late(Exception):
    """The time of a call is over."""


async def in_time(work: Awaitable[Any], limit_s: float, what: str) -> Any:
    """Returns the result of some work. Raises Late if its time is over. limit_s: 0: no limit. what: works."""
    limit = asyncio.timeout(limit_s or None)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise Late(f"its {what} timed out after {limit_s:g} s") from None
        raise


async def step_of(session: Session, message: Mapping[str, Any]) -> Step:
    """Calls a tool, or answers a turn."""
    if message["do"] == "step":
        return await session.step(message["text"])
    return await session.call(message["name"], message["arguments"])


def compare(what: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raises UserError unless a call that is made again is answered as before."""
    if now != before:
        raise UserError(
            f"{what} gave {str(now)[:200]} where it gave {str(before)[:200]} before its object was made anew: let its "
            "answers depend on the calls, the columns and the seeds alone"
        )
