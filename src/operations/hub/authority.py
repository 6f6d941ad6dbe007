"""Open what a config says about authority: the store of budgets, revocations and approvals."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from operations.authority import Authority, MemoryStore, SQLiteStore, StoreError
from operations.config import ConfigFile


@asynccontextmanager
async def opened_authority(file: ConfigFile) -> AsyncGenerator[Authority]:
    """Yield the authority of a config, with its store open.

    Raises:
        ConfigError: If the store cannot be opened.
    """
    entry = file.config.authority
    if entry.file is None:
        yield Authority(MemoryStore())
        return
    try:
        store = SQLiteStore(file.resolve(entry.file))
    except StoreError as error:
        raise file.fault(str(error), "authority.file") from error
    try:
        yield Authority(store)
    finally:
        store.close()
