"""What holds for every schema and every value."""

import copy
import json
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.schema.strategies import any_schemas, json_values, plain_schemas

from operations._json import MAX_DEPTH
from operations.schema import CompiledSchema, Schema
from operations.schema.casting.repairing import Repairer
from operations.schema.casting.stripping import GaveUpError, Stripper
from operations.schema.planning.plans import Planner
from operations.schema.reading.checking import Checker

many = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


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

    assert compiled.check(compiled.cast(value).value)


@many
@given(any_schemas, json_values)
def test_a_valid_value_stays_valid(schema: Any, value: Any) -> None:
    compiled = Schema(schema)

    if compiled.check(value):
        assert compiled.check(compiled.cast(value).value)


@many
@given(plain_schemas, json_values)
def test_casting_twice_changes_nothing_more(schema: Any, value: Any) -> None:
    compiled = Schema(schema)
    once = compiled.cast(value)
    twice = compiled.cast(once.value)

    assert _text(twice.value) == _text(once.value)
    assert twice.repairs == []


@many
@given(any_schemas, json_values)
def test_casting_twice_changes_nothing_more_whatever_the_schema(schema: Any, value: Any) -> None:
    compiled = Schema(schema)
    once = compiled.cast(value)

    assert _text(compiled.cast(once.value).value) == _text(once.value)


@many
@given(plain_schemas, json_values)
def test_a_valid_value_without_excess_comes_back_equal_but_for_defaults(
    schema: Any, value: Any
) -> None:
    compiled = Schema(schema)
    fitting = compiled.cast(value).value

    if compiled.check(fitting):
        result = compiled.cast(fitting)
        assert _text(result.value) == _text(fitting)
        assert result.repairs == []


@many
@given(any_schemas, json_values)
def test_the_input_is_never_touched_and_nothing_mutable_is_shared(schema: Any, value: Any) -> None:
    before = copy.deepcopy(value)
    document = copy.deepcopy(schema)
    result = Schema(schema).cast(value)

    assert _text(value) == _text(before)
    assert schema == document
    assert not _containers(result.value) & (_containers(value) | _containers(schema))


@many
@given(any_schemas, json_values)
def test_every_repair_names_a_place_in_the_result(schema: Any, value: Any) -> None:
    result = Schema(schema).cast(value)

    for repair in result.repairs:
        _at(result.value, repair.path)
        assert repair.message


@many
@given(plain_schemas, json_values)
def test_without_a_repair_nothing_has_changed_but_excess_and_defaults(
    schema: Any, value: Any
) -> None:
    result = Schema(schema).cast(value)

    def within(after: Any, before: Any) -> bool:
        """Whether what both have is equal."""
        if isinstance(after, dict) and isinstance(before, dict):
            return all(within(after[name], before[name]) for name in after.keys() & before.keys())
        if isinstance(after, list) and isinstance(before, list):
            return len(after) == len(before) and all(map(within, after, before))
        return _text(after) == _text(before)

    assert result.repairs or within(result.value, value)


@many
@given(any_schemas, json_values)
def test_there_are_errors_exactly_where_the_check_fails(schema: Any, value: Any) -> None:
    compiled = Schema(schema)

    assert bool(compiled.errors(value)) is not compiled.check(value)


@many
@given(any_schemas, json_values)
def test_both_passes_agree_on_what_needs_no_repair(schema: Any, value: Any) -> None:
    """The quick pass may give up, but what it gives is what the thorough one gives."""
    planner = Planner(Checker(schema))
    repairer = Repairer(planner)
    thorough, repairs = repairer.repair(value)
    try:
        quick = Stripper(planner, repairer).stage(planner.root()).strip(value, MAX_DEPTH)
    except GaveUpError:
        return

    if planner.checker.accepts(quick):
        assert _text(quick) == _text(thorough)
        assert repairs == []


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
def test_no_value_whatever_makes_check_errors_or_cast_raise(schema: Any, value: Any) -> None:
    compiled = Schema(schema)

    assert bool(compiled.errors(value)) is not compiled.check(value)
    compiled.cast(value)


@many
@given(any_schemas, json_values)
def test_none_for_repairs_means_valid(schema: Any, value: Any) -> None:
    compiled: CompiledSchema = Schema(schema).compile()
    result, repairs = compiled.normalise(value)

    assert repairs is not None or compiled.is_valid(result)
