"""Print what the library changes in its process: one line of JSON per step with changes.

Run as a program, in a process of its own: pytest changes most of this state itself.
"""

# ruff: noqa: PLC0415 - the package is imported between two snapshots

import asyncio
import decimal
import faulthandler
import gc
import importlib
import json
import locale
import logging
import mimetypes
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

OWN = "operations"
"""Loggers with this name belong to the library."""


def snapshot() -> dict[str, Any]:
    """Return the state of the process that belongs to the application."""
    private: Any = importlib.import_module("asyncio.events")
    wakeup, umask = signal.set_wakeup_fd(-1), os.umask(0)
    signal.set_wakeup_fd(wakeup)
    os.umask(umask)
    return {
        "gc": (
            *(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
            *(gc.get_debug(), list(gc.callbacks)),
        ),
        "signals": {int(each): signal.getsignal(each) for each in signal.valid_signals()},
        "timers": (wakeup, signal.getitimer(signal.ITIMER_REAL)[0] > 0),
        "event loop": (private._event_loop_policy, *_loop_state()),
        "warnings": (list(warnings.filters), warnings.showwarning, warnings.formatwarning),
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "umask": umask,
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "imports": (
            list(sys.path_hooks),
            sys.dont_write_bytecode,
            sys.pycache_prefix,
        ),
        "interpreter": (
            *(sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()),
            *(sys.gettrace(), sys.getprofile(), faulthandler.is_enabled()),
        ),
        "hooks": (
            *(sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook),
            *(threading.excepthook, tuple(sys.get_asyncgen_hooks()), sys.argv[:]),
        ),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "locale": (locale.setlocale(locale.LC_ALL, None), time.tzname),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "defaults": (
            *(socket.getdefaulttimeout(), threading.stack_size(), str(decimal.getcontext())),
            *(tempfile.tempdir, vars(urllib.request)["_opener"]),
            *(multiprocessing.get_start_method(allow_none=True), tuple(mimetypes.knownfiles)),
        ),
        "builtins": sorted(vars(importlib.import_module("builtins"))),
        "logging": _loggers(),
    }


def _loop_state() -> tuple[object, ...]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return ()
    return (
        *(type(loop), loop.get_debug(), loop.slow_callback_duration),
        *(loop.get_task_factory(), loop.get_exception_handler()),
    )


def _loggers() -> dict[str, object]:
    """Return the settings of all loggers that do not belong to the library; a new one is not a change."""
    root, names = logging.getLogger(), sorted(logging.root.manager.loggerDict)
    found: dict[str, object] = {
        "": (
            *(logging.getLoggerClass(), logging.getLogRecordFactory(), logging.raiseExceptions),
            *(logging.lastResort, logging.root.manager.disable),
        )
    }
    for logger in (root, *(logging.root.manager.loggerDict[name] for name in names)):
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] != OWN:
            handlers = [each for each in logger.handlers if type(each) is not logging.NullHandler]
            found[logger.name] = (
                *(logger.level, logger.propagate, logger.disabled, handlers),
                [getattr(each, "__name__", type(each).__name__) for each in logger.filters],
            )
    return found


_DEFAULT: object = (logging.NOTSET, True, False, [], [])


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Return the differences between two snapshots by the name of what differs: of a logger, its own name."""
    found = dict[str, str]()
    for name, old in before.items():
        new = after[name]
        if name == "logging":
            names = [each for each in new if old.get(each, _DEFAULT) != new[each]]
            found |= {each: f"{old.get(each)} -> {new[each]}" for each in names}
        elif old != new:
            found[name] = f"{old} -> {new}"
    return found


class Steps:
    """Compares the process before and after each step."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what has changed since the last step."""
        self._last = snapshot()

    def note(self, step: str) -> None:
        """Print what has changed since the last step."""
        now = snapshot()
        found = changes(self._last, now)
        # Written to the file itself, because a step may have replaced `sys.stdout`.
        if found:
            os.write(1, (json.dumps({"step": step, "changes": found}) + "\n").encode())
        self._last = now


def import_everything(steps: Steps) -> None:
    """Import every module of the package."""
    package = importlib.import_module(OWN)
    steps.note(f"import {OWN}")
    for folder in package.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            name = ".".join((OWN, *path.relative_to(folder).with_suffix("").parts))
            # Commands own their process.
            if not name.startswith((f"{OWN}.cli", f"{OWN}.__main__")):
                importlib.import_module(name.removesuffix(".__init__"))
                steps.note(f"import {name.removesuffix('.__init__')}")


MODULE = """
from operations import operation


@operation("hello.greet", type="query")
async def greet(name: str) -> str:
    return f"Hello, {name}!"
"""

SERVER = """
import asyncio
from operations import OperationRegistry, operation
from operations.mcp import to_mcp


@operation("hello.greet", type="query")
async def greet(name: str) -> str:
    return f"Hello, {name}!"


asyncio.run(to_mcp(OperationRegistry([greet])).run_stdio())
"""

DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Test", "version": "1"},
    "paths": {
        "/items": {
            "get": {
                "operationId": "items",
                "responses": {
                    "200": {
                        "description": "",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    }
                },
            }
        }
    },
}


async def use_everything(steps: Steps, folder: Path) -> None:
    """Use each public entry point. Blocks that are still open count as part of the library."""
    import aiohttp

    from operations import OperationRegistry, operation, scan_operations
    from operations.calls import PendingRequestMap, from_calls, serve_calls
    from operations.hub import open_hub
    from operations.mcp import connect_mcp, to_mcp
    from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file, to_openapi
    from operations.pubsub.memory import MemoryTarget
    from operations.server import create_app
    from operations.server.http11.running import build_server, running

    steps.begin()  # asyncio has changed signals and hooks

    @operation("hello.wait", type="query")
    def wait(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    (folder / "hello.py").write_text(MODULE)
    (folder / "openapi.json").write_text(json.dumps(DOCUMENT))
    (folder / "openapi.yaml").write_text(json.dumps(DOCUMENT, indent=1).replace("{", "{ ", 1))
    scanned = scan_operations(folder / "hello.py")
    steps.note("scan_operations")
    files = {"virtual": ["hello.py"], "virtual/hello.py": MODULE}
    scan_operations("virtual", read=lambda path: files[path])
    steps.note("scan_operations of files that a function reads")
    async with OperationRegistry([wait, *scanned]) as registry:
        await registry.execute("hello.wait", {"seconds": 0}, timeout=30)
        await registry.execute("hello.greet", {"name": "Ann"})
        steps.note("execute")
        config = HTTPServiceConfig(namespace="api", base_url="http://127.0.0.1:9")
        registry.register_all(from_openapi(DOCUMENT, config))
        steps.note("from_openapi")
        await from_openapi_file(folder / "openapi.json", config)
        await from_openapi_file(folder / "openapi.yaml", config)
        steps.note("from_openapi_file")
        to_openapi(registry)
        steps.note("to_openapi")
        pubsub = MemoryTarget()
        async with serve_calls(registry, pubsub):
            steps.note("serve_calls")
            async with PendingRequestMap(pubsub) as calls:
                await calls.call("hello.greet", {"name": "Ann"})
                steps.note("PendingRequestMap")
            async with from_calls(pubsub):
                steps.note("from_calls")
        steps.note("serve_calls closed")
        app = create_app(registry, mcp=True, console=True, websocket=True)
        steps.note("create_app")
        build_server(app)
        steps.note("build_server")
        async with running(app) as url, aiohttp.ClientSession() as session:
            async with session.get(f"{url}/hello/greet?name=Ann") as response:
                assert response.status == 200
            steps.note("running")
            async with connect_mcp("web", {"url": f"{url}/mcp"}) as server:
                assert server.operations
            steps.note("connect_mcp over HTTP")
        steps.note("running closed")
        async with connect_mcp(
            "child", {"command": sys.executable, "args": ["-c", SERVER]}
        ) as server:
            assert server.operations
        steps.note("connect_mcp over stdio")
        async with connect_mcp("local", {"server": to_mcp(registry)}) as server:
            assert server.operations
        steps.note("connect_mcp in the process")
    steps.note("registry closed")
    (folder / "operations.toml").write_text(
        'modules = ["hello.py"]\n[record.trace]\nenabled = false\n[openapi.api]\n'
        'document = "openapi.json"\nbase_url = "http://127.0.0.1:9"\n'
    )
    async with open_hub(folder / "operations.toml") as hub:
        steps.note("open_hub")
        async with running(hub.app):
            steps.note("the app of a hub")
    steps.note("hub closed")


if __name__ == "__main__":
    run = Steps()
    import_everything(run)
    asyncio.run(use_everything(run, Path(sys.argv[1])))
