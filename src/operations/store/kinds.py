"""Which stores there are: those of the library, and those of installed packages, by the scheme of their address.

A package registers a function as an entry point of the group `operations.stores`, under its scheme:

    @asynccontextmanager
    async def open_acme(url: str, password: str | None = None) -> AsyncGenerator[Store]:
        async with AcmeClient(url, password) as client:
            yield Store(AcmeValues(client))     # AcmeValues implements `Values`

Rule: a kind is imported when an address has its scheme, so an installed package cannot add itself.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias, cast

from operations.base.plugins import registered
from operations.base.text import suggestion
from operations.store.state import Store

OpenStore: TypeAlias = Callable[[str, str | None], AbstractAsyncContextManager[Store]]
"""Opens a store, given its address and the password."""

GROUP = "operations.stores"
"""The group of the entry points by which packages register stores."""

BUILT_IN = {
    "sqlite": "operations.store.sqlite:open_sqlite",
    "redis": "operations.pubsub.stores:open_redis",
    "rediss": "operations.pubsub.stores:open_redis",
    "redis+sentinel": "operations.pubsub.stores:open_redis",
    "redis+cluster": "operations.pubsub.stores:open_redis",
    "postgresql": "operations.postgres.store:open_postgres",
    "postgres": "operations.postgres.store:open_postgres",
    "nats": "operations.pubsub.stores:open_nats",
    "tls": "operations.pubsub.stores:open_nats",
}
"""Our own stores, by scheme."""


def open_store(url: str, password: str | None = None) -> AbstractAsyncContextManager[Store]:
    """Open a store for the duration of an `async with` block.

    Args:
        url: `sqlite:PATH` for the processes of one machine; `postgresql://...`, `redis://...` or `nats://...` (with
            JetStream) for several hubs; or an address whose scheme an installed package registers.
        password: The password, unless it is in the address.

    Raises:
        ValueError: If there is no store with this scheme, or its package cannot be imported.
        StoreError: If the store cannot be used.
        TransportError: If the server cannot be reached.
    """
    return _kind_of(url.partition(":")[0])(url, password)


def _kind_of(scheme: str) -> OpenStore:
    found = registered(scheme, BUILT_IN, GROUP)
    if found is None:
        near = suggestion(scheme, BUILT_IN)
        raise ValueError(f"there is no store {scheme!r}; known: {', '.join(BUILT_IN)}.{near}")
    return cast("OpenStore", found)
