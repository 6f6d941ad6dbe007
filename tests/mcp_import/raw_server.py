"""An MCP server on stdio without the SDK: quick to start, and able to misbehave in any way asked for.

`python raw_server.py MODE [ARGUMENT]`; see `MODES`. Its tool `answer` gives back exactly the result it was sent.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ANY = {"type": "object"}
TOOLS: list[dict[str, Any]] = [
    {"name": name, "inputSchema": ANY, "description": f"The tool {name}."}
    for name in ("answer", "die", "garbage", "malformed", "big", "never", "cancelled", "pid", "env", "fail", "count",
                 "change", "remove", "progress", "log", "ask", "long_line_other_end", "not_json", "batch",
                 "say", "exit_after", "listings", "deaf", "flood", "pings", "pinged", "orphan", "busy")
]  # fmt: skip
STATE: dict[str, Any] = {"cancelled": [], "never": [], "asked": {}, "listings": 0, "pinged": 0}


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(value: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}]}


def call(request_id: Any, name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> None:
    if name == "answer":
        return send({"id": request_id, "result": arguments["result"]})
    if name == "die":
        count()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "exit_after":
        send({"id": request_id, "result": text("bye")})
        os._exit(0)
    if name == "garbage":
        sys.stdout.write('this is {"no": JSON\n\x00\xff\n')
        sys.stdout.flush()
        return None
    if name == "malformed":
        result = {
            "deep": "[" * 9000 + "]" * 9000,
            "surrogate": '{"a": "\\ud800"}',
            "no object": '""',
        }
        sys.stdout.write(
            f'{{"jsonrpc": "2.0", "id": {request_id}, "result": {result[arguments["what"]]}}}\n'
        )
        sys.stdout.flush()
        return None
    if name == "big":
        blob = "x" * arguments["bytes"]
        return send({"id": request_id, "result": text(blob)})
    if name == "long_line_other_end":
        line = json.dumps(
            {"result": text("x" * arguments["bytes"]), "jsonrpc": "2.0", "id": request_id}
        )
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        return None
    if name == "not_json":
        deep: Any = {}
        for _ in range(100):
            deep = {"a": deep}
        value = {"nan": float("nan"), "deep": deep}[arguments["what"]]
        return send(
            {"id": request_id, "result": {"content": [], "structuredContent": {"x": value}}}
        )
    if name == "say":
        stream = getattr(sys, arguments.get("stream", "stdout")).buffer
        stream.write(base64.b64decode(arguments["bytes"]) + b"\n")
        stream.flush()
        return send({"id": request_id, "result": text("said")})
    if name == "pings":
        for number in range(arguments["count"]):
            send({"id": f"ping-{number}", "method": "ping"})
        return send({"id": request_id, "result": text("done")})
    if name == "batch":
        log = {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {"level": "info", "data": "x"},
        }
        answer = {"jsonrpc": "2.0", "id": request_id, "result": text("together")}
        sys.stdout.write(json.dumps([log, answer, 7]) + "\n")
        sys.stdout.flush()
        return None
    if name == "never":
        STATE["never"].append(request_id)
        return None
    if name == "cancelled":
        return send(
            {"id": request_id, "result": text(json.dumps([STATE["never"], STATE["cancelled"]]))}
        )
    if name == "pid":
        return send({"id": request_id, "result": text(str(os.getpid()))})
    if name == "env":
        return send({"id": request_id, "result": text(json.dumps(dict(os.environ)))})
    if name == "fail":
        return send(
            {
                "id": request_id,
                "error": {"code": -32050, "message": "no luck", "data": {"why": "today"}}
                | arguments,
            }
        )
    if name == "orphan":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os._exit(arguments.get("code", 3))
    if name == "busy":
        os.close(STATE["parent"])
        time.sleep(arguments["seconds"])
        return send({"id": request_id, "result": text(str(os.getpid()))})
    if name == "pinged":
        return send({"id": request_id, "result": text(str(STATE["pinged"]))})
    if name == "listings":
        return send({"id": request_id, "result": text(str(STATE["listings"]))})
    if name == "deaf":
        send({"id": request_id, "result": text("no more")})
        time.sleep(600)
    if name == "flood":
        send({"id": request_id, "result": text("here it comes")})
        log = {"jsonrpc": "2.0", "method": "notifications/message"}
        line = json.dumps({**log, "params": {"level": "debug", "data": "x" * 1000}}) + "\n"
        while True:
            sys.stdout.write(line)
            sys.stderr.write(line)
    if name == "count":
        return send({"id": request_id, "result": text(str(count()))})
    if name == "change":
        for tool in TOOLS:
            if tool["name"] == arguments["tool"]:
                tool["description"] = arguments.get("description", "Something else.")
                break
        else:
            TOOLS.append({"name": arguments["tool"], "inputSchema": ANY})
        send({"method": "notifications/tools/list_changed"})
        return send({"id": request_id, "result": text("done")})
    if name == "remove":
        TOOLS[:] = [tool for tool in TOOLS if tool["name"] != arguments["tool"]]
        send({"method": "notifications/tools/list_changed"})
        return send({"id": request_id, "result": text("done")})
    if name == "progress":
        for step in range(1, arguments.get("steps", 3) + 1):
            params = {
                "progressToken": meta["progressToken"],
                "progress": step,
                "total": 3,
                "message": f"step {step}",
            }
            send({"method": "notifications/progress", "params": params})
        return send({"id": request_id, "result": text("done")})
    if name == "log":
        send(
            {
                "method": "notifications/message",
                "params": {"level": "warning", "data": arguments["data"]},
            }
        )
        return send({"id": request_id, "result": text("done")})
    if name == "ask":
        STATE["asked"]["question"] = request_id
        params = {"message": "Your name?", "requestedSchema": {"type": "object", "properties": {}}}
        return send(
            {
                "id": "question",
                "method": arguments["method"],
                "params": {**params, **arguments.get("params", {})},
            }
        )
    return send({"id": request_id, "error": {"code": -32602, "message": f"unknown tool {name}"}})


def count() -> int:
    path = os.environ.get("COUNTER")
    if not path:
        return 0
    with Path(path).open("a") as file:
        file.write("x")
    return Path(path).stat().st_size


def listed(params: dict[str, Any]) -> dict[str, Any]:
    mode = sys.argv[1]
    STATE["listings"] += 1
    if mode == "pages":
        return {"tools": [], "nextCursor": str(int(params.get("cursor") or 0) + 1)}
    if mode == "many":
        page = int(params.get("cursor") or 0)
        tools = [{"name": f"tool_{page * 100 + n}", "inputSchema": ANY} for n in range(100)]
        return {"tools": tools, **({"nextCursor": str(page + 1)} if page < 49 else {})}
    if mode == "endless":
        return {
            "tools": [{"name": f"tool_{params.get('cursor')}", "inputSchema": ANY}],
            "nextCursor": "again",
        }
    if mode == "odd":
        good = {"inputSchema": ANY}
        return {"tools": [
            {"name": "good", **good}, {"name": "a\nb", **good}, {"name": "twice", **good}, {"name": "twice", **good},
            {"name": "files/read me", **good}, {"name": "no_schema"}, {"inputSchema": ANY}, "no object", None,
            {"name": "x_y", **good}, {"name": "x/y", **good}, {"name": "\u202ereversed", **good},
            {"name": "bad_schemas", "inputSchema": {"type": "nonsense"}, "outputSchema": {"$ref": "http://nowhere/"}},
            {"name": "good_too", **good},
        ]}  # fmt: skip
    if mode == "tools":
        return {"tools": json.loads(sys.argv[2])}
    return {"tools": TOOLS}


def handle(message: dict[str, Any]) -> None:
    method, request_id, params = (
        message.get("method"),
        message.get("id"),
        message.get("params") or {},
    )
    if method is None and request_id not in STATE["asked"]:
        return
    if sys.argv[1] == "result" and method == sys.argv[2]:
        sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {request_id}, "result": {sys.argv[3]}}}\n')
        sys.stdout.flush()
        return
    if sys.argv[1:3] == ["result", "server/discover"] and method == "initialize":
        method = "unknown"
    if method is None:
        send(
            {
                "id": STATE["asked"][request_id],
                "result": text(json.dumps(message.get("result", message.get("error")))),
            }
        )
    elif method == "initialize":
        version = params["protocolVersion"]
        if sys.argv[1] == "version":
            version = sys.argv[2]
        resources: dict[str, Any] = {"resources": {}} if sys.argv[1] == "resources" else {}
        send({"id": request_id, "result": {
            "protocolVersion": version, "capabilities": {"tools": {"listChanged": True}, "logging": {}, **resources},
            "serverInfo": {"name": "raw", "version": "7.1"},
        }})  # fmt: skip
    elif method == "tools/list":
        send({"id": request_id, "result": listed(params)})
        if sys.argv[1] == "storm":
            for _ in range(100):
                send({"method": "notifications/tools/list_changed"})
    elif method == "resources/list" and sys.argv[1] == "resources":
        send({"id": request_id, "result": {"resources": json.loads(sys.argv[2])}})
    elif method == "tools/call":
        call(request_id, params["name"], params.get("arguments") or {}, params.get("_meta") or {})
    elif method == "notifications/cancelled":
        STATE["cancelled"].append(params["requestId"])
    elif request_id is not None:
        STATE["pinged"] += method == "ping"
        send({"id": request_id, "error": {"code": -32601, "message": "Method not found"}})


def main() -> None:
    mode = sys.argv[1]
    if mode == "exit":
        sys.exit("the configuration is missing")
    if mode == "crash_later" and Path(sys.argv[2]).exists():
        sys.exit("not again")
    if mode == "silent_later" and Path(sys.argv[2]).exists():
        mode = "silent"
    if mode in ("crash_later", "silent_later"):
        Path(sys.argv[2]).touch()
    if mode == "slow":
        time.sleep(float(sys.argv[2]))
    if mode == "noisy":
        sys.stdout.write('Welcome to the server!\n{"level": "info"}\n[1, 2]\n\n')
        sys.stdout.flush()
        sys.stderr.write("starting\n")
    if mode == "launcher" and os.fork():
        os._exit(0)
    if mode == "later_launcher":
        # The launcher exits when its child, the server, closes the pipe between them.
        until, STATE["parent"] = os.pipe()
        if os.fork():
            os.close(STATE["parent"])
            os.read(until, 1)
            os._exit(0)
    if mode == "bom":
        sys.stdout.write("\ufeff")
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "daemon":
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    if mode == "parent":
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL
        )
    for line in sys.stdin:
        if mode != "silent":
            handle(json.loads(line))
    while mode == "stubborn":
        time.sleep(60)


if __name__ == "__main__":
    main()
