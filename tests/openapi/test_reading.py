"""Documents from bytes: JSON, YAML 1.2, encodings, alias bombs, several files, forbidden files."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.limits import processor_limit
from tests.openapi.echo import Echo
from tests.openapi.serving import document, serving

from operations import OperationRegistry
from operations.base.errors import CallError, DocumentError
from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file, from_openapi_url
from operations.openapi.reading.files import decode_document

CONFIG = HTTPServiceConfig(namespace="api")


def _decoded(text: str | bytes) -> Any:
    return decode_document(
        text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    )


@pytest.mark.requirement("R28")
def test_a_document_with_a_lone_surrogate_is_rejected() -> None:
    # The standard library decodes it.
    decoded = json.loads(json.dumps(document(description="\ud800")))
    with pytest.raises(DocumentError, match="contains a lone surrogate"):
        from_openapi(decoded, CONFIG)


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("value", [1 << 70, object(), _cycle()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("last", ["\ud800", {"\ud800": 1}, ["\ud800"]], ids=ascii)
def test_a_lone_surrogate_is_found_after_a_value_that_is_not_json(value: Any, last: Any) -> None:
    with pytest.raises(DocumentError, match="contains a lone surrogate"):
        from_openapi({"x-value": value, **document(), "x-last": last}, CONFIG)


@pytest.mark.requirement("R29")
def test_yaml_is_the_core_schema_of_version_1_2() -> None:
    text = """
    a: no
    b: 12:30
    c: 2020-01-01
    d: 07
    e: 0o17
    f: 0x1F
    g: ~
    h: 1e3
    i: True
    j: 1_000
    k: "1"
    l: yes
    200: ok
    true: t
    """
    expected = {
        "a": "no", "b": "12:30", "c": "2020-01-01", "d": "07", "e": 15, "f": 31, "g": None, "h": 1000.0, "i": True,
        "j": "1_000", "k": "1", "l": "yes", "200": "ok", "true": "t",
    }  # fmt: skip
    assert _decoded(text) == expected


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029"], ids=ascii)
@pytest.mark.parametrize(
    "text",
    [
        "a: oneMtwo\nb: 1\n",
        "a: 'oneMtwo'\nb: 1\n",
        "a: |-\n  oneMtwo\nb: 1\n",
        "a: oneMtwo # M\nb: 1",
    ],
)
def test_yaml_1_2_ends_lines_only_with_line_feeds_and_carriage_returns(
    text: str, mark: str
) -> None:
    assert _decoded(text.replace("M", mark)) == {"a": f"one{mark}two", "b": 1}
    huge = f"c: {10**30}\n" + text.replace("M", mark)
    assert _decoded(huge) == {"c": 1e30, "a": f"one{mark}two", "b": 1}


def test_integers_beyond_64_bits_stay_exact_in_json_and_become_floats_in_yaml() -> None:
    assert _decoded(f'{{"a": {10**30}}}') == {"a": 10**30}
    text = f"a: {2**64 - 1}\nb: {2**64}\nc: [{-(2**63)}, {-(10**30)}, '{10**30}']\nd: x{10**30}"
    decoded = _decoded(text)
    assert decoded == {
        "a": 2**64 - 1,
        "b": float(2**64),
        "c": [-(2**63), -1e30, str(10**30)],
        "d": f"x{10**30}",
    }
    assert type(decoded["a"]) is int


def test_long_integers_in_yaml_change_no_other_text() -> None:
    number = str(10**30)
    text = (
        f"\ufeffa: &a {number}\n{number}: é {number} é\nb: |\n  x {number} x\nc: 0x{10**30:x}\n"
        f"d: ' {number} '\ne: 0{number}\nf: *a\n"
    )
    assert _decoded(text) == {
        "a": 1e30,
        number: f"é {number} é",
        "b": f"x {number} x\n",
        "c": 1e30,
        "d": f" {number} ",
        "e": f"0{number}",
        "f": 1e30,
    }
    with pytest.raises(DocumentError, match=r"^not YAML: while parsing"):
        _decoded(f"a: [{number}\n")


def test_merge_keys_are_merged_and_aliases_followed() -> None:
    text = "base: &b {x: 1, y: 1}\nmore: &m {y: 2, z: 2}\nall: {<<: [*b, *m], x: 0}\nsame: *b\n"
    decoded = _decoded(text)
    assert decoded["all"] == {"x": 0, "y": 1, "z": 2}
    assert decoded["same"] == {"x": 1, "y": 1}


def _laughs() -> str:
    lines = ["a: &a [" + ",".join(["x"] * 9) + "]"]
    for one, two in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{two}: &{two} [" + ",".join([f"*{one}"] * 9) + "]")
    return "\n".join(lines)


@pytest.mark.requirement("R29")
@pytest.mark.parametrize(
    "text",
    [
        _laughs(),
        _laughs().replace("[*", "[{<<: {k: *").replace(",*", "}},{<<: {k: *").replace("]", "}}]"),
        "a: 1\na: 2",
        "a: &a [*a]",
        "a: *nobody",
        "[" * 100_000,
        "{" * 100_000,
        "- " * 5000,
        "? [a]\n: b",
        "a: .nan",
        "--- a\n--- b",
        "a: 'x",
        "a: \0",
        b"\xff\xff\xff",
    ],
    ids=range(14),
)
def test_a_file_that_is_not_a_document_is_rejected(text: str | bytes) -> None:
    with pytest.raises(DocumentError):
        _decoded(text)


def _merges(levels: int) -> str:
    lines = ["m0: &m0 {" + ", ".join(f"k{n}: 1" for n in range(1_000)) + "}"]
    lines += [
        f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 10)}], z{level}: 1}}"
        for level in range(1, levels)
    ]
    return "\n".join(lines)


@pytest.mark.requirement("R29", "R18")
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [" + "1," * 20_000 + "]\nb: [" + "*a," * 1_000 + "]",
        "a: &a {" + ",".join(f"k{n}: 1" for n in range(20_000)) + "}\nb: [" + "*a," * 1_000 + "]",
        _merges(8),
        "".join(f"%TAG !e{n}! tag:example.com,2000:\n" for n in range(40_000)) + "---\na: 1",
        "a: " + "[" * 50_000,
        "a: " + '[{"b]}": ' * 50_000,
    ],
    ids=[
        "aliases of a list",
        "aliases of a mapping",
        "merge keys",
        "directives",
        "nested lists",
        "nested mappings",
    ],
)
def test_a_document_that_takes_long_or_expands_too_much_is_rejected_before(text: str) -> None:
    # Otherwise each takes many seconds, in which no other thread runs, or more than a gigabyte.
    with processor_limit(2), pytest.raises(DocumentError):
        _decoded(text)


@pytest.mark.requirement("R29")
def test_aliases_and_flow_style_within_the_limits_are_read() -> None:
    text = "a: &a [1, &b {x: 2}]\nb: *a\nc: *b\n" + "".join(
        f"k{n}: {{x: [{n}], y: *a}}\n" for n in range(2_000)
    )
    decoded = _decoded(text)
    assert decoded["b"] == [1, {"x": 2}]
    assert decoded["c"] == {"x": 2}
    assert decoded["k1999"] == {"x": [1999], "y": [1, {"x": 2}]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks_determine_the_encoding(encoding: str) -> None:
    assert decode_document('{"a": "é"}'.encode(encoding)) == {"a": "é"}
    if encoding != "utf-8":
        assert decode_document("a: é".encode(encoding)) == {"a": "é"}


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("content", [b" " * 101, "é" * 51], ids=type)
async def test_the_size_of_a_document_is_limited(content: str | bytes) -> None:
    config = HTTPServiceConfig(namespace="api", max_document_bytes=100)
    with pytest.raises(DocumentError, match="larger than 100 bytes"):
        await from_openapi_file("api.json", config, read=lambda _: content)


@pytest.mark.requirement("R13")
@settings(deadline=None)
@given(text=st.text())
def test_any_text_is_read_or_rejected(text: str) -> None:
    with contextlib.suppress(DocumentError):
        _decoded(text)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["#/paths", "#/components/x", "array", "object"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["$ref", "paths", "/x", "get", "post", "parameters", "name", "in", "schema", "type", "properties", "items",
             "responses", "200", "default", "content", "application/json", "requestBody", "components", "schemas",
             "allOf", "enum", "required", "servers", "url", "security", "tags", "operationId", "$defs", "nullable"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=25,
)  # fmt: skip


@pytest.mark.requirement("R13")
@settings(deadline=None)
@given(paths=JSON, components=JSON, swagger=st.booleans())
def test_any_document_imports_or_is_rejected(paths: Any, components: Any, swagger: bool) -> None:
    version = {"swagger": "2.0"} if swagger else {"openapi": "3.0.0"}
    doc = {**version, "paths": {"/{a}/b": paths, "/c": {"get": paths}}, "components": components}
    for operation in from_openapi(doc, CONFIG):
        spec = operation.spec
        for schema in (
            spec.input_schema,
            spec.output_schema,
            *(e.schema for e in spec.error_schemas),
        ):
            # A fault in a document is found on first use, and is a CallError then.
            with contextlib.suppress(CallError):
                assert isinstance(schema.document, (dict, bool))


@pytest.mark.parametrize("text", ["petstore.yaml", Path("petstore.yaml"), b"{}"])
def test_an_undecoded_document_raises_with_advice(text: Any) -> None:
    with pytest.raises(DocumentError, match="from_openapi_file"):
        from_openapi(text, CONFIG)


async def test_a_path_instead_of_an_address_raises_with_advice() -> None:
    with pytest.raises(DocumentError, match="name the file"):
        await from_openapi_url("petstore.yaml", CONFIG)


async def test_an_invalid_credential_raises_a_value_error() -> None:
    credentials: Any = {"login": ("name", "password", "more")}
    config = HTTPServiceConfig(namespace="shop", credentials=credentials)
    with pytest.raises(ValueError, match="a login is a pair"):
        await from_openapi_url("http://127.0.0.1:1/openapi.json", config)


def test_a_document_without_paths_is_reported() -> None:
    service = from_openapi({"asyncapi": "2.0"}, CONFIG)
    assert "is it an OpenAPI document?" in service.problems[0].reason


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ({"openapi": "4.0.0"}, ["its version '4.0.0' is not known; read as 3.2"]),
        ({"openapi": "30.1"}, ["its version '30.1' is not known; read as 3.2"]),
        ({"openapi": ["3.1"]}, ["its version ['3.1'] is not known; read as 3.2"]),
        ({"swagger": "1.2"}, ["its version '1.2' is not known; read as 2.0"]),
        ({}, ["it names no version; read as 3.0"]),
        ({"host": "a.example"}, ["it names no version; read as 2.0"]),
        ({"openapi": "3.2.1-rc"}, []),
        ({"openapi": 3.1}, []),
        ({"swagger": 2}, []),
    ],
)
def test_an_unknown_version_is_reported(version: dict[str, Any], expected: list[str]) -> None:
    operation = {"operationId": "find", "responses": {"200": {"description": "ok"}}}
    service = from_openapi({**version, "paths": {"/items": {"get": operation}}}, CONFIG)
    assert [each.spec.id for each in service] == ["api.find"]
    assert [problem.reason for problem in service.problems] == expected


@pytest.mark.parametrize("whole", [None, [], "text", 7])
def test_a_value_that_is_not_an_object_is_not_a_description(whole: Any) -> None:
    with pytest.raises(DocumentError):
        from_openapi(whole, CONFIG)


# ---- several files


@pytest.fixture
def folder(tmp_path: Path, echo: Echo) -> Path:
    """A document with allowed and forbidden references."""
    inside = tmp_path / "api"
    (inside / "parts").mkdir(parents=True)
    (tmp_path / "secret.json").write_text('{"type": "string", "const": "CANARY"}')
    (inside / "linked.json").symlink_to(tmp_path / "secret.json")
    refs = {
        "inside": "parts/thing.yaml",
        "fragment": "parts/more.json#/defs/a~1b",
        "outside": "../secret.json",
        "absolute": str(tmp_path / "secret.json"),
        "file": f"file://{tmp_path}/secret.json",
        "link": "linked.json",
        "encoded": "%2e%2e/secret.json",
        "remote": f"{echo.url}/schema.json",
        "missing": "nowhere.json",
    }
    schema = {"type": "object", "properties": {name: {"$ref": ref} for name, ref in refs.items()}}
    body = {"content": {"application/json": {"schema": schema}}}
    doc = document("/thing", "post", requestBody=body)
    doc["paths"]["/item"] = {"$ref": "parts/path.yaml"}
    (inside / "openapi.json").write_text(json.dumps(doc))
    (inside / "parts" / "thing.yaml").write_text(
        "type: object\nproperties:\n  up: {$ref: 'more.json#/defs/root'}\n"
    )
    (inside / "parts" / "more.json").write_text(
        json.dumps(
            {
                "defs": {
                    "a/b": {"type": "integer"},
                    "root": {"$ref": "#/defs/self"},
                    "self": {"type": "boolean"},
                }
            }
        )
    )
    (inside / "parts" / "path.yaml").write_text("get: {operationId: item, responses: {}}\n")
    return inside / "openapi.json"


@pytest.mark.requirement("R04")
async def test_references_reach_the_documents_folder_and_nothing_else(
    folder: Path, echo: Echo
) -> None:
    echo.seen.clear()
    service = await from_openapi_file(folder, CONFIG)

    specs = {operation.spec.name: operation.spec for operation in service}
    assert specs.keys() == {"call", "item"}
    schema: Any = specs["call"].input_schema.document
    assert "CANARY" not in json.dumps(schema)
    properties = schema["properties"]["body"]["properties"]
    found = {name for name, value in properties.items() if value != {}}
    assert found == {"inside", "fragment"}
    names = {kind.get("type") for kind in schema["$defs"].values()}
    assert names == {"object", "integer", "boolean", None}
    assert echo.seen == []


@pytest.mark.requirement("R04")
def test_importing_a_decoded_document_reads_nothing(folder: Path, echo: Echo) -> None:
    echo.seen.clear()
    (operation,) = from_openapi(json.loads(folder.read_bytes()), CONFIG)
    schema: Any = operation.spec.input_schema.document
    assert set(map(str, schema["properties"]["body"]["properties"].values())) == {"{}"}
    assert echo.seen == []


async def test_files_can_be_read_by_something_else(tmp_path: Path) -> None:
    files = {
        "virtual/openapi.yaml": "openapi: 3.1.0\npaths:\n  /a: {$ref: 'paths/a.yaml'}\n",
        "virtual/paths/a.yaml": "get: {operationId: a, responses: {}}\n",
    }
    requested: list[str] = []

    async def read(path: str) -> str:
        requested.append(path)
        return files[path]

    service = await from_openapi_file("virtual/openapi.yaml", CONFIG, read=read)
    assert [operation.spec.name for operation in service] == ["a"]
    assert requested == list(files)


BAD = [
    ("openapi: [", "not YAML: "),
    ("a: 1\na: 2\n", 'duplicate entry with key "a"'),
    ("a: .nan", "not a JSON number"),
    ("a: *b", "unknown alias|not YAML"),
    ("- 1", "the document must be an object"),
    ("just words", "the document must be an object"),
    ("{", "not YAML"),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[text for text, _ in BAD])
async def test_faults_of_a_document_are_reported_with_its_name(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text(text)

    async def respond(request: web.Request) -> web.Response:
        return web.Response(text=text)

    with pytest.raises(DocumentError, match=f"^{path}: .*({words})"):
        await from_openapi_file(path, CONFIG)
    async with serving(respond) as url:
        with pytest.raises(DocumentError, match=f"^{url}/shop.yaml: .*({words})") as caught:
            await from_openapi_url(f"{url}/shop.yaml?key=CANARY", CONFIG)
    assert "CANARY" not in str(caught.value)


async def test_a_missing_file_is_a_document_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="cannot be read"):
        await from_openapi_file(tmp_path / "none.json", CONFIG)


@pytest.mark.requirement("R04")
async def test_a_document_at_an_address_reaches_its_own_folder_only(echo: Echo) -> None:
    echo.seen.clear()
    requested: list[str] = []
    refs = [
        "b.json",
        "/api/sub/c.json",
        "../out.json",
        "/out.json",
        f"{echo.url}/x.json",
        "sub/../../out.json",
    ]
    schema = {"properties": {str(index): {"$ref": ref} for index, ref in enumerate(refs)}}
    doc = document("/t", "post", requestBody={"content": {"application/json": {"schema": schema}}})

    async def respond(request: web.Request) -> web.Response:
        requested.append(request.path)
        if request.path == "/api/openapi.json":
            return web.json_response(doc)
        if request.path.startswith("/api/"):
            return web.json_response({"type": "string"})
        return web.json_response({"origin": request.headers.get("Authorization")})

    auth = {"type": "bearer", "token": "T"}
    async with serving(respond) as url:
        config = HTTPServiceConfig(namespace="api", auth=auth)
        async with await from_openapi_url(f"{url}/api/openapi.json", config) as service:
            (operation,) = service
            found: Any = operation.spec.input_schema.document
            # No server is named: calls go to the document's own origin, which may have credentials.
            answer = await OperationRegistry([operation]).execute("api.call", {"body": {}})

    assert sorted(requested) == ["/api/b.json", "/api/openapi.json", "/api/sub/c.json", "/t"]
    assert len(found["$defs"]) == 2
    assert echo.seen == []
    assert answer.data == {"origin": "Bearer T"}


@pytest.mark.parametrize("is_signed", [False, True])
async def test_documents_are_fetched_with_credentials_only_if_enabled(is_signed: bool) -> None:
    doc = document()
    doc["paths"]["/more"] = {"$ref": "more.json"}
    more = {"get": {"operationId": "more", "responses": {}}}
    sent: list[tuple[str | None, str | None]] = []

    async def respond(request: web.Request) -> web.Response:
        sent.append((request.headers.get("Authorization"), request.headers.get("X-Team")))
        return web.json_response(doc if request.path == "/openapi.json" else more)

    config = HTTPServiceConfig(
        namespace="api",
        auth={"type": "bearer", "token": "T"},
        headers={"X-Team": "shop"},
        sign_documents=is_signed,
    )
    async with serving(respond) as url:
        service = await from_openapi_url(f"{url}/openapi.json", config)
    assert [operation.spec.name for operation in service] == ["call", "more"]
    assert sent == [("Bearer T", "shop") if is_signed else (None, None)] * 2


async def test_a_document_may_be_compressed() -> None:
    async def respond(request: web.Request) -> web.Response:
        response = web.json_response(document())
        response.enable_compression()
        return response

    async with serving(respond) as url:
        (operation,) = await from_openapi_url(f"{url}/openapi.json", CONFIG)
    assert operation.spec.name == "call"


async def test_a_credential_that_cannot_be_obtained_is_a_document_error() -> None:
    def token(context: Any) -> str:
        raise OSError("CANARY")

    config = HTTPServiceConfig(
        namespace="api", auth={"type": "bearer", "token": token}, sign_documents=True
    )
    with pytest.raises(DocumentError, match="cannot be fetched: The credential") as caught:
        await from_openapi_url("http://127.0.0.1:1/openapi.json", config)
    assert "CANARY" not in str(caught.value)


async def test_an_address_without_a_document_is_a_document_error(
    echo: Echo, unused_port: int
) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=404)

    async with serving(respond) as url:
        with pytest.raises(DocumentError, match="404"):
            await from_openapi_url(f"{url}/openapi.json", CONFIG)
    with pytest.raises(DocumentError, match="cannot be fetched"):
        await from_openapi_url(f"http://127.0.0.1:{unused_port}/openapi.json", CONFIG)


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("status", [404, 302])
async def test_the_address_of_a_document_is_reported_without_its_secrets(status: int) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/there?key=CANARY"})

    async with serving(respond) as url:
        with pytest.raises(DocumentError) as caught:
            await from_openapi_url(f"{url}/openapi.json?api_key=CANARY", CONFIG)

    assert f"{url}/openapi.json " in str(caught.value)
    assert "CANARY" not in str(caught.value)
