"""A folder with a config and operations of every kind, and the command line to use it with."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import PROJECT

from operations.__main__ import main

OPERATIONS = '''
import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from enum import Enum

from operations import CallError, ErrorDefinition, OperationContext, operation


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@dataclass
class Address:
    street: str
    number: int = 1


@operation("work.add", type="query", tags=["maths"])
async def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@operation("work.ship", title="Ship it")
async def ship(
    to: Address, size: Size, notes: list[str], fast: bool = False, weight: float | None = None
) -> dict[str, object]:
    """Ship something.

    Args:
        to: Where it goes.
        size: How large it is.
    """
    return {**asdict(to), "size": size.value, "notes": notes, "fast": fast, "weight": weight}


@operation("work.count")
async def count(to: int = 3, pause: float = 0) -> AsyncIterator[int]:
    """Count up."""
    for number in range(1, to + 1):
        yield number
        await asyncio.sleep(pause)


@operation("work.secret", type="query", scopes=["work:admin"])
async def secret() -> str:
    """For few."""
    return "hidden"


@operation("work.slow")
async def slow(context: OperationContext, steps: int = 3, pause: float = 0.2) -> str:
    """Tell how far it is."""
    for step in range(steps):
        await context.progress(step + 1, steps, "working hard")
        await asyncio.sleep(pause)
    return "done"


@operation("work.steps")
async def steps(context: OperationContext, to: int = 3) -> AsyncIterator[int]:
    """Tell how far it is, and give something at each step."""
    for step in range(1, to + 1):
        await context.progress(step, to, "stepping")
        await asyncio.sleep(0.1)
        yield step


@operation("work.outer", type="query")
async def outer(context: OperationContext) -> int:
    """Call another."""
    return (await context.env.work.add({"a": 1})).data


@operation("work.fail", errors=[ErrorDefinition("TIRED", "Too late.")])
async def fail() -> str:
    """Fail as declared."""
    raise CallError("TIRED", "too late", {"hour": 23})


@operation("work.crash")
async def crash() -> str:
    """Fail unexpectedly."""
    raise RuntimeError("boom")


@operation("work.image", type="query")
async def image() -> bytes:
    """Some bytes."""
    return bytes(range(256))


@operation("work.ask")
async def ask(context: OperationContext) -> object:
    """Ask the person."""
    schema = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return await context.elicit("May I?", schema)


@operation("work.rude", type="query")
async def rude() -> str:
    """Say \\x1b[31mred\\u202e."""
    return "\\x1b[2Jgone\\u202e\\x9b"
'''

CONFIG = """
modules = ["ops.py"]

[access.keys.alice]
key = { env = "ALICE_KEY" }
scopes = ["work:admin", "approvals:answer"]

[access.keys.bob]
key = { env = "BOB_KEY" }

[serve]
port = 0
"""

TOOL_SERVER = [str(PROJECT / "tests" / "hub" / "tool_server.py"), "0", "double", "2", "0"]
"""Arguments of Python for an MCP server on stdio that starts at once; its tool is `double`."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.out)

    @property
    def error(self) -> Any:
        return msgspec.json.decode(self.err.splitlines()[-1])["error"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the commands."""
    (tmp_path / "ops.py").write_text(OPERATIONS)
    (tmp_path / "operations.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("OPERATIONS_CONFIG", raising=False)
    return tmp_path


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Run a command in this process, as a script would: no terminal."""
    path = list(sys.path)

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    yield run
    sys.path[:] = path


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """The environment in which a child process finds the command."""
    return {**os.environ, "PYTHONPATH": str(PROJECT / "src"), "TERM": "xterm-256color"}
