"""Runs over HTTP. Letters are those of the scenarios in `docs/runs.md`."""

import asyncio
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import validate
from tests.limits import time_limit
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import Effects, durable
from tests.server.asgi import Client, Response

from operations import Identity, OperationContext, OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi, to_openapi
from operations.server import APIKeys, create_app, hash_key

ADA, BEN = {"authorization": "Bearer ada"}, {"authorization": "Bearer ben"}
ASYNC = {"prefer": "respond-async"}


@pytest.fixture
async def effects() -> Effects:
    return Effects()


@pytest.fixture
async def client(registries: OpenRegistry, effects: Effects) -> Client:
    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.slow, 1))

    async def ask(context: OperationContext) -> Any:
        schema = {"type": "object", "properties": {}}
        answer = await context.elicit("Sure?", schema)
        return [answer["action"], await context.wait_for("go")]

    async def broken(context: OperationContext) -> None:
        raise ZeroDivisionError("CANARY")

    from operations import operation  # noqa: PLC0415 - only here

    registry = registries(
        durable(order),
        operation("shop.ask", durable=True, scopes=["shop"])(ask),
        operation("shop.broken", scopes=["shop"])(broken),
        effects.slow,
        effects.charge,
        effects.price,
        effects.fail,
    )
    keys = APIKeys({hash_key(name): Identity(name, ["shop"]) for name in ("ada", "ben")})
    return Client(create_app(registry, identity=keys))


async def final(client: Client, run_id: str) -> Any:
    with time_limit(10):
        while True:
            response = await client.get(f"/runs/{run_id}", headers={**ADA, "prefer": "wait=5"})
            assert response.status == 200
            if response.json["status"] in ("completed", "failed", "cancelled", "unknown"):
                return response.json


async def started(client: Client, path: str, body: Any = ..., **headers: str) -> Response:
    response = await client.post(
        path, {} if body is ... else body, headers={**ADA, **ASYNC, **headers}
    )
    assert response.status == 202, response.json
    return response


async def test_a_call_that_responds_later_is_a_run(client: Client, effects: Effects) -> None:
    response = await started(client, "/shop/slow", {"amount": 3})
    run_id = response.json["id"]
    live = await client.get(f"/runs/{run_id}/result", headers=ADA)
    effects.released.set()
    state = await final(client, run_id)
    result = await client.get(f"/runs/{run_id}/result", headers=ADA)
    listed = await client.get("/runs?status=completed&operation=shop.slow&limit=5", headers=ADA)

    assert response.headers["location"] == f"/runs/{run_id}"
    assert response.headers["retry-after"] == "1"
    assert response.headers["preference-applied"] == "respond-async"
    assert response.json["operation"] == "shop.slow"
    assert (live.status, live.headers["retry-after"]) == (202, "1")
    assert (state["status"], state["result"]["data"]) == ("completed", 3)
    assert (result.status, result.json) == (200, 3)
    assert [each["id"] for each in listed.json["runs"]] == [run_id]
    assert "revision" not in state


async def test_a_call_that_ends_within_its_wait_is_answered_as_any_other(client: Client) -> None:
    response = await client.post(
        "/shop/charge", {"amount": 3}, headers={**ADA, "prefer": "respond-async, wait=10"}
    )

    assert (response.status, response.json) == (200, 3)


@pytest.mark.parametrize("path", ["/shop/order", "/call"])
async def test_a_durable_call_that_does_not_end_in_time_is_accepted(
    client: Client, effects: Effects, path: str
) -> None:
    body = {} if path == "/shop/order" else {"operation": "shop.order", "input": {}}
    response = await client.post(path, body, headers={**ADA, "prefer": "wait=0"})
    effects.released.set()

    assert response.status == 202
    assert (await final(client, response.json["id"]))["result"]["data"] == 1


async def test_an_idempotency_key_names_a_run(client: Client, effects: Effects) -> None:
    """j"""
    key = {**ADA, "idempotency-key": "k-1"}
    responses = [await client.post("/shop/charge", {"amount": 3}, headers=key) for _ in range(2)]
    other = await client.post("/shop/charge", {"amount": 4}, headers=key)

    assert [(each.status, each.json) for each in responses] == [(200, 3), (200, 3)]
    empty = await client.post("/shop/charge", {"amount": 5}, headers={**ADA, "idempotency-key": ""})
    assert (other.status, other.json["code"]) == (422, "VALIDATION_ERROR")
    assert (empty.status, empty.json["code"]) == (422, "VALIDATION_ERROR")
    assert effects.made == [3]


async def test_the_error_of_a_run_has_its_own_status(client: Client) -> None:
    declared = (await started(client, "/shop/fail", {"reason": "RESOURCE_EXHAUSTED"})).json["id"]
    secret = (await started(client, "/shop/broken")).json["id"]
    states = [await final(client, run_id) for run_id in (declared, secret)]
    results = [await client.get(f"/runs/{each}/result", headers=ADA) for each in (declared, secret)]

    assert [state["status"] for state in states] == ["failed", "failed"]
    assert [result.status for result in results] == [429, 500]
    assert b"CANARY" not in msgspec.json.encode(states) + results[1].body


async def test_runs_of_other_callers_are_not_there(client: Client) -> None:
    """w"""
    run_id = (await started(client, "/shop/slow", {"amount": 3})).json["id"]
    others = [
        await client.get(f"/runs/{each}{verb}", headers=BEN)
        for each in (run_id, "0" * 32, "x")
        for verb in ("", "/result", "/events")
    ]
    cancelled = await client.post(f"/runs/{run_id}/cancel", headers=BEN)

    assert {each.status for each in (*others, cancelled)} == {404}
    assert {each.json["code"] for each in (*others, cancelled)} == {"RUN_NOT_FOUND"}
    assert (await client.get("/runs", headers=BEN)).json == {"runs": []}


async def test_a_run_is_cancelled(client: Client, effects: Effects) -> None:
    run_id = (await started(client, "/shop/slow", {"amount": 3})).json["id"]
    responses = [await client.post(f"/runs/{run_id}/cancel", headers=ADA) for _ in range(2)]

    assert [each.status for each in responses] == [202, 202]
    assert (await final(client, run_id))["status"] == "cancelled"


async def test_the_steps_of_a_run_are_listed(client: Client, effects: Effects) -> None:
    run_id = (await started(client, "/shop/order")).json["id"]
    await effects.begun.wait()

    found = await client.get(f"/runs/{run_id}/steps", headers=ADA)
    hidden = await client.get(f"/runs/{run_id}/steps", headers=BEN)

    (step,) = found.json["steps"]
    assert (step["operation"], step["parent"], step["once"]) == ("shop.slow", ".", True)
    assert "ended" not in step
    assert hidden.status == 404


async def test_a_run_is_answered_signalled_and_retried(client: Client) -> None:
    run_id = (await started(client, "/shop/ask")).json["id"]
    waiting: list[Any] = []
    with time_limit(10):
        while not waiting:
            state = (await client.get(f"/runs/{run_id}", headers=ADA)).json
            waiting = state.get("waiting", [])
    path = f"/runs/{run_id}/answers/{waiting[0]['key'].replace('#', '%23')}"
    wrong = await client.post(f"/runs/{run_id}/answers/x", {"action": "accept"}, headers=ADA)
    # The path as a server decodes it.
    answers = [
        await client.post(path.replace("%23", "#"), {"action": "decline"}, headers=ADA)
        for _ in range(2)
    ]
    signal = await client.post(f"/runs/{run_id}/signals/go", {"by": "train"}, headers=ADA)
    state = await final(client, run_id)
    late = await client.post(f"/runs/{run_id}/signals/go", {}, headers=ADA)
    retry = await client.post(f"/runs/{run_id}/retry", {}, headers=ADA)

    assert wrong.status == 409
    assert [each.status for each in answers] == [204, 409]
    assert signal.status == 204
    assert state["result"]["data"] == ["decline", {"by": "train"}]
    assert (late.status, late.json["code"]) == (409, "RUN_ENDED")
    assert retry.status == 422


async def test_a_state_has_a_tag_and_unknown_paths_do_not_exist(client: Client) -> None:
    run_id = (await started(client, "/shop/price", {"item": 3})).json["id"]
    await final(client, run_id)
    response = await client.get(f"/runs/{run_id}", headers=ADA)
    same = await client.get(
        f"/runs/{run_id}", headers={**ADA, "if-none-match": response.headers["etag"]}
    )
    strange = [
        await client.get(f"/runs/{run_id}/{path}", headers=ADA)
        for path in ("state", "cancel/x", "result/x", "steps/x")
    ]
    method = await client.post(f"/runs/{run_id}", {}, headers=ADA)

    assert same.status == 304
    assert {each.status for each in strange} == {404}
    assert method.status == 405
    assert (await client.get("/runs?limit=x", headers=ADA)).status in (400, 422)


async def test_the_states_of_a_run_are_a_stream_that_can_be_resumed(
    client: Client, effects: Effects
) -> None:
    run_id = (await started(client, "/shop/slow", {"amount": 3})).json["id"]
    reading = asyncio.create_task(client.get(f"/runs/{run_id}/events", headers=ADA))
    await effects.begun.wait()
    effects.released.set()
    with time_limit(10):
        first = await reading
    again = await client.get(f"/runs/{run_id}/events", headers={**ADA, "last-event-id": "1"})

    def states(response: Response) -> list[str]:
        lines = response.body.split(b"\n")
        return [
            msgspec.json.decode(line[6:])["status"]
            for line in lines
            if line.startswith(b"data: {") and len(line) > 10
        ]

    assert states(first)[-1] == "completed"
    assert first.body.endswith(b"event: complete\ndata: {}\n\n")
    assert states(again) == ["completed"]


async def test_without_a_store_headers_change_nothing(effects: Effects) -> None:
    from operations import OperationRegistry  # noqa: PLC0415 - only here

    keys = APIKeys({hash_key("ada"): Identity("ada", ["shop"])})
    client = Client(create_app(OperationRegistry([effects.charge]), identity=keys))

    response = await client.post(
        "/shop/charge", {"amount": 3}, headers={**ADA, **ASYNC, "idempotency-key": "k"}
    )

    assert (response.status, response.json) == (200, 3)
    assert (await client.get("/runs", headers=ADA)).status == 404
    assert (await client.get("/runs/" + "0" * 32, headers=ADA)).status == 404


async def test_the_document_has_the_paths_of_runs(client: Client) -> None:
    """Every listed path exists; an import of the document has the operations and not these paths."""
    document = (await client.get("/openapi.json", headers=ADA)).json
    validate(document)
    listed = {
        (path, method): item
        for path, methods in document["paths"].items()
        if path.startswith("/runs")
        for method, item in methods.items()
    }
    run_id = (await started(client, "/shop/charge", {"amount": 1})).json["id"]
    await final(client, run_id)
    statuses = {}
    for path, method in listed:
        url = path.format(id=run_id, key="k", name="n")
        response = await getattr(client, method)(url, headers=ADA)
        statuses[path] = response.status
    config = HTTPServiceConfig(namespace="hub", restore=True)
    imported = {each.spec.name.rpartition(".")[2] for each in from_openapi(document, config)}

    assert statuses == {
        "/runs": 200,
        "/runs/{id}": 200,
        "/runs/{id}/result": 200,
        "/runs/{id}/steps": 200,
        "/runs/{id}/events": 200,
        "/runs/{id}/cancel": 202,
        # The run has ended, and is not to be retried.
        "/runs/{id}/retry": 422,
        "/runs/{id}/answers/{key}": 409,
        "/runs/{id}/signals/{name}": 409,
    }
    for status, item in zip(statuses.values(), listed.values(), strict=True):
        assert status > 400 or str(status) in item["responses"]
    order, charge = (document["paths"][f"/shop/{name}"]["post"] for name in ("order", "charge"))
    assert "202" in order["responses"]
    assert "202" not in charge["responses"]
    assert imported == {"order", "ask", "broken", "slow", "charge", "price", "fail"}


async def test_without_runs_the_document_has_no_paths_of_runs(effects: Effects) -> None:
    registry = OperationRegistry([effects.charge])

    assert list(to_openapi(registry)["paths"]) == ["/shop/charge"]


@pytest.mark.parametrize(
    "name", ["", "abc", "z" * 32, "A" * 32, "%F0%9F%90%8E", "%ED%A0%80", "a" * 3_000]
)
async def test_the_error_of_an_unknown_id_names_it(client: Client, name: str) -> None:
    response = await client.get(f"/runs/{name}", headers=ADA)

    assert (response.status, response.json["code"]) == (404, "RUN_NOT_FOUND")
    assert "0000" not in response.json["message"]
    assert len(response.json["message"]) < 300
    if name.isalnum() and len(name) < 40:
        assert repr(name) in response.json["message"]


async def test_a_cancelled_run_tells_when_its_call_was_begun(
    client: Client, effects: Effects
) -> None:
    run_id = (await started(client, "/shop/slow", {"amount": 3})).json["id"]
    await effects.begun.wait()
    await client.post(f"/runs/{run_id}/cancel", {}, headers=ADA)
    state = await final(client, run_id)
    (begun,) = state["error"]["details"]["begun"]

    assert (begun["operation"], begun["step"]) == ("shop.slow", ".")
    assert state["created"] <= begun["begun"] <= state["updated"]
