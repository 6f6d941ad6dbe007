"""`init`, `import`, `trace`, `doctor`, `completion`, `work` and `demo`, as scripts use them."""

import json
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from tests.cli.conftest import TOOL_SERVER, Ran
from tests.conftest import PROJECT
from tests.limits import scaled
from tests.servers import NatsServer, running

from operations import __version__
from operations.cli.demo import STEPS, DemoStep, answers_of, command_of, open_demo
from operations.cli.options import ExitCode
from operations.config import load_config
from operations.hub import Hub
from operations.server import new_key

Run = Callable[..., Ran]

DOCUMENT = """
openapi: 3.1.0
info: {title: Shop, version: "1"}
paths:
  /items:
    get: {operationId: list_items, tags: [menu], responses: {"200": {description: ok}}}
    post: {operationId: add_item, tags: [menu], responses: {"200": {description: ok}}}
  /odd:
    get: 3
"""


def test_init_writes_a_config_that_works_at_once(run: Run, folder: Path) -> None:
    new = folder / "new"

    assert run("init", str(new)).code == 0

    assert load_config(new / "operations.toml").config.modules == ("hello.py",)
    called = run("call", "hello.greet", "name=World", "--config", str(new / "operations.toml"))
    assert called.json == "Hello, World!"


def test_init_overwrites_nothing_by_default(run: Run, folder: Path) -> None:
    before = (folder / "operations.toml").read_text()

    refused = run("init", "--json")

    assert refused.code == 1
    assert "--force" in refused.error["message"]
    assert (folder / "operations.toml").read_text() == before
    assert run("init", "--force").code == 0


def test_import_previews_a_document(run: Run, folder: Path) -> None:
    (folder / "shop.yaml").write_text(DOCUMENT)

    report = run("import", "shop.yaml", "--json").json

    assert report["types"] == {"query": 1, "mutation": 1}
    assert report["tags"] == {"menu": 2}
    assert report["operations"] == ["shop.list_items", "shop.add_item"]
    assert [each["where"] for each in report["skipped"]] != []
    spoken = run("import", "shop.yaml").out
    assert '[openapi.shop]\ndocument = "shop.yaml"' in spoken
    assert "cannot be used" in spoken


def test_import_starts_a_server_or_reads_an_mcp_json(run: Run, folder: Path) -> None:
    (folder / "server.py").write_text(
        f"import runpy, sys\nsys.argv = {TOOL_SERVER}\nrunpy.run_path(sys.argv[0])\n"
    )
    entry = {"command": sys.executable, "args": ["server.py"]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"tools": entry}}))

    imported = run("import", sys.executable, "server.py", "--json").json
    assert imported["operations"] == ["server.double"]
    listed = run("list", "--config", "mcp.json", "--json").json
    assert [row["id"] for row in listed] == ["tools.double"]
    assert run("call", "tools.double", "number=21", "--config", "mcp.json").json == {"result": 42}
    for name in ("tools", "mcp.json"):
        known = run("import", name, "--config", "mcp.json", "--json").json
        assert known["operations"] == ["tools.double"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 1, "name a source"),
        (["nope.yaml"], 1, "there is no file"),
        (["http://[::1"], 1, "is not an address"),
        (["127.0.0.1:9/mcp"], 1, "needs a scheme: http://127.0.0.1:9/mcp"),
        (["ftp://127.0.0.1/shop.json"], 1, "download the document, and name the file"),
        (["ops.py", "--kind", "openapi", "--name", "a b"], 1, "is not a namespace"),
        ([""], 1, "is empty"),
        (["http://127.0.0.1:9/openapi.json"], 8, "openapi:127_0_0_1"),
        (["http://127.0.0.1:9/mcp"], 8, "mcp:127_0_0_1"),
        (["redis+sentinel://127.0.0.1:9"], 8, "broker:127_0_0_1"),
        (["no_such_package"], 8, "neither a file, a folder nor a package"),
    ],
)
def test_import_reports_why_there_is_nothing(
    run: Run, arguments: list[str], code: int, words: str
) -> None:
    ran = run("import", *arguments)

    assert ran.code == code
    assert words in ran.err
    assert "Traceback" not in ran.err


def test_trace_shows_calls_as_a_tree_without_their_data(run: Run, folder: Path) -> None:
    run("call", "work.outer")
    run("call", "work.fail")
    run("call", "work.count", "to=2")

    roots = run("trace", "--json").json

    assert [root["operationId"] for root in roots] == ["work.outer", "work.fail", "work.count"]
    assert [call["operationId"] for call in roots[0]["calls"]] == ["work.add"]
    assert roots[1]["outcome"] == "TIRED"
    assert roots[2]["items"] == 2
    spoken = run("trace", "--failed").out
    assert "work.fail" in spoken
    assert "work.outer" not in spoken
    (journal,) = (folder / "state" / "operations").glob("*.jsonl")
    assert "input" not in journal.read_text()
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600


def test_trace_names_the_agent_that_acts_for_a_caller(run: Run, folder: Path) -> None:
    run("call", "work.add", "a=1", "b=2", "--as", "alice")
    (journal,) = (folder / "state" / "operations").glob("*.jsonl")
    record = json.loads(journal.read_text())
    journal.write_text(json.dumps({**record, "acting": ["assistant", "helper"]}) + "\n")

    assert run("trace").out.endswith("  by alice, through assistant and helper\n")


def test_trace_finds_a_call_by_its_request_id(run: Run, folder: Path) -> None:
    run("call", "work.outer")
    run("call", "work.add", "a=1", "b=2")
    (outer, _) = run("trace", "--json").json
    (journal,) = (folder / "state" / "operations").glob("*.jsonl")
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    granted = [{**record, "grants": ["block-1"]} for record in records]
    journal.write_text("".join(json.dumps(record) + "\n" for record in granted))

    for request_id in (outer["requestId"], outer["calls"][0]["requestId"]):
        (root,) = run("trace", request_id, "--json").json
        assert root["requestId"] == outer["requestId"]
    first, nested = run("trace", outer["requestId"], "--verbose").out.splitlines()
    assert f"request {outer['requestId']}  grant block-1" in first
    assert f"request {outer['calls'][0]['requestId']}" in nested
    # A worker has a file of its own, and knows only the id of the call in the hub.
    journal.write_text(json.dumps(next(each for each in granted if "parentRequestId" in each)))
    assert len(run("trace", outer["requestId"], "--json").json) == 1
    assert run("trace", "unknown", "--json").json == []


def test_trace_shows_calls_of_other_processes_with_many_levels(run: Run, folder: Path) -> None:
    run("call", "work.add", "a=1", "b=2")
    (journal,) = (folder / "state" / "operations").glob("*.jsonl")
    record = json.loads(journal.read_text())
    with journal.open("a") as lines:
        parent = record["requestId"]
        for number in range(2_000):
            lines.write(
                json.dumps({**record, "requestId": str(number), "parentRequestId": parent}) + "\n"
            )
            parent = str(number)

    assert run("trace").out.count("work.add") == 2_001
    assert len(run("trace", "--json").json) == 1


def test_trace_marks_a_tool_whose_result_is_an_error(run: Run, folder: Path) -> None:
    with (folder / "operations.toml").open("a") as config:
        config.write(f"[mcp.tools]\ncommand = '{sys.executable}'\nargs = {TOOL_SERVER}\n")
    assert run("call", "tools.double", "number=1").code == 0
    assert run("call", "tools.double", "number=-1").code == 1

    assert [root["outcome"] for root in run("trace", "--json").json] == [
        "success",
        "EXECUTION_ERROR",
    ]
    assert run("trace", "--failed").out.count("tools.double") == 1


def test_no_trace_is_stored_if_the_config_disables_it(run: Run, folder: Path) -> None:
    with (folder / "operations.toml").open("a") as config:
        config.write("[record.trace]\nenabled = false\n")

    run("call", "work.add", "a=1")

    assert run("trace", "--json").json == []


def test_doctor_reports_results_that_differed_from_their_schema(run: Run, folder: Path) -> None:
    (folder / "rows.py").write_text(
        "from operations import operation\n\n"
        '@operation("row.get", type="query")\n'
        'async def get() -> int:\n    return "not an int"  # type: ignore\n'
    )
    (folder / "operations.toml").write_text("modules = ['rows.py']\n")
    assert run("call", "row.get").out.strip() == '"not an int"'

    findings = {finding["what"]: finding for finding in run("doctor", "--json").json["findings"]}

    assert findings["row.get"]["state"] == "warning"
    assert "mismatch 1" in findings["row.get"]["words"]


def test_doctor_finds_missing_parts(
    run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("ALICE_KEY", "CANARY")
    with (folder / "operations.toml").open("a") as config:
        config.write(
            "[brokers.main]\nurl = 'redis://127.0.0.1:9'\nadvanced.connect_timeout = 0.3\n"
        )

    ran = run("doctor", "--json")

    states = {finding["what"]: finding["state"] for finding in ran.json["findings"]}
    assert ran.code == 1
    assert states["access.keys.bob.key"] == "failed"
    assert "access.keys.alice.key" not in states
    assert states["broker main"] == "failed"
    assert states["local"] == states["config"] == states["extra cli"] == "ok"
    assert "CANARY" not in ran.out + ran.err

    with (folder / "operations.toml").open("a") as config:
        config.write("[record.ledger]\nfile = 'ledger.jsonl'\nkey = { env = 'LEDGER_KEY' }\n")
    states = {each["what"]: each["state"] for each in run("doctor", "--json").json["findings"]}
    assert states["record.ledger.key"] == states["broker main"] == "failed"


def test_doctor_reports_each_part_that_all_installs(run: Run) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [all_of_them] = project["optional-dependencies"]["all"]
    parts = all_of_them.partition("[")[2].rstrip("]").split(",")
    found = {each["what"] for each in run("doctor", "--json").json["findings"]}
    assert {f"extra {each}" for each in parts} <= found


def test_doctor_reports_a_trace_that_cannot_be_read(run: Run, folder: Path) -> None:
    (folder / "operations.toml").write_text("[record.trace]\nfile = '.'\n")

    assert "the recorded calls cannot be read" in run("doctor").out


def test_doctor_suggests_short_operation_ids(run: Run, folder: Path) -> None:
    operation = {"operationId": "read_items_items_get", "responses": {}}
    info = {"title": "shop", "version": "1"}
    document = {"openapi": "3.1.0", "info": info, "paths": {"/items": {"get": operation}}}
    (folder / "shop.json").write_text(json.dumps(document))
    config = '[openapi.shop]\ndocument = "shop.json"\nbase_url = "http://127.0.0.1:9"\n'
    (folder / "operations.toml").write_text(config)

    words = 'operation_ids = "short" makes read_items_items_get read_items'
    for arguments in (["doctor"], ["doctor", "shop.json"]):
        assert words in run(*arguments).out

    (folder / "operations.toml").write_text(config + 'operation_ids = "short"\n')
    assert words not in run("doctor").out
    assert "shop.read_items" in run("list").out


def test_doctor_reports_what_the_tools_of_a_source_take(run: Run, folder: Path) -> None:
    operation = {"operationId": "items", "description": "List. " + "More. " * 500, "responses": {}}
    info = {"title": "shop", "version": "1"}
    document = {"openapi": "3.1.0", "info": info, "paths": {"/items": {"get": operation}}}
    (folder / "shop.json").write_text(json.dumps(document))
    config = '[openapi.shop]\ndocument = "shop.json"\nbase_url = "http://127.0.0.1:9"\n'

    def found(*lines: str) -> tuple[str, str]:
        (folder / "operations.toml").write_text(config + "".join(f"{line}\n" for line in lines))
        findings = run("doctor", "--json").json["findings"]
        (finding,) = (each for each in findings if "tokens in a list" in each["words"])
        return finding["state"], finding["words"]

    state, words = found()
    assert (state, words.count(";")) == ("ok", 0)
    state, words = found("token_budget = 500")
    assert state == "warning"
    assert "token_budget is 500" in words
    assert 'descriptions = "short" makes them' in words
    assert found("token_budget = 500", 'descriptions = "short"')[0] == "ok"


def test_doctor_prints_each_line_of_a_problem(run: Run, folder: Path) -> None:
    (folder / "operations.toml").write_text("[mcp.far]\nurl = 'http://127.0.0.1:9/mcp'\n")

    lines = run("doctor").out.splitlines()

    (place,) = [number for number, line in enumerate(lines) if "mcp:far" in line]
    assert lines[place].startswith("failed")
    assert lines[place + 1].split() == ["address:", "http://127.0.0.1:9/mcp"]


@pytest.mark.parametrize(
    "access",
    [
        "[access.grants]\nkey = { env = 'GRANTS_KEY' }\n",
        "[access.jwt]\nissuer = 'https://a.example'\naudience = 'x'\npublic_key = 'none.pem'\n",
    ],
)
def test_doctor_finds_problems_that_would_stop_a_server(
    run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path, access: str
) -> None:
    monkeypatch.setenv("GRANTS_KEY", "CANARY")
    (folder / "operations.toml").write_text(access)

    ran = run("doctor", "--json")

    failed = {each["what"] for each in ran.json["findings"] if each["state"] == "failed"}
    assert failed == {"access"}
    assert "CANARY" not in ran.out + ran.err


@pytest.mark.parametrize(
    ("url", "more", "words"),
    [
        ("nats://alice@127.0.0.1", "", "client="),
        ("nats://alice@127.0.0.1", "client = 'bob'", "client="),
        ("nats://alice@127.0.0.1", "client = 'alice'", "ok"),
        ("nats://alice@127.0.0.1", "client = 'alice'\ngroup = 'a b'", "not a NATS subject"),
        ("tls://alice@127.0.0.1", "client = 'alice'", "does not support TLS"),
    ],
)
def test_doctor_detects_a_broker_that_cannot_carry_calls(
    run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path, url: str, more: str, words: str
) -> None:
    monkeypatch.setenv("ALICE_PASSWORD", "alice-secret")
    rules = (PROJECT / "docs" / "recipes" / "nats.conf").read_text()
    with running(NatsServer(config=rules)) as broker:
        (folder / "operations.toml").write_text(
            f"[brokers.main]\nurl = '{url}:{broker.port}'\n"
            f"password = {{ env = 'ALICE_PASSWORD' }}\n{more}\n"
        )

        ran = run("doctor", "--json")

    (found,) = [each for each in ran.json["findings"] if each["what"] == "broker main"]
    assert found["state"] == ("ok" if words == "ok" else "failed")
    assert words == "ok" or words in found["words"]


def test_doctor_accepts_a_valid_config(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALICE_KEY", "a")
    monkeypatch.setenv("BOB_KEY", "b")

    ran = run("doctor")

    assert ran.code == 0
    assert "everything is available" in ran.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_every_command(run: Run, shell: str) -> None:
    script = run("completion", shell).out

    for command in ("list", "call", "serve", "doctor"):
        assert command in script


def test_ids_are_completed_from_the_last_listing(run: Run) -> None:
    run("list")

    answer = run("__complete", "show", "work.a").out

    assert {"work.add", "work.ask"} <= set(answer.split())


def test_arguments_and_their_values_are_completed_from_the_last_listing(run: Run) -> None:
    run("list")

    def complete(*words: str) -> set[str]:
        return set(run("__complete", "call", "work.ship", *words).out.split())

    assert {"to=", "size=", "notes=", "fast="} <= complete("")
    assert "size=" not in complete("size=small", "")
    assert {"size=small", "size=large"} <= complete("size=")
    assert {"fast=true", "fast=false"} <= complete("fast=")
    assert run("call", "work.ad").code == 4


@pytest.mark.skipif(which("bash") is None, reason="needs bash")
def test_bash_completes_what_follows_the_sign(
    run: Run, folder: Path, environment: dict[str, str]
) -> None:
    run("list")
    script = run("completion", "bash").out
    program = folder / "operations"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m operations "$@"\n')
    program.chmod(0o755)
    script += """
    complete_words() {
      COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
      _operations_joined
      echo "${COMPREPLY[*]}"
    }
    complete_words ./operations call work.ship siz
    complete_words ./operations call work.ship size =
    complete_words ./operations call work.ship size = sm
    complete_words ./operations call work.ship size = small fast = t
    """
    (folder / "complete.bash").write_text(script)

    out = subprocess.check_output(
        ["bash", "complete.bash"], cwd=folder, env=environment, text=True, timeout=scaled(150)
    )

    assert out.splitlines() == ["size=", "small large", "small", "true"]


def test_damaged_files_of_the_trace_stop_no_command(run: Run, folder: Path) -> None:
    run("list")
    (ids,) = (folder / "state").rglob("*.ids")
    ids.write_bytes(b"work.add\nwork.\xff")

    assert run("call", "work.ad").code == 4
    assert run("list").code == 0
    assert ids.read_bytes().isascii()


def test_login_needs_a_server_with_oauth(run: Run, folder: Path) -> None:
    with (folder / "operations.toml").open("a") as config:
        config.write("[mcp.tools]\nurl = 'http://127.0.0.1:9/mcp'\n")

    ran = run("login", "tools")

    assert (ran.code, ran.out) == (3, "")
    assert 'mcp.tools needs auth = "oauth"' in ran.err


def test_version_and_unknown_commands(run: Run) -> None:
    assert run("--version").out.strip() == __version__
    unknown = run("lsit")
    assert unknown.code == 2
    assert "list" in unknown.out + unknown.err


@pytest.mark.slow
def test_without_a_terminal_the_demo_ends_after_its_tour(run: Run) -> None:
    done = run("demo")

    assert done.code == 0, done.err
    for words in ('"source":"http"', '"source":"mcp"', '"source":"local"', "ACCESS_DENIED", "VALIDATION_ERROR",
                  "SOLD_OUT", "HTTP 404", '"isError":true', "JPY"):  # fmt: skip
        assert words in done.out
    assert "\x1b" not in done.out
    assert "\n\n# an HTTP endpoint" in done.out
    assert "Ctrl-C" not in done.out + done.err


@pytest.mark.slow
def test_the_commands_of_the_tour_have_the_shown_results(run: Run) -> None:
    async def shown_by(step: DemoStep, hub: Hub) -> list[Any]:
        return [answer async for answer in answers_of(step, hub.registry)]

    kinds: set[tuple[bool, bool]] = set()
    with (
        start_blocking_portal() as beside,
        beside.wrap_async_context_manager(open_demo(new_key())) as hub,
    ):
        for step in STEPS:
            shown = beside.call(shown_by, step, hub)
            kind = (step.streams, "error" in shown[0])
            # One step of each kind: every command starts all sources.
            if kind in kinds:
                continue
            kinds.add(kind)
            program, *command = shlex.split(command_of(step))
            assert program == "operations"
            done = run(*command, "--json", "--config", str(hub.file.path))
            if "error" in shown[0]:
                assert done.error["message"] == shown[0]["error"]["message"]
            else:
                lines = done.out.splitlines() if step.streams else [done.out]
                printed = [msgspec.json.decode(line) for line in lines]
                assert [each["data"] for each in printed] == [each["data"] for each in shown]


def test_the_doctor_examines_a_document(run: Run, folder: Path) -> None:
    impossible = {"type": "integer", "minimum": 2, "maximum": 1}
    never = {"in": "query", "name": "a", "required": True, "schema": impossible}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Shop", "version": "1"},
        "paths": {"/a": {"get": {"operationId": "a", "parameters": [never], "responses": {}}}},
    }
    (folder / "shop.json").write_bytes(msgspec.json.encode(document))
    ran = run("doctor", "shop.json", "--json")

    assert ran.code == ExitCode.FAILED
    found = {(each["what"], each["state"]) for each in ran.json["findings"]}
    assert ("document", "ok") in found
    assert ("api.a", "failed") in found
    parameter = {"in": "query", "name": "a", "schema": {"$ref": "#/nowhere"}}
    document["paths"] = {"/a": {"get": {"parameters": [parameter], "responses": {}}}}
    (folder / "shop.json").write_bytes(msgspec.json.encode(document))
    warned = run("doctor", "shop.json")
    assert (warned.code, warned.err) == (ExitCode.DONE, "1 warning\n")
    assert run("doctor", "missing.json").code == ExitCode.FAILED
    elsewhere = run("doctor", "ftp://127.0.0.1/shop.json")
    assert elsewhere.code == ExitCode.FAILED
    assert "download the document, and name the file" in elsewhere.out


def test_commands_in_a_deleted_folder_give_advice(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "deleted").mkdir()
    monkeypatch.chdir(folder / "deleted")
    (folder / "deleted").rmdir()

    for command in (["list"], ["call", "a.b"], ["init"], ["serve"], ["doctor"]):
        ran = run(*command)
        assert ran.code == ExitCode.FAILED
        assert "the current folder does not exist any more: change to another one" in ran.err
