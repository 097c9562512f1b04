"""Where the agents of a worker find the model: a client for each episode, and an endpoint on the loopback for clients
that agents make themselves.

The endpoint is POST /v1/chat/completions on a free port, which the worker holds while it lives. A key is drawn for
each episode, and says whose request it is; without one nothing is answered. An agent's own process needs to say none:
OPENAI_BASE_URL and OPENAI_API_KEY are set in it, and a request that httpx sends in the context of an episode bears the
key of that episode, even if its client was made elsewhere.
"""

import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from email.message import Message
from functools import wraps
from http import HTTPStatus
from http.client import parse_headers
from importlib import import_module
from io import BytesIO
from types import MappingProxyType, SimpleNamespace
from typing import Any

from rlhf_spmd.runtime.environments.agents import AgentSession, Refused, chunks
from rlhf_spmd.runtime.environments.native import ANSWER_ROLES

HOST, PATH = "127.0.0.1", "/v1/chat/completions"
AGAIN = "x-stainless-retry-count"  # of OpenAI's package
MOST_HEAD, MOST_BODY = 2**16, 2**26  # bytes of a request
CLIENTS = ("httpx", "httpx2")  # that OpenAI's package, and most others, send requests with
UNKNOWN = (
    "the key names no episode under way: give client.api_key to other processes and to clients that do not use httpx"
)
_key: ContextVar[str] = ContextVar("key", default="")  # of the episode


class Endpoint:
    """The agents of a worker by the keys of their episodes."""

    def __init__(self, drawing: Mapping[str, Any], num_rows: int = 1, extends: Sequence[str] = ANSWER_ROLES):
        """Binds a port, and tells it to clients of this process, also those that are made when a file is imported.

        drawing: see refused_option.
        num_rows: of an episode.
        extends: roles of messages that extend a row.
        """
        self.drawing, self.num_rows, self.extends = drawing, num_rows, extends
        self._socket = socket.create_server((HOST, 0))
        self.base_url = f"http://{HOST}:{self._socket.getsockname()[1]}/v1"
        os.environ |= {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": secrets.token_urlsafe(24)}
        for name in CLIENTS:
            with suppress(ImportError):
                library = import_module(name)
                for kind in (library.Client, library.AsyncClient):
                    kind.send = self._with_key(kind.send)
        self._sessions: dict[str, AgentSession] = {}
        self._first: Any = None  # client of the package openai

    async def open(self) -> None:
        """Answers requests from now on."""
        await asyncio.start_server(self._serve, sock=self._socket, limit=MOST_HEAD)

    def _with_key(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(send)
        def sent(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if _key.get() and str(request.url).startswith(self.base_url):
                request.headers["Authorization"] = f"Bearer {_key.get()}"
            return send(client, request, *args, **kwargs)

        return sent

    def enter(self, session: AgentSession) -> Any:
        """Returns the client of an episode: openai.AsyncOpenAI if the user's code imports openai."""
        key = session.endpoint_key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        _key.set(key)
        if "openai" not in sys.modules:
            return Client(session, self.base_url, key)
        if self._first is None:  # whose connections the others share
            how: dict[str, Any] = {"max_retries": 0, "timeout": None}
            self._first = sys.modules["openai"].AsyncOpenAI(base_url=self.base_url, api_key=key, **how)
        return self._first.with_options(api_key=key)

    def leave(self, session: AgentSession) -> None:
        """Forgets an episode."""
        self._sessions.pop(session.endpoint_key, None)

    # ---- HTTP -------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of a connection, one after the other."""
        ends = asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, asyncio.CancelledError
        with suppress(*ends, ValueError):
            while True:
                line, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
                headers = parse_headers(BytesIO(rest))
                length = int(headers.get("Content-Length") or 0)
                if length > MOST_BODY or "Transfer-Encoding" in headers:
                    break
                data = await reader.readexactly(length)
                status, kind, text = await self._reply(line.decode(), headers, data)
                head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
                writer.write(f"{head}Content-Length: {len(text.encode())}\r\n\r\n{text}".encode())
                await writer.drain()
        writer.close()

    async def _reply(self, line: str, headers: Message, data: bytes) -> tuple[int, str, str]:
        """Returns status, kind and text of the answer to a request."""
        session = self._sessions.get((headers.get("Authorization") or "").removeprefix("Bearer "))
        if session is None:
            return _error(401, "invalid_api_key", UNKNOWN)
        if line.split(" ")[:2] != ["POST", PATH]:
            return _error(404, "not_found", f"only POST {PATH} is answered here")
        try:
            body = json.loads(data)
            answer = await session.create(body, is_again=headers.get(AGAIN, "0") != "0")
        except Refused as error:
            return _error(error.status_code, error.code, error.message)
        except (ValueError, TypeError, AttributeError):
            return _error(400, "invalid_json", "the request is not a JSON object of chat completions")
        except asyncio.CancelledError:  # its episode is over
            return _error(400, "cancelled", "the episode of this request is over")
        if not body.get("stream"):
            return 200, "application/json", json.dumps(answer)
        events = [*map(json.dumps, chunks(answer, body)), "[DONE]"]
        return 200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events)


def _error(status: int, code: str, message: str) -> tuple[int, str, str]:
    about = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return status, "application/json", json.dumps({"error": about})


# ---- where nobody imports openai ------------------------------------------------------------------------------------


class Said(SimpleNamespace):
    """A JSON object with attributes, as the package openai has them."""

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Returns the object as dicts and lists."""
        return json.loads(json.dumps(self, default=vars), object_hook=_without_none if exclude_none else None)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class Client:
    """A client with `chat.completions.create`, `base_url` and `api_key`."""

    def __init__(self, session: AgentSession, base_url: str, api_key: str):
        self.base_url, self.api_key, self._session = base_url, api_key, session
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, *, extra_body: Mapping[str, Any] = MappingProxyType({}), **body: Any) -> Any:
        """Answers a request. Raises Refused, whose attributes are those of openai.BadRequestError."""
        body = json.loads(json.dumps(body | {**extra_body}, default=vars))
        answer = await self._session.create(body)
        parts = chunks(answer, body) if body.get("stream") else [answer]
        said = [json.loads(json.dumps(part), object_hook=lambda values: Said(**values)) for part in parts]
        return _stream(said) if body.get("stream") else said[0]


async def _stream(said: list[Said]) -> AsyncIterator[Said]:
    for chunk in said:
        yield chunk
