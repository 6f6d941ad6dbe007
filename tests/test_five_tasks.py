"""The files of docs/five-tasks.md: those of operations run here, those of FastMCP by `scripts/matrix tasks`."""

import contextlib
import io
import os
import re
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from tests.conftest import PROJECT
from tests.limits import scaled

import operations
from operations import CallError, Identity, OperationContext, OperationRegistry, scan_operations
from operations.config import load_config
from operations.hub import open_hub
from operations.hub.app import build_app
from operations.server import create_app
from operations.server.http11.running import running

PAGE = (PROJECT / "docs" / "five-tasks.md").read_text(encoding="utf-8")
BLOCKS = [
    text for _, text in re.findall(r"^```(py|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]
OURS, THEIRS = BLOCKS[::2], BLOCKS[1::2]
FASTMCP = os.environ.get("OPERATIONS_FASTMCP", "")
"""The interpreter of an environment with FastMCP."""


def lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def test_the_table_has_the_lines_of_the_files_and_ours_are_no_more() -> None:
    counted = [(lines(ours), lines(theirs)) for ours, theirs in zip(OURS, THEIRS, strict=True)]
    table = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [(int(ours), int(theirs)) for ours, theirs in table] == counted
    assert len(counted) == 5
    assert all(ours <= theirs for ours, theirs in counted)


@asynccontextmanager
async def upstream(folder: Path) -> AsyncGenerator[dict[str, str]]:
    """Two MCP servers and an API, each the first file; yield their addresses by those of the page."""
    (folder / "up").mkdir()
    (folder / "up" / "app.py").write_text(OURS[0])
    registry = OperationRegistry(scan_operations(folder / "up" / "app.py"))
    async with AsyncExitStack() as stack:
        yield {
            f"http://127.0.0.1:{port}": await stack.enter_async_context(
                running(create_app(registry, mcp=True))
            )
            for port in (8001, 8002, 8003)
        }


def local(text: str, addresses: dict[str, str]) -> str:
    for shown, real in addresses.items():
        text = text.replace(shown, real)
    return text


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


async def test_a_client_without_await(tmp_path: Path) -> None:
    async with upstream(tmp_path) as addresses:
        printed = io.StringIO()
        namespace: dict[str, Any] = {}

        def run() -> None:
            with contextlib.redirect_stdout(printed):
                exec(compile(local(_flat(OURS[1]), addresses), "client", "exec"), namespace)  # noqa: S102
            namespace["registry"].sync.close()

        await anyio.to_thread.run_sync(run)
    assert printed.getvalue() == "3\n"


def _flat(text: str) -> str:
    # The server of the test has the namespace of the operation in the names of its tools.
    return text.replace("sync.math.add", 'sync["math"]["math__add"]')


@pytest.mark.parametrize(("task", "namespace"), [(2, "notes."), (3, "shop.")], ids=["proxy", "api"])
async def test_a_config_of_sources(tmp_path: Path, task: int, namespace: str) -> None:
    async with upstream(tmp_path) as addresses:
        (tmp_path / "operations.toml").write_text(local(OURS[task], addresses))
        async with open_hub(tmp_path / "operations.toml") as hub:
            assert not hub.absent()
            ids = [each.id for each in hub.registry.specs() if "double" in each.id]
            found = next(each for each in ids if each.startswith(namespace))
            envelope = await hub.registry.execute(found, {"a": 4}, OperationContext(trusted=True))
            assert envelope.data == 8


async def test_a_server_that_requires_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALICE_KEY", "a" * 32)
    (tmp_path / "app.py").write_text(OURS[0])
    (tmp_path / "operations.toml").write_text(OURS[4])
    async with open_hub(load_config(tmp_path / "app.py")) as hub:
        async with running(build_app(hub)) as url:
            async with operations.connect(url) as anonymous:
                with pytest.raises(CallError):
                    await anonymous.execute("math.double", {"a": 2})
            async with operations.connect(url, token="a" * 32) as client:
                assert (await client.execute("math.double", {"a": 2})).data == 4
        assert await hub.identity("alice") == Identity("alice")


CHECK = """
import asyncio, sys
from fastmcp import Client
async def main():
    namespace = {}
    exec(open(sys.argv[1]).read(), namespace)
    if "mcp" in namespace:
        async with Client(namespace["mcp"]) as client:
            print(sorted(each.name for each in await client.list_tools()))
asyncio.run(main()) if "asyncio.run" not in open(sys.argv[1]).read() else exec(open(sys.argv[1]).read())
"""


def run_theirs(file: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [FASTMCP, "-c", CHECK, str(file)], env={**os.environ, "ALICE_KEY": "a" * 32},
        capture_output=True, text=True, timeout=scaled(120), check=False,
    )  # fmt: skip


@pytest.mark.skipif(not FASTMCP, reason="scripts/matrix tasks installs FastMCP")
async def test_the_files_of_fastmcp_run(tmp_path: Path) -> None:
    async with upstream(tmp_path) as addresses:
        outputs: list[str] = []
        for number, text in enumerate(THEIRS):
            file = tmp_path / f"their{number}.py"
            file.write_text(local(text, addresses).replace('"add"', '"math__add"'))
            ran = await anyio.to_thread.run_sync(run_theirs, file)
            assert ran.returncode == 0, ran.stderr
            outputs.append(ran.stdout.strip())
    assert outputs[0] == "['add', 'double']"
    assert outputs[1] == "3"
    assert len(eval(outputs[2])) == 4  # noqa: S307 - our own output
    assert "double" in outputs[3]
