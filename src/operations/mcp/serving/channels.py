"""What a request can carry back to its client while it is served."""

from collections.abc import Awaitable, Callable
from secrets import token_urlsafe
from typing import Any, Final, cast

from mcp import MCPError
from mcp.server.connection import Connection, allowed_log_levels
from mcp.server.context import ServerRequestContext
from mcp.server.session import ServerSession
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    LOG_LEVEL_META_KEY,
    ClientCapabilities,
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    CreateMessageResultWithTools,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    ListRootsRequest,
    ListRootsResult,
    LoggingMessageNotification,
    LoggingMessageNotificationParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from operations.context import CallerChannel
from operations.errors import CallError, ErrorCode
from operations.mcp.serving.client import Client, client
from operations.mcp.serving.elicitation import refused
from operations.mcp.serving.exchange import Exchange
from operations.types import JSONObject

RequestContext = ServerRequestContext[Any, Any]

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")

_LEVEL = "operations.level"
_NOTHING = ClientCapabilities()
_KEY = "operations.key"


def connection_of(request: RequestContext) -> Connection:
    """The connection a request came on, which outlives it. The SDK's context has no public way to it."""
    return request.session._connection  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def set_level(request: RequestContext, level: str) -> None:
    """Send log messages of this level and above from now on."""
    connection_of(request).state[_LEVEL] = level


def channel_for(request: RequestContext) -> CallerChannel:
    """A channel as wide as the client's capabilities."""
    session = request.session
    modern = request.protocol_version in MODERN_PROTOCOL_VERSIONS
    asks = not modern and session.can_send_request
    # Those of newer clients are asked by a conversation.
    can = (session.client_capabilities if asks else None) or _NOTHING
    roots = _roots(request) if can.roots is not None else None
    can_open = can.elicitation is not None and can.elicitation.url is not None
    client.set(
        Client(
            close_stream=request.close_sse_stream,
            roots=roots,
            elicit_url=_elicit_url(request) if can_open else None,
        )
    )
    return CallerChannel(
        session=_session_key(connection_of(request)) if asks else "",
        log_level=_wanted_level(request, modern=modern),
        progress=session.report_progress,
        log=_logger(request),
        elicit=_elicit(request) if can.elicitation is not None else None,
        sample=_sample(request) if can.sampling is not None else None,
    )


def _logger(request: RequestContext) -> Callable[[str, Any, str | None], Awaitable[None]]:
    async def log(level: str, data: Any, logger_name: str | None) -> None:
        level = level if level in LEVELS else "info"
        if level not in allowed_log_levels(request.protocol_version, request.meta):
            return
        if not _is_wanted(level, connection_of(request)):
            return
        params = LoggingMessageNotificationParams(
            level=cast("Any", level), data=data, logger=logger_name
        )
        await request.session.send_notification(
            LoggingMessageNotification(params=params), related_request_id=request.request_id
        )

    return log


def _is_wanted(level: str, connection: Connection) -> bool:
    """Return whether the client wants log messages of a level; all unless it has set one."""
    return LEVELS.index(level) >= LEVELS.index(connection.state.get(_LEVEL, "debug"))


def lean_channel(exchange: Exchange, connection: Connection, version: str) -> CallerChannel:
    """Return the channel of a plain call, which needs the SDK's objects only to ask a client that can answer."""
    if not exchange.streams:
        return SILENT
    asks = exchange.can_send_request
    can = (connection.client_capabilities if asks else None) or _NOTHING
    release = exchange.release if exchange.can_release else None
    if can.elicitation is not None or can.sampling is not None or can.roots is not None:
        return channel_for(
            ServerRequestContext(
                session=ServerSession(exchange, connection),
                lifespan_context=None,
                protocol_version=version,
                method="tools/call",
                request_id=exchange.request_id,
                close_sse_stream=release,
            )
        )
    if release is not None:
        client.set(Client(close_stream=release))

    async def log(level: str, data: Any, logger_name: str | None) -> None:
        level = level if level in LEVELS else "info"
        if _is_wanted(level, connection):
            params: JSONObject = {"level": level, "data": data}
            if logger_name is not None:
                params["logger"] = logger_name
            await exchange.notify("notifications/message", params)

    return CallerChannel(
        session=_session_key(connection) if asks else "",
        log_level=connection.state.get(_LEVEL, "debug"),
        progress=exchange.progress,
        log=log,
    )


async def _drop(_level: str, _data: Any, _logger_name: str | None) -> None:
    """The client cannot get log messages, or has not asked for them."""


SILENT: Final = CallerChannel(log=_drop)
"""The channel of a client that gets only the result."""


def _session_key(connection: Connection) -> str:
    """Return the key of the session that a request belongs to."""
    state = connection.state
    if _KEY not in state:
        state[_KEY] = token_urlsafe(16)
    return cast("str", state[_KEY])


def _wanted_level(request: RequestContext, *, modern: bool) -> str | None:
    """Return the lowest level of log messages that the client asked for; older clients get all unless they say so."""
    if modern:
        return cast("str | None", (request.meta or {}).get(LOG_LEVEL_META_KEY))
    return cast("str", connection_of(request).state.get(_LEVEL, "debug"))


def _elicit_url(request: RequestContext) -> Callable[[JSONObject], Awaitable[JSONObject]]:
    async def elicit(wish: JSONObject) -> JSONObject:
        params = ElicitRequestURLParams.model_validate(wish, by_name=False)
        return await _asked(request, ElicitRequest(params=params), ElicitResult, "answer")

    return elicit


def _elicit(request: RequestContext) -> Callable[[str, JSONObject], Awaitable[JSONObject]]:
    async def elicit(message: str, schema: JSONObject) -> JSONObject:
        form = {key: value for key, value in schema.items() if key != "$id"}
        params = ElicitRequestFormParams(message=message, requested_schema=form)
        return await _asked(request, ElicitRequest(params=params), ElicitResult, "answer")

    return elicit


def _sample(request: RequestContext) -> Callable[[JSONObject], Awaitable[JSONObject]]:
    async def sample(wish: JSONObject) -> JSONObject:
        try:
            params = CreateMessageRequestParams.model_validate(wish, by_name=False)
        except ValidationError as error:
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                "this is no request for a completion",
                {"errors": error.errors(include_url=False, include_context=False)},
            ) from error
        kind = CreateMessageResult if params.tools is None else CreateMessageResultWithTools
        return await _asked(request, CreateMessageRequest(params=params), kind, "give a completion")

    return sample


def _roots(request: RequestContext) -> Callable[[], Awaitable[JSONObject]]:
    async def roots() -> JSONObject:
        return await _asked(request, ListRootsRequest(), ListRootsResult, "list its roots")

    return roots


async def _asked(
    request: RequestContext, question: Any, kind: type[BaseModel], what: str
) -> JSONObject:
    metadata = ServerMessageMetadata(related_request_id=request.request_id)
    try:
        answer = await request.session.send_request(question, kind, metadata=metadata)
    except MCPError as error:
        raise refused(error, what) from error
    except ValidationError as error:
        raise CallError(
            ErrorCode.UNAVAILABLE, "the caller's answer is none the protocol knows", retryable=False
        ) from error
    return answer.model_dump(by_alias=True, mode="json", exclude_none=True)
