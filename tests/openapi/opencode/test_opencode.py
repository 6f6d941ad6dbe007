"""opencode's own server: its results are those of raw requests, and its sessions and events work."""

import asyncio
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.limits import scaled, time_limit
from tests.node_packages import install_node_packages
from tests.servers import free_port, wait_for_port

from operations import CallError, OperationRegistry, OperationSpec, OperationType
from operations.base.json.values import object_of
from operations.openapi import HTTPServiceConfig, from_openapi_url

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow

WAITS = "tui.control.next"
"""This operation answers when a terminal asks for something, so never."""

FAILS = "v2.fs.read"
"""This operation needs a path that its document does not declare, so the server fails."""

RESULT_VALUES = 250_000
"""`provider.list` has more values than this. It was the limit once."""


def models() -> dict[str, Any]:
    """A catalogue of models in the format of models.dev, which opencode downloads otherwise."""
    model = {
        "attachment": True,
        "cost": {"input": 1.5, "output": 2, "cache_read": 0.1},
        "family": "f",
        "knowledge": "2025-01",
        "last_updated": "2025-01-01",
        "limit": {"context": 200_000, "output": 8192},
        "modalities": {"input": ["text", "image"], "output": ["text"]},
        "open_weights": False,
        "reasoning": True,
        "release_date": "2025-01-01",
        "temperature": True,
        "tool_call": True,
    }
    return {
        f"p{number}": {
            "id": f"p{number}",
            "name": f"Provider {number}",
            "env": [f"P{number}_KEY"],
            "npm": "@ai-sdk/openai-compatible",
            "api": "https://provider.example/v1",
            "doc": "https://provider.example",
            "models": {f"m{i}": {"id": f"m{i}", "name": f"Model {i}", **model} for i in range(60)},
        }
        for number in range(130)
    }


def wait_for_document(url: str) -> None:
    """Return when the server sends its document; it may never answer the requests that arrive while it starts."""
    end = time.monotonic() + scaled(60)
    while True:
        try:
            with urllib.request.urlopen(url, timeout=scaled(5)) as response:  # noqa: S310 - our own address
                response.read()
        except OSError:
            if time.monotonic() > end:
                raise
        else:
            return


@pytest.fixture(scope="module")
def opencode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server, which has its own home, works in an empty project and uses no network."""
    install_node_packages(HERE, "opencode-ai/package.json")
    # The installed program only explains that its own installer did not run. The first runs on all processors.
    binaries = sorted(HERE.glob("node_modules/opencode-*-baseline/bin/opencode"))
    binaries += sorted(HERE.glob("node_modules/opencode-*/bin/opencode"))
    if not binaries:
        pytest.skip("there is no opencode for this platform")
    home, project = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("project")
    (home / "models.json").write_text(json.dumps(models()))
    port = free_port()
    server = subprocess.Popen(
        [binaries[0], "serve", "--hostname", "127.0.0.1", "--port", str(port)],
        cwd=project,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            **{
                f"XDG_{kind}_HOME": str(home / kind)
                for kind in ("CACHE", "CONFIG", "DATA", "STATE")
            },
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_MODELS_PATH": str(home / "models.json"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port)
        url = f"http://127.0.0.1:{port}"
        wait_for_document(f"{url}/doc")
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def registry(opencode: str) -> AsyncGenerator[OperationRegistry]:
    config = HTTPServiceConfig(namespace="opencode", base_url=opencode, timeout=scaled(60))
    async with OperationRegistry() as registry:
        registry.register_all(await from_openapi_url(f"{opencode}/doc", config))
        yield registry


def values(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + sum(map(values, data.values()))
    return 1 + sum(map(values, data)) if isinstance(data, list) else 1


async def test_calls_without_arguments_return_what_the_server_sends(
    opencode: str, registry: OperationRegistry
) -> None:
    streams = [each for each in registry if each.spec.type is OperationType.SUBSCRIPTION]
    queries = [
        each.spec
        for each in registry
        if each.spec.type is OperationType.QUERY
        and not object_of(each.spec.input_schema.document).get("required")
        and each.spec.name not in (WAITS, FAILS)
    ]
    assert (len([*registry]), len(streams), len(queries)) == (188, 4, 51)

    async with aiohttp.ClientSession() as session:

        async def sent(spec: OperationSpec) -> Any:
            async with session.get(opencode + spec.meta["path"]) as response:
                raw = await response.text()
            return json.loads(raw) if response.content_type.endswith("json") else raw

        for spec in queries:
            # The server loads some of its lists in the background, so that they may change between two requests.
            with time_limit(60):
                before, after = None, await sent(spec)
                while before != after:
                    before = after
                    result = await registry.execute(spec.id, {})
                    after = await sent(spec)
            assert result.data == after

    with pytest.raises(CallError, match="HTTP 500"):
        await registry.execute(f"opencode.{FAILS}", {})


async def test_a_list_with_more_than_250_000_values_is_returned(
    registry: OperationRegistry,
) -> None:
    result = await registry.execute("opencode.provider.list", {})

    assert values(result.data) > RESULT_VALUES
    assert len(result.data["all"]) == 130


async def test_sessions_are_created_listed_and_announced(registry: OperationRegistry) -> None:
    async with aclosing(registry.subscribe("opencode.event.subscribe", {})) as events:
        with time_limit(60):
            assert (await anext(events)).data["type"] == "server.connected"
            created = asyncio.create_task(
                registry.execute("opencode.session.create", {"body": {"title": "A test"}})
            )
            async for event in events:
                if event.data["type"] == "session.created":
                    break
            session = (await created).data
    assert event.data["properties"]["info"]["id"] == session["id"]

    listed = await registry.execute("opencode.session.list", {})
    assert [(each["id"], each["title"]) for each in listed.data] == [(session["id"], "A test")]

    path = {"sessionID": session["id"]}
    assert (await registry.execute("opencode.session.delete", path)).data is True
    assert (await registry.execute("opencode.session.list", {})).data == []
    with pytest.raises(CallError, match="HTTP 404"):
        await registry.execute("opencode.session.get", path)
