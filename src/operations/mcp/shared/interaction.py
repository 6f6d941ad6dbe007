"""Answer the questions of a server: to a person (elicitation), to a model (sampling), and for the caller's roots.

Since 2026-07-28 a question is part of a result, and a log message arrives on the stream of its request. Before that,
the server sends its own requests, and only streamable HTTP associates them with one of our requests.

Rule 1: a message that the transport associates with a running request belongs to the caller of that request.
Rule 2: any other message belongs to the caller of all running calls, if they have the same caller. Otherwise it belongs
        to no caller: a question is declined, and a log message is only logged.
Rule 3: the caller is asked first if its client can answer, then the application's handlers.
Rule 4: a question that neither can answer is declined up to 2025-11-25. From 2026-07-28 on it is returned as data, and
        `<server>.tools.resume` accepts the answer later.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import mcp_types as types
import msgspec
from pydantic import TypeAdapter, ValidationError

from operations.base.errors import CallError, ErrorCode, retrieve_exception, timeout_error
from operations.base.json.values import object_of, to_json
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.channel import NOTHING
from operations.contract.context import NO_CALL, OperationContext
from operations.contract.envelopes import ResponseEnvelope, mcp_envelope
from operations.front.timing import CallTimeout
from operations.mcp.config import MCPClientConfig
from operations.sources.credentials import TokenFunction

# ------------------------------------------------------------ features of MCP clients


class ClientFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """Features of the client of one call that a `CallerChannel` does not cover."""

    close_stream: Callable[[], Awaitable[None]] | None = None
    ask: Callable[[str, JSONObject], Awaitable[JSONObject]] | None = None
    """Sends a question with a method and parameters of the protocol, and returns the answer."""

    has_roots: bool = False
    opens_urls: bool = False

    extensions: Mapping[str, Any] = NOTHING
    """The extensions that it declares, with their settings."""


NO_CLIENT: Final = ClientFeatures()

client: ContextVar[ClientFeatures] = ContextVar("client", default=NO_CLIENT)
"""The client of the current call."""


async def release_stream() -> bool:
    """Close the HTTP stream of the current call; its client reconnects for the result.

    Use it for long calls behind proxies that close long responses. The call continues. Returns whether there was a
    stream whose client can reconnect: over HTTP, for clients of 2025-11-25.
    """
    close = client.get().close_stream
    if close is None:
        return False
    await close()
    return True


async def list_roots() -> list[JSONObject]:
    """Return the folders and files that the client works on, each as `{"uri": ..., "name": ...}`.

    Raises:
        CallError: `UNAVAILABLE` if the caller is not an MCP client, or does not support roots.
    """
    asked = client.get()
    if asked.ask is None or not asked.has_roots:
        message = "The operation cannot list roots: the client does not support it"
        raise CallError(ErrorCode.UNAVAILABLE, message, retryable=False)
    return cast("list[JSONObject]", (await asked.ask(ROOTS, {})).get("roots", []))


# ------------------------------------------------------------ callers

MAX_MESSAGES: Final = 100
"""The largest number of undelivered log messages of one call."""

_SETTLE_SECONDS: Final = 1.0

_OWN_IDLE_SECONDS = 300.0
"""Seconds without a call after which a caller's own connection is closed, unless `idle_timeout` is set."""

tied: ContextVar["CallInFlight | None"] = ContextVar("operations_mcp_in_flight", default=None)
"""The call of a request; transports pass it to the tasks that handle messages on its stream."""


def caller_id(context: OperationContext) -> str:
    """Return the key of a call's caller: its identity, else its session, else the call itself."""
    identity, channel = context.identity, context.channel
    if identity is not None:
        return f"identity:{identity.key}"
    return f"session:{channel.session}" if channel.session else f"call:{id(channel)}"


class CallerAuth:
    """Provides the tokens of a caller's own connection, also for connecting.

    Args:
        find: Returns the token of a call.
    """

    def __init__(self, find: TokenFunction) -> None:
        self.identity: Identity | None = None
        """The identity of the caller's last call, because earlier tokens may have expired."""
        self._find = find

    def __call__(self, context: OperationContext) -> Any:
        """Return the token of a request, or an awaitable of it."""
        is_own = context is NO_CALL
        return self._find(OperationContext(identity=self.identity) if is_own else context)


def own_config(config: MCPClientConfig) -> MCPClientConfig:
    """Return the configuration of a connection for one caller."""
    auth, idle = config.auth, config.idle_timeout
    return replace(
        config,
        lazy=False,
        idle_timeout=_OWN_IDLE_SECONDS if idle is None else idle,
        auth=CallerAuth(auth) if callable(auth) else auth,
    )


def is_known(context: OperationContext) -> bool:
    """Return whether later calls of a call's caller can be recognised."""
    return context.identity is not None or context.channel.session != ""


class CallInFlight:
    """One request that waits for its response.

    Args:
        context: The call that it is sent for.
        timeout: The time limit of the source.
    """

    def __init__(self, context: OperationContext, timeout: CallTimeout) -> None:
        self.context = context
        self.timeout = timeout
        self.caller = caller_id(context)

        self.client: ClientFeatures = client.get()
        """Features of the MCP client of the call that a channel does not cover."""

        self.is_unanswered = False
        """Whether the call ended while its caller was asked."""

        self._questions: set[asyncio.Future[Any]] = set()
        self._messages: set[asyncio.Future[None]] = set()

    async def ask(self, question: asyncio.Future[JSONObject]) -> JSONObject:
        """Return the caller's answer, with the time limit stopped.

        Raises:
            CallError: `ABORTED` if the call ended before the answer arrived.
        """
        self._questions.add(question)
        try:
            with self.timeout.paused():
                return await _outcome(question)
        finally:
            self._questions.discard(question)

    def deliver(self, send: Callable[[], Awaitable[None]]) -> None:
        """Deliver a log message; drop it if too many are undelivered."""
        if len(self._messages) < MAX_MESSAGES:
            sending = asyncio.ensure_future(send())
            self._messages.add(sending)
            sending.add_done_callback(self._messages.discard)
            sending.add_done_callback(retrieve_exception)

    async def settle(self) -> None:
        """Wait until messages that arrived before the response are delivered, to keep the order.

        The wait is short, so that a slow caller does not look like an unresponsive server.
        """
        if self._messages:
            await asyncio.wait(tuple(self._messages), timeout=_SETTLE_SECONDS)

    def end(self) -> None:
        """Drop unanswered questions and undelivered messages."""
        self.is_unanswered = bool(self._questions)
        for each in (*self._questions, *self._messages):
            each.cancel()


# ------------------------------------------------------------ questions

logger = logging.getLogger("operations.mcp")

MAX_ROUNDS = 10
"""The largest number of rounds of questions in one call."""

MAX_QUESTIONS = 32
"""The largest number of open questions of one server, and of questions in one result."""

_RETRY_SECONDS = 0.1

ELICIT: Final = "elicitation/create"
SAMPLE: Final = "sampling/createMessage"
ROOTS: Final = "roots/list"

RESULTS: Final[dict[str, TypeAdapter[Any]]] = {
    ELICIT: TypeAdapter(types.ElicitResult),
    SAMPLE: TypeAdapter(types.CreateMessageResult | types.CreateMessageResultWithTools),
    ROOTS: TypeAdapter(types.ListRootsResult),
}
"""The requests that a server may send, with the type of each answer."""

_NO_MODEL: Final = types.ErrorData(code=-1, message="the caller has no model to use")
_TOO_MANY: Final = f"more than {MAX_QUESTIONS} questions at a time"


class CallsInFlight:
    """The running calls of one connection, and the questions of its server, a limited number at a time.

    Args:
        name: The name of the server, for the log.
        config: The configuration with the handlers of questions.
    """

    def __init__(self, name: str, config: MCPClientConfig) -> None:
        self._name = name
        self._config = config
        self._calls: dict[CallInFlight, None] = {}
        self._open = 0

    @contextmanager
    def enter(self, call: CallInFlight) -> Generator[None]:
        """Register a running call for the duration of this block; messages on its stream belong to it."""
        self._calls[call] = None
        token = tied.set(call)
        try:
            yield
        finally:
            tied.reset(token)
            del self._calls[call]
            call.end()

    def addressee(self) -> CallInFlight | None:
        """Return the call that the current message belongs to; None if it belongs to no caller."""
        call = tied.get()
        if call is not None:
            return call if call in self._calls else None
        if len({call.caller for call in self._calls}) != 1:
            return None
        return next(reversed(self._calls))

    def callbacks(self) -> dict[str, Any]:
        """Return the callbacks of a session for requests that a server sends up to 2025-11-25.

        The session advertises all of them, because capabilities are sent once, before the first caller is known.
        """
        no_answer, no_roots = types.ElicitResult(action="decline"), types.ListRootsResult(roots=[])
        return {
            "elicitation_callback": partial(self._respond, ELICIT, no_answer),
            "sampling_callback": partial(self._respond, SAMPLE, _NO_MODEL),
            "list_roots_callback": partial(self._respond, ROOTS, no_roots),
        }

    async def _respond(self, method: str, declined: Any, _context: Any, params: Any = None) -> Any:
        """Return a valid answer, `declined`, or an error."""
        try:
            given = await self._answer(method, params)
            if given is None:
                return declined
            return RESULTS[method].validate_python(given, by_name=False)
        except ValidationError:
            logger.warning("the answer to a question of %s has the wrong form", self._name)
            message = "the answer had the wrong form"
        except CallError as error:
            message = error.message
            if error.code != ErrorCode.RESOURCE_EXHAUSTED:
                return declined
        except Exception:
            logger.exception("the handler for questions of %s failed", self._name)
            message = "the question could not be answered"
        return types.ErrorData(code=types.INTERNAL_ERROR, message=message)

    async def _answer(self, method: str, params: Any) -> JSONObject | None:
        """Return the answer of the caller or of the application; None if neither can answer."""
        request: JSONObject = {}
        if params is not None:
            request = params.model_dump(by_alias=True, mode="json", exclude_none=True)
        if self._open >= MAX_QUESTIONS:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, _TOO_MANY)
        call, question = self.addressee(), None
        if call is not None:
            question = caller_answer(method, request, call.context, call.client)
        if question is None:
            call, question = None, application_answer(method, request, self._config)
        if question is None:
            return None
        # A separate task, so that a handler that ignores cancellation does not delay the connection.
        answering = asyncio.ensure_future(question)
        self._open += 1
        answering.add_done_callback(self._ended)
        return await (_outcome(answering) if call is None else call.ask(answering))

    def _ended(self, _: object) -> None:
        self._open -= 1


def caller_answer(
    method: str, params: JSONObject, context: OperationContext, client: ClientFeatures
) -> Awaitable[JSONObject] | None:
    """Ask the caller of a call, and return the answer to await; None if the caller cannot be asked this question."""
    channel = context.channel
    is_url = method == ELICIT and params.get("mode") == "url"
    if client.ask is not None and (
        client.opens_urls if is_url else method == ROOTS and client.has_roots
    ):
        answer = client.ask(method, params)
        return context.answered(answer) if is_url else answer
    if method == ELICIT and not is_url and channel.elicit is not None:
        schema = object_of(params.get("requestedSchema"))
        return context.answered(channel.elicit(str(params.get("message", "")), schema))
    if method == SAMPLE and channel.sample is not None:
        return context.answered(channel.sample(params))
    return None


def application_answer(
    method: str, params: JSONObject, config: MCPClientConfig
) -> Awaitable[JSONObject] | None:
    """Ask the handler of the application, and return the answer to await; None if there is no handler."""
    handler = {ELICIT: config.elicit, SAMPLE: config.sample}.get(method)
    return None if handler is None else handler(params)


async def _outcome(answering: asyncio.Future[JSONObject]) -> JSONObject:
    """Return an answer; if this task is cancelled, do not wait for the end of `answering`.

    Raises:
        CallError: `ABORTED` if `answering` was cancelled.
    """
    try:
        await asyncio.wait({answering})
    finally:
        if not answering.done():
            answering.cancel()
            answering.add_done_callback(retrieve_exception)
    if answering.cancelled():
        raise CallError(ErrorCode.ABORTED, "the call ended before its question was answered")
    return answering.result()


# ------------------------------------------------------------ 2026-07-28


def is_question(result: JSONObject) -> bool:
    """Return whether a result asks for input."""
    return result.get("resultType") == "input_required"


def _questions(result: JSONObject) -> dict[str, JSONObject]:
    """Return the questions in a result.

    Raises:
        CallError: `EXECUTION_ERROR` if the protocol does not allow them, or there are too many.
    """
    message = "the server asked for input in a form that the protocol does not allow"
    with suppress(ValidationError):
        types.InputRequiredResult.model_validate(result, by_name=False)
        questions: dict[str, JSONObject] = result.get("inputRequests") or {}
        if len(questions) <= MAX_QUESTIONS:
            return questions
        message = f"the server asked {_TOO_MANY}"
    raise CallError(ErrorCode.EXECUTION_ERROR, message)


async def answers_to(
    result: JSONObject, config: MCPClientConfig, context: OperationContext
) -> JSONObject | None:
    """Return the parameters with which a request is repeated, to answer the questions in its result.

    Args:
        result: The result.
        config: The configuration with the handlers.
        context: The context of the call, whose channel is asked first.

    Returns:
        None if the result is final, or a question cannot be answered.

    Raises:
        CallError: `EXECUTION_ERROR` if the questions are malformed or too many, or a handler fails; `TIMEOUT` if a
            handler takes too long.
    """
    if not is_question(result):
        return None
    answers: JSONObject = {}
    for key, question in _questions(result).items():
        answer = await answer_question(question, config, context)
        if answer is None:
            return None
        answers[key] = answer
    if not answers:
        # The result has no questions and only asks to retry later.
        await asyncio.sleep(_RETRY_SECONDS)
    added: JSONObject = {"inputResponses": answers} if answers else {}
    if result.get("requestState") is not None:
        added["requestState"] = result["requestState"]
    return added


async def answer_question(
    question: JSONObject, config: MCPClientConfig, context: OperationContext
) -> JSONObject | None:
    """Return the answer of the caller or of the application to a question; None if neither can answer.

    Raises:
        CallError: `EXECUTION_ERROR` if a handler fails; `TIMEOUT` if it takes too long.
    """
    method, params = question["method"], object_of(question.get("params"))
    asking = caller_answer(method, params, context, client.get())
    seconds: float | None = config.answer_timeout
    if asking is None:
        asking, seconds = application_answer(method, params, config), config.timeout
    if asking is None:
        return None
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            answer = await asking
        RESULTS[method].validate_python(answer, by_name=False)
    except CallError:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            message = f"a question of the server was not answered within {seconds:g} s"
            raise timeout_error(message) from None
        logger.exception("a question of a server could not be answered")
        message = "a question of the server could not be answered"
        raise CallError(ErrorCode.EXECUTION_ERROR, message) from None
    return answer


def question_envelope(
    result: JSONObject, resume: JSONObject | None = None
) -> ResponseEnvelope[Any]:
    """Return the questions as data; `resume` has the operation that accepts the answers, and the rest of its input.

    Raises:
        CallError: `EXECUTION_ERROR` if the protocol does not allow the questions, or there are too many.
    """
    _questions(result)
    kept = ("resultType", "inputRequests", "requestState")
    data = {key: result[key] for key in kept if key in result}
    if resume is not None:
        data["resume"] = resume
    return mcp_envelope(to_json(data), is_error=False, content=[])
