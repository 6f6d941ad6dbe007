"""Open what a config says about authority: the store of budgets, revocations and approvals, and the ledger."""

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import Any

from operations.authority import Authority, SQLiteStore, Store, StoreError
from operations.config import ConfigFile
from operations.errors import OperationsError

_STORES = {
    False: "operations.pubsub.redis.store:open_redis_store",
    True: "operations.pubsub.nats.store:open_nats_store",
}
"""By whether it is NATS. Imported when needed: each has its own extra."""

_LEDGER = "operations.authority.ledger"
"""Imported when the config has `[ledger]`: it needs file locks, which not every system has."""


@asynccontextmanager
async def opened_authority(file: ConfigFile, *, records: bool = True) -> AsyncGenerator[Authority]:
    """Yield the authority of a config, with its store open, and its ledger if it `records`.

    Raises:
        ConfigError: If one of them cannot be opened.
    """
    async with AsyncExitStack() as stack:
        store = await _open_store(file, stack)
        ledger = None
        if records and file.config.ledger is not None:
            ledger = _open_ledger(file)
            stack.callback(ledger.close)
        yield Authority(store, ledger=ledger)


async def _open_store(file: ConfigFile, stack: AsyncExitStack) -> Store | None:
    entry = file.config.authority
    if entry.broker is not None:
        broker = file.config.brokers[entry.broker]
        module, _, function = _STORES[broker.is_nats].partition(":")
        config = file.options(broker.classes()[0], broker)
        opened = getattr(import_module(module), function)(
            broker.classes()[0](url=broker.url, **config)
        )
        try:
            store: Store = await stack.enter_async_context(opened)
        except Exception as error:
            reason = f"the broker {entry.broker} cannot be used: {error}"
            raise file.fault(reason, "authority.broker") from error
        return store
    if entry.file is None:
        return None
    try:
        kept = SQLiteStore(file.resolve(entry.file))
    except StoreError as error:
        raise file.fault(str(error), "authority.file") from error
    stack.callback(kept.close)
    return kept


def ledger_options(file: ConfigFile) -> dict[str, Any]:
    """Return the path, key and head of the ledger of a config.

    Raises:
        ConfigError: If there is none, or its key is not where the config says.
    """
    entry = file.config.ledger
    if entry is None:
        raise file.fault("There is no [ledger].")
    process = str(os.getpid())
    head = None if entry.head is None else file.resolve(entry.head.replace("{pid}", process))
    path = file.resolve(entry.file.replace("{pid}", process))
    return {"path": path, "key": file.secret(entry.key), "head": head}


def _open_ledger(file: ConfigFile) -> Any:
    entry = file.config.ledger
    try:
        return import_module(_LEDGER).Ledger(
            **ledger_options(file), strict=entry is not None and entry.strict
        )
    except (OperationsError, ValueError) as error:
        raise file.fault(str(error), "ledger") from error
