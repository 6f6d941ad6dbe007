"""Sources of a config that are not available: reported once, harmless to others, an error for their own calls."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from tests.cli.conftest import CONFIG, Ran
from tests.cli.test_serving import KEYS, started

from operations.cli.options import ExitCode
from operations.hub import open_hub
from operations.server.http11.running import running

Run = Callable[..., Ran]

SHOP = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1"},
    "paths": {"/items": {"get": {"operationId": "items", "responses": {}}}},
}
ABSENT = """
[openapi.shop]
document = "gone.json"
[mcp.files]
command = "server"
cwd = "gone"
"""


@pytest.fixture
def broken(folder: Path) -> Path:
    """A config in which only `ops.py` is available."""
    text = CONFIG.replace('["ops.py"]', '["ops.py", "./gone.py"]\nmcp_json = ["gone.json"]')
    (folder / "operations.toml").write_text(text + ABSENT)
    return folder


@pytest.mark.usefixtures("broken")
def test_commands_continue_without_missing_sources_and_report_them(run: Run) -> None:
    listed = run("list", "--ids")

    assert (listed.code, len(listed.out.split())) == (ExitCode.CONFIG, 12), (
        "one module does not exist"
    )
    for words in (
        "local is not available: operations.toml:2: modules[1] is wrong: ./gone.py is neither",
        "openapi.shop.document names no file: there is no gone.json",
        "mcp:gone.json is not available: operations.toml:3: mcp_json names no file",
        "mcp:files is not available: files cannot be started: there is no such folder",
    ):
        assert listed.err.count(words) == 1
    assert run("call", "work.add", "a=1").json == 2
    assert run("show", "work.add").code == 0
    assert run("export", "openapi", "work.*").code == 0


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["call", "shop.items"], "openapi:shop"),
        (["show", "shop.items"], "openapi:shop"),
        (["call", "files.read"], "mcp:files"),
        (["list", "--namespace", "shop"], "openapi:shop"),
        (["list", "--source", "mcp"], "mcp:gone.json"),
        (["export", "mcp", "shop.*"], "openapi:shop"),
        (["import", "shop"], "openapi:shop"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_needs_a_missing_source_fails(
    run: Run, arguments: list[str], source: str
) -> None:
    ran = run(*arguments)

    assert ran.code == 8
    assert source in ran.err


@pytest.mark.usefixtures("broken")
def test_doctor_fails_for_every_missing_source(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)

    ran = run("doctor", "--json")

    failed = [each["what"] for each in ran.json["findings"] if each["state"] == "failed"]
    assert ran.code == 1
    assert failed == ["local", "openapi:shop", "mcp:files", "mcp:gone.json"]


@pytest.mark.parametrize("config", ["operations.toml", "mcp.json"])
def test_the_reason_why_a_server_did_not_start_is_reported_once(
    run: Run, folder: Path, config: str
) -> None:
    code = "import sys; sys.exit('no disk')"
    (folder / "mcp.json").write_text(
        json.dumps({"mcpServers": {"bad": {"command": sys.executable, "args": ["-c", code]}}})
    )
    with (folder / "operations.toml").open("a") as file:
        file.write(f'[mcp.bad]\ncommand = "{sys.executable}"\nargs = ["-c", "{code}"]\n')

    ran = run("call", "bad.tool", "--config", config)

    assert ran.code == 8
    assert ran.err.startswith("UNAVAILABLE: bad.tool is not available")
    assert ran.err.count("no disk") == 2, "in the command, and as its last words"
    result = run("call", "bad.tool", "--config", config, "--json")
    assert result.error["code"] == "UNAVAILABLE"


def test_another_missing_source_is_reported_as_well(run: Run, folder: Path) -> None:
    with (folder / "operations.toml").open("a") as file:
        file.write(
            "[brokers.main]\nurl = 'redis://127.0.0.1:9'\nworkers = true\nadvanced.connect_timeout = 0.3\n"
        )

    ran = run("call", "far.sleep")

    assert ran.code == 8
    assert ran.err.count("broker:main is not available") == 1
    assert "these are not available: broker:main" in ran.err
    assert run("call", "work.nothing").code == 4


@pytest.mark.parametrize("url", ["redis://127.0.0.1:9", "nats://127.0.0.1:9"])
def test_a_worker_needs_its_broker(run: Run, folder: Path, url: str) -> None:
    with (folder / "operations.toml").open("a") as file:
        file.write(f"[brokers.main]\nurl = '{url}'\nadvanced.connect_timeout = 3\n")

    ran = run("work")

    assert ran.code == 8
    assert "127.0.0.1" in ran.err
    assert "connection refused; start the server" in ran.err


def test_operations_of_a_disconnected_source_stay_known(run: Run, folder: Path) -> None:
    (folder / "more.py").write_text(
        "from operations import operation\n\n\n"
        "@operation('more.run')\nasync def run() -> int:\n    return 1\n"
    )
    config = folder / "operations.toml"
    config.write_text(config.read_text().replace('["ops.py"]', '["ops.py", "more.py"]'))
    assert "more.run" in run("list", "--ids").out
    (folder / "more.py").unlink()
    assert "more.run" not in run("list", "--ids").out

    result = run("call", "more.run")

    assert result.code == 8
    assert "these are not available: local" in result.err
    assert run("call", "more.walk").code == 4


@pytest.mark.parametrize("command", [["list"], ["doctor"], ["import", "shop"]], ids=" ".join)
def test_a_document_without_servers_needs_a_base_url(
    run: Run, folder: Path, command: list[str]
) -> None:
    (folder / "shop.json").write_text(json.dumps(SHOP))
    config = folder / "operations.toml"
    config.write_text(config.read_text() + "[openapi.shop]\ndocument = 'shop.json'\n")
    ran = run(*command)

    words = "base_url is missing: the document names no server"
    assert words in ran.out + ran.err
    assert "Set it in [openapi.shop]" in ran.out + ran.err

    config.write_text(config.read_text() + "base_url = 'https://shop.example.com'\n")
    ran = run(*command)
    assert words not in ran.out + ran.err


async def test_serving_continues_without_missing_sources_and_reports_them(
    broken: Path, environment: dict[str, str]
) -> None:
    (broken / "till.json").write_text(json.dumps(SHOP))
    with (broken / "operations.toml").open("a") as file:
        file.write("[openapi.till]\ndocument = 'till.json'\n")

    async with started(environment, "serve") as (process, ready):
        assert ready["operations"] == 13
        process.terminate()
        _, errors = await process.communicate()

    assert b"openapi:shop is not available" in errors
    assert b"Set it in [openapi.till]" in errors


def test_a_wrong_key_for_a_server_is_reported_with_advice(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides are this library, so that the rejection over HTTP is JSON."""
    for name, key in {**KEYS, "WRONG": "CANARY"}.items():
        monkeypatch.setenv(name, key)
    with start_blocking_portal() as beside:
        hub = beside.wrap_async_context_manager(open_hub(folder / "operations.toml"))
        with hub as near, beside.wrap_async_context_manager(running(near.app)) as url:
            (folder / "far.toml").write_text(
                f'[mcp.far]\nurl = "{url}/mcp"\ntoken = {{ env = "WRONG" }}\n'
            )
            ran = run("call", "far.work.add", "--config", "far.toml")

    assert ran.code == 8
    assert ran.err.count("HTTP status 401") == 1
    assert "token or headers in operations.toml" in ran.err
    assert "CANARY" not in ran.out + ran.err


def test_with_json_warnings_and_notes_are_json_too(run: Run, folder: Path) -> None:
    (folder / "bad.py").write_text("raise ValueError")
    (folder / "operations.toml").write_text(
        'modules = ["ops.py", "bad.py"]\n[openapi.shop]\ndocument = "none.json"\nenabled = false\n'
    )

    lines = [json.loads(line) for line in run("list", "--json").err.splitlines()]

    found = {kind: about["message"] for line in lines for kind, about in line.items()}
    assert "bad.py" in found["warning"]
    assert found["note"] == "openapi:shop is disabled"


HOOKS = """
from collections.abc import Callable
from operations import operation
from pydantic import BaseModel

class Hook(BaseModel):
    run: Callable[[int], int]

@operation("hooks.add")
async def add(hook: Hook) -> int: ...

@operation("hooks.count")
async def count() -> int: ...
"""


def test_an_operation_without_a_schema_costs_only_itself(run: Run, folder: Path) -> None:
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "operations.toml").write_text('modules = ["hooks.py"]')

    assert run("list", "--ids").out.split() == ["hooks.count"]
    assert "hooks__count" in run("export", "openai").out
    findings = {each["what"]: each for each in run("doctor", "--json").json["findings"]}
    assert findings["hooks.add"]["state"] == "failed"
    assert "Hook has no JSON Schema" in findings["hooks.add"]["words"]


async def test_serve_reports_an_operation_without_a_schema_once(
    folder: Path, environment: dict[str, str]
) -> None:
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "operations.toml").write_text('modules = ["hooks.py"]')

    async with started(environment, "serve", "--port", "0") as (process, _ready):
        process.terminate()
        _, errors = await process.communicate()

    lines = map(json.loads, errors.splitlines())
    (warning,) = [line for line in lines if line.get("level") == "warning"]
    assert warning["message"].startswith("hooks.add is not listed")
