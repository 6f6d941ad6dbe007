"""`operations doctor`: check that everything a config needs is available, and recommend fixes."""

import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from getpass import getpass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import anyio
from cyclopts import Parameter

from operations import __version__
from operations.base.errors import DocumentError, OperationsError
from operations.base.text import counted
from operations.calls import PendingRequestMap
from operations.calls.kind import connect_broker, worker_config
from operations.cli.call import read_answer
from operations.cli.options import DEFAULTS, SHOWN, Common, ExitCode, Screen, command
from operations.config import ConfigError, ConfigFile
from operations.contract.events import add_counts
from operations.front.config import ServerConfig
from operations.front.credentials import resolved
from operations.hub import Hub, open_hub
from operations.hub.journal import journal_path, read_journal
from operations.hub.opening import Access, opened_authority, runs_of, unused_public_url
from operations.hub.place import HubPlace
from operations.openapi import HTTPServiceConfig, from_openapi_file, from_openapi_url
from operations.openapi.kind import advice
from operations.openapi.source.diagnosis import diagnose
from operations.recorder.graph import CallRecord
from operations.runs import RunStoreError
from operations.sources.contract import SourceEntry

State = Literal["ok", "warning", "failed"]
Report = Callable[[str, State, str], None]
"""Reports the result of one check: its subject, its state, and the explanation."""

_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
_EXTRAS = {
    "cli": ("cyclopts", "rich"),
    "openapi": ("aiohttp", "ryaml"),
    "mcp": ("mcp",),
    "server": ("starlette", "uvicorn"),
    "redis": ("redis",),
    "nats": ("nats-py",),
    "websocket": ("websockets",),
    "postgres": ("psycopg",),
    "jwt": ("pyjwt",),
    "otel": ("opentelemetry-api",),
    "otlp": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "code": ("pydantic-monty",),
    "pydantic": ("pydantic",),
}
_CAUTION = (
    "declare only calls that the code of an operation chooses: a declared call runs without a check of the caller,"
    " also if the caller's input names it"
)

_MAX_CREDENTIAL = 64 * 1024

_MANY_TOKENS = 50_000
"""From this size on, a server lists four tools that find operations instead of the operations."""

_BROKER_SECONDS = 8
_MARGIN_SECONDS = 3
"""Longer than the connection timeout, so that a failed connection reports its reason first."""


@command
async def doctor(
    document: str | None = None,
    /,
    *,
    reach: Annotated[bool, Parameter(negative="")] = False,
    token: Annotated[bool, Parameter(negative="")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Check the installation, the config, its secrets, its sources and its brokers; or an OpenAPI document.

    For a document it reports arguments that no value satisfies, required headers that only configuration can set,
    operations with several success statuses, broken references, and which of the document's response examples reach a
    caller unchanged.

    Args:
        document: The path or address of an OpenAPI or Swagger document to check instead.
        token: Read a key, grant or token from standard input and explain whether the config accepts it.
        reach: Print the undeclared nested calls in the trace, as `calls=` lines to add to the operations.
        common: Options of every command.
    """
    screen = common.screen()
    if reach:
        _print_undeclared(journal_path(common.load(required=False)), screen)
        return ExitCode.DONE
    findings: list[dict[str, str]] = []

    def report(what: str, state: State, words: str) -> None:
        findings.append({"what": what, "state": state, "words": words})
        if not screen.json:
            # A failure has lines of advice. Other texts, such as the title of a document, stay on one line.
            first, *more = (words.splitlines() or [""]) if state == "failed" else [words]
            screen.line((f"{state:8}", _STYLES[state]), (f"{what:24}", "bold"), (f" {first}", ""))
            for line in more:
                screen.line((f"{'':32} {line}", ""))

    if token:
        await _check_credential(common.load(), _read_credential(screen), report)
    elif document is None:
        await _check_all(common, report)
    else:
        await _check_document(document, report, verbose=common.verbose)
    states = [finding["state"] for finding in findings]
    failed, warnings = states.count("failed"), states.count("warning")
    if screen.json:
        screen.value({"ok": not failed, "findings": findings})
    else:
        if failed:
            whole = f"{counted(failed, 'problem')} to fix"
        elif token:
            whole = "the credential is accepted"
        elif document is None:
            whole = "everything is available"
        else:
            whole = counted(warnings, "warning") if warnings else "no problems found"
        screen.note(whole, "bold")
    return ExitCode.FAILED if failed else ExitCode.DONE


def _read_credential(screen: Screen) -> str:
    """Return the credential from standard input. It is no argument: other users see the arguments of a process."""
    if not screen.can_ask:
        return sys.stdin.readline(_MAX_CREDENTIAL).strip()
    screen.err.print("key, grant or token: ", end="")
    return read_answer(lambda: getpass(""))


async def _check_credential(file: ConfigFile, credential: str, report: Report) -> None:
    """Report what the config makes of a credential, without printing it."""
    if not credential:
        report("token", "failed", "standard input is empty: operations doctor --token < FILE")
        return
    async with opened_authority(file) as authority:
        access = Access(file, authority.store)
        try:
            known = await resolved(access.resolve(credential))
        except OperationsError as error:
            report("grant", "failed", str(error))
            return
        if known is not None:
            report(
                "token",
                "ok",
                f"is accepted: {known.id}, scopes {', '.join(sorted(known.scopes)) or 'none'}",
            )
        elif access.tokens is None:
            report(
                "token",
                "failed",
                "is no key of [access.keys], and there is no [access.jwt] for tokens",
            )
        else:
            public = file.options(ServerConfig, file.config.serve).get("public_url", "").rstrip("/")
            for name, is_accepted, words in await access.tokens.explain(
                credential, public and f"{public}/mcp"
            ):
                report(name, "ok" if is_accepted else "failed", words)


def _print_undeclared(path: Path, screen: Screen) -> None:
    """Print the nested calls of a trace that their operations do not declare."""
    found = undeclared_calls(read_journal(path))
    if screen.json:
        screen.value(found)
        return
    for operation_id, calls in found.items():
        listed = ", ".join(f'"{call}"' for call in calls)
        screen.line((f"{operation_id}: calls=[{listed}]", ""))
    screen.note(_CAUTION if found else f"no undeclared nested calls are recorded in {path}")


async def _check_all(common: Common, report: Report) -> None:
    _check_installation(report)
    try:
        file = common.load()
    except ConfigError as error:
        for issue in error.issues:
            report("config", "failed", str(issue))
        return
    report("config", "ok", str(file.origin))
    if unused := unused_public_url(file):
        report("serve.public_url", "warning", unused)
    has_secrets = _check_secrets(file, report)
    try:
        await _check_sources(file, report, has_secrets=has_secrets)
    except ConfigError as error:
        if has_secrets:
            report("config", "failed", str(error))
    await _check_brokers(file, report)
    await _check_runs(file, report)
    _check_trace(file, report)


async def _check_document(document: str, report: Report, *, verbose: bool) -> None:
    """Check an OpenAPI document."""
    config = HTTPServiceConfig(namespace="api")
    try:
        if "://" in document:
            service = await from_openapi_url(document, config)
        else:
            service = await from_openapi_file(Path(document), config)
    except (DocumentError, OSError) as error:
        report("document", "failed", str(error))
        return
    async with service:
        report("document", "ok", f"{service.title}: {counted(len(service), 'operation')}")
        found = await diagnose(service)
    for words in advice([each.spec for each in service]):
        report("operation ids", "ok", words)
    for operation_id, names in found.unsatisfiable.items():
        words = f"no value satisfies the required {', '.join(names)}"
        report(operation_id, "failed", words)
    for operation_id, names in found.hidden_headers.items():
        words = f"requires {', '.join(names)}, which no argument can set: use auth, credentials or headers"
        report(operation_id, "warning", words)
    for problem in (*found.unresolved, *found.problems):
        report(problem.where, "warning", problem.reason)
    several = found.several_responses
    if several:
        words = f"several successful responses: {counted(len(several), 'operation')}"
        report("responses", "ok", words)
    for operation_id, statuses in several.items() if verbose else ():
        report(operation_id, "ok", f"succeeds with {', '.join(statuses)}")
    changed = found.changed
    words = f"{found.examples - len(changed)} of {counted(found.examples, 'response example')} unchanged"
    report("examples", "warning" if changed else "ok", words)
    for example in changed if verbose else changed[:SHOWN]:
        words = f"example of {example.status}: {_by_kind(example.changes)}"
        report(example.operation_id, "warning", words)
    if not verbose and len(changed) > SHOWN:
        report("examples", "ok", f"{len(changed) - SHOWN} more; --verbose shows all")


def _check_installation(report: Report) -> None:
    report("operations", "ok", f"{__version__} on Python {platform.python_version()}")
    for extra, packages in _EXTRAS.items():
        try:
            found = ", ".join(f"{package} {version(package)}" for package in packages)
        except PackageNotFoundError:
            report(f"extra {extra}", "warning", f"pip install 'alkdev-operations[{extra}]'")
        else:
            report(f"extra {extra}", "ok", found)


def _check_secrets(file: ConfigFile, report: Report) -> bool:
    """Report every missing secret that the config names; return whether there is none."""
    is_complete = True
    for path, secret in file.secrets():
        try:
            file.secret(secret)
        except ConfigError as error:
            issue = error.issues[0]
            place = issue.file if issue.line is None else f"{issue.file}:{issue.line}"
            report(".".join(map(str, path)), "failed", f"{issue.message} See {place}.")
            is_complete = False
    return is_complete


async def _check_sources(file: ConfigFile, report: Report, *, has_secrets: bool) -> None:
    # Each source has its own limit, `connect_timeout`, which its error names: slow starters need it.
    async with open_hub(file, wait=None) as hub:
        if has_secrets:
            try:
                _ = hub.access
            except (OperationsError, OSError, ValueError) as error:
                report("access", "failed", str(error))
        for source in hub.sources:
            if not source.is_enabled:
                continue
            if source.problem is not None:
                report(source.label, "failed", source.problem)
                continue
            for part in source.warnings:
                report(source.label, "warning", f"{part.where} {part.reason}")
            words = f"{counted(len(source.operations), 'operation')} in {source.seconds:.1f} s"
            if source.skipped:
                report(source.label, "warning", f"{words}; {len(source.skipped)} skipped")
            else:
                report(source.label, "ok", words)
            for words in source.advice():
                report(source.label, "ok", words)
        for spec in hub.registry.specs():
            if spec.problem is not None:
                report(spec.id, "failed", f"a schema cannot be used: {spec.problem}")
        _check_sizes(hub, report)
        if hub.set_up:
            report("setup", "ok", counted(hub.set_up, "operation"))
        elif not hub.sources:
            report("sources", "warning", "the config has none")


def _check_sizes(hub: Hub, report: Report) -> None:
    """Report the tokens that the tools of each source take in a list, and how to take fewer."""
    try:
        from operations.mcp.serving.sizes import tokens_of, tools_of  # noqa: PLC0415 - needs an extra
    except ImportError:
        return
    for source in hub.sources:
        if not isinstance(source.entry, SourceEntry) or source.problem is not None:
            continue
        namespace = source.entry.options.get("namespace", source.name)
        specs = [spec for spec in hub.registry.specs() if spec.namespace == namespace]
        tokens = tokens_of(tools_of(hub.registry, specs))
        budget: int | None = source.entry.options.get("token_budget")
        words = f"its tools take about {tokens:,} tokens in a list"
        if budget is not None:
            words += f"; token_budget is {budget:,}"
        if tokens > (_MANY_TOKENS if budget is None else budget):
            short = tokens_of(tools_of(hub.registry, specs, "short"))
            if short < tokens:
                words += f'; descriptions = "short" makes them {short:,}'
            words += "; fewer operations take less: include, exclude, allow or hide"
        is_over = budget is not None and tokens > budget
        report(source.label, "warning" if is_over else "ok", words)


async def _check_brokers(file: ConfigFile, report: Report) -> None:
    for name, entry in file.config.tables("brokers").items():
        if not entry.enabled:
            continue
        try:
            allowed = entry.options.get("connect_timeout", 0)
            with anyio.fail_after(max(_BROKER_SECONDS, allowed + _MARGIN_SECONDS)):
                async with (
                    connect_broker(entry, HubPlace(file)) as target,
                    # Check that the permissions at the broker allow us to receive a reply.
                    PendingRequestMap(target, group=worker_config(entry, HubPlace(file)).group),
                ):
                    pass
            report(f"broker {name}", "ok", entry.url)
        except (OperationsError, OSError, TimeoutError) as error:
            late = "no answer; if it only needs more time, increase connect_timeout"
            report(f"broker {name}", "failed", str(error) or late)


async def _check_runs(file: ConfigFile, report: Report) -> None:
    """Open the store of runs as a client, and report what waits in it."""
    try:
        runs = runs_of(file)
    except ConfigError as error:
        report("runs", "failed", str(error))
        return
    if runs is None:
        return
    try:
        await runs.connect()
        counts = await runs.counts() if await runs.works() else None
    except RunStoreError as error:
        report("runs", "failed", error.message)
        return
    finally:
        await runs.aclose()
    if counts is None:
        report("runs", "failed", "the store of [runs] cannot be written")
    else:
        words = ", ".join(
            f"{counts[name]} {name}" for name in ("queued", "working", "input_required")
        )
        report("runs", "ok", words)


def _check_trace(file: ConfigFile, report: Report) -> None:
    """Report the changes that normalisation made to recorded results, by operation."""
    try:
        records = read_journal(journal_path(file))
    except OSError as error:
        report("trace", "warning", f"the recorded calls cannot be read: {error}")
        return
    found: dict[str, dict[str, int]] = {}
    for record in records:
        if record.changes:
            add_counts(found.setdefault(record.operation_id, {}), record.changes)
    for operation_id, kinds in sorted(found.items()):
        report(operation_id, "warning", f"results differ from the schema: {_by_kind(kinds)}")


def _by_kind(changes: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(changes.items()))


def undeclared_calls(records: Iterable[CallRecord]) -> dict[str, list[str]]:
    """Return the nested calls that were checked as the caller, by the operation that made them."""
    known = {record.request_id: record for record in records}
    found: dict[str, set[str]] = {}
    for record in known.values():
        parent = known.get(record.parent_request_id or "")
        if parent is not None and record.authority is None:
            found.setdefault(parent.operation_id, set()).add(record.operation_id)
    return {operation_id: sorted(found[operation_id]) for operation_id in sorted(found)}
