"""What is served beside calls: the document, sessions, metrics, and whether we are well.

Rule 1: each shows a caller only what it may call.
"""

import asyncio
import inspect
from collections import OrderedDict
from typing import Any

import msgspec

from operations.access import Identity
from operations.errors import CallError, ErrorCode
from operations.front.challenges import METADATA_PATH
from operations.front.config import Ready
from operations.front.http import RequestPipeline, RequestState
from operations.front.replies import JSON, Reply, json_reply
from operations.front.search import visible_specs
from operations.openapi.exporting.export import to_openapi
from operations.server.routing import Route
from operations.server.sessions import BY_COOKIE, Sessions
from operations.specs import OperationSpec
from operations.telemetry.metrics import CONTENT_TYPE, CallMetrics

_KEPT = 16
"""Documents kept ready: one for each set of operations that callers may see."""


class Pages:
    """The fixed paths that are no gateway."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        sessions: Sessions,
        metrics: CallMetrics,
        *,
        title: str,
        version: str,
        ready: Ready | None,
    ) -> None:
        self._pipeline = pipeline
        self._sessions = sessions
        self._metrics = metrics
        self._title = title
        self._version = version
        self._ready = ready
        self._documents: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()
        self.is_up = True
        """Whether new requests are welcome; not any more once the server is shutting down."""
        self.routes = {
            "/openapi.json": Route(methods=("GET",), endpoint=self._openapi),
            "/session": Route(
                methods=("GET", "POST", "DELETE"), endpoint=self._session, is_open=True
            ),
            "/metrics": Route(methods=("GET",), endpoint=self._show_metrics),
            "/healthz": Route(methods=("GET", "HEAD"), endpoint=self._healthz, is_probe=True),
            "/readyz": Route(methods=("GET", "HEAD"), endpoint=self._readyz, is_probe=True),
        }
        if pipeline.front.challenge.authorization_servers:
            metadata = Route(methods=("GET",), endpoint=self._resource_metadata, is_probe=True)
            self.routes |= {METADATA_PATH: metadata, f"{METADATA_PATH}/mcp": metadata}

    async def _openapi(self, state: RequestState) -> Reply:
        specs = list(visible_specs(self._pipeline.front.registry, state.context))
        root: str = state.scope.get("root_path", "")
        key = (self._pipeline.front.registry.revision, root, *(spec.id for spec in specs))
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

    async def _session(self, state: RequestState) -> Reply:
        """GET: who am I. POST with a credential: sign in. DELETE: sign out."""
        sessions, scope = self._sessions, state.scope
        match scope["method"]:
            case "DELETE":
                sessions.sign_out(scope)
                cookie = (b"set-cookie", sessions.cookie("", scope))
                return json_reply({"identity": None}, headers=[cookie])
            case "POST":
                if state.credential is None or BY_COOKIE in scope:
                    # A session cannot begin another one: it would never end.
                    raise CallError(ErrorCode.ACCESS_DENIED, "Show a credential to sign in")
                cookie = (
                    b"set-cookie",
                    sessions.cookie(sessions.sign_in(state.credential), scope),
                )
                return json_reply(_who(state.identity), headers=[cookie])
            case _:
                return json_reply(_who(state.identity))

    async def _show_metrics(self, state: RequestState) -> Reply:
        shown = {spec.id for spec in visible_specs(self._pipeline.front.registry, state.context)}
        return Reply(200, self._metrics.render(shown), [(b"content-type", CONTENT_TYPE)])

    async def _resource_metadata(self, state: RequestState) -> Reply:
        """Return where clients get tokens for this server (RFC 9728)."""
        return json_reply(self._pipeline.front.challenge.metadata())

    async def _healthz(self, state: RequestState) -> Reply:
        """Whether this process can answer at all."""
        return json_reply({"status": "ok"})

    async def _readyz(self, state: RequestState) -> Reply:
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
