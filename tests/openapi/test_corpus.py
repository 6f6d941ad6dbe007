"""Every real document imports: nothing missing, every schema valid and whole, names safe, in time."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.limits import processor_limit

from operations import OperationRegistry
from operations.openapi import HTTPServiceConfig, OpenAPIService, from_openapi_file

SHARED = Path(__file__).parents[3] / "shared"
INDEX: dict[str, int] = (
    {e["file"]: e["operations"] for e in json.loads((SHARED / "openapi-index.json").read_bytes())}
    if (SHARED / "openapi-index.json").exists()
    else {}
)
BATCHES = 40
NAME = re.compile(r"[A-Za-z0-9_.-]+")
CONFIG = HTTPServiceConfig(namespace="api")
DATA = frozenset({"default", "enum", "const", "examples"})

needs_documents = pytest.mark.skipif(not INDEX, reason="the shared documents are not here")


@cache
def metaschema() -> Any:
    return jsonschema_rs.Draft202012Validator(
        {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    )


class Examined:
    """Checks schemas; each shared definition is checked once."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[Any, frozenset[str]]] = {}

    def judge(self, schema: Any) -> None:
        if isinstance(schema, bool):
            return
        definitions = schema.get("$defs", {})
        rest = {key: value for key, value in schema.items() if key != "$defs"}
        for part in (rest, *definitions.values()):
            assert self._references(part) <= definitions.keys()

    def _references(self, part: Any) -> frozenset[str]:
        known = self._refs.get(id(part))
        if known is None:
            assert metaschema().is_valid(part), next(metaschema().iter_errors(part)).message
            names: set[str] = set()
            stack = [part]
            while stack:
                node = stack.pop()
                if isinstance(node, dict):
                    ref = node.get("$ref")
                    if isinstance(ref, str):
                        assert ref.startswith("#/$defs/"), ref
                        names.add(ref.removeprefix("#/$defs/"))
                    stack.extend(value for key, value in node.items() if key not in DATA)
                elif isinstance(node, list):
                    stack.extend(node)
            known = self._refs[id(part)] = (part, frozenset(names))
        return known[1]


def judge(service: OpenAPIService, expected: int) -> None:
    skipped = sum(problem.is_skipped for problem in service.problems)
    # A response that can be a stream or something else has two operations.
    described = {(o.spec.meta["method"], o.spec.meta["path"]) for o in service}
    assert (len(described), skipped) == (expected, 0)
    names = [operation.spec.name for operation in service]
    assert len(set(names)) == len(names)
    assert all(NAME.fullmatch(name) for name in names)
    examined = Examined()
    for operation in service:
        spec = operation.spec
        examined.judge(spec.input_schema.document)
        examined.judge(spec.output_schema.document)
        for error in spec.error_schemas:
            examined.judge(error.schema.document)


LARGEST = "npmdir__microsoft.com-graph.json"
"""Takes as long as all others together; `benchmarks/openapi.py` imports it."""


@needs_documents
@pytest.mark.parametrize("batch", range(BATCHES))
async def test_every_document_imports_whole(batch: int) -> None:
    for name in sorted(INDEX.keys() - {LARGEST})[batch::BATCHES]:
        with processor_limit(40):
            service = await from_openapi_file(SHARED / "openapi" / name, CONFIG)
            OperationRegistry().register_all(service)
        judge(service, INDEX[name])


@needs_documents
@pytest.mark.parametrize("name", [name for name in sorted(INDEX) if name.endswith(".json")][::20])
async def test_names_do_not_depend_on_the_order_of_a_document(name: str) -> None:
    service = await from_openapi_file(SHARED / "openapi" / name, CONFIG)

    def turned(path: str) -> bytes:
        document = json.loads(Path(path).read_bytes())
        document["paths"] = dict(reversed(document["paths"].items()))
        return json.dumps(document).encode()

    again = await from_openapi_file(SHARED / "openapi" / name, CONFIG, read=turned)
    places = {(o.spec.meta["method"], o.spec.meta["path"]): o.spec.name for o in service}
    assert places == {(o.spec.meta["method"], o.spec.meta["path"]): o.spec.name for o in again}


@pytest.mark.skipif(not (SHARED / "openapi-multifile").exists(), reason="not here")
@pytest.mark.parametrize("kind", ["json", "yaml"])
@pytest.mark.requirement("R04")
async def test_a_document_in_several_files_imports_within_its_folder(kind: str) -> None:
    path = SHARED / "openapi-multifile" / f"petstore-separate-{kind}" / "spec" / f"swagger.{kind}"
    service = await from_openapi_file(path, CONFIG)

    judge(service, 4)
    by_name = {operation.spec.name: operation.spec for operation in service}
    tags = by_name["findPets"].input_schema.document["properties"]["tags"]  # type: ignore[index]
    assert tags["type"] == "array"
    assert not by_name["findPets"].output_schema.is_unknown
    # `../common/Error` lies outside of the folder, so nothing is known about it.
    (declared,) = by_name["findPets"].error_schemas
    assert declared.schema.document == {"type": "object", "properties": {"body": {}}}


@pytest.mark.skipif(not (SHARED / "openapi-multifile").exists(), reason="not here")
async def test_the_operator_can_widen_the_folder() -> None:
    folder = SHARED / "openapi-multifile" / "petstore-separate-json"
    config = HTTPServiceConfig(namespace="api", document_root=str(folder))
    service = await from_openapi_file(folder / "spec" / "swagger.json", config)

    (declared,) = next(iter(service)).spec.error_schemas
    assert declared.schema.document["$defs"]  # type: ignore[index]


@pytest.mark.skipif(not (SHARED / "openapi-invalid").exists(), reason="not here")
@pytest.mark.parametrize(
    "path", sorted((SHARED / "openapi-invalid").glob("*")), ids=lambda path: str(path.name)
)
async def test_a_document_that_contradicts_itself_is_imported_with_a_report(path: Path) -> None:
    service = await from_openapi_file(path, CONFIG)

    judge(service, 46)
    assert service.problems
