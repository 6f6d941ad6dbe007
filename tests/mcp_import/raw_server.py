"""An MCP server on stdio without the SDK: quick to start, and able to misbehave in any way asked for.

`python raw_server.py MODE [ARGUMENT]`; `main`, `handle` and `listed` define the modes. Its tool `answer` gives back
exactly the result it was sent.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

ANY = {"type": "object"}
STATE: dict[str, Any] = {"cancelled": [], "never": [], "asked": {}, "listings": 0}


class Call(NamedTuple):
    id: Any
    arguments: dict[str, Any]
    meta: dict[str, Any]


Handler: TypeAlias = Callable[[Call], dict[str, Any] | None]
"""Returns the result of a call; None if it sends none, or has sent it."""

TOOLS: list[dict[str, Any]] = []
HANDLERS: dict[str, Handler] = {}


def tool(handler: Handler) -> Handler:
    name = handler.__name__
    TOOLS.append({"name": name, "inputSchema": ANY, "description": f"The tool {name}."})
    HANDLERS[name] = handler
    return handler


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def send(message: dict[str, Any]) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}))


def text(value: object) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(value)}]}


def add_to_counter() -> int:
    path = os.environ.get("COUNTER")
    if not path:
        return 0
    with Path(path).open("a") as file:
        file.write("x")
    return Path(path).stat().st_size


@tool
def answer(call: Call) -> dict[str, Any]:
    result: dict[str, Any] = call.arguments["result"]
    return result


@tool
def die(call: Call) -> None:
    add_to_counter()
    os.kill(os.getpid(), signal.SIGKILL)


@tool
def garbage(call: Call) -> None:
    write('this is {"no": JSON\n\x00\xff')


@tool
def malformed(call: Call) -> None:
    result = {
        "deep": "[" * 9000 + "]" * 9000,
        "surrogate": '{"a": "\\ud800"}',
        "no object": '""',
    }
    write(f'{{"jsonrpc": "2.0", "id": {call.id}, "result": {result[call.arguments["what"]]}}}')


@tool
def big(call: Call) -> dict[str, Any]:
    return text("x" * call.arguments["bytes"])


@tool
def never(call: Call) -> None:
    STATE["never"].append(call.id)


@tool
def cancelled(call: Call) -> dict[str, Any]:
    return text(json.dumps([STATE["never"], STATE["cancelled"]]))


@tool
def pid(call: Call) -> dict[str, Any]:
    return text(os.getpid())


@tool
def env(call: Call) -> dict[str, Any]:
    return text(json.dumps(dict(os.environ)))


@tool
def fail(call: Call) -> None:
    error = {"code": -32050, "message": "no luck", "data": {"why": "today"}}
    send({"id": call.id, "error": error | call.arguments})


@tool
def count(call: Call) -> dict[str, Any]:
    return text(add_to_counter())


@tool
def change(call: Call) -> dict[str, Any]:
    for each in TOOLS:
        if each["name"] == call.arguments["tool"]:
            each["description"] = call.arguments.get("description", "Something else.")
            break
    else:
        TOOLS.append({"name": call.arguments["tool"], "inputSchema": ANY})
    send({"method": "notifications/tools/list_changed"})
    return text("done")


@tool
def remove(call: Call) -> dict[str, Any]:
    TOOLS[:] = [each for each in TOOLS if each["name"] != call.arguments["tool"]]
    send({"method": "notifications/tools/list_changed"})
    return text("done")


@tool
def progress(call: Call) -> dict[str, Any]:
    token = call.meta["progressToken"]
    for step in range(1, call.arguments.get("steps", 3) + 1):
        params = {"progressToken": token, "progress": step, "total": 3, "message": f"step {step}"}
        send({"method": "notifications/progress", "params": params})
    return text("done")


@tool
def log(call: Call) -> dict[str, Any]:
    params = {"level": "warning", "data": call.arguments["data"]}
    send({"method": "notifications/message", "params": params})
    return text("done")


@tool
def ask(call: Call) -> None:
    STATE["asked"]["question"] = call.id
    params = {"message": "Your name?", "requestedSchema": {"type": "object", "properties": {}}}
    params |= call.arguments.get("params", {})
    send({"id": "question", "method": call.arguments["method"], "params": params})


@tool
def long_line_other_end(call: Call) -> None:
    result = text("x" * call.arguments["bytes"])
    write(json.dumps({"result": result, "jsonrpc": "2.0", "id": call.id}))


@tool
def not_json(call: Call) -> dict[str, Any]:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    value = {"nan": float("nan"), "deep": deep}[call.arguments["what"]]
    return {"content": [], "structuredContent": {"x": value}}


@tool
def batch(call: Call) -> None:
    params = {"level": "info", "data": "x"}
    log = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
    answer = {"jsonrpc": "2.0", "id": call.id, "result": text("together")}
    write(json.dumps([log, answer, 7]))


@tool
def say(call: Call) -> dict[str, Any]:
    stream = getattr(sys, call.arguments.get("stream", "stdout")).buffer
    stream.write(base64.b64decode(call.arguments["bytes"]) + b"\n")
    stream.flush()
    return text("said")


@tool
def exit_after(call: Call) -> None:
    send({"id": call.id, "result": text("bye")})
    os._exit(0)


@tool
def listings(call: Call) -> dict[str, Any]:
    return text(STATE["listings"])


@tool
def deaf(call: Call) -> None:
    send({"id": call.id, "result": text("no more")})
    time.sleep(600)


@tool
def flood(call: Call) -> None:
    send({"id": call.id, "result": text("here it comes")})
    log = {"jsonrpc": "2.0", "method": "notifications/message"}
    line = json.dumps({**log, "params": {"level": "debug", "data": "x" * 1000}}) + "\n"
    while True:
        sys.stdout.write(line)
        sys.stderr.write(line)


@tool
def pings(call: Call) -> dict[str, Any]:
    for number in range(call.arguments["count"]):
        send({"id": f"ping-{number}", "method": "ping"})
    return text("done")


@tool
def orphan(call: Call) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os._exit(call.arguments.get("code", 3))


def run_tool(request_id: Any, params: dict[str, Any]) -> None:
    handler = HANDLERS.get(params["name"])
    if handler is None:
        message = f"unknown tool {params['name']}"
        send({"id": request_id, "error": {"code": -32602, "message": message}})
        return
    call = Call(request_id, params.get("arguments") or {}, params.get("_meta") or {})
    result = handler(call)
    if result is not None:
        send({"id": request_id, "result": result})


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
    method, request_id = message.get("method"), message.get("id")
    params: dict[str, Any] = message.get("params") or {}
    if method is None and request_id not in STATE["asked"]:
        return
    if sys.argv[1] == "result" and method == sys.argv[2]:
        write(f'{{"jsonrpc": "2.0", "id": {request_id}, "result": {sys.argv[3]}}}')
        return
    if sys.argv[1:3] == ["result", "server/discover"] and method == "initialize":
        method = "unknown"
    if method is None:
        given = message.get("result", message.get("error"))
        send({"id": STATE["asked"][request_id], "result": text(json.dumps(given))})
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
        run_tool(request_id, params)
    elif method == "notifications/cancelled":
        STATE["cancelled"].append(params["requestId"])
    elif request_id is not None:
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
    if mode == "together":
        Path(sys.argv[2], str(os.getpid())).touch()
        while len(list(Path(sys.argv[2]).iterdir())) < int(sys.argv[3]):
            time.sleep(0.05)
    if mode == "noisy":
        sys.stdout.write('Welcome to the server!\n{"level": "info"}\n[1, 2]\n\n')
        sys.stdout.flush()
        sys.stderr.write("starting\n")
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
