"""A sink in a package of its own: it counts calls in a file, and rejects those that it cannot count."""

from dataclasses import dataclass
from pathlib import Path

from operations.recorder.kinds import SinkPlace
from operations.recorder.recorder import Begin, Digest, End, Note


@dataclass(frozen=True, slots=True, kw_only=True)
class CountEntry:
    """The number of calls.

    Attributes:
        file: The file with a line for each event, relative to this one.
        strict: Reject calls that cannot be counted.
    """

    file: str
    strict: bool = True


class Count:
    """Appends a line for each event."""

    wants = frozenset({"admitted", "ended", "rejected"})

    def __init__(self, path: Path, *, strict: bool) -> None:
        self.strict = strict
        self._path = path

    def open(self) -> None:
        """Do nothing: the file is opened for each line."""

    def begin(self, call: Begin, digest: Digest | None) -> None:
        """Write a line."""
        self._write(f"begin {call.operation_id} {'' if digest is None else len(digest())}")

    def end(self, call: End) -> None:
        """Write a line."""
        self._write(f"end {call.operation_id} {call.code}")

    def note(self, event: Note) -> None:
        """Do nothing: no other event is wanted."""

    def check(self) -> bool:
        """Return whether a line can be written."""
        return self._path.parent.is_dir()

    def close(self) -> None:
        """Do nothing."""

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class CountKind:
    """Counts calls."""

    about = "The number of calls."
    entry = CountEntry
    is_default = False

    def open(self, entry: CountEntry, place: SinkPlace) -> Count:
        """Return the sink."""
        return Count(place.resolve(entry.file), strict=entry.strict)


KIND = CountKind()
