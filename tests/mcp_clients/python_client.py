"""Clients in Python: `python python_client.py KIND URL` prints what each cell of the matrix saw, as one JSON object.

It runs in environments with other versions of `mcp`, and with `fastmcp`, so it imports neither at the top.
"""

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any


@asynccontextmanager
async def connect_mcp1(url: str) -> AsyncGenerator[Any]:
    """Connect the client of the Python SDK 1.x."""
    transport = import_module("mcp.client.streamable_http").streamablehttp_client
    async with (
        transport(url) as (read, write, _),
        import_module("mcp").ClientSession(read, write) as session,
    ):
        await session.initialize()
        yield session


def connect_mcp2(url: str) -> Any:
    """Connect the client of the Python SDK 2.x, with the newest revision of the protocol."""
    return import_module("mcp").Client(url)


def connect_mcp2_legacy(url: str) -> Any:
    """Connect the client of the Python SDK 2.x, with a session of 2025."""
    return import_module("mcp").Client(url, mode="legacy")


def connect_fastmcp(url: str) -> Any:
    """Connect FastMCP's client."""
    return import_module("fastmcp").Client(url)


class LangChain:
    """The client of `langchain-mcp-adapters`, with the methods of the SDK's own."""

    def __init__(self, url: str) -> None:
        self._note: Any = None
        adapters = "langchain_mcp_adapters"
        callbacks = import_module(f"{adapters}.callbacks").Callbacks(on_progress=self._progress)
        servers = {"hub": {"transport": "streamable_http", "url": url}}
        self._client = import_module(f"{adapters}.client").MultiServerMCPClient(
            servers, callbacks=callbacks
        )

    async def _progress(self, progress: float, total: Any, message: Any, _context: Any) -> None:
        if self._note is not None:
            await self._note(progress, total, message)

    async def list_tools(self) -> Any:
        return await self._client.get_tools()

    async def call_tool(self, name: str, arguments: Any, progress_callback: Any = None) -> Any:
        self._note = progress_callback
        (tool,) = [tool for tool in await self.list_tools() if tool.name == name]
        request = {"type": "tool_call", "id": "1", "name": name, "args": arguments}
        message = await tool.ainvoke(request)
        artifact: dict[str, Any] = message.artifact or {}
        return SimpleNamespace(
            structuredContent=artifact.get("structured_content"),
            isError=message.status == "error",
            content=[SimpleNamespace(text=block["text"]) for block in message.content],
        )

    async def get_prompt(self, name: str, arguments: Any) -> Any:
        messages = await self._client.get_prompt("hub", name, arguments=arguments)
        texts = [SimpleNamespace(text=message.content) for message in messages]
        return SimpleNamespace(messages=[SimpleNamespace(content=text) for text in texts])

    async def read_resource(self, uri: str) -> Any:
        blobs = await self._client.get_resources("hub", uris=[uri])
        return [SimpleNamespace(text=blob.as_string()) for blob in blobs]


@asynccontextmanager
async def connect_langchain(url: str) -> AsyncGenerator[Any]:
    """Connect the client of `langchain-mcp-adapters`, which opens a session for each request."""
    yield LangChain(url)


CONNECT: dict[str, Callable[[str], Any]] = {
    "mcp1": connect_mcp1,
    "mcp2": connect_mcp2,
    "mcp2-legacy": connect_mcp2_legacy,
    "fastmcp": connect_fastmcp,
    "langchain": connect_langchain,
}


class Cells:
    """The results that the cells inspect, without the differences between clients."""

    def __init__(self, client: Any, kind: str) -> None:
        self._client = client
        self._is_fastmcp = kind == "fastmcp"

    async def _call(self, name: str, note: Any = None, **arguments: Any) -> Any:
        options: dict[str, Any] = {}
        if self._is_fastmcp:
            options = {"progress_handler": note, "raise_on_error": False}
        elif note is not None:
            options = {"progress_callback": note}
        return await self._client.call_tool(f"matrix__{name}", arguments, **options)

    async def _data(self, name: str, **arguments: Any) -> Any:
        result = await self._call(name, **arguments)
        if self._is_fastmcp:
            return _plain(result.data)
        return _first(result, "structuredContent", "structured_content")

    async def list(self) -> Any:
        listed = await self._client.list_tools()
        return sorted(tool.name for tool in getattr(listed, "tools", listed))

    async def call(self) -> Any:
        return await self._data("add", a=1, b=2)

    async def error(self) -> Any:
        result = await self._call("fail")
        return [_first(result, "isError", "is_error"), result.content[0].text]

    async def mismatch(self) -> Any:
        result = await self._call("mismatch")
        return [_first(result, "isError", "is_error"), result.content[0].text]

    async def typed(self) -> Any:
        if self._is_fastmcp:
            data = (await self._call("task", id="t7")).data
            names: dict[Any, str] = {str: "string", bool: "boolean"}
            return {field.name: names.get(field.type) for field in dataclasses.fields(data)}
        listed = await self._client.list_tools()
        (tool,) = [tool for tool in listed.tools if tool.name == "matrix__task"]
        properties = _first(tool, "outputSchema", "output_schema")["properties"]
        return {name: schema["type"] for name, schema in properties.items()}

    async def progress(self) -> Any:
        steps: list[float] = []

        async def note(progress: float, _total: float | None, _message: str | None) -> None:
            steps.append(progress)

        await self._call("steps", note)
        return steps

    async def structured(self) -> Any:
        return await self._data("task", id="t7")

    async def items(self) -> Any:
        return await self._data("tasks")

    async def prompt(self) -> Any:
        result = await self._client.get_prompt("matrix__greet", {"name": "Ann"})
        return result.messages[0].content.text

    async def resource(self) -> Any:
        read = await self._client.read_resource("matrix://motd")
        return getattr(read, "contents", read)[0].text


def _first(result: Any, *names: str) -> Any:
    return next(getattr(result, name) for name in names if hasattr(result, name))


def _plain(value: Any) -> Any:
    """Return data as JSON has it: FastMCP makes objects of classes that it derives from the schema."""
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return [_plain(item) for item in items]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


async def main(kind: str, url: str) -> None:
    """Look at every cell."""
    seen: dict[str, Any] = {}
    async with CONNECT[kind](url) as client:
        cells = Cells(client, kind)
        for cell in (name for name in vars(Cells) if not name.startswith("_")):
            try:
                seen[cell] = await asyncio.wait_for(getattr(cells, cell)(), 60)
            except Exception as error:  # noqa: BLE001 - any error is a failed cell
                seen[cell] = f"{type(error).__name__}: {error}"
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
