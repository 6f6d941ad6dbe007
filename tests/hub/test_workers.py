"""A hub shows its operators the workers behind a broker, and lets them handle dead letters."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.server.asgi import Client
from tests.servers import RedisServer
from tests.servers import running as broker_running

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.authority import ApprovalRule
from operations.authority.grants import Grants
from operations.calls import serve_calls
from operations.calls.protocol.events import CallRequested, RequestPayload, encode_event
from operations.hub import Hub, open_hub
from operations.hub.app import build_app
from operations.hub.reloading import reload
from operations.pubsub.base import EventTarget
from operations.pubsub.redis import connect_redis
from operations.tools import ToolConfig, configure_tools

CONFIG = """
[brokers.bus]
url = "URL"
group = "shop"
workers = true
credential = { env = "WORKERS_TOKEN" }
[access.keys.op]
key = { env = "OP_KEY" }
scopes = ["hub:operate"]
"""
KEY = {"x-api-key": "the-key-of-the-operator"}


@pytest.fixture
async def shop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Hub, EventTarget]]:
    """A hub, and a broker with one worker that accepts the hub's token."""
    monkeypatch.setenv("WORKERS_TOKEN", "token")
    monkeypatch.setenv("OP_KEY", KEY["x-api-key"])
    registry = OperationRegistry()

    @registry.operation("shop.whoami", type="query", scopes=["use"])
    async def whoami(context: OperationContext) -> str | None:
        return None if context.identity is None else context.identity.id

    async def resolve(credential: str) -> Identity | None:
        return Identity("hub", ["use"]) if credential == "token" else None

    with broker_running(RedisServer()) as broker:
        (tmp_path / "operations.toml").write_text(CONFIG.replace("URL", broker.url))
        async with (
            connect_redis(broker.url) as target,
            serve_calls(registry, target, group="shop", name="w1", resolve=resolve),
            open_hub(tmp_path / "operations.toml") as hub,
        ):
            yield hub, target


async def test_operators_see_workers_and_their_metrics_and_others_do_not(
    shop: tuple[Hub, EventTarget],
) -> None:
    hub, _ = shop
    client = Client(build_app(hub))

    (report,) = (await client.get("/hub/workers", headers=KEY)).json
    assert (report["broker"], report["problem"]) == ("bus", None)
    assert [each["name"] for each in report["group"]["workers"]] == ["w1"]
    assert report["group"]["deadLetters"] == 0
    metrics = (await client.get("/metrics", headers=KEY)).body.decode()
    assert 'operations_group_workers{group="shop"} 1\n' in metrics
    assert 'operations_queue_depth{group="shop"} 0\n' in metrics
    assert 'operations_source_connected{source="broker:bus"} 1\n' in metrics

    assert (await client.get("/hub/workers")).status == 404
    shown = (await client.get("/metrics")).body
    assert b"operations_group" not in shown
    assert b"operations_source" not in shown


async def test_operators_replay_dead_letters_with_the_credential_of_the_hub(
    shop: tuple[Hub, EventTarget],
) -> None:
    hub, target = shop
    client = Client(build_app(hub))

    async def call(name: str, **input: str) -> Any:
        return await client.post(f"/hub/{name}", json=input, headers=KEY)

    payload = RequestPayload(request_id="r1", operation_id="shop.whoami", input={}, attempt=3)
    await target.dead_letter("shop", encode_event(CallRequested(payload=payload)))
    with time_limit(20):
        while not (found := (await call("dead_letters", broker="bus")).json):
            await asyncio.sleep(0.01)
    (letter,) = found
    assert (letter["operation"], letter["deliveries"]) == ("shop.whoami", 3)

    assert (await call("replay_letter", letter=letter["id"])).json == "hub"
    # With one broker it need not be named.
    assert (await call("dead_letters")).json == []
    gone = await call("drop_letter", letter=letter["id"])
    assert (gone.status, gone.json["code"]) == (422, "VALIDATION_ERROR")
    assert (await call("drop_letter", broker="boss", letter="1-1")).status == 422


@pytest.mark.requirement("R63")
async def test_a_replayed_letter_needs_the_approval_and_the_grant_of_its_operation(
    shop: tuple[Hub, EventTarget],
) -> None:
    hub, target = shop
    build_app(hub)
    configure_tools(hub.registry, {"shop.*": ToolConfig(approve=ApprovalRule())})
    operator = Identity("op", ["hub:operate", "use"])
    grants = Grants("k" * 32)
    agent = await grants.resolve(grants.create(operator, "bot", operations=["hub.*"]))
    payload = RequestPayload(request_id="r1", operation_id="shop.whoami", input={}, attempt=3)
    await target.dead_letter("shop", encode_event(CallRequested(payload=payload)))

    async def call(name: str, who: Identity | None, **input: Any) -> Any:
        context = OperationContext(identity=who)
        try:
            return (await hub.registry.execute(name, input, context)).data
        except CallError as error:
            return error

    with time_limit(5):
        while not (found := await call("hub.dead_letters", operator)):
            await asyncio.sleep(0.01)
    letter = found[0]["id"]

    denied = await call("hub.replay_letter", agent, letter=letter)
    required = await call("hub.replay_letter", operator, letter=letter)
    approval = required.details["approval"]
    boss = Identity("boss", ["approvals:answer"])
    await call("approvals.answer", boss, id=approval, approve=True)
    replayed = await call("hub.replay_letter", operator, letter=letter)

    assert denied.code == "ACCESS_DENIED"
    assert required.code == "APPROVAL_REQUIRED"
    assert replayed == "hub"

    await target.dead_letter("shop", encode_event(CallRequested(payload=payload)))
    letter = (await call("hub.dead_letters", operator))[0]["id"]
    hub.registry.unregister("shop.whoami")
    unknown = await call("hub.replay_letter", agent, letter=letter)
    assert isinstance(unknown, CallError), "a grant must cover the operation"


async def test_operators_follow_the_workers(shop: tuple[Hub, EventTarget]) -> None:
    hub, _ = shop
    build_app(hub)
    operator = OperationContext(trusted=True)
    with time_limit(30):
        async with hub.registry.subscribe("hub.watch_workers", {}, operator) as reports:
            (report,) = (await anext(reports)).data

    assert [each["name"] for each in report["group"]["workers"]] == ["w1"]


async def test_operators_see_the_workers_of_a_broker_that_a_reload_adds(tmp_path: Path) -> None:
    path = tmp_path / "operations.toml"
    path.write_text("")
    with broker_running(RedisServer()) as broker:
        async with (
            connect_redis(broker.url) as target,
            serve_calls(OperationRegistry(), target, name="w1"),
            open_hub(path) as hub,
        ):
            client = Client(build_app(hub))
            assert "hub.workers" not in hub.registry
            path.write_text(f'[brokers.bus]\nurl = "{broker.url}"\nworkers = true\n')
            await reload(hub)
            await hub.settled(30)
            operator = OperationContext(trusted=True)
            (report,) = (await hub.registry.execute("hub.workers", {}, operator)).data
            assert [each["name"] for each in report["group"]["workers"]] == ["w1"]
            assert b"operations_group" not in (await client.get("/metrics")).body
            path.write_text("")
            await reload(hub)
            assert not any(
                "worker" in each.spec.id or "letter" in each.spec.id for each in hub.registry
            )


async def test_workers_with_an_id_of_another_source_are_followed(tmp_path: Path) -> None:
    async def one() -> str:
        return "worker"

    (tmp_path / "mine.py").write_text(
        "from operations import operation\n"
        + "".join(
            f'@operation("shop.{name}", type="query")\nasync def {name}() -> str: return "mine"\n'
            for name in ("taken", "later")
        )
    )
    registry = OperationRegistry()
    for name in ("taken", "free"):
        registry.operation(f"shop.{name}", type="query")(one)
    with broker_running(RedisServer()) as broker:
        config = f'modules = ["mine.py"]\n[brokers.bus]\nurl = "{broker.url}"\nworkers = true\n'
        (tmp_path / "operations.toml").write_text(config)
        async with (
            connect_redis(broker.url) as target,
            serve_calls(registry, target, heartbeat=0.1),
            open_hub(tmp_path / "operations.toml") as hub,
        ):
            assert hub.absent() == []
            registry.operation("shop.later", type="query")(one)
            registry.operation("shop.new", type="query")(one)
            with time_limit(30):
                await until(lambda: "shop.new" in hub.registry)
            found = [(await hub.registry.execute(f"shop.{each}")).data for each in ("taken", "new")]
            assert found == ["mine", "worker"]

            await hub.supervisor("bus").disable()
            assert (await hub.registry.execute("shop.taken")).data == "mine"
            # It appeared later, and is not removed with the workers either.
            assert (await hub.registry.execute("shop.later")).data == "mine"
            assert "shop.free" not in hub.registry
