"""Conditions of annotations that JSON Schema cannot express, and types that pydantic describes or checks."""

import datetime as dt
import decimal
import enum
from typing import Annotated, Any, Literal

import annotated_types
import msgspec
import pydantic
import pytest
import typing_extensions

from operations import OperationRegistry, operation
from operations.base.errors import CallError, RegistrationError
from operations.schema import ConversionError, converter_for, schema_for

Amount = typing_extensions.TypeAliasType("Amount", decimal.Decimal)


def is_even(value: int) -> bool:
    return value % 2 == 0


@pytest.mark.parametrize(
    ("annotation", "valid", "invalid"),
    [
        (Annotated[dt.date, annotated_types.Gt(dt.date(2024, 1, 1))], "2024-01-02", "2024-01-01"),
        (
            Annotated[dt.date | None, annotated_types.Le(dt.date(2024, 1, 1))],
            None,
            "2024-01-02",
        ),
        (
            Annotated[dt.timedelta, annotated_types.MultipleOf(dt.timedelta(minutes=1))],
            "PT60S",
            "PT61S",
        ),
        (Annotated[decimal.Decimal, pydantic.Field(gt=0)], "0.1", "0"),
        (Annotated[decimal.Decimal | None, pydantic.Field(lt=1)], "0.1", "1"),
        (Annotated[Amount, annotated_types.Ge(decimal.Decimal(1))], "1", "0.9"),
        (Annotated[Amount, annotated_types.Ge(1)], "1", "0.9"),
        (Annotated[decimal.Decimal, pydantic.Field(max_digits=2)], "1.1", "1.11"),
        (Annotated[int, annotated_types.Predicate(is_even)], 2, 1),
        (list[Annotated[int, annotated_types.Predicate(is_even)]], [2.0], [1]),
        (dict[Annotated[str, annotated_types.Predicate(str.islower)], int], {"a": 1}, {"A": 1}),
        (str | Annotated[int, annotated_types.Predicate(is_even)], 2, 1),
    ],
)
def test_conditions_without_a_keyword_are_checked(
    annotation: Any, valid: Any, invalid: Any
) -> None:
    schema, convert = schema_for(annotation), converter_for(annotation)
    assert convert is not None

    assert schema.check(valid)
    convert(valid)
    assert schema.check(invalid)
    with pytest.raises(ConversionError):
        convert(invalid)


def test_a_failed_condition_is_named() -> None:
    convert = converter_for(list[Annotated[int, annotated_types.Predicate(is_even)]])
    assert convert is not None
    with pytest.raises(ConversionError, match="/1: it does not meet the condition is_even"):
        convert([2, 1])


def test_texts_are_changed_as_their_constraints_say() -> None:
    annotation = Annotated[
        str, pydantic.StringConstraints(strip_whitespace=True, to_upper=True, max_length=2)
    ]
    convert = converter_for(annotation)
    assert convert is not None

    assert convert(" ab") == "AB"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


@pytest.mark.parametrize(
    "note",
    [pydantic.Field(discriminator="kind"), pydantic.Discriminator("kind")],
    ids=["field", "note"],
)
def test_a_discriminator_outside_a_model_is_described_as_inside_one(note: Any) -> None:
    annotation: Any = Annotated[Cat | Dog, note]
    inside: Any = schema_for(Owner).document

    described: Any = schema_for(list[annotation]).document
    assert described["$defs"] == inside["$defs"]
    assert {**described["items"], "title": "Pet"} == inside["properties"]["pet"]
    convert = converter_for(annotation)
    assert convert is not None
    assert convert({"kind": "dog"}) == Dog(kind="dog")


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Levels(pydantic.BaseModel):
    counts: dict[Level, dict[Level, int]]
    names: dict[Level, str] = {}


async def test_integer_enums_are_keys_of_models() -> None:
    @operation("task.count")
    def count(levels: Levels) -> Levels:
        assert levels.counts[Level.LOW][Level.HIGH] == 3
        return levels

    registry = OperationRegistry([count])
    value = {"counts": {"1": {"2": 3}}, "names": {}}
    envelope = await registry.execute("task.count", {"levels": value})

    assert envelope.data == value
    assert not envelope.meta.changes
    with pytest.raises(CallError) as caught:
        await registry.execute("task.count", {"levels": {"counts": {"3": {}}}})
    assert [each["path"] for each in caught.value.details["errors"]] == ["/levels/counts/3"]


class MoreLevels(pydantic.BaseModel):
    levels: list[Levels]


def test_a_model_with_keys_of_integer_enums_is_written_once() -> None:
    document = schema_for(tuple[MoreLevels, Levels, list[MoreLevels]]).document

    assert isinstance(document, dict)
    assert document["$defs"].keys() == {"Level", "Levels", "MoreLevels"}


class Event(pydantic.BaseModel):
    at: dt.date | dt.time
    limits: dict[dt.date, int] = {}


def test_the_location_of_an_error_of_pydantic_is_in_the_value() -> None:
    convert = converter_for(list[Event])
    assert convert is not None

    with pytest.raises(ConversionError) as caught:
        convert([{"at": "never", "limits": {"never": 1}}])
    assert {path for path, _ in caught.value.reasons} == {"/0/at", "/0/limits/never"}
    with pytest.raises(ConversionError) as caught:
        convert([{}])
    assert {path for path, _ in caught.value.reasons} == {"/0/at"}


class Closed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    size: int


def test_a_closed_struct_may_have_a_tag() -> None:
    convert = converter_for(Closed)
    assert convert is not None

    assert convert({"type": "Closed", "size": 1.0}) == Closed(1)
    assert not schema_for(Closed).check({"type": "Closed", "size": 1, "more": 2})


def test_a_field_of_pydantic_cannot_be_a_default() -> None:
    def wait(seconds: int = pydantic.Field(3, ge=1)) -> None:
        pass

    with pytest.raises(RegistrationError, match=r"'seconds': put Field\(\.\.\.\) into the annotat"):
        operation("task.wait")(wait)


class Login(pydantic.BaseModel):
    name: str
    password: pydantic.SecretStr


class OpenLogin(Login):
    @pydantic.field_serializer("password")
    def _show(self, password: pydantic.SecretStr) -> str:
        return password.get_secret_value()


@operation("login.check")
def check_login(logins: list[Login]) -> list[str]:
    return [login.password.get_secret_value() for login in logins]


@operation("login.show")
def show_login(login: OpenLogin, note: str = "") -> str:
    return login.password.get_secret_value() + note


@operation("login.half")
def half(size: float) -> float:
    return size / 2


async def test_a_function_does_not_receive_the_mask_of_a_secret() -> None:
    registry = OperationRegistry([check_login, show_login])
    login = Login(name="a", password=pydantic.SecretStr("p"))
    shown = OpenLogin(name="a", password=pydantic.SecretStr("p"))
    plain = {"name": "a", "password": "**********"}

    for call in (
        registry.call(check_login, [login]),
        registry.execute("login.check", {"logins": [login]}),
    ):
        with pytest.raises(CallError) as caught:
            await call
        assert caught.value.code == "VALIDATION_ERROR"
        (issue,) = caught.value.details["errors"]
        assert issue["path"] == "/logins/0/password"
        assert "pass its text" in issue["message"]
    assert await registry.call(show_login, shown) == "p"
    assert (await registry.execute("login.check", {"logins": [plain]})).data == ["**********"]
    assert (await registry.execute("login.check", {"logins": (plain,)})).data == ["**********"]


async def test_an_argument_of_a_typed_call_that_is_not_json_is_a_validation_error() -> None:
    registry = OperationRegistry([half])

    with pytest.raises(CallError) as caught:
        await registry.call(half, float("nan"))
    assert caught.value.code == "VALIDATION_ERROR"
    assert caught.value.details["errors"][0]["path"] == "/size"
