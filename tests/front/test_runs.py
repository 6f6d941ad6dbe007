"""The operations with which callers follow their own runs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.front.runs import run_operations
from operations.runs import Runs

ADA = OperationContext(identity=Identity("ada", []))
BEN = OperationContext(identity=Identity("ben", ["runs:read", "runs:manage"]))


async def test_a_caller_follows_its_own_runs_only(tmp_path: Path) -> None:
    registry = OperationRegistry(runs=Runs(f"sqlite:{tmp_path / 'runs.db'}", grace=0.0))
    registry.register_all(run_operations(registry))

    @registry.operation("job.ask", durable=True)
    async def ask(context: OperationContext) -> Any:
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        return (await context.elicit("Who?", schema))["content"]["name"]

    @registry.operation("job.wait", durable=True)
    async def wait(context: OperationContext) -> Any:
        return await context.wait_for("go")

    async def run(name: str, input: Any, caller: OperationContext = ADA) -> Any:
        return (await registry.execute(f"runs.{name}", input, caller)).data

    async with registry, asyncio.timeout(20):
        asked = await registry.start("job.ask", {}, ADA)
        waiting = await registry.start("job.wait", {}, ADA)
        async for state in asked.watch():
            if state.waiting:
                break
        seen = await run("get", {"run": asked.id})
        key = seen["waiting"][0]["key"]
        answer = {"action": "accept", "content": {"name": "Eve"}}
        assert await run("answer", {"run": asked.id, "key": key, "answer": answer})
        ended = await run("get", {"run": asked.id, "wait": 10})
        await run("cancel", {"run": waiting.id})
        listed = await run("list", {"limit": 1})
        rest = await run("list", {"limit": 1, "after": listed["next"]})
        # Not even a caller that may manage the runs of others.
        with pytest.raises(CallError) as unknown:
            await run("get", {"run": asked.id}, BEN)
        assert await run("list", {}, BEN) == {"runs": []}

    assert seen["status"] == "input_required"
    assert (ended["status"], ended["result"]["data"]) == ("completed", "Eve")
    assert [each["id"] for each in listed["runs"] + rest["runs"]] == [waiting.id, asked.id]
    assert unknown.value.code == "RUN_NOT_FOUND"
