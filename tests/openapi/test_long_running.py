"""Operations that an API goes on with after its response, which are runs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.mcp_serving.support import serving

from operations import CallError, OperationRegistry
from operations.openapi import HTTPAuth, HTTPServiceConfig, from_openapi
from operations.runs import Runs

SECRET = "secret-token-7"


class API:
    """An API whose jobs end after some requests for their state."""

    def __init__(self) -> None:
        self.begun = 0
        self.asked: list[tuple[str, str | None]] = []
        self.gate = asyncio.Event()
        self.working = 2
        """How many requests for a state find the job at work."""
        self.elsewhere = ""
        self.app = Starlette(
            routes=[
                Route("/v1/{kind}", self.begin, methods=["POST"]),
                Route("/v1/operations/{kind}", self.state),
                Route("/v1/results/{kind}", self.result),
            ]
        )

    def _note(self, request: Request) -> None:
        self.asked.append((request.url.path, request.headers.get("authorization")))

    async def begin(self, request: Request) -> Response:
        self.begun += 1
        kind = request.path_params["kind"]
        path = f"{self.elsewhere}/v1/operations/{kind}"
        match kind:
            case "location":
                return Response(status_code=202, headers={"location": path, "retry-after": "0"})
            case "state" | "failing" | "waiting":
                headers = {"operation-location": path, "location": "/v1/results/state"}
                return JSONResponse({}, 202, headers)
            case "google":
                return JSONResponse({"name": "operations/google", "metadata": {}})
            case _:
                return JSONResponse({"at": "once"})

    async def state(self, request: Request) -> Response:
        self._note(request)
        kind = request.path_params["kind"]
        if kind == "waiting":
            await self.gate.wait()
        self.working -= 1
        is_working = self.working >= 0
        match kind:
            case "location" if is_working:
                return Response(status_code=202)
            case "location":
                return Response(status_code=303, headers={"location": "/v1/results/location"})
            case "google":
                return JSONResponse(
                    {"name": "operations/google"}
                    | ({} if is_working else {"done": True, "response": {"of": "google"}})
                )
            case "failing" if not is_working:
                error = {"code": "Full", "message": "the disk is full"}
                return JSONResponse({"status": "Failed", "error": error})
            case _:
                return JSONResponse({"status": "Running" if is_working else "Succeeded"})

    async def result(self, request: Request) -> Response:
        self._note(request)
        return JSONResponse({"of": request.path_params["kind"]})


def document(*kinds: str, **more: Any) -> dict[str, Any]:
    responses = {"202": {"description": "accepted"}, "200": {"description": "ok"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jobs", "version": "1"},
        "paths": {
            f"/v1/{kind}": {"post": {"operationId": kind, "responses": responses, **more}}
            for kind in kinds
        },
    }


@pytest.fixture
def api() -> API:
    return API()


@asynccontextmanager
async def opened(url: str, folder: Path, doc: Any, **config: Any) -> AsyncGenerator[Any]:
    """Yield a registry with a store of runs."""
    runs = Runs(f"sqlite:{folder / 'runs.db'}", grace=0.0)
    config = {"long_running": ["*"], **config}
    settings = HTTPServiceConfig(
        namespace="jobs", base_url=url, auth=HTTPAuth(type="bearer", token=SECRET), **config
    )
    async with OperationRegistry(runs=runs) as registry:
        registry.register_all(from_openapi(doc, settings))
        yield registry


async def outcome(registry: OperationRegistry, name: str) -> Any:
    run = await registry.start(f"jobs.{name}", {})
    async with asyncio.timeout(20):
        return (await run.result()).data


@pytest.mark.requirement("R77")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("location", {"of": "location"}),
        ("state", {"of": "state"}),
        ("google", {"of": "google"}),
        ("once", {"at": "once"}),
    ],
)
async def test_the_result_of_a_run_is_that_of_the_operation(
    api: API, tmp_path: Path, kind: str, expected: Any
) -> None:
    async with serving(api.app) as url, opened(url, tmp_path, document(kind)) as registry:
        assert await outcome(registry, kind) == expected

    assert api.begun == 1
    assert {secret for _, secret in api.asked} <= {f"Bearer {SECRET}"}
    assert len(api.asked) >= (0 if kind == "once" else 3)


async def test_an_operation_that_fails_is_an_error_with_its_message(
    api: API, tmp_path: Path
) -> None:
    async with serving(api.app) as url, opened(url, tmp_path, document("failing")) as registry:
        with pytest.raises(CallError, match="the disk is full"):
            await outcome(registry, "failing")


@pytest.mark.requirement("R77")
async def test_a_run_that_continues_asks_for_the_result_and_does_not_repeat_the_request(
    api: API, tmp_path: Path
) -> None:
    doc = document("waiting")
    async with serving(api.app) as url:
        async with opened(url, tmp_path, doc) as registry:
            run = await registry.start("jobs.waiting", {})
            async with asyncio.timeout(20):
                while not api.asked:
                    await asyncio.sleep(0.01)
        api.gate.set()
        async with opened(url, tmp_path, doc) as registry, asyncio.timeout(20):
            again = await registry.run(run.id)
            data = (await again.result()).data

    assert data == {"of": "state"}
    assert api.begun == 1
    assert SECRET.encode() not in (tmp_path / "runs.db").read_bytes()


@pytest.mark.requirement("R77")
async def test_an_address_of_another_origin_must_be_allowed(api: API, tmp_path: Path) -> None:
    other = API()
    async with serving(api.app) as url, serving(other.app) as elsewhere:
        api.elsewhere = elsewhere
        async with opened(url, tmp_path, document("location")) as registry:
            with pytest.raises(CallError, match="not a public address"):
                await outcome(registry, "location")

    assert api.begun == 1
    assert other.asked == []


@pytest.mark.requirement("R77")
async def test_an_address_of_another_origin_gets_no_credentials(api: API, tmp_path: Path) -> None:
    other = API()
    async with serving(api.app) as url, serving(other.app) as elsewhere:
        api.elsewhere = elsewhere
        config = {"allowed_hosts": (elsewhere,), "headers": {"X-Key": "another-secret"}}
        async with opened(url, tmp_path, document("location"), **config) as registry:
            assert await outcome(registry, "location") == {"of": "location"}

    assert {secret for _, secret in other.asked} == {None}


async def test_the_document_marks_operations(api: API, tmp_path: Path) -> None:
    marked = document("state", **{"x-ms-long-running-operation": True})
    async with serving(api.app) as url:
        async with opened(url, tmp_path, marked, long_running=None) as registry:
            assert registry.get("jobs.state").durable is True
            assert (await registry.execute("jobs.state", {})).data == {"of": "state"}
        async with opened(url, tmp_path, document("state"), long_running=None) as registry:
            assert not registry.get("jobs.state").durable


async def test_without_a_store_the_first_response_is_the_result(api: API) -> None:
    config = {"namespace": "jobs", "long_running": ["*"]}
    async with serving(api.app) as url, OperationRegistry() as registry:
        registry.register_all(from_openapi(document("state"), {**config, "base_url": url}))
        envelope = await registry.execute("jobs.state", {})

    assert envelope.meta.status_code == 202  # type: ignore[union-attr]
    assert api.asked == []
