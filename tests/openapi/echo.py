"""An HTTP server that answers every request with what arrived, as JSON. Standard library only.

It runs in threads, so that tests of any event loop, and scripts in any environment, can share it.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl


class Seen:
    """One request as the server saw it."""

    def __init__(self, wire: dict[str, Any]) -> None:
        self.method: str = wire["method"]
        self.target: str = wire["target"]
        self.headers: list[tuple[str, str]] = [(k, v) for k, v in wire["headers"]]
        self.body: bytes = base64.b64decode(wire["body"])

    def header(self, name: str) -> str | None:
        """Return the only value of a header; None if it is absent."""
        values = [v for k, v in self.headers if k.lower() == name.lower()]
        assert len(values) < 2, f"{name} arrived {len(values)} times"
        return values[0] if values else None

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def form(self) -> list[tuple[str, str]]:
        return parse_qsl(self.body.decode(), keep_blank_values=True)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The parts of a multipart body, read by another library than wrote them."""
        head = f"Content-Type: {self.header('content-type')}\r\n\r\n".encode()
        message = message_from_bytes(head + self.body, policy=HTTP)
        result: list[dict[str, Any]] = []
        for part in message.iter_parts():
            assert part.get_content_disposition() == "form-data"
            result.append(
                {
                    "name": part.get_param("name", header="content-disposition"),
                    "filename": part.get_filename(),
                    "type": part["content-type"] and part.get_content_type(),
                    "headers": {name.lower(): str(value) for name, value in part.items()},
                    "content": part.get_payload(decode=True),
                }
            )
        return result


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        wire = {
            "method": self.command,
            "target": self.path,
            "headers": self.headers.items(),
            "body": base64.b64encode(self.rfile.read(length)).decode(),
        }
        self.server.seen.append(Seen(wire))  # type: ignore[attr-defined]
        content = json.dumps(wire).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - the library's names
    do_HEAD = do_OPTIONS = do_TRACE = do_QUERY = _answer  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Echo:
    """A running echo server: its address, and every request it got."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self.url = f"http://127.0.0.1:{server.server_address[1]}"

    @property
    def seen(self) -> list[Seen]:
        return self._server.seen  # type: ignore[attr-defined, no-any-return]


@contextmanager
def running_echo() -> Iterator[Echo]:
    """Start a server on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Echo(server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
