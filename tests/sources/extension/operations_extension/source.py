"""A kind of source in a package of its own: each CSV file becomes an operation that finds rows."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operations import Operation, OperationContext, OperationSpec, OperationType, from_schema
from operations.contract.options import KeyPath
from operations.sources.contract import Guess, Opened, Place, SourceEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class CSVEntry(SourceEntry):
    """A table in a CSV file. The name of its table is the namespace of its operation.

    Attributes:
        file: The file, relative to this one; its first row contains the names of the columns.
    """

    file: str

    @property
    def files(self) -> Iterable[str]:
        """The file."""
        return (self.file,)


class CSVKind:
    """CSV files."""

    name = table = "csv"
    about = "Tables in CSV files, by namespace."
    entry = CSVEntry
    owns_namespace = True
    is_late = False

    def check(self, entry: CSVEntry, path: KeyPath, folder: Path) -> Iterable[tuple[KeyPath, str]]:
        """Check the name of the file."""
        if not entry.file.endswith(".csv"):
            yield (*path, "file"), "must be a .csv file."

    def guess(self, words: Sequence[str], *, is_certain: bool) -> Guess | None:
        """Take a CSV file."""
        path = Path(words[0])
        if not is_certain and path.suffix != ".csv":
            return None
        return Guess(name=path.stem, keys={"file": words[0]})

    async def open(self, name: str, entry: CSVEntry, place: Place) -> Opened:
        """Read the file."""
        path = place.existing(entry.file, f"csv.{name}.file")
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))

        async def find(input: dict[str, Any], _context: OperationContext) -> list[dict[str, str]]:
            return [row for row in rows if row.items() >= input.items()]

        columns: dict[str, Any] = {key: {"type": "string"} for key in (rows[0] if rows else ())}
        row: dict[str, Any] = {
            "type": "object",
            "properties": columns,
            "additionalProperties": False,
        }
        spec = OperationSpec(
            namespace=name,
            name="find",
            type=OperationType.QUERY,
            description=f"Find rows of {entry.file}.",
            input_schema=from_schema(row),
            output_schema=from_schema({"type": "array", "items": row}),
        )
        return Opened(operations=[Operation(spec, find)], origin=entry.file)


KIND = CSVKind()
