"""Questions a server asks back: of a person (elicitation), or of a model (sampling).

Up to 2025-11-25 the server sends a request of its own, and nothing says during which call: the application's handlers
answer. From 2026-07-28 on a result says `input_required`: then the call's own channel is asked first, and if nobody can
answer, the questions are the data, to be answered later by `<server>.tools.resume`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import mcp_types as types
from pydantic import TypeAdapter, ValidationError

from operations._json import to_json
from operations._mcp_config import AskHandler, MCPClientConfig
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope, mcp_envelope
from operations.errors import CallError, ErrorCode, timeout_error
from operations.types import JSONObject

logger = logging.getLogger("operations.mcp")

MAX_ROUNDS = 10
"""How often one call may ask back."""

MAX_QUESTIONS = 32
"""How many questions one server may have open, and one result may hold."""

_PATIENCE_SECONDS = 0.1

_SAMPLE_RESULT: TypeAdapter[Any] = TypeAdapter(
    types.CreateMessageResult | types.CreateMessageResultWithTools
)
_ELICIT_RESULT: TypeAdapter[Any] = TypeAdapter(types.ElicitResult)


def callbacks(name: str, config: MCPClientConfig) -> dict[str, Any]:
    """What the SDK's session calls; without a handler it declines, and does not even advertise."""
    given: dict[str, Any] = {}
    if config.elicit is not None:
        given["elicitation_callback"] = _callback(name, config.elicit, _ELICIT_RESULT)
    if config.sample is not None:
        given["sampling_callback"] = _callback(name, config.sample, _SAMPLE_RESULT)
    return given


def _callback(name: str, handler: AskHandler, result_type: TypeAdapter[Any]) -> Any:
    asked: set[asyncio.Future[JSONObject]] = set()

    async def answer(context: Any, params: Any) -> Any:
        message = f"more than {MAX_QUESTIONS} questions at a time"
        if len(asked) < MAX_QUESTIONS:
            request = params.model_dump(by_alias=True, mode="json", exclude_none=True)
            try:
                return result_type.validate_python(
                    await _apart(handler, request, asked), by_name=False
                )
            except ValidationError:
                logger.warning("the answer to a question of %s has the wrong form", name)
                message = "the answer had the wrong form"
            except Exception:
                logger.exception("the handler for questions of %s failed", name)
                message = "the question could not be answered"
        return types.ErrorData(code=types.INTERNAL_ERROR, message=message)

    return answer


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
            handler, result_type = _handler(question, config, context)
            if handler is None:
                return result
            params: JSONObject = cast("JSONObject", question).get("params") or {}
            answers[key] = await _answer(handler, params, result_type, config.timeout)
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


async def _answer(
    handler: AskHandler, params: JSONObject, result_type: TypeAdapter[Any], seconds: float | None
) -> JSONObject:
    """What `handler` says, if it says something of the right form in time."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            answer = await handler(params)
        result_type.validate_python(answer, by_name=False)
    except CallError:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            message = f"nobody answered a question of the server within {seconds:g} s"
            raise timeout_error(message) from None
        logger.exception("a question of a server could not be answered")
        message = "a question of the server could not be answered"
        raise CallError(ErrorCode.EXECUTION_ERROR, message) from None
    return answer


def _handler(
    question: Any, config: MCPClientConfig, context: OperationContext
) -> tuple[AskHandler | None, TypeAdapter[Any]]:
    method = cast("JSONObject", question).get("method") if isinstance(question, dict) else None
    elicit = context.channel.elicit
    if method == "sampling/createMessage":
        return context.channel.sample or config.sample, _SAMPLE_RESULT
    if method != "elicitation/create" or elicit is None:
        return config.elicit if method == "elicitation/create" else None, _ELICIT_RESULT

    async def ask(params: JSONObject) -> JSONObject:
        return await elicit(str(params.get("message", "")), params.get("requestedSchema") or {})

    return ask, _ELICIT_RESULT


def question_envelope(
    result: JSONObject, resume: JSONObject | None = None
) -> ResponseEnvelope[Any]:
    """The questions as data; `resume` says which operation takes the answers, and with what else."""
    kept = ("resultType", "inputRequests", "requestState")
    data = {key: result[key] for key in kept if key in result}
    if resume is not None:
        data["resume"] = resume
    return mcp_envelope(to_json(data), is_error=False, content=[])
