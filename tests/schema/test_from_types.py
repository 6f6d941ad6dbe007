"""Schemas from Python types, and typed values from JSON that is valid for them."""

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import ipaddress
import pathlib
import re
import runpy
import sys
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Required,
    TypedDict,
    TypeVar,
    Union,
)

import annotated_types
import attrs
import msgspec
import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from operations.base.errors import SchemaError
from operations.base.json.values import to_json
from operations.schema import ConversionError, converter_for, schema_for
from operations.schema.explain import MAX_ISSUES

T = TypeVar("T")
S = TypeVar("S")
Bound = TypeVar("Bound", bound=int)
Limited = TypeVar("Limited", int, str)

UserId = NewType("UserId", int)
STAMP = "2024-01-02T03:04:05Z"
MOMENT = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
UNIQUE = uuid.UUID("12345678-1234-5678-1234-567812345678")


class Color(enum.Enum):
    """What one sees."""

    RED = "red"
    BLUE = "blue"


class Mixed(enum.Enum):
    ONE = 1
    PAIR = (1, 2)
    NO = False
    NOTHING = None


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Name(str):
    __slots__ = ()


class Count(int):
    pass


class Ratio(float):
    pass


@dataclasses.dataclass
class Task:
    """Something to do.

    Attributes:
        title: What it is
            about.
    """

    title: str
    done: bool = False
    due: dt.date | None = None
    tags: list[str] = dataclasses.field(default_factory=list)
    weight: float = 1.0


@dataclasses.dataclass
class Tree:
    value: int
    children: list["Tree"] = dataclasses.field(default_factory=list["Tree"])


@dataclasses.dataclass
class Ping:
    pong: "Pong | None" = None


@dataclasses.dataclass
class Pong:
    ping: Ping | None = None


@dataclasses.dataclass
class Guarded:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


@dataclasses.dataclass
class Built:
    seed: dataclasses.InitVar[int]
    scale: dataclasses.InitVar[int] = 2
    total: int = dataclasses.field(init=False)

    def __post_init__(self, seed: int, scale: int) -> None:
        self.total = seed * scale


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


@dataclasses.dataclass
class Stack(Box[list[T]], Generic[T]):
    top: T


@dataclasses.dataclass
class IntBox(Box[int]):
    pass


@dataclasses.dataclass
class SeedBox(Generic[T]):
    seed: dataclasses.InitVar[T]


class Movie(TypedDict):
    """A film."""

    name: str
    year: NotRequired[int]


class Partial(TypedDict, total=False):
    name: Required[str]
    at: Annotated[dt.datetime, "When."]


class Pair(TypedDict, Generic[T]):
    left: T
    right: T


class IntPair(Pair[int]):
    more: str


class Place(NamedTuple):
    """A spot."""

    x: int
    y: float = 0.5


def shout(text: str) -> str:
    return text.upper()


@attrs.define
class Crate:
    """A box.

    Attributes:
        size: In metres.
    """

    size: int
    _secret: str = "s"
    items: list[int] = attrs.field(factory=list)
    label: str = attrs.field(default="none", converter=shout)
    filled: int = attrs.field(init=False, default=0)
    made: int = attrs.field(default=attrs.Factory(lambda self: self.size, takes_self=True))


@attrs.define
class Checked:
    size: int = attrs.field(validator=attrs.validators.gt(0))


class Row(msgspec.Struct, rename="camel"):
    """One line."""

    row_id: int
    made_at: dt.datetime | None = None
    notes: list[str] = []
    extra: str | msgspec.UnsetType = msgspec.UNSET


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    a: float


class Cat(msgspec.Struct, tag=True):
    lives: int = 9


class Dog(msgspec.Struct, tag=True):
    lives: int = 1


class Line(msgspec.Struct, array_like=True):
    a: int
    b: dt.date | None = None


class TaggedLine(msgspec.Struct, array_like=True, tag="t", forbid_unknown_fields=True):
    a: int


class Slot(msgspec.Struct, Generic[T]):
    item: T


class Person(pydantic.BaseModel):
    name: str
    born: dt.date | None = None
    friend: Optional["Person"] = None


class Aliased(pydantic.BaseModel):
    first_name: str = pydantic.Field(alias="firstName")
    size: int = 1


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", val_json_bytes="base64")

    at: dt.datetime
    raw: bytes = b""


class Computed(pydantic.BaseModel):
    a: int = 1

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.a * 2


class Numbers(pydantic.RootModel[list[int]]):
    pass


@pydantic.dataclasses.dataclass
class PydanticPoint:
    x: int
    at: dt.date | None = None


@dataclasses.dataclass
class Mixture:
    person: Person
    either: Person | Aliased | Task | None = None
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)


def even(value: int) -> int:
    if value % 2:
        raise ValueError("is odd")
    return value


# The schema, then pairs of a JSON value and the converted value.
CASES: list[tuple[Any, Any, list[tuple[Any, Any]]]] = [
    (None, {"type": "null"}, [(None, None)]),
    (bool, {"type": "boolean"}, [(True, True)]),
    (str, {"type": "string"}, [("a", "a")]),
    (int, {"type": "integer"}, [(1, 1), (1.0, 1), (2**70, 2**70), (1e300, int(1e300))]),
    (float, {"type": "number"}, [(1, 1.0), (1.5, 1.5), (2**60, float(2**60))]),
    (Any, {}, [({"a": 1}, {"a": 1})]),
    (object, {}, [(1, 1)]),
    (typing.Never, {}, []),
    (typing.LiteralString, {"type": "string"}, [("a", "a")]),
    (UserId, {"type": "integer"}, [(1.0, 1)]),
    (Final[int], {"type": "integer"}, [(1.0, 1)]),
    (T, {}, [("a", "a")]),
    (Bound, {"type": "integer"}, [(1.0, 1)]),
    (Limited, {"anyOf": [{"type": "integer"}, {"type": "string"}]}, [("a", "a"), (1.0, 1)]),
    (Name, {"type": "string"}, [("a", Name("a"))]),
    (Count, {"type": "integer"}, [(1.0, Count(1))]),
    (Ratio, {"type": "number"}, [(1, Ratio(1.0))]),
    (dt.datetime, {"type": "string", "format": "date-time"}, [(STAMP, MOMENT)]),
    (dt.date, {"type": "string", "format": "date"}, [("2024-01-02", dt.date(2024, 1, 2))]),
    (dt.time, {"type": "string", "format": "time"}, [("01:02:03", dt.time(1, 2, 3))]),
    (dt.timedelta, {"type": "string", "format": "duration"}, [("P1D", dt.timedelta(1))]),
    (uuid.UUID, {"type": "string", "format": "uuid"}, [(str(UNIQUE), UNIQUE)]),
    (
        decimal.Decimal,
        {"type": ["string", "number"], "format": "decimal"},
        [("1.10", decimal.Decimal("1.10")), (1.1, decimal.Decimal("1.1")), (2, decimal.Decimal(2))],
    ),
    (bytes, {"type": "string", "contentEncoding": "base64"}, [("YWI=", b"ab")]),
    (bytearray, {"type": "string", "contentEncoding": "base64"}, [("YWI=", bytearray(b"ab"))]),
    (pathlib.Path, {"type": "string"}, [("a/b", pathlib.Path("a/b"))]),
    (
        ipaddress.IPv4Address,
        {"type": "string", "format": "ipv4"},
        [("10.0.0.1", ipaddress.IPv4Address("10.0.0.1"))],
    ),
    (list, {"type": "array"}, [([1, "a"], [1, "a"])]),
    (list[int], {"type": "array", "items": {"type": "integer"}}, [([1.0, 2], [1, 2])]),
    (typing.List[str], {"type": "array", "items": {"type": "string"}}, [(["a"], ["a"])]),  # noqa: UP006
    (Sequence[str], {"type": "array", "items": {"type": "string"}}, [(["a"], ["a"])]),
    (
        collections.deque[int],
        {"type": "array", "items": {"type": "integer"}},
        [([1.0], collections.deque([1]))],
    ),
    (
        set[int],
        {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
        [([1.0, 2], {1, 2})],
    ),
    (
        frozenset[str],
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        [(["a"], frozenset({"a"}))],
    ),
    (tuple, {"type": "array"}, [([1], (1,))]),
    (typing.Tuple, {"type": "array"}, [([1], (1,))]),  # noqa: UP006
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}, [([1.0], (1,))]),
    (tuple[()], {"type": "array", "minItems": 0, "maxItems": 0}, [([], ())]),
    (
        tuple[int, str],
        {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
        },
        [([1.0, "a"], (1, "a"))],
    ),
    (dict, {"type": "object"}, [({"a": 1}, {"a": 1})]),
    (
        Mapping[str, int],
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [({"a": 1.0}, {"a": 1})],
    ),
    (
        collections.OrderedDict[str, str],
        {"type": "object", "additionalProperties": {"type": "string"}},
        [({"a": "b"}, collections.OrderedDict(a="b"))],
    ),
    (
        collections.defaultdict[str, int],
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [({"a": 1}, collections.defaultdict(None, a=1))],
    ),
    (
        collections.Counter[str],
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [({"a": 1.0}, collections.Counter(a=1))],
    ),
    (
        dict[int, str],
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|-?[1-9][0-9]*)$"},
            "additionalProperties": {"type": "string"},
        },
        [({"1": "a", "-2": "b"}, {1: "a", -2: "b"})],
    ),
    (
        dict[uuid.UUID, Any],
        {"type": "object", "propertyNames": {"format": "uuid"}},
        [({str(UNIQUE): 1}, {UNIQUE: 1})],
    ),
    (
        dict[Color, int],
        {
            "type": "object",
            "propertyNames": {"enum": ["red", "blue"]},
            "additionalProperties": {"type": "integer"},
        },
        [({"red": 1}, {Color.RED: 1})],
    ),
    (
        dict[Level, str],
        {
            "type": "object",
            "propertyNames": {"enum": ["1", "2"]},
            "additionalProperties": {"type": "string"},
        },
        [({"1": "a"}, {Level.LOW: "a"})],
    ),
    (
        dict[Annotated[str, msgspec.Meta(min_length=2)], int],
        {
            "type": "object",
            "propertyNames": {"minLength": 2},
            "additionalProperties": {"type": "integer"},
        },
        [({"ab": 1}, {"ab": 1})],
    ),
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, [("a", "a")]),
    (Literal[1, "a", None], {"enum": [1, "a", None]}, [(1.0, 1), ("a", "a"), (None, None)]),
    (Literal[True], {"type": "boolean", "enum": [True]}, [(True, True)]),
    (Literal[Color.RED], {"type": "string", "enum": ["red"]}, [("red", Color.RED)]),
    (Literal[b"ab"], {"type": "string", "enum": ["YWI="]}, [("YWI=", b"ab")]),
    (
        Color,
        {
            "title": "Color",
            "description": "What one sees.",
            "type": "string",
            "enum": ["red", "blue"],
        },
        [("red", Color.RED)],
    ),
    (Level, {"title": "Level", "type": "integer", "enum": [1, 2]}, [(1.0, Level.LOW)]),
    (
        Mixed,
        {"title": "Mixed", "enum": [1, [1, 2], False, None]},
        [(1, Mixed.ONE), ([1, 2], Mixed.PAIR), (False, Mixed.NO), (None, Mixed.NOTHING)],
    ),
    (Access, {"type": "integer", "title": "Access"}, [(3.0, Access.READ | Access.WRITE)]),
    (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, [(1.0, 1), (None, None)]),
    (Optional[str], {"anyOf": [{"type": "string"}, {"type": "null"}]}, [("a", "a")]),  # noqa: UP045
    (Union[int, float], {"anyOf": [{"type": "integer"}, {"type": "number"}]}, [(1, 1), (1.0, 1.0)]),  # noqa: UP007
    (float | int, {"anyOf": [{"type": "number"}, {"type": "integer"}]}, [(1, 1), (1.5, 1.5)]),
    (Any | None, {}, [(1, 1)]),
    (
        dt.date | str,
        {"anyOf": [{"type": "string", "format": "date"}, {"type": "string"}]},
        [("2024-01-02", dt.date(2024, 1, 2)), ("x", "x")],
    ),
    (
        str | dt.date,
        {"anyOf": [{"type": "string"}, {"type": "string", "format": "date"}]},
        [("2024-01-02", "2024-01-02")],
    ),
    (
        list[int] | dict[str, int] | None,
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer"}},
                {"type": "object", "additionalProperties": {"type": "integer"}},
                {"type": "null"},
            ]
        },
        [([1.0], [1]), ({"a": 1.0}, {"a": 1}), (None, None)],
    ),
    (
        list[int] | list[str],
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
            ]
        },
        [([1.0], [1]), (["a"], ["a"])],
    ),
    (
        Annotated[int, msgspec.Meta(ge=1, le=9, title="T", description="D", examples=[2])],
        {
            "type": "integer",
            "minimum": 1,
            "maximum": 9,
            "title": "T",
            "description": "D",
            "examples": [2],
        },
        [(1.0, 1)],
    ),
    (Annotated[int, "Plain words."], {"type": "integer", "description": "Plain words."}, [(1, 1)]),
    (
        Annotated[int, typing_extensions.Doc("Words.")],
        {"type": "integer", "description": "Words."},
        [],
    ),
    (Annotated[int, int, object()], {"type": "integer"}, []),
    (
        Annotated[str, msgspec.Meta(pattern="^a", extra_json_schema={"format": "f"})],
        {"type": "string", "pattern": "^a", "format": "f"},
        [],
    ),
    (
        Annotated[float, annotated_types.Gt(0), annotated_types.Lt(1)],
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        [],
    ),
    (
        Annotated[list[int], annotated_types.Len(1, 3)],
        {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "integer"}},
        [],
    ),
    (
        Annotated[dict[str, Any], msgspec.Meta(max_length=2)],
        {"type": "object", "maxProperties": 2},
        [],
    ),
    (
        Annotated[str, pydantic.Field(description="D", max_length=3)],
        {"type": "string", "maxLength": 3, "description": "D"},
        [],
    ),
    (
        Annotated[int | str | None, msgspec.Meta(ge=1)],
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}]},
        [(1.0, 1), ("a", "a")],
    ),
    (
        Annotated[dt.datetime, msgspec.Meta(tz=True)],
        {"type": "string", "format": "date-time"},
        [(STAMP, MOMENT)],
    ),
    (
        Annotated[int, "A number."] | Annotated[str, "A text."],
        {
            "anyOf": [
                {"type": "integer", "description": "A number."},
                {"type": "string", "description": "A text."},
            ]
        },
        [(1.0, 1), ("a", "a")],
    ),
    (
        Task,
        {
            "title": "Task",
            "description": "Something to do.",
            "type": "object",
            "properties": {
                "title": {"type": "string", "description": "What it is about."},
                "done": {"type": "boolean", "default": False},
                "due": {
                    "anyOf": [{"type": "string", "format": "date"}, {"type": "null"}],
                    "default": None,
                },
                "tags": {"type": "array", "items": {"type": "string"}, "default": []},
                "weight": {"type": "number", "default": 1.0},
            },
            "required": ["title"],
            "additionalProperties": False,
        },
        [
            ({"title": "a"}, Task("a")),
            (
                {"title": "a", "due": "2024-01-02", "weight": 2},
                Task("a", due=dt.date(2024, 1, 2), weight=2.0),
            ),
        ],
    ),
    (
        Movie,
        {
            "title": "Movie",
            "description": "A film.",
            "type": "object",
            "properties": {"name": {"type": "string"}, "year": {"type": "integer"}},
            "required": ["name"],
            "additionalProperties": False,
        },
        [({"name": "a", "year": 1999.0}, {"name": "a", "year": 1999})],
    ),
    (
        Partial,
        {
            "title": "Partial",
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "at": {"type": "string", "format": "date-time", "description": "When."},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
        [({"name": "a", "at": STAMP}, {"name": "a", "at": MOMENT})],
    ),
    (
        IntPair,
        {
            "title": "IntPair",
            "type": "object",
            "properties": {
                "left": {"type": "integer"},
                "right": {"type": "integer"},
                "more": {"type": "string"},
            },
            "required": ["left", "right", "more"],
            "additionalProperties": False,
        },
        [({"left": 1.0, "right": 2, "more": "a"}, {"left": 1, "right": 2, "more": "a"})],
    ),
    (
        Pair[str],
        {
            "title": "Pair[str]",
            "type": "object",
            "properties": {"left": {"type": "string"}, "right": {"type": "string"}},
            "required": ["left", "right"],
            "additionalProperties": False,
        },
        [({"left": "a", "right": "b"}, {"left": "a", "right": "b"})],
    ),
    (
        Place,
        {
            "title": "Place",
            "description": "A spot.",
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "number", "default": 0.5}],
            "minItems": 1,
            "maxItems": 2,
        },
        [([1.0], Place(1)), ([1, 2], Place(1, 2.0))],
    ),
    (
        Crate,
        {
            "title": "Crate",
            "description": "A box.",
            "type": "object",
            "properties": {
                "size": {"type": "integer", "description": "In metres."},
                "_secret": {"type": "string", "default": "s"},
                "items": {"type": "array", "items": {"type": "integer"}, "default": []},
                "label": {"type": "string", "default": "none"},
                "made": {"type": "integer"},
            },
            "required": ["size"],
            "additionalProperties": False,
        },
        [
            (
                {"size": 1.0, "_secret": "x", "items": [2.0], "label": "big"},
                Crate(1, "x", [2], "BIG"),
            ),
            ({"size": 3}, Crate(3)),
        ],
    ),
    (
        Row,
        {
            "title": "Row",
            "description": "One line.",
            "type": "object",
            "properties": {
                "rowId": {"type": "integer"},
                "madeAt": {
                    "anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}],
                    "default": None,
                },
                "notes": {"type": "array", "items": {"type": "string"}, "default": []},
                "extra": {"type": "string"},
            },
            "required": ["rowId"],
        },
        [({"rowId": 1.0, "madeAt": STAMP, "unknown": 1}, Row(1, MOMENT))],
    ),
    (
        Closed,
        {
            "title": "Closed",
            "type": "object",
            "properties": {"a": {"type": "number"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [({"a": 1}, Closed(1.0))],
    ),
    (
        Cat,
        {
            "title": "Cat",
            "type": "object",
            "properties": {"type": {"const": "Cat"}, "lives": {"type": "integer", "default": 9}},
            "required": ["type"],
        },
        [({"type": "Cat", "lives": 3.0}, Cat(3))],
    ),
    (
        Line,
        {
            "title": "Line",
            "type": "array",
            "prefixItems": [
                {"type": "integer"},
                {
                    "anyOf": [{"type": "string", "format": "date"}, {"type": "null"}],
                    "default": None,
                },
            ],
            "minItems": 1,
        },
        [([1.0, "2024-01-02", "more"], Line(1, dt.date(2024, 1, 2))), ([1], Line(1))],
    ),
    (
        TaggedLine,
        {
            "title": "TaggedLine",
            "type": "array",
            "prefixItems": [{"const": "t"}, {"type": "integer"}],
            "minItems": 2,
            "maxItems": 2,
        },
        [(["t", 1.0], TaggedLine(1))],
    ),
    (
        Slot[int],
        {
            "title": "Slot[int]",
            "type": "object",
            "properties": {"item": {"type": "integer"}},
            "required": ["item"],
        },
        [({"item": 1.0}, Slot(1))],
    ),
    (
        Box[int],
        {
            "title": "Box[int]",
            "type": "object",
            "properties": {"item": {"type": "integer"}},
            "required": ["item"],
            "additionalProperties": False,
        },
        [({"item": 1.0}, Box(1))],
    ),
    (
        Stack[int],
        {
            "title": "Stack[int]",
            "type": "object",
            "properties": {
                "item": {"type": "array", "items": {"type": "integer"}},
                "top": {"type": "integer"},
            },
            "required": ["item", "top"],
            "additionalProperties": False,
        },
        [({"item": [1.0], "top": 2.0}, Stack([1], 2))],
    ),
    (
        IntBox,
        {
            "title": "IntBox",
            "type": "object",
            "properties": {"item": {"type": "integer"}},
            "required": ["item"],
            "additionalProperties": False,
        },
        [({"item": 1.0}, IntBox(1))],
    ),
    (
        Numbers,
        {"title": "Numbers", "type": "array", "items": {"type": "integer"}},
        [([1.0], Numbers([1]))],
    ),
    (
        pydantic.SecretStr,
        {"type": "string", "format": "password", "writeOnly": True},
        [("a", pydantic.SecretStr("a"))],
    ),
    (Annotated[int, pydantic.AfterValidator(even)], {"type": "integer"}, [(2, 2)]),
]


def described(annotation: Any) -> str:
    text = str(annotation).replace("typing.", "").replace(f"{__name__}.", "")
    # Addresses differ from process to process, and tests run in several must have the same names.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@pytest.mark.parametrize(("annotation", "schema", "values"), CASES, ids=described)
def test_a_type_has_a_schema_and_its_values_pass_and_are_converted(
    annotation: Any, schema: Any, values: list[tuple[Any, Any]]
) -> None:
    found = schema_for(annotation)
    convert = converter_for(annotation)

    assert found.document == schema
    found.compile()
    for value, expected in values:
        before = to_json(value)
        assert found.check(value)
        converted = value if convert is None else convert(value)
        assert converted == expected
        assert type(converted) is type(expected)
        assert value == before


@pytest.mark.parametrize(
    "annotation",
    [
        str,
        bool,
        None,
        Any,
        list[str],
        dict[str, str],
        dict[str, list[bool]],
        str | None,
        Literal["a"],
        Pair[str],
        list[Any] | dict[str, Any],
        dict[str, Any],
        str | bool | None,
        int | float,
    ],
    ids=described,
)
def test_no_converter_is_built_if_the_value_is_json_already(annotation: Any) -> None:
    assert converter_for(annotation) is None


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (int, 1.5, ""),
        (int, "1", ""),
        (float, 2**53 + 1, ""),
        (float, 10**400, ""),
        (list[float], [1, 2**53 + 1], "/1"),
        (dt.datetime, "yesterday", ""),
        (dt.date, "2024-02-31", ""),
        (list[dt.date], ["2024-02-01", "no"], "/1"),
        (dict[str, dt.date], {"a/b": "no"}, "/a~1b"),
        (dict[uuid.UUID, int], {"no": 1}, "/no"),
        (tuple[int, uuid.UUID], [1, "no"], "/1"),
        (uuid.UUID, "no", ""),
        (decimal.Decimal, "no", ""),
        (bytes, "!", ""),
        (ipaddress.IPv4Address, "300.0.0.1", ""),
        (Task, {"title": "a", "due": "no"}, "/due"),
        (Guarded, {"low": 2, "high": 1}, ""),
        (list[Guarded], [{"low": 1, "high": 2}, {"low": 2, "high": 1}], "/1"),
        (Checked, {"size": 0}, ""),
        (Place, [1.5], "/0"),
        (TaggedLine, ["t", 1.5], "/1"),
        (Row, {"rowId": 1, "madeAt": "no"}, "/madeAt"),
        (Strict, {"at": "no"}, "/at"),
        (Person, {"name": "a", "friend": {"name": "b", "born": "no"}}, "/friend/born"),
        (list[Numbers], [[1], [0.5]], "/1/0"),
        (Annotated[int, pydantic.AfterValidator(even)], 1, ""),
        (Annotated[dt.datetime, msgspec.Meta(tz=True)], "2024-01-02T03:04:05", ""),
        (Color, "green", ""),
        (Access, 64, ""),
        (dt.date | uuid.UUID, "no", ""),
        (dict[int, str], {"1": "a", "01": "b"}, ""),
        (dict[Annotated[int, msgspec.Meta(ge=0)], str], {"-1": "a"}, "/-1"),
        (set[dt.datetime], [STAMP, "2024-01-02T04:04:05+01:00"], ""),
        (set[list[int]], [[1]], ""),
        (Pair[int], {"left": 1.5, "right": 1}, "/left"),
    ],
    ids=lambda value: described(value) if not isinstance(value, (dict, list, float)) else "",
)
def test_an_inconvertible_or_lossy_value_is_rejected_with_its_location(
    annotation: Any, value: Any, path: str
) -> None:
    convert = converter_for(annotation)
    assert convert is not None

    with pytest.raises(ConversionError) as caught:
        convert(value)

    assert [found for found, _ in caught.value.reasons] == [path]
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_failing_place_is_reported() -> None:
    convert = converter_for(dict[str, list[Task]])
    assert convert is not None

    with pytest.raises(ConversionError) as caught:
        convert({"a": [{"title": "x", "due": "1", "weight": 2**60 + 1}], "b": [{"due": "2"}]})

    assert [path for path, _ in caught.value.reasons] == ["/a/0/due", "/a/0/weight", "/b/0/due"]


def test_every_failing_key_and_value_is_reported() -> None:
    convert = converter_for(dict[dt.date, dt.date])
    assert convert is not None
    with pytest.raises(ConversionError) as caught:
        convert({"no date": "2026-01-02", "2026-01-02": "no date"})
    assert [path for path, _ in caught.value.reasons] == ["/no date", "/2026-01-02"]


def test_other_exceptions_of_a_class_are_not_rejections() -> None:
    @dataclasses.dataclass
    class Buggy:
        a: int

        def __post_init__(self) -> None:
            raise KeyError("a mistake")

    convert = converter_for(Buggy)
    assert convert is not None
    with pytest.raises(KeyError):
        convert({"a": 1})


def test_a_class_may_reject_a_value_with_its_own_path() -> None:
    @dataclasses.dataclass
    class Precise:
        a: int

        def __post_init__(self) -> None:
            raise ConversionError([("/a", "is never right")])

    convert = converter_for(list[Precise])
    assert convert is not None
    with pytest.raises(ConversionError, match="/0/a: is never right"):
        convert([{"a": 1}])


class Entry(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def reject(cls, name: str) -> str:
        raise ValueError(f"{name!r} is reserved")


@attrs.define
class Matching:
    name: Any = attrs.field(validator=attrs.validators.instance_of(int))


@dataclasses.dataclass
class Counted:
    count: str

    def __post_init__(self) -> None:
        int(self.count)


@pytest.mark.parametrize("annotation", [list[dt.date], pydantic.RootModel[list[Entry]]])
def test_the_number_of_rejected_places_is_bounded(annotation: Any) -> None:
    convert = converter_for(annotation)
    assert convert is not None
    item = "no date" if annotation == list[dt.date] else {"name": "a"}
    with pytest.raises(ConversionError) as caught:
        convert([item] * 1_000)
    assert len(caught.value.issues()) == MAX_ISSUES


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 7531.5),
        (float, 7531 * 10**300),
        (Access, 7531),
        (Literal[1, 2], 7531),
        (Annotated[dt.date, annotated_types.Ge(dt.date(9999, 1, 1))], "7531-09-07"),
        (ipaddress.IPv4Address, "7531"),
        (Counted, {"count": "it's 7531"}),
        (list[Matching], [{"name": "7531"}]),
        (Entry, {"name": "7531"}),
    ],
)
def test_rejected_values_are_not_repeated(annotation: Any, value: Any) -> None:
    convert = converter_for(annotation)
    assert convert is not None
    with pytest.raises(ConversionError) as caught:
        convert(value)
    assert "7531" not in str(caught.value)


def test_the_text_of_an_exception_is_one_line_of_limited_length() -> None:
    @dataclasses.dataclass
    class Talkative:
        a: int

        def __post_init__(self) -> None:
            raise ValueError("no\n" * 1_000, self)

    convert = converter_for(Talkative)
    assert convert is not None
    with pytest.raises(ConversionError) as caught:
        convert({"a": 1})
    [issue] = caught.value.issues()
    assert issue.message.startswith("is not valid: no no no")
    assert len(issue.message) <= 300


def test_a_rejection_without_a_message_is_named_by_its_type() -> None:
    @dataclasses.dataclass
    class Silent:
        a: int

        def __post_init__(self) -> None:
            raise ValueError

    convert = converter_for(Silent)
    assert convert is not None
    with pytest.raises(ConversionError, match="ValueError"):
        convert({"a": 1})


@pytest.mark.parametrize(
    "value",
    [{"title": "a", "unknown": 1}, {"done": True}, {"title": 1}, [], None],
)
def test_a_dataclass_is_closed_and_its_required_fields_are_required(value: Any) -> None:
    assert not schema_for(Task).check(value)


def test_recursive_types_refer_to_themselves() -> None:
    schema, convert = schema_for(Tree), converter_for(Tree)
    assert convert is not None
    value = {"value": 1.0, "children": [{"value": 2, "children": [{"value": 3.0}]}]}

    assert isinstance(schema.document, dict)
    assert schema.document["type"] == "object"
    assert schema.document["$defs"].keys() == {"Tree"}
    assert schema.check(value)
    assert not schema.check({"value": 1, "children": [{"value": "x"}]})
    assert convert(value) == Tree(1, [Tree(2, [Tree(3)])])


def test_mutually_recursive_types_work() -> None:
    schema, convert = schema_for(list[Ping]), converter_for(list[Ping])
    assert convert is not None

    assert isinstance(schema.document, dict)
    assert schema.document["$defs"].keys() == {"Ping", "Pong"}
    assert schema.check([{"pong": {"ping": {"pong": None}}}])
    assert convert([{"pong": {"ping": {"pong": None}}}]) == [Ping(Pong(Ping(None)))]


class Folder(TypedDict):
    name: str
    inside: "list[Folder] | dict[str, Folder]"


def test_a_recursive_typed_dict_is_converted_through_all_levels() -> None:
    schema, convert = schema_for(Folder), converter_for(Folder)
    value = {"name": "a", "inside": [{"name": "b", "inside": {"c": {"name": "c", "inside": []}}}]}

    assert schema.check(value)
    assert not schema.check({"name": "a", "inside": [{"name": 1, "inside": []}]})
    assert (value if convert is None else convert(value)) == value


def test_a_class_whose_fields_need_no_conversion_is_still_made() -> None:
    @dataclasses.dataclass
    class Label:
        text: str
        bold: bool = False

    convert = converter_for(Label)
    assert convert is not None
    assert convert({"text": "a"}) == Label("a")


def test_a_class_made_in_a_function_may_name_itself() -> None:
    @dataclasses.dataclass
    class Node:
        next: "Node | None" = None

    convert = converter_for(Node)
    assert convert is not None
    assert convert({"next": {"next": None}}) == Node(Node())


def test_a_name_that_cannot_be_found_is_an_error() -> None:
    @dataclasses.dataclass
    class Lost:
        a: "Nowhere"  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(NameError, match="Nowhere"):
        schema_for(Lost)


Items = typing_extensions.TypeAliasType("Items", list[T], type_params=(T,))
Number = typing_extensions.TypeAliasType("Number", int)
Quoted = typing_extensions.TypeAliasType("Quoted", 'dict[T, "Number"]', type_params=(T,))


def test_type_aliases_are_named_unless_they_are_scalars() -> None:
    assert schema_for(Number).document == {"type": "integer"}
    assert schema_for(Annotated[Number, msgspec.Meta(ge=1)]).document == {
        "type": "integer",
        "minimum": 1,
    }
    assert schema_for(Items[int]).document == {"type": "array", "items": {"type": "integer"}}
    assert schema_for(Quoted[str]).document == {
        "type": "object",
        "additionalProperties": {"type": "integer"},
    }
    assert schema_for(list[Items[int]]).document == {
        "type": "array",
        "items": {"$ref": "#/$defs/Items_int"},
        "$defs": {"Items_int": {"type": "array", "items": {"type": "integer"}}},
    }


@pytest.mark.parametrize("text", ["int |", "Missing", "re.Missing", "int[str]"])
def test_a_quoted_type_alias_that_cannot_be_resolved_is_named(text: str) -> None:
    bad: Any = typing_extensions.TypeAliasType("Bad", text)
    with pytest.raises(SchemaError, match="the type alias Bad cannot be resolved"):
        schema_for(list[bad])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement came with Python 3.12")
@pytest.mark.parametrize("name", ["Nest", '"Nest"'])
def test_type_aliases_may_be_recursive(name: str, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "recursive.py"
    source.write_text(f"type Nest = dict[str, {name}] | list[{name}] | int | None\n", "utf-8")
    nest = runpy.run_path(str(source))["Nest"]
    schema, convert = schema_for(nest), converter_for(nest)
    assert convert is not None

    assert schema.check({"a": [1, {"b": None}]})
    assert not schema.check({"a": ["x"]})
    assert convert({"a": [1.0, {"b": None}]}) == {"a": [1, {"b": None}]}


def test_an_untyped_named_tuple_holds_anything() -> None:
    loose: Any = collections.namedtuple("loose", "a b")
    convert = converter_for(loose)
    assert convert is not None

    assert schema_for(loose).document == {
        "title": "loose",
        "type": "array",
        "prefixItems": [{}, {}],
        "minItems": 2,
        "maxItems": 2,
    }
    assert convert([1, "b"]) == loose(1, "b")


def test_dataclasses_distinguish_inputs_and_outputs() -> None:
    taken, given = schema_for(Built), schema_for(Built, mode="serialization")
    convert = converter_for(Built)
    assert convert is not None

    assert taken.document == {
        "title": "Built",
        "type": "object",
        "properties": {"seed": {"type": "integer"}, "scale": {"type": "integer", "default": 2}},
        "required": ["seed"],
        "additionalProperties": False,
    }
    assert given.document == {
        "title": "Built",
        "type": "object",
        "properties": {"total": {"type": "integer"}},
        "additionalProperties": False,
    }
    built = convert({"seed": 3.0})
    assert built.total == 6
    assert given.check(to_json(built))


def test_type_variables_in_init_variables_are_filled() -> None:
    assert schema_for(SeedBox[int]).document == {
        "title": "SeedBox[int]",
        "type": "object",
        "properties": {"seed": {"type": "integer"}},
        "required": ["seed"],
        "additionalProperties": False,
    }


def test_pydantic_models_distinguish_inputs_and_outputs() -> None:
    taken, given = schema_for(Computed), schema_for(Computed, mode="serialization")

    assert isinstance(taken.document, dict)
    assert isinstance(given.document, dict)
    assert taken.document["properties"].keys() == {"a"}
    assert given.document["properties"].keys() == {"a", "double"}
    assert given.check(to_json(Computed()))


def test_pydantic_reads_json_by_its_own_settings() -> None:
    convert = converter_for(Strict)
    assert convert is not None

    assert schema_for(Strict).check({"at": STAMP, "raw": "YWI="})
    assert convert({"at": STAMP, "raw": "YWI="}) == Strict(at=MOMENT, raw=b"ab")


def test_pydantic_models_work_inside_everything() -> None:
    schema, convert = schema_for(Mixture), converter_for(Mixture)
    assert convert is not None
    value = {
        "person": {"name": "a", "friend": {"name": "b", "born": "2024-01-02"}},
        "either": {"firstName": "c", "size": 2.0},
        "rows": {"r": {"rowId": 1}},
    }

    assert schema.check(value)
    assert convert(value) == Mixture(
        Person(name="a", friend=Person(name="b", born=dt.date(2024, 1, 2))),
        Aliased(firstName="c", size=2),
        {"r": Row(1)},
    )
    assert convert({**value, "either": {"title": "t"}}).either == Task("t")
    assert convert({**value, "either": None}).either is None
    assert schema.check(to_json(convert(value)))


def test_pydantic_dataclasses_are_read_by_pydantic() -> None:
    convert = converter_for(PydanticPoint)
    assert convert is not None

    assert convert({"x": 1, "at": "2024-01-02"}) == PydanticPoint(1, dt.date(2024, 1, 2))
    assert schema_for(PydanticPoint).check({"x": 1})


def test_models_of_equal_name_do_not_mix() -> None:
    def make(annotation: Any) -> type[pydantic.BaseModel]:
        inner = pydantic.create_model("Inner", a=(annotation, ...))
        return pydantic.create_model("Outer", inner=(inner, ...))

    numbers, texts = make(int), make(str)

    schema = schema_for(tuple[numbers, texts, Box[numbers]])  # type: ignore[valid-type]

    assert schema.check([{"inner": {"a": 1}}, {"inner": {"a": "x"}}, {"item": {"inner": {"a": 1}}}])
    assert not schema.check(
        [{"inner": {"a": 1}}, {"inner": {"a": 1}}, {"item": {"inner": {"a": 1}}}]
    )
    assert not schema.check([{"inner": {"a": "x"}}, {"inner": {"a": "x"}}, {"item": 1}])


def test_classes_of_equal_name_do_not_mix() -> None:
    def make(annotation: Any) -> Any:
        return dataclasses.make_dataclass("Same", [("a", annotation)])

    schema = schema_for(types.GenericAlias(tuple, (make(int), make(str))))

    assert isinstance(schema.document, dict)
    assert schema.document["$defs"].keys() == {"Same", "Same_2"}
    assert schema.check([{"a": 1}, {"a": "x"}])
    assert not schema.check([{"a": "x"}, {"a": "x"}])


def test_a_type_used_twice_is_written_once() -> None:
    schema = schema_for(tuple[Task, list[Task], Box[Task], Person, Person])

    assert isinstance(schema.document, dict)
    assert schema.document["$defs"].keys() == {"Task", "Box_Task", "Person"}


def test_a_model_pydantic_cannot_describe_is_a_schema_error() -> None:
    class Odd(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        a: Callable[[], int]

    with pytest.raises(SchemaError, match="Odd"):
        _ = schema_for(Odd).document


def test_a_tag_selects_the_struct() -> None:
    schema, convert = schema_for(Cat | Dog), converter_for(Cat | Dog)
    assert convert is not None

    assert schema.check({"type": "Dog"})
    assert not schema.check({"type": "Cow"})
    assert convert({"type": "Dog"}) == Dog()
    assert convert({"type": "Cat", "lives": 2}) == Cat(2)


def test_of_open_classes_the_one_with_most_matching_fields_is_chosen() -> None:
    class Small(msgspec.Struct):
        a: int

    class Large(msgspec.Struct):
        a: int
        b: int = 0

    convert = converter_for(Small | Large)
    assert convert is not None

    assert convert({"a": 1, "b": 2}) == Large(1, 2)
    assert convert({"a": 1}) == Small(1)


def test_a_union_tries_the_next_member_if_one_rejects_the_value() -> None:
    convert = converter_for(Guarded | dict[str, int])
    assert convert is not None

    assert convert({"low": 1, "high": 2}) == Guarded(1, 2)
    assert convert({"low": 2, "high": 1}) == {"low": 2, "high": 1}


def test_a_constrained_member_of_a_union_matches_its_values() -> None:
    annotation = Annotated[str, msgspec.Meta(max_length=2)] | uuid.UUID
    convert = converter_for(annotation)
    assert convert is not None

    assert convert("ab") == "ab"
    assert convert(str(UNIQUE)) == UNIQUE


def test_msgspec_agrees_about_its_structs() -> None:
    rows = [{"rowId": 1}, {"rowId": 1, "madeAt": None, "notes": ["a"]}, {"rowId": 2, "extra": "e"}]
    convert = converter_for(Row)
    assert convert is not None

    for row in rows:
        assert convert(row) == msgspec.convert(row, Row)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (complex, "complex"),
        (Callable[[int], str], "Callable"),
        (type[int], "type"),
        (list[complex], "complex"),
        (Box[complex], "complex"),
        (collections.abc.Iterator[int], "Iterator"),
        (object(), "object"),
        ([], "not a type"),
        ("int", "name of a type"),
        (typing.ForwardRef("int"), "name of a type"),
        (dict[float, int], "float"),
        (dict[tuple[int, int], int], "tuple"),
        (dict[Mixed, int], "key"),
        (Annotated[Task, msgspec.Meta(ge=1)], "ge"),
        (Annotated[str, msgspec.Meta(ge=1)], "ge"),
        (Annotated[Task | None, msgspec.Meta(ge=1)], "ge"),
        (Literal[1, Level.LOW], "same"),
        (enum.Enum("Bad", {"A": object()}), "A"),
    ],
    ids=lambda value: described(value)[:30],
)
def test_a_type_that_cannot_be_converted_to_json_is_rejected_by_name(
    annotation: Any, words: str
) -> None:
    with pytest.raises(SchemaError, match=words):
        schema_for(annotation)


def test_defaults_that_are_not_json_or_not_of_the_type_are_omitted() -> None:
    @dataclasses.dataclass
    class Odd:
        marker: Any = dataclasses.field(default=object())
        absent: str = None  # type: ignore[assignment]
        color: Color = Color.RED
        made: list[int] = dataclasses.field(default_factory=lambda: [1])

    document = schema_for(Odd).document

    assert isinstance(document, dict)
    properties = document["properties"]
    assert "default" not in properties["marker"]
    assert "default" not in properties["absent"]
    assert properties["color"]["default"] == "red"
    assert "default" not in properties["made"]


def test_the_document_is_written_when_first_needed() -> None:
    written: list[str] = []

    class Watched(pydantic.BaseModel):
        @classmethod
        def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
            written.append("now")
            return super().model_json_schema(*args, **kwargs)

    schema = schema_for(Watched)

    assert not written
    assert schema.check({})
    assert schema.check({})
    assert written == ["now"]


def test_an_enum_that_knows_pydantic_is_still_an_enum() -> None:
    class Known(enum.Enum):
        A = "a"

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            raise NotImplementedError

    assert schema_for(Known).document == {"title": "Known", "type": "string", "enum": ["a"]}


ANNOTATIONS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (Task, st.builds(Task, st.text(), st.booleans(), st.none() | st.dates(), st.lists(st.text()))),
    (
        dict[int, Place],
        st.dictionaries(
            st.integers(),
            st.builds(Place, st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
        ),
    ),
    (list[dt.datetime | None], st.lists(st.none() | st.datetimes(timezones=st.just(dt.UTC)))),
    (set[decimal.Decimal], st.sets(st.decimals(allow_nan=False, allow_infinity=False))),
    (tuple[bytes, uuid.UUID], st.tuples(st.binary(), st.uuids())),
    (
        dict[Color, list[Row]],
        st.dictionaries(st.sampled_from(Color), st.lists(st.builds(Row, st.integers()))),
    ),
    (Person, st.builds(Person, name=st.text(), born=st.none() | st.dates(), friend=st.none())),
    (dt.timedelta, st.timedeltas()),
    (Cat | Dog | int, st.builds(Cat) | st.builds(Dog) | st.integers()),
]
ROUND_TRIPS = [
    (annotation, schema_for(annotation), converter_for(annotation), values)
    for annotation, values in ANNOTATIONS
]


@given(st.data())
def test_typed_values_pass_their_schema_as_json_and_come_back_equal(data: st.DataObject) -> None:
    annotation, schema, convert, values = data.draw(st.sampled_from(ROUND_TRIPS))
    value = data.draw(values)

    written = to_json(value)

    assert schema.check(written), annotation
    assert convert is not None
    assert convert(written) == value


def test_generic_and_foreign_names_of_models_can_be_referred_to() -> None:
    pydantic = pytest.importorskip("pydantic")
    page = pydantic.create_model("Page[Größe]", items=(list[int], ...))

    schema = schema_for(list.__class_getitem__(page))

    assert schema.check([{"items": [1]}])
    assert not schema.check([{"items": ["x"]}])
