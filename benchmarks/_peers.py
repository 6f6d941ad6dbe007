"""Print the information that a caller gets about a failure through one library. `scripts/compare` runs this for each.

    http   an endpoint answers 404 with {"detail": "nobody measures in Rome", "code": 17}
    mcp    a tool answers isError, the text "it failed", and structured content {"code": "SOLD_OUT", "left": 0}

usage: _peers.py LIBRARY PYTHON      where PYTHON has the `mcp` package that _failing_server.py needs
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

SERVER = [sys.argv[2], str(Path(__file__).with_name("_failing_server.py"))]
BODY = b'{"detail": "nobody measures in Rome", "code": 17}'


class Refusal(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_: Any) -> None:
        pass


api = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
threading.Thread(target=api.serve_forever, daemon=True).start()
URL = f"http://127.0.0.1:{api.server_port}"
CITY = {"name": "city", "in": "path", "required": True, "schema": {"type": "string"}}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.3",
    "info": {"title": "Weather", "version": "1"},
    "servers": [{"url": URL}],
    "paths": {
        "/forecast/{city}": {
            "get": {
                "operationId": "forecast",
                "parameters": [CITY],
                "responses": {"200": {"description": "ok"}, "404": {"description": "nobody measures"}},
            }
        }
    },
}  # fmt: skip


async def operations_http() -> Any:
    from operations import OperationRegistry
    from operations.openapi import HTTPServiceConfig, from_openapi

    async with OperationRegistry() as registry:
        config = HTTPServiceConfig(namespace="api", base_url=URL)
        registry.register_all(from_openapi(DOCUMENT, config))
        await registry.execute("api.forecast", {"city": "Rome"})


async def operations_mcp() -> Any:
    from operations import OperationRegistry
    from operations.mcp import MCPClientConfig, connect_mcp

    command, *args = SERVER
    async with connect_mcp("shop", MCPClientConfig(command=command, args=args)) as client:
        return (await OperationRegistry(client).execute("shop.fail", {})).data


async def fastmcp_http() -> Any:
    import httpx2
    from fastmcp import FastMCP

    async with httpx2.AsyncClient(base_url=URL) as client:
        server = FastMCP.from_openapi(DOCUMENT, client=client)
        return await server.call_tool("forecast", {"city": "Rome"})


async def fastmcp_mcp() -> Any:
    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport

    async with Client(StdioTransport(SERVER[0], SERVER[1:])) as client:
        whole = await client.call_tool("fail", {}, raise_on_error=False)
        print(f"  with raise_on_error=False: {whole.structured_content}")
        return await client.call_tool("fail", {})


async def utcp_http() -> Any:
    from utcp.utcp_client import UtcpClient
    from utcp_http.http_call_template import HttpCallTemplate
    from utcp_http.openapi_converter import OpenApiConverter

    manual = OpenApiConverter(DOCUMENT, spec_url=f"{URL}/openapi.json").convert()
    (tool,) = manual.tools
    tool.name = f"api.{tool.name}"
    client = await UtcpClient.create()
    template = HttpCallTemplate(name="api", url=f"{URL}/openapi.json", http_method="GET")
    await client.config.tool_repository.save_manual(template, manual)
    return await client.call_tool(tool.name, {"city": "Rome"})


async def utcp_mcp() -> Any:
    from utcp.utcp_client import UtcpClient

    server = {"command": SERVER[0], "args": SERVER[1:], "transport": "stdio"}
    template = {"name": "shop", "call_template_type": "mcp", "config": {"mcpServers": {"s": server}}}  # fmt: skip
    client = await UtcpClient.create(config={"manual_call_templates": [template]})
    (tool,) = await client.search_tools("fail")
    return await client.call_tool(tool.name, {})


async def toolregistry_http() -> Any:
    from toolregistry import ToolRegistry
    from toolregistry.utils import HttpClientConfig

    registry = ToolRegistry()
    await registry.register_from_openapi_async(HttpClientConfig(base_url=URL), DOCUMENT)
    return await registry.get_tool(next(iter(registry.get_available_tools()))).arun(
        {"city": "Rome"}
    )


async def toolregistry_mcp() -> Any:
    from toolregistry import ToolRegistry

    registry = ToolRegistry()
    await registry.register_from_mcp_async(SERVER[1])
    return await registry.get_tool(next(iter(registry.get_available_tools()))).arun({})


async def langchain_mcp() -> Any:
    from langchain_mcp_adapters.client import MultiServerMCPClient

    server = {"command": SERVER[0], "args": SERVER[1:], "transport": "stdio"}
    (tool,) = await MultiServerMCPClient({"s": server}).get_tools()
    return await tool.ainvoke({"type": "tool_call", "id": "1", "name": "fail", "args": {}})


async def mcpo_mcp() -> Any:
    return await asyncio.to_thread(serve_by_mcpo)


def serve_by_mcpo() -> str:
    port = api.server_port + 1
    command = [str(Path(sys.executable).with_name("mcpo")), "--port", str(port), "--", *SERVER]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            while process.poll() is None:
                connection = HTTPConnection("127.0.0.1", port)
                try:
                    connection.request("POST", "/fail", "{}", {"Content-Type": "application/json"})
                except ConnectionError:
                    time.sleep(0.2)
                else:
                    response = connection.getresponse()
                    return f"{response.status} {response.read().decode()}"
        finally:
            process.terminate()
    raise RuntimeError("mcpo did not start")


PACKAGES = {
    "operations": "alkdev-operations", "fastmcp": "fastmcp", "utcp": "utcp", "toolregistry": "toolregistry",
    "langchain": "langchain-mcp-adapters", "mcpo": "mcpo",
}  # fmt: skip


async def show(what: str, call: Callable[[], Awaitable[Any]]) -> None:
    try:
        shown = f"returned {await asyncio.wait_for(call(), 60)!r}"
    except Exception as error:  # noqa: BLE001 - how it fails is the question
        details = getattr(error, "details", None)
        shown = f"raised {type(error).__name__}: {error}" + (f" {json.dumps(details)}" if details else "")  # fmt: skip
    print(f"  {what}: {shown}")


async def main() -> None:
    library = sys.argv[1]
    print(f"{library} {version(PACKAGES[library])}")
    for what in ("http", "mcp"):
        if call := globals().get(f"{library}_{what}"):
            await show(what, call)
    sys.stdout.flush()
    os._exit(0)  # some libraries leave tasks and threads running


asyncio.run(main())
