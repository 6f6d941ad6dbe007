"""The operations of a worker, sent in pieces: nothing is lost, and shared definitions are sent once."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.calls.worlds import World

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import MAX_DOCUMENT_VALUES, canonical
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.calls.protocol.services import SpecDecoder, SpecEncoder
from operations.contract.context import OperationContext
from operations.contract.specs import ErrorDefinition, Operation, OperationSpec, OperationType
from operations.openapi import HTTPServiceConfig, from_openapi_file
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry
from operations.schema import Schema

STRIPE = Path(__file__).parents[3] / "shared" / "openapi" / "stripe__spec3-2021-06-07.json"
MEGABYTE = 1024 * 1024


def query(name: str, **fields: Any) -> OperationSpec:
    return OperationSpec(namespace="shop", name=name, type=OperationType.QUERY, **fields)


def told(specs: list[OperationSpec]) -> list[str]:
    """The lines for `specs`."""
    encoder = SpecEncoder()
    return [encoder.add(spec) for spec in specs]


def heard(pieces: list[Any]) -> SpecDecoder:
    listener = SpecDecoder()
    for piece in pieces:
        listener.add(piece)
    return listener


def test_shared_definitions_are_sent_once() -> None:
    money = {"type": "object", "properties": {"amount": {"type": "integer"}}}
    price = {"$ref": "#/$defs/Money", "$defs": {"Money": money}}
    specs = [
        query("a", output_schema=Schema(price)),
        query("b", input_schema=Schema(price), output_schema=Schema({"type": "string"})),
    ]
    pieces = told(specs)

    assert "".join(pieces).count("amount") == 1
    assert [spec.digest for spec in heard(pieces).specs] == [spec.digest for spec in specs]


def test_two_types_with_the_same_name_stay_separate() -> None:
    def holding(kind: Any) -> Schema:
        return Schema({"$ref": "#/$defs/Item", "$defs": {"Item": {"const": kind}}})

    error = ErrorDefinition(code="GONE", schema=holding("gone"))
    # In Python, 1 and True are equal.
    specs = [
        query("a", input_schema=holding(1), output_schema=holding(True), error_schemas=(error,)),
        query("b", input_schema=holding(1.5), output_schema=holding(1)),
    ]
    listener = heard(told(specs))

    assert [spec.digest for spec in listener.specs] == [spec.digest for spec in specs]
    assert not listener.left_out


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {"$defs": {"Unused": {"type": "string"}}},
        {"$defs": 7},
        {"$defs": {}},
        {"$ref": "#/$defs/Missing", "$defs": {"Other": {}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#"}}},
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {}}},
        {"$ref": "#named", "$defs": {"Named": {"$anchor": "named"}}},
        {"$ref": "#/$defs/A/properties/x", "$defs": {"A": {"properties": {"x": True}}}},
        {"default": {"$ref": "#/$defs/A"}, "$defs": {"A": False}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
    ],
)
def test_a_schema_round_trips_unchanged(schema: Any) -> None:
    # Beside a document with definitions that this one lacks.
    filled = Schema(
        {"$ref": "#/$defs/Missing", "$defs": {"Missing": {"$ref": "#/$defs/B"}, "B": {}}}
    )
    specs = [query("a", output_schema=filled), query("b", output_schema=Schema(schema))]
    listener = heard(told(specs))

    assert listener.specs[1].output_schema.document == schema
    assert listener.specs[0] == specs[0]


NAMES = st.sampled_from(["A", "B", "C/D", "E~F"])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.booleans()
    | st.sampled_from([1, 1.0, True, "x"]).map(lambda value: {"const": value})
    | NAMES.map(lambda name: {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"}),
    lambda inner: (
        st.fixed_dictionaries({"properties": st.dictionaries(NAMES, inner, max_size=2)})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
    ),
    max_leaves=4,
)
DOCUMENTS: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {
        "allOf": st.lists(SCHEMAS, min_size=1, max_size=2),
        "$defs": st.dictionaries(NAMES, SCHEMAS, max_size=4),
    }
)


@given(st.lists(st.tuples(DOCUMENTS, DOCUMENTS), max_size=5))
def test_every_encoded_spec_is_decoded(documents: list[tuple[Any, Any]]) -> None:
    specs = [
        query(f"n{index}", input_schema=Schema(given), output_schema=Schema(taken))
        for index, (given, taken) in enumerate(documents)
    ]
    listener = heard(told(specs))

    assert [spec.to_wire() for spec in listener.specs] == [spec.to_wire() for spec in specs]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_text_may_be_divided_anywhere(size: int) -> None:
    schema = Schema({"$ref": "#/$defs/B", "$defs": {"B": {"description": "a\nb\u2028 ä"}}})
    specs = [query("a"), query("b", output_schema=schema), query("c", input_schema=schema)]
    text = "".join(told(specs))
    listener = heard([text[start : start + size] for start in range(0, len(text), size)])

    assert listener.specs == specs


async def test_a_registry_larger_than_any_message_is_imported(world: World) -> None:
    registry = OperationRegistry()
    filling = {f"p{number}": {"description": "x" * 100} for number in range(200)}
    shared = {f"D{number}": {"properties": filling} for number in range(10)}
    for index in range(100):
        schema = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in shared], "$defs": shared}
        spec = query(f"n{index}", output_schema=Schema(schema), description="y" * 20_000)
        registry.register(Operation(spec, lambda _, __: {"p1": 1}))

    async with world.serve(registry), world.connect() as target, from_calls(target) as service:
        here = OperationRegistry(service)
        assert (await here.execute("shop.n7", {})).data == {"p1": 1}

    assert sum(len(spec.encode()) for spec in registry.specs()) > 20 * MEGABYTE
    assert [spec.digest for spec in here.specs()] == [spec.digest for spec in registry.specs()]


@pytest.mark.slow
@pytest.mark.skipif(not STRIPE.exists(), reason="the shared documents are not here")
async def test_a_large_api_is_imported_over_a_broker() -> None:
    service = await from_openapi_file(STRIPE, HTTPServiceConfig(namespace="stripe"))
    specs = [operation.spec for operation in service]
    lines = told(specs)
    listener = heard(lines)

    assert sum(len(msgspec.json.encode(line)) for line in lines) < 2 * STRIPE.stat().st_size
    assert not listener.left_out
    assert len(listener.specs) == len(specs) > 300
    for before, after in zip(specs[::20], listener.specs[::20], strict=True):
        assert after.digest == before.digest


@pytest.mark.parametrize("piece", [None, [], {}, 7])
def test_a_malformed_piece_is_rejected(piece: Any) -> None:
    with pytest.raises(CallError) as caught:
        SpecDecoder().add(piece)

    assert caught.value.code == ErrorCode.UNKNOWN_ERROR


def entry(spec: Any, *scopes: str | None, **definitions: str) -> str:
    texts = {name: msgspec.Raw(text) for name, text in definitions.items()}
    shared = {"0": texts} if texts else {}
    line = msgspec.json.encode({"spec": spec, "scopes": scopes, "definitions": shared})
    return line.decode() + "\n"


@pytest.mark.parametrize(
    "bad",
    [
        "\n",
        "7\n",
        "{}\n",
        "[" * 10_000 + "\n",
        '{"spec":' + "[" * 10_000 + "\n",
        entry(query("good").to_wire()),
        entry({"name": 1}, None, None),
        '{"definitions":[]}\n',
        '{"definitions":{"0":7}}\n',
        '{"leftOut":["a"]}\n',
        entry(query("huge").to_wire(), None, None, A=f"[{'0,' * MAX_DOCUMENT_VALUES}0]"),
    ],
)
def test_an_entry_that_cannot_be_read_hides_nothing(bad: str) -> None:
    listener = heard([bad, entry(query("good").to_wire(), None, None)])

    assert [spec.name for spec in listener.specs] == ["good"]
    assert len(listener.left_out) == 1


@pytest.mark.parametrize("text", ["7", "[" * 500 + "]" * 500, "null"])
def test_a_definition_that_cannot_be_read_counts_as_unknown(text: str) -> None:
    wire = query("odd", output_schema=Schema({"$ref": "#/$defs/A"})).to_wire()
    schema = heard([entry(wire, None, "0", A=text)]).specs[0].output_schema

    assert schema.document == {"$ref": "#/$defs/A", "$defs": {"A": True}}
    assert schema.check({"anything": 1})


def test_a_schema_of_an_unknown_scope_counts_as_unknown() -> None:
    wire = query("odd", output_schema=Schema({"$ref": "#/$defs/Nowhere"})).to_wire()
    listener = heard([entry(wire, None, "9")])

    assert listener.specs[0].output_schema.is_unknown


def test_a_sent_definition_is_not_changed_later() -> None:
    wire = query("odd", output_schema=Schema({"$ref": "#/$defs/A"})).to_wire()
    one, other = (entry(wire, None, "0", A=text) for text in ('{"const":1}', '{"const":2}'))
    listener = heard([one, other])

    assert listener.specs[0].output_schema.check(1)
    assert listener.specs[1].output_schema.check(1)


@pytest.mark.parametrize(
    "piece",
    [
        entry(None, A='{"description": "' + "x" * 1000 + '"}'),
        entry(None, **{f"a{number}": "{}" for number in range(10)}),
        "{}\n" * 10,
        '{"leftOut":"' + "x" * 1000 + '"}\n',
        "x" * 1000,
    ],
)
def test_an_endless_description_is_cut_off(piece: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.calls.protocol.services.MAX_SPECS", 100_000)
    listener = SpecDecoder()
    with pytest.raises(CallError) as caught:
        for _ in range(101):
            listener.add(piece)

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert not caught.value.retryable


def test_scopes_without_definitions_are_limited_as_well() -> None:
    scopes = ",".join(f'"{number}":{{}}' for number in range(100_000))
    with pytest.raises(CallError) as caught:
        SpecDecoder().add(f'{{"definitions":{{{scopes}}}}}\n')

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"description": "\ud800"}}},
        {"description": "\ud800"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"default": object()}}},
    ],
)
def test_a_spec_that_is_not_json_hides_nothing(schema: Any) -> None:
    fine = {"$ref": "#/$defs/A", "$defs": {"A": {"const": 1}}}
    specs = [
        query("odd", input_schema=Schema(fine), output_schema=Schema(schema)),
        query("fine", output_schema=Schema(fine)),
    ]
    listener = heard(told(specs))

    assert listener.specs == specs[1:]
    assert listener.left_out[0].startswith("shop.odd: its spec is not JSON")


async def test_a_worker_with_a_spec_that_is_not_json_serves_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(input: Any, context: OperationContext) -> int:
        return 1

    registry, target = OperationRegistry(), MemoryTarget()
    deep: Any = {}
    for _ in range(70):
        deep = {"not": deep}
    odd = [
        query("odd", output_schema=Schema(lambda: {"default": object()})),
        query("surrogate", output_schema=Schema(lambda: {"description": "\ud800"})),
        query("infinite", meta={"x": float("inf")}),
        query("deep", meta=deep),
    ]
    registry.register_all(Operation(spec, run) for spec in [*odd, query("fine")])
    async with serve_calls(registry, target), from_calls(target) as service:
        assert "shop.odd" not in [each.spec.id for each in service]
        listed = (await service.calls.call("services.list")).data
        assert [spec["name"] for spec in listed] == ["fine"]
        with pytest.raises(CallError, match=r"the spec of shop\.odd is not JSON") as caught:
            await service.calls.call("services.schema", {"operationId": "shop.odd"})
        assert not caught.value.unexpected
    assert "shop.odd" in caplog.text


async def test_a_deep_schema_is_sent_as_well() -> None:
    deep: Any = {"type": "string"}
    for _ in range(40):
        deep = {"properties": {"inner": deep}}
    registry = OperationRegistry()
    registry.register_spec(query("deep", output_schema=Schema(deep)))
    target = MemoryTarget()
    async with serve_calls(registry, target), from_calls(target) as service:
        assert service.operations[0].spec.output_schema.document == deep


def test_a_name_with_as_many_meanings_as_operations_takes_no_longer_than_others() -> None:
    def meaning(number: int) -> Schema:
        long = {"const": number, "description": "x" * 5_000}
        return Schema({"$ref": "#/$defs/A", "$defs": {"A": long}})

    specs = [query(f"n{number}", output_schema=meaning(number)) for number in range(300)]
    written: list[Any] = []

    def counted(value: Any) -> bytes:
        written.append(value)
        return canonical(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("operations.base.json.references.canonical", counted)
        listener = heard(told(specs))

    assert [spec.digest for spec in listener.specs] == [spec.digest for spec in specs]
    assert len(written) <= 2 * len(specs)


@pytest.mark.parametrize("max_bytes", [1024, 2048, 5000, 65_536])
async def test_pieces_fit_into_small_messages(max_bytes: int) -> None:
    names = [f"{'N' * 100}{number}" for number in range(40)]
    schema = {
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names],
        "$defs": {name: {"const": name[100:], "title": "\U0001f600" * 50} for name in names},
    }
    registry = OperationRegistry()
    registry.register_spec(query("a", output_schema=Schema(schema)))
    target = MemoryTarget(max_bytes=max_bytes)
    async with serve_calls(registry, target), from_calls(target) as service:
        assert service.operations[0].spec.output_schema.document == schema


async def test_a_spec_larger_than_a_message_is_imported() -> None:
    large = {"$ref": "#/$defs/Large", "$defs": {"Large": {"description": "x" * 200_000}}}
    registry = OperationRegistry()
    registry.register_spec(query("large", output_schema=Schema(large)))
    target = MemoryTarget(max_bytes=50_000)
    async with serve_calls(registry, target), from_calls(target) as service:
        assert service.operations[0].spec.output_schema.document == large


async def test_a_caller_sees_the_operations_that_it_may_call() -> None:
    registry = OperationRegistry()

    @registry.operation("open.one", type="query")
    async def one() -> None: ...

    @registry.operation("shut.two", type="query", scopes=["two"])
    async def two() -> None: ...

    target = MemoryTarget(trusted=False)
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        pieces = [piece.data async for piece in calls.subscribe("services.describe")]
        other = calls.subscribe("services.describe", {"namespace": "shut"})
        nothing = [piece.data async for piece in other]

    assert [spec.id for spec in heard(pieces).specs] == ["open.one"]
    assert nothing == []
