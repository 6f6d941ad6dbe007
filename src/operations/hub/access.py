"""Build the access of a config: limits, the keys and tokens of `[access]`, authority and the ledger."""

import os
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from operations._grants import PREFIX
from operations.access import Identity
from operations.authority import Authority, Grants, Ledger, SQLiteStore, Store, StoreError
from operations.config import ConfigFile
from operations.config.model import LedgerEntry
from operations.front.config import JWTConfig
from operations.front.limits import Limits
from operations.pubsub.config import NatsConfig, RedisConfig

_PROCESS = "{pid}"
"""Stands for the number of the process in the names of a ledger's files."""


def limits_of(file: ConfigFile) -> Limits:
    """Return the limits of a config, which are the same at every entry point.

    Raises:
        ConfigError: If a value is wrong.
    """
    return Limits(**file.options(Limits, file.config.limits))


def callers_by_hash(file: ConfigFile) -> dict[str, Identity]:
    """Everyone in `[access.keys]`, by the SHA-256 of the key they show.

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
    """Return whether a config names callers."""
    access = file.config.access
    return bool(access.keys) or access.jwt is not None or access.grants is not None


def serves_anonymous(file: ConfigFile) -> bool:
    """Return whether requests without a credential are served."""
    access = file.config.access
    return access.jwt is None if access.anonymous is None else access.anonymous


class Access:
    """The callers of `[access]`, which may change while a hub runs.

    Args:
        file: The config.
        store: Where revocations of grants are kept.

    Raises:
        ConfigError: If a key cannot be read.
    """

    def __init__(self, file: ConfigFile, store: Store) -> None:
        entry, grants = file.config.access.jwt, file.config.access.grants
        self.keys = callers_by_hash(file)
        self.by_id = {identity.id: identity for identity in self.keys.values()}
        self.grants: Grants | None = None
        if grants is not None:
            try:
                self.grants = Grants(file.secret(grants.key), store=store, subjects=self.by_id.get)
            except ValueError as error:
                raise file.fault(str(error), "access.grants.key") from error
        self.tokens: Any = None
        if entry is not None:
            from operations.server.tokens import JWTs  # noqa: PLC0415 - needs an extra

            self.tokens = JWTs(**file.options(JWTConfig, entry))

    def become(self, other: "Access") -> None:
        """Use the callers of another version of the file."""
        self.keys, self.tokens, self.grants = other.keys, other.tokens, other.grants
        self.by_id = other.by_id

    def find(self, key_hash: str) -> Identity | None:
        """Return whose key has this SHA-256."""
        return self.keys.get(key_hash)

    def resolve(self, credential: str) -> "Identity | Awaitable[Identity | None] | None":
        """Return whose key or grant a credential inside a call is."""
        if self.grants is not None and credential.startswith(PREFIX):
            return self.grants.resolve(credential)
        # Found by its hash: how long that takes reveals nothing about a key.
        return self.keys.get(sha256(credential.encode()).hexdigest())

    async def grant(self, credential: str | None) -> Identity | None:
        """Return who acts with a grant; None for a credential of another kind.

        Raises:
            GrantError: If the grant is not valid.
        """
        if self.grants is None or credential is None:
            return None
        return await self.grants.resolve(credential)

    def identify_token(self, request: Any) -> Any:
        """Return who sends an HTTP request with a signed token, or an awaitable of it."""
        return None if self.tokens is None else self.tokens(request)


# ------------------------------------------------------------ authority


@asynccontextmanager
async def opened_authority(file: ConfigFile, *, records: bool = True) -> AsyncGenerator[Authority]:
    """Yield the authority of a config, with its store open, and its ledger if it `records`.

    Raises:
        ConfigError: If one of them cannot be opened.
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


async def _open_store(file: ConfigFile, stack: AsyncExitStack) -> Store | None:
    entry = file.config.authority
    if entry.broker is not None:
        broker = file.config.brokers[entry.broker]
        opened: AbstractAsyncContextManager[Store]
        if broker.is_nats:
            from operations.pubsub.nats.store import open_nats_store  # noqa: PLC0415 - needs an extra

            options = file.options(NatsConfig, broker)
            opened = open_nats_store(NatsConfig(url=broker.url, **options))
        else:
            from operations.pubsub.redis.store import open_redis_store  # noqa: PLC0415 - needs an extra

            options = file.options(RedisConfig, broker)
            opened = open_redis_store(RedisConfig(url=broker.url, **options))
        try:
            return await stack.enter_async_context(opened)
        except Exception as error:
            reason = f"the broker {entry.broker} cannot be used: {error}"
            raise file.fault(reason, "authority.broker") from error
    if entry.file is None:
        return None
    try:
        kept = SQLiteStore(file.resolve(entry.file))
    except StoreError as error:
        raise file.fault(error.message, "authority.file") from error
    stack.callback(kept.close)
    return kept


def ledgers_of(file: ConfigFile) -> tuple[str, list[tuple[Path, Path | None]]]:
    """Return the key of the ledger of a config, and each of its files with its head: one for each process.

    Raises:
        ConfigError: If there is none, or its key cannot be read.
    """
    entry = file.config.ledger
    if entry is None:
        raise file.fault("There is no [ledger].")
    start, _, end = file.resolve(entry.file).name.partition(_PROCESS)
    names = (each.name for each in file.resolve(entry.file).parent.glob(f"{start}*{end}"))
    processes = sorted(each.removeprefix(start).removesuffix(end) for each in names)
    if _PROCESS not in entry.file:
        processes = [""]
    return file.secret(entry.key), [_place(file, entry, each) for each in processes]


def _place(file: ConfigFile, entry: LedgerEntry, process: str) -> tuple[Path, Path | None]:
    head = None if entry.head is None else file.resolve(entry.head.replace(_PROCESS, process))
    return file.resolve(entry.file.replace(_PROCESS, process)), head
