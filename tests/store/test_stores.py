"""Every store: values under keys, changed by compare-and-set, seen by all who opened it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from tests.limits import time_limit
from tests.servers import Broker, NatsServer, PostgresServer, RedisServer
from tests.servers import running as broker_running

from operations import CallError, ErrorCode, OperationContext
from operations.authority.approvals import Approvals
from operations.store import Store, StoreError, open_store

SHARED = ["sqlite", "redis", "nats", "postgresql"]


@asynccontextmanager
async def address(kind: str, folder: Path) -> AsyncGenerator[str]:
    """Yield the address of a store, with its server."""
    if kind == "sqlite":
        yield f"sqlite:{folder / 'state.db'}"
        return
    servers: dict[str, Callable[[], Broker]] = {
        "redis": RedisServer,
        "nats": lambda: NatsServer("-js", "-sd", str(folder)),
        "postgresql": PostgresServer,
    }
    with broker_running(servers[kind]()) as server:
        yield server.url


KEY = b"a key of at least thirty-two bytes"


@pytest.fixture(params=["memory", *SHARED, "sealed"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[list[Store]]:
    """Two openings of one store."""
    if request.param == "memory":
        yield [Store()] * 2
        return
    if request.param == "sealed":
        url = f"sqlite:{tmp_path / 'state.db'}"
        async with open_store(url) as one, open_store(url) as other:
            for store in (one, other):
                store.seal(KEY)
            yield [one, other]
        return
    async with (
        address(request.param, tmp_path) as url,
        open_store(url) as one,
        open_store(url) as other,
    ):
        yield [one, other]


async def test_values_change_by_compare_and_set(stores: list[Store]) -> None:
    one, other = stores

    assert await one.get("a.x") is None
    assert await one.items("a") == {}
    assert await one.swap("a.x", None, b"1:2")
    assert not await other.swap("a.x", None, b"2")
    assert await other.get("a.x") == b"1:2"
    assert await other.swap("a.x", b"1:2", b"\x00\xff")
    assert not await one.swap("a.x", b"1:2", b"4")
    assert await one.swap("a.y", None, b"5")
    assert await one.swap("ab.x", None, b"6")
    assert await one.items("a") == {"a.x": b"\x00\xff", "a.y": b"5"}
    assert not await one.swap("a.x", b"1:2", None)
    assert not await one.swap("a.never", b"1", b"2")
    assert await one.swap("a.x", b"\x00\xff", None)
    assert await other.get("a.x") is None
    assert await other.items("a") == {"a.y": b"5"}
    assert await other.swap("a.x", None, b"7")


async def test_a_sealed_store_shows_nothing_and_opens_with_its_key_only(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with open_store(f"sqlite:{file}") as sealed, open_store(f"sqlite:{file}") as plain:
        sealed.seal(KEY)
        assert await sealed.swap("a.x", None, b"SECRET")
        stored = await plain.get("a.x")
        assert stored is not None
        assert await plain.swap("a.y", None, stored)
        assert await plain.swap("a.z", None, b"not encrypted")

        assert b"SECRET" not in file.read_bytes()
        assert await sealed.get("a.x") == b"SECRET"
        for moved in ("a.y", "a.z"):
            with pytest.raises(StoreError):
                await sealed.get(moved)
        with pytest.raises(ValueError, match="at least 32 bytes"):
            plain.seal(b"short")
        plain.seal(bytes(32))
        with pytest.raises(StoreError):
            await plain.get("a.x")


async def test_concurrent_changes_are_all_kept(stores: list[Store]) -> None:
    async def count(store: Store) -> None:
        for _ in range(20):
            await store.change("a.sum", lambda held: str(int(held or b"0") + 1).encode())

    async with anyio.create_task_group() as tasks:
        for store in stores * 3:
            tasks.start_soon(count, store)

    assert await stores[0].get("a.sum") == b"120"


async def test_a_change_is_announced_or_found_by_polling(stores: list[Store]) -> None:
    one, other = stores
    changed = other.changed
    await one.announce()

    if 0 < other.poll_seconds < 1:
        # Files announce nothing to other openings; who waits reads again.
        return
    with time_limit(20):
        await changed.wait()


async def test_unknown_approvals_are_errors_and_no_keys(stores: list[Store]) -> None:
    for unknown in ("", "-", "*", "no id", "a/b", "ü\n"):
        with pytest.raises(CallError, match="There is no approval") as caught:
            await Approvals(stores[0]).answer(unknown, True, OperationContext(trusted=True))
        assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_store_that_has_gone_is_an_error_and_not_empty(tmp_path: Path) -> None:
    async with open_store(f"sqlite:{tmp_path / 'state.db'}") as store:
        assert await store.swap("a.x", None, b"1")
        (tmp_path / "state.db").unlink()

        with pytest.raises(StoreError):
            await store.get("a.x")
        assert not await store.check()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:", "must name a file"),
        ("slqite:a.db", "there is no store 'slqite'; known: sqlite, redis,"),
        ("a.db", "there is no store 'a.db'"),
    ],
)
async def test_wrong_addresses_say_what_is_known(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async with open_store(url):
            pass


async def test_the_key_of_a_store_is_replaced_while_it_is_used(tmp_path: Path) -> None:
    new, file = bytes(range(32)), tmp_path / "state.db"
    async with (
        open_store(f"sqlite:{file}") as old,
        open_store(f"sqlite:{file}") as both,
        open_store(f"sqlite:{file}") as last,
    ):
        old.seal(KEY)
        both.seal(new, KEY)
        last.seal(new)
        assert await old.swap("a.x", None, b"1")
        assert await old.swap("a.y", None, b"1")
        assert not await both.swap("a.x", None, b"2")
        assert not await both.swap("a.x", b"2", b"3")
        assert await both.swap("a.x", b"1", b"2")
        assert await both.swap("a.x", b"2", b"3")
        assert await both.items("a") == {"a.x": b"3", "a.y": b"1"}
        assert await last.get("a.x") == b"3"
        with pytest.raises(StoreError) as caught:
            await last.get("a.y")
        assert "a.y was stored with another key" in str(caught.value.__cause__)
