"""A library does not change the process of its host."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import host_state
from tests.conftest import PROJECT
from tests.limits import scaled

from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file

EXCEPTIONS = {
    "import operations.postgres": {"psycopg"},
    "import operations.telemetry.otlp": {"opentelemetry.sdk._shared_internal"},
    "running": {"asyncio", "uvicorn.error"},
    "running closed": {"asyncio", "uvicorn.error"},
    "connect_mcp over HTTP": {
        *("client", "httpx2", "mcp.client.sse", "mcp.client.streamable_http"),
    },
    "scan_operations of files that a function reads": {"sys.meta_path"},
    "open_hub": {"sys.path"},
    "the app of a hub": {"asyncio", "uvicorn.error"},
    "hub closed": {"asyncio", "uvicorn.error"},
}
"""What docs/security.md lists: the changes of each step."""


@pytest.mark.requirement("R69")
def test_no_entry_point_changes_the_process_except_as_documented(tmp_path: Path) -> None:
    program = [sys.executable, host_state.__file__, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, timeout=scaled(300), check=False)
    assert run.returncode == 0, run.stderr
    found = {
        step["step"]: set(step["changes"]) for step in map(json.loads, run.stdout.splitlines())
    }

    assert found == EXCEPTIONS
    page = (PROJECT / "docs" / "security.md").read_text(encoding="utf-8")
    listed = page.partition("## What the library changes in its process")[2].partition("\n## ")[0]
    for names in EXCEPTIONS.values():
        for name in names:
            assert f"`{name}`" in listed


@pytest.mark.requirement("R69")
async def test_importing_a_document_leaves_the_objects_of_the_application_in_their_generation(
    tmp_path: Path,
) -> None:
    content = {"application/json": {"schema": {"type": "object", "title": "Item"}}}
    get = {"responses": {"200": {"description": "The items.", "content": content}}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Test", "version": "1"},
        "paths": {f"/items/{number}": {"get": get} for number in range(5_000)},
    }
    (tmp_path / "api.json").write_text(json.dumps(document))
    config = HTTPServiceConfig(namespace="api", base_url="http://127.0.0.1:9")
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    # No collection runs by itself, which would also move objects to an older generation.
    gc.set_threshold(1_000_000_000)
    cycle = list[Any]()
    cycle.append(cycle)
    try:
        services = (
            from_openapi(document, config),
            await from_openapi_file(tmp_path / "api.json", config),
        )
        assert all(len(service.operations) == 5_000 for service in services)
        assert any(each is cycle for each in gc.get_objects(0))
        assert gc.get_freeze_count() == frozen
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
