"""A server that does not start: the error has the command, the output and advice, but no secret."""

import asyncio
import gc
import logging
import sys
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tests.hub.test_the_file_covers_the_product import make_certificate
from tests.limits import time_limit
from tests.mcp_import.support import nothing_left_behind, raw, serving
from tests.servers import free_port

from operations import CallError, ErrorCode, OperationRegistry
from operations.mcp import MCPClientConfig, MCPClientLoader, StartError, connect_mcp
from operations.mcp.shared.failures import redactor_for
from operations.mcp.source.stdio import Child, open_stdio
from operations.server.http11.running import running


async def report_of(config: MCPClientConfig | dict[str, Any]) -> str:
    """Return the error that the connecting code gets."""
    with nothing_left_behind(), time_limit(20), pytest.raises(StartError) as caught:
        async with connect_mcp("files", config):
            pass
    assert caught.value.code == ErrorCode.UNAVAILABLE
    return str(caught.value)


def python(code: str, *arguments: str, **options: Any) -> MCPClientConfig:
    """A program that is not an MCP server."""
    return MCPClientConfig(command=sys.executable, args=["-c", code, *arguments], **options)


async def test_the_command_the_folder_the_exit_code_and_the_output_are_reported(
    tmp_path: Path,
) -> None:
    code = "import sys; print('Usage: tool'); sys.exit('there is no disk')"
    lines = (await report_of(python(code, cwd=tmp_path))).splitlines()

    assert lines[0] == "files ended before it was ready"
    assert lines[1].startswith(f"  command:   {sys.executable} -c ")
    assert lines[2:6] == [
        f"  folder:    {tmp_path}",
        "  exit code: 1",
        "  printed:   Usage: tool",
        "  output:    there is no disk",
    ]
    assert lines[6].startswith("  next:      run the command manually")


async def test_an_object_that_is_not_a_server_of_the_sdk_is_named() -> None:
    report = await report_of(MCPClientConfig(server=object()))

    assert (
        "server must be an MCPServer or a low-level Server of the mcp package, not object" in report
    )
    assert "command or url" in report


async def test_the_last_stderr_line_is_read_without_a_line_end() -> None:
    assert "output:    panic" in await report_of(python("import sys; sys.stderr.write('panic')"))


async def test_only_the_last_lines_are_reported_escaped() -> None:
    code = "import sys; [print(n, chr(27), file=sys.stderr) for n in range(1000)]"
    report = await report_of(python(code))

    assert "999 \\x1b" in report
    assert "\n             990" in report
    assert "\x1b" not in report
    assert len(report.splitlines()) < 30


async def test_a_program_that_does_not_exist_is_named() -> None:
    report = await report_of(MCPClientConfig(command="no-such-command-anywhere"))

    assert "there is no program no-such-command-anywhere" in report
    assert "on PATH" in report


async def test_a_command_with_its_arguments_is_reported_with_the_key_for_arguments() -> None:
    report = await report_of(MCPClientConfig(command="npx -y some-server"))

    assert "there is no program npx -y some-server" in report
    assert "next:      command is only the program: put its arguments into args" in report


async def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    report = await report_of(raw(cwd=tmp_path / "gone"))

    assert "there is no such folder" in report
    assert f"folder:    {tmp_path / 'gone'}" in report


async def test_a_program_that_may_not_be_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server"
    file.write_text("#!/bin/sh")

    assert "Permission denied" in await report_of(MCPClientConfig(command=str(file)))


async def test_a_slow_server_may_be_given_more_time() -> None:
    report = await report_of(raw("silent", connect_timeout=0.3))

    assert "was not ready within 0.3 s" in report
    assert "increase connect_timeout" in report
    assert "exit code" not in report  # it was ended by us


CANARIES = (
    "canary-env",
    "canary-arg",
    "canary-pair",
    "canary-header",
    "canary-shell",
    "canary-url",
)


@pytest.mark.requirement("R16")
async def test_no_secret_is_reported_from_any_source(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("FROM_SHELL", "canary-shell")
    code = (
        "import os, sys; print(sys.argv, os.environ); sys.exit(str([sys.argv, dict(os.environ)]))"
    )
    entry = {
        "command": sys.executable,
        "args": [
            "-c", code, "--api-key", "canary-arg", "--token=canary-pair", "--header",
            "Authorization: Bearer canary-header", "${FROM_SHELL}", "https://x.org/a?key=canary-url",
        ],
        "env": {"KEY": "canary-env\nsecond-canary-env"},
    }  # fmt: skip
    report = await report_of(entry)

    assert "--api-key *** --token=*** --header Authorization: *** *** https://x.org/a" in report
    assert "output:" in report
    for canary in CANARIES:
        assert canary not in report
        assert canary not in caplog.text


async def test_values_from_the_environment_are_secrets() -> None:
    entry = {"command": "no-such-command-anywhere", "args": ["${FROM_SHELL}", "-v"]}

    config = MCPClientConfig.from_entry(entry, {"FROM_SHELL": "canary-shell"})
    assert "no-such-command-anywhere *** -v" in await report_of(config)


_RPC = {"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "who are you?"}}
_REFUSALS = [
    (401, "token or headers", "http", PlainTextResponse("no")),
    (401, "token or headers", "http", JSONResponse({"code": "ACCESS_DENIED", "message": "no"})),
    (401, "token or headers", "http", JSONResponse({"error": "invalid_token"})),
    (401, "token or headers", "http", JSONResponse(_RPC)),
    (401, "token or headers", "sse", JSONResponse({"error": "invalid_token"})),
    (404, "/mcp", "http", PlainTextResponse("no")),
    (405, 'transport "sse"', "http", JSONResponse({"detail": "Method Not Allowed"})),
]


@pytest.mark.parametrize(("status", "advice", "transport", "body"), _REFUSALS)
async def test_a_rejection_contains_advice(
    status: int, advice: str, transport: Literal["http", "sse"], body: Response
) -> None:
    async def refuse(request: Any) -> Response:
        return Response(body.body, status, media_type=body.media_type)

    app = Starlette(routes=[Route("/mcp", refuse, methods=["GET", "POST"])])
    with time_limit(20):
        async with serving(app) as base:
            config = MCPClientConfig(url=f"{base}/mcp?key=canary", transport=transport)
            with pytest.raises(StartError) as caught:
                async with connect_mcp("web", config):
                    pass

    assert f"HTTP status {status}" in str(caught.value)
    assert f"address:   {base}/mcp\n" in str(caught.value)
    assert advice in str(caught.value)
    assert "canary" not in str(caught.value)


async def test_an_unreachable_address_is_reported() -> None:
    url = f"http://127.0.0.1:{free_port()}/mcp"

    assert f"address:   {url}" in await report_of(MCPClientConfig(url=url))


async def test_the_loader_keeps_the_whole_report(caplog: pytest.LogCaptureFixture) -> None:
    with time_limit(20):
        async with MCPClientLoader() as loader:
            await loader.load({"broken": raw("exit")})

    assert "output:    the configuration is missing" in str(loader.failures["broken"])
    assert "output:    the configuration is missing" in caplog.text


async def test_a_server_that_fails_later_reveals_nothing_to_callers(tmp_path: Path) -> None:
    config = raw("crash_later", str(tmp_path / "mark"), reconnect_timeout=0.2)
    with time_limit(20):
        async with connect_mcp("raw", config) as client:
            registry = OperationRegistry(client)
            await registry.execute("raw.exit_after", {})
            with pytest.raises(CallError) as caught:
                for _ in range(3):
                    await registry.execute("raw.pid", {})

    assert not isinstance(caught.value, StartError)
    assert "not again" not in str(caught.value)


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--header", "Authorization:Bearer canary"], "--header Authorization:***"),
        (["--env=GITHUB_TOKEN=canary"], "--env=GITHUB_TOKEN=***"),
        (["--config", '{"apiKey":"canary","n":[1]}'], '--config {"apiKey":"***","n":[1]}'),
        (["--config", '{"token":"tok","n":"tok"}'], '--config {"token":"***","n":"***"}'),
        (["--config={bad", "-x"], "'--config={bad' -x"),
        (["--token", "-canary", "-v"], "--token *** -v"),
        (["--token", "--verbose"], "--token --verbose"),
        (["https://x.org/a?key=canary%2Fb"], "https://x.org/a"),
        (["--url=https://canary@x.org/a"], "--url=https://x.org/a"),
        (["postgresql://user:canary%40x@x.org/a"], "postgresql://x.org/a"),
    ],
)
async def test_a_secret_in_an_argument_is_not_reported(arguments: list[str], shown: str) -> None:
    code = "import sys; sys.exit(str(sys.argv[1:]))"
    report = await report_of(python(code, *arguments))

    assert shown in report.splitlines()[1]
    assert "output:" in report
    assert "canary" not in report


async def test_a_plain_url_in_the_environment_is_no_secret() -> None:
    code = "import os, sys; sys.exit(' '.join(os.environ[name] for name in ('BASE', 'HOOK', 'DB')))"
    env = {
        "BASE": "https://api.example.org/v1/items-of-the-shop",
        "HOOK": "https://hooks.example.org/T0/a1B2c3D4e5F6g7H8i9J0k1L2",
        "DB": "postgresql://shop:canary@db.example.org/shop?token=second-canary",
    }
    report = await report_of(python(code, env=env))

    assert "https://api.example.org/v1/items-of-the-shop https://hooks.example.org/T0/***" in report
    assert "postgresql://shop:***@db.example.org/shop?token=***" in report


async def test_short_environment_values_are_redacted_only_if_their_name_is_secret() -> None:
    code = "import sys; sys.exit('error: python said abcd, and a-long-secret-value')"
    env = {"LOG_LEVEL": "error", "MODE": "python", "APP_PASS": "abcd", "X": "a-long-secret-value"}

    assert "error: python said ***, and ***" in await report_of(python(code, env=env))


async def test_paths_in_ordinary_variables_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.json"
    secret = "/9j/4AAQSkZJRgABAQ"
    code = f"import sys; sys.exit('no such file: {file}; denied: {secret}, {tmp_path}/id')"
    env = {"MEMORY_FILE": str(file), "X": secret, "KEY_FILE": f"{tmp_path}/id"}
    monkeypatch.setenv("FOLDER", str(tmp_path))
    entry = {"command": sys.executable, "args": ["-c", code, "${FOLDER}/a"], "env": env}

    report = await report_of(entry)

    assert f"no such file: {file}; denied: ***, ***" in report
    assert f"{tmp_path}/a" in report.splitlines()[1]


@pytest.mark.parametrize("rest", [" --token {}", "?key={}", ";Password={}", "\n{}"])
async def test_a_path_with_options_is_redacted(
    rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hunter2-hunter2"
    value = f"{tmp_path}/tool{rest.format(secret)}"
    code = "import os, sys; sys.exit('denied: ' + os.environ['X'] + os.environ['Y'])"
    monkeypatch.setenv("LAUNCH", value)
    entry = {"command": sys.executable, "args": ["-c", code], "env": {"X": value, "Y": "${LAUNCH}"}}

    report = await report_of(entry)

    assert "denied" in report
    assert secret not in report


def test_a_start_that_is_cancelled_at_any_step_leaves_no_process_and_no_pipe() -> None:
    config = python("import sys; sys.stdin.read()", shutdown_timeout=0.01)

    async def start(scope: anyio.CancelScope) -> None:
        with scope:
            async with open_stdio(config, Child("files", str)):
                await anyio.sleep_forever()

    async def cancel_after(steps: int) -> None:
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(start, scope)
            for _ in range(steps):
                await asyncio.sleep(0)
            scope.cancel()

    for steps in range(12):
        asyncio.run(cancel_after(steps))
    # What was left open warns when it is collected, and every warning is an error.
    gc.collect()


async def test_a_certificate_of_an_unknown_authority_is_named_with_what_to_do(
    tmp_path: Path,
) -> None:
    make_certificate(tmp_path)
    certificate, key = tmp_path / "server.pem", tmp_path / "key.pem"
    async with running(Starlette(), certificate=certificate, certificate_key=key) as url:
        text = await report_of(MCPClientConfig(url=f"{url}/mcp"))

    assert "certificate verify failed" in text
    assert "if the authority is private, set SSL_CERT_FILE" in text


async def test_the_report_shows_a_last_line_without_an_end() -> None:
    code = "import sys; print('no', 'key', end='')"
    with pytest.raises(CallError) as caught:
        async with connect_mcp("notes", MCPClientConfig(command=sys.executable, args=["-c", code])):
            pass

    assert "printed:   no key" in str(caught.value)


def test_a_long_value_that_is_not_an_address_is_a_secret() -> None:
    value = "0a" * 500_000
    config = MCPClientConfig(command="x", env={"CERTIFICATE": value})

    assert redactor_for(config).redact(f"read {value}") == "read ***"
