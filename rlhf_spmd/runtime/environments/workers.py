"""Environments in worker processes: each of these holds the sessions of many episodes, whose calls run at once.

    {"key": 3, "do": "begin", "start": {...}}       -> {"opening": {...}}
    {"key": 3, "do": "call", "name": ...}           -> {"step": {...}}; also step, with the text of a turn
    {"key": 3, "do": "reward"}                      -> {"reward": 1.0}
    {"key": 3, "do": "close"}                       no answer

Each also names the environment, the id of the episode and the number of the row among those of the episode. An error of
the environment is answered with "broken" and its lines, a result of another form with "misused", a call whose time is
over with "timed_out", an episode that this worker does not have with "gone". An agent may ask for any of its rows next,
so each row has a question that waits for it.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.environments.adapters import load_environments
from rlhf_spmd.runtime.environments.agents import AgentRow, AgentSession
from rlhf_spmd.runtime.environments.endpoint import Endpoint
from rlhf_spmd.runtime.environments.native import ANSWER_ROLES, Session, Start
from rlhf_spmd.runtime.workers.pool import WorkerPool
from rlhf_spmd.runtime.workers.serve import Link
from rlhf_spmd.tools import set_episode_id

MOST_THREADS = 512  # of calls that run at once in a worker; those that hang keep theirs
GRACE_S = 5.0  # for a worker to say itself that the time of a call is over
LINES = 12  # of a traceback that a rank gets


def environment_workers(
    spec: str,
    columns: Sequence[str],
    *,
    num: int,
    drawing: Mapping[str, Any] | None = None,
    num_rows: int = 1,
    extends: Sequence[str] = ANSWER_ROLES,
    beat: Callable[[], None] = lambda: None,
) -> WorkerPool:
    """Starts workers for environments. Raises UserError if one cannot load them.

    spec, columns: as in load_environments.
    drawing: how the model draws, for agents; None: there are none.
    num_rows, extends: see Endpoint.
    beat: see WorkerPool.
    """
    agents = None if drawing is None else [drawing, num_rows, list(extends)]
    opening = {"environment": spec, "columns": list(columns), "agents": agents}
    how: dict[str, Any] = {"name": f"environment {spec}", "option": "environment_workers"}
    return WorkerPool(serve, opening, num=num, grace_s=GRACE_S, beat=beat, **how)


def serve(link: Link, opening: Mapping[str, Any]) -> None:
    """Loads the environments in a worker, and answers the messages of the rank. Raises UserError."""
    server = Server(link, opening["environment"], opening["columns"], opening["agents"])
    link.send({"ready": True})
    asyncio.run(server.serve())


class Server:
    """The episodes of a worker."""

    def __init__(self, link: Link, spec: str, columns: Sequence[str], agents: Sequence[Any] | None):
        """Raises UserError, as load_environments. agents: of Endpoint; None: there are none."""
        self.endpoint = None if agents is None else Endpoint(*agents)
        self.link, self.environments = link, load_environments(spec, columns)
        self.sessions: dict[int, Session] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answers until the rank closes the connection."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))
        if self.endpoint is not None:
            await self.endpoint.open()

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
                    await self.sessions.pop(message["key"]).close()
            return
        answer: dict[str, Any]
        limit = asyncio.timeout(message["limit_s"] or None)
        try:
            async with limit:
                answer = await self._reply(message)
        except UserError as error:
            answer = {"misused": str(error)}
        except BaseException as error:
            lines = "".join(traceback.format_exception(error)).strip().split("\n")
            answer = {"timed_out": True} if limit.expired() else {"broken": "\n".join(lines[-LINES:])}
        self.link.send(answer | {"ticket": message["ticket"]})

    async def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        key, do, environment = message["key"], message["do"], self.environments[message["environment"]]
        set_episode_id(message["episode_id"])
        if do == "begin":
            session = self.sessions.get(key) or environment.make()
            if isinstance(session, AgentSession) and key not in self.sessions:
                assert self.endpoint is not None
                session.home, session.opened = self.endpoint, message["opened"]
                self.sessions[key] = session  # which its other rows look for
            opening = await session.row(message["row"]).begin(Start(**message["start"]))
            self.sessions[key] = session
            return {"opening": asdict(opening)}
        if not environment.is_stateless and key not in self.sessions:
            return {"gone": True}
        session = environment.make() if environment.is_stateless else self.sessions[key].row(message["row"])
        if isinstance(session, AgentRow) and not session.has_begun:
            return {"gone": True}
        if do == "reward":
            session.cut(message.get("cut"))
            return {"reward": await session.reward()}
        if do == "step":
            return {"step": asdict(await session.step(message["text"]))}
        return {"step": asdict(await session.call(message["name"], message["arguments"]))}
