"""Which kinds of sinks a file may name: those of the library, and those of installed packages.

    class CountKind:
        about = "The number of calls."
        entry = CountEntry              # a frozen dataclass: its fields are the keys of [record.count]
        is_default = False

        def open(self, entry, place): return Counts(place.resolve(entry.file))

A package registers an instance as an entry point of the group `operations.sinks`, under the name of its table.

Rule: a kind is imported when a file has its table, so an installed package cannot add itself.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, cast

from operations.base.plugins import registered
from operations.contract.options import Secret
from operations.recorder.recorder import Sink

GROUP = "operations.sinks"
"""The group of the entry points by which packages register kinds."""

BUILT_IN = {
    "ledger": "operations.authority.ledger:KIND",
    "audit": "operations.recorder.audit:KIND",
    "trace": "operations.recorder.graph:KIND",
}
"""Our own kinds, by table, in the order of the reference."""


class SinkPlace(Protocol):
    """What a kind may use of the file and the process that open a sink."""

    def resolve(self, path: str) -> Path:
        """Return a path of the file as an absolute path."""
        ...

    @property
    def state(self) -> Path:
        """The path, without a suffix, of data about the calls of this file in the state folder of the user."""
        ...

    @property
    def level(self) -> int:
        """The level at which to log a problem that does not stop the process."""
        ...

    def secret(self, secret: Secret) -> str:
        """Return the value of a secret.

        Raises:
            ValueError: If it cannot be read.
        """
        ...

    def error(self, message: str, key: str = "") -> ValueError:
        """Return an error about a value of the table, with its key."""
        ...


class SinkKind(Protocol):
    """One kind of sink."""

    about: str
    """Describes the table in the reference of the file."""

    @property
    def entry(self) -> type[Any]:
        """The keys of the table: a frozen dataclass with their descriptions."""
        ...

    is_default: bool
    """Whether there is a sink of this kind if the file has no table for it."""

    def open(self, entry: Any, place: SinkPlace) -> Sink | None:
        """Return a sink; None if the table disables it.

        Raises:
            OperationsError, OSError, ValueError: If it cannot be used.
        """
        ...


def kind_of(name: str) -> SinkKind | None:
    """Return the kind with a table; None if there is none.

    Raises:
        ValueError: If the package of a kind cannot be imported.
    """
    return cast("SinkKind | None", registered(name, BUILT_IN, GROUP))


def kinds(names: Collection[str] = ()) -> dict[str, SinkKind]:
    """Return our own kinds, and those of other packages for `names`, by table."""
    others = sorted({*names} - BUILT_IN.keys())
    return {name: found for name in (*BUILT_IN, *others) if (found := kind_of(name)) is not None}
