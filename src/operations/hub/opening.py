"""Open the parts of a config: modules, sources and brokers, the callers of `[access]`, the authority and the ledger.

Packages that are slow to import or may not be installed are imported when a config needs them.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    redirect_stdout,
)
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from operations.authority import Authority, Grants, Ledger, SQLiteValues, Store, StoreError
from operations.authority.grants import PREFIX
from operations.base.errors import OperationsError
from operations.base.text import safe_namespace
from operations.base.types import JSONObject
from operations.calls import from_calls
from operations.calls.serving.jobs import WorkerConfig
from operations.calls.source.monitoring import monitor_group
from operations.calls.source.remote import RemoteConfig
from operations.config import ConfigError, ConfigFile
from operations.config.model import BrokerEntry, LedgerEntry, MCPEntry, OpenAPIEntry
from operations.contract.access import AccessControl, Identity
from operations.front.config import JWTConfig
from operations.hub.source import ListedServer, Opened, Source, per_source
from operations.mcp.config import MCPClientConfig, read_servers, unknown_keys
from operations.pubsub.base import EventTarget
from operations.pubsub.config import NatsConfig, RedisConfig
from operations.pubsub.stores import open_broker_store
from operations.sources.credentials import CallerToken
from operations.sources.local import Skipped, scan_operations


def sources_of(file: ConfigFile) -> Iterator[Source]:
    """Yield every source of a config, in the order of opening."""
    config = file.config
    for module in config.modules:
        yield Source(kind="local", name=module, entry=module)
    for name, api in config.openapi.items():
        yield Source(kind="openapi", name=name, entry=api, is_enabled=api.enabled)
    for name, server in config.mcp.items():
        yield Source(kind="mcp", name=name, entry=server, is_enabled=server.enabled)
    known = dict.fromkeys(config.mcp, "the config")
    for path in config.mcp_json:
        yield from _listed(path, file, known)
    for name, broker in config.brokers.items():
        if broker.workers:
            yield Source(kind="broker", name=name, entry=broker, is_enabled=broker.enabled)


def _listed(path: str, file: ConfigFile, known: dict[str, str]) -> Iterator[Source]:
    """Yield the servers of an `mcp.json`, and add their namespaces to the known ones, with the file."""
    try:
        servers = read_servers(file.existing(path, "mcp_json"))
    except (ConfigError, OSError, ValueError):
        # Opening the source reports the reason.
        yield Source(kind="mcp", name=path, entry=ListedServer(path))
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
            kind="mcp",
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
    match source.kind:
        case "local":
            return open_modules(source.entry, file)
        case "openapi":
            return await open_service(source.name, source.entry, file)
        case "mcp":
            return await open_server(source.name, source.entry, file)
        case "broker":
            return await open_workers(source.name, source.entry, file)


@contextmanager
def _importing_beside(file: ConfigFile) -> Generator[None]:
    """Make modules in the folder of the config importable by name, as `python -m` does, and print to standard error.

    On standard output, their text would be mixed with results or MCP messages.
    """
    folder = str(file.folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with redirect_stdout(sys.stderr):
        yield


def load_setup(file: ConfigFile) -> Any:
    """Import the function that `setup` names.

    Raises:
        ConfigError: If it cannot be imported.
    """
    module, _, name = str(file.config.setup).partition(":")
    with _importing_beside(file):
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise file.error(f"cannot be imported: {error}.", "setup") from error


def load_tokens(file: ConfigFile, values: Iterable[Any]) -> None:
    """Import the functions that return the tokens of callers, so that a missing function is reported at once.

    Raises:
        ValueError: If one cannot be imported.
    """
    with _importing_beside(file):
        for value in values:
            if isinstance(value, CallerToken):
                value.load()


def open_modules(module: str, file: ConfigFile) -> Opened:
    """Scan a package, a folder or a file.

    Raises:
        ConfigError: If it does not exist.
    """
    path = file.resolve(module)
    with _importing_beside(file):
        try:
            found = scan_operations(path if path.exists() else module)
        except FileNotFoundError as error:
            # The message begins with the name of the module, which is the value of the key.
            at = ("modules", file.config.modules.index(module))
            raise file.error(f"is wrong: {error}.", at) from None
    return Opened(operations=found, origin=module, skipped=list(found.skipped))


async def open_service(name: str, entry: OpenAPIEntry, file: ConfigFile) -> Opened:
    """Read the document of an API and create its operations.

    Raises:
        ConfigError: If the document or a secret cannot be read.
        DocumentError: If the document cannot be read.
    """
    from operations.openapi import from_openapi_file, from_openapi_url  # noqa: PLC0415 - takes long to import

    config = service_config(name, entry, file)
    load_tokens(file, [getattr(config.auth, "token", None), *config.credentials.values()])
    if "://" in entry.document:
        service = await from_openapi_url(entry.document, config)
    else:
        path = file.existing(entry.document, f"openapi.{name}.document")
        service = await from_openapi_file(path, config)
    # In a thread, because both read the whole document.
    problems, unaddressed = await asyncio.to_thread(lambda: (service.problems, service.unaddressed))
    return Opened(
        operations=service,
        close=service.aclose,
        calls=lambda: service.calls,
        limit_calls=None if "concurrency" in entry.options else service.limit_calls,
        origin=entry.document,
        skipped=[Skipped(problem.where, problem.reason) for problem in problems],
        warnings=_unaddressed(name, len(unaddressed), len(service)),
        title=service.title or "",
    )


def _unaddressed(name: str, count: int, total: int) -> list[Skipped]:
    """Return the warning about operations that cannot be called because the document names no server."""
    if not count:
        return []
    which = "its" if count == total else f"{count} of its {total}"
    reason = (
        f"is missing: the document names no server, and {which} operations cannot be called"
        f" without it. Set it in [openapi.{name}]"
    )
    return [Skipped("base_url", reason)]


def _short(entry: OpenAPIEntry | MCPEntry, file: ConfigFile) -> dict[str, Any]:
    """Return the options that a file sets by shorter keys, or by default."""
    short: dict[str, Any] = {"access": AccessControl(entry.scopes)} if entry.scopes else {}
    if "concurrency" not in entry.options:
        short["concurrency"] = per_source(file)
    return short


def service_config(name: str, entry: OpenAPIEntry, file: ConfigFile) -> Any:
    """Return the `HTTPServiceConfig` of the importer, with its secrets.

    Raises:
        ConfigError: If a secret cannot be read.
    """
    from operations.openapi import HTTPServiceConfig  # noqa: PLC0415 - takes long to import

    short: dict[str, Any] = {"namespace": name, **_short(entry, file)}
    if entry.pages:
        short["pagination"] = "document"
    return HTTPServiceConfig(**file.options(HTTPServiceConfig, entry), **short)


async def open_server(name: str, entry: MCPEntry | ListedServer, file: ConfigFile) -> Opened:
    """Connect to a server.

    Raises:
        ConfigError: If a secret or an `mcp.json` cannot be read.
        CallError: `UNAVAILABLE`, if the server cannot be reached.
        ValueError: If an `mcp.json` is wrong.
    """
    from operations.mcp import MCPClient  # noqa: PLC0415 - needs an extra

    if isinstance(entry, ListedServer):
        title, listed = _read_listed(entry, file)
        is_set = listed.get("concurrency") is not None
        options: dict[str, Any] = {} if is_set else {"concurrency": per_source(file)}
        config = MCPClientConfig.from_entry(listed, **options)
        origin = entry.path
    else:
        title, config = name, client_config(name, entry, file)
        load_tokens(file, [config.auth])
        is_set = "concurrency" in entry.options
        origin = config.target
    client = MCPClient(title, config)
    await client.open()
    info = client.server_info
    return Opened(
        operations=client,
        close=client.aclose,
        calls=lambda: client.calls,
        limit_calls=None if is_set else client.limit_calls,
        origin=origin,
        skipped=[Skipped(what, reason) for what, reason in client.skipped.items()],
        title=info.title or info.name if info is not None else "",
        problem=lambda: client.problem,
        next_attempt=lambda: client.next_attempt,
    )


def _read_listed(server: ListedServer, file: ConfigFile) -> tuple[str, JSONObject]:
    """Return the name and the entry of a server in an `mcp.json`; paths are relative to that file."""
    listing = file.existing(server.path, "mcp_json")
    if server.entry is None:
        read_servers(listing)
        raise ValueError(f"{server.path} cannot be read")
    entry = dict(server.entry)
    name = entry.pop("name")
    if server.other is not None:
        raise ValueError(
            f"{server.other} already has the server {name!r}. Remove it from {server.path}, or set `namespace` there"
        )
    cwd = entry.get("cwd")
    if "command" in entry and (cwd is None or isinstance(cwd, str)):
        entry["cwd"] = str(listing.parent / (cwd or ""))
    return name, entry


def client_config(name: str, entry: MCPEntry, file: ConfigFile) -> MCPClientConfig:
    """Return the config of the client, with its secrets.

    Raises:
        ConfigError: If a secret cannot be read.
    """
    short = _short(entry, file)
    if "cwd" not in entry.options:
        short["cwd"] = file.folder
    if entry.token is not None:
        short["auth"] = file.secret(entry.token)
    revealed: list[str] = []
    options = file.options(MCPClientConfig, entry, revealed) | short
    options["secrets"] = [*options.get("secrets", ()), *revealed]
    config = MCPClientConfig(**options)
    if config.login is None:
        return config
    from operations.mcp.source.oauth import token_path  # noqa: PLC0415 - needs an extra

    # Two tables may hold the logins of two people for one server.
    store = token_path(config, config.login, name)
    return replace(config, login=replace(config.login, store=store))


async def open_workers(name: str, entry: BrokerEntry, file: ConfigFile) -> Opened:
    """Import the operations of the workers of a group.

    Raises:
        ConfigError: If a secret cannot be read.
        TransportError: If the broker cannot be reached.
        CallError: `UNAVAILABLE`, if no worker responds.
    """
    stack = AsyncExitStack()
    try:
        target = await stack.enter_async_context(connect_broker(entry, file))
        options: dict[str, Any] = {"concurrent_calls": per_source(file)}
        options |= file.options(RemoteConfig, entry)
        grants = file.config.access.grants
        group = worker_config(entry, file).group
        if entry.delegate and grants is not None:
            key, namespace = file.secret(grants.key), options.get("namespace")
            options["delegate"] = Grants(key).delegate(group, namespace=namespace)
        service = from_calls(target, **options)
        monitor = await stack.enter_async_context(monitor_group(target, group))
        await stack.enter_async_context(service)
    except BaseException:
        await stack.aclose()
        raise
    warnings: list[Skipped] = []
    if "credential" not in options and not any(True for _ in service):
        reason = f"is not set, and group {group} has no operation that needs none"
        warnings.append(Skipped("credential", reason))
    return Opened(
        operations=service,
        warnings=warnings,
        problem=lambda: service.problem,
        close=stack.aclose,
        calls=lambda: service.calls.pending_count,
        limit_calls=None if "concurrent_calls" in entry.options else service.limit_calls,
        origin=entry.url,
        title=f"group {group}",
        monitor=monitor,
    )


def connect_broker(
    entry: BrokerEntry, file: ConfigFile
) -> AbstractAsyncContextManager[EventTarget]:
    """Connect to the broker of an entry for the duration of an `async with` block.

    Raises:
        ConfigError: If its password cannot be read.
        TransportError: If it cannot be reached.
    """
    if entry.is_nats:
        from operations.pubsub.nats import connect_nats  # noqa: PLC0415 - needs an extra

        return connect_nats(entry.url, **file.options(NatsConfig, entry))
    from operations.pubsub.redis import connect_redis  # noqa: PLC0415 - needs an extra

    return connect_redis(entry.url, **file.options(RedisConfig, entry))


def worker_config(entry: BrokerEntry, file: ConfigFile) -> WorkerConfig:
    """Return the options of a worker on a broker."""
    return WorkerConfig(**file.options(WorkerConfig, entry))


# ------------------------------------------------------------ access

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
            key, strict, sync = file.secret(entry.key), entry.strict, entry.sync
            try:
                ledger = Ledger(path, key, head=head, strict=strict, sync=sync)
            except ValueError as error:
                raise file.error(f"cannot be used: {error}", "ledger.key") from error
            stack.callback(ledger.close)
        yield Authority(store, ledger=ledger)


async def _open_store(file: ConfigFile, stack: AsyncExitStack) -> Store:
    entry = file.config.authority
    try:
        if entry.broker is not None:
            connection = connect_broker(file.config.brokers[entry.broker], file)
            target = await stack.enter_async_context(connection)
            store = await stack.enter_async_context(open_broker_store(target))
            store.is_connected = lambda: target.is_connected
        elif entry.file is not None:
            store = Store(SQLiteValues(file.resolve(entry.file)))
        else:
            return Store()
        # Report a store that cannot be written before the first call.
        await store.swap("store.opened", None, b"1")
    except OperationsError as error:
        key = "authority.file" if entry.broker is None else "authority.broker"
        reason = (isinstance(error, StoreError) and error.__cause__) or error
        raise file.error(f"cannot be used: {reason}", key) from error
    return store


def ledgers_of(file: ConfigFile) -> tuple[str, list[tuple[Path, Path | None]]]:
    """Return the key of a config's ledger, and for each process its ledger file and the file with its head.

    Raises:
        ConfigError: If there is no ledger, or its key cannot be read.
    """
    entry = file.config.ledger
    if entry is None:
        raise file.error("there is no [ledger]: add the table with file and key.")
    # A head without its file shows that the file was removed.
    found = [_processes(file.resolve(each)) for each in (entry.file, entry.head) if each]
    processes = sorted(set[str]().union(*found)) if _PROCESS in entry.file else [""]
    return file.secret(entry.key), [_place(file, entry, each) for each in processes]


def _processes(path: Path) -> set[str]:
    """Return the ids of the processes that have such a file."""
    start, is_many, end = path.name.partition(_PROCESS)
    names = (each.name for each in path.parent.glob(f"{start}*{end}")) if is_many else ()
    return {each.removeprefix(start).removesuffix(end) for each in names}


def _place(file: ConfigFile, entry: LedgerEntry, process: str) -> tuple[Path, Path | None]:
    head = None if entry.head is None else file.resolve(entry.head.replace(_PROCESS, process))
    return file.resolve(entry.file.replace(_PROCESS, process)), head
