"""`operations init`: a commented config to start from, and a first operation."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from operations.cli.options import DEFAULTS, Common, command
from operations.cli.render import encoded
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
        common: What every command takes.
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
