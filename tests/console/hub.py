"""A hub for the tests of the console: operations of every kind, and the server that shows them."""

import asyncio
import threading
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from tests.limits import scaled

from operations import (
    AccessControl,
    CallError,
    ErrorDefinition,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
)
from operations.contract.envelopes import (
    ImageContent,
    MCPContentBlock,
    TextContent,
    http_envelope,
    mcp_envelope,
)
from operations.recorder.graph import CallGraph
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running

KEY = "a-key-for-tests-only"
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
HOSTILE = "<img src=x onerror=\"document.title='taken'\"> reads \u202eesrever\u202c and hides \u200b nothing"

STATE = {"open": 0}
"""How many streams are being served."""


@dataclass(frozen=True)
class Address:
    """Where something goes."""

    street: str
    city: str
    zip: str | None = None


@dataclass(frozen=True)
class Line:
    """One thing that is ordered."""

    article: str
    quantity: int = 1


@dataclass(frozen=True)
class Order:
    """What was ordered."""

    number: int
    customer: str
    address: Address
    lines: list[Line] = field(default_factory=list)


DELIVERY: dict[str, Any] = {
    "type": "object",
    "required": ["method", "size"],
    "additionalProperties": False,
    "properties": {
        "size": {"type": "integer", "minimum": 1},
        "method": {
            "description": "How it gets there.",
            "oneOf": [
                {
                    "title": "Pick up",
                    "type": "object",
                    "required": ["kind", "shop"],
                    "properties": {"kind": {"const": "pickup"}, "shop": {"type": "string"}},
                },
                {
                    "title": "Courier",
                    "type": "object",
                    "required": ["kind", "to"],
                    "properties": {"kind": {"const": "courier"}, "to": {"$ref": "#/$defs/place"}},
                },
            ],
        },
        "when": {"type": "string", "format": "date-time"},
        "label": {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
        "days": {
            "type": "array",
            "uniqueItems": True,
            "items": {"enum": ["mon", "tue", "wed", "thu", "fri"]},
        },
        "notes": {"type": "object", "additionalProperties": {"type": "string"}},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
        "insured": {"type": ["boolean", "null"]},
        "colour": {
            "enum": ["red", "orange", "yellow", "green", "blue", "violet"],
            "default": "blue",
        },
        "exact": {"type": "integer"},
    },
    "$defs": {
        "place": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string"}, "street": {"type": "string"}},
        },
        "part": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
            },
        },
    },
}


def build_registry() -> OperationRegistry:
    """Operations of every type and from every kind of source."""
    registry = OperationRegistry()
    _add_shop(registry)
    _add_tasks(registry)
    _add_clock(registry)
    _add_imported(registry)
    return registry


def _add_shop(registry: OperationRegistry) -> None:
    sold_out = ErrorDefinition("SOLD_OUT", "Nothing of it is left.", http_status=409)

    @registry.operation("shop.quote", type="query", tags=["sales"], errors=[sold_out])
    async def quote(
        customer: str,
        address: Address,
        lines: list[Line],
        priority: Literal["low", "normal", "high"] = "normal",
        deliver_on: date | None = None,
        gift: bool = False,
    ) -> Order:
        """What an order would be. Nothing is stored."""
        if any(line.article == "moon" for line in lines):
            raise CallError("SOLD_OUT", "the moon is sold out", {"article": "moon"})
        return Order(1042, customer, address, lines)

    async def echo(input: Any, context: OperationContext) -> Any:
        return input

    registry.register(
        Operation(
            OperationSpec(
                namespace="shop",
                name="deliver",
                type=OperationType.QUERY,
                title="Plan a delivery",
                description="Gives back what it was given.",
                input_schema=from_schema(DELIVERY),
            ),
            echo,
        )
    )

    @registry.operation("shop.receipt", type="query")
    async def receipt(number: int = 1) -> Any:
        """A picture of a receipt."""
        return http_envelope(
            b64decode(PICTURE), status_code=200, headers={}, content_type="image/png"
        )


def _add_tasks(registry: OperationRegistry) -> None:
    tasks = {1: "Read the README", 2: "Write a handler"}

    @registry.operation("task.get", type="query")
    async def get(id: int) -> dict[str, Any]:
        """One task by its id."""
        return {"id": id, "title": tasks.get(id, "?"), "steps": [{"done": True}, {"done": False}]}

    @registry.operation("task.summary", type="query")
    async def summary(context: OperationContext) -> list[Any]:
        """All tasks, each asked for by a call of its own."""
        found = [await context.env.task.get({"id": number}) for number in tasks]
        return [envelope.data for envelope in found]

    @registry.operation("task.slow")
    async def slow() -> str:
        """Never ends by itself."""
        STATE["open"] += 1
        try:
            await asyncio.sleep(3600)
        finally:
            STATE["open"] -= 1
        return ""

    @registry.operation("task.finish", scopes=["task:write"])
    async def finish(id: int) -> dict[str, Any]:
        """Mark a task as done."""
        return {"id": id, "done": True}


def _add_clock(registry: OperationRegistry) -> None:
    @registry.operation("clock.ticks")
    async def ticks(
        every: float = 0.05, fail_after: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """A tick now and then, for ever.

        Args:
            every: Seconds between two of them.
            fail_after: Break after so many.
        """
        STATE["open"] += 1
        try:
            number = 0
            while True:
                number += 1
                if fail_after is not None and number > fail_after:
                    raise CallError("CLOCK_BROKEN", "the spring is gone")
                yield {"tick": number, "text": "tick" if number % 2 else "tock"}
                await asyncio.sleep(every)
        finally:
            STATE["open"] -= 1

    @registry.operation("clock.count")
    async def count(to: int) -> AsyncIterator[int]:
        """Counts as fast as it can."""
        for number in range(1, to + 1):
            yield number


def _add_imported(registry: OperationRegistry) -> None:
    async def found(input: Any, context: OperationContext) -> Any:
        return http_envelope(
            {"id": input["id"], "name": "Rex"},
            status_code=200,
            headers={"content-type": "application/json", "x-cache": "hit"},
            content_type="application/json",
        )

    async def forecast(input: Any, context: OperationContext) -> Any:
        blocks: list[MCPContentBlock] = [
            TextContent(text="Rain at 11"),
            ImageContent(data=PICTURE, mime_type="image/png"),
        ]
        return mcp_envelope({"sky": "rain"}, is_error=False, content=blocks)

    async def broken(input: Any, context: OperationContext) -> Any:
        return mcp_envelope("no", is_error=True, content=[TextContent(text="no such place")])

    identified = {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer", "description": "Of the pet."}},
    }
    placed = {"type": "object", "properties": {"place": {"type": "string", "default": "Berlin"}}}
    api = {"method": "get", "path": "/pets/{id}", "source": "Pets"}
    tool = {"source": "mcp", "server": "weather"}
    for namespace, name, handler, schema, meta, words in (
        ("pets", "getPet", found, identified, api, "Find a pet by its id"),
        ("weather", "forecast", forecast, placed, tool, "The weather of tomorrow"),
        ("weather", "broken", broken, placed, tool, HOSTILE),
        (
            "warehouse",
            "stock",
            found,
            identified,
            {"source": "remote"},
            "What is left of an article",
        ),
    ):
        spec = OperationSpec(
            namespace=namespace,
            name=name,
            type=OperationType.QUERY,
            description=words,
            input_schema=from_schema(schema),
            meta=meta,
            access_control=AccessControl(),
        )
        registry.register(Operation(spec, handler))


def build_crowd(count: int = 5000, namespaces: int = 25) -> OperationRegistry:
    """Very many operations."""

    async def nothing(input: Any, context: OperationContext) -> Any:
        return input

    registry = OperationRegistry()
    for number in range(count):
        spec = OperationSpec(
            namespace=f"space{number % namespaces:02}",
            name=f"operation{number:04}",
            type=list(OperationType)[number % 2],
            description=f"Does the thing that number {number} does, and says so in a line of its own.",
        )
        registry.register(Operation(spec, nothing))
    return registry


@contextmanager
def served(registry: OperationRegistry, *, is_protected: bool = False) -> Iterator[str]:
    """A hub in a thread, so that the test's own thread is free for the browser; gives its address.

    A protected hub shows nothing to callers without a key.
    """
    keys = APIKeys({hash_key(KEY): Identity("alice", ["task:write"])})
    app = create_app(
        registry,
        identity=keys,
        scopes_supported=["task:write"],
        console=True,
        anonymous=not is_protected,
        graph=CallGraph(limit=1000),
    )
    started = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        stop = asyncio.Event()
        async with running(app) as address:
            found.update(address=address, stop=stop, loop=asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(scaled(10)), "the hub did not start"
    try:
        yield found["address"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(scaled(15))
