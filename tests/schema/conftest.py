"""Fixtures of the schema tests."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.schema.material import Canary


@pytest.fixture
def canary() -> Iterator[Canary]:
    """A web server that counts its requests."""
    hits: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "string"}')

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Canary(f"http://127.0.0.1:{server.server_port}/schema.json", lambda: len(hits))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
