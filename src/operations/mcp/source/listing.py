"""Read the listings of a server within limits, pin definitions, and subscribe to changes of resources.

Rule 1: an invalid entry is skipped. The name of a listed tool must be a string, its input schema an object.
Rule 2: a definition has everything that a person or a model bases decisions on: name, title, description, schemas,
        annotations; and the exported contract of this library, which determines the calls that may be retried.
Rule 3: with `strict`, the first listing is accepted as a whole, or compared with the pins of an earlier run. Later, new
        or changed tools, prompts and templates, changed resources and changed instructions must be accepted before use.
Rule 4: all subscribers of a resource share one subscription at the server. After a lost connection the subscription is
        renewed, and a change is reported, because one may have been missed.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, Final, TypeAlias

import mcp_types as types
import msgspec
from mcp import MCPError
from mcp.client.subscriptions import ResourceUpdated, SubscriptionLost, listen
from mcp.shared.inbound import find_invalid_x_mcp_header
from mcp_types import METHOD_NOT_FOUND
from pydantic import BaseModel, ValidationError

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import (
    JSONValueError,
    as_json,
    canonical,
    is_object,
    list_of,
    object_of,
    text_of,
)
from operations.base.text import printable
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.mcp.config import PinPolicy
from operations.mcp.shared.codec import META_KEY
from operations.mcp.shared.extensions import SKILLS
from operations.mcp.shared.interaction import CallsInFlight
from operations.mcp.shared.sdk import RelaySession
from operations.mcp.source.connection import LiveConnection

logger = logging.getLogger("operations.mcp")

# ------------------------------------------------------------ listings

Fetch: TypeAlias = Callable[[str, JSONObject], Awaitable[JSONObject]]
"""`(method, params)` -> the result of one request."""

_MAX_PAGES = 1000
_ENTRIES_PER_TURN: Final = 100
"""The number of entries that are checked before other tasks run."""

_MAX_DESCRIPTION = 100_000
_MAX_INSTRUCTIONS = 10_000
_MOMENT: Final = re.compile(
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?(Z|[+-]\d{2}:?\d{2})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The self-description of a server."""

    name: str
    version: str
    title: str | None = None
    description: str | None = None
    website_url: str | None = None
    icons: Sequence[JSONObject] = ()

    protocol_version: str = ""
    """The negotiated revision."""

    instructions: str | None = None
    capabilities: JSONObject = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Listing:
    """The definitions of a server, and the skipped ones with the reason."""

    tools: list[JSONObject] = field(default_factory=list[JSONObject])
    resources: list[JSONObject] = field(default_factory=list[JSONObject])
    templates: list[JSONObject] = field(default_factory=list[JSONObject])
    prompts: list[JSONObject] = field(default_factory=list[JSONObject])
    instructions: str = ""
    """Instructions of the server for models."""

    server: JSONObject = field(default_factory=dict[str, Any])
    """The `serverInfo` of the server, without icons that are too large."""

    offers: JSONObject = field(default_factory=dict[str, Any])
    """The `extensions` and `experimental` capabilities of the server, unless they are too large."""

    freshness: dict[str, tuple[int, bool]] = field(default_factory=dict[str, tuple[int, bool]])
    """For how many milliseconds clients may cache each list, by its key in results, and whether it is public."""

    can_read: bool = False
    """Whether the server has resources. Those of views and skills need not be listed."""

    has_skills: bool = False
    """Whether the server has skills."""

    can_watch: bool = False
    """Whether clients can subscribe to changes of a resource."""

    can_complete: bool = False
    """Whether the server suggests values for the arguments of prompts and templates."""

    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Skipped definitions by name (escaped if necessary), with the reason."""


LISTS: Final = {
    "resources": ("resources/list", "resources", "uri"),
    "templates": ("resources/templates/list", "resourceTemplates", "uriTemplate"),
    "prompts": ("prompts/list", "prompts", "name"),
}
"""The lists besides the tools: the method, the key in its result, and the field that identifies an entry."""


async def list_everything(session: RelaySession, limit: int) -> Listing:
    """Return all tools, resources, templates and prompts that a server lists.

    Raises:
        MCPError: If the tools cannot be listed; other lists that fail are treated as empty.
    """
    listing = Listing(instructions=(session.instructions or "")[:_MAX_INSTRUCTIONS])
    listing.server = _described(session.server_info)
    offers = session.offers
    listing.offers = _offered(offers)

    async def fetch(method: str, params: JSONObject) -> JSONObject:
        result = await session.relay(method, params)
        if session.is_modern:
            _note_freshness(listing.freshness, result)
        return result

    if offers.tools is not None:
        fault = partial(_tool_fault, modern=session.is_modern)
        listing.tools = await _pages(fetch, "tools/list", "tools", limit, listing.skipped, fault)
        listing.tools = _unique(listing.tools, listing.skipped)
        session.learn(listing.tools)
    for kind in LISTS:
        if (offers.prompts if kind == "prompts" else offers.resources) is not None:
            setattr(listing, kind, await _optional(session, fetch, kind, limit))
    listing.has_skills = SKILLS in (offers.extensions or {})
    lists_resources = bool(listing.resources or listing.templates)
    listing.can_read = lists_resources or (
        offers.resources is not None
        and (bool(offers.extensions) or any(map(_has_view, listing.tools)))
    )
    listing.can_watch = offers.resources is not None and bool(offers.resources.subscribe)
    listing.can_complete = offers.completions is not None
    return listing


def _has_view(tool: JSONObject) -> bool:
    meta = object_of(tool.get("_meta"))
    return "ui" in meta or "ui/resourceUri" in meta


_MAX_ICONS = 64 * 1024
"""The largest size of the icons of a server, in bytes of JSON."""


def _described(info: types.Implementation | None) -> JSONObject:
    """Return the self-description of a server, without icons that are too large to list."""
    if info is None:
        return {}
    server = info.model_dump(by_alias=True, mode="json", exclude_none=True)
    if len(str(server.get("icons", ""))) > _MAX_ICONS:
        del server["icons"]
    return server


_MAX_OFFERS = 8 * 1024
"""The largest size of the extensions of a server with their settings, in bytes of JSON."""


def _offered(offers: types.ServerCapabilities) -> JSONObject:
    """Return the extensions and experimental capabilities that a server offers; only their names if they are large."""
    found: JSONObject = {"extensions": offers.extensions, "experimental": offers.experimental}
    found = {key: {**each} for key, each in found.items() if each}
    if len(msgspec.json.encode(found)) > _MAX_OFFERS:
        found = {key: {name: {} for name in each} for key, each in found.items()}
    return found if len(msgspec.json.encode(found)) <= _MAX_OFFERS else {}


def _note_freshness(found: dict[str, tuple[int, bool]], page: JSONObject) -> None:
    """Note how long clients may cache a list: the shortest time of its pages."""
    ttl, is_public = page.get("ttlMs"), page.get("cacheScope") == "public"
    if type(ttl) is not int:
        return
    for key in _MODELS.keys() & page.keys():
        before = found.get(key, (ttl, is_public))
        found[key] = (max(0, min(ttl, before[0])), is_public and before[1])


_MODELS: Final[dict[str, type[BaseModel]]] = {
    "tools": types.Tool,
    "resources": types.Resource,
    "resourceTemplates": types.ResourceTemplate,
    "prompts": types.Prompt,
}
_OPTIONAL: Final = frozenset({
    "_meta", "annotations", "arguments", "description", "execution", "icons", "mimeType", "size", "title",
})  # fmt: skip


def cleaned(key: str, entry: JSONObject) -> JSONObject:
    """Return an entry without optional fields of the wrong type.

    Clients would reject the whole list, including the entries of other servers, because of such a field.
    """
    try:
        _MODELS[key].model_validate(entry, by_name=False)
    except ValidationError as error:
        wrong = {str(each["loc"][0]) for each in error.errors(include_url=False) if each["loc"]}
        entry = {name: value for name, value in entry.items() if name not in wrong & _OPTIONAL}
    modified = object_of(entry.get("annotations")).get("lastModified")
    if modified is not None and not _MOMENT.fullmatch(text_of(modified)):
        entry = {name: value for name, value in entry.items() if name != "annotations"}
    return entry


async def _pages(
    fetch: Fetch,
    method: str,
    key: str,
    limit: int,
    skipped: dict[str, str],
    fault: Callable[[Any], str | None],
) -> list[JSONObject]:
    """Return all valid entries of a paged list. Raises the errors of `fetch`."""
    entries: list[JSONObject] = []
    cursors: set[str] = set()
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        result = await fetch(method, {} if cursor is None else {"cursor": cursor})
        if not isinstance(result.get(key), list):
            skipped[key] = "the response of the server has no list of them"
        for index, entry in enumerate(list_of(result.get(key))):
            reason = fault(entry)
            if reason is not None:
                skipped[_label(entry, f"{key}[{index}]")] = reason
            elif len(entries) == limit:
                skipped[key] = f"there are more than {limit}"
                return entries
            else:
                entries.append(cleaned(key, entry))
            if index % _ENTRIES_PER_TURN == 0:
                await asyncio.sleep(0)
        cursor = result.get("nextCursor")
        if not isinstance(cursor, str) or not cursor:
            return entries
        if cursor in cursors:
            skipped[key] = "the list repeats itself"
            return entries
        cursors.add(cursor)
    skipped[key] = f"the list has more than {_MAX_PAGES} pages"
    return entries


async def list_entries(fetch: Fetch, kind: str, limit: int) -> list[JSONObject]:
    """Return all valid entries of one of the `LISTS`. Raises the errors of `fetch`."""
    method, key, named = LISTS[kind]
    return await _pages(fetch, method, key, limit, {}, partial(_fault, named=named))


async def _optional(session: RelaySession, fetch: Fetch, kind: str, limit: int) -> list[JSONObject]:
    try:
        return await list_entries(fetch, kind, limit)
    except MCPError as error:
        if error.code == METHOD_NOT_FOUND or session.is_open:
            return []
        raise


def _label(entry: Any, place: str) -> str:
    name = text_of(object_of(entry).get("name"))
    return ascii(name)[1:-1][:200] if name else place


def _fault(entry: Any, named: str = "name") -> str | None:
    if not is_object(entry):
        return "it is not an object"
    if not text_of(entry.get(named)):
        return f"it has no {named}"
    try:
        as_json(entry)
    except JSONValueError as error:
        return f"it is not JSON: {error}"
    return None


def _tool_fault(entry: Any, *, modern: bool) -> str | None:
    """Return the reason why a tool is invalid; 2026-07-28 also has rules for arguments that are sent as headers."""
    reason = _fault(entry)
    if reason is not None:
        return reason
    if not is_object(entry.get("inputSchema")):
        return "it has no input schema"
    if len(str(entry.get("description") or "")) > _MAX_DESCRIPTION:
        return f"its description has more than {_MAX_DESCRIPTION} characters"
    invalid = find_invalid_x_mcp_header(entry["inputSchema"]) if modern else None
    return f"it asks for headers in a way that is not allowed: {invalid}" if invalid else None


def _unique(tools: list[JSONObject], skipped: dict[str, str]) -> list[JSONObject]:
    """Return the first tool of each name."""
    found: dict[str, JSONObject] = {}
    for tool in tools:
        if tool["name"] in found:
            skipped[_label(tool, "tools")] = "its name is taken by an earlier tool"
        else:
            found[tool["name"]] = tool
    return list(found.values())


# ------------------------------------------------------------ pins

_DEFINING = (
    "name", "title", "description", "inputSchema", "outputSchema", "annotations", "arguments", "uri", "uriTemplate",
    "mimeType",
)  # fmt: skip
INSTRUCTIONS = "server/instructions"
"""The key of the server's instructions."""


def digest(tool: JSONObject, target: str) -> str:
    """Return the SHA-256 of the definition of `tool` and its server, independent of the order of keys."""
    definition = {key: tool[key] for key in _DEFINING if key in tool}
    meta = object_of(tool.get("_meta"))
    if META_KEY in meta:
        definition[META_KEY] = meta[META_KEY]
    return sha256(canonical([target, definition])).hexdigest()


def pin_key(kind: str, entry: JSONObject) -> str:
    """Return the pin key of a prompt, template or resource; the key of a tool is its name."""
    return f"{kind}/{entry[LISTS[kind][2]]}"


MAX_ABSENT: Final = 10_000
"""The largest number of stored digests of definitions that a server no longer lists."""


class Pins:
    """Accepted digests by key, and pending ones."""

    def __init__(self, policy: PinPolicy, accepted: dict[str, str], target: str) -> None:
        self.accepted = accepted
        self._given = frozenset(accepted)
        self.waiting: dict[str, str] = {}
        self._policy = policy
        self._target = target
        self._is_first = not accepted

    def check(self, listing: Listing) -> list[str]:
        """Check a whole listing; return the keys of definitions that differ from the accepted ones."""
        self.waiting.clear()
        found: dict[str, JSONObject] = {}
        for key, entry in self._entries(listing):
            found.setdefault(key, entry)
        different = [key for key, entry in found.items() if self.is_different(key, entry)]
        self._is_first = False
        absent = [key for key in self.accepted if key not in found and self._may_forget(key)]
        for key in absent[:-MAX_ABSENT]:
            del self.accepted[key]
        return different

    def _may_forget(self, key: str) -> bool:
        """Return whether a definition that returns later may count as new."""
        is_strict = self._policy == "strict"
        return key not in self._given and (not is_strict or key.startswith("resources/"))

    def _entries(self, listing: Listing) -> Iterator[tuple[str, JSONObject]]:
        if listing.instructions:
            yield INSTRUCTIONS, {"description": listing.instructions}
        yield from ((tool["name"], tool) for tool in listing.tools)
        yield from ((pin_key("prompts", prompt), prompt) for prompt in listing.prompts)
        yield from ((pin_key("templates", template), template) for template in listing.templates)
        if self._policy == "strict":
            yield from ((pin_key("resources", each), each) for each in listing.resources)

    def is_different(self, key: str, entry: JSONObject) -> bool:
        """Check one definition; return whether it differs from the accepted one."""
        found = digest(entry, self._target)
        known = self.accepted.get(key)
        is_strict = self._policy == "strict"
        # New resources need no acceptance: servers add and remove them constantly, and models do not rely on them.
        is_held_if_new = is_strict and not self._is_first and not key.startswith("resources/")
        if known is None and not is_held_if_new:
            self.accepted[key] = found
        elif known != found and is_strict:
            self.waiting[key] = found
        elif known != found and self._policy == "warn":
            self.accepted[key] = found
        else:
            return False
        return known is not None or is_held_if_new

    def accept(self, key: str) -> None:
        """Accept the pending definition of `key`.

        Raises:
            KeyError: If there is no pending definition.
        """
        self.accepted[key] = self.waiting.pop(key)


# ------------------------------------------------------------ subscriptions to resources

MAX_WATCHED: Final = 1_000
"""The largest number of subscribed resources of one server."""

MAX_UNREAD: Final = 1_000
"""The largest number of unread changes of one subscriber; further ones are dropped."""

_RENEW_SECONDS = 1.0


class ResourceWatches:
    """The subscriptions to resources of one server.

    Args:
        server: The name of the server.
        connection_for: Returns the connection for a call.
    """

    def __init__(
        self, server: str, connection_for: Callable[[OperationContext], Awaitable[LiveConnection]]
    ) -> None:
        self._server = server
        self._connection_for = connection_for
        self._watched: dict[tuple[LiveConnection, str], _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def watch(self, uri: str, context: OperationContext) -> AsyncGenerator[str]:
        """Yield the URI of the resource when the subscription is active, then the URI of each change.

        Raises:
            CallError: If the server rejects the subscription, or there are too many.
        """
        connection = await self._connection_for(context)
        key = connection, uri
        watched = self._watched.get(key)
        if watched is None:
            if len(self._watched) >= MAX_WATCHED:
                message = f"{MAX_WATCHED} resources of {self._server} are watched already"
                raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
            watched = self._watched[key] = _Watched(uri, self._server, connection)
            self._tasks.add(watched.task)
            watched.task.add_done_callback(self._tasks.discard)
        changes = _Unread()
        watched.watchers.add(changes)
        try:
            await asyncio.shield(watched.is_subscribed)
            yield uri
            while True:
                yield await changes.next()
        finally:
            watched.watchers.discard(changes)
            if not watched.watchers:
                if self._watched.get(key) is watched:
                    del self._watched[key]
                watched.task.cancel()

    def updated(self, uri: str, calls: CallsInFlight) -> None:
        """Report a change notification (up to 2025-11-25) to the subscribers of the connection with these calls."""
        for (connection, address), watched in self._watched.items():
            is_inside = uri == address or uri.startswith(address.rstrip("/") + "/")
            if connection.calls is calls and is_inside:
                watched.report(uri)

    async def aclose(self) -> None:
        """End all subscriptions."""
        for watched in self._watched.values():
            watched.task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))


class _Unread:
    """The unread changes of one subscriber, without repetitions."""

    def __init__(self) -> None:
        self._queue = asyncio.Queue[str]()
        self._uris: set[str] = set()

    def add(self, uri: str) -> None:
        if uri not in self._uris and len(self._uris) < MAX_UNREAD:
            self._uris.add(uri)
            self._queue.put_nowait(uri)

    async def next(self) -> str:
        uri = await self._queue.get()
        self._uris.discard(uri)
        return uri


class _Watched:
    """A subscription to one resource."""

    def __init__(self, uri: str, server: str, connection: LiveConnection) -> None:
        self.uri = uri
        self.watchers: set[_Unread] = set()
        self.is_subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = server
        self._connection = connection
        self.task = asyncio.Task(self._keep(), name=f"mcp {server} watches {uri}")

    def report(self, uri: str) -> None:
        for watcher in self.watchers:
            watcher.add(uri)

    async def _keep(self) -> None:
        # A server is not stopped while there is a subscription, also not between two attempts.
        with self._connection.in_use():
            while True:
                try:
                    session = await self._connection.acquire()
                    await (self._listen(session) if session.is_modern else self._subscribe(session))
                except (MCPError, CallError, SubscriptionLost, TimeoutError) as error:
                    if not self.is_subscribed.done():
                        message = f"{self._server} does not report changes of this resource"
                        self.is_subscribed.set_exception(CallError(ErrorCode.UNAVAILABLE, message))
                        # Retrieve the exception here as well, because the subscriber may have left.
                        self.is_subscribed.exception()
                        return
                    text = "%s: the subscription to a resource was lost: %s"
                    logger.debug(text, self._server, printable(str(error)))
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
