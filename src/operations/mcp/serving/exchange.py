"""One request, and its response.

Rule 1: the response is JSON, unless other messages must be sent before the result, the client prefers event streams, or
        nothing was sent for some time, because proxies close idle connections: then it is an event stream.
Rule 2: the work ends when its client disconnects, unless the response is a stream of a session, which the client can
        resume.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import anyio
import msgspec
from mcp.server.runner import modern_error_data
from mcp.server.streamable_http import REQUEST_CANCELLED
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import INTERNAL_ERROR, ErrorData
from starlette.requests import Request

from operations.base.errors import CallError, retrieve_exception
from operations.base.types import JSONObject
from operations.front.messages import EVENT_STREAM, JSON, Reply
from operations.front.public_errors import Header
from operations.front.request import RequestState
from operations.io.sse import ALIVE
from operations.mcp.serving.caller import LimitedCall
from operations.mcp.serving.sessions import Session, event, notification
from operations.mcp.shared.interaction import NO_CLIENT, client

SESSION_HEADER: Final = b"mcp-session-id"

_CANCEL_SECONDS: Final = 1
"""Seconds to wait for a client to receive the cancellation of a question."""

_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class Exchange:
    """A request and its response. For the SDK's handlers it is the `DispatchContext`."""

    state: RequestState
    """The HTTP request."""

    request_id: int | str
    """The id of the JSON-RPC request."""

    session: Session | None = None
    """The session, if there is one. Without a session, the client cannot be asked questions."""

    progress_token: int | str | None = None
    """The token of progress reports, if the client requested them."""

    streams: bool = field(kw_only=True)
    """Whether the response may become a stream; otherwise messages before the result are dropped."""

    stamp: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """The `_meta` of every result since 2026-07-28. With it, the status of an error depends on its code."""

    _status: int = 200
    _task: asyncio.Task[Any] = field(default_factory=cast("Any", asyncio.current_task))
    _stream: int | None = None
    _is_attached: bool = False
    _is_cancelled: bool = False
    _is_ended: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _stop_watch: Callable[[], object] | None = None
    _timer: asyncio.TimerHandle | None = None
    _pinging: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ serving

    async def serve(
        self, work: Awaitable[JSONObject], *headers: Header, limited: LimitedCall | None = None
    ) -> Reply | None:
        """Run the work and respond; return the response unless it became a stream.

        Args:
            work: The work, which ends when its client disconnects.
            headers: The headers of the response.
            limited: The call, if its time limit is enforced here.
        """
        state, session = self.state, self.session
        if limited is None:
            state.timeout.start(None, state.receive)
        else:
            # Set before the response becomes a stream, which may outlive its client.
            limited.start()
            work = limited.run(work)
            state.answer_late = partial(self._answer_late, limited)
        self._ping_later()
        if session is not None:
            session.running[self.request_id] = self.cancel
        try:
            if self._prefers_stream:
                async with self._writing():
                    await self._start()
            message = await self._outcome(work)
        finally:
            state.timeout.pause()
            self._stop()
            # The task of the request has the context, which would keep this object in a cycle.
            client.set(NO_CLIENT)
            if session is not None and session.running.get(self.request_id) == self.cancel:
                del session.running[self.request_id]
            if self._stop_watch is not None:
                self._stop_watch()
        if state.is_answered:
            return None
        if self._stream is None:
            return Reply(self._status, message, [JSON, *headers])
        await self._end_stream(self._stream, message)
        return None

    @property
    def _prefers_stream(self) -> bool:
        """Whether the client, before 2026-07-28, names event streams first."""
        accept = self.state.headers.get(b"accept", b"")
        return self.streams and self.stamp is None and accept.startswith(b"text/event-stream")

    def _stop(self) -> None:
        """Send no more messages before the result, also not of tasks that the handler left running."""
        self.streams = False
        if self._timer is not None:
            self._timer.cancel()
            # The timer has the context of the call, which leads back to this object.
            self._timer = None

    async def _end_stream(self, stream: int, message: bytes) -> None:
        try:
            async with self._writing():
                if not self._is_ended:
                    await self._write_last(message)
                await self._detach()
        finally:
            if self.session is not None:
                self.session.log.close_stream(stream)

    async def _write_last(self, message: bytes) -> None:
        try:
            await self._write(message)
        except CallError as error:
            # In a session, a client that reads too slowly can still fetch the result with a new request.
            if self.session is None:
                refused = ErrorData(code=INTERNAL_ERROR, message=error.message)
                await self._write(self._failure(refused))

    async def _answer_late(self, limited: LimitedCall) -> None:
        """Respond with a timeout, although the work has not ended."""
        self._stop()
        message = self._message(limited.late_result())
        if self._stream is None:
            await Reply(200, message, [JSON]).send(self.state.send)
        else:
            await self._end_stream(self._stream, message)

    def _message(self, result: JSONObject) -> bytes:
        if self.stamp is not None:
            noted = result.get("_meta")
            result["_meta"] = self.stamp if noted is None else {**noted, **self.stamp}
        return _encode({"jsonrpc": "2.0", "id": self.request_id, "result": result})

    async def _outcome(self, work: Awaitable[JSONObject]) -> bytes:
        try:
            result = await work
        except asyncio.CancelledError:
            if not (self._is_cancelled or self._is_ended) or self._task.uncancel():
                raise
            error = ErrorData(code=REQUEST_CANCELLED, message="Request cancelled")
        except Exception as failure:  # noqa: BLE001 - the caller gets a response in any case
            error = modern_error_data(failure)
        else:
            return self._message(result)
        if self.stamp is not None:
            self._status = ERROR_CODE_HTTP_STATUS.get(error.code, 200)
        return self._failure(error)

    def _failure(self, error: ErrorData) -> bytes:
        failed = error.model_dump(by_alias=True, mode="json", exclude_none=True)
        return _encode({"jsonrpc": "2.0", "id": self.request_id, "error": failed})

    def cancel(self) -> None:
        """End the work, and respond that it was cancelled."""
        if not self._is_cancelled:
            self._is_cancelled = self.state.is_withdrawn = True
            self._task.cancel()

    def end(self) -> None:
        """End the work and the stream without a response."""
        if not self._is_ended:
            self._is_ended = self.state.is_withdrawn = True
            self._task.cancel()

    # ------------------------------------------------------------ the stream

    async def _start(self) -> None:
        """Turn the response into a stream."""
        state, session = self.state, self.session
        headers = list(EVENT_STREAM)
        self._stream = 0
        if session is not None:
            self._stream = session.log.open_stream()
            state.timeout.unwatch()
            headers.append((SESSION_HEADER, session.id.encode()))
        self._stop_watch = state.front.credentials.watch(state.credential, self.end)
        self._is_attached = True
        await state.send({"type": "http.response.start", "status": 200, "headers": headers})
        if session is not None and session.can_resume:
            await self._send(session.log.add_start(self._stream))

    @asynccontextmanager
    async def _writing(self) -> AsyncGenerator[None]:
        """Write to the stream alone. Detach a client that has disconnected, which some servers report as an error."""
        async with self._lock:
            try:
                yield
            except OSError:
                self._is_attached = False

    async def _emit(self, message: bytes) -> None:
        """Send a message before the result."""
        async with self._writing():
            if self._stream is None:
                await self._start()
            await self._write(message)

    async def _write(self, message: bytes) -> None:
        log = None if self.session is None else self.session.log
        await self._send(event(message) if log is None else log.add(self._stream or 0, message))

    async def _send(self, frame: bytes) -> None:
        if self._is_attached:
            await self.state.send_part(frame)

    async def _detach(self) -> None:
        """End the HTTP response."""
        if self._is_attached:
            self._is_attached = False
            await self.state.send({"type": "http.response.body", "body": b""})

    async def release(self) -> None:
        """End the HTTP response while the work continues: the client resumes the stream with a new request."""
        async with self._writing():
            if self._stream is None:
                await self._start()
            await self._detach()

    @property
    def can_release(self) -> bool:
        """Whether the client can resume the stream."""
        return self.streams and self.session is not None and self.session.can_resume

    def _ping_later(self) -> None:
        if self.streams:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.state.front.heartbeat, self._start_ping)

    def _start_ping(self) -> None:
        # This task is not cancelled: the end of the stream must follow a complete head.
        self._pinging = asyncio.Task(self._ping())
        self._pinging.add_done_callback(retrieve_exception)

    async def _ping(self) -> None:
        async with self._writing():
            if self.streams:
                if self._stream is None:
                    await self._start()
                await self._send(ALIVE)
        self._ping_later()

    # ------------------------------------------------------------ as the SDK's `DispatchContext`

    @property
    def transport(self) -> TransportContext:
        """The features of the transport."""
        return TransportContext(kind="streamable-http", can_send_request=self.can_send_request)

    @property
    def can_send_request(self) -> bool:
        """Whether the client can be asked."""
        return self.streams and self.session is not None

    @property
    def message_metadata(self) -> ServerMessageMetadata:
        """The HTTP request, and the function that releases its response."""
        return ServerMessageMetadata(
            request_context=Request(self.state.scope, self.state.receive),
            close_sse_stream=self.release if self.can_release else None,
            can_send_request=self.can_send_request,
        )

    @property
    def cancel_requested(self) -> anyio.Event:
        """An event that is never set: cancellation ends the work's task."""
        return anyio.Event()

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> None:
        """Send a notification."""
        if self.streams:
            await self._emit(notification(method, params))

    async def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """Report progress, if the client requested it."""
        if self.progress_token is None:
            return
        params: JSONObject = {"progressToken": self.progress_token, "progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        await self.notify("notifications/progress", params)

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        """Ask the client and return its answer.

        Raises:
            MCPError: If the client responds with an error.
            NoBackChannelError: If the client cannot be asked.
        """
        session = self.session
        if session is None or not self.streams:
            raise NoBackChannelError(method)
        number, answer = session.ask()
        question: JSONObject = {"jsonrpc": "2.0", "id": number, "method": method}
        if params is not None:
            question["params"] = params
        try:
            await self._emit(_encode(question))
            return await answer
        except asyncio.CancelledError:
            answer.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CANCEL_SECONDS):
                    await self.notify("notifications/cancelled", {"requestId": number})
            raise
