"""`operations dev FILE`, `operations serve FILE` and `operations.run`, as a newcomer starts them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mcp import Client
from tests.conftest import PROJECT
from tests.limits import scaled, time_limit

README = (PROJECT / "README.md").read_text(encoding="utf-8")
APP, COMMANDS, SEEN, CURL, ANSWER = (
    block for _, block in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[:5]
)
"""What the README shows first: the file, the commands, their output, a call and its result."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@asynccontextmanager
async def started(
    here: Path, *command: str, stdin: int | None = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A command in the folder of the file; its output is one stream."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT / "src"),
        "XDG_STATE_HOME": str(here / "state"),
    }
    environment.pop("OPERATIONS_CONFIG", None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=here, env=environment,
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode in (0, 143)


async def read_until(process: asyncio.subprocess.Process, words: str) -> str:
    """Return the output up to a line with these words."""
    read = ""
    assert process.stdout is not None
    with time_limit(150):
        while words not in read.rpartition("\n")[0].rpartition("\n")[2]:
            line = await process.stdout.readline()
            assert line, read
            read += line.decode()
    return read


async def get(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.json()


async def test_the_first_block_of_the_readme_does_what_the_readme_shows(here: Path) -> None:
    assert len(APP.splitlines()) <= 12
    command = COMMANDS.splitlines()[-1].split()
    assert command[0] == "operations"
    async with started(here, "-m", *command, "--port", "0") as process:
        printed = await read_until(process, "Ctrl-C")
        port = re.findall(r":(\d+)$", printed.splitlines()[0])[0]
        assert printed.replace(port, "8000") == SEEN

        ran = await asyncio.create_subprocess_shell(
            f"{CURL.strip().replace('8000', port)} --silent", stdout=subprocess.PIPE
        )
        out, _ = await ran.communicate()
        assert out.decode() == ANSWER.strip()
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            tools = await client.list_tools()
        assert [each.name for each in tools.tools] == ["task__create", "math__double"]


async def test_an_error_is_shown_in_the_terminal_and_to_the_console_until_it_is_fixed(
    here: Path,
) -> None:
    async with started(here, "-m", "operations", "dev", "app.py", "--port", "0") as process:
        url = (await read_until(process, "Ctrl-C")).split()[4]

        (here / "app.py").write_text(APP + "def broken(:\n")
        printed = await read_until(process, "SyntaxError")
        assert "the previous version stays in use" in printed
        assert f'"{here}/app.py", line {len(APP.splitlines()) + 1}' in printed
        assert "SyntaxError" in (await get(f"{url}/operations"))["problem"]
        assert await get(f"{url}/math/double?number=4") == 8

        (here / "app.py").write_text(APP.replace("2 * number", "3 * number"))
        assert "reloaded: 2 operations" in await read_until(process, "reloaded")
        assert await get(f"{url}/math/double?number=4") == 12
        assert "problem" not in await get(f"{url}/operations")


async def test_an_unexpected_error_reaches_the_developer_with_its_text(here: Path) -> None:
    (here / "app.py").write_text(APP.replace("2 * number", "2 // number"))
    async with started(here, "-m", "operations", "dev", "app.py", "--port", "0") as process:
        url = (await read_until(process, "Ctrl-C")).split()[4]
        assert "ZeroDivisionError" in (await get(f"{url}/math/double?number=0"))["message"]
        assert "app.py" in await read_until(process, "ZeroDivisionError")


async def test_a_file_is_served_for_production_without_watching_it(here: Path) -> None:
    command = ("-m", "operations", "serve", "app.py", "--port", "0", "--json")
    async with started(here, *command) as process:
        ready = json.loads((await read_until(process, "entryPoints")).splitlines()[-1])
        assert ready["operations"] == 2
        assert await get(f"{ready['url']}/math/double?number=4") == 8
        assert "problem" not in await get(f"{ready['url']}/readyz")


async def test_a_script_serves_its_registry(here: Path) -> None:
    (here / "app.py").write_text(
        "import operations\n"
        "registry = operations.OperationRegistry()\n"
        '@registry.operation("math.double", type="query")\n'
        "def double(number: int) -> int:\n"
        "    return 2 * number\n"
        'if __name__ == "__main__":\n'
        "    operations.run(registry, port=0)\n"
    )
    async with started(here, "app.py") as process:
        printed = await read_until(process, "Ctrl-C")
        assert printed.startswith("serving 1 operation at ")
        url = printed.split()[4]
        assert await get(f"{url}/math/double?number=4") == 8
    async with started(here, "-m", "operations", "dev", "app.py", "--port", "0") as process:
        assert "serving 1 operation " in await read_until(process, "Ctrl-C")


async def test_a_file_without_operations_is_reported(here: Path) -> None:
    (here / "app.py").write_text("def double(number: int) -> int:\n    return 2 * number\n")
    async with started(here, "-m", "operations", "dev", "app.py", "--port", "0") as process:
        printed = await read_until(process, "Ctrl-C")
    assert "app.py has no operations: mark functions with @operation" in printed


def test_a_newcomer_without_a_config_learns_that_a_file_needs_none(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "operations", "dev"],
        cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert ran.returncode == 3
    assert "`operations dev FILE.py` needs none" in ran.stderr


def test_a_file_that_does_not_exist_is_named(here: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "operations", "dev", "nope.py"],
        cwd=here, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert ran.returncode == 3
    assert "nope.py: there is no such file" in ran.stderr
