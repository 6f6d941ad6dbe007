"""What is checked is what runs: rules see the input as it was sent and as the handler receives it."""

import asyncio
import dataclasses
import enum
import logging
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID, uuid4

import anyio
import anyio.lowlevel
import attrs
import msgspec
import pytest
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    HttpUrl,
    RootModel,
    SecretStr,
    StringConstraints,
    computed_field,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
)
from operations.authority import ApprovalRule, Authority, Grants
from operations.base.work import BudgetSpentError, Work, working
from operations.schema import CheckedForm
from operations.schema.python.signatures import ArgumentReader
from operations.tools import RetryPolicy, ToolConfig, configure_tools

pytestmark = pytest.mark.anyio

KEY = b"k" * 32
ALICE = Identity("alice", ["task"], {"project:7": ["edit"]})
BOSS = OperationContext(identity=Identity("boss", ["approvals:answer"]))
DENIED, REQUIRED = ErrorCode.ACCESS_DENIED, ErrorCode.APPROVAL_REQUIRED


# ------------------------------------------------------------ types whose objects differ from their input


class ByName(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    amount: int = Field(0, alias="amountCents")


class OnlyByName(BaseModel):
    """Its input schema has the alias, which it does not read."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=False)
    amount: int = Field(0, alias="amountCents")


class Choices(BaseModel):
    amount: int = Field(0, validation_alias=AliasChoices("amountCents", "amount", "sum"))


class Pathed(BaseModel):
    amount: int = Field(0, validation_alias=AliasChoices("amountCents", AliasPath("values", 0)))


@pydantic_dataclass
class Classic:
    amount: int = Field(0, validation_alias=AliasChoices("amountCents", "amount"))


class Outer(BaseModel):
    model_config = ConfigDict(extra="allow")
    inner: ByName


class OuterWithClassic(BaseModel):
    inner: Classic


@dataclass
class Standard:
    amount: Annotated[int, Field(validation_alias=AliasChoices("amountCents", "amount"))] = 0


class OuterWithStandard(BaseModel):
    inner: Standard


class Aliased(TypedDict, total=False):
    amount: Annotated[int, Field(validation_alias=AliasChoices("amountCents", "amount"))]


class OuterWithDict(BaseModel):
    inner: Aliased


class Generated(BaseModel):
    model_config = ConfigDict(alias_generator=lambda name: f"{name}Cents", populate_by_name=True)
    amount: int = 0


class Moved(BaseModel):
    amount: int = Field(0, alias="amountCents")

    @model_validator(mode="before")
    @classmethod
    def move(cls, given: Any) -> Any:
        return {"amountCents": given["other"]} if "other" in given else given


class SetAfter(BaseModel):
    model_config = ConfigDict(frozen=True)
    amount: int = Field(0, alias="amountCents")
    other: int = 0

    @model_validator(mode="after")
    def set(self) -> "SetAfter":
        object.__setattr__(self, "amount", max(self.amount, self.other))
        return self


@dataclass
class PostInit:
    other: int
    amountCents: int = 0  # noqa: N815 - the name of the rule

    def __post_init__(self) -> None:
        self.amountCents = self.other


@attrs.define
class Converted:
    amountCents: int = attrs.field(converter=abs)  # noqa: N815


@attrs.define
class OnSet:
    other: int
    amountCents: int = attrs.field(init=False)  # noqa: N815

    def __attrs_post_init__(self) -> None:
        self.amountCents = self.other


class Renamed(msgspec.Struct, rename={"amount": "amountCents"}):
    amount: int
    other: int = 0

    def __post_init__(self) -> None:
        self.amount = max(self.amount, self.other)


T = TypeVar("T")


class Generic_(BaseModel, Generic[T]):  # noqa: N801
    model_config = ConfigDict(populate_by_name=True)
    amount: T | None = Field(None, alias="amountCents")


class Cat(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    kind: Literal["cat"]
    amount: int = Field(0, alias="amountCents")


class Dog(BaseModel):
    kind: Literal["dog"]
    amountCents: int  # noqa: N815


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Root(RootModel[ByName]):
    pass


class Hidden(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    amount: int = Field(0, alias="amountCents", exclude=True)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.amount * 2


class Serialized(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    amount: int = Field(0, alias="amountCents", serialization_alias="other")

    @field_serializer("amount")
    def write(self, _: int) -> int:
        return 1


class Pair(NamedTuple):
    amount: Annotated[int, BeforeValidator(lambda value: -value)]


AT_MOST = {"properties": {"amountCents": {"maximum": 500}}}
NESTED = {"properties": {"inner": AT_MOST}}

NUMBERS: list[tuple[Any, Any, Any, list[Any]]] = [
    (ByName, AT_MOST, {"amountCents": 5}, [{"amount": 9999}, {"amountCents": 9999}]),
    (OnlyByName, AT_MOST, {"amount": 5}, [{"amount": 9999}]),
    (Choices, AT_MOST, {"amountCents": 5}, [{"amount": 9999}, {"sum": 9999}]),
    (Pathed, AT_MOST, {"amountCents": 5}, [{"values": [9999]}]),
    (Classic, AT_MOST, {"amountCents": 5}, [{"amount": 9999}]),
    (Outer, NESTED, {"inner": {"amountCents": 5}}, [{"inner": {"amount": 9999}, "x": 1}]),
    (OuterWithClassic, NESTED, {"inner": {"amountCents": 5}}, [{"inner": {"amount": 9999}}]),
    (OuterWithStandard, NESTED, {"inner": {"amountCents": 5}}, [{"inner": {"amount": 9999}}]),
    (list[ByName], {"items": AT_MOST}, [{"amountCents": 5}], [[{"amount": 9999}]]),
    (ByName | None, AT_MOST, {"amountCents": 5}, [{"amount": 9999}]),
    (Generated, AT_MOST, {"amountCents": 5}, [{"amount": 9999}]),
    (Moved, AT_MOST, {"amountCents": 5}, [{"other": 9999}]),
    (SetAfter, AT_MOST, {"amountCents": 5}, [{"other": 9999}, {"amountCents": 5, "other": 9999}]),
    (PostInit, AT_MOST, {"other": 5}, [{"other": 9999}, {"other": 9999, "amountCents": 1}]),
    (Converted, AT_MOST, {"amountCents": 5}, [{"amountCents": -9999}]),
    (OnSet, AT_MOST, {"other": 5}, [{"other": 9999}]),
    (Renamed, AT_MOST, {"amountCents": 5}, [{"amountCents": 5, "other": 9999}]),
    (Generic_[int], AT_MOST, {"amountCents": 5}, [{"amount": 9999}]),
    (Pet, AT_MOST, {"kind": "cat", "amountCents": 5}, [{"kind": "cat", "amount": 9999}]),
    (Root, AT_MOST, {"amountCents": 5}, [{"amount": 9999}]),
    (Hidden, AT_MOST, {"amountCents": 5}, [{"amount": 9999}]),
    (Serialized, AT_MOST, {"amountCents": 5}, [{"amount": 9999}]),
    (Decimal, {"maximum": 5}, "5", ["99", "5.01"]),
    (Pair, {"prefixItems": [{"maximum": 5}]}, [1], [[-9999]]),
    (Annotated[int, AfterValidator(lambda value: value * value)], {"maximum": 100}, 3, [-50]),
    (
        Annotated[list[int], BeforeValidator(sorted)],
        {"prefixItems": [{"minimum": 3}]},
        [3, 9],
        [[9, 2]],
    ),
]


class Kind(enum.Enum):
    PROD = "prod"
    DEV = "dev"

    @classmethod
    def _missing_(cls, value: object) -> "Kind":
        return cls(str(value).strip().lower())


Environment = Annotated[str, StringConstraints(strip_whitespace=True, to_lower=True)]
NOT_PROD = {"not": {"const": "prod"}}
TEXTS: list[tuple[Any, Any, Any, list[Any]]] = [
    (Environment, NOT_PROD, "dev", ["prod", "PROD", " prod", "PROD "]),
    (list[Environment], {"items": NOT_PROD}, ["dev"], [["PROD"], ["dev", " prod"]]),
    (dict[str, Environment], {"additionalProperties": NOT_PROD}, {"a": "dev"}, [{"a": "PROD"}]),
    (
        HttpUrl,
        {"pattern": "^https?://(?!evil.example)"},
        "http://x.example/",
        ["http://EVIL.example"],
    ),
    (set[Environment], {"items": NOT_PROD}, ["dev"], [["PROD"]]),
    (tuple[Environment, int], {"prefixItems": [NOT_PROD]}, ["dev", 1], [["PROD", 1]]),
    (timedelta, {"not": {"const": "PT60S"}}, "PT61S", ["PT1M", "PT60S"]),
]
CASES = NUMBERS + TEXTS
IDS = [
    f"{number}-{getattr(case[0], '__name__', case[0].__class__.__name__)}"
    for number, case in enumerate(CASES)
]


class World:
    """A registry with an operation and a subscription that take one value of a type."""

    def __init__(self, annotation: Any, rule: ApprovalRule | None = None, **options: Any) -> None:
        self.registry = OperationRegistry(authority=Authority())
        self.ran: list[Any] = []

        async def run(order: annotation) -> str:
            self.ran.append(order)
            return "ran"

        def block(order: annotation) -> str:
            self.ran.append(order)
            return "ran"

        async def watch(order: annotation) -> AsyncIterator[str]:
            self.ran.append(order)
            yield "ran"

        for function in (run, block, watch):
            self.registry.operation(f"task.{function.__name__}", **options)(function)
        if rule is not None:
            configure_tools(self.registry, {"task.*": ToolConfig(approve=rule)})
        self.registry.register_object(self.registry.authority.approvals)

    async def outcome(
        self, order: Any, identity: Identity | None = ALICE, name: str = "task.run"
    ) -> Any:
        context = OperationContext(identity=identity)
        try:
            if name == "task.watch":
                stream = self.registry.subscribe(name, {"order": order}, context)
                return [item.data async for item in stream].pop()
            return (await self.registry.execute(name, {"order": order}, context)).data
        except CallError as error:
            return error.code

    async def pending(self) -> list[Any]:
        found: list[Any] = (await self.registry.execute("approvals.list", {}, BOSS)).data[
            "approvals"
        ]
        return found

    async def approve(self) -> Any:
        (record,) = await self.pending()
        answer = {"id": record["id"], "approve": True}
        await self.registry.execute("approvals.answer", answer, BOSS)
        return record


async def agent(schema: Any = None, **options: Any) -> Identity:
    grants = Grants(KEY)
    if schema is not None:
        options["input"] = {"task.*": {"properties": {"order": schema}}}
    identity = await grants.resolve(grants.create(ALICE, "bot", operations=["task.*"], **options))
    assert identity is not None
    return identity


@pytest.mark.requirement("R65")
@pytest.mark.parametrize("name", ["task.run", "task.block", "task.watch"])
@pytest.mark.parametrize(("annotation", "schema", "permitted", "evasions"), CASES, ids=IDS)
async def test_a_grant_sees_what_the_handler_receives(
    annotation: Any, schema: Any, permitted: Any, evasions: list[Any], name: str
) -> None:
    world, bot = World(annotation), await agent(schema)

    assert await world.outcome(permitted, bot, name) == "ran"
    for evasion in evasions:
        assert await world.outcome(evasion, None, name) == "ran"
        assert await world.outcome(evasion, bot, name) == DENIED
    assert len(world.ran) == 1 + len(evasions)


@pytest.mark.requirement("R65")
@pytest.mark.parametrize("name", ["task.run", "task.block", "task.watch"])
@pytest.mark.parametrize(("annotation", "schema", "permitted", "evasions"), CASES, ids=IDS)
async def test_a_rule_sees_what_the_handler_receives(
    annotation: Any, schema: Any, permitted: Any, evasions: list[Any], name: str
) -> None:
    rule = {"required": ["order"], "properties": {"order": {"not": schema}}}
    world = World(annotation, ApprovalRule(when=rule))

    assert await world.outcome(permitted, name=name) == "ran"
    for evasion in evasions:
        assert await world.outcome(evasion, name=name) == REQUIRED
    assert len(world.ran) == 1


async def test_a_dict_with_other_names_is_denied() -> None:
    world, bot = World(OuterWithDict), await agent(NESTED)

    assert await world.outcome({"inner": {"amount": 9999}}, bot) == DENIED
    assert await world.outcome({"inner": {"amount": 1}}) == "ran"


class Project(BaseModel):
    id: str = Field("7", validation_alias=AliasChoices("id", "name"))

    @field_validator("id")
    @classmethod
    def strip(cls, given: str) -> str:
        return given.strip("x")


@pytest.mark.requirement("R65")
@pytest.mark.parametrize(
    ("order", "outcome"),
    [({"id": "7"}, "ran"), ({"id": "8"}, DENIED), ({"name": "7"}, DENIED), ({"id": "7", "name": "8"}, "ran"),
     ({"name": "8"}, DENIED), ({"id": "x7"}, DENIED), ({"id": "7x"}, DENIED)],
)  # fmt: skip
async def test_a_resource_rule_sees_what_the_handler_receives(order: Any, outcome: Any) -> None:
    access = AccessControl(
        resource_type="project", resource_action="edit", resource_input="/order/id"
    )
    world = World(Project, access=access)

    assert await world.outcome(order) == outcome


class Changing(BaseModel):
    id: str

    @field_validator("id")
    @classmethod
    def change(cls, given: str) -> str:
        return "8"


async def test_a_resource_that_a_validator_names_is_checked() -> None:
    access = AccessControl(
        resource_type="project", resource_action="edit", resource_input="/order/id"
    )
    world = World(Changing, access=access)

    assert await world.outcome({"id": "7"}) == DENIED


# ------------------------------------------------------------ built once


class Counted(BaseModel):
    id: int

    @field_validator("id")
    @classmethod
    def count(cls, given: int) -> int:
        BUILT.append(given)
        return given


BUILT: list[int] = []


@pytest.mark.parametrize("name", ["task.run", "task.block", "task.watch"])
async def test_the_object_that_was_checked_is_the_one_that_runs(name: str) -> None:
    schema = {"properties": {"id": {"maximum": 5}}}
    rule = ApprovalRule(when={"properties": {"order": {"properties": {"id": {"minimum": 4}}}}})
    world, bot = World(Counted, rule), await agent(schema)
    BUILT.clear()

    assert await world.outcome({"id": 3}, bot, name) == "ran"
    assert BUILT == [3]
    assert world.ran == [Counted.model_construct(id=3)]

    assert await world.outcome({"id": 4}, bot, name) == REQUIRED
    await world.approve()
    assert await world.outcome({"id": 4}, bot, name) == "ran"
    assert BUILT == [3, 4, 4]


class Spy:
    """A secret that notes in which threads its value is read."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get_secret_value(self) -> int:
        THREADS.add(threading.get_ident())
        return self.value


THREADS: set[int] = set()
Spied = Annotated[Any, BeforeValidator(Spy)]


async def test_the_form_of_a_large_input_is_written_in_a_thread() -> None:
    world, bot = World(list[Spied]), await agent({"items": {"maximum": 5}})
    small, large = [1], [1] * 6_000
    for order, is_here in ((small, True), (large, False)):
        THREADS.clear()
        assert await world.outcome(order, bot) == "ran"
        assert (threading.get_ident() in THREADS) is is_here
    assert await world.outcome([*large, 6], bot) == DENIED


async def test_the_form_of_a_call_that_has_ended_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_writing, is_over, has_stopped = (threading.Event() for _ in range(3))
    read, write = list[int](), ArgumentReader._write

    def noted_write(*args: Any) -> None:
        write(*args)
        has_stopped.set()

    monkeypatch.setattr(ArgumentReader, "_write", noted_write)

    class Slow(Spy):
        def get_secret_value(self) -> int:
            read.append(self.value)
            is_writing.set()
            is_over.wait()
            return self.value

    world = World(list[Annotated[Any, BeforeValidator(Slow)]])
    call = asyncio.ensure_future(world.outcome([1] * 6_000, await agent({"items": True})))
    await asyncio.to_thread(is_writing.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    is_over.set()
    await asyncio.to_thread(has_stopped.wait)

    assert len(read) < 600
    assert world.ran == []


@pytest.mark.requirement("R67")
@pytest.mark.parametrize("part", ["filled", "generated", "secrets"])
def test_the_places_of_a_form_are_not_changed_for_a_call_that_has_ended(part: str) -> None:
    work = Work()
    work.stop()
    places: dict[str, Any] = {part: tuple((index, "a") for index in range(1_000))}
    form = CheckedForm(value=[{"a": 1}] * 1_000, **places)

    with working(work), pytest.raises(BudgetSpentError):
        _ = form.sent, form.bound, form.shown
    _ = form.sent, form.bound, form.shown


def test_many_places_of_a_form_are_changed_in_one_pass() -> None:
    form = CheckedForm(
        value={"a": [{"x": 1, "y": {"z": 2}}, 3], "b": 4},
        filled=(("a", 0, "y", "z"), ("a", 0, "y"), ("a", 1), ("c", "d"), ("a", "q"), ("a", -1), ()),
        generated=(("b",), ("b", "deep")),
        secrets=(("a", 0, "x"), ("b",)),
    )

    assert form.sent == {"a": [{"x": 1}, None], "b": 4}
    assert form.bound == {"a": [{"x": 1, "y": {"z": 2}}, 3]}
    assert form.shown["b"] == "(set when it runs)"
    assert form.shown["a"][0]["x"] != 1
    assert form.value == {"a": [{"x": 1, "y": {"z": 2}}, 3], "b": 4}


async def test_without_a_rule_no_form_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("operations.schema.python.forms.FormWriter.write", fail)
    world = World(ByName, scopes=["task"])

    assert await world.outcome({"amount": 1}) == "ran"
    assert await world.outcome({"amount": 1}, await agent(calls={"task.*": 5})) == "ran"


async def test_an_input_that_changes_during_the_check_runs_as_it_was_checked() -> None:
    given: dict[str, Any] = {"order": {"inner": {"amountCents": 5}, "list": [1]}}
    world = World(Outer, ApprovalRule(hold=5))
    context = OperationContext(identity=ALICE)
    call = world.registry.execute("task.run", given, context)

    async def change() -> None:
        while not await world.pending():
            await anyio.lowlevel.checkpoint()
        given["order"]["inner"]["amountCents"] = 9999
        given["order"]["list"].append(2)
        await world.approve()

    async with anyio.create_task_group() as group:
        group.start_soon(change)
        await call

    assert world.ran[0].inner.amount == 5
    assert world.ran[0].list == [1]


class Flaky(BaseModel):
    items: list[int]


async def test_a_retry_receives_an_object_of_its_own() -> None:
    world, seen = World(Flaky), list[list[int]]()

    @world.registry.operation("task.flaky", idempotent=True)
    async def flaky(order: Flaky) -> str:
        seen.append([*order.items])
        order.items.clear()
        if len(seen) < 2:
            raise CallError(ErrorCode.UNAVAILABLE, "not now", retryable=True)
        return "ran"

    configure_tools(
        world.registry, {"task.flaky": ToolConfig(retry=RetryPolicy(attempts=2, first_pause=0))}
    )
    bot = await agent({"properties": {"items": {"maxItems": 2}}})

    assert await world.outcome({"items": [1, 2]}, bot, "task.flaky") == "ran"
    assert seen == [[1, 2], [1, 2]]


async def test_a_retry_that_would_receive_something_else_is_denied() -> None:
    world, values = World(Flaky), iter([1, 9])

    def next_value(_: Any) -> int:
        return next(values)

    @world.registry.operation("task.flaky", idempotent=True)
    async def flaky(order: Annotated[int, BeforeValidator(next_value)]) -> str:
        world.ran.append(order)
        raise CallError(ErrorCode.UNAVAILABLE, "not now", retryable=True)

    configure_tools(
        world.registry, {"task.flaky": ToolConfig(retry=RetryPolicy(attempts=2, first_pause=0))}
    )

    assert await world.outcome(1, await agent({"maximum": 5}), "task.flaky") == DENIED
    assert world.ran == [1]


async def test_a_context_that_a_handler_forwards_does_not_carry_its_input() -> None:
    world = World(ByName)
    other = OperationRegistry()

    @other.operation("task.other")
    @world.registry.operation("task.other")
    async def run(order: ByName, context: OperationContext) -> int:
        if order.amount == 1:
            again = await other.execute("task.other", {"order": {"amount": 2}}, context)
            return int(again.data)
        return order.amount

    context = OperationContext(identity=await agent(AT_MOST))
    result = await world.registry.execute("task.other", {"order": {"amountCents": 1}}, context)

    assert result.data == 2


# ------------------------------------------------------------ approvals


class Login(BaseModel):
    user: str
    password: SecretStr
    token: SecretStr = SecretStr("of the program")


async def test_an_approval_binds_a_secret_and_does_not_show_it() -> None:
    world = World(Login, ApprovalRule())
    first, second = ({"user": "u", "password": each} for each in ("one...", "two..."))

    assert await world.outcome(first) == REQUIRED
    record = await world.approve()
    assert "one..." not in str(record)
    assert "of the program" not in str(record)
    assert record["input"]["order"]["user"] == "u"
    assert await world.outcome(second) == REQUIRED
    assert await world.outcome(first) == "ran"
    assert world.ran[0].password.get_secret_value() == "one..."


async def test_a_grant_can_restrict_a_secret() -> None:
    schema = {"properties": {"password": {"pattern": "^a"}}}
    world, bot = World(Login), await agent(schema)

    assert await world.outcome({"user": "u", "password": "abc"}, bot) == "ran"
    assert await world.outcome({"user": "u", "password": "bcd"}, bot) == DENIED


class Task(BaseModel):
    title: str
    id: UUID = Field(default_factory=uuid4)
    tags: list[str] = Field(default_factory=list)


@dataclass
class TaskClass:
    title: str
    id: UUID = dataclasses.field(default_factory=uuid4)


class TaskStruct(msgspec.Struct):
    title: str
    id: UUID = msgspec.field(default_factory=uuid4)


@attrs.define
class TaskAttrs:
    title: str
    id: UUID = attrs.field(factory=uuid4)


@pytest.mark.parametrize("annotation", [Task, TaskClass, TaskStruct, TaskAttrs])
async def test_an_approval_does_not_bind_what_a_default_factory_creates(annotation: Any) -> None:
    world, own = World(annotation, ApprovalRule()), str(uuid4())

    assert await world.outcome({"title": "x"}) == REQUIRED
    record = await world.approve()
    assert record["input"]["order"]["id"] == "(set when it runs)"
    assert record["generated"] == ["/order/id"]
    assert await world.outcome({"title": "x"}) == "ran"
    assert await world.outcome({"title": "x", "id": own}) == REQUIRED
    record = await world.approve()
    assert record["input"]["order"]["id"] == own
    assert await world.outcome({"title": "x", "id": str(uuid4())}) == REQUIRED


@dataclass
class Priced:
    amount: int = dataclasses.field(default_factory=lambda: 0)


class WithMoved(BaseModel):
    one: Annotated[Priced, BeforeValidator(lambda given: given.get("hidden", given))]
    some: Annotated[list[Priced], AfterValidator(lambda given: given[::-1])]


async def test_an_approval_shows_what_a_validator_takes_from_another_part_of_the_input() -> None:
    world = World(WithMoved, ApprovalRule())
    order = {"one": {"hidden": {"amount": 9999}}, "some": [{"amount": 9999}, {}]}

    assert await world.outcome(order) == REQUIRED
    record = await world.approve()
    assert record["input"]["order"] == {
        "one": {"amount": 9999},
        "some": [{"amount": 0}, {"amount": 9999}],
    }
    assert await world.outcome(order) == "ran"


async def test_an_approval_shows_what_the_handler_receives() -> None:
    world = World(Annotated[str, StringConstraints(to_lower=True)], ApprovalRule())

    await world.outcome("PROD")
    (record,) = await world.pending()

    assert record["input"] == {"order": "prod"}


async def test_an_approval_binds_the_input_as_it_was_sent_too() -> None:
    world = World(Environment, ApprovalRule())
    assert await world.outcome("PROD") == REQUIRED
    await world.approve()

    assert await world.outcome("prod") == REQUIRED
    assert await world.outcome("PROD") == "ran"


async def test_sets_are_bound_in_any_order() -> None:
    world = World(set[str], ApprovalRule())
    assert await world.outcome(["b", "a", "c"]) == REQUIRED
    (record,) = await world.pending()

    assert record["input"] == {"order": ["a", "b", "c"]}


class Key(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: str
    secret: SecretStr


async def test_a_secret_in_a_set_is_masked_where_it_is_shown() -> None:
    world = World(set[Key], ApprovalRule())
    keys = [{"name": name, "secret": f"of {name}"} for name in "cab"]
    assert await world.outcome(keys) == REQUIRED
    (record,) = await world.pending()

    assert [each["name"] for each in record["input"]["order"]] == ["a", "b", "c"]
    assert "of" not in str(record["input"])


# ------------------------------------------------------------ no form


class Lazy(BaseModel):
    items: Iterable[int]


class Opaque:
    pass


@dataclass
class Passed:
    kinds: ClassVar[int] = 1
    amount: dataclasses.InitVar[int] = 0


class WithObject(BaseModel):
    thing: Annotated[Any, BeforeValidator(lambda _: Opaque())]


@pytest.mark.requirement("R65")
@pytest.mark.parametrize(
    ("annotation", "order"),
    [
        (Lazy, {"items": [1, 2]}),
        (WithObject, {"thing": 1}),
        (Passed, {"amount": 1}),
        (Decimal, "1.00000000000000000001"),
    ],
)
async def test_an_input_without_a_form_is_denied_if_a_rule_reads_it(
    annotation: Any, order: Any, caplog: pytest.LogCaptureFixture
) -> None:
    always = {"title": "any"}

    assert await World(annotation).outcome(order) == "ran"
    assert await World(annotation).outcome(order, await agent(calls={"task.*": 9})) == "ran"
    assert await World(annotation).outcome(order, await agent(always)) == DENIED
    assert "task.run" in caplog.text
    assert await World(annotation, ApprovalRule()).outcome(order) == DENIED
    assert await World(annotation, ApprovalRule(when={"not": {}})).outcome(order) == DENIED
    assert await World(annotation).outcome(order, await agent(approve=["*"])) == DENIED


async def test_an_iterator_is_not_consumed() -> None:
    world = World(Lazy)
    await world.outcome({"items": [1, 2]}, await agent(calls={"task.*": 9}))

    assert [*world.ran[0].items] == [1, 2]


async def test_registration_warns_of_a_field_without_a_form(
    caplog: pytest.LogCaptureFixture,
) -> None:
    World(Lazy)
    assert not caplog.records

    World(Lazy, ApprovalRule())

    assert "task.run" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


# ------------------------------------------------------------ defaults


class WithDefaults(BaseModel):
    title: str
    priority: int = 9


@pytest.mark.parametrize(
    ("schema", "order", "outcome"),
    [
        ({"properties": {"title": True}, "additionalProperties": False}, {"title": "x"}, "ran"),
        ({"properties": {"priority": {"maximum": 3}}}, {"title": "x"}, DENIED),
        ({"properties": {"priority": {"maximum": 3}}}, {"title": "x", "priority": 1}, "ran"),
        ({"additionalProperties": {"type": "string"}}, {"title": "x"}, DENIED),
    ],
)  # fmt: skip
async def test_defaults_of_a_model_are_checked_if_a_schema_restricts_them(
    schema: Any, order: Any, outcome: Any
) -> None:
    world = World(WithDefaults)

    assert await world.outcome(order, await agent(schema)) == outcome


LIMIT, LOGIN, MARKER = Decimal(99), ByName.model_construct(amount=9999), object()


async def test_defaults_of_parameters_are_checked() -> None:
    registry = OperationRegistry()

    @registry.operation("task.run")
    async def run(limit: Decimal = LIMIT, login: ByName = LOGIN, marker: Any = MARKER) -> str:
        return "ran"

    for schema in ({"limit": {"maximum": 5}}, {"login": AT_MOST}):
        grants = Grants(KEY)
        block = {"task.*": {"properties": schema}}
        token = grants.create(ALICE, "bot", operations=["task.*"], input=block)
        context = OperationContext(identity=await grants.resolve(token))
        with pytest.raises(CallError) as caught:
            await registry.execute("task.run", {}, context)
        assert caught.value.code == DENIED


async def test_named_arguments_are_checked() -> None:
    registry = OperationRegistry()

    @registry.operation("task.run")
    async def run(**more: Environment) -> str:
        return "ran"

    grants = Grants(KEY)
    block = {"task.*": {"additionalProperties": NOT_PROD}}
    token = grants.create(ALICE, "bot", operations=["task.*"], input=block)
    context = OperationContext(identity=await grants.resolve(token))

    assert (await registry.execute("task.run", {"a": "dev"}, context)).data == "ran"
    with pytest.raises(CallError) as caught:
        await registry.execute("task.run", {"a": " PROD"}, context)
    assert caught.value.code == DENIED
