"""ChromaDB's own server: its document is imported from it, and the server judges the requests."""

import asyncio
import json
import os
import subprocess
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from tests.limits import scaled
from tests.mcp_clients.matrix import MatrixError, prepare
from tests.servers import free_port, wait_for_port

from operations import CallError, ErrorCode, OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi_url

pytestmark = pytest.mark.slow

WHERE = {"tenant": "default_tenant", "database": "default_database"}


@pytest.fixture(scope="module")
def chromadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        program = prepare("chromadb") / "bin/chroma"
    except MatrixError as error:
        pytest.skip(f"the server cannot be installed here: {error}")
    port, folder = free_port(), tmp_path_factory.mktemp("chromadb")
    command = [
        str(program),
        "run",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--path",
        str(folder),
    ]
    environment = {**os.environ, "ANONYMIZED_TELEMETRY": "False"}
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def registry(chromadb: str) -> AsyncGenerator[OperationRegistry]:
    config = HTTPServiceConfig(namespace="chroma", base_url=chromadb, timeout=scaled(60))
    async with OperationRegistry() as registry:
        registry.register_all(await from_openapi_url(f"{chromadb}/openapi.json", config))
        yield registry


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=scaled(60)) as response:  # noqa: S310 - our own address
        return json.load(response)


@pytest.mark.requirement("R27")
async def test_values_that_match_two_members_of_a_one_of_arrive(
    registry: OperationRegistry, chromadb: str
) -> None:
    metadata = {"integer": 1, "number": 1.5, "text": "a", "flag": True}
    body = {"name": "papers", "metadata": metadata}
    made = (await registry.execute("chroma.create_collection", {**WHERE, "body": body})).data
    place = {**WHERE, "collection_id": made["id"]}
    added = {"ids": ["a", "b"], "embeddings": [[1, 2.5], [3, 4]], "metadatas": [{"x": 1}, None]}
    await registry.execute("chroma.collection_add", {**place, "body": added})

    path = "api/v2/tenants/default_tenant/databases/default_database/collections/papers"
    stored = await asyncio.to_thread(fetched, f"{chromadb}/{path}")
    assert stored["metadata"] == made["metadata"] == metadata
    assert (await registry.execute("chroma.collection_count", place)).data == 2
    found = await registry.execute("chroma.collection_get", {**place, "body": {"where": {"x": 1}}})
    assert found.data["ids"] == ["a"]

    wrong = {"name": "others", "metadata": {"x": {"y": 1}}}
    with pytest.raises(CallError) as caught:
        await registry.execute("chroma.create_collection", {**WHERE, "body": wrong})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
