"""Open what a config says about authority: the store of budgets, revocations and approvals, and the ledger."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import Any

from operations.authority import Authority, SQLiteStore, Store, StoreError
from operations.config import ConfigFile
from operations.errors import OperationsError

_LEDGER = "operations.authority.ledger"
"""Imported when the config has `[ledger]`: it needs file locks, which not every system has."""


@asynccontextmanager
async def opened_authority(file: ConfigFile, *, records: bool = True) -> AsyncGenerator[Authority]:
    """Yield the authority of a config, with its store open, and its ledger if it `records`.

    Raises:
        ConfigError: If one of them cannot be opened.
    """
    async with AsyncExitStack() as stack:
        store = _open_store(file, stack)
        ledger = None
        if records and file.config.ledger is not None:
            ledger = _open_ledger(file)
            stack.callback(ledger.close)
        yield Authority(store, ledger=ledger)


def _open_store(file: ConfigFile, stack: AsyncExitStack) -> Store | None:
    entry = file.config.authority
    if entry.file is None:
        return None
    try:
        store = SQLiteStore(file.resolve(entry.file))
    except StoreError as error:
        raise file.fault(str(error), "authority.file") from error
    stack.callback(store.close)
    return store


def ledger_options(file: ConfigFile) -> dict[str, Any]:
    """Return the path, key and head of the ledger of a config.

    Raises:
        ConfigError: If there is none, or its key is not where the config says.
    """
    entry = file.config.ledger
    if entry is None:
        raise file.fault("There is no [ledger].")
    head = None if entry.head is None else file.resolve(entry.head)
    return {"path": file.resolve(entry.file), "key": file.secret(entry.key), "head": head}


def _open_ledger(file: ConfigFile) -> Any:
    entry = file.config.ledger
    try:
        return import_module(_LEDGER).Ledger(
            **ledger_options(file), strict=entry is not None and entry.strict
        )
    except (OperationsError, ValueError) as error:
        raise file.fault(str(error), "ledger") from error
