"""The settings and secrets of a config reach their sources, and nothing else."""

import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from tests.cli.conftest import TOOL_SERVER, Ran
from tests.limits import time_limit
from tests.servers import REDIS_7, Broker, NatsServer, RedisServer
from tests.servers import running as broker_running

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.authority import Store
from operations.calls import serve_calls
from operations.cli.demo import build_api
from operations.cli.options import ExitCode
from operations.config import ConfigError, ConfigFile, enforce_trusted, parse_config
from operations.hub import Hub, open_hub
from operations.hub.app import build_app
from operations.hub.journal import remember_operations
from operations.hub.opening import Access
from operations.hub.place import HubPlace
from operations.mcp.kind import client_config
from operations.openapi import BasicCredential, ClientCredentials, HTTPAuth, RefreshToken
from operations.openapi.kind import service_config
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.server.http11.running import running

SECRET = "CANARY-" + "x" * 32


Run = Callable[..., Ran]


def config_file(folder: Path, text: str) -> ConfigFile:
    path = folder / "operations.toml"
    return ConfigFile(config=parse_config(text, path), path=path)


@asynccontextmanager
async def hub_of(folder: Path, text: str) -> AsyncIterator[Hub]:
    with time_limit(150):
        async with open_hub(config_file(folder, text)) as hub:
            yield hub


@pytest.mark.requirement("R16")
def test_an_api_gets_its_credentials_and_reveals_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    (folder / "password").write_text(SECRET + "\n")
    (folder / "shop.json").write_text("{}")
    file = config_file(
        folder,
        """
        [openapi.shop]
        document = "shop.json"
        auth = { type = "apiKey", token = { env = "TOKEN" }, header_name = "X-Key" }
        headers = { X-Secret = { file = "password" }, X-Plain = "hub" }
        scopes = ["shop:use"]
        include = { methods = ["get"] }
        pages = true
        [openapi.shop.credentials]
        key = { env = "TOKEN" }
        login = { username = "me", password = { file = "password" } }
        oauth = { client_id = "id", client_secret = { env = "TOKEN" }, scopes = ["read"] }
        person = { client_id = "id", refresh_token = { env = "TOKEN" } }
        """,
    )

    config = service_config("shop", file.config.tables("openapi")["shop"], HubPlace(file))

    assert config.auth == HTTPAuth(type="apiKey", token=SECRET, header_name="X-Key")
    assert config.headers == {"X-Secret": SECRET, "X-Plain": "hub"}
    assert config.credentials == {
        "key": SECRET,
        "login": BasicCredential(username="me", password=SECRET),
        "oauth": ClientCredentials(client_id="id", client_secret=SECRET, scopes=("read",)),
        "person": RefreshToken(client_id="id", refresh_token=SECRET),
    }
    assert config.pagination == "document"
    assert SECRET not in repr(config) + repr(file)


@pytest.mark.requirement("R16")
def test_a_server_gets_its_secrets_and_reveals_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    file = config_file(
        folder,
        """
        [mcp.near]
        command = "server"
        env = { TOKEN = { env = "TOKEN" }, MODE = "fast" }
        [mcp.far]
        url = "https://mcp.example.com/mcp"
        token = { env = "TOKEN" }
        scopes = ["far:use"]
        """,
    )

    near, far = (
        client_config(name, file.config.tables("mcp")[name], HubPlace(file))
        for name in ("near", "far")
    )

    assert near.env == {"TOKEN": SECRET, "MODE": "fast"}
    assert near.cwd == folder
    assert far.auth == SECRET
    assert SECRET not in repr(near) + repr(far)


async def test_an_api_is_called_and_needs_the_scopes_of_the_config(folder: Path) -> None:
    async with running(build_api()) as url:
        text = (
            f"[openapi.shop]\ndocument = '{url}/openapi.json'\n"
            "scopes = ['shop:use']\nrename = { get_item = 'item' }"
        )
        async with hub_of(folder, text) as hub:
            ann = OperationContext(identity=Identity("ann", ["shop:use"]))
            envelope = await hub.registry.execute("shop.item", {"id": 1}, ann)
            with pytest.raises(CallError, match="denied"):
                await hub.registry.execute("shop.item", {"id": 1})

            assert envelope.data["name"] == "Espresso"
            assert hub.sources[0].title == "The shop"
            source = hub.source_of("shop.item")
            assert source is not None
            assert source.label == "openapi:shop"


async def test_a_name_collision_affects_only_the_second_source(folder: Path) -> None:
    (folder / "again.py").write_text((folder / "ops.py").read_text())

    async with hub_of(folder, "modules = ['ops.py', 'again.py']") as hub:
        first, second = hub.sources

        assert len(first.operations) == 12
        assert second.failure is not None
        assert "already registered" in second.failure


async def test_an_mcp_json_yields_the_reachable_servers(folder: Path) -> None:
    tools = {"command": sys.executable, "args": TOOL_SERVER}
    servers = {"tools": tools, "gone": {"command": "no-such-program"}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))

    async with hub_of(folder, "mcp_json = ['mcp.json']") as hub:
        found, gone = hub.sources

        assert found.operations == ("tools.double",)
        assert (gone.name, gone.state) == ("gone", "disconnected")
        with pytest.raises(CallError, match="there is no program no-such-program") as caught:
            hub.spec("gone.tool")
        assert caught.value.code == "UNAVAILABLE"


def test_faults_of_an_mcp_json_are_reported_with_advice(
    folder: Path, run: Callable[..., Ran]
) -> None:
    code = f"import sys; sys.exit('no disk {SECRET}')"
    servers = {
        "bad": {"command": sys.executable, "args": ["-c", code], "env": {"KEY": SECRET}},
        "typo": {"comand": "x"},
        "off": {"command": "x", "disabled": True, "arg": []},
        "far": {"command": "no-such-program", "arg": []},
    }
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    ran = run("list", "--config", "mcp.json")

    assert ran.code == 0
    for words in (
        "bad ended before it was ready",
        f"command:   {sys.executable} -c",
        f"folder:    {folder}",
        "exit code: 1",
        "output:    no disk ***",
        "next:      run the command manually",
        'comand is not a known key. Did you mean "command"?',
        "there is no program no-such-program",
    ):
        assert words in ran.err
    assert SECRET not in ran.err


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("", {}, "its name has 0 characters"),
        ("a\nb", {}, "its name contains invisible characters"),
        ("x" * 300, {}, "its name has 300 characters"),
        ("bad", {"cwd": 7}, "'cwd': Expected `str"),
        ("bad", {"args": ["\0"]}, "command, args, env and cwd must not contain NUL"),
        ("bad", {"env": {"A=B": "c"}}, "the names in env must not be empty or contain ="),
    ],
)
def test_one_invalid_server_of_an_mcp_json_costs_only_itself(
    folder: Path, run: Callable[..., Ran], name: str, fields: dict[str, Any], reason: str
) -> None:
    good = {"command": sys.executable, "args": TOOL_SERVER, "cwd": None, "name": 7}
    servers = {name: {"command": "x", **fields}, "tools": good}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    ran = run("list", "--ids", "--config", "mcp.json")

    assert (ran.code, ran.out) == (0, "tools.double\n")
    assert reason in ran.err


def test_a_malformed_mcp_json_is_an_invalid_config(folder: Path, run: Callable[..., Ran]) -> None:
    (folder / "mcp.json").write_text("[" * 100_000)

    for command in ("list", "doctor", "serve"):
        ran = run(command, "--config", "mcp.json")

        assert ran.code == (1 if command == "doctor" else 3)
        assert "mcp.json: the file is nested too deeply" in ran.err + ran.out


def test_an_unknown_key_is_reported_and_the_rest_works(
    folder: Path, run: Callable[..., Ran]
) -> None:
    entry = {"command": sys.executable, "args": TOOL_SERVER, "quries": ["double"]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"tools": entry}}))
    ran = run("list", "--ids", "--config", "mcp.json")

    assert ran.out == "tools.double\n"
    assert 'tools: quries is not a known key. Did you mean "queries"?' in ran.err


async def test_workers_on_a_broker_are_a_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, registry: OperationRegistry
) -> None:
    monkeypatch.setenv("WORKER_KEY", SECRET)
    text = """
        [brokers.main]
        url = "{url}"
        workers = true
        credential = {{ env = "WORKER_KEY" }}
        secret = {{ env = "WORKER_KEY" }}
        [access.keys.hub]
        key = {{ env = "WORKER_KEY" }}
        scopes = ["far:use"]
        """

    @registry.operation("far.whoami", scopes=["far:use"])
    async def whoami(context: OperationContext) -> str:
        assert context.identity is not None
        return context.identity.id

    with broker_running(RedisServer()) as broker, time_limit(150):
        resolve = Access(config_file(folder, text.format(url=broker.url)), Store()).resolve
        async with (
            connect_redis(broker.url, secret=SECRET) as target,
            serve_calls(registry, target, resolve=resolve),
            hub_of(folder, text.format(url=broker.url)) as hub,
        ):
            assert hub.absent() == []
            assert "far.whoami" in hub.sources[0].operations
            trusted = OperationContext(trusted=True)
            assert (await hub.registry.execute("far.whoami", {}, trusted)).data == "hub"


async def test_signed_tokens_let_their_bearers_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JWT_SECRET", SECRET)
    text = """
        modules = ["ops.py"]
        [access.jwt]
        issuer = "https://id.example.com"
        audience = "hub"
        secret = { env = "JWT_SECRET" }
        advanced.algorithms = ["HS256"]
        advanced.scope_claim = "perms"
        """
    claims = {"iss": "https://id.example.com", "aud": "hub", "sub": "ann", "exp": time.time() + 60}
    statuses: dict[str, int] = {}
    extras: dict[str, dict[str, Any]] = {
        "admin": {"perms": "work:admin"},
        "other": {"perms": ["x"]},
        "stranger": {"aud": "else"},
    }
    async with (
        hub_of(folder, text) as hub,
        running(build_app(hub, entry_points=["http"], host="127.0.0.1")) as url,
        aiohttp.ClientSession() as session,
    ):
        for name, extra in extras.items():
            token = jwt.encode({**claims, **extra}, SECRET, algorithm="HS256")
            async with session.post(
                f"{url}/call",
                json={"operation": "work.secret", "input": {}},
                headers={"Authorization": f"Bearer {token}"},
            ) as answer:
                statuses[name] = answer.status

    assert statuses == {"admin": 200, "other": 404, "stranger": 401}


async def test_servers_of_the_same_name_are_reported_and_controlled_one_by_one(
    folder: Path,
) -> None:
    server = {"command": sys.executable, "args": TOOL_SERVER}
    for name in ("a.json", "b.json"):
        (folder / name).write_text(json.dumps({"mcpServers": {"tools": server}}))
    async with hub_of(folder, "mcp_json = ['a.json', 'b.json']") as hub:
        first, second = (each for each in hub.sources if each.kind == "mcp")
        assert (first.name, first.problem) == ("tools", None)
        assert second.name == "b.json:tools"
        assert second.problem is not None
        assert (
            "a.json already has the server 'tools'. Remove it from b.json, or set" in second.problem
        )
        assert hub.supervisor("tools").source is first
        await hub.supervisor("b.json:tools").disable()
        assert second.state == "disabled"
        assert any(spec.id.startswith("tools.") for spec in hub.registry.specs())


def test_servers_of_an_mcp_json_start_in_its_folder(folder: Path, run: Callable[..., Ran]) -> None:
    server, *arguments = TOOL_SERVER
    (folder / "m").mkdir()
    shutil.copy(server, folder / "m" / "server.py")
    entry = {"command": sys.executable, "args": ["server.py", *arguments]}
    (folder / "m" / "mcp.json").write_text(json.dumps({"mcpServers": {"tools": entry}}))

    assert run("list", "--ids", "--config", "m/mcp.json").out == "tools.double\n"


async def test_known_operations_are_unavailable_while_their_source_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    (folder / "operations").mkdir()
    text = '[brokers.away]\nurl = "redis://127.0.0.1:1"\nworkers = true\nadvanced.connect_timeout = 0.3\n'
    remember_operations(config_file(folder, text), {"far.sleep": []})

    async with hub_of(folder, text) as hub:
        with pytest.raises(CallError, match="broker:away") as caught:
            hub.spec("far.sleep")
        assert caught.value.code == ErrorCode.UNAVAILABLE
        with pytest.raises(CallError, match='Did you mean "far') as caught:
            hub.spec("far.sleeep")
        assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_a_broker_with_a_namespace_has_only_its_operations(folder: Path) -> None:
    away = '[brokers.away]\nurl = "redis://127.0.0.1:1"\nworkers = true\nadvanced.connect_timeout = 0.3\n'
    away += 'namespace = "far"\n'

    async with hub_of(folder, away) as hub:
        for wanted, code in (("far.x", "UNAVAILABLE"), ("near.x", "OPERATION_NOT_FOUND")):
            with pytest.raises(CallError) as caught:
                hub.spec(wanted)
            assert caught.value.code == code


async def test_of_two_brokers_with_the_same_operation_both_are_imported(
    folder: Path, registry: OperationRegistry
) -> None:
    async def greet() -> str:
        return "hello"

    one = OperationRegistry()
    for here, name in ((one, "hello.greet"), (registry, "hello.greet"), (registry, "hello.leave")):
        here.operation(name, type="query")(greet)
    text = """
        [brokers.blue]
        url = "{url}"
        prefix = "blue:"
        workers = true
        [brokers.red]
        url = "{url}"
        prefix = "red:"
        workers = true
        """
    with broker_running(RedisServer()) as broker, time_limit(150):
        written = text.format(url=broker.url)
        async with (
            connect_redis(broker.url, prefix="blue:") as blue,
            connect_redis(broker.url, prefix="red:") as red,
            serve_calls(one, blue),
            serve_calls(registry, red),
        ):
            async with hub_of(folder, written) as hub:
                assert hub.absent() == []
                assert hub.sources[0].operations == ("hello.greet",)
                assert hub.sources[1].operations == ("hello.leave",)
                (warning,) = hub.sources[1].warnings
                assert warning.where == "hello.greet"
                assert "broker:blue" in warning.reason
                assert 'namespace = "red" in [brokers.red]' in warning.reason
            async with hub_of(folder, written + 'namespace = "red"\n') as hub:
                assert hub.sources[1].warnings == ()
                context = OperationContext(trusted=True)
                answer = await hub.registry.execute("red.hello.greet", {}, context)
                assert answer.data == "hello"


@pytest.mark.parametrize(
    "scheme",
    [
        "nats",
        pytest.param("redis", marks=pytest.mark.skipif(not REDIS_7.exists(), reason="no Redis 7")),
    ],
)
async def test_a_broker_with_the_permissions_of_the_recipes_is_a_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, registry: OperationRegistry, scheme: str
) -> None:
    # A password may contain characters that an address may not.
    password = "p@ss/w:rd%41"
    recipes = Path(__file__).parents[2] / "docs" / "recipes"
    monkeypatch.setenv("ALICE_PASSWORD", password)

    @registry.operation("far.name", type="query")
    async def name() -> str:
        return "far"

    if scheme == "nats":
        rules = (recipes / "nats.conf").read_text().replace("alice-secret", password)
        broker: Broker = NatsServer(config=rules)
    else:
        rules = (recipes / "redis.acl").read_text().replace("alice-secret", password)
        (folder / "users.acl").write_text(rules)
        broker = RedisServer("--aclfile", str(folder / "users.acl"), program=REDIS_7)
    text = f"""
        [brokers.main]
        url = "{scheme}://alice@127.0.0.1:{broker.port}"
        password = {{ env = "ALICE_PASSWORD" }}
        private = true
        workers = true
        """
    with broker_running(broker), time_limit(150):
        connect: Any = {"nats": connect_nats, "redis": connect_redis}[scheme]
        url = f"{scheme}://worker:worker-secret@127.0.0.1:{broker.port}"
        options = {} if scheme == "nats" else {"clients": ["alice"]}
        async with connect(url, **options) as target, serve_calls(registry, target):
            async with hub_of(folder, text + 'client = "alice"\n') as hub:
                assert hub.absent() == []
                assert "far.name" in hub.registry
            async with hub_of(folder, text) as hub:
                assert "client=" in str(hub.absent()[0].failure)


@pytest.fixture
def strangers(folder: Path) -> Path:
    """A folder of another user: his config would run his module."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    (folder / "ops.py").write_text("import pathlib\npathlib.Path('owned').touch()\n")
    (folder / "below").mkdir()
    for path in (folder, folder / "operations.toml", folder / "ops.py"):
        os.chown(path, 12345, 12345)
    return folder


@pytest.mark.parametrize(
    "command", [["list"], ["call", "work.add"], ["import", "ops.py"], ["trace"], ["doctor"]]
)
@pytest.mark.parametrize("place", [".", "below"])
def test_a_config_of_another_user_is_not_used(
    strangers: Path, run: Run, monkeypatch: pytest.MonkeyPatch, place: str, command: list[str]
) -> None:
    monkeypatch.chdir(strangers / place)
    ran = run(*command)

    assert ran.code == (ExitCode.FAILED if command == ["doctor"] else ExitCode.CONFIG)
    assert "belongs to another user (id 12345)" in ran.out + ran.err
    assert "OPERATIONS_TRUST=" in ran.out + ran.err
    assert not (strangers / "owned").exists()
    assert not (strangers / place / "owned").exists()


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--trust"], {}),
        (["--config", "operations.toml"], {}),
        ([], {"OPERATIONS_TRUST": "/nowhere{sep}{folder}"}),
        ([], {"OPERATIONS_TRUST": "{folder}/operations.toml"}),
        ([], {"OPERATIONS_CONFIG": "{folder}/operations.toml"}),
        ([], {"SUDO_UID": "12345"}),
    ],
)
def test_a_config_of_another_user_is_used_if_it_is_trusted(
    strangers: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(folder=strangers, sep=os.pathsep))

    assert run("list", *arguments).code == 0
    assert (strangers / "owned").exists()


def test_a_file_of_this_user_in_a_folder_of_another_is_not_used(strangers: Path, run: Run) -> None:
    os.chown(strangers / "operations.toml", 0, 0)

    assert run("list").code == ExitCode.CONFIG
    os.chown(strangers, 0, 0)
    assert run("list").code == 0


def test_a_config_of_root_is_trusted(strangers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = strangers / "operations.toml"
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError), monkeypatch.context() as patched:
        patched.setenv("SUDO_UID", "12345")
        enforce_trusted(config)
    for path in (config, strangers):
        os.chown(path, 0, 0)
    enforce_trusted(config)


async def test_a_source_may_use_three_quarters_of_a_callers_calls(folder: Path) -> None:
    text = """
[limits]
calls_per_caller = 8

[openapi.a]
document = "a.json"

[openapi.b]
document = "b.json"
concurrency = 5

[mcp.c]
command = "c"
"""
    path = folder / "operations.toml"
    file = ConfigFile(config=parse_config(text, path), path=path)
    found = [
        service_config(name, file.config.tables("openapi")[name], HubPlace(file)).concurrency
        for name in "ab"
    ]

    assert found == [6, 5]
    assert client_config("c", file.config.tables("mcp")["c"], HubPlace(file)).concurrency == 6
