"""The recipes for assistants: each file in docs/recipes/mcp-clients.md connects to a hub, here by our own client."""

import json
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PROJECT

from operations.contract.access import Identity
from operations.mcp import MCPClientConfig, connect_mcp, read_servers
from operations.registry import OperationRegistry
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running

PAGE = (PROJECT / "docs/recipes/mcp-clients.md").read_text(encoding="utf-8")
KEY = "recipe-" + "k" * 32
TASKS = '''
from operations import operation


@operation("task.list", type="query", scopes=["task:read"])
async def tasks() -> list[str]:
    """Return the tasks."""
    return ["one"]
'''


def recipes() -> Generator[Any]:
    for section in PAGE.split("\n## ")[1:]:
        block = re.search(r"^```json\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if block is not None:
            yield pytest.param(block[1], id=section.partition("\n")[0])


def entry_of(text: str, folder: Path) -> Any:
    file = folder / "mcp.json"
    file.write_text(text.replace("${input:hub-key}", "${env:HUB_KEY}"), encoding="utf-8")
    return read_servers(file)["hub"]


def test_there_is_a_recipe_for_each_client() -> None:
    assert [recipe.id for recipe in recipes()] == [
        "Claude Code",
        "Claude Desktop",
        "Cursor",
        "VS Code",
    ]


@pytest.mark.parametrize("text", [*recipes()])
async def test_a_recipe_connects_as_its_caller(text: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    entry = entry_of(text, tmp_path)
    if "command" in entry:
        toml = re.search(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        assert toml is not None
        config = tmp_path / "operations.toml"
        config.write_text(toml[1], encoding="utf-8")
        arguments = ["-m", "operations", *entry["args"][:-1], str(config)]
        entry |= {"command": sys.executable, "args": arguments}
        assert await tools_of(entry) == ["hub.task__list"]
        return
    registry = OperationRegistry()

    @registry.operation("task.list", type="query", scopes=["task:read"])
    async def tasks() -> list[str]:
        return ["one"]

    keys = APIKeys({hash_key(KEY): Identity("assistant", ["task:read"])})
    app = create_app(registry, identity=keys, mcp=True)
    async with running(app) as url:
        entry = json.loads(json.dumps(entry).replace("http://127.0.0.1:8000", url))
        assert await tools_of(entry) == ["hub.task__list"]


async def tools_of(entry: Any) -> list[str]:
    config = MCPClientConfig.from_entry(entry, {"HUB_KEY": KEY})
    async with connect_mcp("hub", config) as client:
        return [operation.spec.id for operation in client]
