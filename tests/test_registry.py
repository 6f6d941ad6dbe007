"""Registering and looking up; calls themselves are in test_calls.py and test_streams.py."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support import soon

from operations import (
    AccessControl,
    CallError,
    CallEvent,
    ErrorCode,
    ErrorDefinition,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    RegistrationError,
    ResponseEnvelope,
    local_envelope,
    operation,
)
from operations.contract.events import RegistryChanged


def spec(name: str = "get", **fields: Any) -> OperationSpec:
    return OperationSpec(name=name, namespace="task", type=OperationType.QUERY, **fields)


async def answer(_input: Any, _context: OperationContext) -> int:
    return 42


async def items(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
    yield 1


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"description": "\ud800"}, "/description contains a lone surrogate"),
        ({"tags": ["a", "\ud800"]}, "/tags/1 contains a lone surrogate"),
        ({"input_schema": {"properties": {"a": {"default": "\ud800"}}}}, "/inputSchema/properties/a/default"),
        ({"output_schema": {"default": object()}}, "/outputSchema/default is an object"),
        ({"error_schemas": [ErrorDefinition("LATE", "\ud800")]}, "/errorSchemas/0/description"),
        ({"access_control": AccessControl(required_scopes=["\ud800"])}, "/requiredScopes/0"),
        ({"meta": {"a": object()}}, "/_meta/a is an object"),
    ],
)  # fmt: skip
def test_a_spec_that_is_not_json_is_rejected(
    fields: Any, place: str, registry: OperationRegistry
) -> None:
    with pytest.raises(RegistrationError, match=rf"task\.get: the spec is not JSON: {place}"):
        registry.register(Operation(spec(**fields), answer))
    assert len(registry) == 0


def test_a_registry_looks_like_a_collection(registry: OperationRegistry) -> None:
    first = registry.register(Operation(spec("a"), answer))
    assert repr(registry) == "<OperationRegistry of 1 operation>"
    second = registry.register(Operation(spec("b"), answer))

    assert list(registry) == [first, second]
    assert len(registry) == 2
    assert "task.a" in registry
    assert "task.c" not in registry
    assert registry.get("task.a") is first
    assert registry.get_by_name("task", "b") is second
    assert registry.get_spec("task.a") is first.spec
    assert registry.get_handler("task.a") is answer
    assert registry.specs() == [first.spec, second.spec]
    assert repr(registry) == "<OperationRegistry of 2 operations>"
    for missing in (registry.get("x.y"), registry.get_spec("x.y"), registry.get_handler("x.y")):
        assert missing is None


def test_an_id_can_be_registered_once(registry: OperationRegistry) -> None:
    registry.register(Operation(spec(), answer))

    with pytest.raises(RegistrationError, match=r"task\.get is already registered"):
        registry.register(Operation(spec(), answer))
    replacement = registry.register(Operation(spec(description="new"), answer), replace=True)

    assert registry.get("task.get") is replacement


def test_register_all_adds_everything_or_nothing(registry: OperationRegistry) -> None:
    registry.register(Operation(spec("taken"), answer))

    for bad in (
        [Operation(spec("a"), answer), Operation(spec("taken"), answer)],
        [Operation(spec("a"), answer), Operation(spec("a"), answer)],
        [Operation(spec("a"), answer), "nonsense"],
    ):
        with pytest.raises(RegistrationError):
            registry.register_all(bad)  # type: ignore[arg-type]

    assert [known.id for known in registry.specs()] == ["task.taken"]


def failing() -> Iterator[Operation]:
    yield Operation(spec("a"), answer)
    raise RuntimeError("the importer broke")


def test_a_source_that_fails_leaves_no_operations(registry: OperationRegistry) -> None:
    with pytest.raises(RuntimeError, match="the importer broke"):
        registry.register_all(failing())

    assert len(registry) == 0


def not_marked() -> None: ...


def numbers(_input: Any, _context: OperationContext) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (not_marked, "is not an operation"),
        (42, "is not an operation"),
        (Operation(spec(), 42), "cannot be called"),  # type: ignore[arg-type]
        (Operation("task.get", answer), "is not an OperationSpec"),  # type: ignore[arg-type]
        (Operation(spec(), items), "its handler is a generator"),
        (Operation(spec(), numbers), "its handler is a generator"),
        (
            Operation(
                OperationSpec(name="x", namespace="y", type=OperationType.SUBSCRIPTION), numbers
            ),
            "async generator",
        ),
    ],
)
def test_invalid_settings_are_rejected_with_a_reason(
    registry: OperationRegistry, candidate: Any, why: str
) -> None:
    with pytest.raises(RegistrationError, match=why):
        registry.register(candidate)

    assert len(registry) == 0


async def test_a_spec_can_get_its_handler_later(registry: OperationRegistry) -> None:
    registry.register_spec(spec())
    assert registry.get_handler("task.get") is None
    with pytest.raises(CallError) as caught:
        await registry.execute("task.get")
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND

    registry.register_handler("task.get", answer)

    assert registry.get_handler("task.get") is answer
    assert (await registry.execute("task.get")).data == 42


def test_a_handler_can_be_added_only_to_a_spec_without_a_handler(
    registry: OperationRegistry,
) -> None:
    with pytest.raises(RegistrationError, match="call register_spec first"):
        registry.register_handler("task.get", answer)
    registry.register(Operation(spec(), answer))
    with pytest.raises(RegistrationError, match="has a handler already"):
        registry.register_handler("task.get", answer)

    async def other(_input: Any, _context: OperationContext) -> None: ...

    registry.register_handler("task.get", other, replace=True)

    assert registry.get_handler("task.get") is other


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("task.ad", "task.add"),
        ("taks.add", "task.add"),
        ("task-add", "task.add"),
        ("task.nestd", "task.nested"),
        # A shared namespace alone does not make two ids alike.
        ("task.nosuch", None),
        ("task.secret", None),
        ("task.", None),
    ],
)
async def test_an_unknown_id_is_reported_with_a_similar_one(
    given: str, meant: str | None, registry: OperationRegistry
) -> None:
    for name in ("add", "block", "nested"):
        registry.operation(f"task.{name}")(lambda: 1)

    with pytest.raises(CallError) as caught:
        await registry.execute(given, {})

    suggested = "" if meant is None else f' Did you mean "{meant}"?'
    assert caught.value.message.partition(f"{given!r}")[2].removeprefix(".") == suggested


async def test_an_unregistered_operation_is_not_found(registry: OperationRegistry) -> None:
    registered = registry.register(Operation(spec(), answer))
    await registry.execute("task.get")

    assert registry.unregister("task.get") is registered

    with pytest.raises(CallError) as caught:
        await registry.execute("task.get")
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    with pytest.raises(KeyError):
        registry.unregister("task.get")


async def test_a_replaced_operation_runs_its_new_handler(registry: OperationRegistry) -> None:
    registry.register(Operation(spec(), answer))
    assert (await registry.execute("task.get")).data == 42

    async def other(_input: Any, _context: OperationContext) -> int:
        return 43

    registry.register(Operation(spec(), other), True)

    assert (await registry.execute("task.get")).data == 43


def test_a_replaced_operation_is_not_found_by_the_id_of_its_predecessor(
    registry: OperationRegistry,
) -> None:
    def rename(given: Operation) -> Operation:
        return replace(given, spec=replace(given.spec, name="new", title="Adapted"))

    registry.adapt(rename)
    registry.register(Operation(spec("old"), answer))
    registry.register(Operation(spec("new"), answer), replace=True)
    registry.unregister("task.new")

    assert registry.registered("task.old") is None
    registry.adapt_all()


@pytest.mark.requirement("R24")
def test_a_rule_for_a_removed_operation_gives_no_access_to_another_one(
    registry: OperationRegistry,
) -> None:
    open_to_all = Operation(spec(), answer)
    registry.register(open_to_all)
    access = AccessControl(["a"], required_scopes_any=["b", "c"])
    registry.register(replace(open_to_all, spec=spec(access_control=access)), replace=True)
    registry.remove_imported(open_to_all)

    same = registry.restricted(Operation(spec(), items))
    admin = AccessControl(["admin"], required_scopes_any=["d"])
    other = registry.restricted(Operation(spec(access_control=admin), items))

    assert same.spec.access_control == access
    assert other.spec.access_control == AccessControl(
        ["a", "admin", "b", "c"], required_scopes_any=["d"]
    )


def test_changes_are_events(registry: OperationRegistry) -> None:
    seen: list[CallEvent] = []
    stop = registry.observe(seen.append)

    registry.register(Operation(spec(), answer))
    registry.register(Operation(spec(), answer), replace=True)
    registry.unregister("task.get")
    stop()
    stop()
    registry.register(Operation(spec(), answer))

    assert [event.change for event in seen if isinstance(event, RegistryChanged)] == [
        "added",
        "replaced",
        "removed",
    ]


def test_a_marked_function_registers_and_stays_a_function(registry: OperationRegistry) -> None:
    @operation("math.add", type="query", scopes=["math"], tags=["sum"])
    def add(a: int, b: int = 2) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    registered = registry.register(add)

    assert add(1) == 3
    assert registered.spec.id == "math.add"
    assert registered.spec.type is OperationType.QUERY
    assert registered.spec.access_control == AccessControl(["math"])
    assert registered.spec.description == "Add two numbers."
    assert registered.spec.tags == ("sum",)
    assert registered.spec.input_schema.check({"a": 1})
    assert not registered.spec.input_schema.check({"b": 1})
    assert not registered.spec.input_schema.check({"a": 1, "c": 1})


class Service:
    def __init__(self, *names: str) -> None:
        self.operations = [Operation(spec(name), answer) for name in names]
        self.closed = 0

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    async def aclose(self) -> None:
        self.closed += 1


class ContextManager(Service):
    aclose: Any = property()

    async def __aexit__(self, *_: object) -> None:
        self.closed += 1


class BrokenService(Service):
    async def aclose(self) -> None:
        raise RuntimeError("stuck")


async def test_a_registry_closes_the_services_it_was_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, broken, scope = Service("a"), BrokenService("b"), ContextManager("c")
    async with OperationRegistry() as registry:
        for service in (good, broken, scope):
            registry.register_all(service)
        assert (await registry.execute("task.b")).data == 42

    await registry.aclose()

    assert (good.closed, scope.closed) == (1, 1)
    assert "did not close cleanly" in caplog.text


class Elsewhere:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    async def call(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> ResponseEnvelope[Any]:
        self.calls.append((operation_id, input))
        return local_envelope(f"from {context.request_id[:0]}afar", operation_id)

    async def subscribe(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        for index in range(2):
            yield local_envelope(index, operation_id)


async def test_an_operation_without_a_local_handler_goes_to_the_remote() -> None:
    remote = Elsewhere()
    registry = OperationRegistry(remote=remote)
    registry.register_spec(spec(input_schema={"type": "object"}))
    registry.register_spec(
        OperationSpec(name="watch", namespace="task", type=OperationType.SUBSCRIPTION)
    )

    assert (await registry.execute("task.get", {"id": 1})).data == "from afar"
    assert (await registry.execute("other.thing", 7)).data == "from afar"
    assert [e.data async for e in registry.subscribe("task.watch")] == [0, 1]
    assert [e.data async for e in registry.subscribe("other.watch")] == [0, 1]
    with pytest.raises(CallError) as caught:
        await registry.execute("task.get", "not an object")
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    with pytest.raises(CallError) as caught:
        await registry.execute("no id at all")
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    assert remote.calls == [("task.get", {"id": 1}), ("other.thing", 7)]


async def test_closing_waits_for_handlers_that_are_being_cancelled() -> None:
    cleaned = asyncio.Event()

    async def slow_to_leave(_input: Any, _context: OperationContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            cleaned.set()

    async with OperationRegistry([Operation(spec(), slow_to_leave)]) as registry:
        with pytest.raises(CallError):
            await registry.execute("task.get", None, soon(500))

    assert cleaned.is_set()


async def test_a_watcher_is_notified_of_changes_but_not_of_calls(
    registry: OperationRegistry,
) -> None:
    changes: list[object] = []
    stop = registry.watch(changes.append)

    @registry.operation("a.b")
    async def b() -> int:
        return 1

    await registry.execute("a.b", {})
    registry.unregister("a.b")
    stop()
    registry.operation("a.b")(b)

    assert changes == [
        RegistryChanged(operation_id="a.b", change="added"),
        RegistryChanged(operation_id="a.b", change="removed"),
    ]


def test_a_service_that_changes_gets_the_registries_of_its_operations() -> None:
    class Service(list[Operation]):
        def attach(self, registry: OperationRegistry) -> None:
            self.registry = registry

    service = Service()
    registry = OperationRegistry()
    registry.register_all(service)

    assert service.registry is registry


async def test_an_id_and_a_function_are_not_confused(registry: OperationRegistry) -> None:
    @registry.operation("task.count")
    async def count() -> int:
        return 1

    with pytest.raises(CallError, match=r"use registry\.call"):
        await registry.execute(count)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use execute for an id"):
        await registry.call("task.count")  # type: ignore[call-overload]


def test_an_unknown_type_is_rejected_with_the_known_types(registry: OperationRegistry) -> None:
    with pytest.raises(RegistrationError, match="one of query, mutation, subscription"):
        registry.operation("task.count", type="qery")(not_marked)  # type: ignore[arg-type]
