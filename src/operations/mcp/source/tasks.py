"""Tasks of a server (`io.modelcontextprotocol/tasks`): a call whose result is fetched later.

    tools/call -> a task -> tasks/get, tasks/get, ... -> the result of the call

Rule 1: in a run, the call and the id of its task are a step: an attempt that continues asks for the task, and never
        repeats the call.
Rule 2: the task is cancelled with the call or run that waits for it, but not if this process only stops.
Rule 3: a server that does not respond for a while does not end the wait: its task may survive.
Rule 4: a state that the protocol does not allow ends the call, and cancels the task.
Rule 5: if the task has failed, so has the call: a retry of the run makes it again. If the server no longer has the
        task, the outcome of the call is not known.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from math import isfinite
from typing import Any, Final, Protocol

import msgspec
from mcp_types import INVALID_PARAMS

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import is_object, object_of, text_of
from operations.base.tasks import cancel_tasks
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.mcp.config import MCPClientConfig
from operations.mcp.shared.interaction import ELICIT, MAX_QUESTIONS, answer_question

_POLL_SECONDS: Final = 0.5
_POLL_BOUNDS: Final = (0.05, 10.0)
"""Seconds between two requests for a task, if its server names no interval, and the bounds of the interval."""

_FIRST_SECONDS: Final = 0.1
_GROWTH: Final = 1.5
"""The first pause in seconds, and the growth of the following ones up to the interval: most tasks are short."""

_PATIENCE_SECONDS: Final = 600.0
"""Seconds without a response of the server after which its task counts as lost."""

_BEGIN_SECONDS: Final = 1.0
"""Seconds to wait for the id of the task of a call that was cancelled."""

_CANCEL_SECONDS: Final = 3.0
"""Seconds for the request that cancels a task."""

_LONGEST_MESSAGE: Final = 1_000
"""The longest `statusMessage` in characters; a run stores it."""

_MAX_ANSWERED: Final = 1_000
_MAX_QUESTION_BYTES: Final = 1024 * 1024
"""The largest number of questions of one task, and the largest size of those of one state as JSON."""

_CALL: Final = "call"
"""The name of the step."""

_OF_RESULTS: Final = frozenset({"content", "structuredContent", "isError", "resultType"})

_LIVE: Final = ("working", "input_required")

_RETRIED: Final = (ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT, ErrorCode.RESOURCE_EXHAUSTED)


class Server(Protocol):
    """The server of a task."""

    @property
    def server(self) -> str:
        """Its name."""
        ...

    @property
    def config(self) -> MCPClientConfig:
        """Its configuration."""
        ...

    @property
    def request(self) -> Callable[..., Awaitable[JSONObject]]:
        """Sends a request, with `(method, params, context, replayable=...)`; raises `CallError` without a result."""
        ...


def is_task(result: Mapping[str, Any]) -> bool:
    """Return whether a result is fetched later."""
    return result.get("resultType") == "task" and isinstance(result.get("taskId"), str)


async def call_with_tasks(
    call: Callable[[], Awaitable[JSONObject]],
    server: Server,
    context: OperationContext,
    *,
    durable: bool,
    once: bool,
) -> JSONObject:
    """Make a call, and wait for its task if its result is one; return the result.

    Args:
        call: Sends the request.
        server: The server.
        context: The context of the call.
        durable: Whether the call is a run.
        once: Whether the request must not be sent twice.

    Raises:
        CallError: If the call or its task failed, was cancelled, or is lost.
    """
    begun: list[str] = []

    async def begin() -> JSONObject:
        calling = asyncio.ensure_future(call())
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            # The server may have begun a task whose id is on its way.
            await asyncio.wait({calling}, timeout=_BEGIN_SECONDS)
            raise
        finally:
            if calling.done() and not calling.cancelled() and calling.exception() is None:
                begun.extend([calling.result()["taskId"]] if is_task(calling.result()) else [])
            await cancel_tasks(calling)

    try:
        result = await (context.step(_CALL, begin, once=once) if durable else begin())
        if durable and not (is_object(result) and result.keys() & _OF_RESULTS):
            # A person has decided what the result of the call is.
            return {"content": [], "structuredContent": result}
        if not is_task(result):
            return result
        # An attempt that continues has not called `begin`.
        begun[:] = [result["taskId"]]
        return await _Follower(result["taskId"], server, context).follow(result)
    except _TaskError as error:
        if error.is_malformed:
            await _cancel(begun[0], server, context)
        if context.scope is not None and durable:
            await context.scope.fail_step(_CALL, error.outcome, once=once)
        raise error.outcome from None
    except asyncio.CancelledError:
        # If the run was not cancelled, another attempt continues the task.
        if begun and (context.scope is None or context.scope.is_cancelled):
            await _cancel(begun[0], server, context)
        raise


async def _cancel(task_id: str, server: Server, context: OperationContext) -> None:
    params: JSONObject = {"taskId": task_id}
    with suppress(CallError, TimeoutError):
        async with asyncio.timeout(_CANCEL_SECONDS):
            await server.request("tasks/cancel", params, context, replayable=True)


class _TaskError(Exception):
    """The task will not have a result.

    Args:
        outcome: The error of the call.
        is_malformed: Whether the task may live, because its server sent a state that the protocol does not allow.
    """

    def __init__(self, outcome: CallError, *, is_malformed: bool = False) -> None:
        super().__init__(outcome.message)
        self.outcome, self.is_malformed = outcome, is_malformed


def _malformed(message: str) -> _TaskError:
    outcome = CallError(ErrorCode.EXECUTION_ERROR, message, retryable=False)
    return _TaskError(outcome, is_malformed=True)


async def result_of(task: JSONObject, server: Server, context: OperationContext) -> JSONObject:
    """Wait for a task; return the result of its call.

    Raises:
        CallError: If the task failed, was cancelled, or is lost.
    """

    async def known() -> JSONObject:
        return task

    return await call_with_tasks(known, server, context, durable=False, once=False)


class _Follower:
    """Waits for one task."""

    def __init__(self, task_id: str, server: Server, context: OperationContext) -> None:
        self._id, self._server, self._context = task_id, server, context
        self._answered: set[str] = set()
        self._reports = 0
        self._reported = ""

    async def follow(self, task: JSONObject) -> JSONObject:
        """Return the result of the call.

        Raises:
            _TaskError: If the task failed, was cancelled, or is lost.
            CallError: If the server does not respond.
        """
        pause = _FIRST_SECONDS
        while True:
            status = task.get("status")
            if status == "completed":
                return object_of(task.get("result"))
            if status == "failed":
                raise _TaskError(_failure(object_of(task.get("error"))))
            if status == "cancelled":
                message = f"{self._server.server} has cancelled the task"
                raise _TaskError(CallError(ErrorCode.ABORTED, message))
            if status not in _LIVE:
                message = (
                    f"{self._server.server} sent a task whose status the protocol does not allow"
                )
                raise _malformed(message)
            await self._report(text_of(task.get("statusMessage")))
            if status == "input_required" and await self._answer(task):
                task = await self._get()
                continue
            await asyncio.sleep(min(pause, _interval(task)))
            pause *= _GROWTH
            task = await self._get()

    async def _get(self) -> JSONObject:
        """Return the present state of the task; wait for a server that does not respond."""
        loop = asyncio.get_running_loop()
        ends, pause = loop.time() + _PATIENCE_SECONDS, _POLL_SECONDS
        while True:
            params: JSONObject = {"taskId": self._id}
            try:
                return await self._server.request(
                    "tasks/get", params, self._context, replayable=True
                )
            except CallError as error:
                error.begun = None
                if error.details.get("code") == INVALID_PARAMS:
                    raise _TaskError(_lost(self._server.server)) from error
                if error.code not in _RETRIED or loop.time() > ends:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _POLL_BOUNDS[1])

    async def _report(self, message: str) -> None:
        message = message[:_LONGEST_MESSAGE]
        if message and message != self._reported:
            self._reported = message
            self._reports += 1
            await self._context.progress(self._reports, None, message)

    async def _answer(self, task: JSONObject) -> bool:
        """Answer the outstanding questions; return False if there is none that can be answered."""
        asked = object_of(task.get("inputRequests"))
        new = {key: object_of(each) for key, each in asked.items() if key not in self._answered}
        if not new:
            return False
        self._enforce_allowed(new)
        asking = [asyncio.ensure_future(self._ask(*each)) for each in new.items()]
        try:
            await asyncio.gather(*asking)
        finally:
            await cancel_tasks(*asking)
        return True

    def _enforce_allowed(self, questions: Mapping[str, JSONObject]) -> None:
        server = self._server.server
        if not all(isinstance(each.get("method"), str) for each in questions.values()):
            raise _malformed(f"{server} sent a question that the protocol does not allow")
        count, total = len(questions), len(questions) + len(self._answered)
        is_large = len(msgspec.json.encode(questions)) > _MAX_QUESTION_BYTES
        if count > MAX_QUESTIONS or total > _MAX_ANSWERED or is_large:
            raise _malformed(f"{server} sent too many or too large questions for a task")

    async def _ask(self, key: str, question: JSONObject) -> None:
        self._answered.add(key)
        params = dict(object_of(question.get("params")))
        if question.get("method") == ELICIT and self._context.scope is not None:
            # Equal questions of one task have different answers.
            form = object_of(params.get("requestedSchema"))
            params["requestedSchema"] = {**form, "$id": f"q{sha256(key.encode()).hexdigest()[:16]}"}
        asked = {**question, "params": params}
        answer = await answer_question(asked, self._server.config, self._context)
        if answer is None:
            return
        update = {"taskId": self._id, "inputResponses": {key: answer}}
        await self._server.request("tasks/update", update, self._context, replayable=True)


def _interval(task: JSONObject) -> float:
    stated, seconds = task.get("pollIntervalMs"), _POLL_SECONDS
    # Neither NaN nor an integer that is no float has an order with the bounds.
    with suppress(OverflowError):
        if isinstance(stated, int | float) and isfinite(stated) and not isinstance(stated, bool):
            seconds = float(stated) / 1000
    return min(max(seconds, _POLL_BOUNDS[0]), _POLL_BOUNDS[1])


def _lost(server: str) -> CallError:
    message = f"{server} no longer has the task of this call, which may have run: find out before you repeat it"
    return CallError(ErrorCode.OUTCOME_UNKNOWN, message, retryable=False)


def _failure(error: JSONObject) -> CallError:
    """Return the error of a task that failed, as that of a call whose response is an error."""
    message = text_of(error.get("message")) or "the task failed"
    details: JSONObject = {"code": error.get("code"), "message": message}
    if error.get("data") is not None:
        details["data"] = error["data"]
    return CallError(ErrorCode.EXECUTION_ERROR, message, details, retryable=False)
