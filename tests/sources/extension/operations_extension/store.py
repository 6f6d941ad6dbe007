"""A store in a package of its own: each value is a file of a folder."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

from operations.store import Store


class FolderValues:
    """Values as files, for one process."""

    poll_seconds = inf

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        path = self._folder / key
        return path.read_bytes() if path.exists() else None

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        if await self.get(key) != old:
            return False
        if new is None:
            (self._folder / key).unlink(missing_ok=True)
        else:
            (self._folder / key).write_bytes(new)
        return True

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        return {each.name: each.read_bytes() for each in self._folder.glob(f"{table}.*")}


@asynccontextmanager
async def open_folder(url: str, _password: str | None = None) -> AsyncGenerator[Store]:
    """Yield a store in a folder: `folder:PATH`."""
    yield Store(FolderValues(Path(url.removeprefix("folder:"))))
