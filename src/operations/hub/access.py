"""Build the access control of a config: the keys and tokens of `[access]`, the authority and the ledger."""

import os
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from operations.access import Identity
from operations.authority import Authority, Grants, Ledger, SQLiteValues, Store, StoreError
from operations.authority.grants import PREFIX
from operations.authority.store import open_broker_store
from operations.config import ConfigFile
from operations.config.model import LedgerEntry
from operations.errors import OperationsError
from operations.front.config import JWTConfig
from operations.hub.sources import connect_broker

_PROCESS = "{pid}"
"""Replaced by the process id in the file names of a ledger."""


def callers_by_hash(file: ConfigFile) -> dict[str, Identity]:
    """Return the callers of `[access.keys]` by the SHA-256 of their keys.

    Raises:
        ConfigError: If a key cannot be read.
    """
    found: dict[str, Identity] = {}
    for name, entry in file.config.access.keys.items():
        identity = Identity(name, **file.options(Identity, entry))
        if entry.sha256 is not None:
            found[entry.sha256.lower()] = identity
        elif entry.key is not None:
            found[sha256(file.secret(entry.key).encode()).hexdigest()] = identity
    return found


def can_sign_in(file: ConfigFile) -> bool:
    """Return whether a config has callers with credentials."""
    access = file.config.access
    return bool(access.keys) or access.jwt is not None or access.grants is not None


def serves_anonymous(file: ConfigFile) -> bool:
    """Return whether requests without a credential are served."""
    access = file.config.access
    return access.jwt is None if access.anonymous is None else access.anonymous


class Access:
    """The callers of `[access]`, which can change while a hub runs.

    Args:
        file: The config.
        store: Stores revocations of grants.

    Raises:
        ConfigError: If a key cannot be read.
    """

    def __init__(self, file: ConfigFile, store: Store) -> None:
        entry = file.config.access.jwt
        self.keys = callers_by_hash(file)
        self.by_id = {identity.id: identity for identity in self.keys.values()}
        self.grants = grants_of(file, store=store, subjects=self.by_id.get)
        self.tokens: Any = None
        if entry is not None:
            from operations.server.tokens import JWTs  # noqa: PLC0415 - needs an extra

            self.tokens = JWTs(**file.options(JWTConfig, entry))

    def become(self, other: "Access") -> None:
        """Use the callers of a new version of the file."""
        self.keys, self.tokens, self.grants = other.keys, other.tokens, other.grants
        self.by_id = other.by_id

    def find(self, key_hash: str) -> Identity | None:
        """Return the caller whose key has this SHA-256."""
        return self.keys.get(key_hash)

    def resolve(self, credential: str) -> "Identity | Awaitable[Identity | None] | None":
        """Return the identity for a credential inside a call: a key or a grant."""
        if self.grants is not None and credential.startswith(PREFIX):
            return self.grants.resolve(credential)
        # Looked up by hash, so that the timing reveals nothing about a key.
        return self.keys.get(sha256(credential.encode()).hexdigest())

    async def grant(self, credential: str | None) -> Identity | None:
        """Return the identity of a grant; None for a credential of another kind.

        Raises:
            GrantError: If the grant is not valid.
        """
        if self.grants is None or credential is None:
            return None
        return await self.grants.resolve(credential)

    def identify_token(self, request: Any) -> Any:
        """Return the identity of an HTTP request with a signed token, or an awaitable of it."""
        return None if self.tokens is None else self.tokens(request)


# ------------------------------------------------------------ authority


def grants_of(file: ConfigFile, **options: Any) -> Grants | None:
    """Return the grants of a config; None if it has none.

    Raises:
        ConfigError: If their key cannot be read, or is too short.
    """
    entry = file.config.access.grants
    if entry is None:
        return None
    try:
        return Grants(file.secret(entry.key), **options)
    except ValueError as error:
        raise file.fault(str(error), "access.grants.key") from error


@asynccontextmanager
async def opened_authority(file: ConfigFile, *, records: bool = True) -> AsyncGenerator[Authority]:
    """Yield the authority of a config with an open store, and with its ledger if `records` is true.

    Raises:
        ConfigError: If the store or the ledger cannot be opened.
    """
    entry, ledger = file.config.ledger, None
    async with AsyncExitStack() as stack:
        store = await _open_store(file, stack)
        if records and entry is not None:
            path, head = _place(file, entry, str(os.getpid()))
            key, options = file.secret(entry.key), {"strict": entry.strict, "sync": entry.sync}
            try:
                ledger = Ledger(path, key, head=head, **options)
            except ValueError as error:
                raise file.fault(str(error), "ledger.key") from error
            stack.callback(ledger.close)
        yield Authority(store, ledger=ledger)


async def _open_store(file: ConfigFile, stack: AsyncExitStack) -> Store:
    entry = file.config.authority
    try:
        if entry.broker is not None:
            connection = connect_broker(file.config.brokers[entry.broker], file)
            target = await stack.enter_async_context(connection)
            store = await stack.enter_async_context(open_broker_store(target))
        elif entry.file is not None:
            store = Store(SQLiteValues(file.resolve(entry.file)))
        else:
            return Store()
        # Report a store that cannot be written before the first call.
        await store.swap("store.opened", None, b"1")
    except OperationsError as error:
        key = "authority.file" if entry.broker is None else "authority.broker"
        reason = (isinstance(error, StoreError) and error.__cause__) or error
        raise file.fault(f"cannot be used: {reason}", key) from error
    return store


def ledgers_of(file: ConfigFile) -> tuple[str, list[tuple[Path, Path | None]]]:
    """Return the key of a config's ledger, and its files with their heads: one for each process.

    Raises:
        ConfigError: If there is no ledger, or its key cannot be read.
    """
    entry = file.config.ledger
    if entry is None:
        raise file.fault("There is no [ledger].")
    path, processes = file.resolve(entry.file), [""]
    start, is_many, end = path.name.partition(_PROCESS)
    if is_many:
        names = (each.name for each in path.parent.glob(f"{start}*{end}"))
        processes = sorted(each.removeprefix(start).removesuffix(end) for each in names)
    return file.secret(entry.key), [_place(file, entry, each) for each in processes]


def _place(file: ConfigFile, entry: LedgerEntry, process: str) -> tuple[Path, Path | None]:
    head = None if entry.head is None else file.resolve(entry.head.replace(_PROCESS, process))
    return file.resolve(entry.file.replace(_PROCESS, process)), head
