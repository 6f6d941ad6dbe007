"""Authority has the same outcome at every entry point: reach, resources, grants, budgets, approvals.

Each entry point runs the whole table against one hub of its own.
"""

import json
import re
import resource
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import nats
import pytest
from mcp import Client
from mcp.types import ElicitResult
from nats.js.api import StreamState
from tests.authority.test_reach import build as build_reach
from tests.authority.test_reach import outcome as outcome_of
from tests.conftest import PROJECT
from tests.limits import time_limit
from tests.mcp_serving.support import ERAS, MODERN_META, error_of, modern_headers
from tests.servers import Broker, NatsServer, RedisServer
from tests.servers import running as broker_running
from tests.support import begin

from operations import (
    AccessControl,
    CallError,
    Identity,
    OperationContext,
    OperationRegistry,
)
from operations.__main__ import main
from operations.authority import (
    ApprovalRule,
    Authority,
    GrantError,
    Grants,
    Store,
    StoreError,
    narrow,
    new_block,
    read_token,
)
from operations.authority import grants as resolving
from operations.authority.ledger import Ledger, LedgerError, verify
from operations.base.json.values import object_of
from operations.base.text import tool_name
from operations.calls import CallGraph, PendingRequestMap, from_calls, serve_calls
from operations.calls.socket import WebSocketHub
from operations.cli.doctor import undeclared_calls
from operations.config import ConfigError, load_config
from operations.hub import open_hub
from operations.hub.opening import opened_authority
from operations.hub.operations import readiness
from operations.mcp import to_mcp
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.pubsub.stores import open_broker_store
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket
from operations.server import APIKeys, create_app, credential_resolver, hash_key
from operations.server.http11.running import running
from operations.tools import ToolConfig, configure_tools

pytestmark = pytest.mark.anyio

KEY = b"k" * 32
RESOURCES = {"project:7": ["edit"]}
CALLERS = {
    "alice": Identity("alice", ["task", "approvals:answer"], RESOURCES),
    "bob": Identity("bob", ["task"]),
    "boss": Identity("boss", ["approvals:answer"]),
}
RENAME = AccessControl(resource_type="project", resource_action="edit", resource_input="/project")


class Failed(Exception):  # noqa: N818
    """A call that failed with a code."""


@dataclass
class World:
    """A hub, its grants, and how to reach it."""

    registry: OperationRegistry
    grants: Grants
    url: str = ""
    ran: list[Any] = field(default_factory=list[Any])
    targets: dict[str, PendingRequestMap] = field(default_factory=dict[str, PendingRequestMap])

    def resolve(self, credential: str) -> Any:
        return CALLERS.get(credential) or self.grants.resolve(credential)


Call = Callable[[World, str, Any, str], Coroutine[Any, Any, Any]]
"""Call an operation with an input and a credential; return the data, or raise `Failed`."""


def build(store: Any = None) -> World:
    store = store or Store()
    registry = OperationRegistry(authority=Authority(store))
    world = World(registry, Grants(KEY, store=store, subjects=CALLERS.get))

    @registry.operation("task.add", scopes=["task"])
    async def add(n: int) -> int:
        return n

    @registry.operation("task.delete", scopes=["task"])
    async def delete(id: int) -> str:
        world.ran.append(id)
        return "deleted"

    @registry.operation("project.rename", access=RENAME)
    async def rename(project: int) -> int:
        return project

    @registry.operation("open.ping")
    async def ping() -> str:
        return "pong"

    @registry.operation("admin.drop", scopes=["admin"])
    async def drop() -> str:
        return "dropped"

    @registry.operation("price.of", scopes=["internal"])
    async def price() -> int:
        return 7

    @registry.operation("order.total", calls=["price.*"])
    async def total(context: OperationContext) -> Any:
        return (await context.env.price.of()).data

    @registry.operation("agent.run", calls=["task.delete"])
    async def run(tool: str, context: OperationContext) -> Any:
        return (await context.env.call(tool, {"id": 9} if tool == "task.delete" else {})).data

    configure_tools(registry, {"task.delete": ToolConfig(approve=ApprovalRule())})
    registry.register_object(registry.authority.approvals)
    return world


@asynccontextmanager
async def served(world: World) -> AsyncGenerator[World]:
    """Serve a world over HTTP, MCP and WebSocket."""
    keys = APIKeys({hash_key(key): caller for key, caller in CALLERS.items()})
    app = create_app(
        world.registry,
        identity=[keys, credential_resolver(world.grants.resolve)],
        mcp=True,
        websocket=True,
        resolve=world.resolve,
    )
    async with running(app) as url:
        world.url = url
        yield world


# ------------------------------------------------------------ entry points


async def in_python(world: World, operation: str, value: Any, key: str) -> Any:
    try:
        found = world.resolve(key)
        identity = found if isinstance(found, Identity) else await found
        assert identity is not None
    except ValueError:
        raise Failed("ACCESS_DENIED") from None
    try:
        context = OperationContext(identity=identity)
        return (await world.registry.execute(operation, value, context)).data
    except CallError as error:
        raise Failed(error.code) from None


async def over_http(world: World, operation: str, value: Any, key: str) -> Any:
    status, _, text = await _posted(world, "/" + operation.replace(".", "/"), value, key, {})
    if status != 200:
        code = json.loads(text)["code"]
        assert (status == 428) == (code == "APPROVAL_REQUIRED")
        raise Failed(code)
    return json.loads(text) if text else None


async def over_gateway(world: World, operation: str, value: Any, key: str) -> Any:
    body = {"operation": operation, "input": value}
    status, _, text = await _posted(world, "/call", body, key, {})
    if status != 200:
        raise Failed(json.loads(text)["code"])
    return json.loads(text)["data"]


_number = count()


async def over_modern_mcp(world: World, operation: str, value: Any, key: str) -> Any:
    name = tool_name(operation)
    params = {"name": name, "arguments": value, "_meta": MODERN_META}
    headers = modern_headers("tools/call", name)
    return _of_mcp(await _rpc(world, "tools/call", params, key, headers))


async def over_legacy_mcp(world: World, operation: str, value: Any, key: str) -> Any:
    version = "2025-06-18"
    hello = {
        "protocolVersion": version,
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    headers = {"mcp-protocol-version": version}
    status, answered, text = await _rpc(world, "initialize", hello, key, {})
    if status != 200:
        raise Failed(json.loads(text)["code"])
    headers["mcp-session-id"] = answered["mcp-session-id"]
    params = {"name": tool_name(operation), "arguments": value}
    return _of_mcp(await _rpc(world, "tools/call", params, key, headers))


async def _rpc(
    world: World, method: str, params: Any, key: str, headers: dict[str, str]
) -> tuple[int, Any, str]:
    body = {"jsonrpc": "2.0", "id": next(_number), "method": method, "params": params}
    headers = {"accept": "application/json, text/event-stream", **headers}
    return await _posted(world, "/mcp", body, key, headers)


def _of_mcp(answer: tuple[int, Any, str]) -> Any:
    _, _, text = answer
    if text.startswith(("event:", "data:", "id:", ":")):
        found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]  # fmt: skip
        text = found[-1]
    body = json.loads(text)
    if "jsonrpc" not in body:
        raise Failed(body["code"])
    if "error" in body:
        raise Failed("OPERATION_NOT_FOUND")
    result = body["result"]
    if result.get("isError"):
        raise Failed(error_of(result)["code"])
    text = result["content"][0]["text"]
    return json.loads(text) if text[0] in "[{0123456789" else text


async def _posted(
    world: World, path: str, body: Any, key: str, headers: dict[str, str]
) -> tuple[int, Any, str]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            world.url + path, data=BytesIO(msgspec.json.encode(body)), headers=headers
        ) as response,
    ):
        return response.status, response.headers, await response.text()


async def over_socket(world: World, operation: str, value: Any, key: str) -> Any:
    url = world.url.replace("http", "ws") + "/ws"
    try:
        async with (
            connect_websocket(url, headers={"authorization": f"Bearer {key}"}) as target,
            PendingRequestMap(target) as calls,
        ):
            return await _called(calls, operation, value, None)
    except Failed:
        raise
    except Exception as error:  # the handshake was rejected
        raise Failed("ACCESS_DENIED") from error


def through(name: str) -> Call:
    async def over_target(world: World, operation: str, value: Any, key: str) -> Any:
        return await _called(world.targets[name], operation, value, key)

    return over_target


async def _called(
    calls: PendingRequestMap, operation: str, value: Any, credential: str | None
) -> Any:
    try:
        return (await calls.call(operation, value, credential=credential)).data
    except CallError as error:
        raise Failed(error.code) from None


ENTRY_POINTS: dict[str, Call] = {
    "python": in_python,
    "http": over_http,
    "gateway": over_gateway,
    "mcp 2026": over_modern_mcp,
    "mcp 2025": over_legacy_mcp,
    "websocket": over_socket,
    "websocket credential": through("websocket credential"),
    "redis": through("redis"),
    "nats": through("nats"),
}


@asynccontextmanager
async def opened(name: str) -> AsyncGenerator[World]:
    """Yield a world that an entry point can reach; over Redis and NATS, that is also where its store is."""
    async with AsyncExitStack() as stack:
        stack.enter_context(time_limit(30))
        store: Any = None
        target: Any = None
        client: Any = None
        if name == "redis":
            broker = stack.enter_context(broker_running(RedisServer()))
            target = await stack.enter_async_context(connect_redis(broker.url))
            store = await stack.enter_async_context(open_broker_store(target))
            client = await stack.enter_async_context(connect_redis(broker.url))
        elif name == "nats":
            broker = NatsServer("-js")
            broker.options = (*broker.options, "-sd", broker.folder)
            stack.enter_context(broker_running(broker))
            target = await stack.enter_async_context(connect_nats(broker.url))
            store = await stack.enter_async_context(open_broker_store(target))
            client = await stack.enter_async_context(connect_nats(broker.url))
        world = build(store)
        if target is not None:
            await stack.enter_async_context(
                serve_calls(world.registry, target, resolve=world.resolve)
            )
        elif name != "python":
            await stack.enter_async_context(served(world))
        if name == "websocket credential":
            url = world.url.replace("http", "ws") + "/ws"
            client = await stack.enter_async_context(connect_websocket(url))
        if client is not None:
            world.targets[name] = await stack.enter_async_context(PendingRequestMap(client))
        yield world


# ------------------------------------------------------------ scenarios


REJECTED = {"ACCESS_DENIED", "OPERATION_NOT_FOUND"}
"""An operation that a caller may not see looks as if it did not exist, unless there is no front."""


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("name", ENTRY_POINTS)
async def test_authority_only_narrows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "_FRESH_SECONDS", -1)
    async with opened(name) as world:

        async def outcome(operation: str, key: str, **value: Any) -> Any:
            try:
                return await ENTRY_POINTS[name](world, operation, value, key)
            except Failed as failed:
                return failed.args[0]

        # Composition.
        assert await outcome("order.total", "bob") == 7
        assert await outcome("price.of", "bob") in REJECTED
        assert await outcome("agent.run", "bob", tool="admin.drop") == "ACCESS_DENIED"
        assert await outcome("agent.run", "bob", tool="task.delete") == "APPROVAL_REQUIRED"
        assert await outcome("agent.run", "bob", tool="open.ping") == "pong"

        # The resource in the input.
        assert await outcome("project.rename", "alice", project=7) == 7
        assert await outcome("project.rename", "alice", project=8) == "ACCESS_DENIED"

        # Narrowing, and access that a grant does not include.
        parent = world.grants.create("alice", "bot", operations=["task.*", "admin.*", "agent.*"])
        schema = {"properties": {"n": {"maximum": 3}}}
        child = narrow(parent, new_block("sub", operations=["*"], input={"task.add": schema}))
        assert await outcome("task.add", parent, n=9) == 9
        assert await outcome("task.add", child, n=3) == 3
        assert await outcome("task.add", child, n=9) == "ACCESS_DENIED"
        for token in (parent, child):
            assert await outcome("open.ping", token) in REJECTED
            assert await outcome("admin.drop", token) in REJECTED
            assert await outcome("agent.run", token, tool="open.ping") == "ACCESS_DENIED"

        # Truncated, forged, expired and foreign tokens.
        *head, _, signature = child.split(".")
        expired = world.grants.create("alice", "bot", operations=["*"], seconds=0)
        foreign = Grants(b"x" * 32).create(CALLERS["alice"], "bot", operations=["*"])
        for token in (".".join([*head, signature]), child[:-4] + "AAAA", expired, foreign):
            assert await outcome("task.add", token, n=1) == "ACCESS_DENIED"

        # Budgets.
        budget = world.grants.create("alice", "bot", operations=["*"], calls={"task.*": 2})
        assert [await outcome("task.add", budget, n=1) for _ in range(3)] == [
            1,
            1,
            "RESOURCE_EXHAUSTED",
        ]

        # Approvals: the exact call, once, by another person.
        assert await outcome("task.delete", parent, id=1) == "APPROVAL_REQUIRED"
        waiting = (await outcome("approvals.list", "boss"))["approvals"]
        (record,) = [each for each in waiting if each["input"] == {"id": 1}]
        assert (record["operation"], record["caller"], record["acting"]) == (
            "task.delete",
            "alice",
            ["bot"],
        )
        assert await outcome("approvals.get", "boss", id=record["id"]) == record
        assert await outcome("approvals.get", parent, id=record["id"]) in REJECTED
        answer = {"id": record["id"], "approve": True}
        assert await outcome("approvals.answer", parent, **answer) in REJECTED
        assert await outcome("approvals.answer", "bob", **answer) in REJECTED
        assert (await outcome("approvals.answer", "boss", **answer))["state"] == "approved"
        assert await outcome("task.delete", parent, id=2) == "APPROVAL_REQUIRED"
        assert await outcome("task.delete", child, id=1) == "APPROVAL_REQUIRED"
        assert await outcome("task.delete", parent, id=1) == "deleted"
        assert await outcome("task.delete", parent, id=1) == "APPROVAL_REQUIRED"
        assert world.ran == [1]
        await outcome("task.delete", "alice", id=5)
        (own,) = [
            e
            for e in (await outcome("approvals.list", "alice"))["approvals"]
            if e["input"] == {"id": 5}
        ]
        assert await outcome("approvals.answer", "alice", id=own["id"], approve=True) == "ACCESS_DENIED"  # fmt: skip

        # Revocation of a parent.
        await world.grants.revoke(read_token(parent)[1][0].id)
        assert await outcome("task.add", child, n=1) == "ACCESS_DENIED"


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(("action", "expected"), [("accept", "deleted"), ("decline", None)])
async def test_an_mcp_client_confirms_or_declines(era: str, action: Any, expected: Any) -> None:
    world = build()
    rule = {"task.delete": ToolConfig(approve=ApprovalRule(ask_caller=True))}
    configure_tools(world.registry, rule)
    questions: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        questions.append(params.message)
        return ElicitResult(action=action, content={} if action == "accept" else None)

    server = to_mcp(world.registry, identity=CALLERS["alice"])
    async with Client(server, mode=era, elicitation_callback=answer) as client:
        result = await client.call_tool("task__delete", {"id": 1})

    assert questions == ['Run task.delete with {"id":1}?']
    if expected is None:
        assert error_of(result)["code"] == "ACCESS_DENIED"
        assert world.ran == []
    else:
        assert result.content[0].text == expected  # type: ignore[union-attr]
        assert world.ran == [1]


async def test_listings_show_only_operations_of_a_grant() -> None:
    async with opened("http") as world:
        token = world.grants.create("alice", "bot", operations=["task.*"])
        headers = {"authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.get(world.url + "/openapi.json") as response:
                paths = (await response.json())["paths"]
            async with session.get(world.url + "/search") as response:
                found = await response.json()
        headers, meta = modern_headers("tools/list"), {"_meta": MODERN_META}
        listed = await _rpc(world, "tools/list", meta, token, headers)

    assert {path for path in paths if path.startswith(("/open", "/admin", "/order"))} == set()
    assert "/task/add" in paths
    assert "open.ping" not in json.dumps(found)
    assert "task.add" in json.dumps(found)
    assert "task__add" in listed[2]
    assert "open__ping" not in listed[2]


# ------------------------------------------------------------ the command line

FILE = """
modules = ["work.py"]
[access.keys.alice]
sha256 = "{hash}"
scopes = ["task"]
[access.grants]
key = {{ env = "GRANTS_KEY" }}
[state]
url = "sqlite:authority.db"
[record.ledger]
file = "ledger.jsonl"
key = {{ env = "GRANTS_KEY" }}
head = "head"
strict = true
[tools."task.delete"]
approve = {{ seconds = 60 }}
[record.trace]
enabled = false
"""

MODULE = """
from operations import operation

@operation("task.add", scopes=["task"])
async def add(n: int) -> int:
    return n

@operation("task.delete", scopes=["task"])
async def delete(id: int) -> str:
    return "deleted"

@operation("open.ping")
async def ping() -> str:
    return "pong"
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    (tmp_path / "operations.toml").write_text(FILE.format(hash=hash_key("alice")))
    (tmp_path / "work.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRANTS_KEY", "k" * 32)

    def command(*arguments: str) -> tuple[int, str]:
        code = main(list(arguments))
        return code, capsys.readouterr().out.strip()

    return command


def test_a_grant_needs_neither_the_store_nor_the_sources_of_the_config(
    run: Callable[..., tuple[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "operations.toml").open("r+") as file:
        text = file.read().replace('url = "sqlite:authority.db"', 'broker = "store"')
        file.seek(0)
        file.write(f'setup = "missing:setup"\n{text}[brokers.store]\nurl = "redis://127.0.0.1:9"\n')

    limits = ["-o", "task.*", "--until", "1h"]
    assert main(["grant", "create", "alice", "--holder", "bot", *limits]) == 0
    shown = capsys.readouterr()
    assert read_token(shown.out.strip())[0].id == "alice"
    assert shown.err == ""


def test_a_grant_with_a_pattern_that_matches_nothing_or_without_an_end_is_created_with_a_warning(
    run: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "operations.toml"
    config.write_text(config.read_text().replace("[record.trace]\nenabled = false\n", ""))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    grant = ["grant", "create", "alice", "--holder", "bot"]
    # No source is opened, so before the first listing nothing is known.
    assert main([*grant, "-o", "tsak.*", "--until", "1h"]) == 0
    assert capsys.readouterr().err == ""
    assert run("list")[0] == 0

    limits = ["-o", "tsak.*", "-o", "task.*", "--calls", "task.nothing=1", "--approve", "hub.*"]
    assert main([*grant, *limits]) == 0
    shown = capsys.readouterr()
    assert len(read_token(shown.out.strip())[1]) == 1
    warnings = shown.err.splitlines()
    assert "never expires" in warnings[0]
    assert [each.split()[1] for each in warnings[1:]] == ["tsak.*", "task.nothing"]

    # No pattern covers what administers authority.
    marked = ["-o", "approvals.*", "-o", "approvals.list", "--until", "1h"]
    assert main([*grant, *marked]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert "approvals.* allows no operation that administers authority: name each" in warning


@pytest.mark.requirement("R63")
def test_grants_approvals_and_the_ledger_at_the_command_line(
    run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ("-o", "task.*", "--calls", "task.add=1", "--until", "1h")
    code, token = run("grant", "create", "alice", "--holder", "bot", *limits)
    assert code == 0
    assert run("call", "task.add", "n=3", "--as", token) == (0, "3")
    assert run("call", "task.add", "n=3", "--as", token)[0] == 1, "the budget is spent"
    assert run("call", "open.ping", "--as", token)[0] == 4
    assert "open.ping" not in run("list", "--as", token)[1]
    _, child = run("grant", "narrow", token, "--holder", "sub", "-o", "task.delete")
    shown = json.loads(run("grant", "show", child)[1])
    assert shown["subject"] == {"id": "alice"}
    assert shown["blocks"][1]["holder"] == "sub"
    assert shown["blocks"][1]["operations"] == ["task.delete"]
    _, lasting = run("grant", "narrow", token, "--holder", "sub", "--until", "9999999d")
    assert '"until": "9999-12' in run("grant", "show", lasting)[1]

    assert run("call", "task.delete", "id=1", "--as", child)[0] == 9
    (waiting,) = json.loads(run("approvals", "list", "--json")[1])
    assert (waiting["input"], waiting["acting"]) == ({"id": 1}, ["bot", "sub"])
    assert run("approvals", "approve", waiting["id"]) == (0, 'approved task.delete {"id":1}')
    assert run("call", "task.delete", "id=2", "--as", child)[0] == 9
    assert run("call", "task.delete", "id=1", "--as", child) == (0, '"deleted"')
    assert run("call", "task.delete", "id=1", "--as", child)[0] == 9

    (block,) = read_token(token)[1]
    earlier = msgspec.structs.replace(block, until=1)
    edited = resolving.mint(b"another key" * 4, read_token(token)[0], earlier)
    assert run("grant", "revoke", edited)[0] == 1, "the revocation would end with the edited token"
    assert run("grant", "revoke", "alice")[0] == 1, "a name is not the id of a block"
    assert run("grant", "revoke", block.id[:-1])[0] == 1, "the id is incomplete"
    chosen = narrow(token, msgspec.structs.replace(new_block("sub"), id="nightly job"))
    assert run("call", "task.delete", "id=1", "--as", chosen)[0] == 9
    assert run("grant", "revoke", "nightly job")[0] == 1, "the holder chose the id: pass the token"
    assert run("grant", "revoke", chosen)[0] == 0
    assert run("call", "task.delete", "id=1", "--as", chosen)[0] == 5
    assert run("grant", "revoke", token)[0] == 0
    assert run("call", "task.delete", "id=1", "--as", child)[0] == 5
    assert run("list", "--as", token)[0] == 5
    assert run("call", "task.add", "n=1", "--as", token[:-2])[0] == 5

    assert (
        run("grant", "create", "alice", "--holder", "bot", "-o", "*", "--calls", "task.*")[0] == 1
    )
    assert run("grant", "create", "alice", "--holder", "bot")[0] == 1
    with monkeypatch.context() as short:
        short.setenv("GRANTS_KEY", "short")
        assert run("grant", "create", "alice", "--holder", "bot", "-o", "*")[0] == 3

    def verify_own_files() -> tuple[int, str]:
        return run("ledger", "verify", "--config", str(tmp_path / "many" / "operations.toml"))

    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "operations.toml").write_text(
        "[record.ledger]\nkey = { env = 'GRANTS_KEY' }\nfile = 'l.{pid}.jsonl'\nhead = 'l.{pid}.head'\n"
    )
    assert verify_own_files()[0] == 0, "no process has written yet"
    for name in ("l.1", "l.2"):
        places = (tmp_path / "many" / f"{name}.{end}" for end in ("jsonl", "head"))
        written = Ledger(next(places), "k" * 32, head=next(places))
        begin(written, "task.add", {})
        written.close()
    assert verify_own_files()[0] == 0
    with (tmp_path / "many" / "l.1.jsonl").open("ab") as file:
        file.write(b"not JSON \xff\x1b[2J\xe2\x80\xae\n")
    many = ("--config", str(tmp_path / "many" / "operations.toml"))
    found = run("ledger", "tail", "3", *many)[1].splitlines()
    assert found[1] == r"not JSON \xff\x1b[2J\u202e", "escaped for a terminal"
    assert [json.loads(found[0])["n"], json.loads(found[2])["n"]] == [1, 1]
    assert run("ledger", "tail", "1", *many)[1].splitlines() == found[1:]
    (tmp_path / "many" / "l.1.jsonl").unlink()
    code, shown_files = verify_own_files()
    assert code == 1, "the file of a process is missing"
    assert "l.2.jsonl: 1 line" in shown_files

    assert run("ledger", "verify")[0] == 0
    assert '"acting":["bot","sub"]' in run("ledger", "tail", "9")[1]
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_text("".join(lines[:-1]))
    assert run("ledger", "verify")[0] == 1
    assert run("call", "open.ping")[0] == 8, "a ledger whose end is missing is not continued"


# ------------------------------------------------------------ stores


@asynccontextmanager
async def stores_on_nats(folder: Path) -> AsyncGenerator[tuple[Broker, Store, Store]]:
    """Yield a server and two connections to the store on it."""
    with broker_running(NatsServer("-js", "-sd", str(folder))) as broker:
        async with (
            connect_nats(broker.url) as target,
            connect_nats(broker.url) as other,
            open_broker_store(target) as store,
            open_broker_store(other) as changing,
        ):
            yield broker, store, changing


async def stream_of(broker: Broker) -> StreamState:
    """Return the state of the only stream of a server."""
    client = await nats.connect(broker.url)
    try:
        (stream,) = await client.jetstream().streams_info()
        return stream.state
    finally:
        await client.close()


async def test_a_list_of_values_on_nats_is_always_complete(tmp_path: Path) -> None:
    async with stores_on_nats(tmp_path) as (broker, store, _):
        assert await store.swap("revoked.a", None, b"1")

        async def read_often() -> None:
            for _ in range(150):
                assert await store.items("revoked") == {"revoked.a": b"1"}

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(read_often)

        assert (await stream_of(broker)).consumer_count == 0


async def test_a_grant_stays_revoked_if_redis_loses_its_data() -> None:
    server = RedisServer()
    with broker_running(server):
        async with connect_redis(server.url) as target, open_broker_store(target) as store:
            operator, hub = (Grants(b"k" * 32, store=store) for _ in range(2))
            token = operator.create(Identity("ann"), "bot", operations=["*"])
            await operator.revoke(read_token(token)[1][0].id)
            with pytest.raises(GrantError, match="revoked"):
                await hub.resolve(token)
            server.kill()
            server.start()
            with time_limit(20):
                while not await store.check():
                    await anyio.sleep(0.02)
            assert await store.items("revoked") == {}
            for grants in (operator, hub):
                grants._read_at = -inf
                with pytest.raises(GrantError, match="revoked"):
                    await grants.resolve(token)


async def test_a_bucket_on_nats_whose_values_expire_is_rejected(tmp_path: Path) -> None:
    with broker_running(NatsServer("-js", "-sd", str(tmp_path))) as broker:
        client = await nats.connect(broker.url)
        await client.jetstream().create_key_value(bucket="operations_authority", ttl=60)
        await client.close()
        async with connect_nats(broker.url) as target, open_broker_store(target) as store:
            for _ in range(2):
                with pytest.raises(StoreError) as caught:
                    await store.get("revoked.x")
                assert "remove its TTL" in str(caught.value.__cause__)


async def test_a_list_of_values_on_nats_has_those_that_change_meanwhile(tmp_path: Path) -> None:
    keys = {f"revoked.{number}" for number in range(10)}
    async with stores_on_nats(tmp_path) as (_, store, changing):
        for key in keys:
            assert await store.swap(key, None, b"0")

        async def change(key: str) -> None:
            while True:
                await changing.change(key, lambda held: str(int(held or b"") + 1).encode())

        async def read_often() -> None:
            for _ in range(100):
                assert set(await store.items("revoked")) == keys

        async with anyio.create_task_group() as tasks:
            for key in keys:
                tasks.start_soon(change, key)
            async with anyio.create_task_group() as readers:
                for _ in range(8):
                    readers.start_soon(read_often)
            tasks.cancel_scope.cancel()


async def test_values_on_nats_can_be_listed_while_others_are_removed_without_trace(
    tmp_path: Path,
) -> None:
    async with stores_on_nats(tmp_path) as (broker, store, changing):
        assert await store.swap("revoked.kept", None, b"1")

        async def change(key: str) -> None:
            for number in range(100):
                for each in (key, f"{key}-{number}"):
                    # The marker of the previous removal may be removed just now.
                    while not await changing.swap(each, None, b"1"):
                        pass
                    assert await changing.swap(each, b"1", None)

        async def read_often() -> None:
            for _ in range(50):
                assert "revoked.kept" in await store.items("revoked")

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(change, f"revoked.{number}")
                tasks.start_soon(read_often)
        with time_limit(20):
            # The server removes the markers a little later.
            while (await stream_of(broker)).messages > 1:
                pass


@pytest.mark.parametrize("kind", ["redis", "nats", "nats without JetStream"])
async def test_a_store_at_a_broker_is_opened_from_its_config(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("-js", "-sd", str(tmp_path)) if kind == "nats" else ()
    monkeypatch.setenv("SECRET", "s" * 32)
    with broker_running(RedisServer() if kind == "redis" else NatsServer(*options)) as broker:
        (tmp_path / "operations.toml").write_text(
            f'[brokers.main]\nurl = "{broker.url}"\nsecret = {{ env = "SECRET" }}\n'
            '[state]\nbroker = "main"'
        )
        file = load_config(tmp_path / "operations.toml")
        if kind == "nats without JetStream":
            with pytest.raises(ConfigError, match="a store on NATS needs JetStream"):
                await opened_authority(file).__aenter__()
            return
        async with opened_authority(file) as one, opened_authority(file) as other:
            changed = other.store.changed
            assert await one.store.swap("a.x", None, b"1")
            await one.store.announce()
            with time_limit(20):
                await changed.wait()
            assert await other.store.get("a.x") == b"1"
        async with open_hub(file) as hub:
            assert await readiness(hub) is True
            broker.kill()
            with time_limit(20):
                while await readiness(hub) is True:
                    await anyio.sleep(0.02)
            assert object_of(await readiness(hub))["disconnected"] == ["state"]


@contextmanager
def full_disk() -> Generator[None]:
    """Let every write to a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.requirement("R62")
async def test_a_full_disk_is_reported_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "operations.toml").write_text(FILE.format(hash=hash_key("alice")))
    (tmp_path / "work.py").write_text(MODULE)
    monkeypatch.setenv("GRANTS_KEY", "k" * 32)
    ok = (200, {"status": "ok"})
    with time_limit(60):
        async with (
            open_hub(tmp_path / "operations.toml") as hub,
            running(hub.app) as url,
            aiohttp.ClientSession(url, headers={"x-api-key": "alice"}) as http,
        ):

            async def ready() -> tuple[int, Any]:
                async with http.get("/readyz") as response:
                    return response.status, await response.json()

            async def add() -> int:
                async with http.post("/task/add", json={"n": 1}) as response:
                    return response.status

            assert await ready() == ok
            with full_disk():
                while await ready() == ok:
                    await anyio.sleep(0.1)
                degraded = {"status": "degraded", "disconnected": ["state"]}
                assert await ready() == (200, degraded)
                assert await add() == 503
                degraded["disconnected"] = ["state", "ledger"]
                assert await ready() == (200, degraded)
            # Without a further call.
            while await ready() != ok:
                await anyio.sleep(0.1)
            assert await add() == 200


@pytest.mark.requirement("R62")
def test_a_ledger_that_began_on_a_full_disk_can_be_used_afterwards(tmp_path: Path) -> None:
    path, head = tmp_path / "ledger.jsonl", tmp_path / "head"
    with full_disk(), pytest.raises(LedgerError, match="File too large"):
        Ledger(path, "k" * 32, head=head).open()
    assert verify([path], "k" * 32, head).problem is None

    ledger = Ledger(path, "k" * 32, head=head)
    begin(ledger, "a.b", {})
    ledger.close()
    found = verify([path], "k" * 32, head)
    assert (found.lines, found.problem) == (1, None)

    head.write_text("")
    assert verify([path], "k" * 32, head).problem is not None
    with pytest.raises(LedgerError, match=r"head .* is missing"):
        ledger.open()
    head.write_text("damaged")
    with pytest.raises(LedgerError, match=r"head .* is damaged"):
        ledger.open()
    assert str(verify([path], "k" * 32, head).problem).endswith("is damaged")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[access.grants]\nkey = { env = "K" }\n[serve]\nprocesses = 2',
            "store that processes share",
        ),
        ('[tools."a.b"]\napprove = true\n[serve]\nprocesses = 2', "store that processes share"),
        (
            '[record.ledger]\nfile = "a"\nkey = { env = "K" }\n[serve]\nprocesses = 2',
            "each process needs a file",
        ),
        ('[state]\nbroker = "main"', "not a broker of this file"),
        ('[state]\nkey = { env = "K" }', "needs url or broker"),
    ],
)
def test_several_processes_need_a_store_that_they_share(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "operations.toml").write_text(text)

    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "operations.toml")


def test_the_threat_table_names_existing_tests() -> None:
    page = (PROJECT / "docs" / "authority.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    folders = ("authority", "cli", "console")
    files = (file for name in folders for file in (PROJECT / "tests" / name).glob("test_*.py"))
    defined = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}

    assert len(named) > 15
    assert named - defined == set()


# ------------------------------------------------------------ workers and spokes


@pytest.mark.requirement("R63")
async def test_a_worker_behind_a_hub_knows_on_whose_behalf_it_acts() -> None:
    root = Grants(KEY, subjects=CALLERS.get)
    worker = OperationRegistry()
    at_worker = Grants(root.for_name("workers"))

    @worker.operation("far.who", scopes=["task"])
    async def who(context: OperationContext) -> Any:
        identity = context.identity
        assert identity is not None
        assert identity.grant is not None
        return [identity.id, list(identity.acting), identity.key.count("\n")]

    @worker.operation("far.other", scopes=["task"])
    async def other() -> str:
        return "other"

    @worker.operation("far.open")
    async def opened_to_all(context: OperationContext) -> Any:
        return (await context.env.far.other()).data

    own = at_worker.create(Identity("hub", ["task"]), "hub", operations=["*"])
    with broker_running(RedisServer()) as broker:
        hub = OperationRegistry()
        async with (
            connect_redis(broker.url) as target,
            connect_redis(broker.url) as client,
            serve_calls(worker, target, group="workers", resolve=at_worker.resolve),
            from_calls(
                client,
                group="workers",
                credential=own,
                delegate=root.delegate("workers"),
                access=AccessControl(),
            ) as service,
        ):
            hub.register_all(service)

            async def outcome(operation: str, key: str | None) -> Any:
                identity = None
                if key is not None:
                    identity = CALLERS.get(key) or await root.resolve(key)
                try:
                    context = OperationContext(identity=identity)
                    return (await hub.execute(operation, {}, context)).data
                except CallError as error:
                    return error.code

            token = root.create("alice", "bot", operations=["far.*"], approve=["far.other"])
            assert await outcome("far.who", "alice") == ["alice", ["hub"], 0]
            assert await outcome("far.who", token) == ["alice", ["bot", "hub"], 2]
            assert await outcome("far.who", "boss") == "ACCESS_DENIED", "without the scope"
            assert await outcome("far.who", None) == "ACCESS_DENIED"
            assert await outcome("far.open", "alice") == "ACCESS_DENIED", "only what was called"
            assert await outcome("far.other", token) == "APPROVAL_REQUIRED"
            (record,) = (
                await hub.authority.approvals.pending(OperationContext(trusted=True))
            ).approvals
            await hub.authority.approvals.answer(record.id, True, OperationContext(trusted=True))
            assert await outcome("far.other", token) == "other", "one approval is enough"


@pytest.mark.requirement("R63")
async def test_a_spoke_of_a_websocket_hub_knows_on_whose_behalf_it_acts() -> None:
    root = Grants(KEY, subjects=CALLERS.get)
    center, spoke = OperationRegistry(), OperationRegistry()
    at_spoke = Grants(root.for_name("spoke"))

    @spoke.operation("far.who", scopes=["task"])
    async def who(context: OperationContext) -> Any:
        assert context.identity is not None
        return [context.identity.id, list(context.identity.acting)]

    def name_of(target: AcceptedTarget) -> str:
        assert target.identity is not None
        return target.identity.id

    own = at_spoke.create(Identity("center", ["task"]), "center", operations=["*"])
    hub = WebSocketHub(
        center,
        credential=lambda _: own,
        delegate=lambda target: root.delegate(name_of(target)),
        access=AccessControl(),
    )
    with time_limit(20):
        async with serve_websocket(hub.attach, identify=lambda _: Identity("spoke")) as server:
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with (
                connect_websocket(url) as target,
                serve_calls(spoke, target, resolve=at_spoke.resolve),
            ):
                while "far.who" not in center:
                    await anyio.sleep(0.01)

                async def outcome(identity: Identity | None, **context: Any) -> Any:
                    made = OperationContext(identity=identity, **context)
                    try:
                        return (await center.execute("far.who", {}, made)).data
                    except CallError as error:
                        return error.code

                agent = await root.resolve(root.create("alice", "bot", operations=["far.*"]))
                assert await outcome(agent) == ["alice", ["bot", "hub"]]
                assert await outcome(CALLERS["boss"]) == "ACCESS_DENIED", "without the scope"
                assert await outcome(None) == "ACCESS_DENIED"
                assert await outcome(None, trusted=True) == ["center", ["center"]]


@pytest.mark.requirement("R63")
async def test_a_key_of_workers_does_not_open_the_hub() -> None:
    root = Grants(KEY, subjects=CALLERS.get)
    mint = root.delegate("workers")
    token = mint("far.who", OperationContext(identity=CALLERS["alice"]))
    assert token is not None

    with pytest.raises(ValueError, match="signature"):
        await root.resolve(token)
    with pytest.raises(ValueError, match="signature"):
        await Grants(root.for_name("others")).resolve(token)
    assert mint("far.who", None) is None


async def test_undeclared_calls_are_found_in_a_journal() -> None:
    registry, graph = build_reach(calls=["price.*"]), CallGraph()
    registry.record(graph)

    await outcome_of(registry, "agent.run", tool="price.of")
    await outcome_of(registry, "agent.run", tool="admin.drop")

    assert undeclared_calls(graph) == {"agent.run": ["admin.drop"]}
