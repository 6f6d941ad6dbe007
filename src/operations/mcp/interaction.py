"""Questions a server asks back: of a person (elicitation), or of a model (sampling).

Up to 2025-11-25 the server sends a request of its own, and nothing says during which call: the application's handlers
answer. From 2026-07-28 on a result says `input_required`: then the call's own door is asked first, and if nobody can
answer, the questions are the data, to be answered later by `<server>.tools.resume`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import mcp_types as types
from pydantic import TypeAdapter, ValidationError

from operations._json import to_json
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope, mcp_envelope
from operations.errors import CallError, ErrorCode
from operations.mcp.config import AskHandler, MCPClientConfig
from operations.types import JSONObject

logger = logging.getLogger("operations.mcp")

MAX_ROUNDS = 10
"""How often one call may ask back."""

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
    async def answer(context: Any, params: Any) -> Any:
        try:
            request = params.model_dump(by_alias=True, mode="json", exclude_none=True)
            return result_type.validate_python(await handler(request), by_name=False)
        except ValidationError:
            logger.warning("the answer to a question of %s has the wrong form", name)
            message = "the answer had the wrong form"
        except Exception:
            logger.exception("the handler for questions of %s failed", name)
            message = "the question could not be answered"
        return types.ErrorData(code=types.INTERNAL_ERROR, message=message)

    return answer


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
        context: Whose door is asked first.

    Raises:
        CallError: `EXECUTION_ERROR` if there is no end to the questions.
    """
    for _ in range(MAX_ROUNDS):
        if not is_question(result):
            return result
        asked: Any = result.get("inputRequests") or {}
        if not isinstance(asked, dict):
            return result
        answers: JSONObject = {}
        for key, question in cast("JSONObject", asked).items():
            handler = _handler(question, config, context)
            if handler is None:
                return result
            answers[key] = await handler(cast("JSONObject", question).get("params") or {})
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


def _handler(
    question: Any, config: MCPClientConfig, context: OperationContext
) -> AskHandler | None:
    method = cast("JSONObject", question).get("method") if isinstance(question, dict) else None
    elicit = context.door.elicit
    if method == "elicitation/create":
        if elicit is None:
            return config.elicit

        async def ask(params: JSONObject) -> JSONObject:
            return await elicit(str(params.get("message", "")), params.get("requestedSchema") or {})

        return ask
    if method == "sampling/createMessage":
        return context.door.sample or config.sample
    return None


def question_envelope(
    result: JSONObject, resume: JSONObject | None = None
) -> ResponseEnvelope[Any]:
    """The questions as data; `resume` says which operation takes the answers, and with what else."""
    kept = ("resultType", "inputRequests", "requestState")
    data = {key: result[key] for key in kept if key in result}
    if resume is not None:
        data["resume"] = resume
    return mcp_envelope(to_json(data), is_error=False, content=[])
