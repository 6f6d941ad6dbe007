"""Resources, resource templates and prompts of a server as operations.

<server>.resources.list          what there is, freshly listed
<server>.resources.templates     what can be asked for by filling in a template
<server>.resources.read          {"uri": ...}
<server>.resources.watch         {"uri": ...}: an item as soon as a resource is watched, and one for each change
<server>.templates.<name>        the variables of one template, filled in and read
<server>.prompts.<name>          the arguments of one prompt
<server>.completions.complete    values for an argument of a prompt or template

Served over MCP, a prompt is a prompt and a template a template again; the resources are those of `resources.read`.

Rule 1: there is one subscription at the server for each watched resource, however many watch it here.
Rule 2: after the connection was lost, the subscription is renewed, and a change is reported, because one may have been
        missed.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, cast

from mcp import MCPError
from mcp.client.subscriptions import ResourceUpdated, SubscriptionLost, listen
from mcp.shared.uri_template import UriTemplate
from pydantic import AnyUrl, TypeAdapter, ValidationError

from operations._mcp_config import MCPClientConfig
from operations._text import safe_name
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode
from operations.mcp.connection import Connection
from operations.mcp.interaction import is_question, question_envelope, settle
from operations.mcp.listing import PIN_FIELDS, Listing, Pins, pin_key
from operations.mcp.session import RelaySession
from operations.mcp.tools import (
    Request,
    completion_envelope,
    in_quarantine,
    listing_envelope,
    prompt_envelope,
    resource_envelope,
)
from operations.schema import from_schema
from operations.specs import Operation, OperationSpec, OperationType
from operations.types import JSONObject

# ------------------------------------------------------------ operations

ListAll = Callable[[str, str, OperationContext], Awaitable[list[JSONObject]]]
"""`(method, key, context)` -> every entry of a paged list."""

WatchResource = Callable[[str], AsyncGenerator[str]]
"""`(uri)` -> the addresses of what changed, at each change."""

READ: Final = "resources.read"
"""The name of the operation that reads any resource of a server."""

_NOTHING: JSONObject = {"type": "object", "additionalProperties": False}
_URI: JSONObject = {
    "type": "object",
    "properties": {"uri": {"type": "string", "minLength": 1}},
    "required": ["uri"],
    "additionalProperties": False,
}
_TEXT: JSONObject = {"type": "string"}
_COMPLETION: JSONObject = {
    "type": "object",
    "properties": {
        "ref": {
            "type": "object",
            "properties": {"type": _TEXT, "name": _TEXT, "uri": _TEXT},
            "required": ["type"],
            "additionalProperties": False,
        },
        "argument": {
            "type": "object",
            "properties": {"name": _TEXT, "value": _TEXT},
            "required": ["name", "value"],
            "additionalProperties": False,
        },
        "context": {"type": "object"},
    },
    "required": ["ref", "argument"],
    "additionalProperties": False,
}

LISTED: Final = (
    "annotations", "arguments", "description", "icons", "mimeType", "name", "size", "title", "uri", "uriTemplate",
    "_meta",
)  # fmt: skip
"""The fields of a listed prompt, resource or template that are passed on."""


_ADDRESS: Final[TypeAdapter[AnyUrl]] = TypeAdapter(AnyUrl)


def is_url(uri: str) -> bool:
    """Return whether clients accept an address in a listing; some reject the whole list otherwise."""
    try:
        _ADDRESS.validate_python(uri)
    except ValidationError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Source:
    """One server, as its operations know it."""

    server: str
    version: str
    config: MCPClientConfig
    request: Request
    watch: WatchResource

    async def settled(
        self, method: str, params: JSONObject, context: OperationContext
    ) -> JSONObject:
        """Send a request that only reads, and answer the questions of the server."""

        async def send(added: JSONObject) -> JSONObject:
            return await self.request(method, {**params, **added}, context, replayable=True)

        return await settle(await send({}), send, self.config, context)


class ResourceReader:
    """Reads any resource of one server; the handler of `<server>.resources.read`.

    Args:
        source: The server.
        pins: The definitions that were accepted.
    """

    def __init__(self, source: Source, pins: Pins) -> None:
        self._source = source
        self._pins = pins

    async def __call__(self, input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        """Read the resource at `uri`."""
        return await self.read(input["uri"], context)

    async def read(self, uri: str, context: OperationContext) -> ResponseEnvelope[Any]:
        """Read the resource at an address.

        Raises:
            CallError: If it is in quarantine, or cannot be read.
        """
        key = f"resources/{uri}"
        if key in self._pins.waiting:
            raise in_quarantine(key, self._source.server)
        result = await self._source.settled("resources/read", {"uri": uri}, context)
        return question_envelope(result) if is_question(result) else resource_envelope(result)


class ResourceOperations:
    """Builds the operations for one server's listing."""

    def __init__(self, source: Source, list_all: ListAll, pins: Pins) -> None:
        self._source = source
        self._config = source.config
        self._list_all = list_all
        self._pins = pins

    def build(self, listing: Listing, skipped: dict[str, str]) -> Iterator[tuple[str, Operation]]:
        """Yield each operation with its key among the pins; entries without a usable name go to `skipped`."""
        shown: list[JSONObject] = [
            {key: entry[key] for key in LISTED if key in entry}
            for entry in listing.resources
            if pin_key("resources", entry) not in self._pins.waiting and is_url(entry["uri"])
        ]
        reader = ResourceReader(self._source, self._pins)
        if listing.resources or listing.templates:
            yield "", self._lister("resources", "The resources of the server.", "resources/list")
            yield (
                "",
                self._lister(
                    "templates", "The resource templates of the server.", "resources/templates/list"
                ),
            )
            spec = self._spec(READ, "Read a resource by its URI.", _URI)
            timeout = self._config.timeout
            yield "", Operation(spec, reader, resources=shown, source_timeout=timeout)
            if listing.can_watch:
                yield "", self._watcher()
        for template in listing.templates:
            yield from self._named(template, "templates", reader, skipped)
        for prompt in listing.prompts:
            yield from self._named(prompt, "prompts", reader, skipped)
        if listing.can_complete and (listing.templates or listing.prompts):
            yield "", self._completer()

    def _named(
        self, entry: JSONObject, kind: str, reader: ResourceReader, skipped: dict[str, str]
    ) -> Iterator[tuple[str, Operation]]:
        given = entry.get("name") or entry.get("uriTemplate")
        try:
            name = f"{kind}.{safe_name(str(given))}"
            built = (
                self._template(entry, name, reader)
                if kind == "templates"
                else self._prompt(entry, name)
            )
            yield pin_key(kind, entry), built
        except ValueError as error:
            skipped[f"{kind}.{ascii(given)[1:-1]}"] = str(error)

    def _spec(
        self,
        name: str,
        description: str,
        input_schema: JSONObject,
        entry: JSONObject | None = None,
        mcp: JSONObject | None = None,
        kind: OperationType = OperationType.QUERY,
    ) -> OperationSpec:
        config = self._config
        entry = entry or {}
        meta: JSONObject = {"source": "mcp", "server": self._source.server}
        meta |= {key: entry[key] for key in LISTED if entry.get(key)}
        meta["mcp"] = mcp or {"tool": False}
        title = entry.get("title")
        spec = OperationSpec(
            name=name,
            namespace=cast("str", config.namespace),
            version=self._source.version,
            type=kind,
            title=title if isinstance(title, str) else None,
            description=description,
            input_schema=from_schema(input_schema, lenient=True),
            meta=meta,
        )
        return config.guarded(spec)

    def _lister(self, kind: str, description: str, method: str) -> Operation:
        name, key = ("list", kind) if kind == "resources" else (kind, "resourceTemplates")

        async def list_now(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            entries = await self._list_all(method, key, context)
            if self._config.pin == "strict":
                entries = [
                    entry
                    for entry in entries
                    if isinstance(entry.get(PIN_FIELDS[kind]), str)
                    and not self._pins.is_different(pin_key(kind, entry), entry)
                ]
            return listing_envelope(entries)

        return Operation(self._spec(f"resources.{name}", description, _NOTHING), list_now)

    def _watcher(self) -> Operation:
        watch = self._source.watch

        async def follow(input: Any, context: OperationContext) -> AsyncIterator[JSONObject]:
            async with aclosing(watch(input["uri"])) as changes:
                async for uri in changes:
                    yield {"uri": uri}

        spec = self._spec(
            "resources.watch",
            "Report that a resource is watched, and then each change of it.",
            _URI,
            kind=OperationType.SUBSCRIPTION,
        )
        return Operation(spec, follow)

    def _completer(self) -> Operation:
        async def complete(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            result = await self._source.request(
                "completion/complete", dict(input), context, replayable=True
            )
            return completion_envelope(result)

        description = "Suggest values for an argument of a prompt or template."
        return Operation(self._spec("completions.complete", description, _COMPLETION), complete)

    def _template(self, entry: JSONObject, name: str, reader: ResourceReader) -> Operation:
        template = UriTemplate.parse(entry["uriTemplate"])
        schema: JSONObject = {
            "type": "object",
            "properties": {
                variable.name: {"type": "array", "items": _TEXT} if variable.explode else _TEXT
                for variable in template.variables
            },
            "additionalProperties": False,
        }

        async def read(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            try:
                uri = template.expand(input or {})
            except (TypeError, ValueError) as error:
                raise CallError(ErrorCode.VALIDATION_ERROR, str(error)) from None
            return await reader.read(uri, context)

        mcp = {"resource": {"uri": entry["uriTemplate"]}}
        spec = self._spec(name, str(entry.get("description") or ""), schema, entry, mcp)
        return Operation(spec, read, source_timeout=self._config.timeout)

    def _prompt(self, entry: JSONObject, name: str) -> Operation:
        prompt_name = entry["name"]
        arguments = _arguments(entry.get("arguments"))
        schema: JSONObject = {
            "type": "object",
            "properties": {
                argument["name"]: {
                    "type": "string",
                    "description": str(argument.get("description") or ""),
                }
                for argument in arguments
            },
            "required": [
                argument["name"] for argument in arguments if argument.get("required") is True
            ],
            "additionalProperties": False,
        }

        async def get(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            params = {"name": prompt_name, "arguments": dict(input or {})}
            result = await self._source.settled("prompts/get", params, context)
            return question_envelope(result) if is_question(result) else prompt_envelope(result)

        mcp = {"prompt": True}
        spec = self._spec(name, str(entry.get("description") or ""), schema, entry, mcp)
        return Operation(spec, get, source_timeout=self._config.timeout)


def _arguments(listed: Any) -> list[JSONObject]:
    """The arguments of a prompt that have a name."""
    if not isinstance(listed, list):
        return []
    entries = [
        cast("JSONObject", item) for item in cast("list[object]", listed) if isinstance(item, dict)
    ]
    return [entry for entry in entries if isinstance(entry.get("name"), str)]


# ------------------------------------------------------------ watching

logger = logging.getLogger("operations.mcp")

MAX_WATCHED: Final = 1_000
"""Resources of one server that are watched at a time."""

_RENEW_SECONDS = 1.0


class ResourceWatches:
    """The resources of one server that are watched.

    Args:
        server: Its name.
        connection: The connection to it.
    """

    def __init__(self, server: str, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._watched: dict[str, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def watch(self, uri: str) -> AsyncGenerator[str]:
        """Yield the address of the resource when it is watched, and then of each change: the resource, or a part of it.

        Raises:
            CallError: If the server refuses, or too many resources are watched.
        """
        watched = self._watched.get(uri)
        if watched is None:
            if len(self._watched) >= MAX_WATCHED:
                message = f"{MAX_WATCHED} resources of {self._server} are watched already"
                raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
            watched = self._watched[uri] = _Watched(uri, self._server, self._connection)
            self._tasks.add(watched.task)
            watched.task.add_done_callback(self._tasks.discard)
        changes = _Changes()
        watched.watchers.add(changes)
        try:
            await asyncio.shield(watched.is_subscribed)
            yield uri
            while True:
                for changed in await changes.next():
                    yield changed
        finally:
            watched.watchers.discard(changes)
            if not watched.watchers:
                if self._watched.get(uri) is watched:
                    del self._watched[uri]
                watched.task.cancel()

    def updated(self, uri: str) -> None:
        """Report a change that the server announced (up to 2025-11-25)."""
        for watched in self._watched.values():
            if uri == watched.uri or uri.startswith(watched.uri.rstrip("/") + "/"):
                watched.report(uri)

    async def aclose(self) -> None:
        """End all subscriptions."""
        for watched in self._watched.values():
            watched.task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))


class _Changes:
    """The changes that one watcher has not read yet; repetitions are dropped."""

    def __init__(self) -> None:
        self._unread: dict[str, None] = {}
        self._is_there = asyncio.Event()

    def add(self, uri: str) -> None:
        if len(self._unread) < MAX_WATCHED:
            self._unread[uri] = None
            self._is_there.set()

    async def next(self) -> list[str]:
        await self._is_there.wait()
        self._is_there.clear()
        unread, self._unread = list(self._unread), {}
        return unread


class _Watched:
    """A subscription to one resource."""

    def __init__(self, uri: str, server: str, connection: Connection) -> None:
        self.uri = uri
        self.watchers: set[_Changes] = set()
        self.is_subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = server
        self._connection = connection
        self.task = asyncio.create_task(self._keep(), name=f"mcp {server} watches {uri}")

    def report(self, uri: str) -> None:
        for watcher in self.watchers:
            watcher.add(uri)

    async def _keep(self) -> None:
        # A server is not stopped while one of its resources is watched.
        self._connection.busy += 1
        try:
            await self._subscribe_again()
        finally:
            self._connection.busy -= 1

    async def _subscribe_again(self) -> None:
        while True:
            try:
                session = await self._connection.acquire()
                await (self._listen(session) if session.is_modern else self._subscribe(session))
            except (MCPError, CallError, SubscriptionLost, TimeoutError) as error:
                if not self.is_subscribed.done():
                    message = f"{self._server} does not report changes of this resource"
                    self.is_subscribed.set_exception(CallError(ErrorCode.UNAVAILABLE, message))
                    # Retrieved here as well: the watcher may have left.
                    self.is_subscribed.exception()
                    return
                logger.debug("%s: lost the changes of a resource: %s", self._server, error)
            await asyncio.sleep(_RENEW_SECONDS)

    async def _subscribe(self, session: RelaySession) -> None:
        await session.relay("resources/subscribe", {"uri": self.uri})
        self._subscribed()
        try:
            await session.finished.wait()
        except asyncio.CancelledError:
            if session.is_open:
                await _farewell(session, self.uri)
            raise

    async def _listen(self, session: RelaySession) -> None:
        async with listen(session, resource_subscriptions=[self.uri]) as changes:
            self._subscribed()
            async for change in changes:
                if isinstance(change, ResourceUpdated):
                    self.report(change.uri)

    def _subscribed(self) -> None:
        if self.is_subscribed.done():
            self.report(self.uri)
        else:
            self.is_subscribed.set_result(None)


async def _farewell(session: RelaySession, uri: str) -> None:
    try:
        async with asyncio.timeout(_RENEW_SECONDS):
            await session.relay("resources/unsubscribe", {"uri": uri})
    except (MCPError, TimeoutError):
        logger.debug("a subscription could not be ended", exc_info=True)
