"""Objects converted in C have the same JSON form as by `to_json`, and secrets that serializers hide stay hidden."""

import dataclasses
import datetime as dt
import enum
import uuid
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import attrs
import msgspec
import pydantic
import pytest

from operations import CallError, OperationRegistry
from operations.base.json.objects import without_objects
from operations.base.json.values import JSONValueError, to_json
from operations.contract.specs import OutputPolicy

MASKED = Annotated[str, pydantic.PlainSerializer(lambda _: "***")]
ID = uuid.UUID(int=1)
MOMENT = dt.datetime(2024, 1, 2, 3, 4, 5, 600, dt.UTC)


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    _hidden: int = 1


@dataclasses.dataclass
class Everything:
    at: dt.datetime = MOMENT
    naive: dt.datetime = dt.datetime(2024, 1, 2)  # noqa: DTZ001 - naive on purpose
    day: dt.date = dt.date(2024, 1, 2)
    long: dt.timedelta = dt.timedelta(hours=1, seconds=2.5)
    id: uuid.UUID = ID
    price: Decimal = Decimal("1.50")
    color: Color = Color.RED
    raw: bytes = b"ab"
    pair: tuple[int, str] = (1, "a")
    point: Point = dataclasses.field(default_factory=lambda: Point(1))
    points: list[Point] = dataclasses.field(default_factory=lambda: [Point(2, 3)])
    note: str | None = None


class Row(msgspec.Struct, rename="camel", omit_defaults=True):
    row_id: int
    note: str | msgspec.UnsetType = msgspec.UNSET
    size: int = 1


class Tagged(msgspec.Struct, tag="it"):
    at: dt.datetime = MOMENT


class Model(pydantic.BaseModel):
    x: int = 1
    name: str = "é"
    at: dt.datetime = MOMENT
    price: Decimal = Decimal("1E+5")
    color: Color = Color.RED
    id: uuid.UUID = uuid.UUID(int=1)
    tags: list[str] = ["a"]
    note: str | None = None


class Alias(pydantic.BaseModel):
    first_name: str = pydantic.Field(default="Ada", serialization_alias="firstName")


class Masked(pydantic.BaseModel):
    password: str = "secret"

    @pydantic.field_serializer("password")
    def hide(self, _value: str) -> str:
        return "***"


class MaskedItems(pydantic.BaseModel):
    passwords: list[MASKED] = ["secret"]


class Excluded(pydantic.BaseModel):
    x: int = 1
    password: str = pydantic.Field(default="secret", exclude=True)


class Computed(pydantic.BaseModel):
    x: int = 1

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.x


class Rewritten(pydantic.BaseModel):
    password: str = "secret"

    @pydantic.model_serializer
    def hide(self) -> dict[str, str]:
        return {"password": "***"}


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    x: int = 1


class Types(pydantic.BaseModel):
    hidden: pydantic.SecretStr = pydantic.SecretStr("secret")
    url: pydantic.AnyUrl = pydantic.AnyUrl("http://example.com/")
    long: dt.timedelta = dt.timedelta(hours=1, seconds=2.5)
    raw: bytes = b"ab"
    anything: Any = b"ab"


class User(pydantic.BaseModel):
    name: str = "Ada"


class StoredUser(User):
    password: str = "secret"


class Session(pydantic.BaseModel):
    user: User = User()
    others: list[User] | None = None
    masked: Masked = Masked()


@pydantic.dataclasses.dataclass
class MaskedData:
    password: MASKED = "secret"


@dataclasses.dataclass
class HoldsMaskedData:
    data: MaskedData = dataclasses.field(default_factory=MaskedData)


@dataclasses.dataclass
class HoldsModel:
    model: Masked = dataclasses.field(default_factory=Masked)


@attrs.define
class Slotted:
    x: int = 1
    at: dt.datetime = MOMENT


@attrs.define
class Private:
    _x: int = 1


@attrs.define(slots=False)
class Unslotted:
    x: int = 1


@dataclasses.dataclass
class HoldsPrivate:
    private: Private = dataclasses.field(default_factory=lambda: Private(5))


@dataclasses.dataclass
class Node:
    below: "list[Node]" = dataclasses.field(default_factory=list["Node"])


def extended(value: Any) -> Any:
    value.undeclared = 1
    return value


VALUES: list[Any] = [
    Point(1, 2),
    extended(Point(1)),
    Everything(),
    Row(1),
    Row(1, "a", 2),
    Tagged(),
    Model(),
    Alias(),
    Masked(),
    MaskedItems(),
    Excluded(),
    Computed(),
    Rewritten(),
    Open(x=1, y=2),  # type: ignore[call-arg]
    Types(),
    Session(),
    Session(others=[User(name="Bob")]),
    Session(user=StoredUser()),
    Session(others=[User(), StoredUser()]),
    pydantic.RootModel[list[int]]([1]),
    MaskedData(),
    HoldsMaskedData(),
    HoldsModel(),
    Slotted(),
    Private(5),
    extended(Unslotted()),
    HoldsPrivate(),
    Node([Node(), Node([Node()])]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
async def test_objects_have_one_json_form(value: Any) -> None:
    expected = to_json(value)
    assert to_json(without_objects(value)) == expected
    assert to_json(without_objects([value, value])) == [expected, expected]

    policies: list[OutputPolicy] = ["cast", "keep", "create", "warn", "strict", "off"]
    for policy in policies:
        registry = OperationRegistry(output=policy)

        async def one() -> Any:
            return value

        async def many() -> Any:
            return [value] * 3

        one.__annotations__["return"] = type(value)
        many.__annotations__["return"] = list[type(value)]  # type: ignore[misc]
        registry.operation("test.one")(one)
        registry.operation("test.many")(many)
        for _ in range(2):
            single = (await registry.execute("test.one")).data
            several = (await registry.execute("test.many")).data
            if policy == "off":
                assert single == expected
            assert several == [single] * 3
            if isinstance(single, dict):
                assert single == {name: expected.get(name, single[name]) for name in single}
            assert "secret" not in repr((single, several))


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("policy", ["cast", "keep", "create", "warn", "strict", "off"])
async def test_objects_inside_dicts_have_the_same_form(value: Any, policy: OutputPolicy) -> None:
    registry = OperationRegistry(output=policy)
    single = {"own": value, "listed": [value], "mapped": {"a": value}}
    plain = to_json(single)
    results: list[Any] = [single, [single], [plain, plain], [plain, single]]
    fields = {
        "own": type(value),
        "listed": list[type(value)],  # type: ignore[misc]
        "mapped": dict[str, type(value)],  # type: ignore[misc]
    }
    holder = TypedDict("holder", fields)  # type: ignore[misc]

    async def give(index: int) -> Any:
        return results[index]

    give.__annotations__["return"] = holder | list[holder]
    registry.operation("test.union")(give)
    give.__annotations__["return"] = list[holder]
    registry.operation("test.list")(give)
    for name, indices in (("test.union", range(4)), ("test.list", range(1, 4))):
        for index in (*indices, *indices):
            data = (await registry.execute(name, {"index": index})).data
            assert "secret" not in repr(data)
            assert to_json(data) == data
            for item in [data] if isinstance(data, dict) else data:
                assert item["own"] == item["listed"][0] == item["mapped"]["a"]


@pytest.mark.parametrize(
    "value",
    [
        Point(1),
        Everything(),
        Row(1),
        Model(),
        Masked(),
        Session(),
        HoldsModel(),
        pydantic.SecretStr("a"),
    ],
)
def test_usual_classes_are_converted_in_c(value: Any) -> None:
    assert without_objects(value) is not value
    assert without_objects([value]) == [without_objects(value)]


@pytest.mark.parametrize(
    "value",
    [
        MaskedData(),
        HoldsMaskedData(),
        Slotted(),
        Private(),
        Unslotted(),
        HoldsPrivate(),
        {},
        [],
        [1],
        "a",
    ],
)
def test_other_values_are_not(value: Any) -> None:
    assert without_objects(value) is value


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("policy", ["cast", "keep", "strict", "off"])
async def test_values_that_are_not_json_inside_an_object_are_rejected(policy: OutputPolicy) -> None:
    @dataclasses.dataclass
    class Number:
        value: float | None

    registry = OperationRegistry(output=policy)

    @registry.operation("test.run")
    async def run() -> Number:
        return Number(float("nan"))

    run.__annotations__["return"] = Number
    with pytest.raises(Exception, match="nan") as caught:
        await registry.execute("test.run")
    assert getattr(caught.value, "details", {})["path"] == "/value"


def test_an_object_that_cannot_be_converted_is_explained() -> None:
    @dataclasses.dataclass
    class Odd:
        value: object

    odd = Odd(object())
    assert without_objects(odd) is odd
    with pytest.raises(JSONValueError):
        to_json(without_objects(odd))


class Unready(pydantic.BaseModel):
    @pydantic.computed_field
    def total(self) -> int:
        raise LookupError("canary")


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("policy", ["cast", "strict", "off"])
@pytest.mark.parametrize(("value", "path"), [(Unready(), ""), ([Unready()], "/0")])
async def test_the_text_of_an_exception_of_a_model_is_hidden(
    value: Any, path: str, policy: OutputPolicy
) -> None:
    registry = OperationRegistry(output=policy)

    @registry.operation("test.run")
    def run() -> Any:
        return value

    with pytest.raises(CallError) as caught:
        await registry.execute("test.run")
    assert caught.value.details["path"] == path
    assert "canary" not in caught.value.message


class TreeNode(pydantic.BaseModel):
    value: int
    name: str = pydantic.Field(default="", alias="theName")
    children: list["TreeNode"] = []


class LargerTreeNode(TreeNode):
    extra: int = 1

    @pydantic.field_serializer("extra")
    def write(self, extra: int) -> str:
        return f"<{extra}>"


@pytest.mark.parametrize("cls", [TreeNode, LargerTreeNode])
def test_a_list_of_models_is_dumped_like_each_of_them(cls: type[TreeNode]) -> None:
    models = [cls(value=n, theName="x", children=[cls(value=9)]) for n in range(3)]

    expected = [model.model_dump(mode="json", by_alias=True) for model in models]
    assert without_objects(models) == expected
    assert [without_objects(model) for model in models] == expected
