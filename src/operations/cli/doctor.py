"""`operations doctor`: check that everything a config needs is available, and recommend fixes."""

import platform
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import anyio
from cyclopts import Parameter
from rich.text import Text

from operations import __version__
from operations._text import counted
from operations.calls import PendingRequestMap
from operations.cli.options import DEFAULTS, Common, ExitCode, Screen, command, plain
from operations.config import ConfigError, ConfigFile
from operations.errors import DocumentError, OperationsError
from operations.front.config import ListenConfig
from operations.hub import open_hub
from operations.hub.journal import journal_path, read_journal
from operations.hub.sources import connect_broker, worker_config
from operations.observe import CallRecord, add_counts
from operations.openapi import HTTPServiceConfig, from_openapi_file, from_openapi_url
from operations.openapi.diagnosis import diagnose

State = Literal["ok", "warning", "failed"]

_MARKS = {
    "ok": Text("ok      ", "green"),
    "warning": Text("warning ", "yellow"),
    "failed": Text("failed  ", "red"),
}
_EXTRAS = {
    "cli": ("cyclopts", "rich"),
    "openapi": ("aiohttp", "ryaml"),
    "mcp": ("mcp",),
    "server": ("starlette", "uvicorn"),
    "redis": ("redis",),
    "nats": ("nats-py",),
    "websocket": ("websockets",),
    "jwt": ("pyjwt",),
    "otel": ("opentelemetry-api",),
    "otlp": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}
_SHOWN = 20
"""The number of changed examples that are listed without --verbose."""

_CHANGED = {
    "mismatch": "did not match and stayed unchanged",
    "stripped": "not declared and stripped",
    "filled": "filled with a declared default",
    "converted": "converted without loss",
    "created": "created",
    "replaced": "replaced",
    "input": "of the input converted",
}
"""The text for each kind of change, after the number of values."""

_CAUTION = (
    "declare only calls that the code of an operation chooses: a declared call runs without a check of the caller,"
    " also if the caller's input names it"
)

_BROKER_SECONDS = 8
"""Longer than the connection timeout, so that a failed connection reports its reason first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    state: State
    words: str


@command
async def doctor(
    document: str | None = None,
    /,
    *,
    reach: Annotated[bool, Parameter(negative="")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Check the installation, the config, its secrets, its sources, its brokers and its port; or an OpenAPI document.

    For a document it reports arguments that no value satisfies, required headers that only configuration can set,
    operations with several success statuses, broken references, and which of the document's response examples reach a
    caller unchanged.

    Args:
        document: The path or address of an OpenAPI or Swagger document to check instead.
        reach: Print the undeclared nested calls in the trace, as `calls=` lines to add to the operations.
        common: Options of every command.
    """
    screen = common.screen()
    if reach:
        path = journal_path(common.load(required=False))
        found = undeclared_calls(read_journal(path))
        if screen.json:
            screen.value(found)
        for operation_id, calls in () if screen.json else found.items():
            listed = ", ".join(f'"{call}"' for call in calls)
            screen.show(Text(f"{plain(operation_id)}: calls=[{plain(listed)}]"))
        if not screen.json:
            screen.note(_CAUTION if found else f"no undeclared nested calls are recorded in {path}")
        return ExitCode.DONE
    findings: list[Finding] = []
    checks = _findings(common) if document is None else _document(document, verbose=common.verbose)
    async for finding in checks:
        findings.append(finding)
        if not screen.json:
            _show(finding, screen)
    failed = sum(finding.state == "failed" for finding in findings)
    if screen.json:
        screen.value({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        whole = "everything is available" if document is None else "no problems found"
        screen.note(whole if not failed else f"{counted(failed, 'problem')} to fix", "bold")
    return ExitCode.FAILED if failed else ExitCode.DONE


def _show(finding: Finding, screen: Screen) -> None:
    line = _MARKS[finding.state].copy().append(f"{finding.what:24}", style="bold")
    screen.show(line.append(f" {plain(finding.words)}", style="default"))


async def _findings(common: Common) -> AsyncIterator[Finding]:
    for finding in _installation():
        yield finding
    try:
        file = common.load()
    except ConfigError as error:
        for fault in error.faults:
            yield Finding("config", "failed", str(fault))
        return
    yield Finding("config", "ok", str(file.path))
    missing = list(_missing_secrets(file))
    for name, words in missing:
        yield Finding(name, "failed", words)
    async for finding in _sources(file, has_secrets=not missing):
        yield finding
    async for finding in _brokers(file):
        yield finding
    for name, words in _missing_folders(file):
        yield Finding(name, "failed", words)
    yield _port(file)
    yield _trace(file)
    for finding in _changes(file):
        yield finding


async def _document(document: str, *, verbose: bool) -> AsyncIterator[Finding]:
    """Yield findings about an OpenAPI document."""
    config = HTTPServiceConfig(namespace="api")
    try:
        if "://" in document:
            service = await from_openapi_url(document, config)
        else:
            service = await from_openapi_file(Path(document), config)
    except (DocumentError, OSError) as error:
        yield Finding("document", "failed", str(error))
        return
    async with service:
        yield Finding("document", "ok", f"{service.title}: {counted(len(service), 'operation')}")
        found = await diagnose(service)
    for operation_id, names in found.unsatisfiable.items():
        words = f"no value satisfies the required {', '.join(names)}"
        yield Finding(operation_id, "failed", words)
    for operation_id, names in found.hidden_headers.items():
        words = f"requires {', '.join(names)}, which no argument can set: use auth, credentials or headers"
        yield Finding(operation_id, "warning", words)
    for problem in (*found.unresolved, *found.problems):
        yield Finding(problem.where, "warning", problem.reason)
    several = found.several_responses
    if several:
        words = f"several successful responses: {counted(len(several), 'operation')}"
        yield Finding("responses", "ok", words)
    for operation_id, statuses in several.items() if verbose else ():
        yield Finding(operation_id, "ok", f"succeeds with {', '.join(statuses)}")
    changed = found.changed
    words = f"{found.examples - len(changed)} of {counted(found.examples, 'response example')} unchanged"
    yield Finding("examples", "warning" if changed else "ok", words)
    for example in changed if verbose else changed[:_SHOWN]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(example.changes.items()))
        yield Finding(example.operation_id, "warning", f"example of {example.status}: {kinds}")
    if not verbose and len(changed) > _SHOWN:
        yield Finding("examples", "ok", f"{len(changed) - _SHOWN} more; --verbose shows all")


def _installation() -> Iterator[Finding]:
    yield Finding("operations", "ok", f"{__version__} on Python {platform.python_version()}")
    for extra, packages in _EXTRAS.items():
        try:
            found = ", ".join(f"{package} {version(package)}" for package in packages)
        except PackageNotFoundError:
            yield Finding(f"extra {extra}", "warning", f"pip install 'alkdev-operations[{extra}]'")
        else:
            yield Finding(f"extra {extra}", "ok", found)


def _missing_secrets(file: ConfigFile) -> Iterator[tuple[str, str]]:
    """Return every missing secret that the config names."""
    for path, secret in file.secrets():
        try:
            file.secret(secret)
        except ConfigError as error:
            yield ".".join(map(str, path)), error.faults[0].message


def _missing_folders(file: ConfigFile) -> Iterator[tuple[str, str]]:
    """Yield the keys of the ledger whose files cannot be created. The ledger of a running hub stays untouched."""
    entry = file.config.ledger
    for key in () if entry is None else ("file", "head"):
        path = getattr(entry, key)
        if path is not None and not file.resolve(path).parent.is_dir():
            yield f"ledger.{key}", f"there is no folder {file.resolve(path).parent}"


async def _sources(file: ConfigFile, *, has_secrets: bool) -> AsyncIterator[Finding]:
    async with open_hub(file) as hub:
        if has_secrets:
            try:
                _ = hub.access
            except (OperationsError, OSError, ValueError) as error:
                yield Finding("access", "failed", str(error))
        for source in hub.sources:
            if not source.is_enabled:
                continue
            if source.problem is not None:
                yield Finding(source.label, "failed", source.problem)
                continue
            for part in source.warnings:
                yield Finding(source.label, "warning", f"{part.where} {part.reason}")
            words = f"{counted(len(source.operations), 'operation')} in {source.seconds:.1f} s"
            if source.skipped:
                yield Finding(source.label, "warning", f"{words}; {len(source.skipped)} skipped")
            else:
                yield Finding(source.label, "ok", words)
        if not hub.sources:
            yield Finding("sources", "warning", "the config has none")


async def _brokers(file: ConfigFile) -> AsyncIterator[Finding]:
    for name, entry in file.config.brokers.items():
        if not entry.enabled:
            continue
        try:
            with anyio.fail_after(_BROKER_SECONDS):
                async with (
                    connect_broker(entry, file) as target,
                    # Check that the permissions at the broker allow us to receive a reply.
                    PendingRequestMap(target, group=worker_config(entry, file).group),
                ):
                    pass
            yield Finding(f"broker {name}", "ok", entry.url)
        except (OperationsError, OSError, TimeoutError) as error:
            yield Finding(f"broker {name}", "failed", str(error) or "no answer")


def _port(file: ConfigFile) -> Finding:
    listen = ListenConfig(**file.options(ListenConfig, file.config.serve))
    host, port = listen.host, listen.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return Finding("port", "warning", f"{host}:{port} cannot be used: {error.strerror}")
    return Finding("port", "ok", f"{host}:{port} is free")


def _trace(file: ConfigFile) -> Finding:
    if not file.config.trace.enabled:
        return Finding("trace", "ok", "calls are not recorded")
    path = journal_path(file)
    if not _is_writable(path):
        return Finding("trace", "warning", f"{path} cannot be written: set another trace.file")
    return Finding("trace", "ok", str(path))


def _changes(file: ConfigFile) -> Iterator[Finding]:
    """Return the changes that normalisation made to the results of traced calls, by operation."""
    if not file.config.trace.enabled:
        return
    found: dict[str, dict[str, int]] = {}
    for record in read_journal(journal_path(file)):
        if record.changes:
            add_counts(found.setdefault(record.operation_id, {}), record.changes)
    for operation_id, kinds in sorted(found.items()):
        words = ", ".join(
            f"{counted(count, 'value')} {_CHANGED[kind]}"
            for kind, count in kinds.items()
            if kind in _CHANGED
        )
        yield Finding(operation_id, "warning", f"results differ from the schema: {words}")


def undeclared_calls(records: Iterable[CallRecord]) -> dict[str, list[str]]:
    """Return the nested calls that were checked as the caller, by the operation that made them."""
    known = {record.request_id: record for record in records}
    found: dict[str, set[str]] = {}
    for record in known.values():
        parent = known.get(record.parent_request_id or "")
        if parent is not None and record.authority is None:
            found.setdefault(parent.operation_id, set()).add(record.operation_id)
    return {operation_id: sorted(found[operation_id]) for operation_id in sorted(found)}


def _is_writable(path: Path) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError:
        return False
    return True
