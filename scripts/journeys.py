"""Print which files of the package some usual calls run through."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import operations
from operations import OperationContext, OperationRegistry
from operations.calls import from_calls, serve_calls
from operations.hub import open_hub
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.pubsub.memory import MemoryTarget
from operations.server import create_app
from operations.server.http11.running import running

PACKAGE = str(Path(operations.__file__).parent) + "/"

Journey = Callable[[], Awaitable[object]]


def registry() -> OperationRegistry:
    """Return a registry with one operation."""
    found = OperationRegistry()

    @found.operation("task.get", type="query")
    async def get(id: int) -> dict[str, int]:
        return {"id": id}

    return found


@asynccontextmanager
async def local_call() -> AsyncGenerator[Journey]:
    """`registry.execute`."""
    here = registry()
    yield lambda: here.execute("task.get", {"id": 1})


@asynccontextmanager
async def served_request() -> AsyncGenerator[Journey]:
    """A GET request, without the parser of HTTP."""
    app = create_app(registry())
    scope = {
        "type": "http", "method": "GET", "path": "/task/get", "raw_path": b"/task/get", "query_string": b"id=1",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": "",
        "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message.get("status", 200) != 200:
            raise RuntimeError(message)

    yield lambda: app(dict(scope), receive, send)


@asynccontextmanager
async def imported_call() -> AsyncGenerator[Journey]:
    """A call of an operation of an OpenAPI document."""
    app = create_app(registry())
    async with running(app, port=0) as url:
        document: dict[str, Any] = {
            "openapi": "3.1.0", "info": {"title": "t", "version": "1"}, "servers": [{"url": url}],
            "paths": {"/task/get": {"get": {
                "operationId": "get", "responses": {"200": {"description": "ok"}},
                "parameters": [{"name": "id", "in": "query", "schema": {"type": "integer"}}],
            }}},
        }  # fmt: skip
        async with OperationRegistry() as here:
            here.register_all(from_openapi(document, HTTPServiceConfig("shop", base_url=url)))
            context = OperationContext(trusted=True)
            yield lambda: here.execute("shop.get", {"id": 1}, context)


@asynccontextmanager
async def call_to_a_worker() -> AsyncGenerator[Journey]:
    """A call over a transport, both ends."""
    target = MemoryTarget()
    async with (
        serve_calls(registry(), target),
        from_calls(target) as remote,
        OperationRegistry() as here,
    ):
        here.register_all(remote)
        yield lambda: here.execute("task.get", {"id": 1})


@asynccontextmanager
async def opening_a_hub() -> AsyncGenerator[Journey]:
    """A file with one module."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder))

        async def opened() -> None:
            async with open_hub(path):
                pass

        yield opened


def written(folder: Path) -> Path:
    """Write a module and a file that names it."""
    (folder / "tasks.py").write_text(
        "from operations import operation\n\n@operation('task.get')\ndef get(id: int) -> int:\n    return id\n"
    )
    path = folder / "operations.toml"
    path.write_text('modules = ["tasks.py"]\n')
    return path


async def followed(journey: Journey) -> list[str]:
    """Return the files of a journey in the order in which they are entered, one entry for each change of file."""
    files: list[str] = []

    def enter(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            short = name.removeprefix(PACKAGE)
            if not files or files[-1] != short:
                files.append(short)

    sys.setprofile(enter)
    try:
        await journey()
    finally:
        sys.setprofile(None)
    return files


async def main() -> None:
    """Print the report."""
    print(f"{'journey':<18}{'files':>6}{'returns':>9}  folders in order")
    for make in (local_call, served_request, imported_call, call_to_a_worker, opening_a_hub):
        async with make() as journey:
            # The first time compiles plans.
            for _ in range(3):
                await journey()
            files = await followed(journey)
        folders = list(dict.fromkeys(each.partition("/")[0] for each in files))
        returns = len(files) - len(set(files))
        print(
            f"{make.__name__.replace('_', ' '):<18}{len(set(files)):>6}{returns:>9}  {' '.join(folders)}"
        )
        if "--files" in sys.argv:
            print("".join(f"    {each}\n" for each in dict.fromkeys(files)))


if __name__ == "__main__":
    asyncio.run(main())
