"""The holder of a grant can narrow it without a key: no token makes a call cost more than its budget.

The tests count the work, and do not measure it: the native checks, the patterns that are compiled, and the units that
are spent.
"""

import hmac
import json
import threading
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.authority.test_entry_points import ENTRY_POINTS, Failed, opened

from operations import (
    CallError,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
)
from operations.authority import (
    ApprovalRule,
    Block,
    Grant,
    GrantError,
    Grants,
    narrow,
    new_block,
)
from operations.authority import approvals as approving
from operations.authority import grants as resolving
from operations.base import patterns as patterns_module
from operations.base.json.values import object_of
from operations.base.work import BudgetSpentError
from operations.contract import grant as granting
from operations.schema import compiling
from operations.schema.work import MAX_WORK, CountedSchema, TooMuchWorkError, Work
from operations.tools import ToolConfig, configure_tools

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R67")]

KEY = b"k" * 32
ANN = Identity("ann", ["task"])

BRANCHES: Any = {"allOf": [{"items": {"enum": [*range(20), "x"]}}] * 50}
WIDE = {"properties": {"rows": BRANCHES}}
"""50 branches, each of which compares every item with 21 values: half a second for 60 KB."""

NAMES = {"properties": {"names": {"allOf": [{"additionalProperties": {"type": "integer"}}] * 50}}}
"""50 branches that apply to every property, also to those that the caller omits."""

DOUBLED: Any = {
    "properties": {"tree": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"properties": {"a": {"allOf": [{"$ref": "#/$defs/node"}] * 2}}}},
}
"""Each level of the value is reached in twice as many ways as the one above."""


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def unevaluated(depth: int) -> Any:
    """Each level checks the next one twice."""
    schema: Any = {"properties": {"z": True}}
    for _ in range(depth):
        schema = {"allOf": [schema], "unevaluatedProperties": {"type": "integer"}}
    return {"properties": {"names": schema}}


HOSTILE: dict[str, tuple[Any, Any]] = {
    "branches": (WIDE, {"rows": list(range(20)) * 1_000}),
    "names": (NAMES, {"names": {f"name{number}": 1 for number in range(9_000)}}),
    "alternatives": (DOUBLED, {"tree": nested(40)}),
    "unevaluated": (unevaluated(12), {"names": {f"name{number}": 1 for number in range(100)}}),
    "pattern": (
        {"properties": {"text": {"allOf": [{"pattern": "(a|b)*" * 20 + "c"}] * 12}}},
        {"text": "ab" * 50_000},
    ),
    "look-around": ({"properties": {"text": {"pattern": "(?=(a|aa)*)b"}}}, {"text": "a" * 4_000}),
    "objects": (
        {"properties": {"rows": {"items": {"enum": [{"a": number} for number in range(500)]}}}},
        {"rows": [{"a": 7}] * 1_000},
    ),
    "unique": (
        {"properties": {"rows": {"allOf": [{"uniqueItems": True}] * 50}}},
        {"rows": list(range(20_000))},
    ),
    "digits": (
        {"properties": {"rows": {"items": {"multipleOf": 3}}}},
        {"rows": [10**300] * 2_000},
    ),
}


def register(registry: OperationRegistry) -> None:
    @registry.operation("task.load", scopes=["task"])
    async def load(
        rows: list[Any] | None = None,
        names: dict[str, Any] | None = None,
        tree: dict[str, Any] | None = None,
        text: str = "",
    ) -> str:
        return "loaded"


def forged(token: str, **fields: Any) -> str:
    """Narrow a grant as another implementation might: by signing a block that was not checked."""
    head, _, signature = token.rpartition(".")
    block = {"id": "b" * 16, "holder": "mallory", "operations": ["*"], **fields}
    segment = encoded(json.dumps(block, separators=(",", ":")).encode())
    key = urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    return f"{head}.{segment}.{encoded(hmac.digest(key, segment.encode(), 'sha256'))}"


def encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The properties in the schema of each native check of a document that is compiled from now on."""
    found = list[tuple[str, ...]]()

    def spied(schema: Any, *args: Any, **options: Any) -> Callable[[Any], bool]:
        is_valid = compiling.compile_schema(schema, *args, **options)

        def spy(value: Any) -> bool:
            found.append(tuple(object_of(object_of(schema).get("properties"))))
            return is_valid(value)

        return spy

    monkeypatch.setattr("operations.schema.checking.compile_schema", spied)
    return found


# ------------------------------------------------------------ calls


@pytest.mark.parametrize("name", ENTRY_POINTS)
async def test_a_hostile_token_makes_no_call_cost_more_than_its_budget(
    name: str, native: list[tuple[str, ...]]
) -> None:
    async with opened(name) as world:
        register(world.registry)
        root = world.grants.create("alice", "bot", operations=["task.*"])

        async def outcome(schema: Any, value: Any) -> Any:
            token = narrow(root, new_block("sub", operations=["*"], input={"task.load": schema}))
            native.clear()
            try:
                return await ENTRY_POINTS[name](world, "task.load", value, token)
            except Failed as failed:
                return failed.args[0]

        for schema, value in HOSTILE.values():
            assert await outcome(schema, value) == "ACCESS_DENIED"
            assert tuple(schema["properties"]) not in native, "the schema of the token was used"
        assert await outcome(WIDE, {"rows": [1, 2, 3]}) == "loaded", "a small input"
        assert ("rows",) in native
        assert await outcome(WIDE, {"rows": [1, 2, 30]}) == "ACCESS_DENIED"


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_call_that_would_cost_more_than_its_budget_names_the_block(name: str) -> None:
    registry, (schema, value) = OperationRegistry(), HOSTILE[name]
    register(registry)
    grants = Grants(KEY)
    block = new_block("sub\u202e", operations=["*"], input={"task.*": schema})
    token = narrow(grants.create(ANN, "bot", operations=["task.*"]), block)
    context = OperationContext(identity=await grants.resolve(token))

    with pytest.raises(CallError) as denied:
        await registry.execute("task.load", value, context)

    assert denied.value.code == "ACCESS_DENIED"
    assert denied.value.operation_id == "task.load"
    assert denied.value.details == {"block": block.id}
    assert "takes too much work" in str(denied.value)
    assert f"block {block.id} of sub\\u202e" in str(denied.value)
    assert "Send a smaller input" in str(denied.value)


async def test_all_blocks_of_a_grant_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = list[int]()
    spend = Work.spend

    def spy(self: Work, units: int) -> None:
        spent.append(units)
        spend(self, units)

    monkeypatch.setattr(Work, "spend", spy)
    registry, grants = OperationRegistry(), Grants(KEY)
    register(registry)
    token = grants.create(ANN, "bot", operations=["task.*"])
    schema = {"properties": {"rows": {"items": {"enum": [[1], [2]]}}}}

    outcomes = list[str]()
    for _ in range(8):
        token = narrow(token, new_block("sub", operations=["*"], input={"task.load": schema}))
        context = OperationContext(identity=await grants.resolve(token))
        spent.clear()
        try:
            outcomes.append(
                (await registry.execute("task.load", {"rows": [[1]] * 1_500}, context)).data
            )
        except CallError as error:
            outcomes.append(error.code)
            # What exceeds the budget is counted, and not done.
            assert sum(spent[:-1]) <= MAX_WORK < sum(spent)
        else:
            assert sum(spent) <= MAX_WORK

    assert outcomes[0] == "loaded"
    assert outcomes[-1] == "ACCESS_DENIED"
    assert outcomes == sorted(outcomes, reverse=True)


async def test_the_defaults_of_a_call_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = Grant(
        blocks=tuple(
            new_block(
                "sub",
                input={f"task.{'?' * length}*": {"properties": {"n": {}}} for length in range(4)},
            )
            for _ in range(5)
        ),
        keys=("",) * 5,
    )
    asked = list[Any]()

    def complete(value: Any) -> Any:
        asked.append(value)
        return {**value, "n": 1}

    assert grant.accepts("task.load", {}, complete, authority=False)
    assert len(grant.rules("task.load").accepts) == 20
    assert asked == [{}]


def padded() -> tuple[OperationRegistry, Any]:
    """Return a registry, and an input that omits a nested default, beside rows whose defaults take much work."""
    members = [
        {"properties": {f"p{index}": {"default": index}}, "required": ["x", str(index)]}
        for index in range(40)
    ]
    document = {
        "type": "object",
        "properties": {
            "order": {"type": "object", "properties": {"amount": {"type": "integer", "default": 9999}}},
            "rows": {"type": "array", "items": {"anyOf": members}},
        },
    }  # fmt: skip
    registry = OperationRegistry()

    async def run(input: Any, context: OperationContext) -> str:
        return "ran"

    spec = OperationSpec(
        name="pay",
        namespace="task",
        type=OperationType.MUTATION,
        input_schema=from_schema(document),
    )
    registry.register(Operation(spec, run, input="off"))
    return registry, {"order": {}, "rows": [{"x": 1, "p1": 2, "p2": 3}] * 20_000}


@pytest.mark.requirement("R65")
@pytest.mark.parametrize("is_approval", [False, True])
async def test_an_input_whose_defaults_take_too_much_work_to_find_is_denied(
    is_approval: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, completed = list[int](), OperationSpec.completed

    def noted(*args: Any) -> Any:
        try:
            return completed(*args)
        except BudgetSpentError:
            threads.append(threading.get_ident())
            raise

    monkeypatch.setattr(OperationSpec, "completed", noted)
    registry, value = padded()
    order = {"properties": {"amount": {"maximum": 500}}}
    block: dict[str, Any] = {"input": {"task.*": {"properties": {"order": order}}}}
    if is_approval:
        block = {}
        when = {"not": {"properties": {"order": order}}}
        configure_tools(registry, {"task.pay": ToolConfig(approve=ApprovalRule(when=when))})
    grants = Grants(KEY)
    bot = await grants.resolve(grants.create(ANN, "bot", operations=["task.*"], **block))
    context = OperationContext(identity=bot)

    async def outcome(value: Any) -> str:
        try:
            return str((await registry.execute("task.pay", value, context)).data)
        except CallError as error:
            return str(error)

    refused = "APPROVAL_REQUIRED" if is_approval else "ACCESS_DENIED"
    assert (await outcome({"order": {}})).startswith(refused)
    assert await outcome({"order": {"amount": 1}}) == "ran"
    assert not threads
    assert "takes too much work" in await outcome(value)
    # The event loop does a small part of the work; another thread does the rest.
    assert threads[0] == threading.get_ident() != threads[-1]


async def test_a_rule_for_approvals_that_takes_too_much_work_to_check_applies(
    native: list[tuple[str, ...]],
) -> None:
    registry = OperationRegistry()
    register(registry)
    schema, value = next(iter(HOSTILE.values()))
    when = {**schema, "required": ["never"]}
    configure_tools(registry, {"task.load": ToolConfig(approve=ApprovalRule(when=when))})
    context = OperationContext(identity=ANN)

    assert (await registry.execute("task.load", {"rows": [1]}, context)).data == "loaded"
    native.clear()
    with pytest.raises(CallError) as caught:
        await registry.execute("task.load", value, context)
    assert caught.value.code in ("APPROVAL_REQUIRED", "RESOURCE_EXHAUSTED")
    assert tuple(schema["properties"]) not in native, "the schema of the rule was used"


LARGE = {
    "project": "tea",
    "rows": [{f"name{column}": row for column in range(9)} for row in range(9_000)],
}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"project": {"const": "tea"}}},
        {"properties": {"project": {"pattern": "^t[a-z]{1,60}$"}}, "required": ["project"]},
        {"properties": {"project": {"pattern": "^(?!prod)[a-z]{1,60}$"}}},
        {"not": {"properties": {"project": {"const": "prod"}}}},
        {"properties": {"rows": {"items": {"properties": {"name1": {"type": "integer"}}}}}},
        {
            "properties": {"rows": {"maxItems": 10_000}, "project": True},
            "additionalProperties": False,
        },
    ],
)
def test_schemas_that_read_little_of_a_large_input_are_cheap(schema: Any) -> None:
    assert CountedSchema(schema).accepts(LARGE, Work())


# ------------------------------------------------------------ limits of tokens

PATTERNS = [f"task.a{number}*b" for number in range(300)]
TOO_LARGE: dict[str, Any] = {
    "patterns": {"operations": PATTERNS},
    "bytes": {"input": {"*": {"const": "x" * 17_000}}},
    "subschemas": {"input": {"*": {"allOf": [{}] * 500}}},
    "subschemas of several patterns": {
        "input": {f"{n}*": {"not": {"not": {}}} for n in range(170)}
    },
    "boolean subschemas": {"input": {"*": {"items": {"anyOf": [True] * 500}}}},
    "expressions": {"input": {"*": {"allOf": [{"pattern": f".{{900}}{n}"} for n in range(4)]}}},
    "names": {"input": {"*": {"patternProperties": {r"\w{100}": {}, r"\w{99}": {}}}}},
    "references to elsewhere": {
        "input": {"*": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}
    },
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_a_block_that_is_too_large_is_neither_made_nor_accepted(name: str) -> None:
    fields = TOO_LARGE[name]
    grants = Grants(KEY)
    root = grants.create(ANN, "bot", operations=["*"])

    with pytest.raises(GrantError) as made:
        new_block("sub", **fields)
    with pytest.raises(GrantError):
        grants.create(ANN, "bot", **{"operations": ["*"], **fields})
    with pytest.raises(GrantError):
        await grants.resolve(forged(root, **fields))
    if name != "references to elsewhere":
        assert "at most" in str(made.value)


def test_a_block_of_another_implementation_is_checked_when_it_is_narrowed() -> None:
    root = Grants(KEY).create(ANN, "bot", operations=["*"])
    large = forged(root, input=TOO_LARGE["subschemas"]["input"])

    with pytest.raises(GrantError, match=r"500 schemas.* of mallory 501"):
        narrow(large, new_block("sub"))
    with pytest.raises(GrantError, match="500 schemas"):
        narrow(root, Block(id="b", holder="sub", operations=("*",), **TOO_LARGE["subschemas"]))
    with pytest.raises(ValueError, match="256 patterns"):
        Block(id="b", holder="sub", operations=tuple(PATTERNS))


async def test_the_expressions_of_all_blocks_count_together() -> None:
    grants = Grants(KEY)
    token = grants.create(ANN, "bot", operations=["*"])
    for number in range(3):
        token = narrow(token, new_block("sub", input={"*": {"pattern": f".{{900}}{number}"}}))
    assert await grants.resolve(token)

    with pytest.raises(GrantError, match=r"regular expressions.* 3,000 characters"):
        narrow(token, new_block("sub", input={"*": {"pattern": ".{900}"}}))


async def test_only_the_grant_of_one_call_may_be_longer_than_a_header() -> None:
    grants = Grants(KEY)
    token = grants.create(ANN, "bot", operations=["*"])
    for number in range(9):
        token = forged(token, id=f"{number:016}", approve=[f"{number}{'x' * 250}"] * 3)

    assert len(token) > 8 * 1024
    with pytest.raises(GrantError, match="8192 characters"):
        await grants.resolve(token)


@pytest.mark.parametrize("name", ENTRY_POINTS)
async def test_a_token_with_a_thousand_patterns_is_rejected_before_they_are_compiled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[int]()

    class Spy(patterns_module.Patterns):
        def __init__(self, patterns: Any) -> None:
            patterns = list(patterns)
            compiled.append(len(patterns))
            super().__init__(patterns)

    async with opened(name) as world:
        monkeypatch.setattr(granting, "Patterns", Spy)
        root = world.grants.create("alice", "bot", operations=["task.*"])
        token = forged(root, operations=[f"{n:x}*" for n in range(1_050)])
        assert len(token) < 8 * 1024 + 4 * 1024
        try:
            outcome = await ENTRY_POINTS[name](world, "task.add", {"n": 1}, token)
        except Failed as failed:
            outcome = failed.args[0]

        assert outcome == "ACCESS_DENIED"
        assert not [size for size in compiled if size > 10]


async def test_a_listing_compares_each_operation_once_with_all_patterns_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, compiled = list[str](), list[int]()

    class Spy(patterns_module._Automaton):
        def __init__(self, patterns: list[str]) -> None:
            compiled.append(len(patterns))
            super().__init__(patterns)

        def run(self, operation_id: str) -> int:
            runs.append(operation_id)
            return super().run(operation_id)

    monkeypatch.setattr(patterns_module, "_Automaton", Spy)
    grant = Grant(
        blocks=(new_block("bot", operations=[f"*{n}.?" for n in range(256)]),), keys=("",)
    )
    ids = [f"a{number}.b" for number in range(500)]

    for _ in range(3):
        covered = [each for each in ids if grant.covers(each, authority=False)]
    assert len(covered) == 500
    assert compiled == [256]
    assert runs == ids


@settings(max_examples=100)
@given(
    st.lists(st.text("ab.*?", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.text("ab.", max_size=6), max_size=12),
)
def test_patterns_match_as_those_of_file_names_in_any_order(
    patterns: list[str], ids: list[str]
) -> None:
    # Matching continues from the id before.
    compiled = patterns_module.Patterns(patterns)
    for each in ids:
        expected = {pattern for pattern in patterns if fnmatchcase(each, pattern)}
        assert compiled.cover(each) is bool(expected)
        assert compiled.matching(each) == expected


async def test_a_call_with_hundreds_of_counters_looks_once_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = list[str]()
    has_room = approving._has_room

    def spy(counts: Any, block: str) -> bool:
        looked.append(block)
        return has_room(counts, block)

    monkeypatch.setattr(approving, "_has_room", spy)
    registry, grants = OperationRegistry(), Grants(KEY)
    register(registry)
    token = grants.create(ANN, "bot", operations=["task.*"])
    for _ in range(3):
        token = narrow(token, new_block("sub", calls={f"task{'?' * n}*": 9 for n in range(6)}))
    context = OperationContext(identity=await grants.resolve(token))

    await registry.execute("task.load", {}, context)
    assert len(looked) == 3
    await registry.execute("task.load", {}, context)
    assert len(looked) == 3


async def test_cached_grants_are_limited_by_the_size_of_their_schemas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolving, "_MAX_WEIGHT", 1_000)
    grants = Grants(KEY)
    root = grants.create(ANN, "bot", operations=["*"])
    for number in range(20):
        schema = {"pattern": f"[a-z]{{300}}{number}"}
        await grants.resolve(narrow(root, new_block("sub", input={"*": schema})))

    assert len(grants._resolved) == 3
    assert grants._weight == sum(each[1].weight for each in grants._resolved.values()) <= 1_000


# ------------------------------------------------------------ counting

names = st.sampled_from(["a", "b", "c"])
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "ab", "é" * 9, 10**30]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)
schemas: Any = st.recursive(
    st.sampled_from(
        [True, {}, {"type": "string", "pattern": "^a"}, {"maximum": 3}, {"enum": [1, "ab"]}]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"properties": st.dictionaries(names, inner, max_size=3)}),
        st.fixed_dictionaries({"patternProperties": st.dictionaries(names, inner, max_size=2)}),
        st.fixed_dictionaries({"additionalProperties": inner, "propertyNames": inner}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries(
            {"items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2)}
        ),
        st.fixed_dictionaries(
            {"if": inner, "then": inner, "contains": inner, "uniqueItems": st.just(True)}
        ),
        st.fixed_dictionaries({"dependentSchemas": st.dictionaries(names, inner, max_size=2)}),
        st.fixed_dictionaries(
            {"unevaluatedProperties": inner, "anyOf": st.lists(inner, min_size=1, max_size=2)}
        ),
    ),
    max_leaves=8,
)


def steps(schema: Any, value: Any) -> int:
    """Count the pairs of a schema and a value that a check may follow, in the plainest way."""
    if not isinstance(schema, dict):
        return 1
    found = 1
    here = [
        *schema.get("allOf", ()),
        *schema.get("anyOf", ()),
        *schema.get("dependentSchemas", {}).values(),
    ]
    here += [schema[key] for key in ("if", "then") if key in schema]
    found += sum(steps(each, value) for each in here)
    if isinstance(value, dict):
        for name, inner in value.items():
            named = schema.get("properties", {})
            below = [named[name]] if name in named else []
            below += schema.get("patternProperties", {}).values()
            if name not in named:
                below += [
                    schema[key]
                    for key in ("additionalProperties", "unevaluatedProperties")
                    if key in schema
                ]
            found += sum(steps(each, inner) for each in below)
            found += steps(schema["propertyNames"], name) if "propertyNames" in schema else 0
    if isinstance(value, list):
        for index, inner in enumerate(value):
            first = schema.get("prefixItems", [])
            below = (
                [first[index]]
                if index < len(first)
                else [schema["items"]]
                if "items" in schema
                else []
            )
            below += [schema["contains"]] if "contains" in schema else []
            found += sum(steps(each, inner) for each in below)
    return found


@settings(max_examples=300, deadline=None)
@given(schemas, values)
def test_no_count_is_below_the_steps_of_the_check(schema: Any, value: Any) -> None:
    counted, work = CountedSchema(schema), Work(1 << 40)
    counted.accepts(value, work)
    spent = (1 << 40) - work.left

    assert spent >= 5 * steps(schema, value)
    assert counted._count(value, 1 << 40) >= 5 * steps(schema, value)
    with pytest.raises(TooMuchWorkError):
        counted.accepts(value, Work(4))
