"""`operations init`, `import`, `login` and `completion`: commands for setting up a config."""

import json
import re
import shlex
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
from operations.base.text import counted, suggestion, visible
from operations.base.types import JSONObject
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
from operations.config.model import RecordEntry
from operations.contract.specs import OperationSpec
from operations.hub import ALL, Hub, Source, SourceFilter, open_hub
from operations.hub.opening import sources_of
from operations.hub.place import HubPlace
from operations.mcp.kind import client_config
from operations.recorder.graph import TraceEntry
from operations.sources import modules
from operations.sources.contract import Guess, SourceKind
from operations.sources.kinds import kind_of, kinds

_UNKEPT = RecordEntry(trace=TraceEntry(enabled=False))
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@command
async def import_source(
    *source: Annotated[str, Parameter(allow_leading_hyphen=True)],
    kind: str | None = None,
    name: str | None = None,
    base_url: str | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Preview a source: its operations, the parts that cannot be used, and the lines for the config.

    A source is an OpenAPI document (a file or an address), an MCP server (an address, a command with its arguments,
    or an mcp.json), Python code (a file, folder or package), a broker's address, or a name in the config.

    Args:
        source: A document, server or module.
        kind: Its kind, if it cannot be guessed: `openapi`, `mcp`, `broker`, `local`, or one of an installed package.
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
    source: Sequence[str], kind: str | None, name: str | None, base_url: str | None
) -> tuple[ConfigFile, str]:
    """Return a config with only this source, and its text."""
    try:
        urlsplit(source[0])
    except ValueError as error:
        raise OperationsError(f"{source[0]} is not an address: {error}") from None
    try:
        text = _snippet(source, kind, name, base_url)
    except ValueError as error:
        raise OperationsError(f"{source[0]}: {error}") from None
    try:
        config = parse_config(text, Path(FILE_NAME).absolute())
    except ConfigError as error:
        issues = (f"{each.key} {each.message}" for each in error.issues)
        raise OperationsError("\n".join(issues)) from None
    return ConfigFile(config=replace(config, record=_UNKEPT)), text


def _snippet(
    source: Sequence[str], kind: str | None, name: str | None, base_url: str | None
) -> str:
    """Return the lines for a source.

    Raises:
        ValueError: If an address or a kind cannot be read.
    """
    table, found = _guess(source, kind)
    if found.top:
        return _lines(found.top)
    label = name or found.name or table
    key = label if _BARE_KEY.fullmatch(label) else _quoted(label)
    keys = found.keys if base_url is None else {**found.keys, "base_url": base_url}
    return f"[{table}.{key}]\n{_lines(keys)}"


def _guess(source: Sequence[str], kind: str | None) -> tuple[str, Guess]:
    """Return the table of a source, and its keys; kinds that take only special words are asked first."""
    for each in _asked(kind):
        if (found := each.guess(source, is_certain=kind is not None)) is not None:
            return each.table, found
    raise ValueError(f"is no source of the kind {kind}")


def _asked(kind: str | None) -> list[SourceKind]:
    """Return the kinds to ask: those of the library, or the one with a name or table."""
    # Any word may be the name of a package.
    ours: list[SourceKind] = [*reversed(kinds()), modules.KIND]
    if kind is None:
        return ours
    named = [each for each in ours if kind in (each.name, each.table)]
    if not named and (other := kind_of(kind)) is not None:
        named = [other]
    if not named:
        known = ", ".join(each.name for each in ours)
        raise ValueError(f"there is no kind {kind!r}; known: {known}")
    return named


def _lines(keys: JSONObject) -> str:
    """Return keys as TOML: JSON strings, lists of them and booleans are valid TOML."""
    return "\n".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()
    )


def _known(name: str, common: Common) -> ConfigFile | None:
    """Return only the imported sources of the config, if one of them has this name."""
    file = common.load(required=common.config is not None)
    kept = {"mcp_json", *(kind.table for kind in file.config.kinds)}
    tables = {table: getattr(file.config, table) for table in kept}
    file = replace(file, config=type(file.config)(**tables, record=_UNKEPT))
    is_named = any(name != each.kind and each.is_called(name) for each in sources_of(file))
    return file if is_named else None


def _quoted(value: str) -> str:
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
    script = app.generate_completion(shell=shell)
    common.screen().write(script + starter("completion.bash") if shell == "bash" else script)


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
