"""An MCP server with one tool, which starts at once: `python tool_server.py PORT TOOL FACTOR DELAY`; PORT 0 is stdio.

DELAY is how long, in seconds, every response takes. The result for a negative number is an error.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, TOOL, FACTOR, DELAY = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


def result(method: str, params: Any) -> Any:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "tools", "version": "1"},
        }
    if method == "tools/list":
        number = {"type": "object", "properties": {"number": {"type": "integer"}}}
        return {"tools": [{"name": TOOL, "inputSchema": number}]}
    if method == "tools/call":
        number = FACTOR * params["arguments"]["number"]
        content = [{"type": "text", "text": str(number)}]
        if number < 0:
            return {"content": content, "isError": True}
        return {"content": content, "structuredContent": {"result": number}}
    return {} if method == "ping" else None


def response(request: Any) -> bytes | None:
    if "id" not in request:
        return None
    time.sleep(DELAY)
    found = result(request["method"], request.get("params"))
    outcome = (
        {"error": {"code": -32601, "message": "Method not found"}}
        if found is None
        else {"result": found}
    )
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], **outcome}).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = response(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(202 if body is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def do_GET(self) -> None:
        self.send_response(405)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


if PORT:
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
for line in sys.stdin.buffer:
    answer = response(json.loads(line))
    if answer is not None:
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
