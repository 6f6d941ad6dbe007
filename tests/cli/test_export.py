"""`operations export`: documents, tools, a typed client, and a report of losses."""

import ast
import asyncio
import builtins
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli.conftest import Ran
from tests.conftest import PROJECT
from tests.limits import scaled

import operations
from operations import (
    AccessControl,
    CallError,
    ErrorDefinition,
    Identity,
    OperationRegistry,
    OperationSpec,
    OperationType,
)
from operations.agents import provider_tools
from operations.agents.formats.kinds import BUILT_IN
from operations.base.text import tool_name
from operations.cli.export import BLOCKING, client_runtime, mcp_tools, python_client
from operations.openapi import HTTPServiceConfig, from_openapi_file
from operations.schema.outline import Outline
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running

Run = Callable[..., Ran]
DOCUMENTS = PROJECT.parent / "shared" / "openapi"


def spec(name: str, schema: Any, **fields: Any) -> OperationSpec:
    return OperationSpec(
        namespace="a",
        name=name,
        type=fields.pop("type", OperationType.QUERY),
        input_schema=schema,
        **fields,
    )


def test_an_openapi_document_has_a_path_per_operation(run: Run) -> None:
    ran = run("export", "openapi", "work.add", "work.s*")

    assert ran.code == 0
    assert ran.json["openapi"].startswith("3.1")
    names = ("add", "secret", "ship", "slow", "steps")
    assert set(ran.json["paths"]) == {f"/work/{name}" for name in names}


def test_mcp_tools_are_those_of_the_mcp_server(run: Run) -> None:
    (tool,) = run("export", "mcp", "work.add").json["tools"]

    assert tool["name"] == "work__add"
    assert tool["inputSchema"]["properties"]["a"]["type"] == "integer"


@pytest.mark.parametrize(
    ("provider", "path"),
    [
        ("openai", ["function", "parameters"]),
        ("anthropic", ["input_schema"]),
        ("gemini", ["parameters"]),
    ],
)
def test_tools_have_the_shape_of_their_provider(run: Run, provider: str, path: list[str]) -> None:
    answer = run("export", provider, "work.ship", "work.count", "--json").json

    (tool,) = answer["result"]
    for key in path:
        tool = tool[key]
    assert tool["type"] == "object"
    assert tool["required"] == ["to", "size", "notes"]
    lost = {(loss["operationId"], loss["place"]) for loss in answer["losses"]}
    assert ("work.count", "type") in lost


def test_losses_are_reported_beside_the_result(run: Run) -> None:
    ran = run("export", "openai", "work.add", "work.count")

    assert ran.json[0]["function"]["name"] == "work__add"
    assert "work.count type: is a subscription" in ran.err


def test_omitted_operations_are_listed_before_other_losses(run: Run) -> None:
    reports = run("export", "openai").err.splitlines()
    kinds = ["omitted" in line for line in reports]

    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count(True) == 2, "the subscriptions"

    many = [spec(f"n{number:03}", {"type": "object"}) for number in range(130)]
    tools, losses = provider_tools(many, "openai")
    assert len(tools) == 128
    assert [loss.operation_id for loss in losses] == ["a.n128", "a.n129"]


def test_a_requested_operation_must_exist(run: Run) -> None:
    ran = run("export", "openai", "work.ad")

    assert ran.code == 4
    assert 'Did you mean "work.add"?' in ran.err


def test_an_input_that_is_not_an_object_becomes_an_argument() -> None:
    (tool,), losses = provider_tools([spec("x", {"type": "string"})], "anthropic")

    assert tool["input_schema"]["properties"] == {"input": {"type": "string"}}
    assert [loss.what for loss in losses if loss.place == "/"] == [
        "is not an object: the value is the argument `input`"
    ]


def test_the_root_of_a_tool_has_no_alternatives() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}

    (tool,), losses = provider_tools([spec("x", schema)], "openai")

    assert "anyOf" not in tool["function"]["parameters"]
    assert "/anyOf" in [loss.place for loss in losses]


def test_gemini_gets_no_references_and_no_keyword_it_does_not_know() -> None:
    schema = {
        "type": "object",
        "properties": {
            "node": {"$ref": "#/$defs/Node"},
            "kind": {"oneOf": [{"const": "a"}, {"const": "b"}]},
            "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
            "maybe": {"type": ["string", "null"], "format": "uri"},
            "level": {"enum": [1, 2]},
            "size": {"type": "integer", "exclusiveMinimum": 0},
        },
        "$defs": {
            "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "name": {"type": "string"}}}
        },
    }  # fmt: skip

    (tool,), losses = provider_tools([spec("x", schema)], "gemini")

    found = tool["parameters"]["properties"]
    assert "$ref" not in json.dumps(tool)
    assert found["kind"] == {"type": "string", "enum": ["a", "b"]}
    assert found["either"] == {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    assert found["maybe"] == {"type": "string", "nullable": True}
    assert found["node"]["properties"]["name"] == {"type": "string"}
    assert {loss.place for loss in losses} == {
        "/properties/node/properties/next",
        "/properties/either/oneOf",
        "/properties/maybe/format",
        "/properties/level/enum",
        "/properties/size/exclusiveMinimum",
    }


def test_every_provider_gets_the_same_names() -> None:
    specs = [spec("b", {}), spec("b__c", {}), spec("x" * 100, {})]
    exported = {
        provider: [
            (tool.get("function") or tool)["name"] for tool in provider_tools(specs, provider)[0]
        ]
        for provider in BUILT_IN
    }

    names = [tool_name(each.id) for each in specs]
    assert names[0] == "a__b"
    assert exported == dict.fromkeys(BUILT_IN, names)
    assert [tool["name"] for tool in mcp_tools(specs, OperationRegistry())] == names


def loaded(path: Path, source: str) -> Any:
    path.write_text(source)
    found = spec_from_file_location("generated_client", path)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    # Dataclasses and typed dicts look their own module up.
    sys.modules["generated_client"] = module
    found.loader.exec_module(module)
    return module


async def test_the_python_client_calls_the_http_server(
    tmp_path: Path, registry: OperationRegistry
) -> None:
    @registry.operation("shop.get-item", type="query")
    async def get_item(id: int, verbose: bool = False) -> dict[str, int | bool]:
        return {"id": id, "verbose": verbose}

    @registry.operation("shop.watch")
    async def watch(count: int = 2) -> Any:
        for number in range(count):
            yield number

    @registry.operation("shop.close", scopes=["boss"], errors=[ErrorDefinition("CLOSED")])
    async def close() -> bytes:
        return b"\x00\xff"

    app = create_app(registry, identity=APIKeys({hash_key("k3y"): Identity("ann", ["boss"])}))
    client = loaded(tmp_path / "client.py", python_client(registry.specs()))
    assert {"ACCESS_DENIED", "CLOSED"} <= set(get_args(get_args(client.ErrorCode)[0]))
    async with running(app) as url:
        async with client.Client(url) as hub:
            assert await hub.shop.get_item(id=3) == {"id": 3, "verbose": False}
            assert [item async for item in hub.shop.watch(count=3)] == [0, 1, 2]
            with pytest.raises(client.OperationError) as denied:
                await hub.shop.close()
            with pytest.raises(client.OperationError) as invalid:
                await hub.shop.get_item(id="x")
        async with client.Client(url, key="k3y") as hub:
            assert await hub.shop.close() == b"\x00\xff"
    async with client.Client(url) as hub:
        with pytest.raises(client.OperationError) as away:
            await hub.shop.get_item(id=3)
        with pytest.raises(client.OperationError):
            await anext(hub.shop.watch(count=3))
    assert away.value.code == "UNAVAILABLE"
    assert denied.value.code == "OPERATION_NOT_FOUND"
    assert invalid.value.code == "VALIDATION_ERROR"


async def test_the_blocking_client_calls_a_hub_and_a_registry(
    tmp_path: Path, registry: OperationRegistry
) -> None:
    @registry.operation("shop.get-item", type="query")
    async def get_item(id: int, verbose: bool = False) -> dict[str, int | bool]:
        return {"id": id, "verbose": verbose}

    @registry.operation("shop.watch")
    async def watch(count: int = 2) -> Any:
        for number in range(count):
            yield number

    @registry.operation("shop.close", scopes=["boss"])
    async def close() -> bytes:
        return b"\x00\xff"

    source = python_client(registry.specs(), style=BLOCKING)
    assert "await" not in source.partition('"""\n')[2]
    client = loaded(tmp_path / "client.py", source)

    def use(hub: Any) -> list[Any]:
        return [hub.shop.get_item(id=3, verbose=True), list(hub.shop.watch(count=3))]

    expected = [{"id": 3, "verbose": True}, [0, 1, 2]]
    assert await asyncio.to_thread(use, client.Client(registry)) == expected
    app = create_app(registry, identity=APIKeys({hash_key("k3y"): Identity("ann", ["boss"])}))
    async with running(app) as url:
        async with operations.connect(url) as hub:
            assert await asyncio.to_thread(use, client.Client(hub)) == expected
            with pytest.raises(CallError, match="OPERATION_NOT_FOUND"):
                await asyncio.to_thread(client.Client(hub).shop.close)
        async with operations.connect(url, token="k3y") as hub:
            assert await asyncio.to_thread(client.Client(hub).shop.close) == b"\x00\xff"


def test_a_client_without_await_is_one_in_python(run: Run) -> None:
    assert "class Client:" in run("export", "python", "--sync").out
    assert "--sync is for" in run("export", "openapi", "--sync").err


async def spotify() -> list[OperationSpec]:
    document = DOCUMENTS / "spotify__official.yaml"
    async with await from_openapi_file(document, HTTPServiceConfig(namespace="music")) as service:
        return [operation.spec for operation in service]


def test_the_python_client_has_a_class_once_however_many_operations_share_it() -> None:
    def holding(kind: str) -> dict[str, Any]:
        money = {"type": "object", "properties": {"amount": {"type": kind}}}
        return {"properties": {"price": {"$ref": "#/$defs/Money"}}, "$defs": {"Money": money}}

    specs = [spec(f"n{index}", {}, output_schema=holding("integer")) for index in range(20)]
    source = python_client([*specs, spec("other", {}, output_schema=holding("string"))])

    assert source.count('amount: "NotRequired[int]"') == 1
    assert source.count('amount: "NotRequired[str]"') == 1


def test_the_python_client_has_one_class_for_a_type_and_its_definition() -> None:
    node = {
        "title": "Node",
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/Node"}},
    }
    source = python_client([spec("n", {}, output_schema={**node, "$defs": {"Node": node}})])

    assert source.count('next: "NotRequired[Node]"') == 1
    assert 'def n(self, input: "Any" = None) -> "Node":' in source


def test_methods_of_the_python_client_do_not_hide_the_types_of_others() -> None:
    integers = {"type": "array", "items": {"type": "integer"}}
    kind = {"properties": {"kind": {"enum": ["list"]}}}
    specs = [spec("int", {}), spec("list", kind), spec("of", {}, output_schema=integers)]

    source = python_client(specs)

    assert 'def of(self, input: "Any" = None) -> "builtins.list[builtins.int]":' in source
    assert "kind: \"Literal['list'] | str | Unset\"" in source
    assert "\nimport builtins\n" in source
    assert "builtins" not in python_client(specs[2:])


def test_bytes_are_bytes_in_the_python_client() -> None:
    file = {"type": "string", "contentEncoding": "base64"}

    assert '-> "bytes":' in python_client([spec("file", {}, output_schema=file)])


def test_the_python_client_separates_types_of_the_same_name() -> None:
    def at_home(**home: str) -> dict[str, Any]:
        properties = {name: {"type": kind} for name, kind in home.items()}
        return {
            "properties": {
                "home": {"type": "object", "properties": properties},
                "work": {"$ref": "#/properties/home"},
                "note": {"$ref": "#/$defs/Note"},
            },
            "$defs": {"Note": {"type": "string"}},
        }

    people = spec("people", {}, output_schema=at_home(street="string"))
    routers = spec("routers", {}, output_schema=at_home(ip="string", port="integer"))
    source = python_client([people, routers])

    assert source.count("port: ") == 2  # the home address and the work address


@pytest.mark.skipif(not DOCUMENTS.exists(), reason="the shared documents are not here")
async def test_the_python_client_of_a_large_api_is_no_larger_than_its_document(
    tmp_path: Path,
) -> None:
    document = DOCUMENTS / "stripe__spec3-2021-06-07.json"
    service = await from_openapi_file(document, HTTPServiceConfig(namespace="stripe"))
    source = python_client([operation.spec for operation in service])

    assert len(source) < document.stat().st_size
    assert loaded(tmp_path / "client.py", source).Client


ATTACK = 'x" + str(__import__("os").system("touch owned")) + "'
_TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [ATTACK, "'\"", '"""', "\\", "\n", "\r\x00", "\ud800", "\u2028", "ﬁ", "__x", "__debug__"]
    ),
    st.sampled_from(
        ["None", "class", "given", "cast", "UNSET", "self", "Any", "Client", "TypedDict", "keys"]
    ),
)
_CLASSES = st.sampled_from(
    ["none", "Any", "Client", "TypedDict", "Connection", "TimeoutError", "N0Namespace", "Pet"]
)
_VALUES = st.one_of(_TEXT, st.none(), st.booleans(), st.integers(), st.just(10**4000))
_SCHEMAS = st.recursive(
    st.one_of(
        st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=3)),
        st.builds(lambda value: {"const": value}, _VALUES),
        st.sampled_from([{"type": "string"}, {"type": ["integer", "null"]}, {}, {"type": "array"}]),
    ),
    lambda inner: st.one_of(
        st.builds(lambda schema: {"type": "array", "items": schema}, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda named, required, text: {
                "type": "object",
                "properties": named,
                "required": sorted(set(named))[: int(required)],
                "description": text,
            },
            st.dictionaries(_TEXT, inner, max_size=3),
            st.booleans(),
            _TEXT,
        ),
    ),
    max_leaves=6,
)


@pytest.mark.requirement("R59")
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(_CLASSES, _TEXT, _TEXT, _SCHEMAS, _SCHEMAS), min_size=1, max_size=3))
def test_third_party_text_in_a_python_client_is_never_code(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, str, str, Any, Any]]
) -> None:
    specs = [
        OperationSpec(
            namespace=f"n{number}",
            name=f"op.{number}",
            title=title,
            description=text,
            type=OperationType.SUBSCRIPTION if number else OperationType.QUERY,
            input_schema=cast(
                "Any", {"$defs": {definition: taken}, "$ref": f"#/$defs/{definition}"}
            ),
            output_schema=result,
        )
        for number, (definition, title, text, taken, result) in enumerate(parts)
    ]
    source = python_client(specs)
    tree = ast.parse(source.encode("utf-8"))

    written = tree.body[1 + len(ast.parse(client_runtime()).body) :]
    defined = {node.name for node in written if isinstance(node, ast.ClassDef)}
    defined |= {node.targets[0].id for node in written if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    assert not defined & set(dir(builtins))
    for top in written:
        for node in ast.walk(top):
            for quoted in annotations_of(node):
                enforce_only_types(quoted, defined)
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) in CALLED | defined
    module = loaded(tmp_path_factory.mktemp("client") / "client.py", source)
    for name in defined:
        get_type_hints(getattr(module, name))


CALLED = {
    "TypedDict", "given", "cast", "super", "super().__init__", "self._connection.call", "self._connection.subscribe",
}  # fmt: skip


ALLOWED = {
    "Expression",
    "Name",
    "Subscript",
    "Tuple",
    "BinOp",
    "BitOr",
    "Load",
    "Constant",
    "UnaryOp",
    "USub",
}


def annotations_of(node: ast.AST) -> Iterator[str]:
    """Yield the text of each quoted annotation at a node."""
    quoted: list[ast.expr | None] = []
    if isinstance(node, (ast.AnnAssign, ast.arg)):
        quoted = [node.annotation]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        quoted = [node.returns]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
        quoted = [node.args[0]]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "TypedDict":
        assert isinstance(node.args[1], ast.Dict)
        quoted = list(node.args[1].values)
    yield from (each.value for each in quoted if isinstance(each, ast.Constant) and each.value)  # type: ignore[misc]


def enforce_only_types(text: str, defined: set[str]) -> None:
    """Fail unless an annotation consists of names of types, brackets, unions and literals."""
    known = defined | {"str", "int", "float", "bool", "list", "dict"}
    known |= {"Any", "Literal", "NotRequired", "Unset", "AsyncIterator"}
    for node in ast.walk(ast.parse(text, mode="eval")):
        assert type(node).__name__ in ALLOWED, text
        if isinstance(node, ast.Name):
            assert node.id in known, text


@pytest.mark.requirement("R59")
def test_definitions_with_billions_of_paths_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.schema.outline._MAX_PLACES", 1_000)
    definitions: dict[str, Any] = {"A30": {"type": "string"}}
    for number in range(30):
        inner = {"$ref": f"#/$defs/A{number + 1}"}
        definitions[f"A{number}"] = {
            "anyOf": [{"type": "array", "items": inner}, {"properties": {"x": inner, "y": inner}}]
        }
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A0"}}, "$defs": definitions}
    hostile = spec("x", schema, output_schema=schema)

    compile(python_client([hostile]), "client.py", "exec")
    assert provider_tools([hostile], "gemini")
    assert Outline.of(hostile.input_schema).properties["a"].kind


@pytest.mark.requirement("R59")
def test_an_attack_in_an_enum_does_not_run_on_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": [ATTACK]}, "a-b": {"const": ATTACK}},
    }
    attacked = spec("x", schema, output_schema=schema, description=ATTACK + '\\"""')

    module = loaded(tmp_path / "client.py", python_client([attacked]))

    assert get_type_hints(module.AXOutput)["kind"] == Literal[ATTACK] | str
    assert not (tmp_path / "owned").exists()


def test_a_parameter_does_not_hide_the_type_of_the_result() -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    tree = {"$ref": "#/$defs/Tree", "$defs": {"Tree": {"type": "object", "properties": {"a": {}}}}}
    source = python_client(
        [
            spec("a", {"type": "object", "properties": {"list": {}}}, output_schema=numbers),
            spec("b", {"type": "object", "properties": {"Tree": {}}}, output_schema=tree),
        ]
    )

    # mypy looks for the type in the method, where the parameter is.
    assert 'cast("builtins.list[int]", ' in source
    assert 'def b(self, input: "ABInput | None" = None) -> "Tree":' in source


@pytest.mark.slow
def test_the_python_client_is_clean_under_pyright_strict(tmp_path: Path) -> None:
    recursive = {
        "type": "object",
        "required": ["children"],
        "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}, "a-b": {"enum": ["x", 1]}},
        "$defs": {"Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}}},
    }  # fmt: skip
    specs = [
        spec("tree", recursive, output_schema=recursive, description='Says """ and \\n.'),
        spec("class", {"type": "string"}, access_control=AccessControl(["x"])),
        spec("any", {}),
        spec("watch.it", {"type": "object", "properties": {"self": {"type": "null"}}}, type=OperationType.SUBSCRIPTION),
    ]  # fmt: skip
    if DOCUMENTS.exists():
        specs += asyncio.run(spotify())
    (tmp_path / "client.py").write_text(python_client(specs))
    (tmp_path / "blocking.py").write_text(python_client(specs, style=BLOCKING))
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps(
            {
                "typeCheckingMode": "strict",
                "venvPath": str(PROJECT),
                "venv": ".venv",
                "include": ["client.py", "blocking.py"],
            }
        )
    )

    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "-p", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=scaled(200),
        check=False,
    )

    assert "0 errors, 0 warnings" in checked.stdout, checked.stdout[-3000:]
