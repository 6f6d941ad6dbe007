"""Whatever the features of a type: no value reaches a handler that the rule, applied to what the handler got, rejects.

The types combine the ways in which an object can differ from the JSON that it is built from: names, validators,
conversions, defaults, hooks, and containers. The tests read the attributes of the objects that the handlers receive,
and apply each rule to them in Python.
"""

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    RootModel,
    StringConstraints,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from tests.authority.test_checked_input import ALICE, DENIED, REQUIRED, World, agent
from typing_extensions import TypedDict

from operations import AccessControl, ErrorCode
from operations.authority import ApprovalRule

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R65")]


class Names(NamedTuple):
    """The names of the fields in the input schema."""

    amount: str = "amount"
    env: str = "env"
    project: str = "project"


class Kind(NamedTuple):
    """A type, and the names of its fields in the input schema."""

    annotation: Any
    names: Names = Names()


class Facts(NamedTuple):
    """What a handler found in one object."""

    amount: Any
    env: Any
    project: Any


# ------------------------------------------------------------ fields


class Environment(enum.Enum):
    PROD = "prod"
    DEV = "dev"
    TEST = "test"

    @classmethod
    def _missing_(cls, value: object) -> "Environment | None":
        text = str(value).strip().lower()
        return next((member for member in cls if member.value == text), None)


def clean(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


NUMBERS: dict[str, Any] = {
    "int": int,
    "Decimal": Decimal,
    "float": float,
    "before": Annotated[int, BeforeValidator(lambda value: value * 10)],
    "after": Annotated[int, AfterValidator(abs)],
    "wrap": Annotated[int, WrapValidator(lambda value, inner: inner(value) ** 2)],
    "plain": Annotated[int, PlainValidator(lambda value: int(value) * 100)],
    "union": int | str,
}
TEXTS: dict[str, Any] = {
    "str": str,
    "constraints": Annotated[str, StringConstraints(strip_whitespace=True, to_lower=True)],
    "before": Annotated[str, BeforeValidator(clean)],
    "after": Annotated[str, AfterValidator(clean)],
    "enum": Annotated[Environment, PlainValidator(Environment)],
    "optional": Annotated[str, AfterValidator(clean)] | None,
}


def namings() -> dict[str, tuple[ConfigDict, dict[str, Any], Names]]:
    """Return configurations and aliases of models, with the names in their input schema."""
    paths = AliasChoices("amountCents", "sum", AliasPath("values", 0))
    generated = AliasGenerator(validation_alias=lambda name: AliasChoices(f"{name}Cents", name))
    return {
        "plain": (ConfigDict(), {}, Names()),
        "extra": (ConfigDict(extra="allow"), {}, Names()),
        "by name": (
            ConfigDict(populate_by_name=True),
            {"amount": {"alias": "amountCents"}, "env": {"alias": "Env"}},
            Names("amountCents", "Env"),
        ),
        "choices": (
            ConfigDict(),
            {"amount": {"validation_alias": paths}, "project": {"validation_alias": AliasChoices("project", "p")}},
            Names("amountCents"),
        ),
        "generator": (
            ConfigDict(alias_generator=generated),
            {},
            Names("amountCents", "envCents", "projectCents"),
        ),
        "serialization": (
            ConfigDict(populate_by_name=True),
            {"amount": {"alias": "amountCents", "serialization_alias": "other", "exclude": True}},
            Names("amountCents"),
        ),
    }  # fmt: skip


@model_validator(mode="before")
def moved(cls: Any, given: Any) -> Any:
    # The hidden name is not in the input schema.
    if isinstance(given, dict) and "hidden" in given:
        return {**given, **given["hidden"]}
    return given


@model_validator(mode="after")
def derived(self: Any) -> Any:
    if self.project == 9:
        object.__setattr__(self, "amount", 9999)
    return self


@model_validator(mode="wrap")
def replaced(cls: Any, given: Any, inner: Any) -> Any:
    made = inner(given)
    return made.model_copy(update={"env": "prod"}) if made.project == 9 else made


HOOKS: dict[str, dict[str, Any]] = {
    "none": {},
    "before": {"moved": moved},
    "after": {"derived": derived},
    "wrap": {"replaced": replaced},
}


@cache
def models() -> dict[str, Kind]:
    found: dict[str, Kind] = {}

    def add(number: str, text: str, naming: str, hook: str) -> None:
        config, aliases, names = namings()[naming]
        fields: dict[str, Any] = {
            "amount": (NUMBERS[number], Field(0, **aliases.get("amount", {}))),
            "env": (TEXTS[text], Field("dev", **aliases.get("env", {}))),
            "project": (int, Field(7, **aliases.get("project", {}))),
        }
        name = f"{number} {text} {naming} {hook}"
        model = create_model(
            name.title().replace(" ", ""), __config__=config, __validators__=HOOKS[hook], **fields
        )
        found[f"model {name}"] = Kind(model, names)

    for number in NUMBERS:
        add(number, "constraints", "by name", "none")
    for text in TEXTS:
        add("int", text, "choices", "none")
    for naming in namings():
        add("Decimal", "before", naming, "none")
        for hook in HOOKS:
            add("int", "after", naming, hook)
    return found


# ------------------------------------------------------------ other classes


@pydantic_dataclass(config=ConfigDict(populate_by_name=True))
class Classic:
    amount: Decimal = Field(default=Decimal(0), alias="amountCents")
    env: Annotated[str, AfterValidator(clean)] = "dev"
    project: int = Field(default=7, validation_alias=AliasChoices("project", "p"))

    def __post_init__(self) -> None:
        if self.project == 9:
            self.amount = Decimal(9999)


@dataclass
class Standard:
    amount: int = 0
    env: str = "dev"
    project: int = 7

    def __post_init__(self) -> None:
        self.env = clean(self.env)
        if self.project == 9:
            self.amount = 9999


@dataclass
class Aliased:
    """Pydantic reads it inside a model."""

    amount: Annotated[int, Field(validation_alias=AliasChoices("amountCents", "amount"))] = 0
    env: Annotated[str, BeforeValidator(clean)] = "dev"
    project: int = dataclasses.field(default=7, kw_only=True)


class Struct(msgspec.Struct, rename={"amount": "amountCents"}, tag="x", tag_field="kind"):
    amount: Decimal = Decimal(0)
    env: str = "dev"
    project: int = 7

    def __post_init__(self) -> None:
        self.env = clean(self.env)
        if self.project == 9:
            self.amount = Decimal(9999)


@attrs.define
class Attrs:
    project: int = 7
    amount: int = attrs.field(default=0, converter=abs)
    env: str = attrs.field(default="dev", converter=clean)

    def __attrs_post_init__(self) -> None:
        if self.project == 9:
            self.amount = 9999


@attrs.define
class Computed:
    project: int = 7
    amount: int = attrs.Factory(lambda self: 9999 if self.project == 9 else 0, takes_self=True)
    env: str = "dev"


class Dict(TypedDict, total=False):
    amount: Annotated[int, AfterValidator(abs)]
    env: Annotated[str, BeforeValidator(clean)]
    project: int


T = TypeVar("T")


class Generic_(BaseModel, Generic[T]):  # noqa: N801
    amount: T = Field(0, validation_alias=AliasChoices("amountCents", "sum"))  # type: ignore[assignment]
    env: Annotated[str, AfterValidator(clean)] = "dev"
    project: int = 7


class Late(BaseModel):
    project: int = 7
    amount: int = Field(default_factory=lambda data: 9999 if data["project"] == 9 else 0)
    env: Annotated[str, AfterValidator(clean)] = "dev"


CLASSES: dict[str, Kind] = {
    "pydantic dataclass": Kind(Classic, Names("amountCents")),
    "dataclass": Kind(Standard),
    "struct": Kind(Struct, Names("amountCents")),
    "attrs": Kind(Attrs),
    "attrs factory": Kind(Computed),
    "TypedDict": Kind(Dict),
    "generic": Kind(Generic_[Decimal], Names("amountCents")),
    "late default": Kind(Late),
}
KINDS = {**models(), **CLASSES}
INSIDE_MODELS = {"aliased dataclass": Kind(Aliased, Names("amountCents"))}


# ------------------------------------------------------------ containers


class Wrapper(NamedTuple):
    """A type around another one."""

    annotate: Callable[[Any], Any]
    schema: Callable[[Any], Any]
    wrap: Callable[[Any], Any]
    unwrap: Callable[[Any], list[Any]]
    path: str | None = None


class Box(BaseModel, Generic[T]):
    inner: T


@dataclass
class DataBox(Generic[T]):
    inner: T


def of(outer: Any, *inner: Any) -> Any:
    """Return a generic type with its arguments."""
    return outer[inner if len(inner) > 1 else inner[0]]


def in_struct(kind: Any) -> Any:
    return msgspec.defstruct("Boxed", [("inner", kind)], rename={"inner": "Inner"})


WRAPPERS: dict[str, Wrapper] = {
    "itself": Wrapper(lambda kind: kind, lambda rule: rule, lambda value: value, lambda got: [got], ""),
    "optional": Wrapper(lambda kind: kind | None, lambda rule: rule, lambda value: value, lambda got: [got], ""),
    "list": Wrapper(lambda kind: of(list, kind), lambda rule: {"items": rule}, lambda value: [value], list),
    "tuple": Wrapper(
        lambda kind: of(tuple, kind, int),
        lambda rule: {"prefixItems": [rule]},
        lambda value: [value, 1],
        lambda got: [got[0]],
        "/0",
    ),
    "dict": Wrapper(
        lambda kind: of(dict, str, kind),
        lambda rule: {"additionalProperties": rule},
        lambda value: {"a": value},
        lambda got: [*got.values()],
    ),
    "model": Wrapper(
        lambda kind: of(Box, kind),
        lambda rule: {"properties": {"inner": rule}},
        lambda value: {"inner": value},
        lambda got: [got.inner],
        "/inner",
    ),
    "list in a model": Wrapper(
        lambda kind: of(Box, of(list, kind) | None),
        lambda rule: {"properties": {"inner": {"items": rule}}},
        lambda value: {"inner": [value]},
        lambda got: got.inner,
    ),
    "dataclass": Wrapper(
        lambda kind: of(DataBox, kind),
        lambda rule: {"properties": {"inner": rule}},
        lambda value: {"inner": value},
        lambda got: [got.inner],
        "/inner",
    ),
    "struct": Wrapper(
        in_struct,
        lambda rule: {"properties": {"Inner": rule}},
        lambda value: {"Inner": value},
        lambda got: [got.inner],
        "/Inner",
    ),
    "root": Wrapper(
        lambda kind: of(RootModel, kind),
        lambda rule: rule,
        lambda value: value,
        lambda got: [got.root],
        "",
    ),
}  # fmt: skip


# ------------------------------------------------------------ rules


class Rule(NamedTuple):
    """A schema, and what it means for the objects."""

    schema: Callable[[Names], Any]
    accepts: Callable[[Facts], bool]


def is_most(limit: int) -> Callable[[Facts], bool]:
    return lambda facts: isinstance(facts.amount, str) or facts.amount <= limit


RULES: dict[str, Rule] = {
    "maximum": Rule(
        lambda names: {"properties": {names.amount: {"maximum": 500}}},
        is_most(500),
    ),
    "not prod": Rule(
        lambda names: {"properties": {names.env: {"not": {"const": "prod"}}}},
        lambda facts: facts.env != "prod",
    ),
    "enum": Rule(
        lambda names: {"properties": {names.env: {"enum": ["dev", "test"]}}},
        lambda facts: facts.env in ("dev", "test"),
    ),
    "not both": Rule(
        lambda names: {
            "not": {
                "properties": {names.env: {"const": "prod"}, names.amount: {"minimum": 100}},
                "required": [names.env, names.amount],
            }
        },
        lambda facts: not (facts.env == "prod" and not isinstance(facts.amount, str) and facts.amount >= 100),
    ),
    "if": Rule(
        lambda names: {
            "if": {"properties": {names.env: {"const": "prod"}}},
            "then": {"properties": {names.amount: {"maximum": 5}}},
        },
        lambda facts: facts.env != "prod" or is_most(5)(facts),
    ),
    "no other property": Rule(
        lambda names: {
            "properties": {names.env: True, names.project: True, "kind": True, "p": True},
            "additionalProperties": False,
        },
        lambda facts: facts.amount == 0,
    ),
    "required": Rule(
        lambda names: {"not": {"required": [names.amount]}},
        lambda facts: facts.amount == 0,
    ),
    "pattern": Rule(
        lambda names: {"patternProperties": {"(?i)^env": {"pattern": "^(dev|test)$"}}},
        lambda facts: facts.env in ("dev", "test", None),
    ),
}  # fmt: skip
WHEN: dict[str, Rule] = {
    "minimum": Rule(
        lambda names: {"properties": {names.amount: {"type": "number", "minimum": 100}}, "required": [names.amount]},
        lambda facts: not isinstance(facts.amount, str) and facts.amount >= 100,
    ),
    "prod": Rule(
        lambda names: {"properties": {names.env: {"const": "prod"}}, "required": [names.env]},
        lambda facts: facts.env == "prod",
    ),
}  # fmt: skip


def facts_of(got: Any) -> Facts:
    default = Facts(0, "dev", 7)
    found = [
        got.get(name, other) if isinstance(got, dict) else getattr(got, name)
        for name, other in zip(Facts._fields, default, strict=True)
    ]
    amount, env, project = found
    return Facts(amount, env.value if isinstance(env, enum.Enum) else env, project)


# ------------------------------------------------------------ inputs

AMOUNTS: list[Any] = [0, 5, 9999, -9999, 50, "9999", "5", 9999.0, 1e4, "1E4"]
ENVIRONMENTS: list[Any] = ["dev", "prod", "PROD", " prod", "Prod\t", "test", None]
PROJECTS: list[Any] = [7, 8, 9, "9", 7.0]
VALUES: dict[str, list[Any]] = {
    "amount": AMOUNTS, "amountCents": AMOUNTS, "sum": AMOUNTS, "values": [[each] for each in AMOUNTS],
    "env": ENVIRONMENTS, "Env": ENVIRONMENTS, "envCents": ENVIRONMENTS,
    "project": PROJECTS, "projectCents": PROJECTS, "p": PROJECTS, "other": [1],
}  # fmt: skip
SINGLE = [{name: value} for name, values in VALUES.items() for value in values]
SINGLE += [{"hidden": each} for each in SINGLE]

some = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in VALUES.items()}
)
inputs = st.one_of(some, st.tuples(some, some).map(lambda pair: {**pair[0], "hidden": pair[1]}))


@cache
def world_of(kind: str, wrapper: str, mode: str, rule: str) -> World:
    """Return a registry; with approvals or a resource rule, if the mode is so."""
    held, around = {**KINDS, **INSIDE_MODELS}[kind], WRAPPERS[wrapper]
    options: dict[str, Any] = {}
    approval = None
    if mode == "when":
        when = {"properties": {"order": around.schema(WHEN[rule].schema(held.names))}}
        approval = ApprovalRule(when=when)
    if mode == "resource":
        options["access"] = AccessControl(
            resource_type="project",
            resource_action="edit",
            resource_input=f"/order{around.path}/{held.names.project}",
        )
    return World(around.annotate(held.annotation), approval, **options)


def tagged(kind: str, value: Any) -> Any:
    return {**value, "kind": "x"} if kind == "struct" else value


def ran(world: World, wrapper: str) -> list[Facts]:
    got, world.ran = world.ran, []
    return [facts_of(each) for value in got for each in WRAPPERS[wrapper].unwrap(value)]


IN_PYDANTIC = {"model", "list in a model", "root"}
FOREIGN = {"struct", "attrs", "attrs factory"}
"""Kinds that pydantic does not read."""

PAIRS = [
    *((kind, each) for kind in KINDS for each in WRAPPERS if kind not in FOREIGN or each not in IN_PYDANTIC),
    *((kind, each) for kind in INSIDE_MODELS for each in ("model", "list in a model")),
]  # fmt: skip
MADE_BY_FACTORY = {"attrs factory", "late default"}
"""Kinds whose declared default depends on other fields. It counts as a default, like a constant."""

BY_PRESENCE = {"no other property", "required"}
"""Rules that forbid to send a property, whatever its default is."""

pairs = st.sampled_from(PAIRS)
functions = st.sampled_from(["task.run", "task.run", "task.run", "task.block"])


@pytest.mark.parametrize("kind", KINDS)
async def test_no_single_value_evades_a_rule(kind: str) -> None:
    names = KINDS[kind].names
    world = world_of(kind, "itself", "grant", "")
    world.ran.clear()
    for name, rule in RULES.items():
        if name in BY_PRESENCE and kind in MADE_BY_FACTORY:
            continue
        identity = await agent(rule.schema(names))
        for value in SINGLE:
            await world.outcome(tagged(kind, value), identity)
            assert all(map(rule.accepts, ran(world, "itself"))), (name, value)
    for name, rule in WHEN.items():
        world = world_of(kind, "itself", "when", name)
        for value in SINGLE[: len(SINGLE) // 2]:
            await world.outcome(tagged(kind, value), ALICE)
            assert not any(map(rule.accepts, ran(world, "itself"))), (name, value)


@settings(max_examples=300, deadline=None)
@given(pairs, st.sampled_from([*RULES]), inputs, functions)
async def test_no_object_reaches_a_handler_that_a_grant_rejects(
    pair: tuple[str, str], rule: str, value: Any, function: str
) -> None:
    kind, wrapper = pair
    if rule in BY_PRESENCE and kind in MADE_BY_FACTORY:
        return
    world, around = world_of(kind, wrapper, "grant", ""), WRAPPERS[wrapper]
    names = {**KINDS, **INSIDE_MODELS}[kind].names
    identity = await agent(around.schema(RULES[rule].schema(names)))
    world.ran.clear()

    outcome = await world.outcome(around.wrap(tagged(kind, value)), identity, function)

    assert outcome in ("ran", DENIED, ErrorCode.VALIDATION_ERROR)
    assert all(map(RULES[rule].accepts, ran(world, wrapper)))


@settings(max_examples=150, deadline=None)
@given(pairs, st.sampled_from([*WHEN]), inputs, functions)
async def test_no_object_reaches_a_handler_without_the_approval_that_it_needs(
    pair: tuple[str, str], rule: str, value: Any, function: str
) -> None:
    kind, wrapper = pair
    world, around = world_of(kind, wrapper, "when", rule), WRAPPERS[wrapper]
    world.ran.clear()

    outcome = await world.outcome(around.wrap(tagged(kind, value)), ALICE, function)

    assert outcome in ("ran", REQUIRED, DENIED, ErrorCode.VALIDATION_ERROR)
    assert not any(map(WHEN[rule].accepts, ran(world, wrapper)))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([pair for pair in PAIRS if WRAPPERS[pair[1]].path is not None]),
    inputs,
    functions,
)
async def test_no_object_reaches_a_handler_that_names_another_resource(
    pair: tuple[str, str], value: Any, function: str
) -> None:
    kind, wrapper = pair
    world, around = world_of(kind, wrapper, "resource", ""), WRAPPERS[wrapper]
    world.ran.clear()

    outcome = await world.outcome(around.wrap(tagged(kind, value)), ALICE, function)

    assert outcome in ("ran", DENIED, ErrorCode.VALIDATION_ERROR)
    assert all(facts.project == 7 for facts in ran(world, wrapper))


@pytest.mark.parametrize("rule", RULES)
async def test_a_harmless_object_reaches_its_handler(rule: str) -> None:
    for kind, wrapper in PAIRS:
        held, around = {**KINDS, **INSIDE_MODELS}[kind], WRAPPERS[wrapper]
        world = world_of(kind, wrapper, "grant", "")
        value = {held.names.env: "dev", held.names.project: 7}
        identity = await agent(around.schema(RULES[rule].schema(held.names)))

        outcome = await world.outcome(around.wrap(tagged(kind, value)), identity)
        assert outcome == "ran", (kind, wrapper)
        assert {facts.env for facts in ran(world, wrapper)} == {"dev"}
