"""What a kind of source implements: `SourceKind`, its table in the file, and what it returns when it is opened.

    class CSVKind:
        name = table = "csv"
        entry = CSVEntry            # a frozen dataclass: its fields are the keys of [csv.NAME]
        owns_namespace = True
        is_late = False

        def check(self, entry, path, folder): ...
        def guess(self, words, *, is_certain): ...
        async def open(self, name, entry, place): return Opened(operations=..., origin=entry.file)

A package registers an instance as an entry point of the group `operations.sources`, under the name of its table.

Rule 1: a kind knows no file and no hub; everything that it may read of them is in `Place`.
Rule 2: a kind is imported only if a file has its table, so an installed package cannot add itself.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from operations.base.types import JSONObject
from operations.contract.options import Derived, KeyPath, Secret, keys_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A table that is converted to config classes of the library, whose fields are in `options`."""

    derived: ClassVar[Derived] = Derived(tuple, {})

    options: JSONObject = field(default_factory=dict[str, Any])

    def classes(self) -> tuple[Any, ...]:
        """Return the classes that this table is converted to."""
        return self.derived.load()

    def of(self, cls: Any) -> JSONObject:
        """Return the fields of one of these classes that the file sets, or whose default in a file differs."""
        given, known = {**self.derived.defaults, **self.options}, keys_of(cls)
        return {key: value for key, value in given.items() if key in known}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry(Entry):
    """The table of one source.

    Attributes:
        enabled: Set to false to skip this source.
    """

    short: ClassVar[Mapping[str, str]] = {}
    """Keys that set the same value as a longer one."""

    enabled: bool = True

    @property
    def is_source(self) -> bool:
        """Whether operations are imported from it; otherwise, another part of the file uses the table."""
        return True

    @property
    def files(self) -> Iterable[str]:
        """The files that the source is made of: it is opened again if they change."""
        return ()

    @property
    def delegates(self) -> str | None:
        """The key by which calls carry grants, which need `access.grants`; None without one."""
        return None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A part of a source that could not be used, with the reason."""

    where: str
    reason: str

    traceback: str = ""
    """The traceback of a Python module that cannot be imported, without the lines of this library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What the words of a command line name as a source."""

    name: str
    """Its name, if the caller gives no other: from a host or a file."""

    keys: JSONObject = field(default_factory=dict[str, Any])
    """The keys of its table."""

    top: JSONObject = field(default_factory=dict[str, Any])
    """Keys of the file itself, instead of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open source."""

    operations: Iterable[Any]
    """Its operations: a list, or a service whose operations may change. Such a service has `attach(registry)` and
    `detach(registry)`."""

    origin: str
    """Its document, server or module, without secrets."""

    skipped: list[Skipped] = field(default_factory=list[Skipped])
    """Parts of the source that cannot be used, with the reason."""

    warnings: list[Skipped] = field(default_factory=list[Skipped])
    """Settings and parts of a document that are unknown or missing."""

    title: str = ""
    """Its own title."""

    problem: Callable[[], str | None] = lambda: None
    """Returns the reason why the source is not available; None if it is."""

    next_attempt: Callable[[], float | None] = lambda: None
    """Returns the time of the next connection attempt, by the loop's clock; None if none is planned."""

    calls: Callable[[], int] = lambda: 0
    """Returns the number of running calls on the source."""

    limit_calls: Callable[[int], None] | None = None
    """Changes the number of concurrent calls; None if the entry sets it."""

    advice: Callable[[Sequence[Any]], Iterable[str]] = lambda _specs: ()
    """Returns what would make its operations better to use, given their specs; `operations doctor` prints it."""

    monitor: Any = None
    """Monitors the workers of a broker."""

    close: Callable[[], Awaitable[object]] | None = None
    """Closes the source."""

    def attach(self, registry: Any) -> None:
        """Let a service whose operations change update `registry`."""
        getattr(self.operations, "attach", _ignore)(registry)

    def detach(self, registry: Any) -> None:
        """Stop a service whose operations change from updating `registry`."""
        getattr(self.operations, "detach", _ignore)(registry)

    async def aclose(self) -> None:
        """Close the source, if it has a connection."""
        if self.close is not None:
            await self.close()


def _ignore(_registry: Any) -> None:
    """Do nothing: operations in a list do not change."""


class Place(Protocol):
    """What a source may use of the file and the hub that open it."""

    @property
    def folder(self) -> Path:
        """The folder that paths are relative to."""
        ...

    @property
    def calls(self) -> int:
        """The number of concurrent calls of a source that sets no limit of its own."""
        ...

    def secret(self, secret: Secret) -> str:
        """Return the value of a secret.

        Raises:
            ValueError: If it cannot be read.
        """
        ...

    def existing(self, path: str, key: str) -> Path:
        """Return the absolute path of a file that the entry names at `key`.

        Raises:
            ValueError: If there is no such file.
        """
        ...

    def options(self, cls: Any, entry: Entry, revealed: list[str] | None = None) -> dict[str, Any]:
        """Return the fields of one of the classes of a table, with their secrets, which `revealed` receives too.

        Raises:
            ValueError: If a secret cannot be read, or a value is rejected.
        """
        ...

    def error(self, message: str, key: str | KeyPath = "") -> ValueError:
        """Return an error about a value of the file, with its key."""
        ...

    def load_functions(self, values: Iterable[Any]) -> None:
        """Import the functions that return tokens of callers, so that a missing one is reported at once.

        Raises:
            ValueError: If one cannot be imported.
        """
        ...

    def importing(self) -> AbstractContextManager[None]:
        """Make modules beside the file importable, within a `with` block."""
        ...

    def delegate(self, group: str, namespace: str | None) -> Any:
        """Return the function that creates a grant for each call to a group of workers."""
        ...


class SourceKind(Protocol):
    """One kind of source."""

    name: str
    """Names the kind to operators, as in `openapi:petstore`."""

    table: str
    """The table of the file: `[openapi.NAME]`."""

    about: str
    """Describes the table in the reference of the file."""

    @property
    def entry(self) -> type[SourceEntry]:
        """The keys of the table, with their descriptions."""
        ...

    owns_namespace: bool
    """Whether the name of the table is the namespace of all operations."""

    is_late: bool
    """Whether it is opened after all others, and leaves out operations whose ids are already used."""

    def check(self, entry: Any, path: KeyPath, folder: Path) -> Iterable[tuple[KeyPath, str]]:
        """Yield the errors of a table that its schema cannot find, each with its key; without network."""
        ...

    def guess(self, words: Sequence[str], *, is_certain: bool) -> Guess | None:
        """Return what the words of `operations import` and `add` name; None if that is no source of this kind.

        Args:
            words: A document, an address, a command with its arguments, ...
            is_certain: Whether the caller named the kind. Otherwise, all kinds of the library are asked.

        Raises:
            OperationsError: If they name one that cannot be used.
        """
        ...

    async def open(self, name: str, entry: Any, place: Place) -> Opened:
        """Open a source.

        Raises:
            OperationsError, OSError, ValueError: If it cannot be opened.
        """
        ...
