"""The pages of the server about itself.

    /operations /calls                 the operations of a caller, and its calls
    /openapi.json /session /metrics    the document, sessions of browsers, counters
    /healthz /readyz                   probes

Rule 1: a caller sees only operations that it may call, and calls that it made. A nested call is shown without its
        operation if the caller may not see that operation.
Rule 2: listings have an ETag: a client can check cheaply whether a listing has changed (`If-None-Match`).
"""

import asyncio
import inspect
from collections import OrderedDict
from hashlib import sha256
from itertools import islice
from secrets import token_hex
from typing import Any, TypeVar

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.specs import SOURCE_NAMESPACE, OperationSpec, OperationType, source_of
from operations.front.config import ServerConfig
from operations.front.messages import JSON, Reply, json_reply, matches_tag, route_path
from operations.front.public_errors import METADATA_PATH, RESOURCE_PATHS
from operations.front.request import RequestState
from operations.front.search import visible_specs
from operations.openapi.serving import to_openapi
from operations.recorder.graph import CallGraph, CallRecord
from operations.server.entries import FixedPath, Page
from operations.server.signin.identity import BY_COOKIE, Sessions
from operations.telemetry.metrics import CONTENT_TYPE, CallMetrics

T = TypeVar("T", bound=msgspec.Struct)


MAX_CALLS = 500
"""The number of latest calls that `/calls` returns."""

_MAX_DESCRIPTION = 200
"""The largest number of characters of a description in a listing."""


class ListedTool(msgspec.Struct, frozen=True):
    """The tool of an MCP server that an operation calls; the operation may have been renamed."""

    namespace: str
    """The namespace of the server."""

    name: str
    """The name of the tool at the server."""


class ListedOperation(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """An operation in a listing."""

    id: str
    type: OperationType

    source: str
    """The kind of source: `local`, `openapi`, `mcp`, `remote`."""

    title: str | None = None

    description: str = ""
    """The beginning of the description."""

    tags: tuple[str, ...] = ()

    tool: ListedTool | None = None


class ShownCall(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A call as its caller sees it."""

    request_id: str
    operation_id: str | None = None
    parent_request_id: str | None = None

    started_at: int
    """Milliseconds since the epoch."""

    duration: float | None = None
    """Duration in seconds; None while the call runs."""

    outcome: str
    items: int = 0


def _listed(spec: OperationSpec) -> ListedOperation:
    return ListedOperation(
        id=spec.id,
        type=spec.type,
        source=source_of(spec),
        title=spec.title,
        description=spec.description[:_MAX_DESCRIPTION],
        tags=spec.tags,
        tool=_tool_of(spec),
    )


def _tool_of(spec: OperationSpec) -> ListedTool | None:
    namespace, name = spec.meta.get(SOURCE_NAMESPACE), spec.meta.get("tool")
    if source_of(spec) != "mcp" or not isinstance(namespace, str) or not isinstance(name, str):
        return None
    return ListedTool(namespace, name)


def _shown(record: CallRecord, named: set[str]) -> ShownCall:
    shown = msgspec.convert(record, ShownCall, from_attributes=True)
    is_named = record.operation_id in named
    return shown if is_named else msgspec.structs.replace(shown, operation_id=None)


_WATCHES = frozenset({"approvals.watch", "hub.watch", "hub.watch_workers"})
"""The subscriptions of the open pages of a console, which are no calls of the person who looks at them."""

_KEPT = 16
"""The number of cached documents: one for each set of visible operations."""


class Pages:
    """The paths of these pages; `/calls` only if calls are recorded."""

    def __init__(
        self,
        config: ServerConfig,
        sessions: Sessions,
        metrics: CallMetrics,
        graph: CallGraph | None = None,
    ) -> None:
        self._config = config
        self._graph = graph
        self._start = token_hex(16)
        self._sessions = sessions
        self._metrics = metrics
        self._documents: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()
        self.paths: dict[str, FixedPath] = {
            "/operations": Page(self._operations),
            "/openapi.json": Page(self._openapi),
            "/session": Page(self._session, "GET", "POST", "DELETE", is_open=True),
            "/metrics": Page(self._show_metrics),
            "/healthz": Page(self._healthz, is_probe=True),
            "/readyz": Page(self._readyz, is_probe=True),
        }
        if graph is not None:
            self.paths["/calls"] = Page(self._calls)
        if config.authorization_servers:
            metadata = Page(self._resource_metadata, is_probe=True)
            self.paths |= {f"{METADATA_PATH}{path}": metadata for path in ("", *RESOURCE_PATHS)}

    def _tag(self, state: RequestState, *news: Any) -> bytes:
        """Return an ETag that changes when the set of operations that the caller may call changes."""
        revision = state.front.registry.revision
        state_key = msgspec.json.encode([self._start, revision, state.identity, *news])
        return b'"' + sha256(state_key).hexdigest()[:32].encode() + b'"'

    async def _look(self, state: RequestState) -> JSONObject:
        """Return `{"status": "ok" | "degraded" | "unavailable"}`, with details if there are any."""
        ready = self._config.ready
        found: bool | JSONObject = not state.front.open_streams.is_closing
        if found and ready is not None:
            try:
                answer = ready()
                found = await answer if inspect.isawaitable(answer) else answer
            except Exception:  # noqa: BLE001 - a failed check means not ready
                found = False
        return found if isinstance(found, dict) else {"status": "ok" if found else "unavailable"}

    async def _operations(self, state: RequestState) -> Reply:
        found = await self._look(state)
        disconnected, problem = found.get("disconnected", []), found.get("problem")
        tag = self._tag(state, disconnected, problem)
        if matches_tag(state.headers.get(b"if-none-match", b""), tag):
            return Reply(304, b"", [(b"etag", tag)])
        specs = sorted(visible_specs(state.front.registry, state.context), key=lambda spec: spec.id)
        listed = [_listed(spec) for spec in specs]
        overview = {
            "operations": listed,
            "hasCalls": self._graph is not None,
            "hasRuns": state.front.registry.run_store is not None,
            "disconnected": disconnected,
            # Only a development server has one.
            **({} if problem is None else {"problem": problem}),
        }
        return json_reply(overview, headers=[(b"etag", tag)])

    async def _calls(self, state: RequestState) -> Reply:
        named = {spec.id for spec in visible_specs(state.front.registry, state.context)}
        latest = islice(reversed(self._mine(state)), MAX_CALLS)
        return json_reply({"calls": [_shown(record, named) for record in reversed(list(latest))]})

    def _mine(self, state: RequestState) -> list[CallRecord]:
        identity = state.identity
        if identity is None and self._config.identity is not None:
            # Callers without identity do not see each other's calls.
            return []
        caller: tuple[str | None, str | None] = (None, None)
        whose: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        if identity is not None:
            caller, whose = (identity.id, identity.issuer), identity.presented
        return [
            record
            for record in self._graph or ()
            if record.operation_id not in _WATCHES
            # A person also sees the calls of their agents; an agent sees only its own.
            and (record.identity_id, record.issuer) == caller
            and whose in (((), ()), (record.acting, record.grants))
        ]

    async def _openapi(self, state: RequestState) -> Reply:
        specs = list(visible_specs(state.front.registry, state.context))
        root: str = state.scope.get("root_path", "")
        key = (state.front.registry.revision, root, *(spec.id for spec in specs))
        document = self._documents.pop(key, None)
        if document is None:
            # Run in a thread, because a large registry takes long.
            registry, durable = state.front.registry, None
            if registry.run_store is not None:
                durable = [each.spec.id for each in registry if each.durable]
            document = await asyncio.to_thread(self._build, specs, root or "/", durable)
        self._documents[key] = document
        if len(self._documents) > _KEPT:
            self._documents.popitem(last=False)
        return Reply(200, document, [JSON])

    def _build(
        self, specs: list[OperationSpec], server_url: str, durable: list[str] | None
    ) -> bytes:
        return msgspec.json.encode(
            to_openapi(
                specs,
                title=self._config.title,
                version=self._config.version,
                server_url=server_url,
                durable=durable,
            )
        )

    async def _session(self, state: RequestState) -> Reply:
        """GET returns the caller's identity, POST with a credential signs in, DELETE signs out."""
        sessions, scope = self._sessions, state.scope
        match scope["method"]:
            case "DELETE":
                sessions.sign_out(scope)
                cookie = (b"set-cookie", sessions.cookie("", scope))
                return json_reply({"identity": None}, headers=[cookie])
            case "POST":
                if state.credential is None or BY_COOKIE in scope:
                    # A session cannot begin another session, or it could be renewed forever.
                    message = "Send the header `Authorization: Bearer KEY` to sign in"
                    raise CallError(ErrorCode.ACCESS_DENIED, message)
                cookie = (
                    b"set-cookie",
                    sessions.cookie(sessions.sign_in(state.credential), scope),
                )
                return json_reply(_described(state.identity), headers=[cookie])
            case _:
                return json_reply(_described(state.identity))

    async def _show_metrics(self, state: RequestState) -> Reply:
        shown = {spec.id for spec in visible_specs(state.front.registry, state.context)}
        body = await self._metrics.collect(shown)
        return Reply(200, body, [(b"content-type", CONTENT_TYPE)])

    async def _resource_metadata(self, state: RequestState) -> Reply:
        """Return the metadata with the servers that issue tokens for a resource (RFC 9728)."""
        path = route_path(state.scope).removeprefix(METADATA_PATH)
        return json_reply(state.front.challenge.at(path).metadata())

    async def _healthz(self, state: RequestState) -> Reply:
        """Respond that this process is alive."""
        return json_reply({"status": "ok"})

    async def _readyz(self, state: RequestState) -> Reply:
        """Whether this process should receive requests."""
        found = await self._look(state)
        return json_reply(found, status=503 if found.get("status") == "unavailable" else 200)


def _described(identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return {"identity": None}
    return {"identity": {"id": identity.id, "scopes": sorted(identity.scopes)}}
