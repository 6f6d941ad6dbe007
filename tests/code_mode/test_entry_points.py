"""Code mode in the MCP server, in toolboxes, in a file, and on the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from tests.code_mode.shop import BUYER, OPERATOR, run, shop
from tests.limits import time_limit

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.agents import Toolbox
from operations.code import Code, SavedScript
from operations.config import ConfigError, load_config
from operations.hub import open_hub
from operations.mcp import to_mcp

MODULE = '''
from operations import operation

@operation("shop.items", type="query")
async def items(limit: int = 2) -> list[int]:
    """List the items."""
    return [*range(limit)]

@operation("shop.order", scopes=["buy"])
async def order(item: int) -> int:
    """Order."""
    return item
'''

REPORT = "return [await shop.order(item=each['id']) for each in await shop.items(limit=arguments['limit'])]"


async def test_an_mcp_server_lists_only_the_two_tools() -> None:
    async with shop() as registry, Client(to_mcp(registry, disclosure="code")) as client:
        tools = (await client.list_tools()).tools
        arguments = {"script": "return len(await shop.items(limit=5))"}
        result = await client.call_tool("code__run", arguments)
        failed = await client.call_tool("code__run", {"script": "shop.itms()"})
    assert sorted(tool.name for tool in tools) == ["code__run", "code__search"]
    assert result.structured_content is not None
    assert result.structured_content["result"] == 5
    assert failed.is_error
    assert "SCRIPT_REJECTED" in str(failed)


async def test_clients_of_an_mcp_server_find_and_call_saved_scripts_in_scripts() -> None:
    saved = SavedScript(id="report.daily", script=REPORT, description="Send the daily report.")
    async with (
        shop(saved=[saved]) as registry,
        Client(to_mcp(registry, disclosure="code", identity=BUYER.identity)) as client,
    ):
        tools = (await client.list_tools()).tools
        found = await client.call_tool("code__search", {"query": "daily report"})
        arguments = {"script": "return await report.daily(limit=2)"}
        result = await client.call_tool("code__run", arguments)
    assert len(tools) == 2
    assert found.structured_content is not None
    assert "async def daily(self, **more: Any)" in found.structured_content["stubs"]
    assert result.structured_content is not None
    assert result.structured_content["result"] == [{"ordered": 0}, {"ordered": 1}]


async def test_a_server_without_code_mode_lists_the_gateway() -> None:
    registry = OperationRegistry([])
    async with registry, Client(to_mcp(registry, disclosure="code")) as client:
        assert "call" in [tool.name for tool in (await client.list_tools()).tools]


async def test_a_toolbox_has_only_the_two_tools_and_pages() -> None:
    async with shop() as registry:
        box = Toolbox(registry, identity=BUYER.identity, disclosure="code", max_bytes=2_000)
        names = [tool["name"] for tool in box.anthropic()]
        assert sorted(names) == ["code__run", "code__search", "results__next"]
        call = {
            "type": "tool_use",
            "id": "1",
            "name": "code__run",
            "input": {"script": "return [await shop.items(limit=50) for _ in range(5)]"},
        }
        message = await box.run(call)
        page = json.loads(message["content"])
        assert page["cursor"]
        following = {**call, "name": "results__next", "input": {"cursor": page["cursor"]}}
        assert json.loads((await box.run(following))["content"])["value"]


async def test_a_toolbox_does_not_promise_limits_that_scripts_do_not_have() -> None:
    async with shop() as registry:
        with pytest.raises(ValueError, match="grant"):
            Toolbox(registry, allow=["shop.*"], disclosure="code")
    with pytest.raises(ValueError, match="register_all"):
        Toolbox(OperationRegistry(), disclosure="code").openai()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(MODULE)
    (tmp_path / "operations.toml").write_text(
        "modules = ['shop.py']\n[code]\nadvanced.calls = 3\n[serve.mcp]\ndisclosure = 'code'\n"
    )
    (tmp_path / "script.py").write_text("print('hi')\nreturn await shop.items(limit=3)\n")
    return tmp_path


async def test_a_file_enables_code_mode_with_its_limits(folder: Path) -> None:
    with time_limit(60):
        async with open_hub(folder / "operations.toml") as hub:
            assert await run(hub.registry, "return await shop.items()") == [0, 1]
            with pytest.raises(CallError) as caught:
                await run(hub.registry, "for n in range(9):\n    await shop.items()")
    assert caught.value.details == {"limit": "calls"}


async def test_a_file_can_require_scopes_for_scripts(folder: Path) -> None:
    path = folder / "operations.toml"
    path.write_text("modules = ['shop.py']\n[code]\nscopes = ['scripts']\n")
    async with open_hub(path) as hub:
        assert await run(hub.registry, "return 1") == 1
        for context in (BUYER, OperationContext()):
            with pytest.raises(CallError) as caught:
                await run(hub.registry, "return 1", context)
            assert caught.value.code == ErrorCode.ACCESS_DENIED


def test_code_mode_of_the_mcp_server_needs_its_table(folder: Path) -> None:
    path = folder / "operations.toml"
    path.write_text("[serve.mcp]\ndisclosure = 'code'\n")
    with pytest.raises(ConfigError, match=r"\[code\]"):
        load_config(path)


def command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "operations", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_command_runs_and_checks_a_script(folder: Path) -> None:
    done = command(folder, "run", "script.py", "--json")
    assert done.returncode == 0, done.stderr
    data: Any = json.loads(done.stdout)
    assert (data["result"], data["printed"], data["calls"]) == ([0, 1, 2], "hi\n", 1)
    (folder / "wrong.py").write_text("await shop.items(limt=3)\n")
    wrong = command(folder, "run", "wrong.py", "--check")
    assert wrong.returncode == 1
    assert "limt" in wrong.stdout + wrong.stderr


def test_the_command_runs_a_script_as_another_caller_without_a_table(folder: Path) -> None:
    (folder / "operations.toml").write_text("modules = ['shop.py']\n")
    (folder / "order.py").write_text("return await eval('shop').order(item=1)\n")
    assert command(folder, "run", "order.py").returncode == 0
    assert command(folder, "run", "order.py", "--as", "anonymous").returncode == 1


async def test_code_mode_is_closed_with_its_registry() -> None:
    registry = OperationRegistry()
    code = Code(registry)
    registry.register_all(code)
    async with registry:
        assert await run(registry, "return 1", OPERATOR) == 1
    assert code._sandbox._pool is None


async def test_allow_does_not_open_scripts_to_a_toolbox() -> None:
    async with shop() as registry:
        box = Toolbox(registry, allow=["shop.items", "code.*"])
        assert "code__run" not in [tool["name"] for tool in box.anthropic()]
        assert "code__run" in [tool["name"] for tool in Toolbox(registry).anthropic()]


def test_an_operator_makes_a_script_an_operation(folder: Path) -> None:
    script = folder / "monthly.py"
    script.write_text(
        "order = await shop.order(item=arguments['item'])\nreturn [order, await shop.items(limit=1)]\n"
    )
    saved = command(folder, "code", "save", "report.monthly", "monthly.py", "--json")
    assert saved.returncode == 0, saved.stderr
    entry = json.loads(saved.stdout)
    assert (entry["scopes"], sorted(entry["uses"])) == (["buy"], ["shop.items", "shop.order"])
    called = command(folder, "call", "report.monthly", "item:=7", "--json")
    assert json.loads(called.stdout) == [7, [0]]
    denied = command(folder, "call", "report.monthly", "item:=7", "--as", "anonymous")
    assert denied.returncode in (4, 5)
    script.write_text("return 1\n")
    changed = command(folder, "call", "report.monthly", "item:=7")
    assert changed.returncode == 3
    assert "save it again" in changed.stderr


def test_a_saved_script_may_call_operations_of_every_source(folder: Path) -> None:
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Mail", "version": "1"},
        "paths": {
            "/send": {"post": {"operationId": "send", "responses": {"204": {"description": ""}}}}
        },
    }
    (folder / "mail.json").write_text(json.dumps(document))
    config = folder / "operations.toml"
    source = "[openapi.mail]\ndocument = 'mail.json'\nbase_url = 'http://127.0.0.1:9'\n"
    config.write_text(config.read_text() + source)
    script = folder / "monthly.py"
    script.write_text("if arguments:\n    await mail.send()\nreturn await shop.items(limit=1)\n")
    assert command(folder, "code", "save", "report.monthly", "monthly.py").returncode == 0
    called = command(folder, "call", "report.monthly", "--json")
    assert called.returncode == 0, called.stderr
    assert json.loads(called.stdout) == [0]


def test_scripts_are_checked_and_saved_without_a_server_that_works_on_runs(folder: Path) -> None:
    config = folder / "operations.toml"
    config.write_text(config.read_text() + "[runs]\nurl = 'sqlite:runs.db'\n")
    assert command(folder, "run", "script.py", "--check").returncode == 0
    (folder / "wrong.py").write_text("await shop.items(limt=3)\n")
    assert "limt" in command(folder, "run", "wrong.py", "--check").stderr
    assert command(folder, "code", "save", "report.daily", "script.py").returncode == 0
    assert command(folder, "code", "save", "report.wrong", "wrong.py").returncode == 1


def test_a_script_with_errors_is_not_saved(folder: Path) -> None:
    before = (folder / "operations.toml").read_text()
    (folder / "wrong.py").write_text("await shop.items(limt=3)\n")
    assert command(folder, "code", "save", "report.wrong", "wrong.py").returncode == 1
    assert command(folder, "code", "save", "shop.items", "script.py").returncode == 2
    assert (folder / "operations.toml").read_text() == before
