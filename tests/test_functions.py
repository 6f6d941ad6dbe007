"""Functions and methods as operations, called by name or with types."""

import asyncio
import pickle
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import date
from functools import wraps
from typing import Any, ParamSpec, TypeVar, assert_type

import pytest

import operations
from operations import (
    CallError,
    ErrorCode,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    RegistrationError,
    ResponseEnvelope,
    Schema,
    collect_errors,
    from_schema,
    local_envelope,
    operation,
)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Task:
    title: str
    due: date


@operation("task.create", scopes=["task:write"])
async def create(title: str, due: date, context: OperationContext) -> Task:
    return Task(title, due)


@operation("task.titles", type="query")
def titles(first: Task, *, others: int = 0) -> list[str]:
    return [first.title] * (1 + others)


@operation("task.plan")
async def plan(title: str, context: OperationContext) -> Task:
    return await context.call(create, title, due=date(2026, 1, 2), context=context)


@operation("task.wrapped")
async def wrapped() -> ResponseEnvelope[Task]:
    return local_envelope(Task("a", date(2026, 1, 2)), "task.wrapped")


WRITER = OperationContext(identity=Identity(id="ann", scopes=["task:write"]))


@pytest.fixture
def registry() -> OperationRegistry:
    return OperationRegistry([create, titles, plan, wrapped])


async def test_a_typed_call_returns_the_annotated_type(registry: OperationRegistry) -> None:
    task = await registry.call(create, "Buy milk", due=date(2026, 1, 2), context=WRITER)

    assert task == Task("Buy milk", date(2026, 1, 2))
    assert await registry.call(titles, task, others=1) == ["Buy milk", "Buy milk"]


async def test_a_typed_call_is_checked_as_any_other(registry: OperationRegistry) -> None:
    with pytest.raises(CallError) as denied:
        await registry.call(create, "Buy milk", date(2026, 1, 2))
    with pytest.raises(CallError) as missing:
        await registry.call(create, "Buy milk", context=WRITER)  # type: ignore[arg-type]

    assert denied.value.code == ErrorCode.ACCESS_DENIED
    assert missing.value.code == ErrorCode.VALIDATION_ERROR
    assert "due" in str(missing.value)


async def test_a_handler_calls_another_function_with_types(registry: OperationRegistry) -> None:
    assert await registry.call(plan, "Rest", context=WRITER) == Task("Rest", date(2026, 1, 2))


async def test_an_annotated_envelope_is_returned_with_typed_data(
    registry: OperationRegistry,
) -> None:
    envelope = await registry.call(wrapped)

    assert envelope.data == Task("a", date(2026, 1, 2))
    assert envelope.meta.source == "local"


async def test_data_that_does_not_match_the_annotation_names_its_paths() -> None:
    spec = OperationSpec(namespace="task", name="create", type=OperationType.MUTATION)
    registry = OperationRegistry()
    registry.register(Operation(spec, lambda *_: {"title": 5, "due": "2026-01-02"}))

    with pytest.raises(CallError) as error:
        await registry.call(create, "a", date(2026, 1, 2))

    assert error.value.code == ErrorCode.EXECUTION_ERROR
    assert error.value.details["errors"][0]["path"] == "/title"


async def test_only_marked_functions_can_be_called_with_types(registry: OperationRegistry) -> None:
    with pytest.raises(TypeError, match="marked with @operation"):
        await registry.call(len, "a")
    with pytest.raises(TypeError, match=r"context=\.\.\."):
        await registry.call(plan, "a", WRITER)
    with pytest.raises(TypeError, match=r"task\.titles: got an unexpected keyword"):
        await registry.call(titles, wrong=1)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]


async def test_a_subscription_called_with_types_names_subscribe() -> None:
    registry = OperationRegistry()

    @registry.operation("clock.ticks")
    async def ticks() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r'use subscribe\("clock\.ticks", \.\.\.\)'):
        await registry.call(ticks)


async def test_a_function_that_returns_an_awaitable_keeps_its_result_type() -> None:
    registry = OperationRegistry()

    def counted(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @wraps(function)
        async def call(*arguments: P.args, **named: P.kwargs) -> T:
            return await function(*arguments, **named)

        return call

    @registry.operation("number.double", type="query")
    @counted
    async def double(number: int) -> int:
        return 2 * number

    @registry.operation("number.quadruple", type="query")
    async def quadruple(number: int, context: OperationContext) -> int:
        doubled = await context.call(double, number)
        assert_type(doubled, int)
        return 2 * doubled

    assert assert_type(await registry.call(double, 2), int) == 4
    assert await registry.call(quadruple, 2) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "x"}, "there is no option 'name'. Options are access, authority, calls"),
        ({"type": "read"}, "type must be one of query, mutation, subscription"),
        ({"timeout": "5s"}, "timeout must be a positive number, not '5s'"),
        ({"version": 2}, "version must be of type str, not 2"),
        ({"title": 4}, "title must be of type str, not 4"),
        ({"description": None}, "description must be of type str, not None"),
        ({"meta": "x"}, "meta must be of type dict, not 'x'"),
        ({"tags": ["a", 1]}, "a tag must be of type str, not 1"),
        ({"errors": ["LATE"]}, "an error must be of type ErrorDefinition, not 'LATE'"),
        (
            {"access": {"required_scopes": ["x"]}},
            "the access rule must be of type AccessControl, not {'required_scopes': ['x']}",
        ),
    ],
)
def test_a_wrong_option_is_named_with_the_right_ones(options: Any, message: str) -> None:
    with pytest.raises((TypeError, RegistrationError), match=re.escape(message)):
        OperationRegistry().operation("task.name", **options)(titles)


async def test_a_timeout_ends_one_call() -> None:
    registry = OperationRegistry()

    @registry.operation("slow.wait")
    async def wait() -> None:
        await asyncio.Event().wait()

    soon = OperationContext(deadline=0.0)
    for arguments in ({"timeout": 0.01}, {"timeout": 60, "context": soon}):
        with pytest.raises(CallError) as error:
            await registry.execute("slow.wait", **arguments)
        assert error.value.code == ErrorCode.TIMEOUT


class Tasks:
    """A service with state."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    @operation("tasks.add")
    async def add(self, title: str) -> int:
        """Add a task.

        Args:
            title: The text.
        """
        self.titles.append(title)
        return len(self.titles)

    @operation("tasks.count", type="query")
    def count(self) -> int:
        return len(self.titles)

    @property
    def broken(self) -> None:
        raise RuntimeError("read")


class MoreTasks(Tasks):
    @operation("tasks.clear")
    async def clear(self) -> None:
        self.titles.clear()


async def test_the_methods_of_an_object_are_operations() -> None:
    service, registry = MoreTasks(), OperationRegistry()

    added = registry.register_object(service)

    assert {each.spec.id for each in added} == {"tasks.add", "tasks.count", "tasks.clear"}
    spec = registry.get_spec("tasks.add")
    assert spec is not None
    assert list(spec.input_schema.document["properties"]) == ["title"]  # type: ignore[index]
    assert spec.description == "Add a task."
    assert (await registry.execute("tasks.add", {"title": "a"})).data == 1
    assert await registry.call(service.add, "b") == 2
    assert await registry.call(service.count) == 2


async def test_bound_methods_can_be_registered_alone() -> None:
    service, registry = Tasks(), OperationRegistry()
    registry.register(service.count)

    class Plain:
        async def double(self, number: int) -> int:
            return number * 2

    doubled = registry.operation("plain.double")(Plain().double)

    assert (await registry.execute("tasks.count")).data == 0
    assert (await registry.execute("plain.double", {"number": 4})).data == 8
    assert await registry.call(doubled, 5) == 10


async def test_a_method_of_another_object_is_not_called() -> None:
    registry = OperationRegistry()
    registry.register_object(Tasks())

    with pytest.raises(TypeError, match="registered for another object"):
        await registry.call(Tasks().count)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def call(*arguments: Any, **named: Any) -> Any:
        return await function(*arguments, **named)

    return call


class Mixed:
    @operation("mixed.wrapped")
    @logged
    async def wrapped(self, number: int) -> int:
        return number

    @classmethod
    @operation("mixed.of_class")
    async def of_class(cls, number: int) -> str:
        return f"{cls.__name__} {number}"

    @staticmethod
    @operation("mixed.static")
    async def static(number: int) -> int:
        return number

    @operation("mixed.of_class_below")
    @classmethod
    async def of_class_below(cls, number: int) -> str:
        return f"{cls.__name__} {number}"

    @operation("mixed.static_below")
    @staticmethod
    async def static_below(number: int) -> int:
        return number


async def test_methods_of_every_kind_are_operations() -> None:
    service, registry = Mixed(), OperationRegistry()

    registry.register_object(service)

    expected_results = {
        "wrapped": 1,
        "of_class": "Mixed 1",
        "static": 1,
        "of_class_below": "Mixed 1",
        "static_below": 1,
    }
    for name, expected in expected_results.items():
        assert (await registry.execute(f"mixed.{name}", {"number": 1})).data == expected
        assert await registry.call(getattr(service, name), 1) == expected


async def test_an_argument_cannot_be_given_twice() -> None:
    registry = OperationRegistry()

    @registry.operation("many.values")
    async def values(x: int, /, **more: int) -> int:
        return x

    assert await registry.call(values, 1, y=2) == 1
    with pytest.raises(TypeError, match="multiple values for x"):
        await registry.call(values, 1, x=2)


def test_a_method_without_its_object_is_rejected() -> None:
    registry = OperationRegistry()

    with pytest.raises(RegistrationError, match="register_object"):
        registry.register(Tasks.add)
    with pytest.raises(RegistrationError, match="list has no operations"):
        registry.register_object([])
    with pytest.raises(RegistrationError, match=r"scan_operations\(\"operations\"\)"):
        registry.register_object(operations)
    assert len(registry) == 0


async def test_a_reused_context_gets_a_new_request_id_per_call() -> None:
    registry, seen = OperationRegistry(), list[str]()

    @registry.operation("id.read", type="query")
    async def read(context: OperationContext) -> None:
        seen.append(context.request_id)

    for context in (OperationContext(), OperationContext(request_id="mine")):
        for _ in range(2):
            await registry.execute("id.read", context=context)

    assert len(set(seen[:2])) == 2
    assert seen[2:] == ["mine", "mine"]


def test_names_of_other_modules_are_reported_with_their_module() -> None:
    missing: Any = operations
    with pytest.raises(ImportError, match=re.escape("from operations.server import create_app")):
        _ = missing.create_app
    with pytest.raises(AttributeError, match="nothing_at_all"):
        _ = missing.nothing_at_all


def test_a_wrong_value_of_an_enum_is_corrected() -> None:
    for schema in (
        {"enum": ["small", "large", 3]},
        {"anyOf": [{"const": "small"}, {"const": "large"}]},
    ):
        (error,) = collect_errors(from_schema(schema), "larg")
        assert error.message.endswith('Did you mean "large"?')
        (error,) = collect_errors(from_schema(schema), "zzz")
        assert "Did you mean" not in error.message


def test_a_spec_is_pickled_and_a_context_says_why_not() -> None:
    used = Schema({"properties": {"a": {"default": 1}}})
    used.cast({})
    spec = OperationSpec(namespace="a", name="b", type=OperationType.QUERY, output_schema=used)
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 - its own
    with pytest.raises(TypeError, match="identity"):
        pickle.dumps(OperationContext())
