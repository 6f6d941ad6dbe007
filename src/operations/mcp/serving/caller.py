"""The client of an MCP request: what it may see, how long its calls take, and the form of its results."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from operations.base.errors import CallError, timed_out
from operations.base.time_limit import TimeLimit
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.channel import NOTHING
from operations.contract.context import OperationContext, may_call
from operations.contract.events import trace_context
from operations.contract.specs import Operation, OperationSpec, OperationType, is_describable
from operations.front.front import Front
from operations.front.limits import call_seconds
from operations.front.request import RequestState
from operations.mcp.serving.tools import Tool, model_text, text_block
from operations.mcp.shared.codec import sent_meta


class _Served(Protocol):
    """A tool, resource or prompt."""

    spec: OperationSpec
    source: str | None


ItemT = TypeVar("ItemT", bound=_Served)

_BLOCKS_SINCE: Final = {"audio": "2025-03-26", "resource_link": "2025-06-18"}
"""The revisions that introduced types of blocks."""

_LATEST_BLOCK: Final = max(_BLOCKS_SINCE.values())

_PROTOCOL_KEYS: Final = ("io.modelcontextprotocol/", "progressToken")
"""Beginnings of the keys in the `_meta` of most requests, which concern only this connection."""


class MCPCaller(msgspec.Struct, frozen=True):
    """The client that sent a request: its identity, its protocol version, and the front that it reached."""

    identity: Identity | None
    protocol_version: str
    front: Front

    capabilities: Mapping[str, Any] = NOTHING
    """The capabilities that the client declared."""

    key: str = "at:"
    """The key of the caller for limits."""

    request_id: str = ""
    """The id of the HTTP request, which is also the id of its call."""

    metadata: Mapping[str, Any] = NOTHING

    meta: Mapping[str, Any] = NOTHING
    """The `_meta` to forward to the server of an imported operation."""

    deadline: float | None = None
    """The deadline that the caller itself set, in milliseconds since the epoch."""

    @classmethod
    def of(
        cls,
        state: RequestState,
        protocol_version: str,
        capabilities: Mapping[str, Any],
        meta: Mapping[str, Any] | None,
    ) -> "MCPCaller":
        """Return the client that sent an HTTP request with this `_meta`.

        The trace context in `_meta` takes precedence over that in the headers.
        """
        context = state.context
        sent = trace = NOTHING
        if meta and not all(key.startswith(_PROTOCOL_KEYS) for key in meta):
            sent, trace = sent_meta(meta), trace_context(meta)
        return cls(
            state.identity,
            protocol_version,
            state.front,
            capabilities,
            state.caller,
            context.request_id,
            {**context.metadata, **trace} if trace else context.metadata,
            sent,
            context.deadline if b"operations-timeout" in state.headers else None,
        )

    @property
    def modern(self) -> bool:
        """Whether the client uses 2026-07-28 or later."""
        return self.protocol_version in MODERN_PROTOCOL_VERSIONS

    def sees(self, spec: OperationSpec) -> bool:
        """Return whether the client may call an operation whose schemas can be built, and may therefore see it."""
        return may_call(spec, OperationContext(identity=self.identity)) and is_describable(spec)

    def visible(self, items: Iterable[ItemT]) -> list[ItemT]:
        """Return the tools, resources or prompts whose operations the client may call."""
        context = OperationContext(identity=self.identity)
        return [item for item in items if may_call(item.spec, context)]

    def limit(self, operation: Operation | None) -> TimeLimit | None:
        """Return the time limit of a call, which questions and progress extend; None for a subscription."""
        if operation is not None and operation.spec.type is OperationType.SUBSCRIPTION:
            return None
        front = self.front
        default = call_seconds(operation, front.timeout) if self.deadline is None else None
        return TimeLimit(
            default,
            answer_seconds=front.limits.answer_seconds,
            max_seconds=front.max_timeout,
            deadline=self.deadline,
        )

    def settled(
        self, result: JSONObject, *, freshness: tuple[int, bool] | None = None
    ) -> JSONObject:
        """Return a result as the protocol revision of the client defines it.

        Args:
            result: The result.
            freshness: For how many milliseconds the client may cache it, and whether it may show it to other callers;
                None if it cannot be cached.
        """
        if self.modern:
            result.setdefault("resultType", "complete")
            if freshness is not None:
                ttl, is_public = freshness
                result |= {"ttlMs": ttl, "cacheScope": "public" if is_public else "private"}
        elif self.protocol_version < _LATEST_BLOCK:
            # Older clients reject the whole result if it contains a block of an unknown type.
            known = partial(_known_block, version=self.protocol_version)
            if "content" in result:
                result["content"] = [known(block) for block in result["content"]]
            for message in result.get("messages", ()):
                message["content"] = known(message["content"])
        return result


class LimitedCall:
    """A call of a tool that runs in the task of its request, which enforces the time limit."""

    __slots__ = ("_caller", "_seconds", "_tool", "limit", "state")

    def __init__(
        self, caller: MCPCaller, state: RequestState, tool: Tool, limit: TimeLimit, seconds: float
    ) -> None:
        self._caller = caller
        self._tool = tool
        self._seconds = seconds
        self.state = state
        self.limit = limit
        limit.is_kept = True

    def start(self) -> None:
        """Start the time limit; the call also ends when its client disconnects."""
        self.state.watch_work(self._seconds, self.limit)

    async def run(self, work: Awaitable[JSONObject]) -> JSONObject:
        """Return the result of the work; an error result if the time limit or other code cancelled it."""
        timeout = self.state.timeout
        try:
            return await work
        except asyncio.CancelledError:
            error = self.state.cancelled_elsewhere(self._tool.spec.id)
            if error is not None:
                return self._failure(error)
            if not timeout.timed_out or timeout.stop():
                raise
            return self.late_result()
        finally:
            timeout.pause()

    def late_result(self) -> JSONObject:
        """Return the result of a call that exceeded its time limit."""
        return self._failure(
            timed_out(self._tool.spec.id, self._seconds, deadline=self.limit.deadline)
        )

    def _failure(self, error: CallError) -> JSONObject:
        caller = self._caller
        result = self._tool.failure(error, caller.request_id, expose=caller.front.expose_errors)
        return caller.settled(result)


def _known_block(block: JSONObject, version: str) -> JSONObject:
    """Return a block; as text with its JSON if its type is newer than the client's revision."""
    is_newer = version < _BLOCKS_SINCE.get(block.get("type", ""), "")
    return text_block(model_text(block)) if is_newer else block
