"""`operations init`, `import`, `login` and `completion`: commands for setting up a config."""

import json
import re
import shutil
import webbrowser
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from cyclopts import Parameter
from rich.text import Text

from operations._json import object_of
from operations._text import counted, suggestion
from operations.cli import GROUPS, build_app
from operations.cli.options import (
    DEFAULTS,
    STYLES,
    Common,
    ExitCode,
    Screen,
    command,
    encoded,
    first_line,
    plain,
)
from operations.config import FILE_NAME, Config, ConfigFile, config_schema
from operations.config.model import BrokerEntry, MCPEntry, OpenAPIEntry, TraceEntry
from operations.errors import OperationsError
from operations.hub import Hub, Source, open_hub
from operations.hub.sources import client_config
from operations.specs import OperationSpec
from operations.types import JSONObject

Kind = Literal["openapi", "mcp", "modules", "broker"]

_UNKEPT = TraceEntry(enabled=False)
_SHOWN = 20


@command
async def import_source(
    *source: Annotated[str, Parameter(allow_leading_hyphen=True)],
    kind: Kind | None = None,
    name: str | None = None,
    base_url: str | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Preview a source: its operations, the parts that cannot be used, and the lines for the config.

    A source is an OpenAPI document (a file or an address), an MCP server (an address, a command with its arguments,
    or an mcp.json), Python code (a file, folder or package), a broker's address, or a name in the config.

    Args:
        source: A document, server or module.
        kind: Its kind, if it cannot be guessed.
        name: The namespace; by default derived from the name of the source.
        base_url: The address of the API, instead of the address in its document.
        common: Options of every command.
    """
    screen = common.screen()
    if not source:
        raise OperationsError("name a source: a document, an address, a command, a module")
    file, snippet = _file(source, kind, name, base_url, common)
    async with open_hub(file) as hub:
        if screen.json:
            reports = [_report(each, _specs(hub, each)) for each in hub.sources]
            screen.value(reports[0] if len(reports) == 1 else reports)
        for found in hub.sources:
            if found.problem is not None:
                screen.failed(f"{found.label}: {found.problem}")
            elif not screen.json:
                _show(found, _specs(hub, found), snippet, screen, verbose=common.verbose)
        return ExitCode.UNAVAILABLE if hub.absent() else ExitCode.DONE


def _specs(hub: Hub, source: Source) -> list[OperationSpec]:
    return [hub.spec(operation_id) for operation_id in source.operations]


def _file(
    source: Sequence[str], kind: Kind | None, name: str | None, base_url: str | None, common: Common
) -> tuple[ConfigFile, str]:
    """Return a config with only this source, and its text."""
    first = source[0]
    if kind is None and len(source) == 1 and name is None:
        known = _in_config(first, common)
        if known is not None:
            return known, ""
    kind = kind or _guess(source)
    name = name or _name(source, kind)
    quoted = _quoted(first)
    tables: JSONObject = {}
    match kind:
        case "openapi":
            options: JSONObject = {} if base_url is None else {"base_url": base_url}
            tables["openapi"] = {name: OpenAPIEntry(document=first, options=options)}
            lines = [f"[openapi.{name}]", f"document = {quoted}"]
            if base_url is not None:
                lines.append(f"base_url = {_quoted(base_url)}")
        case "mcp" if first.endswith(".json"):
            tables["mcp_json"] = (first,)
            lines = [f"mcp_json = [{quoted}]"]
        case "mcp" if "://" in first:
            tables["mcp"] = {name: MCPEntry(options={"url": first})}
            lines = [f"[mcp.{name}]", f"url = {quoted}"]
        case "mcp":
            args = list(source[1:])
            tables["mcp"] = {name: MCPEntry(options={"command": first, "args": args})}
            lines = [f"[mcp.{name}]", f"command = {quoted}"]
            lines += [f"args = {json.dumps(args)}"] if args else []
        case "modules":
            tables["modules"] = (first,)
            lines = [f"modules = [{quoted}]"]
        case "broker":
            tables["brokers"] = {name: BrokerEntry(url=first, workers=True)}
            lines = [f"[brokers.{name}]", f"url = {quoted}", "workers = true"]
    return ConfigFile(config=Config(**tables, trace=_UNKEPT)), "\n".join(lines)


def _in_config(name: str, common: Common) -> ConfigFile | None:
    """Return the config reduced to the source of this name, if there is one."""
    file = common.load(required=common.config is not None)
    for table in ("openapi", "mcp", "mcp_json", "brokers"):
        held: Any = getattr(file.config, table)
        if name in held:
            kept: JSONObject = {table: {name: held[name]} if isinstance(held, dict) else (name,)}
            return ConfigFile(config=Config(**kept, trace=_UNKEPT), path=file.path)
    return None


def _guess(source: Sequence[str]) -> Kind:
    """Guess the kind of a source."""
    first = source[0]
    scheme, path = urlsplit(first).scheme, Path(first)
    if scheme.partition("+")[0] in {"redis", "rediss", "nats"}:
        return "broker"
    if scheme in {"http", "https"}:
        return "mcp" if re.search(r"/(mcp|sse)/?$", first) else "openapi"
    if len(source) > 1:
        return "mcp"
    if path.is_dir() or path.suffix == ".py":
        return "modules"
    if path.is_file():
        return "mcp" if path.suffix == ".json" and _lists_servers(path) else "openapi"
    if path.suffix in {".json", ".yaml", ".yml"}:
        raise OperationsError(f"there is no file {first}")
    return "mcp" if shutil.which(first) and not first.isidentifier() else "modules"


def _lists_servers(path: Path) -> bool:
    try:
        document = object_of(msgspec.json.decode(path.read_bytes()))
    except msgspec.DecodeError:
        return False
    return bool({"mcpServers", "servers", "mcp"} & document.keys()) and "openapi" not in document


def _name(source: Sequence[str], kind: Kind) -> str:
    """Return a namespace derived from the name of a source."""
    parts = urlsplit(source[0])
    own = parts.hostname if "://" in source[0] else Path(source[-1 if kind == "mcp" else 0]).stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", own or "").strip("_")[:64] or kind


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _report(source: Source, specs: list[OperationSpec]) -> dict[str, object]:
    return {
        "source": source.label,
        "title": source.title,
        "failure": source.failure,
        "types": dict(Counter(spec.type.value for spec in specs)),
        "tags": dict(Counter(tag for spec in specs for tag in spec.tags)),
        "operations": [spec.id for spec in specs],
        "skipped": [{"where": each.where, "reason": each.reason} for each in source.problems],
    }


def _show(
    source: Source, specs: list[OperationSpec], snippet: str, screen: Screen, *, verbose: bool
) -> None:
    title = f"{source.label}  {plain(source.title)}".rstrip()
    screen.show(
        Text(f"{title}: {counted(len(specs), 'operation')} in {source.seconds:.1f} s", style="bold")
    )
    counts = Counter(spec.type.value for spec in specs)
    for kind, count in counts.most_common():
        screen.show(Text(f"  {count:6} ", style="bold").append(kind, style=STYLES[kind]))
    tags = Counter(tag for spec in specs for tag in spec.tags)
    if tags:
        words = ", ".join(f"{tag} ({count})" for tag, count in tags.most_common(8))
        screen.show(Text(f"  tags   {plain(words)}", style="dim"))
    shown = specs if verbose else specs[:8]
    for spec in shown:
        screen.show(
            Text(f"  {spec.id}", style="default").append(
                f"  {first_line(spec.title or spec.description)}", style="dim"
            ),
            one_line=True,
        )
    if len(shown) < len(specs):
        screen.note(f"  ... and {len(specs) - len(shown)} more; --verbose shows all")
    _show_skipped(source, screen, verbose=verbose)
    if snippet:
        screen.show(Text("\nfor operations.toml:\n", style="dim"))
        screen.show(Text(snippet, style="cyan"))


def _show_skipped(source: Source, screen: Screen, *, verbose: bool) -> None:
    for warning in source.warnings:
        screen.show(Text(f"\n{plain(warning.where)} {plain(warning.reason)}", style="yellow"))
    parts = source.skipped
    if not parts:
        return
    screen.show(Text(f"\n{counted(len(parts), 'part')} cannot be used:", style="yellow"))
    shown = parts if verbose else parts[:_SHOWN]
    for each in shown:
        screen.show(Text(f"  {plain(each.where)}: {plain(each.reason)}", style="yellow"))
    if len(shown) < len(parts):
        screen.note(f"  ... and {len(parts) - len(shown)} more; --verbose shows all")


# ------------------------------------------------------------ init, completion, login

SCHEMA_NAME = "operations.schema.json"
MODULE_NAME = "hello.py"


def starter(name: str) -> str:
    """Return a file that `operations init` writes."""
    return files("operations.cli").joinpath("starter", name).read_text(encoding="utf-8")


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
        folder: The folder for the files.
        force: Overwrite existing files.
        schema: Print the JSON Schema of the config instead of writing files.
        common: Options of every command.
    """
    screen = common.screen()
    if schema:
        screen.write(encoded(config_schema().document, indent=2))
        return
    written = {
        FILE_NAME: starter("config.toml"),
        MODULE_NAME: starter("hello.txt"),
        SCHEMA_NAME: encoded(config_schema().document, indent=2) + "\n",
    }
    _write(folder, written, force=force)
    if screen.json:
        screen.value({"written": [str(folder / name) for name in written]})
        return
    for name in written:
        screen.write(f"wrote {folder / name}")
    screen.note("next: operations list, then operations call hello.greet name=World")


def _write(folder: Path, files: dict[str, str], *, force: bool) -> None:
    taken = [name for name in files if (folder / name).exists()]
    if taken and not force:
        raise OperationsError(f"{folder / taken[0]} already exists; use --force to overwrite it")
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
        shell: The shell.
        install: Install the script in the shell's completion folder, and load it in the shell's start file.
        common: Options of every command.
    """
    screen = common.screen()
    app = build_app()
    for name in chain.from_iterable(GROUPS.values()):
        try:
            app[name]
        except ImportError:  # Its extra is missing.
            del app[name]
    if install:
        screen.note(
            f"written to {app.install_completion(shell=shell)}; it takes effect in new shells"
        )
    else:
        screen.write(app.generate_completion(shell=shell))


@command
async def login(server: str, /, *, common: Common = DEFAULTS) -> None:
    """Sign in to an MCP server whose `auth` is "oauth". The tokens are stored for later commands.

    Args:
        server: The name of the server in [mcp].
        common: Options of every command.
    """
    from operations.mcp import sign_in  # noqa: PLC0415 - needs an extra

    screen = common.screen()
    file = common.load()
    servers = file.config.mcp
    if server not in servers:
        raise OperationsError(f"the config has no [mcp.{server}].{suggestion(server, servers)}")

    def show(address: str) -> None:
        screen.note(f"Open this address to sign in:\n{address}")
        webbrowser.open(address)

    client = await sign_in(server, client_config(server, servers[server], file), show)
    screen.note(f"Signed in to {server}, which offers {len(client)} operations")
