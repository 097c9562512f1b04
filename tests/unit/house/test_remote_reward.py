"""The client of reward servers, against a server of this process."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf_spmd import rewards
from rlhf_spmd.errors import UserError


class Server:
    """Scores a query by its length. statuses: of the first answers. spoil: changes an answer."""

    def __init__(self, statuses=(), spoil=lambda answer: answer):
        self.requests, self.left = [], list(statuses)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                status = outer.left.pop(0) if outer.left else 200
                answer = json.dumps(spoil({"rewards": [float(len(text)) for text in body["query"]]})).encode()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/get_reward"


@pytest.fixture
def serve(monkeypatch):
    """Starts servers; pauses between tries take no time."""
    started = []

    async def at_once(seconds):
        pauses.append(seconds)

    def start(*args, **kwargs):
        started.append(Server(*args, **kwargs))
        return started[-1]

    pauses = start.pauses = []
    monkeypatch.setattr(rewards.asyncio, "sleep", at_once)
    yield start
    for one in started:
        one.http.shutdown()
        one.http.server_close()


def ask(function, queries, **columns):
    return asyncio.run(function(queries, ["p"] * len(queries), [None] * len(queries), **columns))


def test_batches_keep_the_order_and_servers_take_turns(serve):
    first, second = serve(), serve()
    function = rewards.remote(first.url, second.url, batch=2, columns=["answer"])
    queries = ["a" * length for length in (3, 1, 4, 1, 5)]
    assert ask(function, queries, answer=["x"] * 5, other=["y"] * 5) == [3.0, 1.0, 4.0, 1.0, 5.0]
    assert sorted(len(one["query"]) for one in first.requests + second.requests) == [1, 2, 2]
    assert first.requests and second.requests
    assert {*first.requests[0]} == {"query", "prompts", "labels", "answer"}


def test_a_failing_server_is_left_for_the_next_one(serve):
    bad, good = serve([503] * 9), serve()
    assert ask(rewards.remote(bad.url, good.url), ["abc"]) == [3.0]
    assert len(bad.requests) == 1 and serve.pauses == [1.0]


def test_a_server_that_is_not_there_ends_with_its_address(serve):
    gone = serve()
    gone.http.server_close()
    with pytest.raises(UserError, match=r"after 3 tries, is: http://127.0.0.1:\d+/get_reward"):
        ask(rewards.remote(gone.url, tries=3), ["abc"])
    assert serve.pauses == [1.0, 2.0]
