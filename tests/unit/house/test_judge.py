"""The reward function of docs/judge.md, as it stands there, against a server that speaks the chat protocol."""

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "judge.md"


class Judge(BaseHTTPRequestHandler):
    """Replies to an answer with its own text."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["model"]) == ("/v1/chat/completions", "judge")
        reply = body["messages"][0]["content"].partition("Answer: ")[2]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_reply_becomes_a_score(address):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = {}
    exec(block, names)
    names["SERVER"] = address
    replies = ["7", "I say 10", "11", "none"]
    assert asyncio.run(names["score"](["Why?"] * len(replies), replies)) == [0.7, 1.0, 1.0, 0.0]
