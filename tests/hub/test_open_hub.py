"""A hub is opened from its file, by code as by the command line."""

from pathlib import Path

import aiohttp
import pytest
from mcp import Client
from tests.limits import time_limit

from operations import CallError, Identity, OperationContext
from operations.config import ConfigError
from operations.hub import open_hub
from operations.hub.app import mcp_server
from operations.server.http11.running import running

pytestmark = pytest.mark.anyio

MODULE = """
from operations import operation


@operation("hello.greet", type="query")
async def greet(name: str) -> str:
    return f"Hello, {name}!"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hello.py").write_text(MODULE)
    (tmp_path / "operations.toml").write_text(
        'modules = ["hello.py"]\n[record.trace]\nenabled = false\n'
    )
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path])
async def test_a_file_becomes_a_registry_and_an_application(folder: Path, kind: type) -> None:
    with time_limit(150):
        async with open_hub(kind(folder / "operations.toml")) as hub:
            assert (
                await hub.registry.execute("hello.greet", {"name": "Ann"})
            ).data == "Hello, Ann!"
            assert hub.app is hub.app
            for _ in range(2):
                async with running(hub.app) as url, aiohttp.ClientSession() as session:
                    async with session.get(f"{url}/hello/greet?name=Ben") as response:
                        assert await response.json() == "Hello, Ben!"
                    async with session.get(f"{url}/") as response:
                        assert response.status == 200
                    async with session.get(f"{url}/mcp") as response:
                        assert response.status != 404


async def test_a_wrong_file_is_reported(folder: Path) -> None:
    (folder / "operations.toml").write_text("[serve]\nprot = 1\n")

    with pytest.raises(ConfigError, match="port"):
        async with open_hub(folder / "operations.toml"):
            pass


async def test_the_table_of_tools_applies_to_every_source(folder: Path) -> None:
    path = folder / "operations.toml"
    tools = """
[tools."hello.*"]
scopes = ["greet"]
cache = 60
[tools."helo.*"]
timeout = 5
[tools."hello.greet"]
rename = "hello.welcome"
"""
    path.write_text(path.read_text() + tools)
    ann = OperationContext(identity=Identity("ann", ["greet"]))

    async with open_hub(path) as hub:
        assert hub.tools.unmatched == {"helo.*"}
        found = await hub.registry.execute("hello.welcome", {"name": "Ann"}, ann)
        assert found.data == "Hello, Ann!"
        with pytest.raises(CallError, match="denied"):
            await hub.registry.execute("hello.welcome", {"name": "Ann"})
        assert hub.source_of("hello.welcome") is not None


async def test_a_trace_that_cannot_be_written_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "state").write_text("not a folder")
    config = folder / "operations.toml"
    config.write_text('modules = ["hello.py"]\n[record.trace]\nfile = "state/trace.jsonl"\n')

    async with open_hub(config) as hub:
        assert (await hub.registry.execute("hello.greet", {"name": "Ann"})).data == "Hello, Ann!"

    assert f"{folder}/state cannot be written: File exists; set record.trace.file" in caplog.text


@pytest.mark.parametrize("table", ["audit", "trace"])
async def test_a_file_whose_name_contains_nul_is_reported_with_its_key(
    folder: Path, table: str
) -> None:
    config = folder / "operations.toml"
    config.write_text(f'modules = ["hello.py"]\n[record.{table}]\nfile = "a\\u0000b"\n')

    with pytest.raises(ConfigError, match=rf"{table}\.file .*(null|NUL)"):
        async with open_hub(config):
            pass


async def test_the_title_of_a_server_is_the_name_of_its_mcp_server(folder: Path) -> None:
    config = folder / "operations.toml"
    config.write_text('modules = ["hello.py"]\n[serve]\ntitle = "Shop"\nprocesses = 2\n')

    async with open_hub(config) as hub, running(hub.app) as url:
        assert (await mcp_server(hub, None)).name == "Shop"
        async with Client(f"{url}/mcp") as client:
            assert client.server_info is not None
            assert client.server_info.name == "Shop"
