"""Properties that hold for every schema and every value."""

import copy
import dataclasses
import datetime as dt
import enum
import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.schema.strategies import any_schemas, json_values, plain_schemas

from operations.base.json.values import to_json
from operations.base.work import Work
from operations.schema import CastPolicy, CompiledSchema, Schema
from operations.schema.casting.stripping import StrippingPass
from operations.schema.casting.thorough import CreatingPass, Pass
from operations.schema.casting.typed import REFUSALS, NeedsRepair
from operations.schema.checking import Checker
from operations.schema.plans import Planner

many = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

policies = st.sampled_from(["cast", "keep", "create"])


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _containers(value: Any) -> set[int]:
    if isinstance(value, dict):
        return {id(value)}.union(*map(_containers, value.values()))
    if isinstance(value, list):
        return {id(value)}.union(*map(_containers, value))
    return set()


def _at(value: Any, path: str) -> Any:
    for token in path.split("/")[1:]:
        value = value[int(token)] if isinstance(value, list) else value[token]
    return value


@many
@given(plain_schemas, json_values)
def test_the_result_is_valid_for_schemas_that_casting_has_rules_for(
    schema: Any, value: Any
) -> None:
    compiled = Schema(schema)

    assert compiled.check(compiled.cast(value, "create").value)


@many
@given(any_schemas, json_values, policies)
def test_a_valid_value_stays_valid(schema: Any, value: Any, policy: CastPolicy) -> None:
    compiled = Schema(schema)

    if compiled.check(value):
        assert compiled.check(compiled.cast(value, policy).value)


@many
@given(plain_schemas | any_schemas, st.lists(json_values, min_size=2, max_size=4), policies)
def test_a_text_that_is_recognised_needs_no_change(
    schema: Any, values: list[Any], policy: CastPolicy
) -> None:
    compiled = Schema(schema)
    for value in values:
        # Its own result is recognised, if anything is.
        for each in (value, compiled.cast(value).value):
            result = compiled.cast(each, policy)
            try:
                if compiled.check_text is None:
                    continue
                compiled.check_text(json.dumps(each).encode())
            except REFUSALS:
                continue
            assert json.dumps(result.value) == json.dumps(each)
            assert result.changes == []


@many
@given(plain_schemas, json_values)
def test_creating_twice_changes_nothing_more(schema: Any, value: Any) -> None:
    compiled = Schema(schema)
    once = compiled.cast(value, "create")
    twice = compiled.cast(once.value, "create")

    assert _text(twice.value) == _text(once.value)
    assert twice.changes == []


@many
@given(any_schemas, json_values)
def test_creating_is_idempotent_for_every_schema(schema: Any, value: Any) -> None:
    compiled = Schema(schema)
    once = compiled.cast(value, "create")

    assert _text(compiled.cast(once.value, "create").value) == _text(once.value)


@many
@given(any_schemas, json_values, policies)
def test_the_input_is_never_modified_and_nothing_mutable_is_shared(
    schema: Any, value: Any, policy: CastPolicy
) -> None:
    before = copy.deepcopy(value)
    document = copy.deepcopy(schema)
    result = Schema(schema).cast(value, policy)

    assert _text(value) == _text(before)
    assert schema == document
    assert not _containers(result.value) & (_containers(value) | _containers(schema))


@many
@given(any_schemas, json_values, policies)
def test_every_change_names_a_place(schema: Any, value: Any, policy: CastPolicy) -> None:
    result = Schema(schema).cast(value, policy)

    for change in result.changes:
        assert change.message
        assert change.count >= 1
        if change.kind == "stripped":
            _at(value, change.path)
        elif change.kind != "mismatch":
            _at(result.value, change.path)


def _defaults(schema: Any) -> list[Any]:
    """Every default that a schema declares, at any depth, also inside other defaults."""
    if isinstance(schema, list):
        return [default for part in schema for default in _defaults(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema["default"]] if "default" in schema else []
    return own + [default for part in schema.values() for default in _defaults(part)]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _lossless(value: Any) -> list[str]:
    """The JSON texts that are equivalent to a scalar."""
    texts = [_text(value)]
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except ValueError:
            return texts
        if value == "true" or value == "false" or type(read) in {int, float}:
            texts.append(_text(read))
            if type(read) is float and read.is_integer():
                texts.append(_text(int(read)))
    elif value is not None:
        texts.append(_text(_text(value)))
        if isinstance(value, float) and value.is_integer():
            texts.append(_text(int(value)))
    return texts


def _differences(
    before: Any, after: Any, allowed: set[str], path: str = ""
) -> dict[str, list[str]]:
    """The paths of all differences by kind; fails if one of them is an invention."""
    found: dict[str, list[str]] = {"stripped": [], "filled": [], "converted": []}

    def merge(more: dict[str, list[str]]) -> None:
        for kind, paths in more.items():
            found[kind] += paths

    if isinstance(before, dict) and isinstance(after, dict):
        found["stripped"] += [f"{path}/{name}" for name in before if name not in after]
        for name, item in after.items():
            if name in before:
                merge(_differences(before[name], item, allowed, f"{path}/{name}"))
            else:
                found["filled"].append(f"{path}/{name}")
                assert {_text(leaf) for leaf in _leaves(item)} <= allowed, "invented"
    elif isinstance(before, list) and isinstance(after, list):
        assert len(before) == len(after), "padded or cut"
        for index, (first, second) in enumerate(zip(before, after, strict=True)):
            merge(_differences(first, second, allowed, f"{path}/{index}"))
    elif _text(before) != _text(after):
        assert not isinstance(before, (dict, list)), "replaced"
        assert _text(after) in _lossless(before), "replaced"
        found["converted"].append(path)
    return found


@pytest.mark.requirement("R52")
@settings(many, max_examples=80)
@given(any_schemas, json_values, st.sampled_from(["cast", "keep"]))
@example(
    {
        "anyOf": [
            {"type": "object", "properties": {"b": {"type": "string", "default": "d"}}},
            {"type": "object", "properties": {"k": {"type": "array"}}},
        ]
    },
    {"b": [1], "k": [1, 2]},
    "cast",
)
def test_nothing_is_invented_and_every_difference_is_reported(
    schema: Any, value: Any, policy: CastPolicy
) -> None:
    compiled = Schema(schema)
    result = compiled.cast(value, policy)
    leaves = {
        leaf
        for default in _defaults(schema)
        for each in _leaves(default)
        for leaf in _lossless(each)
    }

    found = _differences(value, result.value, leaves)

    for kind, paths in found.items():
        entries = [change for change in result.changes if change.kind == kind]
        assert sum(entry.count for entry in entries) == len(paths)
        assert {entry.path for entry in entries} <= set(paths)
    assert {change.kind for change in result.changes} <= {*found, "mismatch"}
    assert any(c.kind == "mismatch" for c in result.changes) is not compiled.check(result.value)
    if policy == "keep":
        assert not found["stripped"]


@many
@given(any_schemas, json_values)
def test_errors_are_reported_exactly_if_the_check_fails(schema: Any, value: Any) -> None:
    compiled = Schema(schema)

    assert bool(compiled.errors(value)) is not compiled.check(value)


@many
@given(any_schemas, json_values, policies)
def test_both_passes_agree_on_values_without_conversion(
    schema: Any, value: Any, policy: CastPolicy
) -> None:
    """The quick pass may fail; if it succeeds, its result equals that of the thorough pass."""
    checker = Checker(schema)
    planner = Planner(checker, keep=policy == "keep")
    once = (CreatingPass if policy == "create" else Pass)(planner, Work())
    root = planner.plan((checker.document.root,))
    thorough = once.cast(root, value)
    try:
        quick = StrippingPass(once, Work()).cast(root, value)
    except NeedsRepair:
        return

    if checker.accepts(quick):
        assert _text(quick) == _text(thorough)
        assert not once.edits


class _Letter(enum.StrEnum):
    A = "a"


@dataclasses.dataclass
class _Pair:
    a: Any
    b: Any


python_values = st.recursive(
    st.sampled_from([Decimal("1.5"), Decimal(42), _Letter.A, dt.date(2020, 1, 1), 1, 2.0, "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(_Pair, inner, inner)
        | st.dictionaries(st.sampled_from(["a", "b", "x", 1]), inner, max_size=4)
    ),
    max_leaves=6,
)


@many
@given(any_schemas, python_values, policies)
@example({"type": "object", "properties": {"a": {"type": "number"}}}, {"a": Decimal("1.5")}, "cast")
def test_a_python_value_is_cast_like_its_json(schema: Any, value: Any, policy: CastPolicy) -> None:
    compiled = Schema(schema)
    plain = to_json(value)

    assert compiled.check(value) is compiled.check(plain)
    assert compiled.cast(value, policy) == compiled.cast(plain, policy)


odd_values = st.recursive(
    st.sampled_from(
        [float("nan"), float("inf"), "\ud800", b"x", object(), 10**40, ..., {1: 2}, {1}]
    )
    | st.integers()
    | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=1), inner, max_size=3)
    ),
    max_leaves=5,
)


@many
@given(any_schemas, odd_values)
@example({}, [[[float("nan")]]])
def test_check_errors_and_cast_raise_for_no_value(schema: Any, value: Any) -> None:
    compiled = Schema(schema)

    assert bool(compiled.errors(value)) is not compiled.check(value)
    for policy in ("cast", "keep", "create"):
        compiled.cast(value, policy)


@many
@given(any_schemas, json_values, policies)
def test_none_for_changes_means_valid_and_unchanged(
    schema: Any, value: Any, policy: CastPolicy
) -> None:
    compiled: CompiledSchema = Schema(schema).compile()
    result, changes = compiled.normaliser(policy)(value)

    assert changes is not None or compiled.check.is_valid(result)
    assert bool(changes) is not (_text(result) == _text(value) and compiled.check.is_valid(result))
