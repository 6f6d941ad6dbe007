"""What a function says about itself: schemas of what it takes and gives, and how it runs.

Rule 1: a signature that cannot be served is refused when it is read, naming the parameter.
"""

import inspect
import types
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, Union, cast, get_args, get_type_hints

from operations._json import to_json
from operations.errors import RegistrationError, SchemaError
from operations.schema.document import Schema
from operations.schema.python.annotations import origin_of, peel
from operations.schema.python.docstrings import parse_docstring
from operations.schema.python.from_types import read
from operations.schema.python.parameters import Handler, Parameters, read_parameters
from operations.schema.python.shapes import ConversionError, Shape, Unknown, document_of
from operations.schema.results import ValidationIssue
from operations.types import JSONObject

Kind: TypeAlias = Literal["async", "sync", "stream"]

_STREAMS = frozenset({abc.AsyncGenerator, abc.AsyncIterable, abc.AsyncIterator})
_AWAITABLES = frozenset({abc.Awaitable, abc.Coroutine})


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a function says about itself."""

    kind: Kind
    """How it runs: awaited, called, or iterated over."""

    description: str
    input_schema: Schema
    output_schema: Schema
    """Of the result; of each item if it is a stream."""

    parameters: Parameters
    result: Shape
    returns_envelope: bool
    """Whether the result is annotated as an envelope."""

    callable: inspect.Signature
    """The signature as `inspect` reads it."""

    owner: object | None
    """The object of a bound method."""

    @property
    def context_parameter(self) -> str | None:
        """The parameter that is given the call's context; it is no part of the input."""
        return self.parameters.context

    def bind(self, function: Callable[..., Any], subject: str = "input") -> Handler:
        """A handler that calls `function` with the context and an input that passed `input_schema`.

        The handler raises `CallError` with `VALIDATION_ERROR`, and does not call `function`, where
        a value has no meaning for its type; `subject` is what its message calls the input.
        """
        return self.parameters.bind(function, subject)

    def arguments(self, positional: tuple[Any, ...], named: dict[str, Any]) -> JSONObject:
        """Return the input that the arguments of a call stand for. The schema reports missing ones.

        Raises:
            TypeError: If the function does not take them, or the context is among them.
        """
        bound = self.callable.bind_partial(*positional, **named).arguments
        if self.context_parameter in bound:
            raise TypeError(f"pass the context as context=..., not as {self.context_parameter!r}")
        for name, parameter in self.callable.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                more: dict[str, Any] = bound.pop(name, {})
                if twice := bound.keys() & more.keys():
                    raise TypeError(f"multiple values for {', '.join(sorted(twice))}")
                bound.update(more)
        return cast("JSONObject", to_json(bound))

    def typed_result(self, data: Any) -> tuple[Any, list[ValidationIssue]]:
        """Return the result as its annotated type, or what does not fit."""
        issues = self.output_schema.errors(data)
        convert = None if issues else self.result.converter()
        if convert is None:
            return data, issues
        try:
            return convert(data), []
        except ConversionError as error:
            return data, error.issues()


def signature_of(
    function: Callable[..., Any], *, context_type: type, envelope_type: type | None = None
) -> Signature:
    """Read a function's parameters, result and docstring.

    Args:
        function: A function, a bound method, a partial, or an object with `__call__`.
        context_type: A parameter annotated so is given the call's context.
        envelope_type: A result annotated so may hold anything; `envelope_type[T]` holds a `T`.

    Raises:
        RegistrationError: If it cannot be called with a JSON object, or an annotation of it cannot
            be understood. The message names the parameter.
    """
    inner = _without_partials(function)
    code = _code(inner)
    name: str = getattr(code, "__qualname__", repr(code))
    hints = _hints(code, name)
    docstring = parse_docstring(code.__doc__ or inner.__doc__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"{name} has no signature to read: {error}") from error
    parameters = read_parameters(signature, hints, docstring.names, context_type, name)
    kind, result = _kind(inner, hints.get("return", Any), name)
    output = _result_shape(result, envelope_type, name)
    returns_envelope = envelope_type is not None and origin_of(peel(result)[0]) is envelope_type
    return Signature(
        kind=kind,
        description=docstring.description,
        input_schema=Schema(parameters.document),
        output_schema=Schema(partial(document_of, output, "serialization")),
        parameters=parameters,
        result=output,
        returns_envelope=returns_envelope,
        callable=signature,
        owner=getattr(inner, "__self__", None),
    )


def _without_partials(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(function, type):
        raise RegistrationError(f"{function.__qualname__} is a class, not a function")
    return function


def _code(function: Any) -> Any:
    """The function whose annotations and docstring count: what decorators and methods wrap."""
    found = inspect.unwrap(function)
    return found if inspect.isroutine(found) else inspect.unwrap(type(found).__call__)


def _hints(function: Any, name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:
        places = ", ".join(_unresolved(function))
        raise RegistrationError(f"{name}: {places} cannot be resolved: {error}") from error


def _unresolved(function: Any) -> Iterator[str]:
    """Which of a function's annotations cannot be resolved."""
    for name, annotation in inspect.get_annotations(function).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            get_type_hints(alone, globalns=function.__globals__, include_extras=True)
        except Exception:  # noqa: BLE001 - an annotation is code and may raise anything
            yield "the result" if name == "return" else f"parameter {name!r}"


def _kind(function: Any, result: Any, name: str) -> tuple[Kind, Any]:
    """How the function runs, and what it gives: of a stream an item, of a coroutine the result."""
    call = function if inspect.isroutine(function) else type(function).__call__
    core, _ = peel(result)
    origin, arguments = origin_of(core), get_args(core)
    if inspect.isgeneratorfunction(call):
        raise RegistrationError(f"{name} is a generator; a stream is an async generator")
    if inspect.isasyncgenfunction(call):
        return "stream", arguments[0] if origin in _STREAMS and arguments else Any
    if inspect.iscoroutinefunction(call):
        if origin in _STREAMS:
            raise RegistrationError(
                f"{name} is a coroutine that gives a stream; make it an async generator, or `def`"
            )
        return "async", result
    if origin in _STREAMS:
        return "stream", arguments[0] if arguments else Any
    if origin in _AWAITABLES:
        return "async", arguments[-1] if arguments else Any
    return "sync", result


def _result_shape(result: Any, envelope_type: type | None, name: str) -> Shape:
    core, _ = peel(result)
    origin = origin_of(core)
    if envelope_type is not None:
        if origin is envelope_type:
            (result,) = get_args(core) or (Any,)
        elif origin in {Union, types.UnionType} and any(
            origin_of(member) is envelope_type for member in get_args(core)
        ):
            return Unknown()
    try:
        return read(result)
    except (AttributeError, NameError, SchemaError, TypeError) as error:
        raise RegistrationError(f"{name}: the result: {error}") from error
