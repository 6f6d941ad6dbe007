"""Repair only what is wrong: valid siblings stay on the fast path, and constants choose the member of a union."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operations.schema import CastPolicy, Change, ChangeKind, from_schema
from operations.schema.plans import Plan

ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "state": {"enum": ["open", "closed"]},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "active": {"type": "boolean", "default": True},
        "owner": {"type": ["string", "null"], "default": None},
    },
    "required": ["id", "name", "state"],
    "additionalProperties": False,
}

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["1", "042", "-0", "1.5", "1e2", "true", "open", "ä", "", " 1"]),
)
_VALUES = st.one_of(_SCALARS, st.lists(_SCALARS, max_size=3))


def _items() -> st.SearchStrategy[list[Any]]:
    """Return lists of objects, most of which have the same names and similar values."""
    names = st.lists(st.sampled_from([*ITEM["properties"], "extra"]), unique=True, min_size=1)

    def rows(chosen: list[str]) -> st.SearchStrategy[list[Any]]:
        columns = [st.one_of(_VALUES, st.just(value)) for value in ("7", "x", "open", "1.5", 7)]
        row = st.fixed_dictionaries({name: st.one_of(columns) for name in chosen})
        return st.lists(st.one_of(row, row, row, _VALUES), min_size=9, max_size=24)

    return names.flatmap(rows)


def _listed(changes: list[Change]) -> list[tuple[ChangeKind, str, int]]:
    return sorted((change.kind, change.path, change.count) for change in changes)


@given(_items(), st.sampled_from(["cast", "keep", "create"]))
def test_a_list_is_cast_like_its_items(items: list[Any], policy: CastPolicy) -> None:
    one, many = from_schema(ITEM), from_schema({"type": "array", "items": ITEM})
    alone = [one.cast(item, policy) for item in items]

    result = many.cast(items, policy)

    assert repr(result.value) == repr([each.value for each in alone])
    total = sum(change.count for each in alone for change in each.changes)
    assert sum(change.count for change in result.changes) == total


@given(_items())
def test_changes_of_a_list_are_those_of_its_parts(items: list[Any]) -> None:
    """The rows at the ends are compared one by one, because there are too few of them."""
    schema = from_schema({"type": "array", "items": ITEM})
    whole = schema.cast(items).changes
    counts: dict[tuple[ChangeKind, str], int] = {}
    for start in range(0, len(items), 4):
        for change in schema.cast(items[start : start + 4]).changes:
            key = change.kind, change.path.split("/", 2)[-1]
            counts[key] = counts.get(key, 0) + change.count
    found: dict[tuple[ChangeKind, str], int] = {}
    for kind, path, count in _listed(whole):
        place = kind, path.split("/", 2)[-1]
        found[place] = found.get(place, 0) + count

    assert sum(found.values()) == sum(counts.values())
    assert {kind for kind, _ in found} == {kind for kind, _ in counts}


MEMBERS = [
    {
        "type": "object",
        "properties": {"kind": {"const": f"k{index}"}, "id": {"type": "integer"}},
        "required": ["kind", "id"],
    }
    for index in range(200)
]


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        ({"kind": "k150", "id": 1}, {"kind": "k150", "id": 1}, None),
        ({"kind": "k150", "id": "1"}, {"kind": "k150", "id": 1}, "was converted"),
        ({"kind": "k150", "id": "x"}, {"kind": "k150", "id": "x"}, "must be an integer"),
        ({"kind": "other", "id": 1}, {"kind": "other", "id": 1}, "must be one of"),
    ],
)
def test_a_value_is_tried_only_with_the_members_that_its_constant_allows(
    monkeypatch: pytest.MonkeyPatch, value: Any, expected: Any, message: str | None
) -> None:
    """R67: the work for a value does not grow with the number of members."""
    schema = from_schema({"anyOf": MEMBERS})
    schema.cast(value)  # compiles
    tested: list[Plan] = []
    accepts = Plan.accepts.fget  # type: ignore[attr-defined]

    def counting(plan: Plan) -> Any:
        tested.append(plan)
        return accepts(plan)

    monkeypatch.setattr(Plan, "accepts", property(counting))
    result = schema.cast(value)

    assert result.value == expected
    assert [message in change.message for change in result.changes if message] == (
        [True] if message else []
    )
    assert len(tested) < 50


def test_a_property_may_exclude_only_some_members() -> None:
    members = [*MEMBERS[:5], {"type": "object", "properties": {"id": {"type": "string"}}}]
    schema = from_schema({"anyOf": members})

    assert schema.cast({"kind": "k1", "id": 1}).changes == []
    assert schema.cast({"kind": "k1", "id": "x"}).value == {"id": "x"}
    assert schema.cast({"id": "x"}).changes == []
    assert {change.kind for change in schema.cast({"id": []}).changes} == {"mismatch"}
