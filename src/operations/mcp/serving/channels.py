"""Messages to a client while its request is served: progress, log messages and questions.

Since 2026-07-28 a server cannot send requests. A call with a question ends with `input_required`, its questions and a
token. The client repeats the request with the answers and the token, and the call continues: its handler has been
waiting, so that no code runs twice. A question is identified by the `$id` of its schema, or by a number.

Rule 1: a token has 128 random bits. It is valid for one answer, and only for the same request of the same caller.
Rule 2: a waiting call has a time limit like any other call; the timer stops while a person answers, up to a maximum.
        The number of waiting calls is limited, in total and per caller. If a call ends while it waits, the client
        receives its result instead of more questions.
Rule 3: progress and log messages of a waiting call are dropped, because no request of its client is open.
Rule 4: features that only MCP clients have (roots, URLs to open) are in a context variable, so that the core does not
        depend on MCP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from secrets import token_urlsafe
from typing import Any, Final, TypeAlias, cast

import mcp_types as types
import msgspec
from mcp import MCPError
from mcp.server.connection import Connection
from mcp.shared.dispatcher import DispatchContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import as_json, object_of
from operations.base.types import JSONObject
from operations.contract.channel import NOTHING, CallerChannel
from operations.mcp.shared.interaction import ELICIT, RESULTS, SAMPLE, ClientFeatures, client

# ------------------------------------------------------------ questions since 2026-07-28

MAX_WAITING: Final = 1_000
MAX_WAITING_PER_CALLER: Final = 100
RESULT_SECONDS: Final = 60.0

Key: TypeAlias = tuple[Any, ...]
"""The caller and its request."""


class Elicitations:
    """The calls that wait for answers."""

    def __init__(self) -> None:
        self._waiting: dict[str, _AskingCall] = {}

    async def begin(
        self,
        run: Callable[[CallerChannel], Awaitable[JSONObject]],
        channel: CallerChannel,
        capabilities: Mapping[str, Any],
        answers: Mapping[str, Any],
        key: Key,
        caller: str = "",
    ) -> JSONObject:
        """Run a call to its result, or to its first questions.

        Args:
            run: The call.
            channel: The channel for progress and log messages.
            capabilities: The capabilities of the client, which receives only questions that it can answer.
            answers: Answers to expected questions, by question.
            key: The caller and its request; answers must have the same key.
            caller: The key of the caller for limits.

        Raises:
            MCPError: If too many calls are waiting. The call has not started then.
        """
        mine = sum(call.caller == caller for call in self._waiting.values())
        if len(self._waiting) >= MAX_WAITING or mine >= MAX_WAITING_PER_CALLER:
            # Checked before the handler starts, because its effects cannot be undone.
            raise MCPError(types.INTERNAL_ERROR, "too many calls wait for answers")
        return await self._until_question(
            _AskingCall(run, channel, capabilities, answers, key, caller)
        )

    async def resume(
        self, token: str, answers: Mapping[str, Any], channel: CallerChannel, key: Key
    ) -> JSONObject:
        """Continue a call, which uses `channel` from now on.

        Raises:
            MCPError: If no waiting call has this `token` and key.
        """
        call = self._waiting.get(token)
        if call is None or call.key != key:
            raise MCPError(types.INVALID_PARAMS, "requestState is unknown or has expired")
        del self._waiting[token]
        call.channel = channel
        call.answer(answers)
        return await self._until_question(call)

    async def _until_question(self, call: "_AskingCall") -> JSONObject:
        questions = await call.proceed()
        if questions is None:
            return call.task.result()
        token = token_urlsafe(16)
        self._waiting[token] = call
        call.task.add_done_callback(partial(self._ended, token))
        return {"resultType": "input_required", "inputRequests": questions, "requestState": token}

    def _ended(self, token: str, task: asyncio.Task[JSONObject]) -> None:
        """Keep the result of a call that ended before the client answered, for example at its deadline."""
        if task.cancelled():
            self._waiting.pop(token, None)
        elif token in self._waiting:
            task.get_loop().call_later(RESULT_SECONDS, self._waiting.pop, token, None)

    def cancel(self) -> None:
        """End all waiting calls."""
        for call in self._waiting.values():
            call.task.cancel()


class _AskingCall:
    """A call whose handler may ask the client questions."""

    def __init__(
        self,
        run: Callable[[CallerChannel], Awaitable[JSONObject]],
        channel: CallerChannel,
        capabilities: Mapping[str, Any],
        answers: Mapping[str, Any],
        key: Key,
        caller: str,
    ) -> None:
        self.key = key
        self.caller = caller
        self._known = dict(answers)
        self._open: dict[str, tuple[JSONObject, asyncio.Future[JSONObject]]] = {}
        self._changed = asyncio.Event()
        """Set when the call has questions, or has ended."""

        self._count = 0
        self._is_waiting = False
        self.channel = channel

        async def body() -> JSONObject:
            own = asking_channel(
                self._ask,
                capabilities,
                progress=partial(self._send, "progress"),
                log=partial(self._send, "log") if channel.log is not None else None,
                session=channel.session,
                log_level=channel.log_level,
            )
            return await run(own)

        self.task = asyncio.Task(body())
        self.task.add_done_callback(lambda _: self._changed.set())

    async def proceed(self) -> JSONObject | None:
        """Run the call until it ends or has questions, and return the outcome."""
        try:
            self._is_waiting = False
            if not self._open:
                await self._changed.wait()
        except BaseException:
            # The client has disconnected.
            self.task.cancel()
            raise
        if self.task.done():
            return None
        # A handler that asks several questions at once does so in one iteration of the event loop.
        await asyncio.sleep(0)
        self._is_waiting = True
        return {name: request for name, (request, _) in self._open.items()}

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Deliver the received answers; unanswered questions are asked again."""
        for name, value in answers.items():
            question = self._open.get(name)
            if question is not None and isinstance(value, Mapping):
                del self._open[name]
                if not question[1].done():
                    question[1].set_result(dict(cast("Mapping[str, Any]", value)))
        if not self._open and not self.task.done():
            self._changed.clear()

    async def _send(self, kind: str, *message: Any) -> None:
        send = getattr(self.channel, kind)
        if send is not None and not self._is_waiting:
            await send(*message)

    async def _ask(self, method: str, params: JSONObject, name: str | None = None) -> JSONObject:
        self._count += 1
        if name is None or name in self._open:
            name = f"{method.partition('/')[0]}-{self._count}"
        known = self._known.pop(name, None)
        if isinstance(known, Mapping):
            return dict(cast("Mapping[str, Any]", known))
        future: asyncio.Future[JSONObject] = asyncio.get_running_loop().create_future()
        self._open[name] = ({"method": method, "params": params}, future)
        self._changed.set()
        try:
            return await future
        finally:
            self._open.pop(name, None)


_ANSWERS: Final = ("elicitation", "roots", "sampling")


def _has(capabilities: Mapping[str, Any], name: str) -> bool:
    return capabilities.get(name) is not None


def can_answer(capabilities: Mapping[str, Any]) -> bool:
    """Return whether a client can answer any question."""
    return bool(capabilities) and any(_has(capabilities, name) for name in _ANSWERS)


def asking_channel(
    ask: Callable[..., Awaitable[JSONObject]],
    capabilities: Mapping[str, Any],
    close_stream: Callable[[], Awaitable[None]] | None = None,
    **fields: Any,
) -> CallerChannel:
    """Return a channel to a client that can be asked, and set the client of the current call.

    Args:
        ask: Sends a question: takes its method, its parameters and, for a form, its name.
        capabilities: The questions that the client can answer.
        close_stream: Closes the HTTP stream of the call, if its client can reconnect.
        fields: Other fields of the channel.
    """

    async def elicit(message: str, schema: JSONObject) -> JSONObject:
        form = {key: value for key, value in schema.items() if key != "$id"}
        params = {"mode": "form", "message": message, "requestedSchema": form}
        return await ask(ELICIT, params, schema.get("$id"))

    opens_urls = object_of(capabilities.get("elicitation")).get("url") is not None
    has_roots = _has(capabilities, "roots")
    client.set(
        ClientFeatures(
            close_stream=close_stream, ask=ask, has_roots=has_roots, opens_urls=opens_urls
        )
    )
    return CallerChannel(
        elicit=elicit if _has(capabilities, "elicitation") else None,
        sample=partial(ask, SAMPLE) if _has(capabilities, "sampling") else None,
        **fields,
    )


# ------------------------------------------------------------ channels

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")

_LEVEL = "operations.level"
_KEY = "operations.key"


def set_level(connection: Connection, level: str) -> None:
    """Send log messages of this level and above from now on."""
    connection.state[_LEVEL] = level


def channel_for(
    outbound: DispatchContext[Any],
    connection: Connection,
    capabilities: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    release: Callable[[], Awaitable[None]] | None = None,
) -> CallerChannel:
    """Return a channel with the features that the client supports.

    Args:
        outbound: Sends messages that belong to the request.
        connection: The connection of the request.
        capabilities: The capabilities of the client.
        meta: The `_meta` of the request.
        release: Closes the HTTP stream of the request, if its client can reconnect.
    """
    modern = connection.protocol_version in MODERN_PROTOCOL_VERSIONS
    asks = not modern and outbound.can_send_request

    def lowest_level() -> str | None:
        """Return the lowest level that the client requested; older clients receive all messages by default."""
        if modern:
            return (meta or {}).get(types.LOG_LEVEL_META_KEY)
        return cast("str", connection.state.get(_LEVEL, "debug"))

    async def log(level: str, data: Any, logger_name: str | None) -> None:
        level = level if level in LEVELS else "info"
        lowest = lowest_level()
        if lowest is not None and LEVELS.index(level) >= LEVELS.index(lowest):
            named = {} if logger_name is None else {"logger": logger_name}
            # Converted here, so that a value that is not JSON fails in the call and not in the transport.
            plain = msgspec.to_builtins(data, enc_hook=to_jsonable_python)
            params = {"level": level, "data": to_jsonable_python(plain), **named}
            await outbound.notify("notifications/message", params)

    return asking_channel(
        partial(_ask, outbound),
        # Newer clients receive their questions in results (`Elicitations`).
        capabilities if asks else NOTHING,
        release,
        session=session_key(connection) if asks else "",
        log_level=lowest_level(),
        progress=outbound.progress,
        log=log,
    )


async def _drop(_level: str, _data: Any, _logger_name: str | None) -> None:
    """Ignore a log message, because the client cannot receive it or has not requested it."""


SILENT: Final = CallerChannel(log=_drop)
"""The channel of a client that receives only the result."""


def session_key(connection: Connection) -> str:
    """Return the key of the session that a request belongs to."""
    state = connection.state
    if _KEY not in state:
        state[_KEY] = token_urlsafe(16)
    return cast("str", state[_KEY])


async def _ask(
    outbound: DispatchContext[Any], method: str, params: JSONObject, _name: str | None = None
) -> JSONObject:
    """Send a question to a client before 2026-07-28, and return its answer.

    Raises:
        JSONValueError: If the question is not JSON, which would end the connection.
        CallError: `UNAVAILABLE` if the client does not answer it, or not as the protocol defines.
    """
    # Many clients reject null for an absent parameter.
    sent = as_json({key: value for key, value in params.items() if value is not None})
    try:
        received = await outbound.send_raw_request(method, sent)
        answer = RESULTS[method].validate_python(received, by_name=False)
    except MCPError as error:
        details = {"code": error.code, "message": error.message}
        message = f"the caller did not answer {method}"
        raise CallError(ErrorCode.UNAVAILABLE, message, details, retryable=False) from error
    except ValidationError as error:
        message = "the caller's answer does not match the protocol"
        raise CallError(ErrorCode.UNAVAILABLE, message, retryable=False) from error
    return cast("JSONObject", answer.model_dump(by_alias=True, mode="json", exclude_none=True))
