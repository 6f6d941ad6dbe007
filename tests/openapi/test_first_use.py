"""The first use of imported operations: definitions are compiled once for all of them, and outside of the loop."""

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.openapi.serving import serving

from operations import (
    CallError,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
)
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.schema import Schema, SharedDefinitions, checking
from operations.schema.compiling import compile_schema

STRIPE = Path(__file__).parents[3] / "shared" / "openapi" / "stripe__spec3-2021-06-07.json"


async def test_schemas_with_shared_definitions_are_compiled_outside_of_the_loop() -> None:
    threads: list[threading.Thread] = []

    def document() -> Any:
        threads.append(threading.current_thread())
        return {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}

    async def nothing(input: Any, context: OperationContext) -> None:
        pass

    schema = Schema(document, lenient=True, shared=SharedDefinitions())
    spec = OperationSpec(
        namespace="api", name="call", type=OperationType.QUERY, input_schema=schema
    )
    registry = OperationRegistry([Operation(spec, nothing)])
    await registry.execute("api.call", {})
    with pytest.raises(CallError):
        await registry.execute("api.call", 1)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.skipif(not STRIPE.exists(), reason="the shared documents are not here")
async def test_the_definitions_of_a_large_document_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages: list[set[str]] = []

    def counted(schema: Any, *args: Any, **options: Any) -> Any:
        pages.append(set(schema.get("$defs", ())))
        return compile_schema(schema, *args, **options)

    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [], "has_more": False, "url": "/"})

    monkeypatch.setattr(checking, "compile_schema", counted)
    async with serving(respond) as url, OperationRegistry() as registry:
        config = HTTPServiceConfig(namespace="api", base_url=url)
        service = from_openapi(json.loads(STRIPE.read_bytes()), config)
        registry.register_all(service)
        lists = [
            operation.spec.id
            for operation in service
            if operation.spec.meta["method"] == "GET" and "{" not in operation.spec.meta["path"]
        ][:20]
        for operation_id in lists:
            # Some need arguments. Their schemas are compiled all the same.
            with suppress(CallError):
                await registry.execute(operation_id, {})
    # All of them reach the same definitions, most of which refer to one another.
    assert sum(map(len, pages)) == len(set[str]().union(*pages)) > 150
    # Compiling a page holds the interpreter, so no page is large.
    assert max(map(len, pages)) < 250
