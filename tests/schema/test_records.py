"""The policy `create` against TypeBox 0.34, and the policy `cast` against `create`.

Under `create`, each record has the same result, or falls under one of the departures that are named here, whose own
rule is then asserted. Under `cast`, the result is that of `create` without its inventions: see the end.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.schema.material import records

from operations.base.errors import SchemaError
from operations.schema import CastResult, Change, Schema

pytestmark = pytest.mark.skipif(not records("pairs"), reason="the casting records are not here")

THROWS = object()


def _same(first: Any, second: Any) -> bool:
    """Equal as JSON: `1` is `1.0`, `true` is not `1`."""
    return json.dumps(_numbers(first), sort_keys=True) == json.dumps(
        _numbers(second), sort_keys=True
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    return value


def _edits(result: CastResult) -> list[Change]:
    """The changes beyond stripping and filling."""
    return [c for c in result.changes if c.kind in {"converted", "created", "replaced"}]


# The departures: each gets the schema, the value, TypeBox's result and ours, and returns whether it explains both.


def _never_raises(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """TypeBox throws. We return a valid value, or leave the value unchanged."""
    return theirs is THROWS and (
        schema.check(ours.value) or (not _edits(ours) and _same(ours.value, value))
    )


def _formats_are_not_checked(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """TypeBox has no formats and rejects all values with a format; we do not check formats."""
    return '"format"' in json.dumps(schema.document) and _same(ours.value, value)


def _nullable_is_openapi(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """`nullable` is not a keyword of JSON Schema; importing an OpenAPI document rewrites it as a type."""
    text = json.dumps(schema.document)
    return '"nullable": true' in text and _same(
        _nullable(schema).cast(value, "create").value, theirs
    )


def _nullable(schema: Schema) -> Schema:
    def rewrite(part: Any) -> Any:
        if isinstance(part, list):
            return [rewrite(item) for item in part]
        if not isinstance(part, dict):
            return part
        part = {name: rewrite(item) for name, item in part.items()}
        if part.pop("nullable", None) is True:
            return {"anyOf": [part, {"type": "null"}]}
        return part

    return Schema(rewrite(schema.document))


def _no_pattern_is_made_up(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """TypeBox writes a text for the simplest patterns. We make none up, so the value stays."""
    return '"pattern"' in json.dumps(schema.document) and _same(ours.value, value)


def _other_bounds_are_honoured(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """TypeBox invents a value that its own schema rejects. We invent only valid values."""
    return not schema.check(theirs) and schema.check(ours.value) and bool(_edits(ours))


def _short_tuples_are_valid(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """In JSON Schema `prefixItems` alone requires no number of items."""
    return schema.check(value) and _same(ours.value, value) and not _edits(ours)


def _converts_before_it_invents(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """A lossless conversion replaces nothing; otherwise the two agree."""
    kinds = {change.kind for change in _edits(ours)}
    return "converted" in kinds and schema.check(ours.value) and _agree(theirs, ours)


def _agree(theirs: Any, ours: CastResult) -> bool:
    """Return whether two results agree, except for values that ours converted."""
    converted = {change.path for change in ours.changes if change.kind == "converted"}

    def same(first: Any, second: Any, path: str) -> bool:
        if path in converted:
            return True
        if isinstance(first, dict) and isinstance(second, dict):
            return first.keys() == second.keys() and all(
                same(first[name], second[name], f"{path}/{name}") for name in first
            )
        if isinstance(first, list) and isinstance(second, list):
            return len(first) == len(second) and all(
                same(*pair, f"{path}/{index}")
                for index, pair in enumerate(zip(first, second, strict=True))
            )
        return _same(first, second)

    return same(theirs, ours.value, "")


def _strips_and_fills(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """We strip undeclared properties of valid data and fill in defaults: both agree after another cast."""
    return _same(schema.cast(theirs, "create").value, ours.value) or _keeps_what_is_allowed(
        schema, value, theirs, ours
    )


def _keeps_what_is_allowed(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """`additionalProperties: true` keeps extras also where other parts failed; `false` drops them from a record."""
    if not isinstance(schema.document, dict) or not isinstance(theirs, dict):
        return False
    extra = schema.document.get("additionalProperties")
    if extra is True:
        return _same({**value, **theirs}, ours.value)
    return extra is False and ours.value.items() <= theirs.items() and schema.check(ours.value)


def _intersections_keep_data(schema: Schema, value: Any, theirs: Any, ours: CastResult) -> bool:
    """TypeBox drops valid parts of an intersection. Our result keeps them."""
    if not isinstance(schema.document, dict) or "allOf" not in schema.document:
        return False
    edited = {change.path for change in ours.changes}
    kept = {name: item for name, item in ours.value.items() if f"/{name}" not in edited}
    return kept.items() <= value.items() and schema.check(ours.value)


Departure = Callable[[Schema, Any, Any, CastResult], bool]

DEPARTURES: list[Departure] = [
    _never_raises,
    _formats_are_not_checked,
    _nullable_is_openapi,
    _no_pattern_is_made_up,
    _other_bounds_are_honoured,
    _short_tuples_are_valid,
    _converts_before_it_invents,
    _strips_and_fills,
    _intersections_keep_data,
]


def _departure(schema: Schema, value: Any, theirs: Any) -> str | None:
    """The name of the departure that explains our answer; None if there is nothing to explain."""
    ours = schema.cast(value, "create")
    if theirs is not THROWS and _same(ours.value, theirs):
        return None
    for departure in DEPARTURES:
        if departure(schema, value, theirs, ours):
            return departure.__name__
    pytest.fail(f"{value!r} became {ours!r}, and {theirs!r} in TypeBox, for {schema.document!r}")


@pytest.mark.parametrize("record", records("pairs"), ids=lambda record: record["cat"])
def test_results_equal_those_of_typebox_or_a_documented_difference(record: dict[str, Any]) -> None:
    theirs = record.get("cast", THROWS)

    _departure(Schema(record["schema"]), record["value"], theirs)


@pytest.mark.parametrize("record", records("own-tests"), ids=lambda record: record["test"])
def test_the_tests_of_typebox_pass(record: dict[str, Any]) -> None:
    schema = Schema(record["schema"])
    if record["schema"] == {"anyOf": [{"$ref": "A"}, {"$ref": "B"}]}:
        # TypeBox takes the two from a list of references beside the schema. A document here stands alone.
        with pytest.raises(SchemaError):
            schema.compile()
        return

    _departure(schema, record["value"], record.get("result", THROWS))


def test_most_records_need_no_departure() -> None:
    same = [
        record
        for name, key in (("pairs", "cast"), ("own-tests", "result"))
        for record in records(name)
        if record["schema"] != {"anyOf": [{"$ref": "A"}, {"$ref": "B"}]}
        and key in record
        and _same(Schema(record["schema"]).cast(record["value"], "create").value, record[key])
    ]

    assert len(same) == 171


def _known(schema: Any, root: Any, value: Any, result: Any, path: str = "") -> list[str]:
    """Return the locations of declared values in `value` that are not equal in `result`."""
    if isinstance(schema, dict) and "$ref" in schema:
        target = root
        for token in schema["$ref"].split("/")[1:]:
            target = target[token.replace("~1", "/").replace("~0", "~")]
        return _known(target, root, value, result, path)
    lost: list[str] = []
    if isinstance(schema, dict):
        for member in schema.get("allOf", ()):
            lost += _known(member, root, value, result, path)
        if isinstance(value, dict):
            for name, part in schema.get("properties", {}).items():
                if name in value:
                    if name not in result:
                        lost.append(f"{path}/{name}")
                    else:
                        lost += _known(part, root, value[name], result[name], f"{path}/{name}")
        elif isinstance(value, list) and isinstance(result, list):
            for index, item in enumerate(value):
                lost += _known(schema.get("items"), root, item, result[index], f"{path}/{index}")
        elif value != result:
            lost.append(path)
    return lost


# The policy `cast`


_LEFT_OUT = {"created", "replaced"}
"""What `create` does and `cast` does not: no created values, no default or first enum member in the place of a present
value, no padding, no cutting, no replaced objects or lists, no created members of a union or an intersection."""


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("name", ["pairs", "own-tests"])
def test_cast_differs_from_create_only_if_create_invents_values(name: str) -> None:
    departed = 0
    for record in records(name):
        if record["schema"] == {"anyOf": [{"$ref": "A"}, {"$ref": "B"}]}:
            continue
        schema, value = Schema(record["schema"]), record["value"]
        cast, created = schema.cast(value), schema.cast(value, "create")

        assert not {change.kind for change in cast.changes} & _LEFT_OUT, record
        if {change.kind for change in created.changes} & _LEFT_OUT:
            departed += 1
            assert any(change.kind == "mismatch" for change in cast.changes), record
        else:
            assert _same(cast.value, created.value), record

    assert departed == {"pairs": 76, "own-tests": 61}[name]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _texts(leaf: Any) -> list[str]:
    """A scalar as JSON, and the number that it is as text or in another notation."""
    if isinstance(leaf, (bool, type(None))):
        return [json.dumps(leaf)]
    try:
        return [str(leaf), repr(float(leaf))]
    except ValueError:
        return [leaf]


def _defaults(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return [leaf for part in schema for leaf in _defaults(part)]
    if not isinstance(schema, dict):
        return []
    own = _leaves(schema["default"]) if "default" in schema else []
    return own + [leaf for part in schema.values() for leaf in _defaults(part)]


@pytest.mark.slow
@pytest.mark.requirement("R52")
def test_real_responses_are_cast_under_both_policies() -> None:
    """All in one test, because compiling the schemas takes most of the time."""
    valid = 0
    for record in records("real-responses"):
        schema, value = Schema(record["schema"]), record["value"]
        before = json.dumps(value)
        created = schema.cast(value, "create")

        again = schema.cast(created.value, "create")
        assert json.dumps(again.value) == json.dumps(created.value), record["id"]
        if schema.check(value):
            valid += 1
            _loses_nothing(schema, record, created)
        else:
            assert schema.errors(value), record["id"]
        _is_as_valid_as_in_typebox(schema, record, created)
        _gains_no_value(schema.cast(value), record)
        assert json.dumps(value) == before

    assert valid == 346


def _loses_nothing(schema: Schema, record: dict[str, Any], created: CastResult) -> None:
    assert _edits(created) == [], record["id"]
    assert schema.check(created.value), record["id"]
    assert _known(record["schema"], record["schema"], record["value"], created.value) == []


def _is_as_valid_as_in_typebox(schema: Schema, record: dict[str, Any], created: CastResult) -> None:
    """Except where data would be lost: TypeBox creates a new value if a `oneOf` or a `pattern` does not match."""
    theirs = record["strip"].get("cast", THROWS)
    if theirs is not THROWS and schema.check(theirs):
        faults = schema.errors(created.value)
        assert {fault.keyword for fault in faults} <= {"oneOf", "pattern"}, record["id"]


def _gains_no_value(cast: CastResult, record: dict[str, Any]) -> None:
    """Every leaf is one of the example's, a lossless conversion of one, or one of a declared default."""
    allowed = [*_leaves(record["value"]), *_defaults(record["schema"])]
    known = {text for leaf in allowed for text in _texts(leaf)}

    gained = [leaf for leaf in _leaves(cast.value) if not set(_texts(leaf)) & known]
    assert gained == [], record["id"]
    assert not {change.kind for change in cast.changes} & _LEFT_OUT, record["id"]
