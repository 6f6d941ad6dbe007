"""A store of runs in a file, and registries on it."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.servers import PostgresServer, running

from operations import OperationRegistry
from operations.runs import Runs

OpenRegistry = Callable[..., OperationRegistry]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server."""
    server = PostgresServer("fsync=off")
    with running(server):
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new store."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'runs.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_schema()


@pytest.fixture
async def registries(url: str) -> AsyncGenerator[OpenRegistry]:
    """Return a function that creates a registry with a store of runs, which is closed after the test."""
    async with AsyncExitStack() as stack:

        def create(*operations: Any, **options: Any) -> OperationRegistry:
            sink, authority = options.pop("sink", None), options.pop("authority", None)
            # A busy machine may be late to renew a short lease.
            runs = Runs(options.pop("url", url), **{"lease": 60.0, "grace": 0.0, **options})
            registry = OperationRegistry(operations, runs=runs, authority=authority)
            if sink is not None:
                registry.record(sink)
            stack.push_async_callback(registry.aclose)
            return registry

        yield create
