"""One script: its turns in the sandbox, its calls, its clock, its end.

    check -> start -> (call | clock | name)* -> result

Rule 1: every call of a script is a nested call of the context of `code.run`: the pipeline checks it as any other.
Rule 2: in a run, every call, and every value of the clock and of chance, is a recorded step, so that a later attempt
        takes the same way.
Rule 3: what the script says about its calls is a claim. It is shown beside an approval, never used to decide.
"""

import asyncio
import re
from bisect import bisect_right
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from secrets import token_bytes
from time import time
from typing import Any, Final
from uuid import UUID

import msgspec

from operations.base.errors import CallError, ErrorCode, operation_not_found
from operations.base.json.values import as_json, is_list, is_object, to_json
from operations.base.text import printable
from operations.base.types import JSONObject
from operations.code.bounded import Bounds, items_of
from operations.code.config import CodeLimits, digest_of
from operations.code.errors import NO_SYSTEM, ScriptErrors
from operations.code.names import parameters_of
from operations.code.nesting import Nesting, calling
from operations.code.sandbox import (
    PRINTS_TOO_MUCH,
    Called,
    Finished,
    Function,
    Looked,
    Namespace,
    Sandbox,
    SandboxError,
    Session,
    Turn,
    Waits,
    instance,
)
from operations.code.values import to_plain
from operations.code.view import View, words_of
from operations.contract.context import OperationContext, may_call
from operations.contract.specs import OperationSpec, OperationType
from operations.registry.registry import OperationRegistry

_MAX_CLAIM: Final = 200
"""The largest number of characters of a line of a script, or of a value, that an approver sees."""

_GLIMPSED: Final = 8
"""The number of items of each list and object that are shown."""

_CLAIMED: Final = 5
"""The number of earlier calls that an approver sees."""

_SECRET = re.compile(
    r"(?i)([\"']?[\w-]*(?:password|passwd|secret|token|api_?key|authorization|credential)[\w-]*[\"']?\s*[:=]\s*)"
    r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,)}]+)"
)


class LimitError(CallError):
    """A script has exceeded a limit."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(ErrorCode.RESOURCE_EXHAUSTED, message, {"limit": limit}, retryable=False)


class Script:
    """A script and its lines.

    Args:
        text: The source.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = digest_of(text)
        data = text.encode("utf-8", "replace")
        self._starts = [0, *(found.end() for found in re.finditer(b"\n", data))]
        self._lines = text.split("\n")

    def line_at(self, offset: int) -> int | None:
        """Return the line of a place in bytes."""
        return None if offset < 0 else bisect_right(self._starts, offset)

    def line(self, number: int | None) -> str:
        """Return the text of a line."""
        if number is None or not 0 < number <= len(self._lines):
            return ""
        return self._lines[number - 1].strip()


class ScriptCall:
    """A call that the script has made."""

    def __init__(self, called: Called, operation_id: str, name: str, line: int | None) -> None:
        self.called, self.operation_id, self.line = called, operation_id, line
        self.name = name
        """Its id for people; what the script has written if its caller may not see the operation."""
        self.outcome = "not awaited"
        self.result: Any = None
        self.shown = ""
        self.is_mutation = False


def may_be_scripted(spec: OperationSpec) -> bool:
    """Return whether scripts may call an operation, apart from the access of their caller.

    Another hub may offer `code.run` to its callers under a pattern, so that no grant of theirs names what the script
    calls. Scripts therefore do not call operations that administer authority.
    """
    return not spec.authority


class Execution:
    """Runs one script.

    Args:
        script: The script.
        context: The context of `code.run`.
        registry: The operations.
        view: Their names.
        limits: The limits.
        nesting: Its place among the scripts that call each other.
        arguments: The input of a saved script; None for any other.
    """

    def __init__(
        self,
        script: Script,
        context: OperationContext,
        registry: OperationRegistry,
        view: View,
        limits: CodeLimits,
        nesting: Nesting,
        arguments: JSONObject | None = None,
    ) -> None:
        self._arguments = arguments
        self.script = script
        self.calls: list[ScriptCall] = []
        self._context, self._registry, self._view, self._limits = context, registry, view, limits
        self._names, self._words = view.names, words_of(script.text)
        named = view.errors(self._words)
        self._errors = ScriptErrors(view.names, named, self._words)
        if len(named) > self._errors.most:
            message = (
                f"This script may name {self._errors.most} classes of errors; catch CallError and compare "
                "error_of(e)['code']"
            )
            raise LimitError("errors", message)
        self._objects: dict[UUID, tuple[str, ...]] = {}
        self._waiting: dict[int, ScriptCall | float] = {}
        self._tasks: dict[int, asyncio.Task[JSONObject]] = {}
        self._nesting = nesting
        self._places = nesting.tree.places(nesting.level)
        self.session: Session | None = None

    @property
    def printed(self) -> str:
        """What the script has printed."""
        return "" if self.session is None else self.session.printed

    async def check(self, sandbox: Sandbox, source: str) -> None:
        """Check the types of the script; run nothing of it.

        Raises:
            RejectedError: If it has errors.
        """
        async with sandbox.session(self._limits, f"{source}{_STOP}: Any\n") as session:
            # The first line stops the script; the lines of the diagnostics are moved back.
            turn = await session.start(f"{_STOP}\n{self.script.text}", {}, 0, checks=True)
            while isinstance(turn, Called):
                # The checker asks for a module that the script imports.
                turn = await session.refuse()

    @property
    def warnings(self) -> list[str]:
        """What its author has probably forgotten."""
        found = [
            f"The call of {each.name} in line {each.line} was never awaited, so it did not run."
            for each in self.calls
            if each.outcome == "not awaited"
        ]
        more = len(found) - _MAX_WARNINGS
        return [
            *found[:_MAX_WARNINGS],
            *([f"{more} more calls were never awaited."] if more > 0 else []),
        ]

    async def run(self, sandbox: Sandbox, source: str | None) -> Any:
        """Run the script; return its result as JSON values.

        Args:
            sandbox: The worker processes.
            source: The stubs for the type check; None for no check.

        Raises:
            RejectedError: If the type check has found errors; then nothing has run.
            SandboxError: If the script raises an exception.
            CallError: If a limit is exceeded, or the error of a call that the script does not catch is one that its
                caller has to act on.
        """
        calling.set(self._nesting)
        async with sandbox.session(self._limits, source) as session:
            self.session = session
            try:
                await session.prepare(self._errors.preamble)
                turn = await session.start(
                    self.script.text, self._inputs(), self._limits.output, checks=source is not None
                )
                while not isinstance(turn, Finished):
                    turn = await self._respond(session, turn)
            except SandboxError as error:
                raise self._failure(error) from None
            finally:
                await self._cancel()
        return self._result(turn.value)

    # ------------------------------------------------------------ turns

    def _inputs(self) -> Mapping[str, Any]:
        given = {} if self._arguments is None else {ARGUMENTS: self._arguments}
        return given | {
            namespace: self._object(Namespace(), namespace)
            for namespace in self._view.namespaces(self._words)
        }

    def _object(self, value: Any, *path: str) -> Any:
        found = instance(value)
        self._objects[found.id] = path
        return found

    async def _respond(self, session: Session, turn: Turn) -> Turn:
        match turn:
            case Looked():
                return await self._look(session, turn)
            case Called(is_host=True):
                return await self._host(session, turn)
            case Called():
                return await self._call(session, turn)
            case Waits():
                return await self._settle(session, turn)
            case Finished():
                return turn

    async def _look(self, session: Session, turn: Looked) -> Turn:
        path = () if turn.target is None else self._objects.get(turn.target, ())
        if turn.target is None and self._view.has_namespace(turn.name):
            # Computed by `eval`.
            return await session.name(self._object(Namespace(), turn.name))
        if len(path) == 1 and self._view.has_operation(path[0], turn.name):
            return await session.name(self._object(Function(), *path, turn.name))
        return await session.name()

    async def _host(self, session: Session, turn: Called) -> Turn:
        """Answer the clock, chance and sleep; reject everything else."""
        line = self.script.line_at(turn.offset)
        name, arguments = turn.name, turn.arguments
        if name == "asyncio.sleep":
            self._enforce_room()
            self._waiting[turn.id] = float(arguments[0]) if arguments else 0.0
            return await session.defer()
        if name == "time.sleep":
            await self._context.sleep(_seconds(arguments[0] if arguments else 0))
            return await session.answer(None)
        if name == "os.urandom":
            count = int(arguments[0]) if arguments else 0
            if not 0 <= count <= _MAX_RANDOM:
                return await session.refuse()
            text = await self._context.step(f"random:{line}", lambda: token_bytes(count).hex())
            return await session.answer(bytes.fromhex(text))
        if name in ("time.time", "datetime.now", "date.today"):
            now = float(await self._context.step(f"clock:{line}", time))
            moment = datetime.fromtimestamp(now, tz=UTC)
            zone = arguments[0] if name == "datetime.now" and arguments else None
            value: Any = now
            if name == "datetime.now":
                value = moment.replace(tzinfo=None) if zone is None else moment.astimezone(zone)
            elif name == "date.today":
                value = moment.date()
            return await session.answer(value)
        if name in ("import", "import_stubs"):
            return await session.refuse()
        message = f"Scripts have no files, network or environment: {name}"
        return await session.raise_error({"exc_type": NO_SYSTEM, "message": message})

    def _enforce_room(self) -> None:
        if len(self.calls) + len(self._waiting) >= 2 * self._limits.calls:
            raise LimitError("calls", f"The script waits more than {self._limits.calls} times")

    def _enforce_calls(self) -> None:
        if self._nesting.tree.is_spent:
            raise LimitError("calls", f"The script makes more than {self._limits.calls} calls")

    async def _call(self, session: Session, turn: Called) -> Turn:
        path = () if turn.target is None else self._objects.get(turn.target, ())
        if turn.name != "__call__":
            path = (*path, turn.name)
        if len(path) != 2:
            what = ".".join(path) or turn.name
            return await session.raise_error(
                {"exc_type": "NameError", "message": f"name {what!r} is not defined"}
            )
        self._nesting.tree.count_call()
        self._enforce_calls()
        # An operation that is hidden from the caller and one that does not exist are the same to the script.
        written = printable(".".join(path))[:_MAX_CLAIM]
        operation_id = self._names.operations[path[0]].get(path[1], written)
        name = operation_id if self._view.has_operation(*path) else written
        call = ScriptCall(turn, operation_id, name, self.script.line_at(turn.offset))
        self.calls.append(call)
        self._waiting[turn.id] = call
        return await session.defer()

    async def _settle(self, session: Session, turn: Waits) -> Turn:
        """Begin the calls for which the script waits, and give it the results that have arrived."""
        for each in turn.ids:
            waiting = self._waiting.pop(each, None)
            if isinstance(waiting, ScriptCall):
                self._tasks[each] = asyncio.Task(self._answered(waiting))
            elif waiting is not None:
                self._tasks[each] = asyncio.Task(self._slept(waiting))
        pending = {each: self._tasks[each] for each in turn.ids if each in self._tasks}
        await asyncio.wait(pending.values(), return_when=asyncio.FIRST_COMPLETED)
        # A saved script that it has called may have used them up.
        self._enforce_calls()
        done = {each: task for each, task in pending.items() if task.done()}
        for each in done:
            del self._tasks[each]
        return await session.settle({each: task.result() for each, task in done.items()})

    async def _slept(self, seconds: float) -> JSONObject:
        await self._context.sleep(_seconds(seconds))
        return {"return_value": None}

    async def _cancel(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()

    # ------------------------------------------------------------ calls

    async def _answered(self, call: ScriptCall) -> JSONObject:
        """Make a call; return its result, or its error, for the script."""
        async with self._places:
            call.outcome = "begun"
            try:
                call.result = await self._made(call)
            except CallError as error:
                call.outcome = error.code
                return self._errors.exception(error)
            call.outcome = "success"
            call.shown = _shown(_glimpse(call.result))
            return {"return_value": call.result}

    async def _made(self, call: ScriptCall) -> Any:
        spec = self._registry.get_spec(call.operation_id)
        if spec is None or not may_be_scripted(spec):
            raise self._unknown(call)
        call.is_mutation = spec.type is OperationType.MUTATION
        try:
            return await self._made_to(spec, call)
        except CallError as error:
            # Neither the rejection nor the arguments may reveal that the operation exists.
            hides = error.code in (ErrorCode.ACCESS_DENIED, ErrorCode.VALIDATION_ERROR)
            if hides and not may_call(spec, self._context):
                raise self._unknown(call) from None
            raise

    async def _made_to(self, spec: OperationSpec, call: ScriptCall) -> Any:
        operation_id, turn = spec.id, call.called
        given, bounds = parameters_of(spec).input_of(turn.arguments, turn.named)
        if not given and not turn.arguments and not turn.named:
            nothing: JSONObject | None = {} if parameters_of(spec).is_object else None
            given = nothing
        value = to_plain(given, f"The input of {call.operation_id}")
        context = self._context.changed(claim=self._claim(call))
        # As for every caller that is a model, input is converted if no information is lost.
        child = context.child(operation_id).changed(lenient=True)
        if spec.type is OperationType.SUBSCRIPTION:
            return await items_of(
                self._registry, operation_id, value, Bounds(bounds), context, child
            )
        scope = context.scope
        envelope = await context.nest(
            self._registry.execute(operation_id, value, child)
            if scope is None
            else scope.call(self._registry, operation_id, value, child)
        )
        return _plain_result(envelope.raise_for_error().data)

    def _unknown(self, call: ScriptCall) -> CallError:
        path = call.operation_id if call.operation_id not in self._names.names else ""
        name = path or self._names.python(call.operation_id)
        return operation_not_found(name, f"There is no operation {name}: find it with code.search")

    def _claim(self, call: ScriptCall) -> JSONObject:
        """Return what the script claims about a call, for a person who approves it."""
        earlier = [each for each in self.calls if each.outcome not in ("not awaited", "begun")]
        return {
            "by": "script",
            "script": self.script.digest,
            "line": call.line,
            "code": _shown(self.script.line(call.line)),
            "before": [
                {
                    "line": each.line,
                    "operation": each.name,
                    "outcome": each.outcome,
                    "result": each.shown,
                }
                for each in earlier[-_CLAIMED:]
                if each is not call
            ],
        }

    # ------------------------------------------------------------ the end

    def _result(self, value: Any) -> Any:
        plain = to_plain(value, "The result of the script")
        try:
            result = to_json(plain)
            size = len(msgspec.json.encode(result)) + len(self.printed.encode("utf-8", "replace"))
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            message = f"The result of the script is not JSON: {error}"
            raise CallError(ErrorCode.VALIDATION_ERROR, message) from None
        if size > self._limits.output:
            most = self._limits.output
            message = f"The result has {size} bytes, of at most {most}: return only what is needed"
            raise LimitError("output", message)
        return result

    def _failure(self, error: SandboxError) -> Exception:
        if PRINTS_TOO_MUCH in error.message:
            return LimitError("output", f"The script prints more than {self._limits.output} bytes")
        if error.kind == "MemoryError" and "memory limit" in error.message:
            return LimitError(
                "memory", f"The script needs more than {self._limits.memory} bytes of memory"
            )
        if error.kind == "TimeoutError" and "time limit" in error.message:
            return LimitError("cpu", f"The script computes for more than {self._limits.cpu:g} s")
        if error.kind == "RuntimeError" and "suspension limit" in error.message:
            return LimitError("calls", "The script calls, sleeps or reads the clock too often")
        if error.kind == "RecursionError":
            return LimitError("recursion", "The script has more than 500 nested calls")
        cause = self._errors.cause(error.message)
        if cause is not None and cause.code == ErrorCode.APPROVAL_REQUIRED:
            return cause
        error.trace = self._errors.named(error.trace).replace('"<python-input-1>"', "script")
        error.kind = self._errors.named(error.kind)
        error.cause = cause
        return error


ARGUMENTS: Final = "arguments"
"""The variable of a saved script that has its input."""

_STOP: Final = "operations_check_"

_MAX_WARNINGS: Final = 20
_MAX_RANDOM: Final = 4_096


def _seconds(value: Any) -> float:
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _plain_result(data: Any) -> Any:
    return data if isinstance(data, bytes) else as_json(data)


def _glimpse(value: Any) -> str:
    """Return the beginning of a value as JSON; large values are not written as a whole."""
    return msgspec.json.encode(_beginning(value, 3)).decode()


def _beginning(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value[:_MAX_CLAIM]
    if isinstance(value, (dict, list)) and not depth:
        return "..."
    if is_object(value):
        some = islice(value.items(), _GLIMPSED)
        return {str(key)[:_MAX_CLAIM]: _beginning(each, depth - 1) for key, each in some}
    if is_list(value):
        return [_beginning(each, depth - 1) for each in value[:_GLIMPSED]]
    return value if value is None or isinstance(value, (bool, int, float)) else "..."


def _shown(text: str) -> str:
    """Return text for a person: on one line, with visible control characters, without values that look secret."""
    text = printable(_SECRET.sub(r"\1***", text[: 4 * _MAX_CLAIM]))
    return text if len(text) <= _MAX_CLAIM else f"{text[: _MAX_CLAIM - 3]}..."
