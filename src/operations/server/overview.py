"""The whole at a glance: `/operations` lists what a caller may call, `/calls` what it called.

Rule 1: a caller sees its own: operations it may call, calls it made. A call made on its behalf is shown, but not by
        name where the name is not its own to see.
Rule 2: whoever wants to know whether there is something new asks with the tag of what it has (`If-None-Match`), and
        that costs nothing while the registry stays as it is.
"""

from hashlib import sha256
from itertools import islice
from secrets import token_hex

import msgspec

from operations.access import Identity
from operations.calls.graph import CallGraph, CallRecord
from operations.front.http import RequestPipeline, RequestState
from operations.front.replies import Reply, json_reply
from operations.front.search import visible_specs
from operations.server.routing import Route
from operations.specs import OperationSpec, OperationType

MAX_CALLS = 500
"""Calls that `/calls` gives, the latest."""

_MAX_DESCRIPTION = 200
"""Characters of a description that a listing has room for."""


class Listed(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An operation in a few words."""

    id: str
    type: OperationType

    source: str
    """Where it runs: `local`, `openapi`, `mcp`, `remote`."""

    title: str | None = None

    description: str = ""
    """How it begins."""

    tags: tuple[str, ...] = ()


class ShownCall(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A call as its caller sees it."""

    request_id: str
    operation_id: str | None = None
    parent_request_id: str | None = None

    started_at: int
    """Milliseconds since the epoch."""

    duration: float | None = None
    """Seconds; None while it runs."""

    outcome: str
    items: int = 0


class Overview:
    """The two paths; `/calls` only where calls are recorded."""

    def __init__(self, pipeline: RequestPipeline, graph: CallGraph | None = None) -> None:
        self._pipeline = pipeline
        self._has_calls = graph is not None
        self._start = token_hex(16)
        self.routes = {"/operations": Route(methods=("GET",), endpoint=self._operations)}
        if graph is not None:
            self._graph = graph
            self.routes["/calls"] = Route(methods=("GET",), endpoint=self._calls)

    def _tag(self, identity: Identity | None) -> bytes:
        """What stands for all that `identity` may call now."""
        who = msgspec.json.encode([self._start, self._pipeline.front.registry.revision, identity])
        return b'"' + sha256(who).hexdigest()[:32].encode() + b'"'

    async def _operations(self, state: RequestState) -> Reply:
        tag = self._tag(state.identity)
        if _is_held(state.headers.get(b"if-none-match", b""), tag):
            return Reply(304, b"", [(b"etag", tag)])
        specs = sorted(
            visible_specs(self._pipeline.front.registry, state.context), key=lambda spec: spec.id
        )
        listed = [_listed(spec) for spec in specs]
        told = {"operations": listed, "hasCalls": self._has_calls}
        return json_reply(told, headers=[(b"etag", tag)])

    async def _calls(self, state: RequestState) -> Reply:
        named = {spec.id for spec in visible_specs(self._pipeline.front.registry, state.context)}
        latest = islice(reversed(self._mine(state.identity)), MAX_CALLS)
        return json_reply({"calls": [_shown(record, named) for record in reversed(list(latest))]})

    def _mine(self, identity: Identity | None) -> list[CallRecord]:
        if identity is None and self._pipeline.resolve is not None:
            # Nobody is not somebody: those who did not sign in do not share what they did.
            return []
        caller = None if identity is None else identity.id
        return [record for record in self._graph if record.identity_id == caller]


def _is_held(held: bytes, tag: bytes) -> bool:
    """Whether `If-None-Match` names a tag: one, several, weak ones as well, or `*` for any."""
    tags = [one.strip().removeprefix(b"W/") for one in held.split(b",")]
    return tag in tags or tags == [b"*"]


def source_of(spec: OperationSpec) -> str:
    """Where an operation runs, as far as its importer noted it."""
    noted = spec.meta.get("source")
    if noted in ("mcp", "remote"):
        return str(noted)
    return "openapi" if "method" in spec.meta and "path" in spec.meta else "local"


def _listed(spec: OperationSpec) -> Listed:
    return Listed(
        id=spec.id,
        type=spec.type,
        source=source_of(spec),
        title=spec.title,
        description=spec.description[:_MAX_DESCRIPTION],
        tags=spec.tags,
    )


def _shown(record: CallRecord, named: set[str]) -> ShownCall:
    return ShownCall(
        request_id=record.request_id,
        operation_id=record.operation_id if record.operation_id in named else None,
        parent_request_id=record.parent_request_id,
        started_at=record.started_at,
        duration=record.duration,
        outcome=record.outcome,
        items=record.items,
    )
