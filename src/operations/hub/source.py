"""A source of operations: one entry of a config, and its state. Python modules are opened here."""

import sys
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

from operations.caller_tokens import CallerToken
from operations.calls.monitoring import GroupMonitor
from operations.config import ConfigError, ConfigFile
from operations.hub.access import limits_of
from operations.registry import OperationRegistry
from operations.scanner import Skipped, scan_operations
from operations.types import JSONObject

Kind: TypeAlias = Literal["local", "openapi", "mcp", "broker"]

_TABLES = {"openapi": "openapi", "mcp": "mcp", "broker": "brokers"}


class SourceState(StrEnum):
    """Whether a source can be called."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class ListedServer:
    """A server of an `mcp.json`; without an `entry`, a file that cannot be read."""

    path: str
    entry: JSONObject | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A source that is open."""

    operations: Iterable[Any]
    """Its operations: a list, or a service, which may change."""

    origin: str
    """Its document, server or module, without secrets."""

    skipped: list[Skipped] = field(default_factory=list[Skipped])
    """Parts of it that cannot be used, with the reason."""

    warnings: list[Skipped] = field(default_factory=list[Skipped])
    """Settings and parts of a document that are unknown or missing."""

    title: str = ""
    """Its own title."""

    problem: Callable[[], str | None] = lambda: None
    """Returns why it cannot be called at the moment."""

    next_attempt: Callable[[], float | None] = lambda: None
    """Returns when it connects again by itself, by the loop's clock; None if no attempt is planned."""

    calls: Callable[[], int] = lambda: 0
    """Returns how many calls run on it."""

    monitor: GroupMonitor | None = None
    """Shows the workers of a broker."""

    close: Callable[[], Awaitable[object]] | None = None
    """Closes it."""

    def attach(self, registry: OperationRegistry) -> None:
        """Let a service that changes keep `registry` up to date."""
        attach = getattr(self.operations, "attach", None)
        if attach is not None:
            attach(registry)

    def detach(self, registry: OperationRegistry) -> None:
        """Let a service that changes leave `registry` alone from now on."""
        detach = getattr(self.operations, "detach", None)
        if detach is not None:
            detach(registry)

    async def aclose(self) -> None:
        """Close it, if there is anything to close."""
        if self.close is not None:
            await self.close()


@dataclass(slots=True, kw_only=True, eq=False)
class Source:
    """One entry of a config, and its state."""

    kind: Kind
    name: str
    entry: Any = None

    opened: Opened | None = None
    """The open source; also while its connection is lost."""

    failure: str | None = None
    """Why it could not be opened."""

    warnings: tuple[Skipped, ...] = ()
    """Settings and parts of a document that are unknown or missing."""

    seconds: float = 0
    """How long it took to open."""

    is_enabled: bool = True

    opens_at: float | None = None
    """When it is opened again after a failure, by the loop's clock."""

    made_of: Any = None
    """The table, secrets and document that it was opened with."""

    @property
    def state(self) -> SourceState:
        """Whether it can be called now."""
        if not self.is_enabled:
            return SourceState.DISABLED
        if self.opened is None:
            return SourceState.CONNECTING if self.failure is None else SourceState.DISCONNECTED
        return SourceState.CONNECTED if self.problem is None else SourceState.DISCONNECTED

    @property
    def problem(self) -> str | None:
        """Why it cannot be called now; None if it can."""
        if not self.is_enabled:
            return "it is disabled"
        if self.opened is not None:
            return self.opened.problem()
        return self.failure or "it is still connecting"

    @property
    def next_attempt(self) -> float | None:
        """When it is connected again, by the loop's clock; None if no attempt is planned."""
        return self.opens_at if self.opened is None else self.opened.next_attempt()

    @property
    def label(self) -> str:
        """The kind of the source, with its name unless it is local."""
        return self.kind if self.kind == "local" else f"{self.kind}:{self.name}"

    @property
    def operations(self) -> tuple[str, ...]:
        """The ids it offers now."""
        return () if self.opened is None else tuple(each.spec.id for each in self.opened.operations)

    @property
    def origin(self) -> str:
        """Its document, server or module."""
        return "" if self.opened is None else self.opened.origin

    @property
    def title(self) -> str:
        """Its own title."""
        return "" if self.opened is None else self.opened.title

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Parts of it that cannot be used."""
        return () if self.opened is None else tuple(self.opened.skipped)

    @property
    def problems(self) -> tuple[Skipped, ...]:
        """All warnings and skipped parts of an open source."""
        return (*self.warnings, *self.skipped)

    def is_called(self, wanted: str) -> bool:
        """Return whether a name means this source: its kind, its name, both, or the file that lists it."""
        names = (
            [self.name, self.entry.path] if isinstance(self.entry, ListedServer) else [self.name]
        )
        return wanted == self.kind or any(wanted in (each, f"{self.kind}:{each}") for each in names)


def per_source(file: ConfigFile) -> int:
    """Return the concurrent calls to one source: fewer than one caller has, to leave some for others."""
    return max(1, limits_of(file).calls_per_caller * 3 // 4)


def file_times(file: ConfigFile) -> dict[Path, int | None]:
    """Return the files that a hub is made of, and when each was changed."""
    documents = [each.document for each in file.config.openapi.values()]
    local = [file.resolve(each) for each in documents if "://" not in each]
    listings = [file.resolve(each) for each in file.config.mcp_json]
    return {path: modified(path) for path in (file.path, *local, *listings) if path is not None}


def modified(path: Path) -> int | None:
    """Return when a file was changed; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def fingerprint(source: Source, file: ConfigFile) -> Any:
    """Return everything that a source is made of: its table, its secrets and its document."""
    path = (_TABLES.get(source.kind, ""), source.name)
    secrets: list[str | None] = []
    for key, secret in file.secrets():
        if key[:2] == path:
            with suppress(ConfigError):
                secrets.append(file.secret(secret))
    document = getattr(source.entry, "document", "://")
    changed = None if "://" in document else modified(file.resolve(document))
    return source.entry, secrets, changed


# ------------------------------------------------------------ Python modules of the operator


@contextmanager
def importing_beside(file: ConfigFile) -> Generator[None]:
    """Let modules beside the config be imported by name, as `python -m` does, and print to standard error.

    On standard output they would be mixed with results, or with MCP.
    """
    folder = str(file.folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with redirect_stdout(sys.stderr):
        yield


def load_setup(file: ConfigFile) -> Any:
    """Import the function that `setup` names.

    Raises:
        ConfigError: If it cannot be imported.
    """
    module, _, name = str(file.config.setup).partition(":")
    with importing_beside(file):
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise file.fault(f"cannot be imported: {error}.", "setup") from error


def load_tokens(file: ConfigFile, values: Iterable[Any]) -> None:
    """Import the functions that find the tokens of callers, so that one that is missing is known at once.

    Raises:
        ValueError: If one cannot be imported.
    """
    with importing_beside(file):
        for value in values:
            if isinstance(value, CallerToken):
                value.load()


def open_modules(module: str, file: ConfigFile) -> Opened:
    """Scan a package, a folder or a file.

    Raises:
        FileNotFoundError: If it is none of those.
    """
    path = file.resolve(module)
    with importing_beside(file):
        found = scan_operations(path if path.exists() else module)
    return Opened(operations=found, origin=module, skipped=list(found.skipped))
