"""`operations demo`: a complete example without any configuration.

    shop.*    a REST API, imported from its OpenAPI document
    money.*   an MCP server (tools.py), started as a child process
    cafe.*    Python functions (local.py), which call the other two

The demo uses the normal code paths: it opens a config file and serves it like `operations serve`.
"""

import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Parameter

from operations.base.errors import CallError, MissingExtraError, OperationsError

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    # The demo also needs the extras of its sources.
    raise MissingExtraError("operations demo", extra="all") from error

from operations.base.tasks import shutdown_event
from operations.base.types import JSONObject
from operations.cli.options import DEFAULTS, PORT, Common, Screen, command, encoded
from operations.cli.serve import announce
from operations.config import FILE_NAME, VARIABLE, ConfigFile, load_config
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.hub import Hub, open_hub
from operations.hub.app import build_app, entry_points_of
from operations.registry.registry import OperationRegistry
from operations.server import hash_key, new_key
from operations.server.http11.running import running

MANAGER = Identity("manager", ["cafe:manage"])


@command
async def demo(
    *,
    once: Annotated[bool, Parameter(negative="")] = False,
    port: Annotated[int, PORT] = 0,
    common: Common = DEFAULTS,
) -> None:
    """Run a complete example: a REST API, an MCP server and Python functions behind one address.

    Shows every kind of call, then serves until Ctrl-C. It needs no configuration and no other program.

    Args:
        once: End after the tour. This is the default without a terminal.
        port: The port to serve on; 0 for any free port.
        common: Options of every command.
    """
    screen = common.screen()
    stays = not once and sys.stdin.isatty() and screen.is_terminal
    key = new_key()
    async with open_demo(key) as hub:
        entry_points = entry_points_of(hub.file)
        async with running(build_app(hub), port=port) as url:
            if not screen.json:
                announce(url, entry_points, hub, screen)
            seen = await run_tour(hub.registry, screen)
            if screen.json:
                screen.value({"url": url, "operations": hub.offered, "tour": seen})
            elif stays:
                with shutdown_event() as shutdown:
                    screen.note(
                        f"\nstill serving at {url}; sign in with the key {key}. Press Ctrl-C to stop",
                        "bold",
                    )
                    screen.note(
                        f"the commands above work in another terminal: export {VARIABLE}={hub.file.path}"
                    )
                    await shutdown.wait()
            else:
                screen.note(
                    "\nend of the tour; at a terminal, without --once, the demo keeps serving"
                )


@asynccontextmanager
async def open_demo(key: str) -> AsyncGenerator[Hub]:
    """Open the hub of the demo, and the API that it imports, for the duration of an `async with` block.

    Args:
        key: The access key of the manager.

    Raises:
        OperationsError: If one of the three sources is not available.
    """
    with TemporaryDirectory(prefix="operations-demo-") as folder:
        async with running(build_api()) as api, open_hub(_file(Path(folder), api, key)) as hub:
            for source in hub.absent():
                raise OperationsError(f"{source.label} did not start: {source.problem}")
            yield hub


_HERE = Path(__file__).parent


def _file(folder: Path, api: str, key: str) -> ConfigFile:
    """Write the config of the demo and return it."""
    values = {
        "document": f"{api}/openapi.json",
        "api": api,
        "python": sys.executable,
        "tools": str(_HERE / "tools.py"),
        "sha256": hash_key(key),
        "scopes": list(MANAGER.scopes),
    }
    # JSON strings, and lists of them, are valid TOML.
    config = (_HERE / "config.toml").read_text(encoding="utf-8")
    text = config.format(**{name: json.dumps(value) for name, value in values.items()})
    (folder / FILE_NAME).write_text(text, encoding="utf-8")
    return load_config(folder / FILE_NAME)


# ------------------------------------------------------------ the tour


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One step of the tour."""

    what: str
    operation_id: str
    input: JSONObject
    identity: Identity | None = None
    streams: bool = False


STEPS = [
    DemoStep("an HTTP endpoint, called like a function", "shop.get_item", {"id": 2}),
    DemoStep("a tool of an MCP server, called the same way", "money.convert", {"amount": 3.8, "to": "USD"}),
    DemoStep(
        "all three in one call: cafe.quote calls shop and money",
        "cafe.quote",
        {"item": 2, "currency": "JPY"},
    ),
    DemoStep("a stream: one envelope per item", "cafe.brew", {"cups": 3}, streams=True),
    DemoStep("access: a caller without identity may not close the café", "cafe.close", {}),
    DemoStep("but the manager may", "cafe.close", {"reason": "holiday"}, MANAGER),
    DemoStep("input that does not match its schema is rejected", "cafe.quote", {"item": "two", "sugar": 1}),
    DemoStep("an error that a function declares", "cafe.order", {"item": 3}),
    DemoStep("an error of the HTTP API", "shop.get_item", {"id": 99}),
    DemoStep("an error of the MCP tool: a result marked as an error", "money.convert", {"amount": 1, "to": "XXX"}),
]  # fmt: skip
"""The tour."""


async def run_tour(registry: OperationRegistry, screen: Screen) -> list[JSONObject]:
    """Run and show every step; return the results for scripts."""
    seen: list[JSONObject] = []
    for step in STEPS:
        if not screen.json:
            screen.write("")
            screen.line((f"# {step.what}", "dim"))
            screen.line((f"> {command_of(step)}", "cyan"), overflow="keep")
        answers = [answer async for answer in answers_of(step, registry)]
        if not screen.json:
            for answer in answers:
                _answered(answer, screen)
        seen.append({"what": step.what, "operation": step.operation_id, "answers": answers})
    return seen


async def answers_of(step: DemoStep, registry: OperationRegistry) -> AsyncIterator[JSONObject]:
    """Yield the outcome of a step as JSON: envelopes, or one error."""
    context = OperationContext(identity=step.identity)
    try:
        if step.streams:
            async for envelope in registry.subscribe(step.operation_id, step.input, context):
                yield envelope.to_wire()
        else:
            envelope = await registry.execute(step.operation_id, step.input, context)
            yield envelope.to_wire()
    except CallError as error:
        yield {"error": error.to_wire()}


def command_of(step: DemoStep) -> str:
    """Return the equivalent command, which prints the whole envelope and uses the same caller."""
    caller = "anonymous" if step.identity is None else step.identity.id
    pairs = [f"{name}={value}" for name, value in step.input.items()]
    return " ".join(["operations call", step.operation_id, *pairs, f"--as {caller} --envelope"])


def _answered(answer: JSONObject, screen: Screen) -> None:
    failed = "error" in answer or answer.get("meta", {}).get("isError")
    screen.line((f"  {encoded(answer)}", "red" if failed else "green"), overflow="keep")


# ------------------------------------------------------------ the REST API

_MENU: list[dict[str, Any]] = [
    {"id": 1, "name": "Espresso", "price": 2.2},
    {"id": 2, "name": "Flat white", "price": 3.8},
    {"id": 3, "name": "Apple cake", "price": 4.5},
]


async def _document(_: Request) -> FileResponse:
    return FileResponse(_HERE / "shop.json")


async def _items(_: Request) -> JSONResponse:
    return JSONResponse(_MENU)


async def _item(request: Request) -> JSONResponse:
    wanted: int = request.path_params["id"]
    for item in _MENU:
        if item["id"] == wanted:
            return JSONResponse(item)
    return JSONResponse({"detail": f"there is no item {wanted}"}, status_code=404)


def build_api() -> Starlette:
    """Return the API as an ASGI application."""
    return Starlette(
        routes=[
            Route("/openapi.json", _document),
            Route("/items", _items),
            Route("/items/{id:int}", _item),
        ]
    )
