"""The command: start the API and the hub, take the tour, keep serving."""

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from operations._signals import shutdown_event
from operations.access import Identity
from operations.cli.demo.api import build_api
from operations.cli.demo.tour import run_tour
from operations.cli.options import DEFAULTS, Common, command
from operations.cli.serve import announce
from operations.config import ConfigFile, load_config
from operations.config.reading import FILE_NAME, VARIABLE
from operations.errors import OperationsError
from operations.hub.hub import Hub, open_hub
from operations.hub.serving import build_app, entry_points_of
from operations.server import hash_key, new_key
from operations.server.running import running

MANAGER = Identity("manager", ["cafe:manage"])


@command
async def demo(
    *,
    once: Annotated[bool, Parameter(negative="")] = False,
    port: Annotated[int, Parameter(alias="-p")] = 0,
    common: Common = DEFAULTS,
) -> None:
    """See it all at work: a REST API, an MCP server and Python functions behind one address.

    Takes a tour of every kind of call, then serves until Ctrl-C. Nothing has to be configured or installed.

    Args:
        once: End after the tour, as it does without a terminal.
        port: Where to serve; 0 takes a free port.
        common: What every command takes.
    """
    screen = common.screen()
    stays = not once and sys.stdin.isatty() and screen.is_terminal
    key = new_key()
    async with open_demo(key) as hub:
        entry_points = entry_points_of(hub.file)
        async with running(build_app(hub), port=port) as url:
            if not screen.json:
                announce(url, entry_points, hub, screen)
            seen = await run_tour(hub.registry, screen, MANAGER)
            if screen.json:
                screen.value({"url": url, "operations": hub.offered, "tour": seen})
            elif stays:
                with shutdown_event() as shutdown:
                    screen.note(
                        f"\nstill serving at {url}; sign in with the key {key}. Ctrl-C ends it",
                        "bold",
                    )
                    screen.note(
                        f"the commands above work in another terminal: export {VARIABLE}={hub.file.path}"
                    )
                    await shutdown.wait()
            else:
                screen.note(
                    "\nthat was the tour; at a terminal, without --once, it goes on serving"
                )


@asynccontextmanager
async def open_demo(key: str) -> AsyncGenerator[Hub]:
    """The hub of the demo, and the API it imports, for the length of an `async with` block.

    Args:
        key: Signs the manager in.

    Raises:
        OperationsError: If one of the three sources is not there.
    """
    with TemporaryDirectory(prefix="operations-demo-") as folder:
        async with running(build_api()) as api, open_hub(_file(Path(folder), api, key)) as hub:
            for source in hub.absent():
                raise OperationsError(f"{source.label} did not start: {source.problem}")
            yield hub


_CONFIG = """\
modules = ["operations.cli.demo.local"]

[openapi.shop]
document = {document}
base_url = {api}

[mcp.money]
command = {python}
args = [{tools}]
queries = ["convert"]

[access.keys.manager]
sha256 = {sha256}
scopes = {scopes}

[serve]
port = 0
scopes_supported = {scopes}

[trace]
file = "trace.jsonl"
"""


def _file(folder: Path, api: str, key: str) -> ConfigFile:
    """What a person would have written."""
    values = {
        "document": f"{api}/openapi.json",
        "api": api,
        "python": sys.executable,
        "tools": str(Path(__file__).with_name("tools.py")),
        "sha256": hash_key(key),
        "scopes": list(MANAGER.scopes),
    }
    # JSON of strings and lists of them is TOML.
    text = _CONFIG.format(**{name: json.dumps(value) for name, value in values.items()})
    (folder / FILE_NAME).write_text(text, encoding="utf-8")
    return load_config(folder / FILE_NAME)
