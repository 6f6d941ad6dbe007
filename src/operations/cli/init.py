"""`operations init`, `operations login` and `operations completion`: commands for setting up."""

import webbrowser
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from operations._text import suggestion
from operations.cli.app import build_app
from operations.cli.options import DEFAULTS, Common, command, encoded
from operations.config import config_schema
from operations.config.reading import FILE_NAME
from operations.errors import OperationsError

SCHEMA_NAME = "operations.schema.json"
MODULE_NAME = "hello.py"

STARTER = """\
#:schema ./operations.schema.json
# What `operations` works with in this folder. Try: operations list

# Python code of your own: packages, folders or files with @operation functions.
modules = ["hello.py"]

# MCP servers you already have, in the file other programs use.
# mcp_json = ["mcp.json"]

# An HTTP API with an OpenAPI document. Its operations are shop.*
# [openapi.shop]
# document = "shop.yaml"                        # or an address
# base_url = "https://shop.example.com/v1"
# auth = { type = "bearer", token = { env = "SHOP_TOKEN" } }
# include = { methods = ["GET"], paths = ["/orders*"] }
# scopes = ["shop:use"]                         # what callers from outside need

# An MCP server: a program to start, or an address. Its operations are files.*
# [mcp.files]
# command = "npx"
# args = ["-y", "@modelcontextprotocol/server-filesystem", "."]
# queries = ["read_*", "list_*"]                # tools that only read

# Redis or NATS, for workers (operations work) and their callers.
# [brokers.main]
# url = "redis://127.0.0.1:6379"
# workers = true                                # import what its workers offer

# Who may call from outside. Secrets are named, never written here.
# [access.keys.alice]
# key = { env = "ALICE_KEY" }
# scopes = ["shop:use"]

[serve]
host = "127.0.0.1"
port = 8000
# console = false                               # also mcp, websocket

# [limits]
# timeout = 30
"""

MODULE = '''\
"""A first operation. Try: operations call hello.greet name=World"""

from operations import operation


@operation("hello.greet", type="query")
async def greet(name: str, times: int = 1) -> str:
    """Say hello.

    Args:
        name: Who is greeted.
        times: How often.
    """
    return " ".join([f"Hello, {name}!"] * times)
'''


@command
async def init(
    folder: Path = Path(),
    /,
    *,
    force: Annotated[bool, Parameter(negative="")] = False,
    schema: Annotated[bool, Parameter(negative="")] = False,
    common: Common = DEFAULTS,
) -> None:
    """Write a commented operations.toml, a first operation, and the config's JSON Schema for editors.

    Args:
        folder: Where to write.
        force: Write over files that are there.
        schema: Print the JSON Schema of the config instead, and write nothing.
        common: Options of every command.
    """
    screen = common.screen()
    if schema:
        screen.write(encoded(config_schema().document, indent=2))
        return
    files = {
        FILE_NAME: STARTER,
        MODULE_NAME: MODULE,
        SCHEMA_NAME: encoded(config_schema().document, indent=2) + "\n",
    }
    _write(folder, files, force=force)
    if screen.json:
        screen.value({"written": [str(folder / name) for name in files]})
        return
    for name in files:
        screen.write(f"wrote {folder / name}")
    screen.note("next: operations list, then operations call hello.greet name=World")


def _write(folder: Path, files: dict[str, str], *, force: bool) -> None:
    taken = [name for name in files if (folder / name).exists()]
    if taken and not force:
        raise OperationsError(f"{folder / taken[0]} is there already; --force writes over it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


@command
async def completion(
    shell: Literal["bash", "zsh", "fish", "powershell"],
    /,
    *,
    install: Annotated[bool, Parameter(negative="")] = False,
    common: Common = DEFAULTS,
) -> None:
    """Print the completion script of a shell, or install it.

    Args:
        shell: Which shell.
        install: Write the script where the shell looks for it, and name it in the shell's start file.
        common: Options of every command.
    """
    screen = common.screen()
    app = build_app()
    if install:
        screen.note(f"written to {app.install_completion(shell=shell)}; it holds in new shells")
    else:
        screen.write(app.generate_completion(shell=shell))


@command
async def login(server: str, /, *, common: Common = DEFAULTS) -> None:
    """Sign in to an MCP server whose `auth` is "oauth". The tokens are kept for every later command.

    Args:
        server: Its name in [mcp].
        common: Options of every command.
    """
    from operations.hub.sources.mcp import client_config  # noqa: PLC0415 - needs an extra
    from operations.mcp import sign_in  # noqa: PLC0415 - needs an extra

    screen = common.screen()
    file = common.load()
    servers = file.config.mcp
    if server not in servers:
        raise OperationsError(f"There is no [mcp.{server}].{suggestion(server, servers)}")

    def show(address: str) -> None:
        screen.note(f"Open this address to sign in:\n{address}")
        webbrowser.open(address)

    client = await sign_in(server, client_config(server, servers[server], file), show)
    screen.note(f"Signed in to {server}, which offers {len(client)} operations")
