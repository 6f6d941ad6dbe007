"""Read the signature of a function: schemas of its parameters and result, its kind, and its handler.

Rule 1: an unsupported signature is rejected when it is read; the error names the parameter.
Rule 2: a missing argument is not passed, so that the function's own default applies.
Rule 3: the function is never called with a value that its annotation does not allow.
"""

import asyncio
import inspect
import types
from collections import abc
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_type_hints

from operations.base.errors import CallError, ErrorCode, RegistrationError, SchemaError
from operations.base.json.values import count_values, reject_masked, to_json
from operations.base.types import JSONObject
from operations.base.work import Work, working
from operations.schema.document import Schema
from operations.schema.explain import ValidationIssue, mismatch_error
from operations.schema.python import Foreign, read
from operations.schema.python.annotations import is_unpack, origin_of, parse_docstring, peel
from operations.schema.python.forms import (
    CheckedForm,
    CheckedInput,
    ForeignNames,
    FormError,
    FormWriter,
)
from operations.schema.python.records import (
    Array,
    Field,
    FixedTuple,
    Record,
    Table,
    default_of,
)
from operations.schema.python.shapes import (
    MISSING,
    CollectedDefs,
    ConversionError,
    Either,
    Enumeration,
    Named,
    Refined,
    Scalar,
    Shape,
    Unknown,
    document_of,
    to_float,
    to_int,
)

Handler: TypeAlias = Callable[[Any, Any], Any]
"""`(input, context)`; returns the function's result: a value, an awaitable or an async iterator."""


def _bind_guarded(
    function: Callable[..., Any],
    guards: Mapping[str, type | None],
    context_name: str | None,
    otherwise: Handler,
) -> Handler:
    """Return a handler without copies, for values that already have the types of their parameters."""
    pairs = tuple(guards.items())

    def handler(input: Any, context: Any) -> Any:
        if not input:
            return otherwise(input, context)
        for name, kind in pairs:
            if type(input.get(name)) is not kind:
                return otherwise(input, context)
        if context_name is None:
            return function(**input)
        return function(**input, **{context_name: context})

    return handler


def _read_parameters(
    signature: inspect.Signature,
    hints: Mapping[str, Any],
    descriptions: Mapping[str, str],
    context_type: type,
    name: str,
) -> tuple[Record, dict[str, Any], str | None]:
    """Return the parameters of a function.

    These are the parameters that the caller provides, the positional-only ones with their defaults, and the name of
    the parameter that receives the context of the call.

    Args:
        signature: From `inspect`.
        hints: Its annotations, resolved.
        descriptions: The descriptions of its parameters in the docstring.
        context_type: The annotation of the parameter that receives the context of the call.
        name: The name of the function, for messages.

    Raises:
        RegistrationError: If the parameters cannot be passed as one JSON object.
    """
    context: str | None = None
    extra: Shape | None = None
    fields: list[Field] = []
    positional: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise RegistrationError(
                f"{name}: *{parameter.name} has no name in JSON: use a parameter that is a list, or"
                " functools.wraps if this is the wrapper of a decorator"
            )
        bare = parameter.annotation is inspect.Parameter.empty
        annotation = hints.get(parameter.name, Any if bare else parameter.annotation)
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional[parameter.name] = parameter.default
        if _is_context(annotation, context_type):
            if context is not None:
                raise RegistrationError(
                    f"{name}: {context} and {parameter.name} both ask for the context"
                )
            context = parameter.name
            continue
        try:
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                fields.append(_field(parameter, annotation, descriptions))
            elif is_unpack(origin_of(annotation)):
                fields.extend(_unpacked(annotation))
            else:
                extra = read(annotation)
        except (AttributeError, NameError, SchemaError, TypeError) as error:
            raise RegistrationError(f"{name}: parameter {parameter.name!r}: {error}") from error
    return Record(fields=tuple(fields), construct=None, extra=extra), positional, context


def _field(parameter: inspect.Parameter, annotation: Any, descriptions: Mapping[str, str]) -> Field:
    if type(parameter.default).__name__ == "FieldInfo":
        raise SchemaError("put Field(...) into the annotation: name: Annotated[type, Field(...)]")
    shape = read(annotation)
    required = parameter.default is inspect.Parameter.empty
    return Field(
        name=parameter.name,
        argument=parameter.name,
        shape=shape,
        required=required,
        default=MISSING if required else default_of(parameter.default, shape),
        description=descriptions.get(parameter.name, ""),
    )


def _unpacked(annotation: Any) -> Iterable[Field]:
    """Return the fields of the TypedDict in `**kwargs: Unpack[...]`."""
    shape = read(get_args(annotation)[0])
    target = shape.target if isinstance(shape, Named) else shape
    if not isinstance(target, Record):
        raise SchemaError("Unpack takes a TypedDict")
    return target.fields


def _is_context(annotation: Any, context_type: type) -> bool:
    """Return whether a parameter receives the context: it is annotated with `context_type`, or that or `None`."""
    core, _ = peel(annotation)
    origin = origin_of(core)
    if origin is Union or origin is UnionType:
        members = [member for member in get_args(core) if member is not type(None)]
        return len(members) == 1 and _is_context(members[0], context_type)
    return origin is context_type


Kind: TypeAlias = Literal["async", "sync", "stream"]

_STREAMS = frozenset({abc.AsyncGenerator, abc.AsyncIterable, abc.AsyncIterator})
_AWAITABLES = frozenset({abc.Awaitable, abc.Coroutine})


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The signature of a function, as schemas."""

    kind: Kind
    """How the function is run: awaited, called, or iterated."""

    description: str
    input_schema: Schema
    output_schema: Schema
    """The schema of the result; of each item if it is a stream."""

    record: Record
    """The parameters that the caller provides."""

    positional: Mapping[str, Any]
    """Positional-only parameters, in order, with their defaults."""

    context_parameter: str | None
    """The parameter that receives the context of the call; it is not part of the input."""

    result: Shape
    returns_envelope: bool
    """Whether the result is annotated as an envelope."""

    callable: inspect.Signature
    """The signature as `inspect` reads it."""

    owner: object | None
    """The object of a bound method."""

    def bind(self, function: Callable[..., Any], subject: str = "input") -> Handler:
        """Return a handler that calls `function` with the context and an input that is valid for `input_schema`.

        If a value is not valid for its type, the handler raises `CallError` with `VALIDATION_ERROR` and does not call
        `function`; `subject` is the name of the input in the message.
        """
        return self.bind_reader(function, self.reader(subject))

    def reader(self, subject: str = "input") -> "ArgumentReader":
        """Return the reader that builds the arguments of the function from its input."""
        return ArgumentReader(self, subject)

    def bind_reader(self, function: Callable[..., Any], reader: "ArgumentReader") -> Handler:
        """Return a handler as `bind` does, which uses the arguments that `reader` has built for the call, if any."""
        handler = self._bind_any(function, reader)
        guards = {
            field.name: next(iter(field.shape.exact), None)
            for field in self.record.fields
            if field.shape.converter() is not None
        }
        if self.positional or self.record.extra is not None or None in guards.values():
            return handler
        return _bind_guarded(function, guards, self.context_parameter, handler)

    def _bind_any(self, function: Callable[..., Any], reader: "ArgumentReader") -> Handler:
        """Return the handler for every signature and every input."""
        positional, context_name = self.positional, self.context_parameter
        is_typed = reader.is_typed

        is_sync = self.kind == "sync"

        def handler(input: Any, context: Any) -> Any:
            given: JSONObject = input or {}
            checked = getattr(context, "checked", None) if is_typed else None
            if checked is not None:
                # Only this call may use what was built for it.
                context = context.changed(checked=None)
                arguments = reader.take(checked, given)
            elif is_typed and not is_sync and reader.is_slow(given):
                return later(given, context)
            else:
                arguments = reader.build(given)
            return call(arguments, context)

        async def later(given: JSONObject, context: Any) -> Any:
            result = call(await reader.build_aside(given), context)
            return await result if inspect.isawaitable(result) else result

        def call(arguments: dict[str, Any], context: Any) -> Any:
            if context_name is not None:
                arguments[context_name] = context
            if not positional:
                return function(**arguments)
            first = [arguments.pop(name, default) for name, default in positional.items()]
            return function(*first, **arguments)

        return handler

    def arguments(self, positional: tuple[Any, ...], named: dict[str, Any]) -> JSONObject:
        """Return the input for the arguments of a call. Validation reports missing arguments.

        Raises:
            TypeError: If the function does not accept the arguments, or they include the context.
            JSONValueError: If an argument cannot be converted to JSON.
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
        given: JSONObject = to_json(bound)
        reject_masked(given, bound)
        return given

    def typed_result(self, data: Any) -> tuple[Any, list[ValidationIssue]]:
        """Return the result as its annotated type, or the error."""
        issues = self.output_schema.errors(data)
        convert = None if issues else self.result.converter()
        if convert is None:
            return data, issues
        try:
            return convert(data), []
        except ConversionError as error:
            return data, error.issues()


class BuiltInput(CheckedInput, kw_only=True):
    """The arguments that were built for one call."""

    arguments: dict[str, Any] | None
    """None once a handler has received them."""


_LARGE = 5_000
"""The form of an input with more values is written in a thread: each takes about 3 µs."""


_MOST_STEPS = 20_000
"""The arguments for an input with more values, times the width of its schema, are built in a thread."""


class ArgumentReader:
    """Builds the arguments of a function from its input, and writes their checked form.

    Attributes:
        is_typed: Whether the function may receive other values than those of the input.
    """

    def __init__(self, signature: Signature, subject: str) -> None:
        self.is_typed = not _is_plain_record(signature.record, set())
        self._signature = signature
        self._convert = signature.record.converter()
        self._subject = subject
        self._known_names: tuple[ForeignNames, bool] | None = None
        self._most_values: int | None = None

    def build(self, given: JSONObject) -> dict[str, Any]:
        """Return the arguments for an input.

        Raises:
            CallError: `VALIDATION_ERROR` if a value is not valid for its type.
        """
        try:
            return dict(given) if self._convert is None else self._convert(given)
        except ConversionError as error:
            raise mismatch_error(
                ErrorCode.VALIDATION_ERROR, f"Invalid {self._subject}", error.issues()
            ) from error

    def is_slow(self, given: JSONObject) -> bool:
        """Return whether building the arguments may take too long for the event loop."""
        if self._most_values is None:
            # The wider the schema of the input, the more members of unions are tried for each value.
            width = self._signature.input_schema.compile().plan.width
            self._most_values = _MOST_STEPS // width
        return count_values(given, self._most_values) > self._most_values

    async def build_aside(self, given: JSONObject) -> dict[str, Any]:
        """Return the arguments for an input, built in a thread, which stops when the caller leaves.

        Raises:
            CallError: As `build`.
        """
        work = Work()

        def build() -> dict[str, Any]:
            with working(work):
                return self.build(given)

        try:
            return await asyncio.to_thread(build)
        finally:
            work.stop()

    def read(self, input: Any, context: Any) -> "BuiltInput | Awaitable[BuiltInput]":
        """Build the arguments for an input, and write their form; that of a large input in a thread.

        Raises:
            CallError: As `build`.
        """
        given: JSONObject = input or {}
        if self._signature.kind != "sync" and self.is_slow(given):
            return self._read_aside(given)
        built = BuiltInput(reader=self, input=given, arguments=self.build(given))
        if count_values(given, _LARGE) > _LARGE:
            return self._write_aside(built)
        self._write(built)
        return built

    async def _read_aside(self, given: JSONObject) -> "BuiltInput":
        arguments = await self.build_aside(given)
        return await self._write_aside(BuiltInput(reader=self, input=given, arguments=arguments))

    async def _write_aside(self, built: "BuiltInput") -> "BuiltInput":
        work = Work()

        def write() -> None:
            with working(work):
                self._write(built)

        try:
            await asyncio.to_thread(write)
        finally:
            work.stop()
        return built

    def _write(self, built: "BuiltInput") -> None:
        """Write the form of arguments, or the reason why they have none."""
        try:
            built.form = self._form(built)
        except FormError as error:
            built.problem = str(error)
        except Exception as error:  # noqa: BLE001 - a class may have attributes that fail
            built.problem = f"the input cannot be written as JSON ({type(error).__name__})"

    def take(self, checked: Any, given: JSONObject) -> dict[str, Any]:
        """Return the arguments that were built for a call.

        They are used once, because the function may modify them. A call that runs again builds them again, with the
        same form.

        Raises:
            CallError: As `build`; `ACCESS_DENIED` if the form of the new arguments is another one.
        """
        if not isinstance(checked, BuiltInput) or not checked.is_of(self, given):
            return self.build(given)
        arguments, checked.arguments = checked.arguments, None
        if arguments is not None:
            return arguments
        again = BuiltInput(reader=self, input=given, arguments=self.build(checked.input))
        self._write(again)
        if not again.has_form_of(checked):
            message = f"The {self._subject} is not the same when it is read again"
            raise CallError(ErrorCode.ACCESS_DENIED, message)
        return again.arguments or {}

    @property
    def problems(self) -> list[str]:
        """The reasons why some inputs have no checked form."""
        try:
            return self._names[0].problems if self.is_typed else []
        except Exception as error:  # noqa: BLE001 - pydantic may be unable to complete a class yet
            return [f"its types cannot be read ({type(error).__name__})"]

    @property
    def _names(self) -> tuple[ForeignNames, bool]:
        """The names of pydantic's classes, and whether bytes outside them are base64."""
        if self._known_names is None:
            names, reads_bytes = ForeignNames(), True
            for annotation in _foreign_types(self._signature.record):
                names.add(annotation)
                # Metadata of pydantic may change how a value is read.
                reads_bytes = reads_bytes and isinstance(annotation, type)
            self._known_names = names, reads_bytes
        return self._known_names

    def _form(self, built: "BuiltInput") -> CheckedForm:
        arguments, given = built.arguments or {}, built.input
        names, reads_bytes = self._names
        writer = FormWriter(names, reads_bytes=reads_bytes)
        form: JSONObject = {}
        for name, value in arguments.items():
            form[name] = writer.write(value, given.get(name, MISSING), (name,))
        for name, parameter in self._signature.callable.parameters.items():
            default = parameter.default
            is_omitted = name not in arguments and name != self._signature.context_parameter
            if is_omitted and default is not parameter.empty:
                # A default of the program that is not JSON, such as a marker, is no input.
                with suppress(FormError):
                    form[name] = FormWriter(names, reads_bytes=reads_bytes).write(
                        default, MISSING, (name,)
                    )
                    form[name] = writer.default(default, (name,))
        found = writer.form(form)
        # Made here, because this may run in a thread.
        _ = found.sent
        return found


def _is_plain_record(record: Record, seen: set[int]) -> bool:
    shapes = [each.shape for each in record.fields]
    return (
        record.construct is None
        and record.layout == "object"
        and all(_is_plain(shape, seen) for shape in shapes)
        and (record.extra is None or _is_plain(record.extra, seen))
    )


def _is_plain(shape: Shape, seen: set[int]) -> bool:
    """Return whether a value of this shape is equal to the JSON that it is built from."""
    if id(shape) in seen:
        return True
    seen.add(id(shape))
    if isinstance(shape, Scalar):
        return shape.convert in {None, to_int, to_float}
    if isinstance(shape, Enumeration):
        return all(value is meaning for value, meaning in shape.options)
    if isinstance(shape, Array):
        return shape.build in {None, tuple} and _is_plain(shape.item, seen)
    if isinstance(shape, Table):
        return shape.build is None and shape.key is None and _is_plain(shape.value, seen)
    if isinstance(shape, Record):
        return _is_plain_record(shape, seen)
    return isinstance(shape, (Either, FixedTuple, Named, Refined, Unknown)) and all(
        _is_plain(part, seen) for part in _parts(shape)
    )


def _parts(shape: Shape) -> list[Shape]:
    """Return the shapes inside a shape."""
    if isinstance(shape, Record):
        extra = [] if shape.extra is None else [shape.extra]
        return [*(each.shape for each in shape.fields), *extra]
    if isinstance(shape, Table):
        return [shape.value] if shape.key is None else [shape.key, shape.value]
    if isinstance(shape, Array):
        return [shape.item]
    if isinstance(shape, FixedTuple):
        return [*shape.items]
    if isinstance(shape, Either):
        return [*shape.members]
    if isinstance(shape, Refined):
        return [shape.shape]
    return [shape.target] if isinstance(shape, Named) else []


def _foreign_types(record: Record) -> list[Any]:
    """Return the types in a record that pydantic validates."""
    found: list[Any] = []
    seen = set[int]()
    waiting: list[Shape] = [record]
    while waiting:
        shape = waiting.pop()
        if id(shape) not in seen:
            seen.add(id(shape))
            waiting += _parts(shape)
            if isinstance(shape, Foreign):
                found.append(shape.annotation)
    return found


def signature_of(
    function: Callable[..., Any], *, context_type: type, envelope_type: type | None = None
) -> Signature:
    """Read a function's parameters, result and docstring.

    Args:
        function: A function, a bound method, a partial, or an object with `__call__`.
        context_type: The annotation of the parameter that receives the context of the call.
        envelope_type: The annotation of an envelope; `envelope_type[T]` contains a `T`.

    Raises:
        RegistrationError: If it cannot be called with a JSON object, or an annotation is not supported. The message
            names the parameter.
    """
    inner = _without_partials(function)
    code = _code(inner)
    name: str = getattr(code, "__qualname__", repr(code))
    hints = _hints(code, name)
    docstring = parse_docstring(code.__doc__ or inner.__doc__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"the signature of {name} cannot be read: {error}") from error
    record, positional, context = _read_parameters(
        signature, hints, docstring.names, context_type, name
    )
    kind, result = _kind(inner, hints.get("return", Any), name)
    output = _result_shape(result, envelope_type, name)
    returns_envelope = envelope_type is not None and origin_of(peel(result)[0]) is envelope_type
    return Signature(
        kind=kind,
        description=docstring.description,
        input_schema=Schema(partial(_input_document, record, context)),
        output_schema=Schema(partial(document_of, output, "serialization")),
        record=record,
        positional=positional,
        context_parameter=context,
        result=output,
        returns_envelope=returns_envelope,
        callable=signature,
        owner=getattr(inner, "__self__", None),
    )


def _input_document(record: Record, context_name: str | None) -> JSONObject:
    """Return the schema of the input: an object, closed unless the function has `**kwargs`."""
    definitions = CollectedDefs("validation")
    schema = record.schema(definitions)
    if record.extra is not None and context_name is not None:
        # Parameters that the library fills in are not part of the input.
        schema["properties"][context_name] = False
    return definitions.close(schema)


def _without_partials(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(function, type):
        raise RegistrationError(
            f"{function.__qualname__} is a class: mark its methods, and use register_object"
        )
    return function


def _code(function: Any) -> Any:
    """Return the function inside decorators and methods, whose annotations and docstring are used."""
    found = inspect.unwrap(function)
    return found if inspect.isroutine(found) else inspect.unwrap(type(found).__call__)


def _hints(function: Any, name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:
        places = ", ".join(_unresolved(function))
        hint = (
            "; import the name at run time, not only under TYPE_CHECKING"
            if isinstance(error, NameError)
            else ""
        )
        raise RegistrationError(f"{name}: {places} cannot be resolved: {error}{hint}") from error


def _unresolved(function: Any) -> Iterator[str]:
    """Yield the annotations of a function that cannot be resolved."""
    for name, annotation in inspect.get_annotations(function).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            get_type_hints(alone, globalns=function.__globals__, include_extras=True)
        except Exception:  # noqa: BLE001 - an annotation is code and may raise anything
            yield "the result" if name == "return" else f"parameter {name!r}"


def _kind(function: Any, result: Any, name: str) -> tuple[Kind, Any]:
    """Return the kind of a function, and its result type; for a stream, the type of an item."""
    call = function if inspect.isroutine(function) else type(function).__call__
    core, _ = peel(result)
    origin, arguments = origin_of(core), get_args(core)
    if inspect.isgeneratorfunction(call):
        raise RegistrationError(
            f"{name} is a generator: return a list, or use `async def` for a subscription"
        )
    if inspect.isasyncgenfunction(call):
        return "stream", arguments[0] if origin in _STREAMS and arguments else Any
    if inspect.iscoroutinefunction(call):
        if origin in _STREAMS:
            raise RegistrationError(
                f"{name} is a coroutine that returns a stream; make it an async generator, or `def`"
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
