"""Open the parts of a config: modules, sources and brokers, the callers of `[access]`, and the authority.

Packages that are slow to import or may not be installed are imported when a config needs them.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
)
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from operations.authority import Authority, Grants
from operations.authority.grants import PREFIX
from operations.base.errors import OperationsError, TransportError
from operations.base.text import safe_namespace
from operations.calls.kind import connect_broker
from operations.code.config import CodeLimits, SavedScript, digest_of
from operations.config import ConfigError, ConfigFile, Secret
from operations.config.model import CodeEntry, SavedScriptEntry
from operations.contract.access import AccessControl, Identity
from operations.contract.context import OperationContext
from operations.front.config import JWTConfig
from operations.hub.place import HubPlace
from operations.hub.source import Source
from operations.mcp.config import read_servers, unknown_keys
from operations.mcp.kind import KIND as MCP_KIND
from operations.mcp.kind import ListedServer
from operations.pubsub.stores import open_broker_store
from operations.registry.registry import OperationRegistry
from operations.runs import Limits as RunLimits
from operations.runs import Retention, Runs, Schedule
from operations.sources.contract import Opened, Skipped
from operations.sources.modules import KIND as LOCAL_KIND
from operations.sources.modules import ListedModule
from operations.store import Store, StoreError, open_store

logger = logging.getLogger("operations")


def sources_of(file: ConfigFile) -> Iterator[Source]:
    """Yield every source of a config, in the order of opening."""
    config = file.config
    for number, module in enumerate(config.modules):
        yield Source(of=LOCAL_KIND, name=module, entry=ListedModule(module, number))
    for kind in config.kinds:
        for name, entry in config.tables(kind.table).items():
            if entry.is_source:
                yield Source(of=kind, name=name, entry=entry, is_enabled=entry.enabled)
    known = dict.fromkeys(config.tables(MCP_KIND.table), "the config")
    for path in config.mcp_json:
        yield from _listed(path, file, known)


def _listed(path: str, file: ConfigFile, known: dict[str, str]) -> Iterator[Source]:
    """Yield the servers of an `mcp.json`, and add their namespaces to the known ones, with the file."""
    try:
        servers = read_servers(file.existing(path, "mcp_json"))
    except (ConfigError, OSError, ValueError):
        # Opening the source reports the reason.
        yield Source(of=MCP_KIND, name=path, entry=ListedServer(path))
        return
    for name, entry in servers.items():
        try:
            namespace = str(entry.get("namespace") or safe_namespace(name))
        except ValueError:
            # Opening the source reports the reason.
            namespace = f"{path}:{name!a}"
        other = known.get(namespace)
        known.setdefault(namespace, path)
        yield Source(
            of=MCP_KIND,
            # A name of its own, by which it can be found and disabled.
            name=namespace if other is None else f"{path}:{name}",
            entry=ListedServer(path, {**entry, "name": name}, other),
            warnings=tuple(Skipped(key, words) for key, words in unknown_keys(entry).items()),
        )


async def open_source(source: Source, file: ConfigFile) -> Opened:
    """Open a source.

    Raises:
        OperationsError, OSError, ValueError: If it cannot be opened.
    """
    return await source.of.open(source.name, source.entry, HubPlace(file))


def load_setup(file: ConfigFile) -> Any:
    """Import the function that `setup` names.

    Raises:
        ConfigError: If it cannot be imported.
    """
    module, _, name = str(file.config.setup).partition(":")
    with HubPlace(file).importing():
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise file.error(f"cannot be imported: {error}.", "setup") from error
        except Exception as error:
            words = f"cannot be imported: {type(error).__name__}: {error}."
            raise file.error(words, "setup") from error


# ------------------------------------------------------------ access


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


def unused_public_url(file: ConfigFile) -> str:
    """Return why `public_url` does less than an operator expects; empty if it is in order."""
    access = file.config.access
    is_set = bool(file.config.serve.options.get("public_url"))
    if not is_set or access.jwt is not None or access.authorization_servers or file.config.setup:
        return ""
    return "offers no sign-in without [access.jwt]: only its host name is accepted"


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
            from operations.server.signin.tokens import JWTs  # noqa: PLC0415 - needs an extra

            try:
                self.tokens = JWTs(**file.options(JWTConfig, entry))
            except OSError as error:
                raise file.error(f"cannot be read: {error}", "access.jwt.public_key") from error

    def become(self, other: "Access") -> None:
        """Use the callers of a new version of the file."""
        if self.tokens is not None and other.tokens is not None:
            self.tokens.share_keys(other.tokens)
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
    key = file.secret(entry.key)
    try:
        return Grants(key, **options)
    except ValueError as error:
        raise file.error(f"cannot be used: {error}", "access.grants.key") from error


@asynccontextmanager
async def opened_authority(file: ConfigFile) -> AsyncGenerator[Authority]:
    """Yield the authority of a config with an open store.

    Raises:
        ConfigError: If the store cannot be opened.
    """
    async with AsyncExitStack() as stack:
        yield Authority(await _open_store(file, stack))


async def _open_store(file: ConfigFile, stack: AsyncExitStack) -> Store:
    entry = file.config.state
    try:
        if entry.broker is not None:
            connection = connect_broker(file.config.tables("brokers")[entry.broker], HubPlace(file))
            target = await stack.enter_async_context(connection)
            store = await stack.enter_async_context(open_broker_store(target))
        elif entry.url is not None:
            password = None if entry.password is None else file.secret(entry.password)
            opening = open_store(file.store_url(entry.url), password)
            store = await stack.enter_async_context(opening)
        else:
            return Store()
        if entry.key is not None:
            store.seal(*(key.encode() for key in _keys(file, entry.key)))
        try:
            # Report a store that cannot be written, or has another key, before the first call.
            await store.swap("store.opened", None, b"1")
            await store.get("store.opened")
        except StoreError as error:
            # Brokers have been waited for.
            is_postgres = (entry.url or "").partition(":")[0] in ("postgresql", "postgres")
            if not is_postgres or not isinstance(error.__cause__, TransportError):
                raise
            message = "the store of [state] cannot be used now: %s"
            logger.error(message, error.__cause__)  # noqa: TRY400 - no bug
    except (OperationsError, ValueError) as error:
        key = "state.url" if entry.broker is None else "state.broker"
        reason = (isinstance(error, StoreError) and error.__cause__) or error
        raise file.error(f"cannot be used: {reason}", key) from error
    return store


def _keys(file: ConfigFile, given: Secret | Sequence[Secret]) -> list[str]:
    """Return the keys of a store, of which the first one encrypts."""
    return [file.secret(each) for each in ([given] if isinstance(given, Secret) else given)]


def runs_of(
    file: ConfigFile, *, executes: bool = False, grants: Grants | None = None
) -> Runs | None:
    """Return the store of runs of a config; None if it has none.

    Args:
        file: The config.
        executes: Whether this process works on runs.
        grants: Knows which grants were revoked.

    Raises:
        ConfigError: If the store cannot be used.
    """
    entry = file.config.runs
    if entry is None:
        return None
    place = entry if entry.url is not None else file.config.state
    url = file.store_url(place.url or "")
    password = None if place.password is None else file.secret(place.password)
    try:
        schedules = {
            name: Schedule(
                operation=each.operation,
                input=each.input,
                every=each.every,
                cron=each.cron,
                context=_subject(file, each.as_),
            )
            for name, each in entry.schedules.items()
        }
    except ValueError as error:
        raise file.error(f"cannot be used: {error}", "runs.schedules") from error
    limits = RunLimits(
        working=entry.working,
        live_per_caller=entry.live_per_caller,
        live=entry.live,
        steps=entry.steps,
    )
    retention = Retention(
        completed=entry.keep_completed,
        cancelled=entry.keep_completed,
        failed=entry.keep_failed,
        unknown=entry.keep_failed,
        unanswered=entry.keep_unanswered,
    )
    key = file.config.state.key if entry.key is None else entry.key
    try:
        return Runs(
            url,
            password=password,
            key=None if key is None else _keys(file, key),
            limits=limits,
            retention=retention,
            lease=entry.lease,
            grace=entry.grace,
            park=entry.park,
            keep_steps=entry.keep_steps,
            schedules=schedules,
            executes=executes,
            subjects=partial(_known_subject, file),
            grants=grants,
        )
    except (ValueError, ImportError) as error:
        raise file.error(f"cannot be used: {error}", "runs.url") from error


def code_of(file: ConfigFile, registry: OperationRegistry) -> Any:
    """Return `operations.code.Code` for a config, which the registry closes.

    Raises:
        MissingExtraError: If the extra `code` is not installed.
        ConfigError: If a limit is wrong.
    """
    from operations.code import Code  # noqa: PLC0415 - needs an extra

    entry = file.config.code or CodeEntry()
    limits = CodeLimits(**file.options(CodeLimits, entry))
    access = AccessControl(required_scopes=entry.scopes) if entry.scopes else None
    saved = [_saved(file, name, each) for name, each in entry.saved.items()]
    return Code(registry, limits=limits, access=access, checks=entry.checks, saved=saved)


def _saved(file: ConfigFile, name: str, entry: SavedScriptEntry) -> SavedScript:
    key = f"code.saved.{name}"
    try:
        script = Path(file.resolve(entry.file)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise file.error(f"cannot be read: {error}", f"{key}.file") from error
    if digest_of(script) != entry.digest:
        message = "does not match its file, which has changed since it was reviewed: save it again."
        raise file.error(message, f"{key}.digest")
    access = AccessControl(required_scopes=entry.scopes)
    return SavedScript(id=name, script=script, description=entry.description, access=access)


def _subject(file: ConfigFile, name: str | None) -> OperationContext:
    """Return the caller of a schedule."""
    if name is None:
        return OperationContext(trusted=True)
    entry = file.config.access.keys.get(name)
    if entry is None:
        raise file.error(f"there is no caller {name!r} in [access.keys].", "runs.schedules")
    return OperationContext(identity=Identity(name, **file.options(Identity, entry)))


def _known_subject(file: ConfigFile, caller: Identity) -> Identity | None:
    """Return the present identity of the owner of a run.

    A caller of `[access.keys]` has the scopes of today. Callers with a token of another issuer have those of the start.
    """
    if caller.issuer is not None:
        return caller
    entry = file.config.access.keys.get(caller.id)
    return None if entry is None else Identity(caller.id, **file.options(Identity, entry))


def ledgers_of(file: ConfigFile) -> tuple[str, list[tuple[Path, Path | None]]]:
    """Return the key of a config's ledger, and for each process its ledger file and the file with its head.

    Raises:
        ConfigError: If there is no ledger, or its key cannot be read.
    """
    entry = file.config.record.ledger
    if entry is None:
        raise file.error("there is no [record.ledger]: add the table with file and key.")
    return file.secret(entry.key), entry.all_paths(file.resolve)
