"""Answer the questions of a server: to a person (elicitation), to a model (sampling), and for the caller's roots.

Up to 2025-11-25 the server sends a request of its own; `callers` decides whether it belongs to a caller. From
2026-07-28 on a result says `input_required`, and so belongs to a call.

Rule 1: the caller is asked first if its client can answer, then the application's handlers.
Rule 2: a question that neither can answer is declined up to 2025-11-25. From 2026-07-28 on it is the data, to be
        answered later by `<server>.tools.resume`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, cast

import mcp_types as types
from pydantic import TypeAdapter, ValidationError

from operations._json import object_of, to_json
from operations._mcp_config import AskHandler, MCPClientConfig
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope, mcp_envelope
from operations.errors import CallError, ErrorCode, timeout_error
from operations.mcp.callers import CallsInFlight
from operations.mcp.serving.client import Client, client
from operations.types import JSONObject

logger = logging.getLogger("operations.mcp")

MAX_ROUNDS = 10
"""How often one call may ask back."""

MAX_QUESTIONS = 32
"""How many questions one server may have open, and one result may hold."""

_PATIENCE_SECONDS = 0.1

ELICIT: Final = "elicitation/create"
SAMPLE: Final = "sampling/createMessage"
ROOTS: Final = "roots/list"

_RESULTS: Final[dict[str, TypeAdapter[Any]]] = {
    ELICIT: TypeAdapter(types.ElicitResult),
    SAMPLE: TypeAdapter(types.CreateMessageResult | types.CreateMessageResultWithTools),
    ROOTS: TypeAdapter(types.ListRootsResult),
}
"""The requests that a server may send, and the form of each answer."""

_NO_MODEL: Final = types.ErrorData(code=-1, message="the caller has no model to use")
_TOO_MANY: Final = f"more than {MAX_QUESTIONS} questions at a time"


def callbacks(name: str, config: MCPClientConfig, calls: CallsInFlight) -> dict[str, Any]:
    """Return the callbacks of a session for requests that a server sends up to 2025-11-25.

    The session advertises all of them, because a server is told once, before the first caller is known.
    """
    asked: set[asyncio.Future[JSONObject]] = set()

    async def answer(method: str, params: Any) -> JSONObject | None:
        """Return the answer of the caller or of the application; None if neither can answer."""
        request: JSONObject = {}
        if params is not None:
            request = params.model_dump(by_alias=True, mode="json", exclude_none=True)
        call = calls.addressee()
        if call is not None:
            question = caller_answer(method, request, call.context, call.client)
            if question is not None:
                if len(asked) >= MAX_QUESTIONS:
                    question.close()
                    raise CallError(ErrorCode.RESOURCE_EXHAUSTED, _TOO_MANY)
                return await _counted(call.ask(question), asked)
        handler = _application_handler(method, config)
        if handler is None:
            return None
        if len(asked) >= MAX_QUESTIONS:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, _TOO_MANY)
        return await _apart(handler, request, asked)

    async def respond(method: str, params: Any, declined: Any) -> Any:
        try:
            given = await answer(method, params)
            if given is None:
                return declined
            return _RESULTS[method].validate_python(given, by_name=False)
        except ValidationError:
            logger.warning("the answer to a question of %s has the wrong form", name)
            message = "the answer had the wrong form"
        except CallError as error:
            message = error.message
            if error.code != ErrorCode.RESOURCE_EXHAUSTED:
                return declined
        except Exception:
            logger.exception("the handler for questions of %s failed", name)
            message = "the question could not be answered"
        return types.ErrorData(code=types.INTERNAL_ERROR, message=message)

    async def elicit(context: Any, params: Any) -> Any:
        return await respond(ELICIT, params, types.ElicitResult(action="decline"))

    async def sample(context: Any, params: Any) -> Any:
        return await respond(SAMPLE, params, _NO_MODEL)

    async def list_roots(context: Any) -> Any:
        return await respond(ROOTS, None, types.ListRootsResult(roots=[]))

    return {
        "elicitation_callback": elicit,
        "sampling_callback": sample,
        "list_roots_callback": list_roots,
    }


def caller_answer(
    method: str, params: JSONObject, context: OperationContext, client: Client
) -> Coroutine[Any, Any, JSONObject] | None:
    """Return the coroutine that asks a call's own caller; None if the caller cannot be asked this."""
    channel = context.channel
    if method == ELICIT and params.get("mode") == "url":
        return None if client.elicit_url is None else context.answered(client.elicit_url(params))
    if method == ELICIT and channel.elicit is not None:
        schema = object_of(params.get("requestedSchema"))
        return context.answered(channel.elicit(str(params.get("message", "")), schema))
    if method == SAMPLE and channel.sample is not None:
        return context.answered(channel.sample(params))
    if method == ROOTS and client.roots is not None:
        return _awaited(client.roots())
    return None


async def _awaited(answer: Awaitable[JSONObject]) -> JSONObject:
    return await answer


def _application_handler(method: str, config: MCPClientConfig) -> AskHandler | None:
    return {ELICIT: config.elicit, SAMPLE: config.sample}.get(method)


async def _counted(
    question: Coroutine[Any, Any, Any], asked: set[asyncio.Future[JSONObject]]
) -> JSONObject:
    """Await a question that counts as open until it is answered."""
    slot: asyncio.Future[JSONObject] = asyncio.get_running_loop().create_future()
    asked.add(slot)
    try:
        return cast("JSONObject", await question)
    finally:
        asked.discard(slot)
        slot.cancel()


async def _apart(
    handler: AskHandler, request: JSONObject, asked: set[asyncio.Future[JSONObject]]
) -> JSONObject:
    """What `handler` answers, in a task of its own: one that will not be cancelled holds up no connection."""
    answering = asyncio.ensure_future(handler(request))
    asked.add(answering)
    answering.add_done_callback(asked.discard)
    try:
        await asyncio.wait({answering})
    finally:
        if not answering.done():
            answering.cancel()
            answering.add_done_callback(_overlook)
    if answering.cancelled():
        raise RuntimeError("the handler was cancelled")
    return answering.result()


def _overlook(answering: asyncio.Future[JSONObject]) -> None:
    """Nobody waits for this answer any more, nor for why there is none."""
    if not answering.cancelled():
        answering.exception()


# ------------------------------------------------------------ 2026-07-28


def is_question(result: JSONObject) -> bool:
    """Whether a result asks for input instead of bringing one."""
    return result.get("resultType") == "input_required"


async def settle(
    result: JSONObject,
    send: Callable[[JSONObject], Awaitable[JSONObject]],
    config: MCPClientConfig,
    context: OperationContext,
) -> JSONObject:
    """Answer questions and send the answers until the result is final, or nobody can answer.

    Args:
        result: The first result.
        send: Repeats the request with these parameters added.
        config: Whose handlers answer.
        context: Whose channel is asked first.

    Raises:
        CallError: `EXECUTION_ERROR` if there is no end to the questions, or a handler fails; `TIMEOUT` if one hangs.
    """
    for _ in range(MAX_ROUNDS):
        if not is_question(result):
            return result
        asked: Any = result.get("inputRequests") or {}
        if not isinstance(asked, dict) or len(cast("JSONObject", asked)) > MAX_QUESTIONS:
            return result
        answers: JSONObject = {}
        for key, question in cast("JSONObject", asked).items():
            answer = await _settled(object_of(question), config, context)
            if answer is None:
                return result
            answers[key] = answer
        if not answers:
            # It asks for nothing but patience.
            await asyncio.sleep(_PATIENCE_SECONDS)
        added: JSONObject = {"inputResponses": answers} if answers else {}
        if result.get("requestState") is not None:
            added["requestState"] = result["requestState"]
        result = await send(added)
    if is_question(result):
        raise CallError(ErrorCode.EXECUTION_ERROR, f"asked for input more than {MAX_ROUNDS} times")
    return result


async def _settled(
    question: JSONObject, config: MCPClientConfig, context: OperationContext
) -> JSONObject | None:
    """Return the answer of the caller or of the application; None if neither can answer."""
    method, params = str(question.get("method")), object_of(question.get("params"))
    if method not in _RESULTS:
        return None
    asking = caller_answer(method, params, context, client.get())
    seconds: float | None = config.answer_timeout
    if asking is None:
        handler, seconds = _application_handler(method, config), config.timeout
        if handler is None:
            return None
        asking = _awaited(handler(params))
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            answer = await asking
        _RESULTS[method].validate_python(answer, by_name=False)
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
    """The questions as data; `resume` says which operation takes the answers, and with what else."""
    kept = ("resultType", "inputRequests", "requestState")
    data = {key: result[key] for key in kept if key in result}
    if resume is not None:
        data["resume"] = resume
    return mcp_envelope(to_json(data), is_error=False, content=[])
