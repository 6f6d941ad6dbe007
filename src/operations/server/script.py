"""Serve a registry from a script, until Ctrl-C."""

import asyncio
import sys
from typing import Any

from operations.base.tasks import shutdown_event
from operations.base.text import counted
from operations.front.config import ListenConfig, MCPServerSettings
from operations.registry.registry import OperationRegistry
from operations.server.app import create_app
from operations.server.http11.running import running_on
from operations.sources.local import is_importing


def run(
    registry: OperationRegistry,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    stdio: bool = False,
    **options: Any,
) -> None:
    """Serve a registry until Ctrl-C: as an HTTP API, over MCP and WebSocket, with a web console.

    `operations dev FILE` serves the same file, and imports it again when it changes.

    Args:
        registry: The operations. It is closed at the end.
        host: The address to listen on. One that other machines can reach needs `identity`, or `public=True`.
        port: The port; 0 selects a free port.
        stdio: Serve MCP on standard input and output instead, to the program that started this one.
        options: Further fields of `ServerConfig` and `ListenConfig`, such as `identity`.

    Raises:
        RuntimeError: If a module calls it while it is imported by `operations dev` or another scan.
        OSError: If the port is taken.
    """
    if is_importing():
        raise RuntimeError(
            'operations.run serves by itself: call it below `if __name__ == "__main__":` in a file that is imported'
        )
    serve = _serve_stdio(registry) if stdio else _serve(registry, host, port, options)
    try:
        asyncio.run(serve)
    except KeyboardInterrupt:
        # The second one; the first shuts down in order.
        sys.exit(130)


async def _serve(
    registry: OperationRegistry, host: str, port: int, options: dict[str, Any]
) -> None:
    listen = {name: options.pop(name) for name in _LISTEN & options.keys()}
    config = ListenConfig(host=host, port=port, **listen)
    options = {"mcp": True, "websocket": True, "console": True, **options}
    async with registry:
        app = create_app(registry, **options)
        async with running_on(app, config) as url:
            with shutdown_event() as shutdown:
                words = f"serving {counted(len(registry), 'operation')} at {url}"
                paths = {"console": "", "mcp": "mcp"}
                places = [
                    f"  {name:10}{url}/{path}" for name, path in paths.items() if options[name]
                ]
                sys.stderr.write("\n".join([words, *places, "press Ctrl-C to stop", ""]))
                await shutdown.wait()


async def _serve_stdio(registry: OperationRegistry) -> None:
    from operations.mcp import RegistryServer  # noqa: PLC0415 - needs an extra

    async with registry:
        await RegistryServer(registry, MCPServerSettings()).run_stdio()


_LISTEN = frozenset(ListenConfig.__dataclass_fields__) - {"host", "port"}
