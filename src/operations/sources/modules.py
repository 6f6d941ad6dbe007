"""Python modules as a kind of source: the key `modules`, which lists packages, folders and files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operations.base.files import expanded
from operations.contract.options import KeyPath
from operations.sources.contract import Guess, Opened, Place, SourceEntry
from operations.sources.local import scan_operations


@dataclass(frozen=True, slots=True)
class ListedModule:
    """One of the `modules` of a file."""

    name: str
    number: int


class LocalKind:
    """Python modules, which the key `modules` lists."""

    name = "local"
    table = about = ""
    entry = SourceEntry
    owns_namespace = is_late = False

    def check(self, entry: Any, path: KeyPath, folder: Path) -> Iterable[tuple[KeyPath, str]]:
        """A name of a module needs no further check."""
        return ()

    def guess(self, words: Sequence[str], *, is_certain: bool) -> Guess | None:
        """Take a file, a folder or any word, which may be the name of a package."""
        return None if words[1:] else Guess(name="", top={"modules": [words[0]]})

    async def open(self, name: str, entry: ListedModule, place: Place) -> Opened:
        """Scan a package, a folder or a file.

        Raises:
            ValueError: If it does not exist.
        """
        path = place.folder / expanded(entry.name)
        with place.importing():
            try:
                found = scan_operations(path if path.exists() else entry.name)
            except FileNotFoundError as error:
                # The message begins with the name of the module, which is the value of the key.
                raise place.error(f"is wrong: {error}.", ("modules", entry.number)) from None
        registries = [each for each in found.registries if each.has_services]

        async def close() -> None:
            for each in registries:
                await each.aclose()

        return Opened(
            operations=found,
            origin=entry.name,
            skipped=list(found.skipped),
            # Calls may use the services, so they are closed after the time limit of a call.
            calls=lambda: len(registries),
            close=close if registries else None,
        )


KIND = LocalKind()
