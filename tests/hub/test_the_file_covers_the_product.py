"""Audit, telemetry, logs, HTTPS and user code, configured in the file."""

import json
import logging
import ssl
import subprocess
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.limits import time_limit

from operations import CallError
from operations.config import ConfigError, load_config
from operations.hub import open_hub
from operations.hub.app import listen_config
from operations.hub.journal import writing_logs
from operations.server.http11.running import running

pytestmark = pytest.mark.anyio

MODULE = """
from operations import operation


@operation("hello.greet", type="query")
async def greet(name: str) -> str:
    return f"Hello, {name}!"
"""


def write(folder: Path, text: str, **modules: str) -> Path:
    (folder / "hello.py").write_text(MODULE)
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    path = folder / "operations.toml"
    path.write_text(f'modules = ["hello.py"]\n{text}\n[record.trace]\nenabled = false\n')
    return path


@pytest.mark.parametrize("enabled", ["", "enabled = true"])
async def test_audit_records_are_appended_to_a_private_file_also_after_rotation(
    tmp_path: Path, enabled: str
) -> None:
    path = write(tmp_path, f'[record.audit]\n{enabled}\nfile = "audit.jsonl"\n')
    file = tmp_path / "audit.jsonl"

    async with open_hub(path) as hub:
        await hub.registry.execute("hello.greet", {"name": "CANARY"})
        file.rename(tmp_path / "audit.jsonl.1")
        with pytest.raises(CallError):
            await hub.registry.execute("hello.greet", {"name": 1})

    (first,) = (tmp_path / "audit.jsonl.1").read_text().splitlines()
    (second,) = file.read_text().splitlines()
    assert json.loads(first)["outcome"] == "ok"
    assert json.loads(second)["outcome"] == "VALIDATION_ERROR"
    assert "CANARY" not in first
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
async def test_calls_continue_if_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, '[record.audit]\nfile = "/dev/full"\n')
    path.write_text(path.read_text().replace("enabled = false", 'file = "/dev/full"'))
    async with open_hub(path) as hub:
        for _ in range(3):
            await hub.registry.execute("hello.greet", {"name": "Ann"})

    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(logged) == [
        "audit records cannot be written to /dev/full: No space left on device",
        "calls cannot be written to /dev/full: No space left on device",
    ]
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=r"audit\.file cannot be used: .* No such file"):
        await open_hub(write(tmp_path, '[record.audit]\nfile = "gone/audit.jsonl"\n')).__aenter__()


async def test_spans_and_metrics_reach_a_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, str | None, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raise AssertionError("not compressed by default")
            received.append((self.path, self.headers.get("x-key"), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setenv("A_KEY", "sesame")
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        path = write(
            tmp_path,
            f'[telemetry]\nendpoint = "http://127.0.0.1:{server.server_port}"\nservice_name = "shop"\n'
            'headers = { X-Key = { env = "A_KEY" } }\n',
        )
        async with open_hub(path) as hub:
            await hub.registry.execute("hello.greet", {"name": "Ann"})
        server.shutdown()

    assert {key for _, key, _ in received} == {"sesame"}
    bodies = {where: body for where, _, body in received}
    traces = ExportTraceServiceRequest.FromString(bodies["/v1/traces"])
    spans = [s.name for r in traces.resource_spans for c in r.scope_spans for s in c.spans]
    assert spans == ["hello.greet"]
    metrics = ExportMetricsServiceRequest.FromString(bodies["/v1/metrics"])
    names = {m.name for r in metrics.resource_metrics for c in r.scope_metrics for m in c.metrics}
    assert "operations.call.duration" in names
    (attribute,) = (
        a for a in traces.resource_spans[0].resource.attributes if a.key == "service.name"
    )
    assert attribute.value.string_value == "shop"


def test_logs_are_json_with_a_time_and_requests_are_logged_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = load_config(write(tmp_path, '[log]\njson = true\nlevel = "info"\nrequests = true\n'))
    before = logging.getLogger().handlers[:]

    with writing_logs(file, verbose=False):
        logging.getLogger("operations").info("one %s", 'line\n"')
        logging.getLogger("operations").debug("nothing")
        logging.getLogger("mcp.client").info("Received session ID: secret")
        logging.getLogger("httpx2").info("HTTP Request: POST https://tools.example/mcp?key=secret")
        logging.getLogger("uvicorn.error").info("connection open")
        logging.getLogger("operations.access").info("%s", '{"status": 200}')

    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"]) == ("info", 'one line\n"')
    assert first["time"].endswith("+00:00")
    assert (second["logger"], second["status"]) == ("operations.access", 200)
    assert logging.getLogger().handlers == before


def test_text_logs_have_a_time_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writing_logs(load_config(write(tmp_path, "[log]\ntimestamps = true\n")), verbose=False):
        logging.getLogger("operations").warning("careful")
        logging.getLogger("operations.access").info("a request")

    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING careful")
    assert line.startswith("20")


def make_certificate(folder: Path) -> None:
    subject = "-subj /CN=hub -addext subjectAltName=IP:127.0.0.1 -days 2"
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    command = f"openssl req -x509 {curve} -keyout key.pem -out server.pem {subject}"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


async def test_a_certificate_enables_https(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    path = write(
        tmp_path, '[serve]\nport = 0\ncertificate = "server.pem"\ncertificate_key = "key.pem"\n'
    )
    trusting = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))

    with time_limit(150):
        async with open_hub(path) as hub:
            listen = listen_config(hub.file)
            async with (
                running(hub.app, **asdict(listen)) as url,
                aiohttp.ClientSession() as session,
                session.get(f"{url}/hello/greet?name=Ben", ssl=trusting) as response,
            ):
                assert url.startswith("https://")
                assert await response.json() == "Hello, Ben!"


@pytest.mark.requirement("R22")
def test_an_empty_host_of_the_command_line_does_not_replace_the_host_of_the_file(
    tmp_path: Path,
) -> None:
    file = load_config(write(tmp_path, '[serve]\nhost = "::1"\n'))

    assert listen_config(file, "", 0) == listen_config(file, port=0)
    assert listen_config(file, "127.0.0.1", 0).host == "127.0.0.1"


SETUP = """
import asyncio
from contextlib import asynccontextmanager

from operations import Identity

seen = []


def resolve(connection):
    return Identity("ann", ["a"]) if connection.headers.get("x-who") == "ann" else None


async def note(call, next):
    seen.append(call.spec.id)
    return await next(call)


def prepare(hub):
    hub.registry.use(note)
    hub.registry.observe(lambda event: seen.append(type(event).__name__))
    hub.resolvers.append(resolve)


def plain(hub):
    prepare(hub)


async def later(hub):
    await asyncio.sleep(0)
    prepare(hub)


@asynccontextmanager
async def managed(hub):
    prepare(hub)
    yield
    seen.append("closed")


async def generator(hub):
    prepare(hub)
    yield
    seen.append("closed")
"""


@pytest.mark.parametrize("function", ["plain", "later", "managed", "generator"])
async def test_a_function_sets_up_middleware_observers_identity_and_lifespan(
    tmp_path: Path, function: str
) -> None:
    name = f"setup_{function}"
    path = write(tmp_path, f'setup = "{name}:{function}"', **{name: SETUP})

    with time_limit(150):
        async with open_hub(path) as hub:
            seen = __import__(name).seen
            await hub.registry.execute("hello.greet", {"name": "Ann"})
            assert "hello.greet" in seen
            assert "CallFinished" in seen
            async with (
                running(hub.app) as url,
                aiohttp.ClientSession() as session,
                session.get(f"{url}/session", headers={"x-who": "ann"}) as response,
            ):
                assert (await response.json())["identity"]["id"] == "ann"
        assert ("closed" in seen) == (function in ("managed", "generator"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def setup(hub):\n    hub.nothing", "setup failed with AttributeError: .*nothing"),
        ("async def setup(hub):\n    1 / 0", "setup failed with ZeroDivisionError"),
        ("async def setup(hub):\n    {}['x']\n    yield", "setup failed with KeyError: 'x'"),
        ("def setup(hub)", "setup cannot be imported: SyntaxError"),
    ],
)
async def test_a_function_that_fails_is_reported_as_a_mistake_of_its_author(
    tmp_path: Path, code: str, words: str
) -> None:
    name = f"failing_{abs(hash(code))}"
    path = write(tmp_path, f'setup = "{name}:setup"', **{name: code})

    with pytest.raises(ConfigError, match=words) as caught:
        async with open_hub(path):
            pass

    assert all(issue.line is not None for issue in caught.value.issues)


async def test_a_missing_function_is_reported_as_a_mistake_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'setup = "nowhere_at_all:setup"')

    with pytest.raises(ConfigError, match="setup cannot be imported"):
        async with open_hub(path):
            pass
