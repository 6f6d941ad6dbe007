"""`operations init`, `import`, `login` and `completion`: commands for setting up a config."""

import json
import re
import shlex
import shutil
import webbrowser
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import Parameter
from rich.text import Text

from operations.base.errors import OperationsError
from operations.base.json.values import object_of
from operations.base.text import counted, suggestion, visible
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
)
from operations.config import (
    FILE_NAME,
    ConfigError,
    ConfigFile,
    config_schema,
    parse_config,
)
from operations.config.model import TraceEntry
from operations.contract.specs import OperationSpec
from operations.hub import ALL, Hub, Source, SourceFilter, open_hub
from operations.hub.opening import sources_of
from operations.hub.place import HubPlace
from operations.mcp.config import decode_commented
from operations.mcp.kind import client_config

Kind = Literal["openapi", "mcp", "modules", "broker"]

_ADDRESS = re.compile(r"[\w.-]+:\d+(/.*)?")
"""An address without its scheme."""

_UNKEPT = TraceEntry(enabled=False)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
    known = _known(source[0], common) if kind is None and name is None and not source[1:] else None
    file, snippet = (known, "") if known else _file(source, kind, name, base_url)
    async with open_hub(file, SourceFilter(source=source[0]) if known else ALL) as hub:
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
    source: Sequence[str], kind: Kind | None, name: str | None, base_url: str | None
) -> tuple[ConfigFile, str]:
    """Return a config with only this source, and its text."""
    first = source[0]
    try:
        kind = kind or _guess(source)
        name = name or _name(source, kind)
    except ValueError as error:
        raise OperationsError(f"{first} is not an address: {error}") from None
    quoted, key = _quoted(first), name if _BARE_KEY.fullmatch(name) else _quoted(name)
    match kind:
        case "openapi":
            lines = [f"[openapi.{key}]", f"document = {quoted}"]
            lines += [] if base_url is None else [f"base_url = {_quoted(base_url)}"]
        case "mcp" if first.endswith(".json"):
            lines = [f"mcp_json = [{quoted}]"]
        case "mcp" if "://" in first:
            lines = [f"[mcp.{key}]", f"url = {quoted}"]
        case "mcp":
            lines = [f"[mcp.{key}]", f"command = {quoted}"]
            lines += [f"args = {_quoted(source[1:])}"] if source[1:] else []
        case "modules":
            lines = [f"modules = [{quoted}]"]
        case "broker":
            lines = [f"[brokers.{key}]", f"url = {quoted}", "workers = true"]
    text = "\n".join(lines)
    try:
        config = parse_config(text, Path(FILE_NAME).absolute())
    except ConfigError as error:
        issues = (f"{each.key} {each.message}" for each in error.issues)
        raise OperationsError("\n".join(issues)) from None
    return ConfigFile(config=replace(config, trace=_UNKEPT)), text


def _known(name: str, common: Common) -> ConfigFile | None:
    """Return only the imported sources of the config, if one of them has this name."""
    file = common.load(required=common.config is not None)
    kept = {"mcp_json", *(kind.table for kind in file.config.kinds)}
    tables = {table: getattr(file.config, table) for table in kept}
    file = replace(file, config=type(file.config)(**tables, trace=_UNKEPT))
    is_named = any(name != each.kind and each.is_called(name) for each in sources_of(file))
    return file if is_named else None


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
    if _ADDRESS.fullmatch(first):
        raise OperationsError(f"{first} needs a scheme: http://{first} or https://{first}")
    if path.is_dir() or path.suffix == ".py":
        return "modules"
    if path.is_file():
        return "mcp" if path.suffix == ".json" and _lists_servers(path) else "openapi"
    if path.suffix in {".json", ".yaml", ".yml"}:
        remedy = ": download the document, and name the file" if scheme else ""
        raise OperationsError(f"there is no file {first}{remedy}")
    return "mcp" if shutil.which(first) and not first.isidentifier() else "modules"


def _lists_servers(path: Path) -> bool:
    try:
        document = object_of(decode_commented(path.read_bytes()))
    except ValueError:
        return False
    return bool({"mcpServers", "servers", "mcp"} & document.keys()) and "openapi" not in document


def _name(source: Sequence[str], kind: Kind) -> str:
    """Return a namespace derived from the name of a source."""
    parts = urlsplit(source[0])
    own = parts.hostname if "://" in source[0] else Path(source[-1 if kind == "mcp" else 0]).stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", own or "").strip("_")[:64] or kind


def _quoted(value: str | Sequence[str]) -> str:
    """Return a value as TOML: JSON strings, and lists of them, are valid TOML."""
    return json.dumps(value, ensure_ascii=False)


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
    title = f"{source.label}  {source.title}".rstrip()
    count = counted(len(specs), "operation")
    screen.line((f"{title}: {count} in {source.seconds:.1f} s", "bold"))
    for kind, number in Counter(spec.type.value for spec in specs).most_common():
        screen.line((f"  {number:6} ", "bold"), (kind, STYLES[kind]))
    tags = Counter(tag for spec in specs for tag in spec.tags)
    if tags:
        words = ", ".join(f"{tag} ({number})" for tag, number in tags.most_common(8))
        screen.line((f"  tags   {words}", "dim"))
    for spec in screen.some(specs, 8, verbose=verbose):
        description = first_line(spec.title or spec.description)
        screen.line((f"  {spec.id}", ""), (f"  {description}", "dim"), overflow="cut")
    for warning in source.warnings:
        screen.write("")
        screen.line((f"{warning.where} {warning.reason}", "yellow"))
    if source.skipped:
        screen.write("")
        screen.line((f"{counted(len(source.skipped), 'part')} cannot be used:", "yellow"))
    for part in screen.some(source.skipped, verbose=verbose):
        screen.line((f"  {part.where}: {part.reason}", "yellow"))
    if snippet:
        screen.show(Text("\nfor operations.toml:\n", "dim"))
        screen.show(Text(visible(snippet), "cyan"), overflow="keep")


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
    common: Common = DEFAULTS,
) -> None:
    """Write a commented operations.toml, a first operation, and the config's JSON Schema for editors.

    Args:
        folder: The folder for the files.
        force: Overwrite existing files.
        common: Options of every command.
    """
    screen = common.screen()
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
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))}, then "
    screen.note(f"next: {enter}operations list, then operations call hello.greet name=World")


def _write(folder: Path, files: dict[str, str], *, force: bool) -> None:
    taken = [name for name in files if (folder / name).exists()]
    if taken and not force:
        raise OperationsError(f"{folder / taken[0]} already exists; use --force to overwrite it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


@command
async def completion(
    shell: Literal["bash", "zsh", "fish", "powershell"], /, *, common: Common = DEFAULTS
) -> None:
    """Print the completion script of a shell.

    Args:
        shell: The shell.
        common: Options of every command.
    """
    app = build_app()
    for name in chain.from_iterable(GROUPS.values()):
        try:
            app[name]
        except ImportError:  # Its extra is missing.
            del app[name]
    common.screen().write(app.generate_completion(shell=shell))


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
    servers = file.config.tables("mcp")
    if server not in servers:
        raise OperationsError(f"the config has no [mcp.{server}].{suggestion(server, servers)}")

    def show(address: str) -> None:
        screen.note(f"Open this address to sign in:\n{address}")
        webbrowser.open(address)

    config = client_config(server, servers[server], HubPlace(file))
    if config.login is None:
        raise file.error('needs auth = "oauth" to sign in through a browser.', f"mcp.{server}")
    client = await sign_in(server, config, show)
    screen.note(f"Signed in to {server}, which offers {counted(len(client), 'operation')}")
