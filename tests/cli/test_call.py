"""`operations call`, as scripts use it."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.conftest import Ran
from tests.limits import scaled

from operations import Schema
from operations.cli.inputs import read_input
from operations.cli.options import ExitCode
from operations.front.limits import Limits
from operations.openapi.reading.keywords import FILE_SCHEMA
from operations.schema.outline import Outline

Run = Callable[..., Ran]

SHIP = {
    "street": "Elm",
    "number": 1,
    "size": "small",
    "notes": ["x"],
    "fast": False,
    "weight": None,
}


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (['{"to": {"street": "Elm"}, "size": "small", "notes": ["x"]}'], {}),
        (["@ship.json"], {}),
        (["to.street=Elm", "size=small", "notes=x"], {}),
        (["to.street=Elm", "to.number=7", "size=small", "notes=x", "notes=y"], {"number": 7, "notes": ["x", "y"]}),
        (["to:={\"street\":\"Elm\"}", "size=small", "notes=[\"x\"]", "fast=yes"], {"fast": True}),
        (["to={\"street\":\"Elm\"}", "size=small", "notes=x", "weight=1.5", "fast=false"], {"weight": 1.5}),
        (["to.street=@street.txt", "size=small", "notes=x"], {"street": "Oak"}),
        (["to.street=5", "size=small", "notes=7"], {"street": "5", "notes": ["7"]}),
        (["to.street=a=b", "size=small", "notes=x"], {"street": "a=b"}),
    ],
)  # fmt: skip
def test_input_is_read_according_to_its_schema(
    run: Run, folder: Path, arguments: list[str], changes: dict[str, Any]
) -> None:
    (folder / "ship.json").write_text('{"to": {"street": "Elm"}, "size": "small", "notes": ["x"]}')
    (folder / "street.txt").write_text("Oak")

    ran = run("call", "work.ship", *arguments)

    assert ran.code == 0, ran.err
    assert ran.json == {**SHIP, **changes}


def test_a_key_may_have_brackets() -> None:
    schema = Schema({"properties": {"ids[]": {"type": "array", "items": {"type": "integer"}}}})

    assert read_input(["ids[]=1", "ids[]=2"], Outline.of(schema), Limits()) == {"ids[]": [1, 2]}
    assert read_input(['["a=b"]'], Outline.of(schema), Limits()) == ["a=b"]


def test_the_values_of_a_map_are_converted_by_its_schema() -> None:
    texts = {"type": "object", "additionalProperties": {"$ref": "#/$defs/text"}}
    lists = {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "integer"}},
    }
    open_map = {"type": "object", "additionalProperties": True}
    properties = {"labels": texts, "ids": lists, "rest": open_map}
    schema = Schema({"properties": properties, "$defs": {"text": {"type": "string"}}})
    arguments = ["labels.version=2.0", "ids.a=1", "ids.a=2", "rest.a=1"]

    given = read_input(arguments, Outline.of(schema), Limits())

    assert given == {"labels": {"version": "2.0"}, "ids": {"a": [1, 2]}, "rest": {"a": 1}}


def test_the_values_of_an_optional_object_or_list_are_converted_by_its_schema() -> None:
    null, text = {"type": "null"}, {"type": "string"}
    address = {"type": "object", "properties": {"zip": text, "floor": {"type": "integer"}}}
    labels = {"type": "object", "additionalProperties": text}
    tags = {"anyOf": [{"type": "array", "items": text}, null]}
    properties = {
        "to": {"anyOf": [null, address]},
        "labels": {"anyOf": [labels, null]},
        "tags": tags,
    }
    arguments = ["to.zip=10115", "to.floor=3", "labels.version=2", "tags=5", "tags=6"]

    given = read_input(arguments, Outline.of(Schema({"properties": properties})), Limits())

    assert given["to"] == {"zip": "10115", "floor": 3}
    assert (given["labels"], given["tags"]) == ({"version": "2"}, ["5", "6"])


def test_a_file_is_sent_unchanged_if_the_schema_accepts_bytes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello123")  # valid base64, which must not be decoded
    (tmp_path / "data.json").write_text("[1]")
    single = {"type": "string", "contentEncoding": "base64"}
    optional = {"anyOf": [{"type": "array", "items": single}, {"type": "null"}]}
    properties = {
        "f": FILE_SCHEMA,
        "fs": {"type": "array", "items": FILE_SCHEMA},
        "b": single,
        "bs": optional,
    }
    arguments = [f"{key}=@{tmp_path}/{name}" for key, name in (
        ("f", "notes.txt"), ("fs", "data.json"), ("fs", "notes.txt"), ("b", "notes.txt"), ("bs", "notes.txt"),
    )]  # fmt: skip

    outline = Outline.of(Schema({"properties": properties}))
    given = read_input(arguments, outline, Limits())
    small = read_input(arguments, outline, Limits(), streams_files=True)
    large = tmp_path / "large.bin"
    large.write_bytes(b"0" * 1_000_000)
    files = [f"f=@{large}", f"fs=@{large}", f"bs=@{large}"]
    streamed = read_input(files, outline, Limits(), streams_files=True)

    notes = {"content": "aGVsbG8xMjM=", "filename": "notes.txt"}
    assert given["f"] == notes
    assert given["fs"] == [{"content": "WzFd", "filename": "data.json"}, notes]
    assert given["b"] == "aGVsbG8xMjM="
    assert given["bs"] == ["aGVsbG8xMjM="]
    assert small == given
    assert streamed == {"f": large, "fs": [large], "bs": [large]}


def test_input_comes_through_a_pipe(folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "operations", "call", "work.add", "-"],
        input='{"a": 40, "b": 2}', capture_output=True, text=True, timeout=scaled(150), check=False, env=environment,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "error", "words"),
    [
        (
            ["work.add", "a=x", "c=1"],
            6,
            "VALIDATION_ERROR",
            "/a must be an integer, not a string (and 1 more)",
        ),
        (["work.add", "a=1", "c=1"], 6, "VALIDATION_ERROR", "/c is not a known property"),
        (["work.add", "{"], 6, "VALIDATION_ERROR", "is not JSON"),
        (["work.add", "a=1", "{}"], 6, "VALIDATION_ERROR", "neither key=value"),
        (["work.add", "a=1", "--envelop"], 6, "VALIDATION_ERROR", "'--envelop' is not an option"),
        (["work.add", "@nope.json"], 6, "VALIDATION_ERROR", "cannot be read"),
        (["work.add", "a=1", "a=2"], 6, "VALIDATION_ERROR", "given twice"),
        (["work.add"], 6, "VALIDATION_ERROR", "/a is required"),
        (["work.ad"], 4, "OPERATION_NOT_FOUND", 'Did you mean "work.add"?'),
        (["work.secret", "--as", "bob"], 4, "OPERATION_NOT_FOUND", "work.secret"),
        (["work.secret", "--as", "anonymous"], 4, "OPERATION_NOT_FOUND", "work.secret"),
        (["work.fail"], 1, "TIRED", "too late"),
        (["work.crash"], 1, "EXECUTION_ERROR", "boom"),
        (["work.crash", "--as", "bob"], 1, "EXECUTION_ERROR", "The operation failed (request "),
        (["work.slow", "pause=5", "--timeout", "0.1"], 7, "TIMEOUT", ""),
        (["work.ask"], 8, "UNAVAILABLE", "cannot ask for input"),
    ],
)
def test_each_failure_has_its_exit_code(
    run: Run, arguments: list[str], code: int, error: str, words: str
) -> None:
    ran = run("call", *arguments, "--json")

    assert ran.code == code
    assert ran.out == ""
    assert ran.error["code"] == error
    assert words in ran.error["message"]
    spoken = run("call", *arguments)
    assert spoken.code == code
    assert error in spoken.err
    assert "Traceback" not in spoken.err
    assert ("--verbose prints it" in spoken.err) == words.startswith("The operation failed")


@pytest.mark.parametrize(
    ("arguments", "path", "words"),
    [
        (["nonsense"], "", "the input is not JSON"),
        (["a", "b"], "", "'a' is neither key=value nor the only argument"),
        (["@nowhere.json"], "", "nowhere.json cannot be read"),
        (["to:={"], "/to", "to is not JSON"),
        (["to:=\udcff"], "/to", "to is not JSON"),
        (["\udcff"], "", "the input is not JSON"),
        (["other=\udcff"], "/other", "/other contains a lone surrogate"),
        (["to.street=@nowhere"], "/to/street", "nowhere cannot be read"),
        (["size=small", "size=large"], "/size", "size is given twice"),
    ],
)
def test_unreadable_input_is_reported_with_its_place(
    run: Run, arguments: list[str], path: str, words: str
) -> None:
    ran = run("call", "work.ship", *arguments, "--json")

    assert ran.code == 6
    assert ran.error["details"]["errors"][0]["path"] == path
    assert words in ran.error["message"]
    assert run("call", "work.ship", *arguments).err.count("\n") == 1


def test_an_invalid_value_is_reported_with_its_operation(run: Run, folder: Path) -> None:
    (folder / "ops.py").write_text(
        "from datetime import date\nfrom operations import operation\n"
        "@operation('work.when')\nasync def when(day: date) -> str:\n    return str(day)\n"
    )
    ran = run("call", "work.when", "day=2026-13-45", "--json")

    assert ran.error["message"].startswith("Invalid input of work.when: /day is not valid: ")
    assert ran.error["details"]["errors"][0]["path"] == "/day"


def test_an_unknown_property_is_reported_with_a_suggestion(run: Run) -> None:
    ran = run("call", "work.ship", "siez=small")

    assert '/siez is not a known property. Did you mean "size"?\n' in ran.err


def test_the_envelope_shows_the_source_of_the_data(run: Run) -> None:
    ran = run("call", "work.add", "a=1", "--envelope")

    assert ran.json["data"] == 2
    assert ran.json["meta"]["source"] == "local"


def test_the_operator_has_full_access_and_others_their_own(run: Run) -> None:
    assert run("call", "work.secret").json == "hidden"
    assert run("call", "work.secret", "--as", "alice").json == "hidden"
    ran = run("call", "work.secret", "--as", "alise")
    assert ran.code == 3
    assert 'Did you mean "alice"?' in ran.err


def test_large_results_are_printed_whole(run: Run, folder: Path) -> None:
    with (folder / "operations.toml").open("a") as file:
        file.write('\n[tools."*"]\nmax_bytes = 1000\n')

    notes = ["note"] * 500
    ran = run(
        "call", "work.ship", "to.street=Elm", "size=small", f"notes:={notes!r}".replace("'", '"')
    )

    assert ran.json["notes"] == notes


FLAKY = """

@operation("work.flaky", type="query")
async def flaky() -> int:
    with open("attempts", "a+") as file:
        file.write("1")
        file.seek(0)
        attempts = len(file.read())
    if attempts < 3:
        raise CallError("BUSY", "busy", retryable=True)
    return attempts
"""


def test_a_call_is_repeated_according_to_the_tools_table(run: Run, folder: Path) -> None:
    with (folder / "ops.py").open("a") as module, (folder / "operations.toml").open("a") as file:
        module.write(FLAKY)
        file.write('\n[tools."work.flaky"]\nretry = { attempts = 3, first_pause = 0.01 }\n')

    assert run("call", "work.flaky").json == 3


def test_a_subscription_prints_one_line_per_item(run: Run) -> None:
    assert run("call", "work.count", "to=3").out == "1\n2\n3\n"
    lines = run("call", "work.count", "to=9", "--count", "2", "--envelope").out.splitlines()
    assert [msgspec.json.decode(line)["data"] for line in lines] == [1, 2]


def test_progress_is_not_printed_in_a_pipe(run: Run) -> None:
    ran = run("call", "work.slow", "steps=3", "pause=0")

    assert (ran.out, ran.err) == ('"done"\n', "")


@pytest.mark.parametrize("path", ["no/such/folder/x", "."])
def test_an_output_that_cannot_be_written_fails_before_the_call(run: Run, path: str) -> None:
    ran = run("call", "work.add", "a=1", "--output", path)

    assert ran.code == 1
    assert "choose another --output" in ran.err
    assert run("trace", "--json").json == []


def test_bytes_go_into_a_pipe_or_a_file_unchanged(
    folder: Path, environment: dict[str, str], run: Run
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "operations", "call", "work.image"],
        capture_output=True, timeout=scaled(150), check=False, env=environment,
    )  # fmt: skip
    assert done.stdout == bytes(range(256))

    assert run("call", "work.image", "--output", "image.bin").code == 0
    assert (folder / "image.bin").read_bytes() == bytes(range(256))
    assert run("call", "work.image", "--envelope").json["encoding"] == "base64"
    assert run("call", "work.image", "--json").json["encoding"] == "base64"


def test_the_output_of_a_subscription_replaces_a_file(run: Run, folder: Path) -> None:
    (folder / "items.jsonl").write_text("old\n")

    assert run("call", "work.count", "to=2", "--output", "items.jsonl").code == 0
    assert (folder / "items.jsonl").read_text() == "1\n2\n"


def test_a_reader_that_leaves_is_not_an_error(folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m operations call work.count to=100000 | head -1"],
        capture_output=True, text=True, timeout=scaled(150), check=False, env=environment,
    )  # fmt: skip

    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_missing_config_is_reported_with_advice(run: Run, folder: Path) -> None:
    (folder / "operations.toml").unlink()

    ran = run("call", "work.add")

    assert ran.code == 3
    assert "operations init" in ran.err


def test_a_wrong_config_is_reported_as_json_too(run: Run, folder: Path) -> None:
    (folder / "operations.toml").write_text("[serve]\nprot = 1\n")

    ran = run("call", "work.add", "--json")

    assert ran.code == 3
    (issue,) = ran.error["details"]["issues"]
    assert (issue["file"], issue["line"], issue["key"]) == ("operations.toml", 2, "serve.prot")
    assert issue["message"] == 'is not a known key. Did you mean "port"?'


@pytest.mark.requirement("R47")
def test_third_party_text_cannot_control_a_terminal(run: Run) -> None:
    assert "\x1b" not in run("call", "work.rude").out
    shown = run("show", "work.rude").out
    assert "\x1b" not in shown
    assert "\\x1b[31mred\\u202e" in shown


@pytest.mark.requirement("R47")
def test_third_party_text_cannot_imitate_lines_of_a_command(run: Run, folder: Path) -> None:
    name = "a\nno problems found"
    parameter = {"name": name, "in": "query", "schema": {"enum": [name, "b"]}}
    operation = {"operationId": "call", "tags": [name], "parameters": [parameter], "responses": {}}
    info = {"title": name, "version": name}
    document = {"openapi": "3.1.0", "info": info, "paths": {"/x": {"get": operation}}}
    path = folder / "fake.json"
    path.write_text(json.dumps(document))
    (folder / "operations.toml").write_text('[openapi.fake]\ndocument = "fake.json"\n')

    for arguments in (["import", str(path)], ["doctor", str(path)], ["show", "fake.call"]):
        printed = run(*arguments)
        assert printed.code == 0, printed.err
        assert "a\\nno problems found" in printed.out
        assert not any(line.strip().startswith("no problems") for line in printed.out.splitlines())


@pytest.fixture
def file_api(folder: Path) -> Iterator[list[tuple[str, str, bytes]]]:
    """An API for uploads and downloads, in the config as `files`; returns its requests."""
    seen: list[tuple[str, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Content-Type"], content))
            self._send(b'{"ok": true}', "application/json")

        def do_GET(self) -> None:
            self._send(b"\x00\xff" * 1000, "application/pdf")

        def _send(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    file = {"type": "string", "format": "binary"}
    form = {"type": "object", "properties": {"title": {"type": "string"}, "photo": file}}

    def operation(name: str, kind: str) -> dict[str, Any]:
        responses = {"200": {"description": "", "content": {kind: {}}}}
        return {"operationId": name, "responses": responses}

    body = {"content": {"multipart/form-data": {"schema": form}}}
    post = {**operation("send", "application/json"), "requestBody": body}
    note = {
        **operation("note", "application/json"),
        "requestBody": {"content": {"application/json": {"schema": form}}},
    }
    paths = {
        "/f": {"post": post, "get": operation("get", "application/pdf")},
        "/n": {"post": note},
    }
    document = {"openapi": "3.1.0", "info": {"title": "f", "version": "1"}, "paths": paths}
    (folder / "files.json").write_bytes(msgspec.json.encode(document))
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with (folder / "operations.toml").open("a") as config:
        config.write(f'\n[openapi.files]\ndocument = "files.json"\nbase_url = "{url}"\n')
    yield seen
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("part", "size"), [("photo", 1), ("photo", 100_000), ("title", 1)])
def test_a_file_is_uploaded_from_the_command_line(
    run: Run, folder: Path, file_api: list[tuple[str, str, bytes]], part: str, size: int
) -> None:
    (folder / "cat.png").write_bytes(b"\x89PNG\r\n" * size)
    ran = run("call", "files.send", f"body.{part}=@cat.png")

    assert (ran.code, ran.json) == (0, {"ok": True})
    ((_, kind, content),) = file_api
    assert kind.startswith("multipart/form-data")
    assert f'name="{part}"; filename="cat.png"'.encode() in content
    assert b"\x89PNG\r\n" * size in content


def test_a_call_with_a_small_file_can_be_approved(
    run: Run, folder: Path, file_api: list[tuple[str, str, bytes]]
) -> None:
    with (folder / "operations.toml").open("a") as config:
        config.write('\n[tools."files.send"]\napprove = true\n')
    (folder / "cat.png").write_bytes(b"\x89PNG\r\n")
    ran = run("call", "files.send", "body.photo=@cat.png")

    assert ran.code == ExitCode.NEEDS_APPROVAL
    assert file_api == []


def test_the_bytes_of_an_upload_are_sent_in_base64_if_the_operation_takes_no_files(
    run: Run, folder: Path, file_api: list[tuple[str, str, bytes]]
) -> None:
    (folder / "cat.png").write_bytes(b"\x89PNG\r\n")

    assert run("call", "files.note", "body.photo=@cat.png").code == 0
    assert run("call", "files.note", "body.title=@cat.png").code == 0

    assert [content for *_, content in file_api] == [
        b'{"photo":"iVBORw0K"}',
        b'{"title":"iVBORw0K"}',
    ]


def test_a_file_is_saved_while_it_arrives(
    run: Run, folder: Path, file_api: list[tuple[str, str, bytes]]
) -> None:
    ran = run("call", "files.get", "--output", "saved.pdf")

    assert ran.code == 0
    assert ran.json == {"path": "saved.pdf", "size": 2000, "contentType": "application/pdf"}
    assert (folder / "saved.pdf").read_bytes() == b"\x00\xff" * 1000


@pytest.mark.parametrize(
    "upload",
    [
        "photo",
        "=x",
        "body.photo=@missing.png",
        "body.title.x=@cat.png",
        f"body.photo=@{'a' * 300}.png",
    ],
)
def test_an_unreadable_upload_is_reported(
    run: Run, folder: Path, file_api: list[tuple[str, str, bytes]], upload: str
) -> None:
    (folder / "cat.png").write_bytes(b"")
    ran = run("call", "files.send", "body.title=cat", upload)

    assert ran.code == ExitCode.INVALID
    assert file_api == []


def test_a_terminal_folds_long_values(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ops.py").write_text(
        "from operations import operation\n"
        "@operation('work.long', type='query')\n"
        "async def long() -> dict[str, object]:\n"
        "    'Return long values.'\n"
        "    return {'text': 'x' * 5000, 'items': list(range(1000)), 'short': 'y'}\n"
    )
    whole = {"text": "x" * 5000, "items": [*range(1000)], "short": "y"}
    assert run("call", "work.long").json == whole

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    ran = run("call", "work.long")
    text = re.sub(r"\x1b\[[0-9;]*m", "", ran.out)
    shown = msgspec.json.decode(text)

    assert shown["text"] == "x" * 200 + "... (5000 characters)"
    assert shown["items"] == [*range(50), "... (1000 items)"]
    assert shown["short"] == "y"
    assert "--verbose" in ran.err
    verbose = re.sub(r"\x1b\[[0-9;]*m", "", run("call", "work.long", "--verbose").out)
    assert msgspec.json.decode(verbose) == whole
    assert run("call", "work.long", "--json").json == whole
