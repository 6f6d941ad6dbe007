"""The work on a value is counted, bounded and divided; a value whose budget is spent stays unchanged."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schema.strategies import any_schemas, json_values

from operations import CallError, ErrorCode, OperationContext, OperationRegistry, from_schema
from operations.base import work as units
from operations.base.work import BUDGET, INLINE, PIECE, BudgetSpentError, InlineWork, Work
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.registry import path
from operations.schema import NOT_NORMALISED, CastPolicy, Schema, dividing, within_budget
from operations.schema.casting import stripping, typed
from operations.schema.checking import Checker
from operations.schema.plans import Plan, Planner

pytestmark = pytest.mark.requirement("R67")

MEMBERS = [
    {
        "type": "object",
        "properties": {f"p{index}": {"type": "integer"}, "a": {"type": "string"}},
        "required": [f"p{index}"],
    }
    for index in range(200)
]
"""Members that no property tells apart."""

WIDE = {"type": "array", "items": {"anyOf": MEMBERS}}
HOSTILE = [{"a": "xxxxxxxxx", "b": "y", "c": index} for index in range(600)]
ROW = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "pattern": "^[a-z]*$"},
        "at": {"type": "string", "default": "now"},
    },
    "required": ["id"],
}


class _Counted(Work):
    """Work that remembers the largest number of units that were counted at once."""

    largest = 0

    def spend(self, units: int) -> None:
        self.largest = max(self.largest, units)
        super().spend(units)


def _mismatches(changes: Any) -> list[tuple[str, str]]:
    return [(change.kind, change.message) for change in changes]


SPENT = [("mismatch", NOT_NORMALISED)]


@pytest.mark.parametrize("policy", ["cast", "keep", "create"])
def test_a_value_whose_budget_is_spent_is_returned_unchanged(policy: CastPolicy) -> None:
    """22 kB for a union of 200 members took five seconds."""
    schema = Schema(WIDE)

    result = schema.cast(HOSTILE, policy)

    assert result.value == HOSTILE
    assert _mismatches(result.changes) == SPENT


def test_no_more_than_a_piece_is_counted_at_once() -> None:
    work = _Counted()

    within_budget(Schema(WIDE).compile().normaliser("cast"), HOSTILE, work)

    assert work.largest <= PIECE


def test_the_event_loop_does_only_a_part_of_the_work() -> None:
    normalise = Schema(WIDE).compile().normaliser("cast")
    normalise(HOSTILE[:1], Work())

    with pytest.raises(BudgetSpentError):
        normalise(HOSTILE)


@pytest.mark.parametrize("policy", ["cast", "keep", "create"])
def test_work_that_is_stopped_ends_at_the_next_step(policy: CastPolicy) -> None:
    class Stopping(Work):
        steps = 0

        @property
        def is_stopped(self) -> bool:  # type: ignore[override]
            self.steps += 1
            return self.steps >= 1_000

    work = Stopping()
    normalise = Schema(WIDE).compile().normaliser(policy)
    normalise([], Work())

    with pytest.raises(BudgetSpentError):
        normalise(HOSTILE, work)

    assert work.steps == 1_000


NAMES = {f"n{index}": index for index in range(90_000)}
BRANCHES = {
    "allOf": [
        {"properties": {f"x{index}": {"type": "string"}}, "patternProperties": {f"^q{index}": {}}}
        for index in range(50)
    ],
    "additionalProperties": {"type": "string"},
}


def test_an_explanation_ends_when_its_budget_is_spent() -> None:
    """90,000 names under 50 branches took 8 to 28 seconds."""
    schema = Schema({**BRANCHES, "required": ["first"]})

    issues = schema.errors(NAMES)

    assert (issues[-1].path, issues[-1].keyword) == ("", "budget")
    assert "budget" in issues[-1].message


def test_a_result_that_takes_too_long_to_explain_is_not_normalised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = Schema({**BRANCHES, "additionalProperties": False, "required": ["first"]})
    monkeypatch.setattr(Work, "left", INLINE)

    assert _mismatches(schema.cast(NAMES).changes) == SPENT


def test_defaults_that_multiply_are_counted() -> None:
    """A few bytes do not become millions of objects."""
    wide = {f"p{index}": {"type": "integer", "default": 1} for index in range(2_000)}
    schema = Schema({"type": "array", "items": {"type": "object", "properties": wide}})

    assert _mismatches(schema.cast([{}] * 10_000).changes) == SPENT
    assert len(schema.cast([{}]).value[0]) == 2_000


def test_created_values_are_counted() -> None:
    wide = {f"p{index}": {"type": "integer"} for index in range(2_000)}
    item = {"type": "object", "properties": wide, "required": [*wide]}
    schema = Schema({"type": "array", "items": item})

    assert _mismatches(schema.cast([{}] * 10_000, "create").changes) == SPENT


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Divide every value of more than a few units."""
    for module in (dividing, stripping, typed):
        monkeypatch.setattr(module, "PIECE", 200)
    return 200


def _rows(count: int) -> list[Any]:
    return [
        {"id": str(index) if index % 7 == 0 else index, "name": "ab" if index % 5 else "AB", "x": 1}
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("document", "value"),
    [
        ({"type": "array", "items": ROW}, _rows(100)),
        ({"type": "array", "items": ROW, "minItems": 1, "maxItems": 100}, _rows(100)),
        ({"type": "array", "items": ROW, "maxItems": 99}, _rows(100)),
        (
            {
                "type": "object",
                "properties": {
                    "rows": {"anyOf": [{"type": "array", "items": ROW}, {"type": "null"}]},
                    "total": {"type": "integer"},
                },
                "required": ["rows"],
            },
            {"rows": _rows(100), "total": "100", "extra": 1},
        ),
    ],
)
@pytest.mark.parametrize("policy", ["cast", "keep", "create"])
def test_a_divided_value_is_normalised_like_a_whole_one(
    request: pytest.FixtureRequest, document: Any, value: Any, policy: CastPolicy
) -> None:
    whole = Schema(document).cast(value, policy)

    request.getfixturevalue("small_pieces")
    divided = Schema({**document, "title": "divided"}).cast(value, policy)

    assert divided.value == whole.value
    assert _found(divided.changes) == _found(whole.changes)


def test_an_explanation_ends_when_the_work_that_it_is_a_part_of_is_stopped() -> None:
    work = Work()
    before = work.explaining()
    work.stop()
    for each in (before, work.explaining()):
        issues = Schema(WIDE).compile().errors(HOSTILE, each)
        assert [issue.keyword for issue in issues] == ["budget"]


def _found(changes: Any) -> set[tuple[str, str, int]]:
    return {(change.kind, change.path, change.count) for change in changes}


@settings(deadline=None, max_examples=300)
@given(any_schemas, json_values, st.integers(1, 40))
def test_a_divided_check_agrees_with_the_validator(schema: Any, value: Any, size: int) -> None:
    checker = Checker(schema)
    planner = Planner(checker)
    plan = planner.plan((checker.document.root,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "PIECE", size)
        try:
            divided = dividing.fits(plan, value, Work())
        except BudgetSpentError:
            return

    assert divided is checker.accepts(value)


@pytest.mark.parametrize(
    ("document", "valid", "invalid"),
    [
        ({"type": "array", "uniqueItems": True}, [[1], [2]], [[1], [1]]),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
            {"a": 1, "b": "x"},
            {"a": "x", "b": "x"},
        ),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
            {"a": [1, 2, 3]},
            {"a": [1, 2, 3], "b": 1},
        ),
        ({"prefixItems": [{"type": "integer"}], "items": False}, [1], [1, 2, 3]),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, [1, 2, 3], None),
    ],
)
def test_what_a_keyword_forbids_is_found_when_a_check_is_divided(
    small_pieces: int, document: Any, valid: Any, invalid: Any
) -> None:
    checker = Checker(document)
    plan = Planner(checker).plan((checker.document.root,))
    plan.__dict__["width"] = plan.__dict__["weight"] = small_pieces

    assert dividing.fits(plan, valid, Work())
    assert invalid is None or not dividing.fits(plan, invalid, Work())


@pytest.mark.parametrize(
    "document",
    [
        {"type": "array", "contains": {"type": "integer"}},
        {"type": "array", "not": {"const": []}},
        {"enum": [[1], [2]]},
        {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"items": {"const": 1}}]},
    ],
)
def test_a_check_that_cannot_be_divided_counts_as_spent(small_pieces: int, document: Any) -> None:
    checker = Checker(document)
    plan = Planner(checker).plan((checker.document.root,))

    with pytest.raises(BudgetSpentError):
        dividing.fits(plan, [1] * 1_000, Work())


def test_long_patterns_count_for_every_character() -> None:
    checker = Checker({"type": "string", "pattern": "(a|b)*a(a|b){600}"})
    plan = Planner(checker).plan((checker.document.root,))
    work = Work()

    dividing.fits(plan, "ab" * 100, work)

    assert BUDGET - work.left > 90_000


# ------------------------------------------------------------ results of calls


def _registry(document: Any, give: Callable[[], Any]) -> OperationRegistry:
    async def handler(_input: Any, _context: OperationContext) -> Any:
        return give()

    spec = OperationSpec(
        name="get", namespace="x", type=OperationType.QUERY, output_schema=from_schema(document)
    )
    return OperationRegistry([Operation(spec, handler)])


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which results were normalised."""
    found: list[threading.Thread] = []
    normalise = within_budget

    def noting(*args: Any) -> Any:
        found.append(threading.current_thread())
        return normalise(*args)

    monkeypatch.setattr(path, "within_budget", noting)
    return found


async def test_a_local_result_that_needs_much_work_leaves_the_event_loop(
    threads: list[threading.Thread],
) -> None:
    registry = _registry(WIDE, lambda: HOSTILE)

    envelope = await registry.execute("x.get")

    assert envelope.data == HOSTILE
    assert _mismatches(envelope.meta.changes) == SPENT
    assert threads
    assert threading.main_thread() not in threads


async def test_results_that_need_little_work_stay_in_the_event_loop(
    threads: list[threading.Thread],
) -> None:
    registry = _registry({"type": "array", "items": ROW}, lambda: _rows(200))

    envelope = await registry.execute("x.get")

    assert envelope.meta.changes
    assert not threads


async def test_large_results_without_a_schema_are_converted_in_a_thread(
    threads: list[threading.Thread],
) -> None:
    value = [[index] for index in range(100_000)]

    envelope = await _registry({}, lambda: value).execute("x.get")

    assert envelope.data == value
    assert envelope.meta.changes == ()
    assert threads


@pytest.mark.parametrize("output", ["warn", "strict"])
async def test_a_result_that_cannot_be_checked_is_reported(output: Any) -> None:
    document = {"type": "array", "items": {"not": {"anyOf": MEMBERS}}}
    spec = OperationSpec(
        name="get", namespace="x", type=OperationType.QUERY, output_schema=from_schema(document)
    )
    large = [{f"n{index}": 1 for index in range(100_000)}]

    async def handler(_input: Any, _context: OperationContext) -> Any:
        return large

    checked = OperationRegistry([Operation(spec, handler, output=output)])
    if output == "warn":
        envelope = await checked.execute("x.get")
        assert envelope.data == large
        assert _mismatches(envelope.meta.changes) == SPENT
    else:
        with pytest.raises(CallError) as caught:
            await checked.execute("x.get")
        assert caught.value.code == ErrorCode.EXECUTION_ERROR
        assert "budget" in str(caught.value.details)


async def test_work_is_abandoned_when_its_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    held: list[Work] = []
    normalise = within_budget

    def waiting(function: Any, value: Any, work: Work) -> Any:
        held.append(work)
        begun.set()
        try:
            while not work.is_stopped:
                ended.wait(0.001)
            return normalise(function, value, work)
        finally:
            ended.set()

    monkeypatch.setattr(path, "within_budget", waiting)
    registry = _registry(WIDE, lambda: HOSTILE)
    call = asyncio.create_task(registry.execute("x.get"))
    await asyncio.to_thread(begun.wait)

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(ended.wait)

    # Nothing was spent beyond the step that noticed it.
    assert held[0].left > BUDGET - 100_000


async def test_a_value_that_cannot_be_converted_within_the_budget_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "BUDGET", 5_000)
    monkeypatch.setattr(Work, "left", 5_000)
    monkeypatch.setattr(InlineWork, "left", 1_000)
    registry = _registry({}, lambda: [[index] for index in range(10_000)])

    with pytest.raises(CallError) as caught:
        await registry.execute("x.get")

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert "x.get" in caught.value.message


def test_the_plan_of_a_wide_schema_is_wide() -> None:
    checker = Checker(WIDE)
    plan: Plan = Planner(checker).plan((checker.document.root,))

    assert plan.width > 200
