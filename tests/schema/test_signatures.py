"""Contracts from signatures of functions, and calling them with JSON."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import inspect
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Annotated, Any, Generic, NotRequired, Optional, TypedDict, TypeVar, Unpack

import msgspec
import pydantic
import pytest

from operations.base.errors import CallError, ErrorCode, RegistrationError
from operations.schema import Signature, signature_of
from operations.schema.python.annotations import parse_docstring

T = TypeVar("T")


class Context:
    pass


class Envelope(msgspec.Struct, Generic[T]):
    data: T


@dataclasses.dataclass
class Task:
    title: str
    due: dt.date | None = None


class Options(TypedDict):
    size: int
    at: NotRequired[dt.date]


CONTEXT = Context()


def read(function: Callable[..., Any]) -> Signature:
    return signature_of(function, context_type=Context, envelope_type=Envelope)


def document(function: Callable[..., Any]) -> dict[str, Any]:
    found = read(function).input_schema.document
    assert isinstance(found, dict)
    return found


def call(function: Callable[..., Any], input: Any) -> Any:
    signature = read(function)
    assert signature.input_schema.check(input if input is not None else {})
    return signature.bind(function)(input, CONTEXT)


async def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    They may be negative.

    Args:
        a: The first,
            which is needed.
        b (int, optional): The second.

    Returns:
        The sum.
    """
    return a + b


def test_parameters_become_a_closed_object_with_docs_and_defaults() -> None:
    signature = read(add)

    assert signature.input_schema.document == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first, which is needed."},
            "b": {"type": "integer", "description": "The second.", "default": 2},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert signature.output_schema.document == {"type": "integer"}
    assert signature.description == "Add two numbers.\n\nThey may be negative."
    assert signature.kind == "async"
    assert signature.context_parameter is None


async def test_a_bound_handler_returns_the_result_of_the_function() -> None:
    handler = read(add).bind(add)

    assert await handler({"a": 1.0, "b": 4}, CONTEXT) == 5
    assert await handler({"a": 1}, CONTEXT) == 3


def test_a_function_without_parameters_takes_an_empty_object_or_nothing() -> None:
    def nothing() -> str:
        return "done"

    assert document(nothing) == {"type": "object", "properties": {}, "additionalProperties": False}
    assert call(nothing, {}) == "done"
    assert call(nothing, None) == "done"
    assert not read(nothing).input_schema.check({"a": 1})


def test_plain_parameters_are_passed_unchanged() -> None:
    def join(words: list[str], mark: str = ",") -> str:
        return mark.join(words)

    words = ["a", "b"]
    assert call(join, {"words": words}) == "a,b"
    assert call(join, {"words": words, "mark": "-"}) == "a-b"
    assert words == ["a", "b"]


def test_values_are_converted_to_the_types_of_parameters() -> None:
    def one(value: float) -> Any:
        return value

    def two(first: int, second: dt.date | None) -> Any:
        return first, second

    def three(a: int, b: str, c: Task) -> Any:
        return a, b, c

    assert repr(call(one, {"value": 1})) == "1.0"
    assert repr(call(one, {"value": 1.5})) == "1.5"
    assert call(two, {"first": 1.0, "second": "2024-01-02"}) == (1, dt.date(2024, 1, 2))
    assert call(two, {"first": 1, "second": None}) == (1, None)
    assert call(three, {"a": 1.0, "b": "x", "c": {"title": "t"}}) == (1, "x", Task("t"))


def test_a_plain_parameter_beside_a_converted_one_is_unchanged() -> None:
    def pair(text: str, when: dt.date) -> Any:
        return text, when

    def loose(value: Any, when: dt.date) -> Any:
        return value, when

    assert call(pair, {"text": "a", "when": "2024-01-02"}) == ("a", dt.date(2024, 1, 2))
    values: list[Any] = [{}, [], "a", 1, 1.5, True, None]
    for value in values:
        assert call(loose, {"value": value, "when": "2024-01-02"})[0] is value


def test_the_context_is_injected_and_no_part_of_the_input() -> None:
    def first(context: Context, a: int) -> Any:
        return context, a

    def optional(a: int, *, context: Context | None = None) -> Any:
        return context, a

    def old(a: int, context: Optional[Context]) -> Any:  # noqa: UP045
        return context, a

    def noted(a: int, context: Annotated[Context, "note"]) -> Any:
        return context, a

    def alone(context: Context) -> Any:
        return context, 1

    for function in (first, optional, old, noted):
        assert document(function)["properties"].keys() == {"a"}
        assert read(function).context_parameter == "context"
        assert call(function, {"a": 1.0}) == (CONTEXT, 1)
    assert call(alone, None) == (CONTEXT, 1)
    assert not read(alone).input_schema.check({"context": 1})


def test_the_context_does_not_stay_in_the_callers_input() -> None:
    def function(context: Context, a: str) -> str:
        return a

    given = {"a": "x"}
    call(function, given)

    assert given == {"a": "x"}


def test_two_contexts_are_rejected() -> None:
    def greedy(one: Context, two: Context | None) -> None: ...

    with pytest.raises(RegistrationError, match="one and two"):
        read(greedy)


def test_positional_only_parameters_work() -> None:
    def function(a: int, b: str = "b", /, c: int = 3, *, d: int = 4) -> Any:
        return a, b, c, d

    def with_context(context: Context, a: int, /) -> Any:
        return context, a

    assert call(function, {"a": 1.0}) == (1, "b", 3, 4)
    assert call(function, {"a": 1, "b": "x", "d": 5.0}) == (1, "x", 3, 5)
    assert call(with_context, {"a": 2.0}) == (CONTEXT, 2)


def test_named_extras_have_their_declared_type() -> None:
    def function(a: str, **more: int) -> Any:
        return a, more

    assert document(function)["additionalProperties"] == {"type": "integer"}
    assert call(function, {"a": "x", "b": 1.0, "c": 2}) == ("x", {"b": 1, "c": 2})
    assert not read(function).input_schema.check({"a": "x", "b": "no"})


def test_inconvertible_named_extras_are_a_validation_error() -> None:
    def function(**more: dt.date) -> Any:
        return more

    with pytest.raises(CallError) as caught:
        call(function, {"a": "no", "b": "2024-01-02"})

    assert [fault["path"] for fault in caught.value.details["errors"]] == ["/a"]


def test_untyped_extras_accept_anything() -> None:
    def function(**more) -> Any:  # type: ignore[no-untyped-def]
        return more

    assert call(function, {"b": [1]}) == {"b": [1]}
    assert call(function, None) == {}


@pytest.mark.requirement("R27")
def test_unknown_arguments_fail() -> None:
    signature = read(add)

    assert signature.input_schema.check({"a": 1})
    assert not signature.input_schema.check({"a": 1, "c": 1})
    assert not signature.input_schema.check({"b": 1})
    assert not signature.input_schema.check(None)


@pytest.mark.requirement("R27")
def test_extra_arguments_cannot_replace_the_context() -> None:
    def function(context: Context, **more: Any) -> Any:
        return context, more

    assert not read(function).input_schema.check({"context": 1})
    assert call(function, {"b": 1}) == (CONTEXT, {"b": 1})


def test_extras_of_a_typed_dict_are_parameters() -> None:
    def function(**options: Unpack[Options]) -> Any:
        return options

    assert document(function) == {
        "type": "object",
        "properties": {"size": {"type": "integer"}, "at": {"type": "string", "format": "date"}},
        "required": ["size"],
        "additionalProperties": False,
    }
    assert call(function, {"size": 1.0, "at": "2024-01-02"}) == {
        "size": 1,
        "at": dt.date(2024, 1, 2),
    }


def test_unpacking_another_type_is_rejected() -> None:
    def function(**options: Unpack[tuple[int, ...]]) -> None: ...  # type: ignore[misc]

    with pytest.raises(RegistrationError, match="TypedDict"):
        read(function)


def test_any_number_of_arguments_is_rejected() -> None:
    def function(*values: int) -> None: ...

    with pytest.raises(RegistrationError, match=r"\*values"):
        read(function)


def test_a_single_class_stays_under_its_name() -> None:
    def function(task: Task) -> Any:
        return task

    assert document(function)["properties"].keys() == {"task"}
    assert call(function, {"task": {"title": "t", "due": "2024-01-02"}}) == Task(
        "t", dt.date(2024, 1, 2)
    )


def test_a_type_of_several_parameters_is_written_once() -> None:
    def function(one: Task, two: list[Task]) -> None: ...

    assert document(function)["$defs"].keys() == {"Task"}


def test_parameters_without_annotation_accept_anything() -> None:
    def function(a, b=None):  # type: ignore[no-untyped-def]
        return a, b

    signature = read(function)
    assert document(function)["properties"] == {"a": {}, "b": {"default": None}}
    assert signature.output_schema.is_unknown
    assert call(function, {"a": [1]}) == ([1], None)


def test_defaults_are_those_of_the_function() -> None:
    seen: list[Any] = []

    def function(task: Task, items: list[int] = [], marker: Any = CONTEXT) -> Any:  # noqa: B006
        seen.append(items)
        return marker

    assert document(function)["properties"]["items"]["default"] == []
    assert "default" not in document(function)["properties"]["marker"]
    assert call(function, {"task": {"title": "t"}}) is CONTEXT
    assert call(function, {"task": {"title": "t"}, "items": [1.0]}) is CONTEXT
    assert seen == [[], [1]]
    assert seen[0] is function.__defaults__[0]  # type: ignore[index]


def test_without_an_envelope_type_all_results_are_data() -> None:
    signature = signature_of(plain, context_type=Context)

    assert signature.output_schema.document == {"type": "string"}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (None, {"type": "null"}),
        (int, {"type": "integer"}),
        (Envelope, {}),
        (Envelope[int], {"type": "integer"}),
        (Envelope[int] | None, {}),
        (Annotated[int, "Words."], {"type": "integer", "description": "Words."}),
    ],
    ids=str,
)
def test_the_result_has_a_schema_unless_it_is_an_envelope(annotation: Any, schema: Any) -> None:
    def function() -> Any: ...

    function.__annotations__["return"] = annotation

    assert read(function).output_schema.document == schema


def test_the_result_has_the_schema_of_outputs() -> None:
    class Model(pydantic.BaseModel):
        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def twice(self) -> int:
            return 2

    def function() -> Any: ...

    function.__annotations__["return"] = Model
    found = read(function).output_schema.document

    assert isinstance(found, dict)
    assert found["properties"].keys() == {"twice"}


async def agen(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


async def agen_full() -> AsyncGenerator[str, None]:
    yield "a"


async def agen_bare():  # type: ignore[no-untyped-def]
    yield 1


def gives_stream(n: int) -> AsyncIterator[int]:
    return agen(n)


def gives_bare_stream() -> AsyncIterator:  # type: ignore[type-arg]
    return agen(1)


def gives_awaitable() -> Awaitable[int]:
    return add(1)


def gives_coroutine() -> Coroutine[Any, Any, str]:
    raise NotImplementedError


def gives_bare_awaitable() -> Awaitable:  # type: ignore[type-arg]
    return add(1)


def plain() -> str:
    return "a"


class Callables:
    """A class with words."""

    def method(self, a: int) -> int:
        return a

    @classmethod
    def of_class(cls, a: int) -> int:
        return a

    @staticmethod
    def static(a: int) -> int:
        return a

    async def async_method(self) -> int:
        return 1


class AsyncCall:
    """An object that can be called."""

    async def __call__(self, a: int) -> int:
        return a


class StreamCall:
    async def __call__(self) -> AsyncIterator[int]:
        yield 1


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "kind", "output"),
    [
        (add, "async", {"type": "integer"}),
        (plain, "sync", {"type": "string"}),
        (agen, "stream", {"type": "integer"}),
        (agen_full, "stream", {"type": "string"}),
        (agen_bare, "stream", {}),
        (gives_stream, "stream", {"type": "integer"}),
        (gives_bare_stream, "stream", {}),
        (gives_awaitable, "async", {"type": "integer"}),
        (gives_bare_awaitable, "async", {}),
        (gives_coroutine, "async", {"type": "string"}),
        (functools.partial(add, b=1), "async", {"type": "integer"}),
        (functools.partial(functools.partial(agen), 3), "stream", {"type": "integer"}),
        (functools.partial(AsyncCall()), "async", {"type": "integer"}),
        (AsyncCall(), "async", {"type": "integer"}),
        (StreamCall(), "stream", {"type": "integer"}),
        (Callables().method, "sync", {"type": "integer"}),
        (Callables.of_class, "sync", {"type": "integer"}),
        (Callables.static, "sync", {"type": "integer"}),
        (Callables().async_method, "async", {"type": "integer"}),
        (wrapped(add), "async", {"type": "integer"}),
        (functools.lru_cache(plain), "sync", {"type": "string"}),
        (len, "sync", {}),
    ],
)
def test_the_kind_of_a_function_is_detected(function: Any, kind: str, output: Any) -> None:
    signature = read(function)

    assert signature.kind == kind
    assert signature.output_schema.document == output


def test_bound_methods_and_partials_take_the_remaining_parameters() -> None:
    assert document(Callables().method)["properties"].keys() == {"a"}
    assert call(Callables().method, {"a": 1.0}) == 1
    assert call(Callables.of_class, {"a": 1.0}) == 1
    partial = functools.partial(lambda a, b, c: (a, b, c), 1, c=3)
    assert document(partial)["required"] == ["b"]
    assert call(partial, {"b": 2}) == (1, 2, 3)
    assert asyncio.run(call(AsyncCall(), {"a": 1.0})) == 1
    assert asyncio.run(call(wrapped(add), {"a": 1.0})) == 3


def test_the_docstring_of_the_function_is_the_description() -> None:
    assert read(AsyncCall()).description == "An object that can be called."
    assert read(functools.partial(add, 1)).description.startswith("Add two")
    assert read(wrapped(add)).description.startswith("Add two")
    assert read(plain).description == ""
    assert read(functools.partial(plain)).description == ""


def generator() -> Iterator[int]:
    yield 1


async def coroutine_of_stream() -> AsyncIterator[int]:
    return agen(1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (generator, "generator"),
        (coroutine_of_stream, "async generator"),
        (Callables, "class"),
        (functools.partial(Callables), "class"),
        (type, "class"),
    ],
)
def test_an_object_that_cannot_be_an_operation_is_rejected(function: Any, words: str) -> None:
    with pytest.raises(RegistrationError, match=words):
        read(function)


def test_a_function_without_a_readable_signature_is_rejected() -> None:
    def function() -> None: ...

    function.__signature__ = "odd"  # type: ignore[attr-defined]

    with pytest.raises(RegistrationError, match="cannot be read"):
        read(function)


def test_an_unresolved_name_is_reported_with_its_parameter() -> None:
    def function(good: int, bad: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821

    def result() -> "Nowhere": ...  # type: ignore[name-defined] # noqa: F821

    def both(one: "Nowhere", two: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(RegistrationError, match=r"parameter 'bad'.*Nowhere"):
        read(function)
    with pytest.raises(RegistrationError, match=r"parameter 'one', parameter 'two'.*Nowhere"):
        read(both)
    with pytest.raises(RegistrationError, match=r"the result.*Nowhere"):
        read(result)


def test_an_unresolved_name_inside_a_class_is_reported_with_its_parameter() -> None:
    @dataclasses.dataclass
    class Lost:
        a: "Nowhere"  # type: ignore[name-defined] # noqa: F821

    def function(lost: Any) -> None: ...

    function.__annotations__["lost"] = Lost

    with pytest.raises(RegistrationError, match=r"parameter 'lost'.*Nowhere"):
        read(function)


def test_types_that_cannot_be_converted_to_json_are_reported_with_their_parameter() -> None:
    def parameter(a: int, bad: complex) -> None: ...

    def extras(**bad: complex) -> None: ...

    def result() -> complex:
        return 1j

    for function in (parameter, extras):
        with pytest.raises(RegistrationError, match="parameter 'bad': complex"):
            read(function)
    with pytest.raises(RegistrationError, match="the result: complex"):
        read(result)


@pytest.mark.parametrize("many", [1, 2, 3])
def test_an_inconvertible_value_is_a_validation_error_and_the_function_is_not_called(
    many: int,
) -> None:
    called: list[Any] = []

    def one(a: dt.date) -> None:
        called.append(a)

    def two(a: dt.date, b: uuid.UUID) -> None:
        called.append(a)

    def three(a: dt.date, b: uuid.UUID, c: list[Task]) -> None:
        called.append(a)

    functions: dict[int, Callable[..., None]] = {1: one, 2: two, 3: three}
    given = {"a": "no", "b": "no", "c": [{"title": "t"}, {"title": "t", "due": "no"}]}
    expected = ["/a", "/b", "/c/1/due"][:many]

    with pytest.raises(CallError) as caught:
        call(functions[many], dict(list(given.items())[:many]))

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert [fault["path"] for fault in caught.value.details["errors"]] == expected
    assert all(
        fault.keys() == {"path", "message", "keyword"} for fault in caught.value.details["errors"]
    )
    assert "/a" in caught.value.message
    assert not called


def test_an_exception_of_the_function_is_raised_unchanged() -> None:
    def function(a: dt.date) -> None:
        raise ValueError("my own")

    with pytest.raises(ValueError, match="my own"):
        call(function, {"a": "2024-01-02"})


def test_a_signature_that_was_set_by_hand_counts() -> None:
    def function(**options: int) -> Any:
        return options

    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("a", inspect.Parameter.KEYWORD_ONLY, annotation=int)]
    )

    assert document(function)["properties"] == {"a": {"type": "integer"}}
    assert call(function, {"a": 1.0}) == {"a": 1}


def test_docstrings_in_other_styles_are_all_description() -> None:
    text = "Do it.\n\n:param a: the a\n:returns: nothing"

    assert parse_docstring(text) == (text, {})
    assert parse_docstring(None) == ("", {})
    assert parse_docstring("") == ("", {})


def test_docstring_sections_end_where_the_next_begins() -> None:
    found = parse_docstring(
        """Summary.

        Note:
            Kept as part of the description.

        Args:
            a: One.
            *b: Two: with a colon.
            c (dict[str, int]):
                Three,
                on lines.
            not an entry

        Raises:
            d: Not an argument.

        Attributes:
            e: Five.

        Back at the margin.
            f: Not an attribute.
        """
    )

    assert found.description == "Summary.\n\nNote:\n    Kept as part of the description."
    assert found.names == {
        "a": "One.",
        "b": "Two: with a colon.",
        "c": "Three, on lines. not an entry",
        "e": "Five.",
    }


def test_a_section_may_be_empty_or_begin_with_prose() -> None:
    assert parse_docstring("S.\n\nArgs:\n") == ("S.", {})
    assert parse_docstring("S.\n\nArgs:\n    words only\n    a: One.").names == {"a": "One."}


async def test_streams_are_bound_like_all_others() -> None:
    stream = call(agen, {"n": 2.0})

    async with contextlib.aclosing(stream):
        assert [item async for item in stream] == [0, 1]
