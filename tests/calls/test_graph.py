"""The call graph."""

import resource
from pathlib import Path
from typing import Any

import pytest
from tests.limits import processor_limit

from operations.base.errors import CallError
from operations.calls import (
    CallGraph,
    CallRecord,
    PendingRequestMap,
    read_graph,
    render_tree,
    serve_calls,
)
from operations.contract.context import OperationContext
from operations.pubsub.memory import MemoryTarget
from operations.recorder.graph import spans
from operations.registry import OperationRegistry


def build() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("leaf.ok", type="query")
    async def ok() -> int:
        return 1

    @registry.operation("leaf.bad", type="query")
    async def bad() -> int:
        raise CallError("BAD", "no")

    @registry.operation("leaf.many")
    async def many() -> Any:
        for index in range(3):
            yield index

    @registry.operation("root.run", type="query")
    async def run(context: OperationContext) -> int:
        await context.env.leaf.ok({})
        with pytest.raises(CallError):
            await context.env.leaf.bad({})
        async for _ in context.env.subscribe("leaf.many", {}):
            pass
        return 1

    return registry


async def test_every_call_is_recorded_under_the_call_it_was_part_of() -> None:
    registry = build()
    graph = CallGraph()
    registry.record(graph)

    await registry.execute("root.run", {})

    (root,) = (record for record in graph if record.parent_request_id is None)
    children = graph.children(root.request_id)
    assert [(child.operation_id, child.outcome, child.items) for child in children] == [
        ("leaf.ok", "success", 0),
        ("leaf.bad", "BAD", 0),
        ("leaf.many", "success", 3),
    ]
    assert graph[root.request_id].duration is not None


async def test_the_tree_shows_names_outcomes_and_times() -> None:
    registry = build()
    graph = CallGraph()
    registry.record(graph)

    await registry.execute("root.run", {})

    shown = graph.tree().splitlines()
    assert shown[0].startswith("root.run  success  ")
    assert shown[1].startswith("├─ leaf.ok  success")
    assert shown[2].startswith("├─ leaf.bad  BAD")
    assert shown[3].startswith("└─ leaf.many  success")
    assert shown[3].endswith("3 items")


async def test_the_lines_of_two_processes_form_one_graph(tmp_path: Path) -> None:
    target = MemoryTarget()
    worker = build()
    with CallGraph(tmp_path / "worker") as there, CallGraph(tmp_path / "caller") as here:
        worker.record(there)
        async with serve_calls(worker, target), PendingRequestMap(target) as calls:
            caller = OperationRegistry(remote=calls)
            caller.record(here)

            @caller.operation("top.go", type="query")
            async def go(context: OperationContext) -> Any:
                return (await context.env.root.run({})).data

            await caller.execute("top.go", {})
    records = read_graph([tmp_path / "worker", tmp_path / "caller"])

    assert {record.operation_id for record in records} >= {"top.go", "root.run", "leaf.ok"}
    # top.go, its call at the caller, the same call at the worker, and the nested call.
    assert render_tree(records).splitlines()[-1].startswith("      └─ leaf.many")


async def test_a_truncated_record_loses_only_its_call(tmp_path: Path) -> None:
    path, registry = tmp_path / "calls", build()
    with CallGraph(path) as graph:
        registry.record(graph)
        await registry.execute("leaf.ok", {})
        size = path.stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            await registry.execute("leaf.ok", {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await registry.execute("leaf.ok", {})

    assert path.read_bytes().count(b"\n") == 3
    assert [record.operation_id for record in read_graph([path])] == ["leaf.ok"] * 2


async def test_a_file_that_is_full_becomes_the_old_file(tmp_path: Path) -> None:
    path, registry = tmp_path / "calls", build()
    with CallGraph(path, max_bytes=1000) as graph, CallGraph(path, max_bytes=1000) as other:
        registry.record(graph)
        registry.record(other)
        for _ in range(40):
            await registry.execute("leaf.ok", {})

    old = path.with_name("calls.old")
    assert max(path.stat().st_size, old.stat().st_size) < 1500
    # Neither replaces the old file with one that is not full.
    assert old.stat().st_size > 1000


@pytest.mark.parametrize("is_moved", [True, False], ids=["moved", "deleted"])
async def test_recording_continues_in_a_new_file_after_log_rotation(
    tmp_path: Path, is_moved: bool
) -> None:
    path, aside = tmp_path / "calls.jsonl", tmp_path / "calls.1"
    registry = build()
    with CallGraph(path) as graph:
        registry.record(graph)
        await registry.execute("leaf.ok", {})
        path.replace(aside) if is_moved else path.unlink()
        await registry.execute("leaf.ok", {})

    assert len(read_graph([path])) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert not is_moved or len(read_graph([aside])) == 1


async def test_the_number_of_recorded_calls_is_bounded() -> None:
    registry = build()
    graph = CallGraph(limit=2)
    registry.record(graph)

    for _ in range(5):
        await registry.execute("leaf.ok", {})

    assert len(graph) == 2


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_calls_that_name_each_other_as_parents_are_not_hidden(order: tuple[int, ...]) -> None:
    parents = {"a": "b", "b": "c", "c": "a", "d": "c"}
    records = [
        CallRecord(
            request_id=name, operation_id=f"x.{name}", parent_request_id=parent, started_at=0
        )
        for name, parent in parents.items()
    ]
    ordered = [records[index] for index in order]

    lines = render_tree(ordered).splitlines()
    (root,) = spans(ordered)

    assert sorted(line.split("x.")[1][0] for line in lines) == ["a", "b", "c", "d"]
    assert len(str(root.to_json()).split("operationId")) == 5


def test_many_calls_without_parents_are_shown_quickly() -> None:
    records = [
        CallRecord(request_id=str(number), operation_id="x.y", started_at=number)
        for number in range(100_000)
    ]

    with processor_limit(4):
        roots = spans(records)

    assert [root.record for root in roots] == records


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("step", [1, -1])
def test_calls_that_name_a_long_chain_of_parents_are_shown(step: int) -> None:
    count = 10_000
    records = [
        CallRecord(
            request_id=str(number),
            operation_id=f"x.{number}",
            parent_request_id=str(number - 1),
            started_at=step * number,
        )
        for number in range(count)
    ]

    (root,) = spans(records)

    assert root.record.operation_id == "x.0"
    assert len(str(root.to_json()).split("operationId")) == count + 1
    assert root.has_failed
    assert len(render_tree(records).splitlines()) == count
