"""The same task as a script and as single calls: the same calls, refused alike, with the same lines in the ledger."""

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from operations import (
    CallError,
    ErrorDefinition,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    operation,
)
from operations.agents import Toolbox
from operations.authority import Ledger
from operations.authority.grants import Grants
from operations.code import Code
from operations.contract.events import CallFinished, CallStarted
from operations.contract.functions import operation_of
from operations.contract.specs import ApprovalRule
from operations.tools import ToolConfig, configure_tools

KEY = "k" * 32


@operation("shop.items", type="query")
async def items(limit: int = 3) -> list[dict[str, int]]:
    return [{"id": number} for number in range(limit)]


@operation("shop.quote", type="query")
async def quote(item: int) -> int:
    return item


@operation("shop.order", scopes=["buy"], errors=[ErrorDefinition("OUT_OF_STOCK", "")])
async def order(item: int, note: str = "") -> dict[str, int]:
    if item > 100:
        raise CallError("OUT_OF_STOCK", "none is left", {"item": item})
    return {"ordered": item}


@operation("shop.fail")
async def fail() -> None:
    raise RuntimeError("a secret of the shop")


@operation("shop.transfer", scopes=["buy"])
async def transfer(amount: int) -> int:
    return amount


@operation("shop.purge", scopes=["admin"])
async def purge() -> str:
    return "purged"


class Step(NamedTuple):
    """One call of a task."""

    operation: str
    input: dict[str, Any]


CALLERS = ("operator", "buyer", "guest", "agent", "budget")

TASKS: dict[str, list[Step]] = {
    "read": [Step("shop.items", {}), Step("shop.items", {"limit": 2})],
    "buy": [Step("shop.items", {"limit": 1}), Step("shop.order", {"item": 1, "note": "a"})],
    "sold out": [Step("shop.order", {"item": 101}), Step("shop.order", {"item": 2})],
    "wrong input": [Step("shop.order", {"item": "many"}), Step("shop.order", {"item": 3})],
    "lenient input": [Step("shop.items", {"limit": "2"}), Step("shop.order", {"item": "4"})],
    "unexpected": [Step("shop.fail", {}), Step("shop.items", {})],
    "hidden": [Step("shop.purge", {}), Step("shop.items", {})],
    "approval": [Step("shop.transfer", {"amount": 5}), Step("shop.transfer", {"amount": 5000})],
    "rate": [Step("shop.quote", {"item": number}) for number in range(3)],
    "many": [Step("shop.order", {"item": number}) for number in (1, 1, 2, 102, 2)],
}


class Trace(NamedTuple):
    """What a task has left."""

    outcomes: list[Any]
    """The result, or the code of the error, of each call."""

    events: list[tuple[str, str | None]]
    """Each call with its code."""

    ledger: list[dict[str, Any]]
    """The lines, without times, numbers and ids."""


def registry_of(folder: Path) -> OperationRegistry:
    marked: list[Any] = [
        operation_of(each) for each in (items, quote, order, fail, transfer, purge)
    ]
    rule = ApprovalRule(when={"properties": {"amount": {"minimum": 1000}}})
    ready: list[Operation] = [
        replace(each, approve=rule) if each.spec.id == "shop.transfer" else each for each in marked
    ]
    folder.mkdir()
    registry = OperationRegistry(ready)
    registry.record(Ledger(folder / "ledger.jsonl", KEY))
    # One call, and another one after longer than any test takes.
    configure_tools(registry, {"shop.quote": ToolConfig(rate=0.0001)})
    return registry


async def identity_of(caller: str) -> Identity | None:
    scopes = [] if caller == "guest" else ["buy"]
    if caller in ("buyer", "guest"):
        return Identity(caller, scopes)
    grants = Grants(KEY, subjects=lambda name: Identity(name, ["buy"]))
    calls = {"shop.order": 2} if caller == "budget" else {}
    # The same grant in both registries, so that the ledgers can be compared.
    token = grants.create("ada", "agent", operations=["shop.*"], calls=calls)
    return await grants.resolve(token)


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    dropped = {"n", "time", "previous", "mac", "request", "parent", "script", "approval"}
    return [
        {key: value for key, value in line.items() if key not in dropped}
        for line in lines
        if not str(line.get("operation")).startswith("code.")
    ]


def observed(registry: OperationRegistry) -> list[tuple[str, str | None]]:
    started: dict[str, str] = {}
    events: list[tuple[str, str | None]] = []

    def observe(event: Any) -> None:
        if isinstance(event, CallStarted):
            started[event.request_id] = event.operation_id
        elif isinstance(event, CallFinished):
            name = started[event.request_id]
            if not name.startswith("code."):
                events.append((name, event.code))

    registry.observe(observe)
    return events


async def one_by_one(folder: Path, steps: list[Step], caller: str) -> Trace:
    """Make the calls of a task as single calls of a model."""
    async with registry_of(folder) as registry:
        events = observed(registry)
        outcomes: list[Any] = []
        context = await context_of(caller)
        for step in steps:
            try:
                envelope = await registry.execute(
                    step.operation, step.input, context.changed(lenient=True)
                )
                outcomes.append(envelope.data)
            except CallError as error:
                outcomes.append(error.code)
    return Trace(outcomes, events, ledger_of(folder))


async def context_of(caller: str) -> OperationContext:
    if caller == "operator":
        return OperationContext(trusted=True)
    return OperationContext(identity=await identity_of(caller))


async def as_script(folder: Path, steps: list[Step], caller: str) -> Trace:
    """Make the calls of a task in one script."""
    lines = ["found = []"]
    for step in steps:
        namespace, name = step.operation.split(".")
        # Not checked before: the model has made these mistakes at run time.
        arguments = ", ".join(f"{key}={value!r}" for key, value in step.input.items())
        lines += [
            "try:",
            f"    found.append(await eval('{namespace}').{name}({arguments}))",
            "except CallError as error:",
            "    found.append(error_of(error)['code'])",
        ]
    script = "\n".join([*lines, "return found"])
    async with registry_of(folder) as registry:
        registry.register_all(Code(registry))
        events = observed(registry)
        context = await context_of(caller)
        data = (await registry.execute("code.run", {"script": script}, context)).data
    return Trace(data["result"], events, ledger_of(folder))


@pytest.mark.parametrize(("task", "caller"), [*product(TASKS, CALLERS)])
async def test_a_script_does_what_single_calls_do(task: str, caller: str, tmp_path: Path) -> None:
    single = await one_by_one(tmp_path / "single", TASKS[task], caller)
    script = await as_script(tmp_path / "script", TASKS[task], caller)

    assert script.events == single.events
    assert script.ledger == single.ledger
    # To a script, an operation that its caller may not call does not exist, as at every entry point.
    assert [shown(each) for each in script.outcomes] == [shown(each) for each in single.outcomes]
    if task == "rate":
        assert script.outcomes == [0, "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]


def shown(outcome: Any) -> Any:
    return "hidden" if outcome in ("ACCESS_DENIED", "OPERATION_NOT_FOUND") else outcome


async def test_a_script_and_a_tool_of_a_toolbox_refuse_alike(tmp_path: Path) -> None:
    async with registry_of(tmp_path / "a") as registry:
        registry.register_all(Code(registry))
        identity = await identity_of("guest")
        tools, code = (
            Toolbox(registry, identity=identity),
            Toolbox(registry, identity=identity, disclosure="code"),
        )
        single = await tools.run(
            {"type": "tool_use", "id": "1", "name": "shop__purge", "input": {}}
        )
        call = "await eval('shop').purge()"
        script = f"try:\n    {call}\nexcept CallError as e:\n    return error_of(e)['code']"
        inside = await code.run(
            {"type": "tool_use", "id": "1", "name": "code__run", "input": {"script": script}}
        )
    assert "OPERATION_NOT_FOUND" in str(single)
    assert json.loads(inside["content"])["result"] == "OPERATION_NOT_FOUND"


def test_there_are_fifty_tasks() -> None:
    assert len(TASKS) * len(CALLERS) == 50
