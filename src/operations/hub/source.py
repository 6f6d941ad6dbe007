"""A source of operations: one entry of a config, its state, the filter that selects it, and what it is built from."""

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from operations.base.files import modified_at
from operations.config import FILE_NAME, ConfigError, ConfigFile
from operations.front.limits import Limits
from operations.mcp.kind import ListedServer
from operations.sources.contract import Opened, Skipped, SourceKind


class SourceState(StrEnum):
    """Whether a source can be called."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    DISABLED = "disabled"

    FAILING = "failing"
    """Connected, but all of its last calls failed."""


@dataclass(slots=True, kw_only=True, eq=False)
class Source:
    """One entry of a config, and its state."""

    of: SourceKind
    name: str
    entry: Any = None

    opened: Opened | None = None
    """The open source; it stays set while the connection is lost."""

    failure: str | None = None
    """The reason why the source could not be opened."""

    warnings: tuple[Skipped, ...] = ()
    """Settings and parts of a document that are unknown or missing."""

    seconds: float = 0
    """Seconds that opening took."""

    is_enabled: bool = True

    opens_at: float | None = None
    """The time of the next attempt after a failure, by the loop's clock."""

    made_of: Any = None
    """The table, secrets and document that the source was opened with."""

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return self.of.name

    @property
    def state(self) -> SourceState:
        """The current state."""
        if not self.is_enabled:
            return SourceState.DISABLED
        if self.opened is None:
            return SourceState.CONNECTING if self.failure is None else SourceState.DISCONNECTED
        return SourceState.CONNECTED if self.problem is None else SourceState.DISCONNECTED

    @property
    def problem(self) -> str | None:
        """The reason why the source is not available; None if it is."""
        if not self.is_enabled:
            return "it is disabled"
        if self.opened is not None:
            return self.opened.problem()
        return self.failure or "it is still connecting"

    @property
    def next_attempt(self) -> float | None:
        """The time of the next connection attempt, by the loop's clock; None if none is planned."""
        if self.opens_at is not None or self.opened is None:
            return self.opens_at
        return self.opened.next_attempt()

    @property
    def label(self) -> str:
        """The kind of the source, with its name unless it is local."""
        return self.full_name if self.of.table else self.kind

    @property
    def full_name(self) -> str:
        """The name by which an operator controls the source, also if another kind of source has the same name."""
        return f"{self.kind}:{self.name}"

    @property
    def operations(self) -> tuple[str, ...]:
        """The ids of its current operations."""
        return () if self.opened is None else tuple(each.spec.id for each in self.opened.operations)

    @property
    def origin(self) -> str:
        """Its document, server or module."""
        return "" if self.opened is None else self.opened.origin

    @property
    def title(self) -> str:
        """Its own title."""
        return "" if self.opened is None else self.opened.title

    def advice(self) -> list[str]:
        """Return what would make its operations better to use."""
        if self.opened is None:
            return []
        return list(self.opened.advice([each.spec for each in self.opened.operations]))

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Parts of the source that cannot be used."""
        return () if self.opened is None else tuple(self.opened.skipped)

    @property
    def problems(self) -> tuple[Skipped, ...]:
        """All warnings and skipped parts of an open source."""
        return (*self.warnings, *self.skipped)

    @property
    def is_unreadable(self) -> bool:
        """Whether this is an unreadable `mcp.json`, which may contain any server."""
        return isinstance(self.entry, ListedServer) and self.entry.entry is None

    def is_called(self, wanted: str) -> bool:
        """Return whether a name identifies this source: its kind, its name, both, or the file that lists it."""
        names = (
            [self.name, self.entry.path] if isinstance(self.entry, ListedServer) else [self.name]
        )
        return wanted == self.kind or any(wanted in (each, f"{self.kind}:{each}") for each in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFilter:
    """Selects sources; all by default.

    Attributes:
        operation: One operation, by its id, and the operations that it calls.
        namespace: The operations of a namespace.
        source: The operations of a source: its kind, its name, or both.
        without: A source to leave out, as `kind:name`.
    """

    operation: str | None = None
    namespace: str | None = None
    source: str | None = None
    without: str | None = None

    def includes(self, source: Source) -> bool:
        """Return whether the filter selects a source.

        Workers and local modules may have operations in any namespace.
        """
        if self.source is not None:
            return source.is_called(self.source)
        return source.label != self.without and (
            self.namespace is None
            or not source.of.owns_namespace
            or source.name == self.namespace
            or source.is_unreadable
        )

    @property
    def is_all(self) -> bool:
        """Whether every source is selected."""
        return self == ALL


ALL = SourceFilter()


def limits_of(file: ConfigFile) -> Limits:
    """Return the limits of a config, which are the same at every entry point.

    Raises:
        ConfigError: If a value is wrong.
    """
    return Limits(**file.options(Limits, file.config.limits))


def per_source(file: ConfigFile) -> int:
    """Return the concurrency limit of one source: below that of a caller, so that other sources stay usable."""
    return max(1, limits_of(file).calls_per_caller * 3 // 4)


def configure(opened: Opened, file: ConfigFile) -> None:
    """Apply the limits of a config to an open source."""
    if opened.limit_calls is not None:
        opened.limit_calls(per_source(file))


def file_times(file: ConfigFile) -> dict[Path, int | None]:
    """Return the files that a hub is built from, with their modification times."""
    entries = [
        each for kind in file.config.kinds for each in file.config.tables(kind.table).values()
    ]
    local = [file.resolve(each) for entry in entries for each in entry.files]
    listings = [file.resolve(each) for each in file.config.mcp_json]
    secrets = [file.resolve(secret.file) for _, secret in file.secrets() if secret.file]
    # The config of a Python file may be written later.
    config = file.path or (file.program and file.program.with_name(FILE_NAME))
    paths = (config, *local, *listings, *secrets)
    return {path: modified_at(path) for path in paths if path is not None}


def times_read(file: ConfigFile) -> dict[Path, int | None]:
    """Return the modification times of a config's files before they are read, so that later changes are noticed."""
    times = file_times(file)
    if file.path is not None and file.modified is not None:
        times[file.path] = file.modified
    return times


def fingerprint(source: Source, file: ConfigFile) -> Any:
    """Return everything that a source is built from: its table, its secrets and its document."""
    paths = {(source.of.table, source.name)}
    if getattr(source.entry, "delegates", None):
        paths.add(("access", "grants"))
    secrets: list[str | None] = []
    for key, secret in file.secrets():
        if key[:2] in paths:
            with suppress(ConfigError):
                secrets.append(file.secret(secret))
    files = getattr(source.entry, "files", ())
    return source.entry, secrets, [modified_at(file.resolve(each)) for each in files]
