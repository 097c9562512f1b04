"""A server of this process, for tests of clients."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def served(reply: Callable[[str, dict], dict], *statuses: int) -> Iterator[tuple[str, list[dict]]]:
    """Yields the address of a server that replies to a path and a body, and the bodies that it has got.

    statuses: of the first answers; of the others 200.
    """
    bodies: list[dict] = []
    left = [*statuses]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            self.send_response(left.pop(0) if left else 200)
            self.end_headers()
            self.wfile.write(json.dumps(reply(self.path, body)).encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
