"""Classes and annotations in unusual forms: other typing modules, generic bases, fields that a class sets itself."""

import dataclasses
import enum
import re
import typing
from typing import Annotated, Any, Generic, TypedDict, TypeVar

import attr
import attrs
import pydantic
import pytest
import typing_extensions

from operations import OperationRegistry, operation
from operations.base.errors import RegistrationError, SchemaError
from operations.base.json.values import to_json
from operations.schema import ConversionError, converter_for, schema_for

T = TypeVar("T")
WithDefault = typing_extensions.TypeVar("WithDefault", default=int)


def convert(annotation: Any, value: Any) -> Any:
    assert schema_for(annotation).check(value), schema_for(annotation).errors(value)
    converter = converter_for(annotation)
    return value if converter is None else converter(value)


class Extended(typing_extensions.TypedDict):
    size: int
    name: typing_extensions.ReadOnly[typing_extensions.NotRequired[str]]


def test_a_typed_dict_of_typing_extensions_is_read() -> None:
    assert schema_for(Extended).document == {
        "title": "Extended",
        "type": "object",
        "properties": {"size": {"type": "integer"}, "name": {"type": "string"}},
        "required": ["size"],
        "additionalProperties": False,
    }
    assert convert(list[Extended], [{"size": 1.0}]) == [{"size": 1}]


class Postponed(typing_extensions.TypedDict):
    name: "typing_extensions.ReadOnly[typing_extensions.NotRequired[str]]"


def test_a_postponed_read_only_key_may_be_optional() -> None:
    assert convert(Postponed, {}) == {}


async def test_extras_of_a_typed_dict_of_typing_extensions_are_parameters() -> None:
    @operation("task.extras")
    def extras(**options: typing_extensions.Unpack[Extended]) -> int:
        return options["size"]

    registry = OperationRegistry([extras])
    assert (await registry.execute("task.extras", {"size": 2.0})).data == 2


class Pair(TypedDict, Generic[T]):
    left: T


class Lists(Pair[list[T]], Generic[T]):
    top: T


def test_a_type_variable_of_a_typed_dict_may_differ_from_that_of_its_base() -> None:
    assert convert(Lists[int], {"left": [1.0], "top": 2.0}) == {"left": [1], "top": 2}


@dataclasses.dataclass
class Box(Generic[WithDefault]):
    item: WithDefault


def test_a_type_variable_has_its_default() -> None:
    assert schema_for(Box).check({"item": 1})
    assert not schema_for(Box).check({"item": "a"})
    assert schema_for(Box[str]).check({"item": "a"})


def test_a_class_name_without_a_letter_of_ascii_can_be_referred_to() -> None:
    named: Any = dataclasses.make_dataclass("名前", [("a", int)])

    assert convert(list[named], [{"a": 1.0}]) == [named(1)]
    assert convert(Box[named], {"item": {"a": 1.0}}) == Box(named(1))


def test_a_field_of_attrs_may_have_its_type_without_an_annotation() -> None:
    made: Any = attrs.make_class("made", {"size": attr.ib(type=int), "rest": attrs.field()})

    assert convert(made, {"size": 1.0, "rest": "x"}) == made(1, "x")
    assert not schema_for(made).check({"size": "x", "rest": "x"})


class Level(enum.IntEnum):
    LOW = 1


def test_keys_may_have_a_description() -> None:
    assert convert(dict[Annotated[int, "The id."], str], {"1": "a"}) == {1: "a"}
    assert convert(dict[Annotated[Level, "The level."], str], {"1": "a"}) == {Level.LOW: "a"}


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Lax(enum.IntFlag, boundary=enum.CONFORM):
    READ = 1


@pytest.mark.parametrize(("annotation", "value"), [(Access, -1), (Lax, 3), (Lax, -1)])
def test_a_number_that_is_not_a_combination_of_flags_is_rejected(
    annotation: Any, value: int
) -> None:
    with pytest.raises(ConversionError, match="combination"):
        convert(annotation, value)


@dataclasses.dataclass(frozen=True)
class Sum:
    parts: list[int]
    total: int = dataclasses.field(init=False)
    seen: set[int] = dataclasses.field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts))


@attrs.define
class Made:
    _size: int
    seen: set[int] = attrs.field(init=False, factory=set)


async def test_a_typed_call_restores_the_fields_that_a_class_sets_itself() -> None:
    @operation("task.sum")
    def add_up(parts: list[int]) -> Sum:
        result = Sum(parts)
        result.seen.add(7)
        return result

    @operation("task.make")
    def make() -> Made:
        result = Made(1)
        result.seen.add(7)
        return result

    registry = OperationRegistry([add_up, make])
    assert await registry.call(add_up, [1, 2]) == add_up([1, 2])
    assert await registry.call(make) == make()


def test_an_invalid_field_that_a_class_sets_itself_is_reported_with_its_location() -> None:
    converter = converter_for(Sum)
    assert converter is not None
    with pytest.raises(ConversionError) as caught:
        converter({"parts": [], "total": 1.5})
    assert caught.value.reasons[0][0] == "/total"


class Custom(pydantic.BaseModel):
    size: int | None = None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {**super().model_dump(**options), "more": True}


async def test_a_model_has_one_form_at_every_depth() -> None:
    @operation("task.one")
    def one() -> Any:
        return Custom()

    registry = OperationRegistry([one])
    assert (await registry.execute("task.one")).data == {"size": None}
    assert to_json([Custom(), {"a": Custom()}]) == [{"size": None}, {"a": {"size": None}}]


class Slotted:
    __slots__ = ()

    def __call__(self, size: int) -> int:
        return size + 1


async def test_objects_that_accept_no_attributes_can_be_operations() -> None:
    marked: list[Any] = [operation("task.next")(Slotted()), operation("task.length")(len)]
    registry = OperationRegistry(marked)

    assert (await registry.execute("task.next", {"size": 1})).data == 2
    assert (await registry.execute("task.length", {"obj": [1, 2]})).data == 2
    assert await registry.call(marked[0], 3) == 4


@pytest.mark.parametrize("annotation", [re.Pattern, typing.Pattern, re.Pattern[str]])
def test_an_unsupported_generic_class_is_named(annotation: Any) -> None:
    with pytest.raises(SchemaError, match="Pattern"):
        schema_for(annotation)

    def search(pattern: Any) -> None:
        pass

    search.__annotations__["pattern"] = annotation
    with pytest.raises(RegistrationError, match="'pattern': Pattern"):
        operation("task.search")(search)
