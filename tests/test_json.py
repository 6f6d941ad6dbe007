"""JSON values: which are valid, how others are converted, and the place in errors."""

import asyncio
import dataclasses
import datetime as dt
import enum
import ipaddress
import json
import os
import re
import tracemalloc
import uuid
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operations.base.json import decoding as _decoding
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_DEPTH,
    MAX_REQUEST_VALUES,
    MAX_RESPONSE_VALUES,
    JSONLimitError,
    JSONValueError,
    as_json,
    canonical,
    count_values,
    lift,
    pointer,
    to_json,
)


def kind(value: object) -> str:
    """Return the name of a value in test ids; its repr may differ from run to run."""
    return type(value).__name__


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Whole(int):
    def __int__(self) -> int:
        return 99

    def __index__(self) -> int:
        return 99


class Real(float):
    def __float__(self) -> float:
        return 99.0


class Size(enum.StrEnum):
    SMALL = "small"


class Level(enum.IntEnum):
    LOW = 1


class Kind(enum.Enum):
    PAIR = ("a", 1)


class Point(NamedTuple):
    x: int
    y: int


class Moment(dt.datetime):
    pass


class Price(Decimal):
    pass


class Blob(bytes):
    pass


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)

    first_name: str = pydantic.Field(alias="firstName")
    at: dt.date = dt.date(2024, 1, 2)


@pydantic.dataclasses.dataclass
class PydanticPoint:
    at: dt.date


@dataclasses.dataclass
class Holder:
    held: Any
    _hidden: int = 1


@attrs.define
class AttrsHolder:
    held: Any


class Row(msgspec.Struct, rename="camel"):
    row_id: int
    note: str | msgspec.UnsetType = msgspec.UNSET
    held: Any = None


class Tagged(msgspec.Struct, tag="it", tag_field="kind"):
    a: int


class Listed(msgspec.Struct, array_like=True):
    a: int
    b: str


class TaggedList(msgspec.Struct, array_like=True, tag=True):
    a: int


class Brief(msgspec.Struct, omit_defaults=True):
    a: int = 1
    b: Any = None
    c: list[int] = []


class Where:
    def __fspath__(self) -> str:
        return "some/where"


class OwnMapping(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        return {"a": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


UTC = dt.UTC
UNIQUE = uuid.UUID("12345678-1234-5678-1234-567812345678")

BECOMES: list[tuple[Any, Any]] = [
    (Text("a"), "a"),
    (Whole(3), 3),
    (Real(0.5), 0.5),
    (Size.SMALL, "small"),
    (Level.LOW, 1),
    (Kind.PAIR, ["a", 1]),
    ((1, (2,)), [1, [2]]),
    (Point(1, 2), [1, 2]),
    ({1}, [1]),
    (frozenset({"a"}), ["a"]),
    (deque([1, 2]), [1, 2]),
    (range(3), [0, 1, 2]),
    ({"a": 1}.keys(), ["a"]),
    ({"a": 1}.values(), [1]),
    (OrderedDict(a=(1,)), {"a": [1]}),
    (defaultdict(list, a=[1]), {"a": [1]}),
    (Counter("aa"), {"a": 2}),
    (ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
    (MappingProxyType({"a": 1}), {"a": 1}),
    (OwnMapping(), {"a": 1}),
    (dt.datetime(2024, 1, 2, 3, 4, 5), "2024-01-02T03:04:05"),  # noqa: DTZ001
    (dt.datetime(2024, 1, 2, 3, 4, 5, 6, UTC), "2024-01-02T03:04:05.000006Z"),
    (
        dt.datetime(2024, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))),
        "2024-01-02T00:00:00+02:00",
    ),
    (Moment(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00Z"),
    (dt.date(2024, 1, 2), "2024-01-02"),
    (dt.time(1, 2, 3), "01:02:03"),
    (dt.time(1, 2, 3, tzinfo=UTC), "01:02:03Z"),
    (dt.timedelta(days=1, seconds=2), "P1DT2S"),
    (Decimal("1.50"), "1.50"),
    (Price("2.5"), "2.5"),
    (UNIQUE, str(UNIQUE)),
    (b"ab", "YWI="),
    (bytearray(b"ab"), "YWI="),
    (memoryview(b"ab"), "YWI="),
    (Blob(b"ab"), "YWI="),
    (PurePosixPath("a/b"), "a/b"),
    (Path("a"), "a"),
    (Where(), "some/where"),
    (ipaddress.IPv4Address("127.0.0.1"), "127.0.0.1"),
    (ipaddress.IPv6Address("::1"), "::1"),
    (Holder(1), {"held": 1, "_hidden": 1}),
    (AttrsHolder((1,)), {"held": [1]}),
    (Row(1), {"rowId": 1, "held": None}),
    (Row(1, "n", Row(2)), {"rowId": 1, "note": "n", "held": {"rowId": 2, "held": None}}),
    (Tagged(1), {"kind": "it", "a": 1}),
    (Listed(1, "b"), [1, "b"]),
    (TaggedList(1), ["TaggedList", 1]),
    (Brief(), {}),
    (Brief(2, Holder(1)), {"a": 2, "b": {"held": 1, "_hidden": 1}}),
    (Model(firstName="Ada"), {"firstName": "Ada", "at": "2024-01-02"}),
    (pydantic.RootModel[list[int]]([1]), [1]),
    (PydanticPoint(dt.date(2024, 1, 2)), {"at": "2024-01-02"}),
    (pydantic.SecretStr("hidden"), "**********"),
    (pydantic.AnyUrl("http://example.com/"), "http://example.com/"),
    (
        Holder(Model(firstName="Ada")),
        {"held": {"firstName": "Ada", "at": "2024-01-02"}, "_hidden": 1},
    ),
]


@pytest.mark.parametrize(("value", "expected"), BECOMES, ids=kind)
def test_a_value_becomes_json_builtins_of_exactly_these_types(value: Any, expected: Any) -> None:
    result = to_json(value)

    assert result == expected
    assert_builtins(result)


@pytest.mark.parametrize(("value", "expected"), BECOMES, ids=kind)
def test_lifting_returns_a_json_type_and_finishing_returns_the_same(
    value: Any, expected: Any
) -> None:
    lifted = lift(value)

    assert type(lifted) in {dict, list, str, int, float, bool, type(None)}
    assert to_json(lifted) == expected


def assert_builtins(value: Any) -> None:
    assert type(value) in {dict, list, str, int, float, bool, type(None)}
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        for item in value.values():
            assert_builtins(item)
    if isinstance(value, list):
        for item in value:
            assert_builtins(item)


@pytest.mark.parametrize("value", [{}, [], "é", 1, 1.5, True, None, 2**80], ids=kind)
def test_json_values_are_returned_unchanged(value: Any) -> None:
    assert to_json(value) == value
    assert type(to_json(value)) is type(value)
    assert lift(value) is value


def test_containers_are_fresh() -> None:
    inner: list[int] = [1]
    value = {"a": inner}

    result = to_json(value)
    result["a"].append(2)

    assert value == {"a": [1]}


def async_function() -> Any:
    async def nothing() -> None:
        pass

    return nothing()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        (item for item in "ab"),
        iter([1]),
        len,
        lambda: None,
        ValueError("no"),
        Holder,
        Model,
        int,
        1j,
        asyncio,
        re.compile("a"),
    ],
    ids=kind,
)
def test_values_that_cannot_be_converted_to_json_are_rejected_by_type(value: Any) -> None:
    with pytest.raises(JSONValueError) as caught:
        to_json({"a": [0, value]})

    assert caught.value.path == "/a/1"
    assert type(value).__name__ in caught.value.reason


def test_a_coroutine_is_rejected() -> None:
    coroutine = async_function()
    with pytest.raises(JSONValueError, match="coroutine"):
        to_json(coroutine)
    coroutine.close()


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), Real("nan")])
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda number: number, ""),
        (lambda number: {"a/b": number}, "/a~1b"),
        (lambda number: [0, {"~": number}], "/1/~0"),
        (lambda number: (0, number), "/1"),
        (lambda number: Holder(Holder(number)), "/held/held"),
        (lambda number: Row(1, held=number), "/held"),
        (lambda number: AttrsHolder([number]), "/held/0"),
        (lambda number: OrderedDict(a=number), "/a"),
    ],
)
def test_not_a_number_is_rejected_with_its_place(wrap: Any, path: str, number: float) -> None:
    with pytest.raises(JSONValueError) as caught:
        to_json(wrap(number))

    assert caught.value.path == path


@pytest.mark.parametrize("text", [b'"\\ud800"', b'{"\\uD83d":1}', b'["\\ud800x"]'])
def test_an_escaped_lone_surrogate_is_named(text: bytes) -> None:
    with pytest.raises(JSONValueError) as caught:
        decode_json(text, max_values=10)

    assert "surrogate" in caught.value.reason


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(
    ("value", "path"),
    [("\ud800", ""), (["\udfff"], "/0"), ({"\ud800": 1}, ""), (Text("\ud800"), "")],
)
def test_a_lone_surrogate_is_rejected(value: Any, path: str) -> None:
    with pytest.raises(JSONValueError) as caught:
        to_json(value)

    assert caught.value.path == path
    assert "surrogate" in caught.value.reason


@pytest.mark.requirement("R20")
def test_nesting_is_allowed_to_the_bound_and_rejected_beyond_it() -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    assert to_json(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 10_000):
        with pytest.raises(JSONValueError, match="too deeply") as caught:
            to_json(nested(depth))
        assert caught.value.path == "/0" * MAX_DEPTH


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass", "struct", "attrs", "brief"])
def test_a_cyclic_value_is_rejected(kind: str) -> None:
    loops: dict[str, Any] = {
        "list": [],
        "dict": {},
        "dataclass": Holder(None),
        "struct": Row(1),
        "attrs": AttrsHolder(None),
        "brief": Brief(),
    }
    loop = loops[kind]
    if kind == "list":
        loop.append(loop)
    elif kind == "dict":
        loop["held"] = loop
    elif kind == "brief":
        loop.b = loop
    else:
        loop.held = loop

    with pytest.raises(JSONValueError):
        to_json(loop)


def test_a_cyclic_pydantic_model_is_rejected() -> None:
    class Loop(pydantic.BaseModel):
        held: Any = None

    loop = Loop()
    loop.held = loop

    with pytest.raises(JSONValueError, match="Loop that cannot be written"):
        to_json(loop)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ([1, -2], ["1", "-2"]),
        ([Whole(3)], ["3"]),
        ([Size.SMALL, Level.LOW], ["small", "1"]),
        ([Text("a")], ["a"]),
        ([UNIQUE], [str(UNIQUE)]),
        ([dt.date(2024, 1, 2)], ["2024-01-02"]),
        ([Path("a")], ["a"]),
        (["é"], ["é"]),
    ],
)
def test_keys_become_text(keys: list[Any], names: list[str]) -> None:
    result = to_json(dict.fromkeys(keys))

    assert list(result) == names
    assert_builtins(result)


@pytest.mark.parametrize(
    "key", [None, True, 1.5, (1, 2), frozenset({1}), Kind.PAIR, object(), 10**4500], ids=type
)
def test_other_keys_are_rejected(key: Any) -> None:
    with pytest.raises(JSONValueError) as caught:
        to_json({"a": {key: 1}})

    assert caught.value.path == "/a"


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", "1": "b"},
        {"1": "b", 1: "a"},
        {Size.SMALL: 1, Path("small"): 2},
        {UNIQUE: 1, str(UNIQUE): 2},
    ],
)
def test_keys_that_become_the_same_are_rejected(value: Any) -> None:
    with pytest.raises(JSONValueError) as caught:
        to_json([value])

    assert caught.value.path == "/0"
    assert "same" in caught.value.reason


def test_a_class_that_raises_while_it_is_inspected_is_rejected() -> None:
    class Broken(OwnMapping):
        def __iter__(self) -> Iterator[str]:
            raise RuntimeError("cannot be read")

    with pytest.raises(JSONValueError, match="RuntimeError") as caught:
        to_json({"a": Broken()})

    assert caught.value.path == "/a"


def test_the_error_has_the_place_and_the_reason() -> None:
    error = JSONValueError("is bad", "/a")

    assert str(error) == "/a is bad"
    assert str(JSONValueError("is bad")) == "the value is bad"
    assert isinstance(error, ValueError)


def test_pointers_are_escaped() -> None:
    assert pointer("a/b~c") == "/a~1b~0c"
    assert pointer(3) == "/3"


def test_equal_values_have_equal_canonical_bytes() -> None:
    assert (
        canonical({"b": 1, "a": [1.5]}) == canonical({"a": [1.5], "b": 1}) == b'{"a":[1.5],"b":1}'
    )


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_every_json_value_round_trips(value: Any) -> None:
    assert to_json(value) == value


@given(JSON_VALUES)
def test_wrapping_containers_does_not_change_the_result(value: Any) -> None:
    def wrap(item: Any) -> Any:
        if isinstance(item, dict):
            return OrderedDict((Text(key), wrap(each)) for key, each in item.items())
        if isinstance(item, list):
            return tuple(map(wrap, item))
        return item

    assert to_json(wrap(value)) == value


def test_the_environment_is_a_mapping() -> None:
    assert to_json(os.environ) == dict(os.environ)


# ------------------------------------------------------------ values that need no conversion


@given(JSON_VALUES)
def test_plain_json_is_returned_unchanged(value: Any) -> None:
    assert as_json(value) is value or value == as_json(value)


@pytest.mark.parametrize(("value", "expected"), BECOMES, ids=kind)
def test_other_values_are_converted_as_by_to_json(value: Any, expected: Any) -> None:
    assert as_json(value) == expected
    assert as_json({"a": [value]}) == {"a": [expected]}
    assert_builtins(as_json({"a": [value]}))


def test_a_large_value_is_not_kept_after_it_was_checked() -> None:
    tracemalloc.start()
    try:
        as_json({"text": "x" * 4_000_000})
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 1_000_000


# ------------------------------------------------------------ decoding within bounds


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


SPITEFUL = st.text(alphabet='"\\[]{},: \n\tsé\x00')
SPITEFUL_JSON = st.recursive(
    st.none() | st.integers() | SPITEFUL,
    lambda inner: st.lists(inner) | st.dictionaries(SPITEFUL, inner),
    max_leaves=30,
)


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("is_huge", [False, True])
@given(SPITEFUL_JSON, st.sampled_from([None, 0, 1]), st.booleans(), st.integers(1, 20))
def test_values_and_depth_are_counted_exactly(
    is_huge: bool, value: Any, indent: int | None, ascii_only: bool, slice_bytes: int
) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    values, depth = count_values(value, 10**9), depth_of(value)

    with pytest.MonkeyPatch.context() as patch:
        # The boundary between slices is at every possible position.
        patch.setattr(_decoding, "_SLICE", slice_bytes)
        if is_huge:
            patch.setattr(_decoding, "_HUGE", 0)
        assert decode_json(raw, max_values=values, max_depth=depth, max_bytes=len(raw)) == value
        with pytest.raises(JSONLimitError, match="values"):
            decode_json(raw, max_values=values - 1, max_depth=depth)
        if depth:
            with pytest.raises(JSONLimitError, match="deep"):
                decode_json(raw, max_values=values, max_depth=depth - 1)
    with pytest.raises(JSONLimitError, match="bytes"):
        decode_json(raw, max_values=values, max_depth=depth, max_bytes=len(raw) - 1)


@given(JSON_VALUES)
def test_every_encoded_value_is_decoded(value: Any) -> None:
    assert decode_json(msgspec.json.encode(value), max_values=1000) == value


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e400",
        b'"\\ud800"',
        b'"\xff"',
        b"'a'",
        b"[1,]",
        b"01",
        b"[1] 2",
        "\ud800",
        b"1" * 5000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_texts_that_are_not_json_are_not_decoded(raw: bytes | str) -> None:
    with pytest.raises(JSONValueError):
        decode_json(raw, max_values=1000)


@pytest.mark.requirement("R28")
def test_edge_values_are_decoded_exactly() -> None:
    assert decode_json(b"123456789012345678901234567890", max_values=1) == (
        123456789012345678901234567890
    )
    assert decode_json(b'{"a":1,"a":2}', max_values=10) == {"a": 2}
    assert decode_json('"é"', max_values=1) == "é"
    assert decode_json(b'"\\ud83d\\ude00"', max_values=1) == "\N{GRINNING FACE}"


@pytest.mark.requirement("R20", "R55")
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_deep_text_is_rejected_before_it_is_decoded(opening: bytes) -> None:
    for text in (opening * 200, opening * 1_000_000):
        with pytest.raises(JSONLimitError):
            decode_json(text, max_values=MAX_RESPONSE_VALUES)


@pytest.mark.requirement("R55")
@pytest.mark.parametrize(
    "text", [b"[" + b"[]," * 1_400_000 + b"[]]", b"[" + b"0," * 2_000_000 + b"0]"]
)
def test_too_many_values_are_rejected_before_any_is_built(text: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(JSONLimitError, match="100,000 values"):
            decode_json(text, max_values=MAX_REQUEST_VALUES)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    finally:
        tracemalloc.stop()


def test_separators_inside_strings_do_not_count() -> None:
    text = "[" * 1_000_000 + "," * 1_000_000 + '"{\\'

    assert decode_json(json.dumps([text] * 3), max_values=4) == [text] * 3


@given(JSON_VALUES, st.integers(0, 20))
def test_counting_stops_beyond_the_limit(value: Any, most: int) -> None:
    exact = count_values(value, 10**9)

    assert min(count_values(value, most), most + 1) == min(exact, most + 1)
