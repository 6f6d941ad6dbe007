"""A function's parameters as one JSON object: its schema, and the way from the object to the call.

Rule 1: an argument that is not given is not passed: its default is the function's own affair.
Rule 2: nothing is called with a value that its annotation does not allow.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from types import UnionType
from typing import Any, TypeAlias, Union, Unpack, get_args

import msgspec

from operations.errors import ErrorCode, RegistrationError, SchemaError
from operations.schema.python.annotations import origin_of, peel
from operations.schema.python.compounds import Field, Record
from operations.schema.python.from_types import read
from operations.schema.python.records import default_of
from operations.schema.python.shapes import (
    MISSING,
    ConversionError,
    Converter,
    Definitions,
    Named,
    Shape,
)
from operations.schema.results import misfit
from operations.types import JSONObject

Handler: TypeAlias = Callable[[Any, Any], Any]
"""`(input, context)`, giving what the function gives: a value, an awaitable, an async iterator."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a function takes."""

    record: Record
    """All that comes from the caller."""

    positional: Mapping[str, Any]
    """Parameters that cannot be named in a call, in order, with their defaults."""

    context: str | None
    """The parameter that is given the call's context."""

    in_order: bool
    """Whether all are required, can be given by position, and come from the caller."""

    def document(self) -> JSONObject:
        """The schema of the input: an object, closed unless the function has `**kwargs`."""
        definitions = Definitions("validation")
        schema = self.record.schema(definitions)
        if self.record.extra is not None and self.context is not None:
            # What the call itself fills in cannot come from the caller.
            schema["properties"][self.context] = False
        return definitions.close(schema)

    def bind(self, function: Callable[..., Any], subject: str) -> Handler:
        """A handler that calls `function` with an input that passed the schema."""
        convert = self.record.converter()
        if convert is None and self.context is None and not self.positional:
            return _bind_plain(function)
        handler = self._bind_any(function, convert, subject)
        steps = [_step(field) for field in self.record.fields]
        if self.in_order and len(steps) == 2:
            return _bind_two(function, steps, handler)
        guards = [(name, kind) for name, kind, step in steps if step is not _same]
        if self.positional or self.record.extra is not None or (None in dict(guards).values()):
            return handler
        return _bind_guarded(function, guards, self.context, handler)

    def _bind_any(
        self, function: Callable[..., Any], convert: Converter | None, subject: str
    ) -> Handler:
        """The way for every signature and every input."""
        positional, context_name = self.positional, self.context

        def handler(input: Any, context: Any) -> Any:
            given: JSONObject = input or {}
            try:
                arguments = dict(given) if convert is None else convert(given)
            except ConversionError as error:
                raise misfit(
                    ErrorCode.VALIDATION_ERROR, f"Invalid {subject}", error.issues()
                ) from error
            if context_name is not None:
                arguments[context_name] = context
            if not positional:
                return function(**arguments)
            first = [arguments.pop(name, default) for name, default in positional.items()]
            return function(*first, **arguments)

        return handler


def _bind_plain(function: Callable[..., Any]) -> Handler:
    """The shortest way: the input is the arguments."""

    def handler(input: Any, context: Any) -> Any:
        return function(**input) if input else function()

    return handler


def _bind_guarded(
    function: Callable[..., Any],
    guards: Sequence[tuple[str, type | None]],
    context_name: str | None,
    otherwise: Handler,
) -> Handler:
    """A shorter way for values that are already of their parameters' types: nothing is copied."""

    def handler(input: Any, context: Any) -> Any:
        if not input:
            return otherwise(input, context)
        for name, kind in guards:
            if type(input.get(name)) is not kind:
                return otherwise(input, context)
        if context_name is None:
            return function(**input)
        return function(**input, **{context_name: context})

    return handler


def _bind_two(
    function: Callable[..., Any],
    steps: Sequence[tuple[str, type | None, Converter]],
    otherwise: Handler,
) -> Handler:
    """A shorter way for two required parameters, by position. What fails goes the other way."""
    (name_1, kind_1, convert_1), (name_2, kind_2, convert_2) = steps

    def handler(input: Any, context: Any) -> Any:
        try:
            value_1, value_2 = input[name_1], input[name_2]
            if type(value_1) is not kind_1:
                value_1 = convert_1(value_1)
            if type(value_2) is not kind_2:
                value_2 = convert_2(value_2)
        except ConversionError:
            return otherwise(input, context)
        return function(value_1, value_2)

    return handler


def _step(field: Field) -> tuple[str, type | None, Converter]:
    """A parameter, a type of values that stay as they are, and what to do with the others."""
    convert = field.shape.converter()
    return field.name, next(iter(field.shape.exact), None), convert or _same


def _same(value: Any) -> Any:
    return value


def read_parameters(
    signature: Signature,
    hints: Mapping[str, Any],
    descriptions: Mapping[str, str],
    context_type: type,
    name: str,
) -> Parameters:
    """The parameters of a function.

    Args:
        signature: As `inspect` tells it.
        hints: Its annotations, resolved.
        descriptions: What its docstring says of each parameter.
        context_type: A parameter annotated so is given the call's context.
        name: The function's, for messages.

    Raises:
        RegistrationError: If they cannot be given as one JSON object.
    """
    context: str | None = None
    extra: Shape | None = None
    fields: list[Field] = []
    positional: dict[str, Any] = {}
    in_order = True
    for parameter in signature.parameters.values():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            raise RegistrationError(f"{name}: *{parameter.name} cannot be given in a JSON object")
        annotation = hints.get(parameter.name, _annotation(parameter))
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            positional[parameter.name] = parameter.default
        if _is_context(annotation, context_type):
            if context is not None:
                raise RegistrationError(
                    f"{name}: {context} and {parameter.name} both ask for the context"
                )
            context, in_order = parameter.name, False
            continue
        try:
            if parameter.kind is not Parameter.VAR_KEYWORD:
                fields.append(_field(parameter, annotation, descriptions))
            elif origin_of(annotation) is Unpack:
                fields.extend(_unpacked(annotation))
            else:
                extra = read(annotation)
        except (AttributeError, NameError, SchemaError, TypeError) as error:
            raise RegistrationError(f"{name}: parameter {parameter.name!r}: {error}") from error
        in_order = (
            in_order and parameter.kind in _BY_POSITION and parameter.default is Parameter.empty
        )
    return Parameters(
        record=Record(fields=tuple(fields), construct=None, extra=extra),
        positional=positional,
        context=context,
        in_order=in_order,
    )


_BY_POSITION = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})


def _annotation(parameter: Parameter) -> Any:
    return Any if parameter.annotation is Parameter.empty else parameter.annotation


def _field(parameter: Parameter, annotation: Any, descriptions: Mapping[str, str]) -> Field:
    shape = read(annotation)
    required = parameter.default is Parameter.empty
    return Field(
        name=parameter.name,
        argument=parameter.name,
        shape=shape,
        required=required,
        default=MISSING if required else default_of(parameter.default, shape),
        description=descriptions.get(parameter.name, ""),
    )


def _unpacked(annotation: Any) -> Iterable[Field]:
    """The fields of the TypedDict in `**kwargs: Unpack[...]`."""
    shape = read(get_args(annotation)[0])
    target = shape.target if isinstance(shape, Named) else shape
    if not isinstance(target, Record):
        raise SchemaError("Unpack takes a TypedDict")
    return target.fields


def _is_context(annotation: Any, context_type: type) -> bool:
    """Whether a parameter asks for the context: `context_type`, or that or `None`."""
    core, _ = peel(annotation)
    origin = origin_of(core)
    if origin is Union or origin is UnionType:
        members = [member for member in get_args(core) if member is not type(None)]
        return len(members) == 1 and _is_context(members[0], context_type)
    return origin is context_type
