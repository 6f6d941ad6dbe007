"""Runs as tasks (`io.modelcontextprotocol/tasks`, SEP-2663), for clients since 2026-07-28.

    tools/call of a durable operation -> its result, or after a second a task: the run, by its id

Rule 1: a client receives a task only if the same request declares the extension. Any other client waits for the result;
        at its time limit, the result names the run.
Rule 2: a task is returned after its run is stored.
Rule 3: a run that the caller may not see is the same error as an unknown task.
Rule 4: a client sees only questions that it declares to answer. Approvals are for other people: the task is working.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from math import inf
from time import monotonic, time
from typing import Any, Final, Protocol

import mcp_types as types
from mcp import MCPError

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import is_object, object_of
from operations.base.tasks import cancel_tasks, start_task
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.front.config import MCPServerSettings
from operations.mcp.serving.caller import MCPCaller
from operations.mcp.serving.tools import Tool
from operations.mcp.shared.extensions import TASKS, declared
from operations.mcp.shared.interaction import ELICIT, SAMPLE
from operations.registry.registry import OperationRegistry
from operations.registry.runs import Run, RunState, RunStatus, Waiting

GET: Final = "runs.get"
"""The operation that returns the state of a run."""

_LEFT_SECONDS: Final = 0.2
"""Seconds of the time limit of a call that are left for its response."""

_POLL: Final = 500
_POLL_LATER: Final = 5_000
"""Milliseconds between two requests for a task, and after its first minute."""

_FIRST_MINUTE: Final = 60_000


class Handover:
    """The run that a handler has handed over to its client."""

    run: Run | None = None


handover: ContextVar[Handover | None] = ContextVar("operations_mcp_handover", default=None)
"""The place for the run of the current call; None if its client takes no tasks."""


def hand_over(run: Run) -> bool:
    """Respond to the current call with a task for `run`, if its client takes tasks, and drop the result of the handler.

    For handlers that ask their caller first, and then start a run: return its result if this returns False.
    """
    place = handover.get()
    if place is None:
        return False
    place.run = run
    return True


class Results(Protocol):
    """Converts what an operation returned to results of `tools/call`."""

    def tool_of(self, operation_id: str) -> Tool:
        """Return the tool of an operation, also of one that is gone."""
        ...

    def succeeded(
        self, tool: Tool, envelope: ResponseEnvelope[Any], caller: MCPCaller
    ) -> JSONObject:
        """Return the result of an envelope."""
        ...

    def failed(
        self, tool: Tool, error: CallError, request_id: str, caller: MCPCaller
    ) -> JSONObject:
        """Return the result of an error.

        Raises:
            MCPError: If the error is one of the protocol.
        """
        ...


class Tasks:
    """Serves runs as tasks.

    Args:
        registry: Has the runs.
        settings: How long a call waits for its run.
        results: Converts results.
    """

    def __init__(
        self, registry: OperationRegistry, settings: MCPServerSettings, results: Results
    ) -> None:
        self._registry = registry
        self._after = settings.task_after
        self._is_allowed = settings.extensions is None or TASKS in settings.extensions
        self._results = results

    @property
    def is_offered(self) -> bool:
        """Whether there is a store of runs, whose runs may be tasks."""
        return self._is_allowed and self._registry.run_store is not None

    def takes(self, caller: MCPCaller) -> bool:
        """Return whether a request declares the extension."""
        return self.is_offered and caller.modern and TASKS in declared(caller.capabilities)

    def applies(self, tool: Tool) -> bool:
        """Return whether the calls of a tool are runs."""
        operation = tool.operation
        has_store = self._registry.run_store is not None
        return has_store and operation is not None and bool(operation.durable)

    # ------------------------------------------------------------ calls

    async def call(
        self, tool: Tool, value: Any, context: OperationContext, caller: MCPCaller
    ) -> ResponseEnvelope[Any] | JSONObject:
        """Start a run; return the envelope of its result, or the task.

        Raises:
            CallError: The error of the run; `TIMEOUT` if it does not end before the limit of a client without tasks.
            MCPError: If the operation must not be called without tasks.
        """
        began = monotonic()
        takes = self.takes(caller)
        if not takes and tool.operation is not None and tool.operation.durable == "required":
            raise missing_tasks(tool.name)
        run = await self._registry.start(tool.id, value, context)
        if not takes:
            return await self._held(run, context)
        seconds = min(began + self._after - monotonic(), context.remaining - _LEFT_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), aclosing(run.watch()) as states:
                async for state in states:
                    if _questions(state, caller):
                        break
        return run.state.envelope() if run.state.is_final else self.created(run, caller)

    def created(self, run: Run, caller: MCPCaller) -> JSONObject:
        """Return the result of `tools/call` that is a task."""
        return {"resultType": "task", **_task(run.state, caller)}

    async def _held(self, run: Run, context: OperationContext) -> ResponseEnvelope[Any]:
        """Wait for a run with the progress and the questions of a call.

        Raises:
            CallError: The error of the run; `TIMEOUT` at the limit of the call. The run goes on.
        """
        following = asyncio.Task(self._follow(run, context))
        try:
            while not following.done() and context.remaining > _LEFT_SECONDS:
                limit = context.limit
                check = context.remaining if limit is None else limit.next_check
                seconds = None if check == inf else max(check - _LEFT_SECONDS, 0.01)
                await asyncio.wait({following}, timeout=seconds)
            if following.done():
                following.result()
        finally:
            await cancel_tasks(following)
        if run.state.is_final:
            return run.state.envelope()
        raise self._still_running(run)

    async def _follow(self, run: Run, context: OperationContext) -> None:
        """Report progress and ask questions until a run has ended."""
        asked, asking = set[str](), set[asyncio.Task[Any]]()
        reported: Any = None
        try:
            async with aclosing(run.watch()) as states:
                async for state in states:
                    progress = object_of(state.progress)
                    if progress and progress != reported:
                        reported = progress
                        total = progress.get("total")
                        await context.progress(progress["progress"], total, state.message)
                    for each in state.waiting:
                        if each.key not in asked and (question := _ask(each, context)) is not None:
                            asked.add(each.key)
                            start_task(asking, _answer(run, each.key, question))
        finally:
            await cancel_tasks(*asking)

    def _still_running(self, run: Run) -> CallError:
        message = f"{run.state.operation} is still running, as the run {run.id}. Do not repeat it"
        details: JSONObject = {"run": run.id, "status": run.status.value}
        if GET in self._registry:
            name = self._results.tool_of(GET).name
            message = f'{message}: {name} with {{"run": "{run.id}"}} returns its state'
            details["operation"] = GET
        return CallError(ErrorCode.TIMEOUT, message, details, retryable=False)

    # ------------------------------------------------------------ methods of the extension

    def enforce_taken(self, caller: MCPCaller) -> None:
        """Raise an error unless the request declares the extension.

        Raises:
            MCPError: `METHOD_NOT_FOUND` if this server has no tasks for the client; -32021 without the declaration.
        """
        if not caller.modern or not self.is_offered:
            raise MCPError(types.METHOD_NOT_FOUND, "Method not found")
        if not self.takes(caller):
            raise missing_tasks("tasks")

    async def find(self, caller: MCPCaller, task_id: str) -> Run:
        """Return the run of a task.

        Raises:
            MCPError: `INVALID_PARAMS` if there is no such task that the caller may see.
        """
        context = OperationContext(identity=caller.identity)
        try:
            return await self._registry.run(task_id, context)
        except CallError as error:
            if error.code != ErrorCode.RUN_NOT_FOUND:
                raise _protocol_error(error) from error
        raise MCPError(types.INVALID_PARAMS, "Unknown task", {"taskId": task_id})

    async def get(self, caller: MCPCaller, task_id: str) -> JSONObject:
        """Serve `tasks/get`."""
        self.enforce_taken(caller)
        run = await self.find(caller, task_id)
        return {"resultType": "complete", **self.detailed(run.state, caller)}

    async def update(
        self, caller: MCPCaller, task_id: str, responses: Mapping[str, Any]
    ) -> JSONObject:
        """Serve `tasks/update`: unknown and answered keys are ignored.

        Raises:
            MCPError: `INVALID_PARAMS` if an answer does not match its question. The others are taken.
        """
        self.enforce_taken(caller)
        run = await self.find(caller, task_id)
        outstanding = {each.key for each in _questions(run.state, caller)}
        failure: CallError | None = None
        for key, answer in responses.items():
            if key in outstanding and is_object(answer):
                try:
                    await run.answer(key, answer)
                except CallError as error:
                    failure = error
        if failure is not None:
            raise _protocol_error(failure)
        return {"resultType": "complete"}

    async def cancel(self, caller: MCPCaller, task_id: str) -> JSONObject:
        """Serve `tasks/cancel`."""
        self.enforce_taken(caller)
        run = await self.find(caller, task_id)
        try:
            await run.cancel()
        except CallError as error:
            raise _protocol_error(error) from error
        return {"resultType": "complete"}

    def detailed(self, state: RunState, caller: MCPCaller) -> JSONObject:
        """Return a task with its questions, its result or its error."""
        task = _task(state, caller)
        if task["status"] == "input_required":
            task["inputRequests"] = {each.key: _request(each) for each in _questions(state, caller)}
        elif state.is_final and state.status is not RunStatus.CANCELLED:
            tool = self._results.tool_of(state.operation)
            try:
                try:
                    result = self._results.succeeded(tool, state.envelope(), caller)
                except CallError as error:
                    result = self._results.failed(tool, error, state.id, caller)
                task["result"] = caller.settled(result)
            except MCPError as error:
                task |= {"status": "failed", "error": error.error.model_dump(exclude_none=True)}
        return task

    async def follow(
        self, caller: MCPCaller, run: Run, report: Callable[[JSONObject], Awaitable[None]]
    ) -> None:
        """Report every state of a task, until it has ended."""
        sent: JSONObject | None = None
        async with aclosing(run.watch()) as states:
            async for state in states:
                task = self.detailed(state, caller)
                if task != sent:
                    sent = task
                    await report(task)


def missing_tasks(what: str) -> MCPError:
    """Return the error for a request that does not declare the extension."""
    return MCPError(
        types.MISSING_REQUIRED_CLIENT_CAPABILITY,
        f"{what} needs a client that declares the extension {TASKS}",
        {"requiredCapabilities": {"extensions": {TASKS: {}}}},
    )


def _protocol_error(error: CallError) -> MCPError:
    invalid = error.code == ErrorCode.VALIDATION_ERROR
    code = types.INVALID_PARAMS if invalid else types.INTERNAL_ERROR
    return MCPError(code, error.message, error.to_wire())


# ------------------------------------------------------------ states


def _task(state: RunState, caller: MCPCaller) -> JSONObject:
    """Return a run as a task without its details."""
    task: JSONObject = {
        "taskId": state.id,
        "status": _status(state, caller),
        "createdAt": _timestamp(state.created),
        "lastUpdatedAt": _timestamp(state.updated),
        "ttlMs": None if state.expires is None else max(1, state.expires - state.created),
    }
    if not state.is_final:
        is_new = time() * 1000 - state.created < _FIRST_MINUTE
        task["pollIntervalMs"] = _POLL if is_new else _POLL_LATER
        message = _message(state)
        if message:
            task["statusMessage"] = message
    return task


_FINAL: Final = {
    RunStatus.COMPLETED: "completed",
    # The result has the error, so that the model can read it.
    RunStatus.FAILED: "completed",
    RunStatus.UNKNOWN: "completed",
    RunStatus.CANCELLED: "cancelled",
}


def _status(state: RunState, caller: MCPCaller) -> str:
    if state.is_final:
        return _FINAL[state.status]
    return "input_required" if _questions(state, caller) else "working"


def _message(state: RunState) -> str:
    """Return what a live run does, for people."""
    if state.status is RunStatus.QUEUED:
        return "queued"
    waits = {each.kind for each in state.waiting}
    if "approval" in waits:
        return "waiting for approval"
    signals = [object_of(each.request).get("name") for each in state.waiting]
    if "signal" in waits:
        return f"waiting for {', '.join(str(name) for name in signals if name)}"
    if waits:
        return "waiting for an answer"
    if state.message:
        return state.message
    progress = object_of(state.progress)
    done, total = progress.get("progress"), progress.get("total")
    return "" if done is None else f"{done}" if total is None else f"{done} of {total}"


def _timestamp(milliseconds: int) -> str:
    text = datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


# ------------------------------------------------------------ questions

_NEEDS: Final = {"elicit": "elicitation", "sample": "sampling"}
"""The capability that a client needs to answer a kind of question."""


def _questions(state: RunState, caller: MCPCaller) -> list[Waiting]:
    """Return the outstanding questions that a client can answer."""
    if state.status is not RunStatus.INPUT_REQUIRED:
        return []
    can = caller.capabilities
    return [each for each in state.waiting if can.get(_NEEDS.get(each.kind, "")) is not None]


def _request(question: Waiting) -> JSONObject:
    """Return a question as a request of the protocol."""
    if question.kind == "sample":
        return {"method": SAMPLE, "params": question.request}
    form = {key: value for key, value in question.request["schema"].items() if key != "$id"}
    params = {"mode": "form", "message": question.request["message"], "requestedSchema": form}
    return {"method": ELICIT, "params": params}


def _ask(question: Waiting, context: OperationContext) -> Awaitable[Any] | None:
    """Ask the caller a question of its run; None if it cannot be asked."""
    channel = context.channel
    if question.kind == "elicit" and channel.elicit is not None:
        return context.elicit(question.request["message"], question.request["schema"])
    if question.kind == "sample" and channel.sample is not None:
        return context.sample(question.request)
    return None


async def _answer(run: Run, key: str, answer: Awaitable[Any]) -> None:
    """Answer a question of a run. If the client does not, the question stays for others."""
    with suppress(CallError):
        await run.answer(key, await answer)
