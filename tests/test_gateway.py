import asyncio
from typing import Any

import pytest

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
)
from operations.front.front import Front
from operations.front.search import MAX_BATCH, Gateway, OperationCall, visible_specs, words_of

ANYONE = OperationContext()
ADMIN = OperationContext(identity=Identity("root", ["admin"]))


async def echo(input: Any, context: OperationContext) -> Any:
    return [input, context.parent_request_id, context.trusted]


def build() -> OperationRegistry:
    registry = OperationRegistry()
    operations: dict[str, dict[str, Any]] = {
        "task.list": {"description": "All open tasks.", "tags": ("task",), "type": "query"},
        "task.listArchived": {"description": "Closed tasks.", "type": "query"},
        "task.create": {"title": "Add a task"},
        "user.get": {"description": "One user, with the tasks it owns.", "type": "query"},
        "secret.launch": {"access_control": AccessControl(["admin"]), "tags": ("task",)},
    }
    for operation_id, fields in operations.items():
        namespace, _, name = operation_id.partition(".")
        kind = fields.pop("type", "mutation")
        registry.register(
            Operation(
                OperationSpec(
                    name=name,
                    namespace=namespace,
                    type=OperationType(kind),
                    **fields,
                ),
                echo,
            )
        )
    return registry


async def ids(
    gateway: Gateway, query: str, context: OperationContext = ANYONE, **options: Any
) -> list[str]:
    return [found.id for found in await gateway.search(query, context, **options)]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("list", "task.list"),
        ("archived tasks", "task.listArchived"),
        ("list archived", "task.listArchived"),
        ("add task", "task.create"),
        ("user", "user.get"),
        ("owns", "user.get"),
        ("USER", "user.get"),
        ("creat", "task.create"),
    ],
)
async def test_the_best_match_comes_first(query: str, first: str) -> None:
    assert (await ids(Gateway(build()), query))[0] == first


async def test_an_unmatched_query_lists_nothing_and_an_empty_query_lists_all() -> None:
    gateway = Gateway(build())

    assert await ids(gateway, "zebra") == []
    assert await ids(gateway, "") == ["task.create", "task.list", "task.listArchived", "user.get"]
    assert await ids(gateway, "", limit=2) == ["task.create", "task.list"]


async def test_a_search_can_be_narrowed() -> None:
    gateway = Gateway(build())

    assert await ids(gateway, "", namespace="user") == ["user.get"]
    assert await ids(gateway, "", tags=["task"]) == ["task.list"]
    assert await ids(gateway, "", type=OperationType.MUTATION) == ["task.create"]


@pytest.mark.requirement("R07")
async def test_a_caller_does_not_find_operations_without_access() -> None:
    registry = build()
    gateway = Gateway(registry)

    assert "secret.launch" not in await ids(gateway, "launch")
    assert await ids(gateway, "launch", ADMIN) == ["secret.launch"]
    assert "secret.launch" not in {spec.id for spec in visible_specs(registry, ANYONE)}
    assert "secret.launch" in {
        spec.id for spec in visible_specs(registry, OperationContext(trusted=True))
    }
    for unseen in ("secret.launch", "no.such"):
        with pytest.raises(CallError) as caught:
            gateway.schema(unseen, ANYONE)
        assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    assert gateway.schema("secret.launch", ADMIN)["name"] == "launch"


async def test_a_change_of_the_registry_is_detected() -> None:
    registry = build()
    gateway = Gateway(registry)
    assert await ids(gateway, "user")

    registry.unregister("user.get")

    assert await ids(gateway, "user") == []


@pytest.mark.requirement("R07")
async def test_a_call_runs_as_the_caller_and_is_not_a_nested_call() -> None:
    gateway = Gateway(build())

    _, parent, trusted = (await gateway.call("task.list", 1, ANYONE)).data

    assert (parent, trusted) == (ANYONE.request_id, False)
    with pytest.raises(CallError) as caught:
        await gateway.call("secret.launch", 1, ANYONE)
    assert caught.value.code == ErrorCode.ACCESS_DENIED


async def test_a_batch_returns_the_results_in_order() -> None:
    front = Front(build())
    calls = [OperationCall(operation="task.list", input=n) for n in range(20)]
    calls.insert(3, OperationCall(operation="secret.launch"))

    answers = await front.batch(calls, ANYONE, "caller")

    assert answers.pop(3)["error"]["code"] == ErrorCode.OPERATION_NOT_FOUND
    assert [answer["envelope"]["data"][0] for answer in answers] == list(range(20))


async def test_a_batch_is_bounded_in_size_and_in_calls_at_a_time() -> None:
    registry, running, most = OperationRegistry(), 0, 0

    @registry.operation("test.run")
    async def run() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    calls = [OperationCall(operation="test.run")] * (MAX_BATCH + 1)

    await Front(registry).batch(calls[1:], ANYONE, "caller")

    assert most == 8
    with pytest.raises(CallError) as caught:
        await Front(registry).batch(calls, ANYONE, "caller")
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


def test_words_are_found_in_every_spelling() -> None:
    expected = ["list", "open", "tasks", "2"]

    for text in ("listOpenTasks2", "list_open_tasks_2", "list-open.tasks 2", "LIST open Tasks 2"):
        assert words_of(text) == expected
    assert words_of("HTTPServer") == ["http", "server"]
    assert words_of("Größe 大小") == ["größe", "大小"]
