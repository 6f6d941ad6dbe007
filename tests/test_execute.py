"""One call from end to end: access, validation, handler, envelope, errors, time, nesting."""

import asyncio
import dataclasses
import functools
import logging
import math
import re
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from tests.limits import scaled, time_limit
from tests.support import single, soon

from operations import (
    AccessControl,
    Call,
    CallerChannel,
    CallError,
    CallEvent,
    ErrorCode,
    ErrorDefinition,
    Identity,
    LocalResponseMeta,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    ResponseEnvelope,
    TextContent,
    build_env,
    http_envelope,
    is_response_envelope,
    local_envelope,
    mcp_envelope,
)
from operations.contract.events import CallAbandoned, CallFinished, CallStarted
from operations.registry.middleware import Next

ADDITION = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


async def add(input: Any, _context: OperationContext) -> Any:
    return input["a"] + input["b"]


async def echo(input: Any, _context: OperationContext) -> Any:
    return input


async def failing(registry: OperationRegistry, *args: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        await registry.execute("test.run", *args)
    return caught.value


# ---------------------------------------------------------------------- the way through


async def test_a_value_comes_back_in_a_local_envelope() -> None:
    registry = single(add, input_schema=ADDITION, output_schema={"type": "integer"})
    before = time.time() * 1000

    envelope = await registry.execute("test.run", {"a": 2, "b": 3})

    assert envelope.data == 5
    assert isinstance(envelope.meta, LocalResponseMeta)
    assert envelope.meta.operation_id == "test.run"
    assert before - 1 <= envelope.meta.timestamp <= time.time() * 1000 + 1


async def test_an_unknown_operation_is_not_found() -> None:
    registry = OperationRegistry()
    unknown: Any

    for unknown in ("test.run", "", "no-dot", "a.b.c", "\x00", ["test.run"], None):
        for attempt in (registry.execute(unknown), anext(registry.subscribe(unknown))):
            with pytest.raises(CallError) as caught:
                await attempt
            assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND


async def test_a_plain_function_declared_as_not_blocking_runs_in_the_loop() -> None:
    def where(_input: Any, _context: OperationContext) -> bool:
        return threading.current_thread() is threading.main_thread()

    spec = OperationSpec(name="run", namespace="test", type=OperationType.QUERY)
    for blocking in (False, True):
        registry = OperationRegistry([Operation(spec, where, blocking=blocking)])
        assert (await registry.execute("test.run")).data is not blocking


async def test_a_blocking_wrapper_of_a_coroutine_function_runs_in_a_thread() -> None:
    @functools.wraps(echo)
    def wrapper(_input: Any, _context: OperationContext) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert (await single(wrapper).execute("test.run")).data is False


async def test_executing_a_subscription_raises_with_advice() -> None:
    async def items(_input: Any, _context: OperationContext) -> Any:
        yield 1

    error = await failing(single(items, type=OperationType.SUBSCRIPTION))

    assert error.code == ErrorCode.VALIDATION_ERROR
    assert "subscribe" in error.message


# ---------------------------------------------------------------------- input


@pytest.mark.requirement("R27")
async def test_a_call_without_input_names_what_is_missing() -> None:
    registry = OperationRegistry()

    @registry.operation("task.create")
    async def create(title: str, owner: str) -> str:
        return title

    with pytest.raises(CallError) as caught:
        await registry.execute("task.create")

    assert [each["path"] for each in caught.value.details["errors"]] == ["/title", "/owner"]


async def test_bad_input_names_every_path_and_never_reaches_the_handler() -> None:
    async def never(_input: Any, _context: OperationContext) -> None:
        raise AssertionError("the handler was called")

    error = await failing(single(never, input_schema=ADDITION), {"a": "x", "c": 1})

    assert error.code == ErrorCode.VALIDATION_ERROR
    paths = [fault["path"] for fault in error.details["errors"]]
    assert "/a" in paths
    assert len(paths) == 3


async def test_a_required_property_is_required_even_if_it_has_a_default() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "default": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }

    error = await failing(single(echo, input_schema=schema), {})

    assert error.details == {
        "errors": [{"path": "/a", "message": "is required", "keyword": "required"}]
    }


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.requirement("R20", "R28")
@pytest.mark.parametrize("schema", [{}, True, {"type": ["array", "object", "number", "string"]}])
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, {"a": [math.nan]}, "\ud800", {"\udfff": 1}, nested(10_000), object()],
    ids=["nan", "inf", "inner nan", "surrogate", "surrogate key", "deep", "object"],
)
async def test_values_that_are_not_json_are_rejected_for_every_schema(
    schema: Any, value: Any
) -> None:
    error = await failing(single(add, input_schema=schema), value)

    assert error.code == ErrorCode.VALIDATION_ERROR
    assert error.details["errors"]


async def test_huge_integers_stay_exact() -> None:
    big = 10**400

    envelope = await single(echo, input_schema={"type": "integer"}).execute("test.run", big)

    assert envelope.data == big


async def test_an_input_schema_that_cannot_be_compiled_is_an_error_of_the_operation() -> None:
    error = await failing(single(add, input_schema={"type": "no such type"}), {})

    assert error.code == ErrorCode.EXECUTION_ERROR
    assert "input schema" in error.message


# ---------------------------------------------------------------------- access


GUARD = AccessControl(["test:run"])


@pytest.mark.requirement("R07")
async def test_access_is_checked_before_the_input() -> None:
    registry = single(add, access_control=GUARD, input_schema=ADDITION)

    assert (await failing(registry, "nonsense")).code == ErrorCode.ACCESS_DENIED


async def test_an_allowed_caller_passes_and_a_trusted_one_needs_no_identity() -> None:
    registry = single(add, access_control=GUARD)
    allowed = OperationContext(identity=Identity("alice", ["test:run"]))
    trusted = OperationContext(trusted=True)

    for context in (allowed, trusted):
        assert (await registry.execute("test.run", {"a": 1, "b": 1}, context)).data == 2
    for denied in (OperationContext(identity=Identity("eve")), OperationContext(), None):
        assert (await failing(registry, {"a": 1, "b": 1}, denied)).code == ErrorCode.ACCESS_DENIED


# ---------------------------------------------------------------------- output


@dataclasses.dataclass
class Task:
    id: int
    due: datetime


async def test_a_result_becomes_json_builtins() -> None:
    async def handler(_input: Any, _context: OperationContext) -> Any:
        return {"tasks": (Task(1, datetime(2026, 1, 2, tzinfo=UTC)),), "tags": {"a"}}

    for output_schema in ({}, {"type": "object"}):
        envelope = await single(handler, output_schema=output_schema).execute("test.run")

        assert envelope.data == {"tasks": [{"id": 1, "due": "2026-01-02T00:00:00Z"}], "tags": ["a"]}


RESULT = {
    "type": "object",
    "required": ["id"],
    "properties": {"id": {"type": "integer"}, "state": {"type": "string", "default": "open"}},
    "additionalProperties": False,
}


@pytest.mark.requirement("R52")
async def test_every_change_is_listed_and_the_first_of_each_kind_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = single(echo, output_schema=RESULT)

    envelope = await registry.execute("test.run", {"id": "7", "x": 2})
    await registry.execute("test.run", {"id": "8", "y": 2})

    assert envelope.data == {"id": 7, "state": "open"}
    assert [(change.path, change.kind) for change in envelope.meta.changes] == [
        ("/id", "converted"),
        ("/x", "stripped"),
        ("/state", "filled"),
    ]
    assert envelope.meta.changes_count == 3
    assert {(r.name, r.levelno) for r in caplog.records} == {("operations", logging.WARNING)}
    assert len(caplog.records) == 3
    assert "/id" in caplog.records[0].getMessage()


async def test_a_result_that_needs_no_change_lists_none(caplog: pytest.LogCaptureFixture) -> None:
    envelope = await single(echo, output_schema=RESULT).execute(
        "test.run", {"id": 7, "state": "open"}
    )

    assert envelope.meta.changes == ()
    assert "changes" not in envelope.to_wire()["meta"]
    assert not caplog.records


async def test_a_mismatch_is_a_warning_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "string", "pattern": "^a+$"}

    envelope = await single(echo, output_schema=schema).execute("test.run", "b")

    assert envelope.data == "b"
    assert [change.kind for change in envelope.meta.changes] == ["mismatch"]
    assert "does not match" in caplog.text


PAGE = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": RESULT}},
}


async def test_hundreds_of_changes_are_few_entries_and_few_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = single(echo, output_schema=PAGE)

    envelope = await registry.execute("test.run", {"items": [{"id": None, "x": 1}] * 481})

    assert [(c.path, c.kind, c.count) for c in envelope.meta.changes] == [
        ("/items/0/id", "mismatch", 481),
        ("/items/0/x", "stripped", 481),
        ("/items/0/state", "filled", 481),
    ]
    assert envelope.meta.changes_count == 3 * 481
    assert len(caplog.records) == 3


ISSUE = {
    "type": "object",
    "required": ["number", "title", "state", "assignee", "labels"],
    "properties": {
        "number": {"type": "integer"},
        "title": {"type": "string"},
        "state": {"type": "string", "enum": ["open", "closed"]},
        "comments": {"type": "integer", "maximum": 100},
        "labels": {"type": "array", "items": {"type": "string"}},
        "assignee": {
            "type": "object",
            "required": ["login", "id", "url"],
            "properties": {
                "login": {"type": "string"},
                "id": {"type": "integer"},
                "url": {"type": "string"},
            },
        },
    },
}


@pytest.mark.requirement("R52")
@pytest.mark.parametrize(
    ("schema", "result", "path"),
    [
        ({"type": "integer"}, "not an int", ""),
        ({"enum": ["active", "closed"]}, "paused", ""),
        ({"type": "integer", "maximum": 100}, 250, ""),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, [1, 2], ""),
        (ISSUE, {"number": 1, "title": "Crash", "state": "open", "labels": []}, "/assignee"),
        (
            {"anyOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "n": {}}, "required": ["kind"]},
                       {"type": "object", "properties": {"kind": {"const": "b"}, "m": {}}, "required": ["kind"]}]},
            {"kind": "c", "n": 1, "m": "2"},
            "/kind",
        ),
    ],
    ids=["type", "enum", "maximum", "list for object", "sparse issue", "union"],
)  # fmt: skip
async def test_a_value_that_does_not_match_stays_and_is_reported(
    schema: Any, result: Any, path: str
) -> None:
    envelope = await single(echo, output_schema=schema).execute("test.run", result)

    assert envelope.data == result
    assert [(change.path, change.kind) for change in envelope.meta.changes] == [(path, "mismatch")]


async def test_a_mismatched_result_of_a_typed_function_is_returned_unchanged() -> None:
    registry = OperationRegistry()

    @registry.operation("test.bad")
    async def bad() -> int:
        return "not an int"  # type: ignore[return-value]

    envelope = await registry.execute("test.bad")

    assert envelope.data == "not an int"
    assert envelope.meta.changes[0].kind == "mismatch"


@pytest.mark.parametrize(
    ("policy", "data", "kinds"),
    [
        ("cast", {"id": None, "state": "open"}, ["mismatch", "stripped", "filled"]),
        ("keep", {"id": None, "state": "open", "x": 1}, ["mismatch", "mismatch", "filled"]),
        ("create", {"id": 0, "state": "open"}, ["replaced", "stripped", "filled"]),
        ("warn", {"id": None, "x": 1}, ["mismatch", "mismatch"]),
        ("off", {"id": None, "x": 1}, []),
    ],
)
async def test_each_policy_lists_its_changes(policy: Any, data: Any, kinds: list[str]) -> None:
    registry = single(echo, output_schema=RESULT, output=policy)

    envelope = await registry.execute("test.run", {"id": None, "x": 1})

    assert envelope.data == data
    assert [change.kind for change in envelope.meta.changes] == kinds


async def test_a_registry_without_a_policy_casts() -> None:
    registry = OperationRegistry(output=None)
    registry.register_all(single(echo, output_schema=RESULT))

    assert registry.output == "cast"
    assert (await registry.execute("test.run", {"id": "7"})).data == {"id": 7, "state": "open"}


async def test_mismatches_are_counted_up_to_a_limit() -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}

    envelope = await single(lambda _i, _c: ["x"] * 1_200, output_schema=numbers).execute("test.run")

    assert [(c.kind, c.count) for c in envelope.meta.changes] == [("mismatch", 1_000)]
    assert envelope.meta.changes_count == 1_000


@pytest.mark.parametrize(
    ("policy", "data", "warned"),
    [
        ("cast", {"id": 7, "state": "open"}, True),
        ("warn", {"id": "7"}, True),
        ("off", {"id": "7"}, False),
    ],
)
async def test_each_operation_may_choose_its_output_policy(
    policy: Any, data: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registry = single(echo, output_schema=RESULT, output=policy)

    assert (await registry.execute("test.run", {"id": "7"})).data == data
    assert bool(caplog.records) is warned


async def test_strict_output_rejects_mismatches_and_keeps_valid_data() -> None:
    registry = single(echo, output_schema=RESULT, output="strict")

    assert (await registry.execute("test.run", {"id": 7})).data == {"id": 7}
    error = await failing(registry, {"id": "7"})

    assert error.code == ErrorCode.EXECUTION_ERROR
    assert error.details["errors"][0]["path"] == "/id"


async def test_warn_leaves_good_data_alone(caplog: pytest.LogCaptureFixture) -> None:
    registry = single(echo, output_schema=RESULT, output="warn")

    assert (await registry.execute("test.run", {"id": 7})).data == {"id": 7}
    assert not caplog.records


@pytest.mark.parametrize("result", [b"\x00", bytearray(b"\x00"), memoryview(b"\x00")], ids=type)
async def test_bytes_pass_unchanged(result: Any) -> None:
    async def handler(_input: Any, _context: OperationContext) -> Any:
        return result

    assert (
        await single(handler, output_schema={"type": "string"}).execute("test.run")
    ).data == b"\x00"


async def test_an_output_schema_that_cannot_be_compiled_counts_as_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = single(echo, output_schema={"type": "no such type"})

    assert (await registry.execute("test.run", {"x": 1})).data == {"x": 1}
    assert "output schema is not used" in caplog.text


@pytest.mark.parametrize(
    "result",
    [object(), math.nan, {"id": {1, object()}}, "\ud800", nested(10_000), {("a",): 1}, lambda: 1],
    ids=["object", "nan", "inner", "surrogate", "deep", "tuple key", "function"],
)
@pytest.mark.parametrize("schema", [{}, {"type": ["object", "array", "number"]}, RESULT], ids=str)
async def test_a_result_that_is_not_json_is_one_execution_error(result: Any, schema: Any) -> None:
    async def handler(_input: Any, _context: OperationContext) -> Any:
        return result

    registry = single(handler, output_schema=schema)

    assert (await failing(registry)).code == ErrorCode.EXECUTION_ERROR


# ---------------------------------------------------------------------- envelopes


async def test_an_envelope_a_handler_keeps_is_never_altered() -> None:
    kept = local_envelope({"id": "7", "junk": 1}, "other.operation")

    async def handler(_input: Any, _context: OperationContext) -> Any:
        return kept

    registry = single(handler, output_schema=RESULT)
    first = await registry.execute("test.run")
    second = await registry.execute("test.run")

    assert first.data == second.data == {"id": 7, "state": "open"}
    assert first.meta.changes_count == second.meta.changes_count == 3
    assert msgspec.structs.replace(first.meta, changes=(), changes_count=0) == kept.meta
    assert kept.data == {"id": "7", "junk": 1}


HTTP: Any = {"status_code": 200, "headers": {}, "content_type": ""}
FITTING = {"id": 7, "state": "open"}
MISFIT = {"id": "7"}
BLOCKS: Any = [{"type": "text", "text": "x"}]


@pytest.mark.parametrize(
    ("envelope", "data"),
    [
        (http_envelope(MISFIT, **HTTP), FITTING),
        (http_envelope(b"7", **HTTP), b"7"),
        (mcp_envelope(MISFIT, is_error=False, content=[], structured_content=MISFIT), FITTING),
        (mcp_envelope(MISFIT, is_error=True, content=[], structured_content=MISFIT), MISFIT),
        (mcp_envelope(BLOCKS, is_error=False, content=[TextContent(text="x")]), BLOCKS),
        (mcp_envelope("x", is_error=False, content=[TextContent(text="x")]), "x"),
        (mcp_envelope(MISFIT, is_error=False, content=[TextContent(text='{"id": "7"}')]), FITTING),
    ],
    ids=["http", "bytes", "structured", "tool error", "blocks only", "text", "JSON in text"],
)
async def test_an_envelope_is_normalised_only_if_a_schema_describes_its_data(
    envelope: ResponseEnvelope[Any], data: Any
) -> None:
    async def handler(_input: Any, _context: OperationContext) -> Any:
        return envelope

    result = await single(handler, output_schema=RESULT).execute("test.run")

    assert result.data == data
    assert msgspec.structs.replace(result.meta, changes=(), changes_count=0) == envelope.meta


@pytest.mark.requirement("R53")
@pytest.mark.parametrize("policy", ["cast", "strict"])
async def test_stored_data_of_the_shape_of_an_envelope_is_data(policy: Any) -> None:
    """Neither its status, its headers nor its content type reach the caller as such."""
    stored = http_envelope(
        "<script>", status_code=299, headers={"Set-Cookie": "a"}, content_type="text/html"
    ).to_wire()

    async def get(_input: Any, _context: OperationContext) -> Any:
        return stored

    envelope = await single(get, output_schema={"type": "object"}, output=policy).execute(
        "test.run"
    )

    assert is_response_envelope(stored)
    assert envelope.meta.source == "local"
    assert envelope.data == stored


@pytest.mark.requirement("R53")
async def test_strict_checks_stored_data_of_the_shape_of_an_envelope() -> None:
    registry = single(echo, output_schema=RESULT, output="strict")

    error = await failing(registry, local_envelope({"id": 7}, "test.run").to_wire())

    assert error.code == ErrorCode.EXECUTION_ERROR


async def test_a_foreign_envelope_without_a_schema_is_passed_on_unchanged() -> None:
    envelope = http_envelope({"x": 1}, status_code=200, headers={}, content_type="")

    async def handler(_input: Any, _context: OperationContext) -> Any:
        return envelope

    assert await single(handler).execute("test.run") is envelope


async def test_a_mapping_that_only_looks_like_an_envelope_is_data() -> None:
    value = {"data": 1, "meta": {"source": "ftp"}}

    assert (await single(echo).execute("test.run", value)).data == value


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("boom"),
        RecursionError("too deep"),
        MemoryError(),
        ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        StopAsyncIteration(),
        GeneratorExit(),
        BaseException("odd"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_every_exception_of_a_handler_is_one_execution_error(raised: BaseException) -> None:
    """F29."""

    async def handler(_input: Any, _context: OperationContext) -> None:
        raise raised

    registry = single(handler)
    error = await failing(registry)

    assert error.code == ErrorCode.EXECUTION_ERROR
    assert error.unexpected
    assert error.__cause__ is raised
    assert (await failing(registry)).code == ErrorCode.EXECUTION_ERROR


async def test_an_exit_in_a_thread_is_one_execution_error() -> None:
    def handler(_input: Any, _context: OperationContext) -> None:
        raise GeneratorExit

    error = await failing(single(handler))

    assert error.code == ErrorCode.EXECUTION_ERROR


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
async def test_exceptions_that_end_the_process_are_not_mapped(raised: type[BaseException]) -> None:
    async def handler(_input: Any, _context: OperationContext) -> None:
        raise raised

    with pytest.raises(raised):
        await single(handler).execute("test.run")


async def test_a_call_that_is_closed_raises_no_error() -> None:
    async def handler(_input: Any, _context: OperationContext) -> None:
        await asyncio.sleep(0)

    call = single(handler).execute("test.run")
    call.send(None)

    call.close()


@pytest.mark.parametrize("way", ["plain", "middleware", "observer", "nested"])
async def test_a_call_that_is_closed_within_a_task_raises_no_error(way: str) -> None:
    events, closed = list[CallEvent](), list[str]()

    async def handler(_input: Any, context: OperationContext) -> None:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append(context.request_id)

    async def outer(_input: Any, context: OperationContext) -> None:
        await context.env.test.run({})

    registry = single(handler)
    if way == "middleware":

        @registry.use
        async def passing(call: Call, call_next: Next) -> ResponseEnvelope[Any]:
            return await call_next(call)

    elif way == "observer":
        registry.observe(events.append)
    elif way == "nested":
        spec = OperationSpec(name="outer", namespace="test", type=OperationType.QUERY)
        registry.register(Operation(spec, outer))
    call = registry.execute("test.outer" if way == "nested" else "test.run", {})
    call.send(None)

    call.close()

    assert len(closed) == 1
    assert [event.code for event in events[1:] if isinstance(event, CallFinished)] == (
        [ErrorCode.ABORTED] if way == "observer" else []
    )


async def test_a_call_error_is_raised_unchanged() -> None:
    original = CallError("TASK_CLOSED", "closed", {"id": 1})

    async def handler(_input: Any, _context: OperationContext) -> None:
        raise original

    assert await failing(single(handler)) is original


async def test_a_declared_code_in_a_message_is_used() -> None:
    async def handler(_input: Any, _context: OperationContext) -> None:
        raise LookupError("TASK_GONE: task 7")

    error = await failing(single(handler, error_schemas=(ErrorDefinition("TASK_GONE"),)))

    assert (error.code, error.message, error.unexpected) == (
        "TASK_GONE",
        "task 7",
        False,
    )


# ---------------------------------------------------------------------- cancellation and time


async def test_the_callers_own_cancellation_propagates() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def handler(_input: Any, _context: OperationContext) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    for context in (None, soon(10_000)):
        started.clear()
        ended.clear()
        task = asyncio.create_task(single(handler).execute("test.run", None, context))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


@pytest.mark.parametrize("failure", [ValueError("cleanup"), CallError("CLEANUP", "failed")])
async def test_a_cancellation_outlives_a_cleanup_that_fails(failure: Exception) -> None:
    started = asyncio.Event()

    async def handler(_input: Any, _context: OperationContext) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise failure

    task = asyncio.create_task(single(handler).execute("test.run"))
    await started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("given", "scopes", "code"),
    [
        ("not an object", (), ErrorCode.VALIDATION_ERROR),
        ({"a": 1, "b": 2}, ("admin",), ErrorCode.ACCESS_DENIED),
    ],
)
async def test_a_call_made_while_cleaning_up_after_a_cancellation_has_its_own_error(
    given: Any, scopes: tuple[str, ...], code: ErrorCode
) -> None:
    registry = single(add, input_schema=ADDITION, access_control=AccessControl(scopes))
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append((await failing(registry, given)).code)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [code]


async def test_a_handler_that_cancels_itself_is_aborted() -> None:
    async def handler(_input: Any, _context: OperationContext) -> None:
        raise asyncio.CancelledError

    assert (await failing(single(handler))).code == ErrorCode.ABORTED


async def test_a_handler_that_cancels_its_own_task_does_not_cancel_its_caller() -> None:
    async def handler(_input: Any, _context: OperationContext) -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)

    assert (await failing(single(handler), None, soon(5000))).code == ErrorCode.ABORTED


async def test_a_deadline_ends_the_wait_and_cancels_the_handler() -> None:
    ended = asyncio.Event()

    async def handler(_input: Any, _context: OperationContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    error = await failing(single(handler), None, soon(1000))

    assert error.code == ErrorCode.TIMEOUT
    # Less than 1 s if the machine was busy before the call.
    assert re.fullmatch(r"test\.run did not finish within (1|0\.\d+) s", error.message)
    assert ended.is_set()


@pytest.mark.requirement("R32")
async def test_a_timeout_holds_even_if_the_handler_ignores_cancellation() -> None:
    """F24."""
    release = asyncio.Event()

    async def stubborn(_input: Any, _context: OperationContext) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    registry = single(stubborn)
    with time_limit(20):
        error = await failing(registry, None, soon(100))

    assert error.code == ErrorCode.TIMEOUT
    release.set()
    await registry.aclose()


async def test_a_deadline_in_seconds_is_rejected_with_advice() -> None:
    error = await failing(single(add), None, OperationContext(deadline=time.time() + 30))

    assert "milliseconds" in error.message


async def test_an_invalid_context_middleware_or_observer_is_rejected() -> None:
    registry = single(add)
    nothing: Any = None

    with pytest.raises(TypeError, match="OperationContext"):
        await registry.execute("test.run", {}, Identity("bob"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="middleware"):
        registry.use(nothing)
    with pytest.raises(TypeError, match="observer"):
        registry.observe(nothing)


async def test_a_deadline_that_has_passed_is_not_run() -> None:
    async def never(_input: Any, _context: OperationContext) -> None:
        raise AssertionError("the handler was called")

    assert (await failing(single(never), None, soon(-1))).code == ErrorCode.TIMEOUT


async def test_a_result_or_error_within_the_deadline_is_returned() -> None:
    registry = single(add)

    assert (await registry.execute("test.run", {"a": 1, "b": 2}, soon(5000))).data == 3
    assert (await failing(registry, {}, soon(5000))).code == ErrorCode.EXECUTION_ERROR


# ---------------------------------------------------------------------- threads


async def test_a_plain_function_runs_in_a_thread_and_may_return_an_awaitable() -> None:
    def handler(input: Any, _context: OperationContext) -> Any:
        return asyncio.sleep(0, "later") if input else threading.current_thread().name

    registry = single(handler)

    assert (await registry.execute("test.run")).data == "operations handler"
    assert (await registry.execute("test.run", True)).data == "later"


@pytest.mark.requirement("R31")
async def test_a_blocked_thread_is_abandoned_and_reported() -> None:
    """F23."""
    release = threading.Event()
    events: list[CallEvent] = []

    def stuck(_input: Any, _context: OperationContext) -> None:
        release.wait(60)

    registry = single(stuck)
    registry.observe(events.append)

    error = await failing(registry, None, soon(1000))

    assert error.code == ErrorCode.TIMEOUT
    assert registry.threads.abandoned == 1
    assert [type(event) for event in events] == [CallStarted, CallAbandoned, CallFinished]
    release.set()
    while registry.threads.abandoned:
        await asyncio.sleep(0.001)


# ---------------------------------------------------------------------- nested calls


def nesting(handler: Any) -> OperationRegistry:
    registry = single(handler, access_control=AccessControl(["outer"]), calls=["inner.*"])
    inner = OperationSpec(
        name="who.am-i",
        namespace="inner",
        type=OperationType.QUERY,
        access_control=AccessControl(["inner"]),
    )

    async def describe(input: Any, context: OperationContext) -> Any:
        identity = context.identity.id if context.identity else None
        return [input, context.request_id, context.parent_request_id, identity, context.deadline]

    registry.register(Operation(inner, describe))
    return registry


async def test_a_nested_call_is_a_child_of_its_caller() -> None:
    async def handler(_input: Any, context: OperationContext) -> Any:
        first = await context.env.inner.who["am-i"](1)
        second = await context.env["inner"]["who.am-i"](2)
        third = await context.env.call("inner.who.am-i", 3)
        return [context.request_id, [e.data for e in (first, second, third)]]

    alice = OperationContext(
        request_id="mine", identity=Identity("alice", ["outer"]), deadline=time.time() * 1000 + 5000
    )

    parent, children = (await nesting(handler).execute("test.run", None, alice)).data

    assert parent == alice.request_id
    assert [child[0] for child in children] == [1, 2, 3]
    assert {child[2] for child in children} == {parent}
    assert len({parent, *(child[1] for child in children)}) == 4
    assert {child[3] for child in children} == {"alice"}
    assert {child[4] for child in children} == {alice.deadline}


async def test_env_can_be_limited_to_namespaces() -> None:
    registry = nesting(echo)
    context = OperationContext(identity=Identity("alice", ["inner"]))

    env = build_env(registry, context, ["inner"])

    assert (await env.inner.who["am-i"]()).data[2] == context.request_id
    with pytest.raises(CallError) as caught:
        await env.test.run()
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    assert repr(env.test.run) == "<operation test.run>"
    for thing in (env, env.test):
        with pytest.raises(AttributeError):
            thing.__wrapped__  # noqa: B018


async def test_env_and_its_paths_list_operations() -> None:
    async def handler(_input: Any, context: OperationContext) -> Any:
        env = context.env
        return [
            list(env),
            len(env),
            ["inner" in env, "inner.who" in env, "inner.who.am-i" in env, "test" in env],
            ["inn" in env, "inner.wh" in env, "nowhere" in env, 5 in env],
            [list(env.inner), len(env.inner), list(env.inner.who), list(env.inner.who["am-i"])],
            ["who" in env.inner, "who.am-i" in env.inner, "am-i" in env.inner, 5 in env.inner],
            [bool(env), bool(env.inner.who["am-i"])],
            ["inner" in dir(env), "call" in dir(env), "who" in dir(env.inner)],
        ]

    assert (
        await nesting(handler).execute("test.run", None, OperationContext(trusted=True))
    ).data == [
        ["test", "inner"],
        2,
        [True, True, True, True],
        [False, False, False, False],
        [["who.am-i"], 1, ["am-i"], []],
        [True, True, False, False],
        [True, True],
        [True, True, True],
    ]


def test_env_lists_only_the_allowed_namespaces() -> None:
    env = build_env(nesting(echo), OperationContext(trusted=True), ["inner"])

    assert list(env) == ["inner"]
    assert "test" not in env
    assert "run" not in env.test
    assert list(env.test) == []


def test_env_lists_only_operations_that_the_nested_call_may_call() -> None:
    registry = nesting(echo)

    nobody, outer, both = (
        build_env(registry, OperationContext(identity=Identity("alice", scopes)))
        for scopes in ([], ["outer"], ["outer", "inner"])
    )

    assert [list(nobody), list(outer), list(both)] == [[], ["test"], ["test", "inner"]]
    assert [len(nobody), "inner" in outer, "inner" in both] == [0, False, True]


def test_an_env_without_a_registry_is_empty() -> None:
    env = OperationContext().env

    assert [list(env), len(env), "a" in env] == [[], 0, False]


async def test_an_env_without_a_registry_finds_nothing() -> None:
    with pytest.raises(CallError) as caught:
        await OperationContext().env.a.b()
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND


async def test_aborting_a_call_aborts_its_children() -> None:
    running, ended = asyncio.Event(), asyncio.Event()
    children: set[asyncio.Task[Any]] = set()

    async def inner(_input: Any, _context: OperationContext) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def outer(input: Any, context: OperationContext) -> None:
        if input == "inner":
            await inner(input, context)
        children.add(asyncio.create_task(context.env.call("test.run", "inner")))
        await asyncio.Event().wait()

    for context in (None, soon(10_000)):
        running.clear()
        ended.clear()
        task = asyncio.create_task(single(outer).execute("test.run", "outer", context))
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), scaled(20))
        await asyncio.wait(children)
        assert children.pop().cancelled()


async def _cut_short(registry: OperationRegistry, ready: asyncio.Event) -> None:
    """Call `test.outer` and cancel it once it is `ready`."""
    task = asyncio.create_task(registry.execute("test.outer"))
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_that_waits_for_an_aborted_nested_call_continues() -> None:
    registry = OperationRegistry()
    ready = asyncio.Event()
    bystander: list[asyncio.Task[str]] = []

    @registry.operation("test.inner")
    async def inner() -> None:
        ready.set()
        await asyncio.Event().wait()

    @registry.operation("test.outer")
    async def outer(context: OperationContext) -> None:
        async def stand_by() -> str:
            with pytest.raises(CallError) as caught:
                await context.env.test.inner()
            await asyncio.sleep(0)
            return caught.value.code

        bystander.append(asyncio.create_task(stand_by()))
        await asyncio.Event().wait()

    await _cut_short(registry, ready)

    assert await bystander[0] == ErrorCode.ABORTED
    assert bystander[0].cancelling() == 0


async def test_a_nested_subscription_ends_with_the_call_it_is_part_of() -> None:
    registry = OperationRegistry()
    ready, ended = asyncio.Event(), asyncio.Event()
    readers: list[asyncio.Task[str]] = []

    @registry.operation("test.ticks", type="subscription")
    async def ticks() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            ended.set()

    @registry.operation("test.outer")
    async def outer(context: OperationContext) -> None:
        async def read() -> str:
            with pytest.raises(CallError) as caught:
                async for _ in context.env.subscribe("test.ticks"):
                    ready.set()
            return caught.value.code

        readers.append(asyncio.create_task(read()))
        await asyncio.Event().wait()

    await _cut_short(registry, ready)

    assert await readers[0] == ErrorCode.ABORTED
    await asyncio.wait_for(ended.wait(), scaled(20))


async def test_an_aborted_subscription_raises_at_the_next_read() -> None:
    registry = OperationRegistry()
    ready = asyncio.Event()
    streams: list[Any] = []

    @registry.operation("test.ticks", type="subscription")
    async def ticks() -> AsyncIterator[int]:
        yield 1
        yield 2

    @registry.operation("test.outer")
    async def outer(context: OperationContext) -> None:
        stream = context.env.subscribe("test.ticks")
        streams.append(stream)
        await anext(stream)
        ready.set()
        await asyncio.Event().wait()

    await _cut_short(registry, ready)

    with pytest.raises(CallError) as caught:
        await anext(streams[0])
    assert caught.value.code == ErrorCode.ABORTED


async def test_a_copy_of_a_context_calls_as_its_own_caller() -> None:
    registry = OperationRegistry()

    @registry.operation("test.who")
    async def who(context: OperationContext) -> str | None:
        return context.identity.id if context.identity else None

    first = OperationContext(identity=Identity("first"), registry=registry)
    assert (await first.env.test.who()).data == "first"

    second = msgspec.structs.replace(first, identity=Identity("second"))

    assert (await second.env.test.who()).data == "second"


# ---------------------------------------------------------------------- middleware, observers, entry points


async def test_middleware_wraps_the_call_in_order() -> None:
    registry = single(add, input_schema=ADDITION)
    order: list[str] = []

    @registry.use
    async def outer(call: Call, next: Next) -> ResponseEnvelope[Any]:
        order.append(f"outer {call.spec.id}")
        envelope = await next(call)
        order.append("outer again")
        return envelope

    @registry.use
    async def inner(call: Call, next: Next) -> ResponseEnvelope[Any]:
        order.append("inner")
        return await next(dataclasses.replace(call, input={"a": 1, "b": 1}))

    assert (await registry.execute("test.run", "replaced before validation")).data == 2
    assert order == ["outer test.run", "inner", "outer again"]


async def test_a_middleware_can_be_removed_while_calls_run() -> None:
    registry = single(add, input_schema=ADDITION)
    order: list[str] = []

    @registry.use
    async def first(call: Call, next: Next) -> ResponseEnvelope[Any]:
        order.append("first")
        return await next(call)

    @registry.use
    async def second(call: Call, next: Next) -> ResponseEnvelope[Any]:
        order.append("second")
        registry.remove_middleware(first)
        return await next(call)

    for _ in range(2):
        assert (await registry.execute("test.run", {"a": 1, "b": 1})).data == 2
    assert order == ["first", "second", "second"]


async def test_a_middleware_may_replace_the_handler_and_must_return_an_envelope() -> None:
    registry = single(add)
    answers: list[Any] = [local_envelope("cached", "x"), 7]

    @registry.use
    async def cache(_call: Call, _next: Next) -> Any:
        return answers.pop(0)

    assert (await registry.execute("test.run")).data == "cached"
    assert (await failing(registry)).code == ErrorCode.EXECUTION_ERROR


@pytest.mark.requirement("R07")
async def test_a_denied_caller_never_reaches_a_middleware() -> None:
    registry = single(add, access_control=GUARD)

    @registry.use
    async def never(_call: Call, _next: Next) -> Any:
        raise AssertionError("the middleware was called")

    assert (await failing(registry)).code == ErrorCode.ACCESS_DENIED


async def test_a_middlewares_own_failure_is_mapped() -> None:
    registry = single(add)

    @registry.use
    async def broken(_call: Call, _next: Next) -> Any:
        raise RuntimeError("middleware")

    assert (await failing(registry)).code == ErrorCode.EXECUTION_ERROR


@pytest.mark.requirement("R46")
async def test_observers_see_caller_operation_and_outcome_but_no_arguments() -> None:
    registry = single(add, access_control=GUARD)
    events: list[CallEvent] = []

    @registry.observe
    def broken(_event: CallEvent) -> None:
        raise RuntimeError("never mind me")

    registry.observe(events.append)
    alice = Identity("alice", ["test:run"])
    context = OperationContext(request_id="mine", identity=alice, parent_request_id="p")

    await registry.execute("test.run", {"a": 1, "b": 40}, context)
    await failing(registry, None, OperationContext(identity=Identity("eve")))
    with pytest.raises(CallError):
        await registry.execute("test.nope", None, context)

    assert [type(event) for event in events] == [CallStarted, CallFinished] * 3
    first, last = events[:2]
    assert isinstance(first, CallStarted)
    assert isinstance(last, CallFinished)
    assert (first.operation_id, first.identity_id, first.parent_request_id) == (
        "test.run",
        "alice",
        "p",
    )
    assert first.request_id == last.request_id == context.request_id
    assert last.duration >= 0
    codes = [event.code for event in events if isinstance(event, CallFinished)]
    assert codes == [None, ErrorCode.ACCESS_DENIED, ErrorCode.OPERATION_NOT_FOUND]


async def test_the_failures_of_each_observer_are_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = single(add)

    @registry.observe
    def first(_event: CallEvent) -> None:
        raise RuntimeError("first")

    @registry.observe
    def second(_event: CallEvent) -> None:
        raise RuntimeError("second")

    for _ in range(10):
        await registry.execute("test.run", {"a": 1, "b": 40})

    reasons = [
        str(record.exc_info[1])
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.exc_info
    ]
    assert reasons == ["first", "second"]


async def test_a_cancelled_call_is_observed_as_aborted() -> None:
    started = asyncio.Event()
    events: list[CallEvent] = []

    async def handler(_input: Any, _context: OperationContext) -> None:
        started.set()
        await asyncio.Event().wait()

    registry = single(handler)
    registry.observe(events.append)
    task = asyncio.create_task(registry.execute("test.run"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert isinstance(events[-1], CallFinished)
    assert events[-1].code == ErrorCode.ABORTED


@pytest.mark.requirement("R31")
@pytest.mark.parametrize("report", ["progress", "log"])
async def test_a_handler_that_only_reports_notices_its_cancellation(report: str) -> None:
    async def ignore(*_: Any) -> None:
        pass

    async def handler(_input: Any, context: OperationContext) -> str:
        for number in range(1_000_000):
            if report == "progress":
                await context.progress(number)
            else:
                await context.log("info", number)
        return "never cancelled"

    channel = CallerChannel(progress=ignore, log=ignore)
    context = msgspec.structs.replace(soon(), channel=channel)

    assert (await failing(single(handler), None, context)).code == ErrorCode.TIMEOUT


async def test_an_entry_point_offers_its_channels(caplog: pytest.LogCaptureFixture) -> None:
    carried: list[Any] = []

    async def carry(*args: Any) -> Any:
        carried.append(args)
        return {"action": "accept"}

    async def handler(_input: Any, context: OperationContext) -> Any:
        await context.progress(1, 2, "half")
        await context.log("warning", "careful")
        return [await context.elicit("name?", {}), await context.sample({"messages": []})]

    registry = single(handler)
    full = CallerChannel(progress=carry, log=carry, elicit=carry, sample=carry)

    envelope = await registry.execute("test.run", None, OperationContext(channel=full))

    assert envelope.data == [{"action": "accept"}] * 2
    assert carried == [
        (1, 2, "half"),
        ("warning", "careful", None),
        ("name?", {}),
        ({"messages": []},),
    ]
    caplog.set_level(logging.INFO)
    no_questions = CallerChannel()
    assert (
        await failing(registry, None, OperationContext(channel=no_questions))
    ).code == ErrorCode.UNAVAILABLE
    assert "careful" in caplog.text
    only_elicit = OperationContext(channel=CallerChannel(elicit=carry))
    assert (await failing(registry, None, only_elicit)).code == ErrorCode.UNAVAILABLE


def test_request_ids_are_128_random_bits_made_when_read() -> None:
    first, second = OperationContext(), OperationContext()

    assert first.request_id == first.request_id
    assert first.request_id != second.request_id
    assert len(bytes.fromhex(first.request_id)) == 16
    assert OperationContext(request_id="mine").request_id == "mine"


# ---------------------------------------------------------------------- what is not JSON


@pytest.mark.parametrize(
    "made",
    [
        http_envelope(
            {"at": math.nan}, status_code=200, headers={}, content_type="application/json"
        ),
        mcp_envelope({"at": object()}, is_error=False, content=[]),
        local_envelope({"at": 10**5000}, "test.run"),
    ],
)
async def test_an_envelope_made_by_hand_holds_json_too(made: ResponseEnvelope[Any]) -> None:
    async def handler(_input: Any, _context: OperationContext) -> Any:
        return made

    registry = single(handler)
    error = await failing(registry)
    assert error.code == ErrorCode.EXECUTION_ERROR
    assert error.details["path"] == "/at"

    spare = single(echo)

    @spare.use
    async def answer(_call: Call, _next: Next) -> ResponseEnvelope[Any]:
        return made

    assert (await failing(spare)).code == ErrorCode.EXECUTION_ERROR


async def test_data_of_an_envelope_is_converted_to_json() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)

    async def handler(_input: Any, _context: OperationContext) -> Any:
        return http_envelope(
            {"at": moment}, status_code=200, headers={}, content_type="application/json"
        )

    assert (await single(handler).execute("test.run")).data == {"at": "2026-01-02T00:00:00Z"}


async def test_an_integer_that_cannot_be_written_is_not_json() -> None:
    """R27, for inputs and for results."""
    error = await failing(single(echo), {"n": 10**5000})
    assert error.code == ErrorCode.VALIDATION_ERROR
    assert error.details["errors"][0]["path"] == "/n"

    async def handler(_input: Any, _context: OperationContext) -> Any:
        return {"n": -(10**5000)}

    error = await failing(single(handler))
    assert error.code == ErrorCode.EXECUTION_ERROR
    assert error.details["path"] == "/n"

    async def large(_input: Any, _context: OperationContext) -> int:
        return 10**5000

    error = await failing(single(large, output_schema={"type": "integer"}))
    assert error.code == ErrorCode.EXECUTION_ERROR
