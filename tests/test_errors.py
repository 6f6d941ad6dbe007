import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from operations import (
    CallError,
    ErrorCode,
    ErrorDefinition,
    MissingExtraError,
    OperationContext,
    OperationRegistry,
    map_error,
)
from operations.base.errors import HTTP_STATUS, timed_out
from operations.front.public_errors import public_error


def test_an_error_round_trips_over_the_wire() -> None:
    error = CallError("TASK_CLOSED", "it is closed", {"id": 7, "tags": {"a"}}, retryable=True)

    wire = error.to_wire()
    back = CallError.from_wire(wire)

    assert wire == {
        "code": "TASK_CLOSED",
        "message": "it is closed",
        "details": {"id": 7, "tags": ["a"]},
        "retryable": True,
    }
    assert (back.code, back.message, back.retryable) == ("TASK_CLOSED", "it is closed", True)


def test_details_that_are_not_json_do_not_stop_the_error() -> None:
    wire = CallError("X", "y", {"socket": object()}).to_wire()

    assert "omitted" in wire["details"]


def test_unavailable_and_unapproved_calls_are_retryable_by_default() -> None:
    assert CallError(ErrorCode.UNAVAILABLE, "").retryable
    assert CallError(ErrorCode.APPROVAL_REQUIRED, "").to_wire()["retryable"]
    assert not CallError(ErrorCode.UNAVAILABLE, "", retryable=False).retryable
    assert not CallError(ErrorCode.TIMEOUT, "").retryable


@pytest.mark.parametrize("wire", [{}, {"code": 3, "message": []}, {"code": ""}])
def test_a_mangled_error_is_unknown(wire: dict[str, Any]) -> None:
    assert CallError.from_wire(wire).code == ErrorCode.UNKNOWN_ERROR


def test_an_error_survives_pickling_and_shows_itself() -> None:
    error = CallError("X", "y", [1])
    error.unexpected, error.operation_id = True, "a.b"

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert (copy.code, copy.message, copy.details, copy.unexpected) == ("X", "y", [1], True)
    assert copy.operation_id == "a.b"
    assert repr(error) == "CallError('X', 'y')"
    assert str(error) == "X: y"


DECLARED = [ErrorDefinition("GONE"), ErrorDefinition("GONE_FOR_EVER")]


@pytest.mark.parametrize(
    ("exception", "code", "message"),
    [
        (ValueError("GONE"), "GONE", "GONE"),
        (ValueError("GONE: since monday"), "GONE", "since monday"),
        (ValueError("GONE:"), "GONE", "GONE"),
        (ValueError("GONE://x refused"), "GONE", "GONE://x refused"),
        (ValueError("GONE_FOR_EVER: x"), "GONE_FOR_EVER", "x"),
        (ValueError("GONE fishing"), ErrorCode.EXECUTION_ERROR, "ValueError: GONE fishing"),
        (ValueError("OTHER: x"), ErrorCode.EXECUTION_ERROR, "ValueError: OTHER: x"),
        (ValueError(), ErrorCode.EXECUTION_ERROR, "ValueError"),
        (KeyError("secret"), ErrorCode.EXECUTION_ERROR, "KeyError: 'secret'"),
    ],
)
def test_a_declared_code_is_recognised(exception: Exception, code: str, message: str) -> None:
    error = map_error(exception, DECLARED)

    assert (error.code, error.message) == (code, message)
    assert error.unexpected is (code == ErrorCode.EXECUTION_ERROR)


def test_an_exception_that_cannot_be_printed_is_mapped_anyway() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert map_error(MuteError()).message == "MuteError"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2499, "within 0.25 s"),
        (2.4998, "within 2.5 s"),
        (29.9991, "within 30 s"),
        (600, "within 600 s"),
        (-1, "within 0 s"),
        (None, "in time"),
    ],
)
def test_a_timeout_names_the_operation_and_the_limit(seconds: float | None, words: str) -> None:
    error = timed_out("task.run", seconds)

    assert (error.code, error.message) == (ErrorCode.TIMEOUT, f"task.run did not finish {words}")


def test_a_call_error_is_mapped_to_itself() -> None:
    error = CallError("X", "y")

    assert map_error(error) is error


def test_a_missing_extra_is_reported_with_its_install_command() -> None:
    error = MissingExtraError("operations.pubsub.redis", extra="redis")

    assert isinstance(error, ImportError)
    assert str(error) == (
        "operations.pubsub.redis needs the 'redis' extra: pip install 'alkdev-operations[redis]'"
    )


def test_the_status_table_is_the_contracts() -> None:
    assert HTTP_STATUS == {
        "OPERATION_NOT_FOUND": 404,
        "ACCESS_DENIED": 403,
        "VALIDATION_ERROR": 422,
        "TIMEOUT": 504,
        "UNAVAILABLE": 503,
        "RESOURCE_EXHAUSTED": 429,
        "APPROVAL_REQUIRED": 428,
        "RUN_NOT_FOUND": 404,
        "RUN_ENDED": 409,
        "OPERATION_CHANGED": 409,
    }


@pytest.mark.parametrize("message", ["no file \udcff", ValueError("an object")])
def test_every_message_can_be_written(message: Any) -> None:
    assert msgspec.json.encode(CallError("X", message).to_wire())


def nesting() -> OperationRegistry:
    """Return operations that make the same nested call in each way."""
    registry = OperationRegistry()

    @registry.operation("inner.count")
    async def count(upto: int) -> int:
        if upto < 0:
            raise CallError(ErrorCode.VALIDATION_ERROR, "upto is negative")
        await asyncio.sleep(upto)
        return upto

    @registry.operation("inner.each")
    async def each(upto: int) -> AsyncIterator[int]:
        yield upto

    @registry.operation("outer.env")
    async def env(tool: str, input: Any, context: OperationContext) -> Any:
        return (await context.env.call(tool, input)).data

    @registry.operation("outer.again")
    async def again(tool: str, input: Any, context: OperationContext) -> Any:
        return (await context.env.outer.env({"tool": tool, "input": input})).data

    @registry.operation("outer.execute")
    async def execute(tool: str, input: Any) -> Any:
        return (await registry.execute(tool, input)).data

    @registry.operation("outer.hurry")
    async def hurry(tool: str, input: Any) -> Any:
        return (await registry.execute(tool, input, timeout=0.2)).data

    @registry.operation("outer.read")
    async def read(tool: str, input: Any, context: OperationContext) -> AsyncIterator[Any]:
        async for item in context.env.subscribe(tool, input):
            yield item.data

    @registry.operation("outer.forward")
    async def forward(tool: str, input: Any, context: OperationContext) -> Any:
        try:
            return (await context.env.call(tool, input)).data
        except CallError as error:
            raise CallError(error.code, error.message, error.details) from error

    return registry


async def failure(
    registry: OperationRegistry, operation_id: str, tool: str, input: Any
) -> CallError:
    with pytest.raises(CallError) as caught:
        arguments = {"tool": tool, "input": input}
        if operation_id == "outer.read":
            _ = [item async for item in registry.subscribe(operation_id, arguments)]
        else:
            await registry.execute(operation_id, arguments)
    return caught.value


@pytest.mark.parametrize(
    ("tool", "input", "code"),
    [
        ("inner.count", {"upto": "many"}, ErrorCode.VALIDATION_ERROR),
        ("inner.each", {"upto": "many"}, ErrorCode.VALIDATION_ERROR),
        ("inner.none", {}, ErrorCode.OPERATION_NOT_FOUND),
    ],
)
@pytest.mark.parametrize("outer", ["outer.env", "outer.again", "outer.execute", "outer.read"])
async def test_an_invalid_nested_call_is_a_failure_of_the_operation_that_made_it(
    outer: str, tool: str, input: Any, code: str
) -> None:
    error = await failure(nesting(), outer, tool, input)

    assert error.code == ErrorCode.EXECUTION_ERROR
    assert error.message.startswith(
        f"{'outer.env' if outer == 'outer.again' else outer} made an invalid call: "
    )
    assert error.unexpected
    assert isinstance(error.__cause__, CallError)
    shown = public_error(error, "r1", log=False)
    assert (shown.message, shown.details) == (
        "The operation failed (request r1)",
        {"requestId": "r1"},
    )


async def test_a_nested_timeout_names_the_operation_that_the_caller_called() -> None:
    registry = nesting()

    timed_out = await failure(registry, "outer.hurry", "inner.count", {"upto": 5})

    assert timed_out.code == ErrorCode.TIMEOUT
    assert timed_out.message == "outer.hurry calls an operation that did not finish in time"
    assert timed_out.details.keys() == {"deadline"}


async def test_an_error_that_an_operation_raises_itself_reaches_the_caller() -> None:
    registry = nesting()
    shared = CallError(ErrorCode.VALIDATION_ERROR, "always the same object")

    @registry.operation("shared.raise")
    async def fail() -> None:
        raise shared

    @registry.operation("shared.also")
    async def also() -> None:
        raise shared

    forwarded = await failure(registry, "outer.forward", "inner.count", {"upto": "many"})
    raised = await failure(registry, "outer.env", "inner.count", {"upto": -1})
    nested = await failure(registry, "outer.env", "shared.raise", {})

    assert forwarded.code == ErrorCode.VALIDATION_ERROR
    assert forwarded.details["errors"][0]["path"] == "/upto"
    assert (raised.code, nested.code) == (ErrorCode.EXECUTION_ERROR, ErrorCode.EXECUTION_ERROR)
    for operation_id in ("shared.also", "shared.raise"):
        with pytest.raises(CallError) as caught:
            await registry.execute(operation_id)
        assert caught.value is shared
