"""The command line and MCP on standard input have the outcomes of every other entry point."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from mcp import Client, MCPError, StdioServerParameters
from tests.front.outcomes import ACCESS, SIZES
from tests.limits import time_limit

from operations.__main__ import main
from operations.base.text import tool_name
from operations.server import Limits

OPERATIONS = """
import asyncio

from operations import operation


@operation("test.open")
async def opened(value: object = None) -> str:
    return "fine"


@operation("test.advertised", scopes=["run"])
async def advertised() -> str:
    return "fine"


@operation("test.hidden", scopes=["secret"])
async def hidden() -> str:
    return "fine"


@operation("test.wait")
async def wait() -> str:
    await asyncio.Event().wait()
    return "fine"


@operation("test.limited", timeout=0.1)
async def limited() -> str:
    await asyncio.Event().wait()
    return "fine"


@operation("test.broken")
async def broken() -> str:
    raise RuntimeError("CANARY")


@operation("test.exit")
async def leave() -> None:
    raise GeneratorExit("CANARY")


@operation("test.cancelled")
async def cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@operation("test.cancelled_later")
async def cancelled_later() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.Event().wait()
"""

CONFIG = """
modules = ["ops.py"]

[access.keys.ann]
sha256 = "{hash}"
scopes = ["run"]

[access.keys.bob]
sha256 = "{other}"
scopes = ["other"]

[serve]
advanced.scopes_supported = ["run"]

[limits]
body_bytes = {body_bytes}
advanced.values = {values}
calls_per_caller = {calls_per_caller}
burst = {burst}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ops.py").write_text(OPERATIONS)
    configure(tmp_path, Limits())
    return tmp_path


def configure(folder: Path, limits: Limits) -> None:
    text = CONFIG.format(
        hash="0" * 64,
        other="1" * 64,
        body_bytes=limits.body_bytes,
        values=limits.values,
        calls_per_caller=limits.calls_per_caller,
        burst=limits.burst,
    )
    if limits.rate_per_caller is not None:
        text += f"rate_per_caller = {limits.rate_per_caller}\n"
    (folder / "operations.toml").write_text(text)


@pytest.fixture
def over_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Call with the command; return `fine` or the code of the error."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    path = list(sys.path)

    def call(operation: str, value: Any, key: str | None, *options: str) -> str:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(msgspec.json.encode(value))))
        capfd.readouterr()
        code = main(("call", operation, "-", "--as", key or "anonymous", "--json", *options))
        out, err = capfd.readouterr()
        assert "CANARY" not in out + err
        if not code:
            return str(msgspec.json.decode(out))
        return str(msgspec.json.decode(err.splitlines()[-1])["error"]["code"])

    yield call
    sys.path[:] = path


@asynccontextmanager
async def stdio(folder: Path, key: str | None) -> AsyncGenerator[Client]:
    identity = () if key is None else ("--as", key)
    child = StdioServerParameters(
        command=sys.executable,
        args=["-m", "operations", "serve", "--stdio", *identity],
        cwd=folder,
        env=dict(os.environ),
    )
    with time_limit(60):
        async with Client(child) as client:
            yield client


async def over_stdio(client: Client, operation: str, value: Any) -> str:
    try:
        result = await client.call_tool(tool_name(operation), value)
    except MCPError as error:
        if error.message.startswith("Unknown tool"):
            return "OPERATION_NOT_FOUND"
        return str(error.data["code"])
    assert "CANARY" not in repr(result)
    if not result.is_error:
        return "fine"
    wire = result.structured_content or next(iter((result.meta or {}).values()))
    return str(wire["code"])


@pytest.mark.requirement("R07", "R54")
@pytest.mark.parametrize(("operation", "key", "outcome"), ACCESS)
def test_access_at_the_command_line(
    over_terminal: Callable[..., str], operation: str, key: str | None, outcome: str
) -> None:
    assert over_terminal(operation, {}, key) == outcome


@pytest.mark.requirement("R55", "R54")
@pytest.mark.parametrize(("limits", "value", "outcome"), SIZES.values(), ids=SIZES)
def test_sizes_are_limited_at_the_command_line(
    folder: Path, over_terminal: Callable[..., str], limits: Limits, value: Any, outcome: str
) -> None:
    configure(folder, limits)

    assert over_terminal("test.open", {"value": value}, "ann") == outcome


@pytest.mark.requirement("R12", "R54")
def test_a_caller_cannot_extend_the_time_limit_of_an_operation(
    over_terminal: Callable[..., str],
) -> None:
    assert over_terminal("test.limited", {}, "ann", "--timeout", "60") == "TIMEOUT"


@pytest.mark.requirement("R07", "R54")
@pytest.mark.parametrize("key", [None, "bob"])
async def test_access_on_stdio(folder: Path, key: str | None) -> None:
    async with stdio(folder, key) as client:
        await has_access_of(client, key)


async def has_access_of(client: Client, key: str | None) -> None:
    expected = {operation: outcome for operation, who, outcome in ACCESS if who == key}
    found = {operation: await over_stdio(client, operation, {}) for operation in expected}
    assert found == expected


@pytest.mark.requirement("R07", "R55", "R54")
async def test_access_and_default_sizes_on_stdio(folder: Path) -> None:
    sizes = [(value, outcome) for limits, value, outcome in SIZES.values() if limits == Limits()]
    assert len(sizes) == 2
    async with stdio(folder, "ann") as client:
        await has_access_of(client, "ann")
        for value, outcome in sizes:
            assert await over_stdio(client, "test.open", {"value": value}) == outcome
            assert await over_stdio(client, "test.open", {"value": 1}) == "fine"


@pytest.mark.requirement("R39", "R55", "R54")
async def test_sizes_and_concurrent_calls_are_limited_on_stdio(folder: Path) -> None:
    few, large = SIZES["few values"], SIZES["bytes"]
    configure(
        folder, Limits(values=few[0].values, body_bytes=large[0].body_bytes, calls_per_caller=2)
    )
    async with stdio(folder, "ann") as client, anyio.create_task_group() as tasks:
        for _, value, outcome in (few, large):
            assert await over_stdio(client, "test.open", {"value": value}) == outcome
            assert await over_stdio(client, "test.open", {"value": 1}) == "fine"
        for _ in range(2):
            tasks.start_soon(over_stdio, client, "test.wait", {})
        # Messages are read in order, so both calls have begun before the next one is read.
        await anyio.wait_all_tasks_blocked()
        assert await over_stdio(client, "test.open", {}) == "RESOURCE_EXHAUSTED"
        tasks.cancel_scope.cancel()


@pytest.mark.requirement("R39", "R54")
async def test_the_rate_is_limited_on_stdio(folder: Path) -> None:
    configure(folder, replace(Limits(), rate_per_caller=0.001, burst=2))
    async with stdio(folder, "ann") as client:
        outcomes = [await over_stdio(client, "test.open", {}) for _ in range(3)]

    assert outcomes == ["fine", "fine", "RESOURCE_EXHAUSTED"]


@pytest.mark.requirement("R54")
async def test_the_operator_sees_exceptions_of_operations(folder: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "operations", "call", "test.broken", "--json"),
        cwd=folder,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await child.communicate()

    assert b"CANARY" in err
    assert b"Traceback" not in err
