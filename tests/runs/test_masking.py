"""Values that a contract marks as secret: no list of runs and no page shows them, and their caller receives them."""

from typing import Any

import msgspec
import pytest
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import OPERATOR, ended
from tests.server.asgi import Client

from operations import (
    CallError,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    TextContent,
    mcp_envelope,
)
from operations.authority import ApprovalRule
from operations.base.json.values import MASK
from operations.calls.serving.runs import run_verbs
from operations.contract.specs import ErrorDefinition
from operations.front.runs import run_operations
from operations.runs import Limits
from operations.schema import from_schema
from operations.server import APIKeys, create_app, hash_key
from operations.tools import ToolConfig, configure_tools

CANARY = "hunter2"
SECRET = {"type": "string", "format": "password"}
OUTPUT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "users": {"type": "array", "items": {"$ref": "#/$defs/user"}},
    },
    "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string", "writeOnly": True}]},
    "$defs": {"user": {"type": "object", "properties": {"token": SECRET}}},
}
INPUT = {"type": "object", "properties": {"password": SECRET}}
RESULT = {"name": "ada", "users": [{"token": CANARY}], "extra": CANARY}
ADA = OperationContext(identity=Identity("ada", ["shop"]))
GIVEN = {"password": CANARY}


async def make(value: Any, context: OperationContext) -> Any:
    return RESULT


async def tell(value: Any, context: OperationContext) -> Any:
    return {"name": value["password"]}


async def make_as_tool(value: Any, context: OperationContext) -> Any:
    return mcp_envelope(RESULT, content=[TextContent(text=str(RESULT))])


async def refuse(value: Any, context: OperationContext) -> Any:
    raise CallError("REFUSED", "no", {"token": CANARY, "name": "ada"})


async def order(value: Any, context: OperationContext) -> Any:
    made = (await context.env.shop.make(GIVEN)).data
    try:
        await context.env.shop.refuse(GIVEN)
    except CallError:
        await context.step("kept", lambda: CANARY)
    return made


def declared(name: str, handler: Any, **options: Any) -> Operation:
    error = ErrorDefinition(
        code="REFUSED", schema=from_schema({"type": "object", "properties": {"token": SECRET}})
    )
    spec = OperationSpec(
        namespace="shop",
        name=name,
        type=OperationType.MUTATION,
        input_schema=from_schema(INPUT),
        output_schema=from_schema(OUTPUT),
        error_schemas=(error,),
    )
    return Operation(spec, handler, **options)


@pytest.fixture
def registry(registries: OpenRegistry) -> OperationRegistry:
    opened = registries(
        declared("make", make),
        declared("tool", make_as_tool),
        declared("refuse", refuse),
        declared("order", order, durable=True),
        declared("guarded", tell, approve=ApprovalRule()),
        keep_steps=True,
    )
    opened.register_all(run_operations(opened))
    opened.register_all(run_verbs(opened, expose=False))
    return opened


async def displays(registry: OperationRegistry, run_id: str) -> dict[str, Any]:
    """Return what each entry point shows of a run."""
    run = await registry.run(run_id, ADA)
    client = Client(
        create_app(registry, identity=APIKeys({hash_key("k"): Identity("ada", ["shop"])}))
    )
    headers = {"authorization": "Bearer k"}
    shown: dict[str, Any] = {
        "runs()": await registry.runs(ADA),
        "steps()": await run.steps(),
        "masked": run.state.masked(),
    }
    for path in ("", f"/{run_id}", f"/{run_id}/steps"):
        shown[f"GET /runs{path}"] = (await client.get(f"/runs{path}", headers=headers)).body
    cancelled = await client.post(f"/runs/{run_id}/cancel", {}, headers=headers)
    shown["POST /runs/ID/cancel"] = cancelled.body
    shown["events"] = (await client.get(f"/runs/{run_id}/events", headers=headers)).body
    for verb in ("runs.get", "runs.cancel", "run.get", "run.steps", "run.cancel"):
        shown[verb] = (await registry.execute(verb, {"run": run_id}, ADA)).data
    for verb in ("runs.list", "run.list"):
        shown[verb] = (await registry.execute(verb, {}, ADA)).data
    shown["run.watch"] = [
        each.data async for each in registry.subscribe("run.watch", {"run": run_id}, ADA)
    ]
    return {name: str(msgspec.to_builtins(value)) for name, value in shown.items()}


@pytest.mark.parametrize("name", ["make", "tool", "refuse", "order"])
async def test_no_list_and_no_page_shows_secrets(registry: OperationRegistry, name: str) -> None:
    run = await registry.start(f"shop.{name}", GIVEN, ADA)
    await ended(run)
    shown = await displays(registry, run.id)

    assert [each for each, text in shown.items() if CANARY in text] == []
    assert "ada" in shown["runs.get"]


@pytest.mark.parametrize("name", ["make", "tool", "order"])
async def test_the_caller_receives_the_result(registry: OperationRegistry, name: str) -> None:
    run = await registry.start(f"shop.{name}", GIVEN, ADA)
    keys = APIKeys({hash_key("k"): Identity("ada", ["shop"])})
    client = Client(create_app(registry, identity=keys))
    data = (await run.result(10)).data
    response = await client.get(f"/runs/{run.id}/result", headers={"authorization": "Bearer k"})
    asked = {"run": run.id, "secrets": True}
    got = [(await registry.execute(verb, asked, ADA)).data for verb in ("run.get", "runs.get")]

    assert data == RESULT
    assert response.json == RESULT
    assert [each["result"]["data"] for each in got] == [RESULT, RESULT]


async def test_errors_keep_their_details_for_the_caller(registry: OperationRegistry) -> None:
    run = await registry.start("shop.refuse", GIVEN, ADA)

    with pytest.raises(CallError) as caught:
        await run.result(10)

    assert caught.value.details == {"token": CANARY, "name": "ada"}


async def test_a_run_that_waits_for_approval_shows_no_input(registry: OperationRegistry) -> None:
    run = await registry.start("shop.guarded", GIVEN, ADA)
    async for state in run.watch():
        if state.waiting:
            break
    shown = await displays(registry, run.id)

    assert [each for each, text in shown.items() if CANARY in text] == []


async def test_an_approval_masks_secrets_and_the_handler_receives_them(
    registry: OperationRegistry,
) -> None:
    run = await registry.start("shop.guarded", {**GIVEN, "to": "bonn"}, ADA)
    async for state in run.watch():
        if state.waiting:
            break
    approvals = registry.authority.approvals
    person = OPERATOR.changed(identity=Identity("boss", ["approvals:answer"]), trusted=False)
    (asked,) = (await approvals.pending(person)).approvals
    await approvals.answer(asked.id, True, person)

    assert asked.input == {"password": MASK, "to": "bonn"}
    assert (await run.result(20)).data["name"] == CANARY


async def test_pages_of_a_result_are_masked(registries: OpenRegistry) -> None:
    """The contract of an operation with pages has no output schema."""
    registry = registries(declared("make", make_much), limits=Limits(result_bytes=20_000))
    configure_tools(registry, {"shop.*": ToolConfig(max_bytes=2_000)})
    run = await registry.start("shop.make", GIVEN, ADA)
    page = (await run.result(10)).data

    assert CANARY in str(page["value"])
    assert CANARY not in str(run.state.masked())
    assert page["cursor"] in str(run.state.masked())


async def make_much(value: Any, context: OperationContext) -> Any:
    return {**RESULT, "users": [{"token": CANARY}] * 5_000}


@pytest.mark.parametrize("knows", [True, False])
async def test_a_result_that_a_person_records_is_masked(
    registries: OpenRegistry, url: str, knows: bool
) -> None:
    """Also if a client records it that does not know the operation."""
    registry = registries(declared("make", make))
    store: Any = registry.run_store
    run = await registry.start("shop.make", GIVEN, OPERATOR)
    await run.result(10)
    await store.write(
        lambda db: [
            db.count("UPDATE runs SET status = 'unknown', result = NULL"),
            db.count(
                "INSERT INTO steps (run, name, parent, operation, kind, fence, begun)"
                " VALUES (?, '.', '', 'shop.make', 'once', 1, 1)",
                run.id,
            ),
        ]
    )
    client = registry if knows else registries(executes=False)
    same = await client.run(run.id, OPERATOR)
    await same.retry(ran=RESULT)

    assert (await same.result(10)).data == RESULT
    assert CANARY not in str(same.state.masked())
