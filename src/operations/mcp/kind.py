"""MCP servers as a kind of source: the table `[mcp.NAME]`, the servers of an `mcp.json`, and how both are opened."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from operations.base.json.values import object_of
from operations.base.types import JSONObject, Names
from operations.contract.access import AccessControl
from operations.contract.options import Derived, KeyPath, Secret
from operations.mcp.config import MCPClientConfig, decode_commented, read_servers
from operations.sources import checks
from operations.sources.contract import Guess, Opened, Place, Skipped, SourceEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPEntry(SourceEntry):
    """An MCP server: a command to start, or an address. The name of its table is its namespace.

    Attributes:
        token: Sent as a bearer token; short for `auth`.
        scopes: Scopes that a caller needs for every operation of this source; short for `access`.
        enabled: Set to false to skip this source.
    """

    advanced: ClassVar = frozenset(
        [
            "proxy",
            "trust_env",
            "ca_file",
            "client_certificate",
            "client_key",
            "transport",
            "version",
            "connect_timeout",
            "max_timeout",
            "answer_timeout",
            "reconnect_timeout",
            "shutdown_timeout",
            "idle_timeout",
            "extensions",
            "baggage",
            "input",
            "exact_schemas",
            "pins",
            "log_level",
            "secrets",
            "max_message_bytes",
            "max_message_values",
            "max_tools",
            "access",
        ]
    )
    derived: ClassVar = Derived(lambda: (MCPClientConfig,), {"namespace": "the name of the table"})
    short: ClassVar = {"scopes": "access", "token": "auth"}

    token: Secret | None = None
    scopes: Names = ()


@dataclass(frozen=True, slots=True)
class ListedServer:
    """A server of an `mcp.json`; without an `entry`, the file cannot be read."""

    path: str
    entry: JSONObject | None = None

    other: str | None = None
    """The earlier file that has a server with the same namespace, which then cannot be used twice."""


class MCPKind:
    """MCP servers."""

    name = table = "mcp"
    about = "MCP servers, by namespace."
    entry = MCPEntry
    owns_namespace = True
    is_late = False

    def check(self, entry: MCPEntry, path: KeyPath, folder: Path) -> Iterator[tuple[KeyPath, str]]:
        """Check that a server has either a command or an address, with keys for it."""
        options = entry.options
        command, url = options.get("command"), options.get("url")
        if (command is None) == (url is None):
            yield path, "needs exactly one of command and url."
            return
        for key in ("headers", "auth") if url is None else ("args", "env", "cwd"):
            if options.get(key):
                yield (*path, key), f"can be used only with {'url' if url is None else 'command'}."
        if url is None and entry.token is not None:
            yield (*path, "token"), "can be used only with url."
        if command is not None and not command.strip():
            yield (*path, "command"), "is empty. Name a program."
        elif command is not None and " " in command and not os.path.exists(folder / command):  # noqa: PTH110 - never raises
            yield (*path, "command"), "is one program, without its arguments: put those in args."
        for key in ("url", "proxy"):
            if isinstance(options.get(key), str):
                yield from checks.web_address(options[key], (*path, key))
        yield from checks.headers(object_of(options.get("headers")), (*path, "headers"))

    def guess(self, words: Sequence[str], *, is_certain: bool) -> Guess | None:
        """Take an address that ends like those of MCP, a program with its arguments, or a file that lists servers."""
        first, *arguments = words
        name, path = checks.name_of(words[-1]), Path(first)
        if urlsplit(first).scheme in {"http", "https"}:
            is_ours = is_certain or re.search(r"/(mcp|sse)/?$", first)
            return Guess(name=checks.name_of(first), keys={"url": first}) if is_ours else None
        if arguments:
            return Guess(name=name, keys={"command": first, "args": arguments})
        if path.suffix == ".json" and (is_certain or _lists_servers(path)):
            return Guess(name=name, top={"mcp_json": [first]})
        is_program = shutil.which(first) and not first.isidentifier() and not path.is_file()
        return Guess(name=name, keys={"command": first}) if is_certain or is_program else None

    async def open(self, name: str, entry: MCPEntry | ListedServer, place: Place) -> Opened:
        """Connect to a server.

        Raises:
            ValueError: If a secret cannot be read, or an `mcp.json` is wrong.
            CallError: `UNAVAILABLE`, if the server cannot be reached.
        """
        from operations.mcp import MCPClient  # noqa: PLC0415 - needs an extra

        if isinstance(entry, ListedServer):
            title, listed = _read_listed(entry, place)
            is_set = listed.get("concurrency") is not None
            options: dict[str, Any] = {} if is_set else {"concurrency": place.calls}
            config = MCPClientConfig.from_entry(listed, **options)
            origin = entry.path
        else:
            title, config = name, client_config(name, entry, place)
            place.load_functions([config.auth])
            is_set = "concurrency" in entry.options
            origin = config.target
        client = MCPClient(title, config)
        await client.open()
        info = client.server_info
        return Opened(
            operations=client,
            close=client.aclose,
            calls=lambda: client.calls,
            limit_calls=None if is_set else client.limit_calls,
            origin=origin,
            skipped=[Skipped(what, reason) for what, reason in client.skipped.items()],
            title=info.title or info.name if info is not None else "",
            problem=lambda: client.problem,
            next_attempt=lambda: client.next_attempt,
        )


def _lists_servers(path: Path) -> bool:
    try:
        document = object_of(decode_commented(path.read_bytes()))
    except (OSError, ValueError):
        return False
    return bool({"mcpServers", "servers", "mcp"} & document.keys()) and "openapi" not in document


def _read_listed(server: ListedServer, place: Place) -> tuple[str, JSONObject]:
    """Return the name and the entry of a server in an `mcp.json`; paths are relative to that file."""
    listing = place.existing(server.path, "mcp_json")
    if server.entry is None:
        read_servers(listing)
        raise ValueError(f"{server.path} cannot be read")
    entry = dict(server.entry)
    name = entry.pop("name")
    if server.other is not None:
        raise ValueError(
            f"{server.other} already has the server {name!r}. Remove it from {server.path}, or set `namespace` there"
        )
    cwd = entry.get("cwd")
    if "command" in entry and (cwd is None or isinstance(cwd, str)):
        entry["cwd"] = str(listing.parent / (cwd or ""))
    return name, entry


def client_config(name: str, entry: MCPEntry, place: Place) -> MCPClientConfig:
    """Return the config of the client, with its secrets.

    Raises:
        ValueError: If a secret cannot be read.
    """
    short: dict[str, Any] = {"access": AccessControl(entry.scopes)} if entry.scopes else {}
    if "concurrency" not in entry.options:
        short["concurrency"] = place.calls
    if "cwd" not in entry.options:
        short["cwd"] = place.folder
    if entry.token is not None:
        short["auth"] = place.secret(entry.token)
    revealed: list[str] = []
    options = place.options(MCPClientConfig, entry, revealed) | short
    options["secrets"] = [*options.get("secrets", ()), *revealed]
    config = MCPClientConfig(**options)
    if config.login is None:
        return config
    from operations.mcp.source.oauth import token_path  # noqa: PLC0415 - needs an extra

    # Two tables may hold the logins of two people for one server.
    store = token_path(config, config.login, name)
    return replace(config, login=replace(config.login, store=store))


KIND = MCPKind()
