"""Workers behind brokers as a kind of source: the table `[brokers.NAME]`, and how its connection is opened."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from operations.calls.serving.jobs import WorkerConfig
from operations.calls.source.monitoring import monitor_group
from operations.calls.source.remote import RemoteConfig, from_calls
from operations.contract.options import Derived, KeyPath, keys_of
from operations.contract.specs import NAMESPACE
from operations.pubsub.base import EventTarget
from operations.pubsub.config import NatsConfig, RedisConfig
from operations.sources import checks
from operations.sources.contract import Guess, Opened, Place, Skipped, SourceEntry

NATS_SCHEMES = ("nats", "tls", "ws", "wss")
REDIS_SCHEMES = (
    *("redis", "redis+sentinel", "redis+cluster"),
    *("rediss", "rediss+sentinel", "rediss+cluster"),
)

_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")
"""Matches a password in any address of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEntry(SourceEntry):
    """A broker between callers and workers: its connection, the import of workers' operations, and worker settings.

    Attributes:
        url: `redis://`, `nats://` or one of their variants; it may contain the user, but not the password.
        workers: Import the operations of the workers of `group`.
        delegate: Call the workers on behalf of the caller, with a grant for each call; needs `access.grants`. The
            command `operations grant key GROUP` prints the key for the workers.
        enabled: Set to false to skip this source.
    """

    advanced: ClassVar = frozenset(
        [
            "max_values",
            "connect_timeout",
            "cert_file",
            "key_file",
            "max_bytes",
            "max_backlog",
            "clients",
            "replicas",
            "user_credentials",
            "nkey_file",
            "input",
            "exclude",
            "send_identity",
            "idle_timeout",
            "concurrent_calls",
            "name",
            "max_waiting",
            "per_principal",
            "heartbeat",
            "silence",
            "patience",
            "grace",
            "expose_errors",
            "access",
        ]
    )
    derived: ClassVar = Derived(
        lambda: (RedisConfig, NatsConfig, RemoteConfig, WorkerConfig),
        {
            "url": "a key of its own",
            "address": "of each connection",
            "limits": "the table [limits]",
            "delegate": "a key of its own",
        },
    )

    url: str
    workers: bool = False
    delegate: bool = False

    @property
    def is_source(self) -> bool:
        """Whether the operations of its workers are imported."""
        return self.workers

    @property
    def delegates(self) -> str | None:
        """The key by which calls carry grants, if it is set."""
        return "delegate" if self.delegate else None

    @property
    def is_nats(self) -> bool:
        """Whether the address is that of a NATS server."""
        return self.url.partition("://")[0].lower() in NATS_SCHEMES

    def classes(self) -> tuple[Any, ...]:
        """Return the classes that this table is converted to, which depend on the kind of broker."""
        redis, nats, *others = self.derived.load()
        return (nats if self.is_nats else redis, *others)


class BrokerKind:
    """Groups of workers behind Redis and NATS servers."""

    name = "broker"
    table = "brokers"
    about = "Redis and NATS servers, by name."
    entry = BrokerEntry
    owns_namespace = False
    is_late = True

    def check(
        self, entry: BrokerEntry, path: KeyPath, folder: Path
    ) -> Iterator[tuple[KeyPath, str]]:
        """Check the address, and that all keys are those of its kind of server."""
        parts, options = checks.split(entry.url), entry.options
        if parts.scheme not in (*REDIS_SCHEMES, *NATS_SCHEMES) or not parts.hostname:
            yield (
                (*path, "url"),
                "must be an address such as redis://host:6379 or nats://host:4222.",
            )
        elif parts.password or _PASSWORD.search(entry.url):
            yield (*path, "url"), 'contains a password: move it to password = { env = "NAME" }.'
        known = {key for cls in entry.classes() for key in keys_of(cls)}
        for key in options.keys() - known:
            yield (*path, key), f"can be used only with {'Redis' if entry.is_nats else 'NATS'}."
        if "client" in options and not NAMESPACE.fullmatch(options["client"]):
            yield (*path, "client"), "must be one word of letters, digits, '_' and '-'."
        if "namespace" in options:
            yield from checks.namespace(options["namespace"], (*path, "namespace"))

    def guess(self, words: Sequence[str], *, is_certain: bool) -> Guess | None:
        """Take the address of a server."""
        first = words[0]
        if not is_certain and urlsplit(first).scheme not in (*REDIS_SCHEMES, "nats"):
            return None
        return Guess(name=checks.name_of(first), keys={"url": first, "workers": True})

    async def open(self, name: str, entry: BrokerEntry, place: Place) -> Opened:
        """Import the operations of the workers of a group.

        Raises:
            ValueError: If a secret cannot be read.
            TransportError: If the broker cannot be reached.
            CallError: `UNAVAILABLE`, if no worker responds.
        """
        stack = AsyncExitStack()
        try:
            target = await stack.enter_async_context(connect_broker(entry, place))
            options: dict[str, Any] = {"concurrent_calls": place.calls}
            options |= place.options(RemoteConfig, entry)
            group = worker_config(entry, place).group
            if entry.delegate:
                options["delegate"] = place.delegate(group, options.get("namespace"))
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


def connect_broker(entry: BrokerEntry, place: Place) -> AbstractAsyncContextManager[EventTarget]:
    """Connect to the broker of an entry for the duration of an `async with` block.

    Raises:
        ValueError: If its password cannot be read.
        TransportError: If it cannot be reached.
    """
    if entry.is_nats:
        from operations.pubsub.nats import connect_nats  # noqa: PLC0415 - needs an extra

        return connect_nats(entry.url, **place.options(NatsConfig, entry))
    from operations.pubsub.redis import connect_redis  # noqa: PLC0415 - needs an extra

    return connect_redis(entry.url, **place.options(RedisConfig, entry))


def worker_config(entry: BrokerEntry, place: Place) -> WorkerConfig:
    """Return the options of a worker on a broker."""
    return WorkerConfig(**place.options(WorkerConfig, entry))


KIND = BrokerKind()
