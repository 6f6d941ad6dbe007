"""Plans: several schemas for one value, merged, and as many as a document may need."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from tests.limits import scaled

from operations.schema import Schema
from operations.schema.casting import CastPolicy, Normaliser, caches_of
from operations.schema.checking import Checker
from operations.schema.plans import Plan, Planner
from operations.schema.references import Site


def test_schemas_that_only_refer_to_the_same_place_have_the_same_plan() -> None:
    planner = Planner(
        Checker(
            {
                "properties": {
                    "a": {"$ref": "#/$defs/text"},
                    "b": {"$ref": "#/$defs/again", "description": "the same by another way"},
                    "c": {"$ref": "#/$defs/text", "default": "x"},
                },
                "$defs": {"text": {"type": "string"}, "again": {"$ref": "#/$defs/text"}},
            }
        )
    )
    root = planner.plan((planner.document.root,))
    first, second, third = (root.part(root.fields[name].sites) for name in ("a", "b", "c"))

    assert first is second
    assert first is not third
    assert third.default == "x"


def test_a_document_that_needs_too_many_plans_is_cast_partially(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Checker, "max_plans", 2)
    nested = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "object"}}}},
    }
    schema = Schema({"type": "object", "properties": {"x": nested, "y": nested}})
    value = {"x": {"a": {"b": {}, "c": 1}, "d": 1}, "y": {"a": {"e": 1}}, "z": 1}

    assert schema.cast(value).value == {"x": {"a": {"b": {}, "c": 1}}, "y": {"a": {"e": 1}}}


@pytest.mark.parametrize("policy", ["cast", "keep", "create"])
def test_the_content_of_an_open_object_is_not_planned(policy: CastPolicy) -> None:
    checker = Checker({"type": "array", "items": {"type": "object"}})
    rows = [{f"name {number}": number, "more": [{"a": 1}]} for number in range(50)]
    result, changes = Normaliser(checker, policy).normalise(rows)

    planner = caches_of(checker, policy).planner
    (_, item) = planner.plan((checker.document.root,)).items
    assert (result, changes) == (rows, None)
    assert result[0] is not rows[0]
    assert item.children.keys().isdisjoint(name for row in rows for name in row)


@pytest.mark.parametrize("policy", ["cast", "keep", "create"])
def test_a_schema_that_is_dropped_is_freed(policy: CastPolicy) -> None:
    number = {"type": "number", "default": 2}
    leaf = {"type": "object", "properties": {"c": number}}
    node = {
        "type": "object",
        "properties": {
            "value": number,
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "items": {"type": "array", "items": leaf},
        },
    }
    checker = Checker({"$defs": {"node": node}, "$ref": "#/$defs/node"})
    normaliser = Normaliser(checker, policy)
    for _ in range(3):
        normaliser.normalise({"next": {"value": 1, "next": None}, "items": [{"x": 1}], "y": 2})
    planner = weakref.ref(caches_of(checker, policy).planner)
    # Values that the garbage collector does not visit must not be part of a cycle.
    del checker, normaliser
    gc.collect()
    assert planner() is None


class _SlowChecker(Checker):
    """Compiles a validator only when `released` is set."""

    def __init__(self) -> None:
        super().__init__({"type": "integer", "minimum": 1})
        self.started, self.released = Event(), Event()

    def accepts_at(self, sites: tuple[Site, ...]) -> Callable[[Any], bool]:
        self.started.set()
        assert self.released.wait(scaled(10))
        return super().accepts_at(sites)


def test_the_plan_of_one_document_does_not_wait_for_the_validator_of_another() -> None:
    slow, other = _SlowChecker(), Checker({"type": "integer", "maximum": 1})
    slow_plan, other_plan = (_root_plan(each) for each in (slow, other))

    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = pool.submit(lambda: slow_plan.accepts)
            assert slow.started.wait(scaled(10))
            assert pool.submit(lambda: other_plan.accepts).result(10)(1)
            assert not waiting.done()
        finally:
            slow.released.set()
        assert not waiting.result(10)(0)


def _root_plan(checker: Checker) -> Plan:
    return Planner(checker).plan((checker.document.root,))
