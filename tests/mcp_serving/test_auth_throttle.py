"""Identifying a caller has a time limit and slots, and ends with its client; see `tests/server` for HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from starlette.requests import Request
from tests.limits import time_limit
from tests.mcp_serving.support import example, serving
from tests.mcp_serving.test_http import post

from operations import Identity
from operations.mcp import to_mcp

ADD = post("tools/call", {"name": "math__add", "arguments": {"a": 1}})


class Directory:
    """Never returns an identity."""

    def __init__(self) -> None:
        self.inside = self.most = self.lookups = 0
        self.release = asyncio.Event()

    async def __call__(self, request: Request) -> Identity | None:
        self.lookups += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.release.wait()
        finally:
            self.inside -= 1
        return Identity("ann")

    async def until(self, is_so: Callable[["Directory"], bool]) -> None:
        with time_limit(40):
            while not is_so(self):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def http(**settings: Any) -> AsyncGenerator[httpx2.AsyncClient]:
    app = to_mcp(example(), **settings).asgi_app()
    limits = httpx2.Limits(max_connections=None)
    with time_limit(60):
        async with (
            serving(app) as address,
            httpx2.AsyncClient(base_url=address, limits=limits, timeout=50) as client,
        ):
            yield client


@pytest.mark.requirement("R12")
async def test_a_resolver_that_hangs_is_cancelled_and_the_request_rejected() -> None:
    directory = Directory()
    async with http(identify=directory, timeout=0.2) as client:
        response = await client.post("/mcp", **ADD)

    assert (response.status_code, directory.lookups, directory.inside) == (504, 1, 0)


@pytest.mark.requirement("R12")
async def test_a_resolver_that_ignores_cancellation_blocks_no_caller() -> None:
    release, ended = asyncio.Event(), asyncio.Event()

    async def stubborn(request: Request) -> Identity | None:
        if "x-api-key" not in request.headers:
            return None
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        return Identity("ann")

    async with http(identify=stubborn, timeout=1.5) as client:
        late = await client.post("/mcp", json={}, headers={"x-api-key": "ann"})
        assert (late.status_code, ended.is_set()) == (504, False)
        release.set()
        await ended.wait()
        # Over the same connection: an identity that was resolved too late does not affect later requests.
        assert (await client.post("/mcp", **ADD)).status_code == 200


@pytest.mark.requirement("R13", "R31")
async def test_many_credentials_are_not_all_checked_at_the_same_time() -> None:
    directory = Directory()
    async with http(identify=directory) as client, anyio.create_task_group() as crowd:
        answers: list[int] = []

        async def guess(number: int) -> None:
            response = await client.post("/mcp", json={}, headers={"x-api-key": f"guess {number}"})
            answers.append(response.status_code)

        for number in range(260):
            crowd.start_soon(guess, number)
        await directory.until(lambda _: len(answers) == 10)
        assert (directory.inside, answers) == (250, [429] * 10)
        directory.release.set()


@pytest.mark.requirement("R31")
async def test_callers_without_credential_have_slots_as_well() -> None:
    directory = Directory()
    async with http(identify=directory) as client, anyio.create_task_group() as crowd:
        answers: list[int] = []

        async def come() -> None:
            answers.append((await client.post("/mcp", json={})).status_code)

        for _ in range(260):
            crowd.start_soon(come)
        await directory.until(lambda _: len(answers) == 10)
        assert (directory.most, answers) == (250, [429] * 10)
        directory.release.set()


@pytest.mark.requirement("R12")
async def test_identification_ends_when_the_client_disconnects() -> None:
    directory = Directory()
    async with http(identify=directory) as client:
        port = client.base_url.port
        writers: list[asyncio.StreamWriter] = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            writers.append(writer)
        await directory.until(lambda it: it.inside == 20)
        for writer in writers:
            writer.close()
        await directory.until(lambda it: it.inside == 0)
        directory.release.set()
        # Their slots are free again, and they left no tasks.
        assert (await client.post("/mcp", **ADD)).status_code == 200


async def test_a_body_that_arrives_during_identification_is_read() -> None:
    async def slow(request: Request) -> Identity | None:
        # Longer than the interval after which the server checks whether the client is connected.
        await asyncio.sleep(0.2)
        return Identity("ann")

    text = "x" * 300_000
    async with http(identify=slow) as client:
        for options in (ADD, post("tools/call", {"name": "task__get", "arguments": {"id": text}})):
            response = await client.post("/mcp", **options)
            assert response.status_code == 200, response.text
    assert response.json()["result"]["structuredContent"] == {"id": text}


async def test_a_result_that_is_not_an_identity_is_a_rejection() -> None:
    async with http(identify=lambda request: "ann") as client:
        assert (await client.post("/mcp", **ADD)).status_code == 401
