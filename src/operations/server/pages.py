"""What is served beside calls: the document, sessions, metrics, and whether we are well.

Rule 1: each shows a caller only what it may call.
"""

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from starlette.requests import HTTPConnection

from operations.access import Identity
from operations.errors import CallError, ErrorCode
from operations.gateway import visible_specs
from operations.openapi.exporting.export import to_openapi
from operations.server.doors import Door
from operations.server.edge import BY_COOKIE, Edge, Visit
from operations.server.replies import JSON, Reply, json_reply
from operations.specs import OperationSpec
from operations.telemetry.metrics import CONTENT_TYPE, CallMetrics

_KEPT = 16
"""Documents kept ready: one for each set of operations that callers may see."""

Ready: TypeAlias = Callable[[], "bool | Awaitable[bool]"]
"""Whether everything this server needs is there; raising is a no."""


class Pages:
    """The fixed paths that are no gateway."""

    def __init__(
        self, edge: Edge, metrics: CallMetrics, *, title: str, version: str, ready: Ready | None
    ) -> None:
        self._edge = edge
        self._metrics = metrics
        self._title = title
        self._version = version
        self._ready = ready
        self._documents: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()
        self.is_up = True
        """Whether new requests are welcome; not any more once the server is shutting down."""
        self.doors = {
            "/openapi.json": Door(methods=("GET",), endpoint=self._openapi),
            "/session": Door(methods=("GET", "POST", "DELETE"), endpoint=self._session),
            "/metrics": Door(methods=("GET",), endpoint=self._show_metrics),
            "/healthz": Door(methods=("GET", "HEAD"), endpoint=self._healthz, is_probe=True),
            "/readyz": Door(methods=("GET", "HEAD"), endpoint=self._readyz, is_probe=True),
        }

    async def _openapi(self, visit: Visit) -> Reply:
        specs = list(visible_specs(self._edge.registry, visit.context))
        root: str = visit.scope.get("root_path", "")
        key = (self._edge.registry.revision, root, *(spec.id for spec in specs))
        document = self._documents.pop(key, None)
        if document is None:
            # A large registry takes a while, which others should not wait for.
            document = await asyncio.to_thread(self._build, specs, root or "/")
        self._documents[key] = document
        if len(self._documents) > _KEPT:
            self._documents.popitem(last=False)
        return Reply(200, document, [JSON])

    def _build(self, specs: list[OperationSpec], server_url: str) -> bytes:
        return msgspec.json.encode(
            to_openapi(specs, title=self._title, version=self._version, server_url=server_url)
        )

    async def _session(self, visit: Visit) -> Reply:
        """GET: who am I. POST with a credential: sign in. DELETE: sign out."""
        sessions = self._edge.sessions
        is_secure = visit.scope.get("scheme") == "https"
        match visit.scope["method"]:
            case "DELETE":
                sessions.sign_out(HTTPConnection(visit.scope))
                cookie = (b"set-cookie", sessions.cookie("", secure=is_secure))
                return json_reply({"identity": None}, headers=[cookie])
            case "POST":
                if visit.identity is None or BY_COOKIE in visit.scope:
                    # A session does not beget another: it would never end.
                    raise CallError(ErrorCode.ACCESS_DENIED, "Show a credential to sign in")
                secret = sessions.sign_in(visit.identity)
                cookie = (b"set-cookie", sessions.cookie(secret, secure=is_secure))
                return json_reply(_who(visit.identity), headers=[cookie])
            case _:
                return json_reply(_who(visit.identity))

    async def _show_metrics(self, visit: Visit) -> Reply:
        shown = {spec.id for spec in visible_specs(self._edge.registry, visit.context)}
        return Reply(200, self._metrics.render(shown), [(b"content-type", CONTENT_TYPE)])

    async def _healthz(self, visit: Visit) -> Reply:
        """Whether this process can answer at all."""
        return json_reply({"status": "ok"})

    async def _readyz(self, visit: Visit) -> Reply:
        """Whether this process should be given work."""
        is_ready = self.is_up
        if is_ready and self._ready is not None:
            try:
                answer = self._ready()
                is_ready = await answer if inspect.isawaitable(answer) else answer
            except Exception:  # noqa: BLE001 - what cannot be told is not ready
                is_ready = False
        return json_reply(
            {"status": "ok" if is_ready else "unavailable"}, status=200 if is_ready else 503
        )


def _who(identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return {"identity": None}
    return {"identity": {"id": identity.id, "scopes": sorted(identity.scopes)}}
