"""`operations install` and `discover`: the configuration files of MCP clients on this machine.

Rule 1: a file is written only after its change was shown. Everything else in it stays, or the file is left alone.
Rule 2: `discover` executes nothing, and prints no values of environment variables and headers.
"""

import difflib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from cyclopts import Parameter

from operations.base.errors import OperationsError
from operations.base.files import read_small
from operations.base.json.values import is_object, list_of, object_of
from operations.base.text import names_a_secret, safe_namespace, without_secrets
from operations.base.types import JSONObject
from operations.cli.options import DEFAULTS, Common, ExitCode, Screen, command
from operations.config import FILE_NAME, parse_config
from operations.mcp.config import decode_commented

ClientName = Literal["claude", "codex", "gemini", "cursor", "vscode"]

_HIDDEN = "..."


def _home(variable: str, default: str) -> Path:
    """Return the folder that a variable names, or else one in the home folder."""
    named = os.environ.get(variable)
    return Path(named) if named else Path.home() / default


def _claude() -> Path:
    return _home("CLAUDE_CONFIG_DIR", "") / ".claude.json"


def _of_application(name: str, *path: str) -> Path:
    """Return a file of a desktop application."""
    if sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    elif sys.platform == "win32":
        folder = _home("APPDATA", "AppData/Roaming")
    else:
        folder = _home("XDG_CONFIG_HOME", ".config")
    return folder.joinpath(name, *path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """An MCP client, and how its file lists servers."""

    title: str
    file: Callable[[], Path]

    key: str = "mcpServers"
    """The table of the servers."""

    url_key: str = "url"
    """The key of an address; Gemini CLI distinguishes transports by it."""

    names_transport: bool = False
    """Whether an entry has a `type`."""

    is_tested: bool = False
    """Whether a test lists the written server with the client itself."""


CLIENTS: dict[str, Client] = {
    "claude": Client(title="Claude Code", file=_claude, names_transport=True, is_tested=True),
    "codex": Client(
        title="Codex",
        file=lambda: _home("CODEX_HOME", ".codex") / "config.toml",
        key="mcp_servers",
        is_tested=True,
    ),
    "gemini": Client(
        title="Gemini CLI",
        file=lambda: Path.home() / ".gemini" / "settings.json",
        url_key="httpUrl",
        is_tested=True,
    ),
    "cursor": Client(title="Cursor", file=lambda: Path.home() / ".cursor" / "mcp.json"),
    "vscode": Client(
        title="VS Code",
        file=lambda: _of_application("Code", "User", "mcp.json"),
        key="servers",
        names_transport=True,
    ),
}

_MORE: dict[str, Callable[[], Path]] = {
    "Claude Desktop": lambda: _of_application("Claude", "claude_desktop_config.json"),
    "Windsurf": lambda: Path.home() / ".codeium" / "windsurf" / "mcp_config.json",
}
_OF_PROJECTS = (
    ".mcp.json",
    "mcp.json",
    ".cursor/mcp.json",
    ".vscode/mcp.json",
    ".gemini/settings.json",
)


# ------------------------------------------------------------ install


@command
async def install(
    client: ClientName,
    file: Path | None = None,
    /,
    *,
    name: str = "operations",
    url: str | None = None,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Add the operations to the configuration of an MCP client: show the change, ask, and write it.

    The client then starts `operations serve --stdio` itself, or connects to a server that runs.

    Args:
        client: The client: Claude Code, Codex, Gemini CLI, Cursor or VS Code.
        file: The Python file or config to serve; by default that of the current folder.
        name: The name of the server in the client.
        url: The MCP address of a running server, which the client uses instead of starting one.
        yes: Write without asking.
        common: Options of every command.
    """
    screen, chosen = common.screen(), CLIENTS[client]
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise OperationsError(f"{name!r} cannot be the name: use letters, digits, - and _")
    path = chosen.file()
    entry = _address(chosen, url) if url is not None else _program(chosen, file, common)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    after = _with_server(chosen, path, before, name, entry)
    difference = list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), str(path), str(path), lineterm="", n=2
        )
    )
    if screen.json:
        screen.value(
            {"file": str(path), "entry": entry, "written": yes, "tested": chosen.is_tested}
        )
    elif not difference:
        screen.note(f"{path} has this server already")
        return ExitCode.DONE
    for line in () if screen.json else difference:
        style = {"+": "green", "-": "red"}.get(line[:1], "dim")
        screen.line((line, style))
    if not chosen.is_tested:
        screen.warn(f"this was not tested with {chosen.title} itself")
    if not yes and not _agrees(screen, f"write {path}? [y/N] "):
        screen.note("nothing was written; --yes writes without asking")
        return ExitCode.DONE
    _write(path, after)
    screen.note(f"wrote {path}; restart {chosen.title} to use it")
    return ExitCode.DONE


def _agrees(screen: Screen, question: str) -> bool:
    return screen.can_ask and input(question).strip().lower() in ("y", "yes")


def _program(client: Client, file: Path | None, common: Common) -> JSONObject:
    """Return the entry for a program that the client starts."""
    given = file or common.config
    loaded = common.load() if given is None else None
    path = given if loaded is None else loaded.origin
    if path is None or not path.is_file():
        raise OperationsError(
            f"there is no file {path or FILE_NAME}: name a Python file or a config"
        )
    # Clients start programs without the shell, and in another folder.
    program = shutil.which("operations", path=str(Path(sys.executable).parent))
    start = [program] if program else [sys.executable, "-m", "operations"]
    arguments = [*start[1:], "serve", str(path.absolute()), "--stdio"]
    entry: JSONObject = {"type": "stdio"} if client.names_transport else {}
    return {**entry, "command": start[0], "args": arguments}


def _address(client: Client, url: str) -> JSONObject:
    """Return the entry for a server that runs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.username or parts.password or parts.query:
        raise OperationsError("an address has the form http://HOST:PORT/mcp, without credentials")
    entry: JSONObject = {"type": "http"} if client.names_transport else {}
    return {**entry, client.url_key: url}


def _with_server(client: Client, path: Path, text: str, name: str, entry: JSONObject) -> str:
    """Return the text of a file with a server.

    Raises:
        OperationsError: If the file cannot be changed without losing something.
    """
    if path.suffix == ".toml":
        return _with_table(client, path, text, name, entry)
    try:
        document: Any = json.loads(text) if text.strip() else {}
    except ValueError:
        lines = json.dumps({name: entry}, indent=2)
        reason = f"{path} has comments or is not JSON, so it is not written. Add to {client.key!r}:"
        raise OperationsError(f"{reason}\n{lines}") from None
    known = object_of(document).get(client.key, {})
    if not is_object(document) or not is_object(known):
        raise OperationsError(f"{path} has another form than expected, so it is not written")
    servers = {**known, name: entry}
    indent = re.search(r"\n([ \t]+)\S", text)
    changed: JSONObject = {**document, client.key: servers}
    return json.dumps(changed, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"


def _with_table(client: Client, path: Path, text: str, name: str, entry: JSONObject) -> str:
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise OperationsError(f"{path} is not TOML, so it is not written: {error}") from None
    known = object_of(document.get(client.key)).get(name)
    if known == entry:
        return text
    if known is not None:
        raise OperationsError(f"{path} has another server {name!r}: remove it, or use --name")
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items()]
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    return "\n".join([f"{text}{gap}[{client.key}.{name}]", *lines, ""])


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, with its rights."""
    # The file may be a link, as in a repository of settings.
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    new.write_text(text, encoding="utf-8")
    if target.exists():
        shutil.copymode(target, new)
    new.replace(target)


# ------------------------------------------------------------ discover


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A server in the file of a client."""

    client: str
    file: Path
    name: str
    entry: JSONObject

    @property
    def place(self) -> str:
        """Its address or command, without secrets."""
        address = next(
            (self.entry[key] for key in _URLS if isinstance(self.entry.get(key), str)), None
        )
        if address is not None:
            return without_secrets(str(address)).partition("?")[0]
        words = [str(self.entry.get("command", "?")), *map(str, list_of(self.entry.get("args")))]
        return shlex.join(_without_values(words))

    @property
    def variables(self) -> list[str]:
        """The names of its environment variables and headers."""
        return [*object_of(self.entry.get("env")), *_headers(self.entry)]

    @property
    def secrets(self) -> dict[str, str]:
        """The variables that its table for `operations.toml` reads, by header or variable of the server."""
        if any(isinstance(self.entry.get(each), str) for each in _URLS):
            return {
                each: _variable(safe_namespace(self.name), each) for each in _headers(self.entry)
            }
        return {each: each for each in object_of(self.entry.get("env"))}

    @property
    def left_out(self) -> Iterator[str]:
        """What its table lacks because it may be a secret, and how to set it."""
        key = safe_namespace(self.name)
        for address in (
            self.entry[each] for each in _URLS if isinstance(self.entry.get(each), str)
        ):
            if str(address).partition("#")[0] != self.place:
                name = _variable(key, "authorization")
                yield (
                    f"[mcp.{key}] url has no user and no query, which may be secrets. Set them as a header:"
                    f" headers = {{ Authorization = {{ env = {json.dumps(name)} }} }}"
                )
            return
        words = _without_values([str(each) for each in list_of(self.entry.get("args"))])
        for before, word in itertools.pairwise(["", *words]):
            option, equals, value = word.partition("=")
            if word == _HIDDEN or (equals and value == _HIDDEN):
                is_value = before.startswith("-") and "=" not in before
                named = option if equals else before if is_value else "secret"
                name = _variable(key, named.lstrip("-"))
                yield (
                    f"[mcp.{key}] args contains {json.dumps(word)} instead of a value that may be a secret. Replace"
                    f" it, or remove it and set a variable that the server reads:"
                    f" env = {{ {name} = {{ env = {json.dumps(name)} }} }}"
                )

    @property
    def table(self) -> str:
        """Its table for `operations.toml`; secrets are read from environment variables of the same names."""
        key = safe_namespace(self.name)
        lines = [f"[mcp.{key}]"]
        address = next(
            (self.entry[each] for each in _URLS if isinstance(self.entry.get(each), str)), None
        )
        if address is not None:
            lines.append(f"url = {json.dumps(self.place)}")
            table = "headers"
        else:
            lines.append(f"command = {json.dumps(self.entry.get('command', ''))}")
            arguments = _without_values([str(each) for each in list_of(self.entry.get("args"))])
            lines += [f"args = {json.dumps(arguments)}"] if arguments else []
            table = "env"
        if self.secrets:
            inside = ", ".join(
                f"{json.dumps(each)} = {{ env = {json.dumps(name)} }}"
                for each, name in self.secrets.items()
            )
            lines.append(f"{table} = {{ {inside} }}")
        return "\n".join(lines) + "\n"


_URLS = ("url", "httpUrl", "serverUrl")


def _headers(entry: JSONObject) -> list[str]:
    return [*object_of(entry.get("headers") or entry.get("http_headers"))]


def _variable(*words: str) -> str:
    return re.sub(r"\W+", "_", "_".join(words)).upper()


def _without_values(words: list[str]) -> list[str]:
    """Return the words of a command without values that may be secrets."""
    shown: list[str] = []
    hides = False
    for word in words:
        option, equals, value = word.partition("=")
        if hides:
            shown.append(_HIDDEN)
        elif equals and value and names_a_secret(option.lstrip("-")):
            shown.append(f"{option}={_HIDDEN}")
        elif (
            len(word) > 24
            and re.fullmatch(r"[\w+/=.-]*\d[\w+/=.-]*", word)
            and not re.search(r"[./@]", word)
        ):
            # A long random text, as keys are.
            shown.append(_HIDDEN)
        else:
            shown.append(without_secrets(word) if "://" in word else word)
        hides = not equals and word.startswith("-") and names_a_secret(word.lstrip("-"))
    return shown


def discovered(folder: Path) -> Iterator[Found]:
    """Yield the servers in the files of all known clients, and of a project."""
    places = [(each.title, each.file()) for each in CLIENTS.values()]
    places += [(title, find()) for title, find in _MORE.items()]
    places += [("this folder", folder / each) for each in _OF_PROJECTS]
    for client, path in places:
        for name, entry in _servers(path).items():
            yield Found(client=client, file=path, name=name, entry=entry)


def _servers(path: Path) -> dict[str, JSONObject]:
    """Return the servers of a file; none if it does not exist or cannot be read."""
    with suppress(OSError, ValueError):
        content = read_small(path)
        if path.suffix == ".toml":
            tables = object_of(tomllib.loads(content.decode()).get("mcp_servers"))
        else:
            document = object_of(decode_commented(content))
            tables = object_of(document.get("mcpServers") or document.get("servers"))
        return {name: object_of(entry) for name, entry in tables.items() if isinstance(entry, dict)}
    return {}


@command
async def discover(
    *,
    add: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    common: Common = DEFAULTS,
) -> int:
    """List the MCP servers that clients on this machine have, and add some to operations.toml.

    Nothing is started. Values of environment variables and headers are neither printed nor copied: the config names the
    variables to read them from.

    Args:
        add: Add the server of this name to the operations.toml of the current folder; may be repeated.
        common: Options of every command.
    """
    screen, found = common.screen(), list(discovered(Path.cwd()))
    if add:
        return _add(add, found, common.config or Path(FILE_NAME), screen)
    rows = [
        {
            "name": each.name,
            "client": each.client,
            "place": each.place,
            "variables": each.variables,
            "file": str(each.file),
        }
        for each in found
    ]
    if screen.json:
        screen.value(rows)
        return ExitCode.DONE
    screen.rows(
        ("server", "client", "address or command", "variables"),
        ((each.name, each.client, each.place, " ".join(each.variables)) for each in found),
    )
    if found:
        screen.note(f"operations discover --add {found[0].name} adds one to {FILE_NAME}")
    else:
        screen.note("no client on this machine has an MCP server")
    return ExitCode.DONE


def _add(names: tuple[str, ...], found: list[Found], path: Path, screen: Screen) -> int:
    by_name = {each.name: each for each in reversed(found)}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        known = ", ".join(by_name) or "none"
        raise OperationsError(f"no client has a server {unknown[0]!r}; found: {known}")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    tables = [by_name[name].table for name in names]
    after = "\n".join([before, *tables] if before else tables)
    # Reports a table that exists already, before anything is written.
    parse_config(after, path.absolute())
    for table in tables:
        screen.write(table)
    _write(path, after)
    screen.note(f"added to {path}")
    for each in (by_name[name] for name in names):
        for variable in each.secrets.values():
            screen.note(f"set the variable {variable} where operations runs")
        for missing in each.left_out:
            screen.warn(missing)
    return ExitCode.DONE
