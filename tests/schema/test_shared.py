"""Definitions that many documents share: the same verdicts as alone, compiled once."""

import gc
import json
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schema.strategies import any_schemas, json_values, plain_schemas

from operations.schema import CastResult, Schema, SharedDefinitions, checking
from operations.schema.compiling import ExplosionError, compile_schema

NAMES = ("node", "one", "two", "a/b")


@st.composite
def documents(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw documents over the same definitions, which refer to one another."""

    def linked(document: dict[str, Any]) -> dict[str, Any]:
        parts = json.dumps({k: v for k, v in document.items() if k != "$defs"}).split("$defs/node")
        names = [draw(st.sampled_from(NAMES)).replace("/", "~1") for _ in parts[1:]]
        text = parts[0] + "".join(f"$defs/{n}{p}" for n, p in zip(names, parts[1:], strict=True))
        found: dict[str, Any] = json.loads(text)
        return found

    drawn = draw(st.lists(any_schemas | plain_schemas, min_size=3, max_size=5))
    node = drawn[0]["$defs"]["node"]
    definitions = dict(zip(NAMES, [node, *map(linked, drawn[:3])], strict=True))
    roots = [linked(document) for document in drawn] + [{"$ref": "#/$defs/one"}]
    return [{**root, "$defs": definitions} for root in roots]


@pytest.mark.parametrize("page_size", [1, 5_000])
@given(st.data())
@settings(max_examples=8, deadline=None)
def test_documents_that_share_definitions_mean_the_same(
    page_size: int, data: st.DataObject
) -> None:
    drawn = data.draw(documents())
    values = data.draw(st.lists(json_values, min_size=1, max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "PAGE_SIZE", page_size)
        shared = SharedDefinitions()
        for document in drawn:
            alone = Schema(document, lenient=True)
            together = Schema(document, lenient=True, shared=shared)
            for value in values:
                assert together.check(value) == alone.check(value)
                assert together.errors(value) == alone.errors(value)
                assert _counted(together.cast(value)) == _counted(alone.cast(value))


def _counted(result: CastResult) -> tuple[Any, Counter[str]]:
    """The value and the number of changes of each kind; the schema locations that share an entry may differ."""
    counts: Counter[str] = Counter()
    for change in result.changes:
        counts[change.kind] += change.count
    return result.value, counts


def test_definitions_are_freed_with_the_documents_that_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "PAGE_SIZE", 1)
    definitions = {"a": tree("x", "a", "b"), "b": tree("y", "a")}
    shared = SharedDefinitions()
    schema = Schema({"$ref": "#/$defs/a", "$defs": definitions}, shared=shared, lenient=True)
    assert schema.check({"a": {"b": {"y": 1}}})
    assert not schema.check({"b": {"a": {"x": 2}}})
    schema.cast({"a": {}})
    freed = weakref.ref(shared)
    del shared, schema
    gc.collect()
    assert freed() is None


def tree(name: str, *inner: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {each: {"$ref": f"#/$defs/{each}"} for each in inner} | {name: {"const": 1}},
    }


DEFINITIONS = {"a": tree("a", "b", "a"), "b": tree("b", "c"), "c": tree("c", "a")}


def test_definitions_are_compiled_once_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def counted(schema: Any, *args: Any, **options: Any) -> Any:
        compiled.append(schema)
        return compile_schema(schema, *args, **options)

    monkeypatch.setattr(checking, "compile_schema", counted)
    shared = SharedDefinitions()
    roots: list[dict[str, Any]] = [
        {"$ref": "#/$defs/a"},
        {"$ref": "#/$defs/b", "description": "the same"},
        {"type": "array", "items": {"$ref": "#/$defs/a"}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/c"}},
    ]
    schemas = [
        Schema({**root, "$defs": DEFINITIONS}, lenient=True, shared=shared) for root in roots
    ]
    deep = {"b": {"c": {"a": {"a": {"b": {"b": 2}}}}}}
    assert [schemas[0].check(deep), schemas[1].check(deep["b"])] == [False, False]
    assert [schemas[2].check([{}, deep]), schemas[3].check({"x": {"c": 1}})] == [False, True]
    pages = [schema for schema in compiled if "properties" in schema and "$defs" in schema]
    assert [set(page["$defs"]) for page in pages] == [{"a", "b", "c"}]
    assert len(compiled) == 3


def test_unevaluated_properties_include_those_of_shared_definitions() -> None:
    definitions = {
        "base": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "closed": {"allOf": [{"$ref": "#/$defs/base"}], "unevaluatedProperties": False},
    }
    shared = SharedDefinitions()
    for root in (
        {"allOf": [{"$ref": "#/$defs/base"}], "unevaluatedProperties": False},
        {"$ref": "#/$defs/closed"},
        {"$ref": "#/$defs/base", "unevaluatedProperties": False},
    ):
        schema = Schema({**root, "$defs": definitions}, lenient=True, shared=shared)
        assert schema.check({"x": 1})
        assert not schema.check({"x": 1, "y": 1})


def test_a_name_with_two_meanings_is_not_shared() -> None:
    shared = SharedDefinitions()
    one = Schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, lenient=True, shared=shared
    )
    two = Schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, lenient=True, shared=shared
    )
    assert [one.check("x"), two.check("x")] == [True, False]
    assert [one.check(1), two.check(1)] == [False, True]


def test_an_unusable_definition_affects_only_the_documents_that_need_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = {"type": "string"}, {"type": "no such type"}
    shared = SharedDefinitions()
    both = Schema(
        {"anyOf": [{"$ref": "#/$defs/bad"}], "$defs": {"bad": bad, "good": good}},
        lenient=True,
        shared=shared,
    )
    again = Schema({"$ref": "#/$defs/good", "$defs": {"good": good}}, lenient=True, shared=shared)
    other = Schema({"$ref": "#/$defs/fine", "$defs": {"fine": good}}, lenient=True, shared=shared)
    assert both.is_unknown
    assert "cannot be used" in caplog.text
    for schema in (again, other):
        assert schema.check("x")
        assert not schema.check(1)


def test_schemas_may_be_compiled_in_several_threads() -> None:
    shared = SharedDefinitions()
    roots = [{"type": "array", "items": {"$ref": f"#/$defs/{name}"}} for name in "abc" * 20]
    schemas = [
        Schema({**root, "$defs": DEFINITIONS}, lenient=True, shared=shared) for root in roots
    ]
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda schema: schema.check([{"b": {"b": 2}}]), schemas))
    assert verdicts == [False, False, True] * 20


def test_a_broken_reference_is_rejected_as_in_a_separate_document(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = SharedDefinitions()
    for definitions in ({"a": {"type": "string"}}, {"a": {"$ref": "#/$defs/gone"}}):
        document: Any = {"anyOf": [{"$ref": "#/$defs/gone"}], "$defs": definitions}
        caplog.clear()
        assert Schema(document, lenient=True, shared=shared).is_unknown
        assert "cannot be used" in caplog.text


def test_a_definition_whose_alternatives_explode_rejects_its_documents_before_others_are_added() -> (
    None
):
    def choice(of: str) -> dict[str, Any]:
        return {"anyOf": [{"allOf": [{"$ref": f"#/$defs/{of}"}] * 9}, {"type": "null"}]}

    levels = {f"l{n}": choice(f"l{n + 1}") for n in range(6)}
    exploding = {**levels, "l6": {"type": "object"}}
    plain = {"plain": tree("x")}
    shared = SharedDefinitions()

    with pytest.raises(ExplosionError):
        shared.adopt({"$ref": "#/$defs/l0", "$defs": exploding})
    with pytest.raises(ExplosionError):
        shared.adopt({"$ref": "#/$defs/l0", "$defs": {**plain, **exploding}})

    # Otherwise it would count as rejected.
    assert shared.adopt({"$ref": "#/$defs/plain", "$defs": plain}) == {"$ref": "#/$defs/plain"}
    document = {"$ref": "#/$defs/l0", "$defs": {**plain, **exploding}}
    assert Schema(document, lenient=True, shared=shared).check("anything")
