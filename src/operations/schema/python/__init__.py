"""Create schemas from Python types, and typed values from JSON that is valid for them.

`signatures` does so for functions.

Rule 1: a type that JSON cannot represent is rejected when its annotation is read; the error names the type.
Rule 2: pydantic and attrs are not imported: their classes are recognised by attributes, and pydantic's own methods
        provide the schemas and conversions of its models.
"""

import datetime
import decimal
import enum
import ipaddress
import os
import pathlib
import re
import sys
import types
import typing
import uuid
from collections import Counter, OrderedDict, abc, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    LiteralString,
    Never,
    NoReturn,
    Union,
    get_args,
)

import msgspec

from operations.base.errors import SchemaError
from operations.base.json.values import JSON_TYPES, JSONValueError, canonical, list_of, to_json
from operations.base.types import JSONObject
from operations.schema.document import Schema
from operations.schema.python.annotations import Notes, alias_value, is_alias, origin_of, peel
from operations.schema.python.records import (
    Array,
    FixedTuple,
    Table,
    class_texts,
    record_reader,
    title_of,
)
from operations.schema.python.shapes import (
    NOTHING,
    CollectedDefs,
    ConversionError,
    Converter,
    DecimalScalar,
    Either,
    Enumeration,
    Kinds,
    Mode,
    Named,
    Refined,
    Scalar,
    Shape,
    Unknown,
    attempt,
    decimal_text,
    document_of,
    to_float,
    to_int,
)


def is_pydantic(annotation: Any) -> bool:
    """Return whether pydantic should handle a type: a model, a pydantic dataclass, or a type with pydantic hooks."""
    if not isinstance(annotation, type) or "pydantic" not in sys.modules:
        return False
    return hasattr(annotation, "__pydantic_validator__") or (
        hasattr(annotation, "__get_pydantic_core_schema__")
        and not issubclass(annotation, Enum)
        and record_reader(annotation) is None
    )


def is_pydantic_note(note: Any) -> bool:
    """Return whether metadata in `Annotated` needs pydantic, such as a validator or a change of the text."""
    if "pydantic" not in sys.modules:
        return False
    return hasattr(note, "__get_pydantic_core_schema__") or any(
        getattr(each, name, None)
        for each in (note, *list_of(getattr(note, "metadata", None)))
        for name in _OF_PYDANTIC
    )


_OF_PYDANTIC = (
    "decimal_places", "discriminator", "max_digits", "strip_whitespace", "to_lower", "to_upper",
)  # fmt: skip
"""Attributes of metadata that only pydantic supports."""


class Foreign(msgspec.Struct, frozen=True, eq=False):
    """A type that pydantic validates and serializes."""

    annotation: Any
    exact: Kinds = NOTHING

    @property
    def kinds(self) -> Kinds:
        """Models are objects, except root models."""
        is_object = getattr(self.annotation, "__pydantic_root_model__", None) is False
        return frozenset({dict}) if is_object else JSON_TYPES

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema that pydantic writes.

        Raises:
            SchemaError: If pydantic cannot write one.
        """
        write: Callable[..., JSONObject] = _method(
            self.annotation, "model_json_schema", "json_schema"
        )
        try:
            return definitions.adopt(
                title_of(self.annotation),
                lambda template: write(mode=definitions.mode, ref_template=template),
            )
        except Exception as error:
            # The last line of pydantic's message is the address of its documentation.
            reason = str(error).partition("\n")[0]
            raise SchemaError(
                f"{title_of(self.annotation)} has no JSON Schema: {reason}"
            ) from error

    def converter(self) -> Converter:
        """Return the conversion by pydantic.

        It uses JSON text, because strict models, and settings for bytes and dates, have other rules for Python values.
        """
        read: Converter = _method(self.annotation, "model_validate_json", "validate_json")
        return partial(attempt, lambda value: read(msgspec.json.encode(value)), is_located=True)


def _method(cls: Any, of_model: str, of_adapter: str) -> Any:
    method = getattr(cls, of_model, None)
    if method is not None:
        return method
    return getattr(sys.modules["pydantic"].TypeAdapter(cls), of_adapter)


def schema_for(annotation: Any, *, mode: Mode = "validation") -> Schema:
    """Return the schema of a Python type; its document is created when first needed.

    Args:
        annotation: Any resolved annotation.
        mode: Whether the values are inputs (the default) or outputs; some classes distinguish them.

    Raises:
        SchemaError: If the type, or one inside it, cannot be converted to JSON.
    """
    shape = read(annotation)
    return Schema(partial(document_of, shape, mode))


def converter_for(annotation: Any) -> Converter | None:
    """Return the conversion from JSON that is valid for the type's schema to the typed value; None if none is needed.

    The converter does not modify its argument, and raises `ConversionError` (a `ValueError`) if the value is not valid
    for the type or the conversion would lose information.

    Raises:
        SchemaError: If the type, or one inside it, cannot be converted to JSON.
    """
    return read(annotation).converter()


def read(annotation: Any) -> Shape:
    """Return the JSON shape of `annotation`.

    Raises:
        SchemaError: If JSON cannot represent the type or a nested type.
    """
    return _Reader().read(annotation)


_NULL = type(None)
_TEXT: Kinds = frozenset({str})
_NUMBER: Kinds = frozenset({int, float})

_PLAIN: dict[Any, tuple[Kinds, Kinds, Converter | None]] = {
    _NULL: (frozenset({_NULL}), frozenset({_NULL}), None),
    bool: (frozenset({bool}), frozenset({bool}), None),
    str: (_TEXT, _TEXT, None),
    int: (_NUMBER, frozenset({int}), to_int),
    float: (_NUMBER, frozenset({float}), to_float),
}
"""JSON types: the kinds that each accepts, the kinds that stay unchanged, and the conversion of the others."""

_SPELLED: dict[Any, JSONObject] = {
    bytes: {},
    bytearray: {},
    memoryview: {},
    datetime.date: {},
    datetime.datetime: {"format": "date-time"},
    datetime.time: {"format": "time"},
    datetime.timedelta: {},
    decimal.Decimal: {},
    uuid.UUID: {},
}
"""Types that msgspec writes as strings, with keywords that its schemas lack."""

_NAMED_BY_TEXT: dict[Any, tuple[Converter, JSONObject]] = {
    ipaddress.IPv4Address: (ipaddress.IPv4Address, {"format": "ipv4"}),
    ipaddress.IPv6Address: (ipaddress.IPv6Address, {"format": "ipv6"}),
    os.PathLike: (pathlib.Path, {}),
    pathlib.Path: (pathlib.Path, {}),
    pathlib.PurePath: (pathlib.PurePath, {}),
    pathlib.PurePosixPath: (pathlib.PurePosixPath, {}),
}
"""Types whose constructor takes a string."""


def _distinct(build: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def collect(items: list[Any]) -> Any:
        result = attempt(build, items)
        if len(result) != len(items):
            raise ConversionError("two items are equal after conversion")
        return result

    return collect


_LISTS: dict[Any, tuple[Any, Callable[[list[Any]], Any] | None]] = {
    list: (list, None),
    abc.Collection: (list, None),
    abc.Iterable: (list, None),
    abc.MutableSequence: (list, None),
    abc.Sequence: (list, None),
    deque: (list, deque),
    set: (set, _distinct(set)),
    abc.MutableSet: (set, _distinct(set)),
    abc.Set: (set, _distinct(set)),
    frozenset: (set, _distinct(frozenset)),
}
"""Collections: their type for msgspec, and their constructor from a list."""

_TABLES: dict[Any, Callable[[dict[Any, Any]], Any] | None] = {
    dict: None,
    abc.Mapping: None,
    abc.MutableMapping: None,
    Counter: Counter,
    OrderedDict: OrderedDict,
    defaultdict: partial(defaultdict, None),
}
"""Mappings, and their constructor from a dict."""


class _Reader:
    """Reads one annotation with all nested annotations."""

    def __init__(self) -> None:
        self._named: dict[Any, Named] = {}

    def read(self, annotation: Any) -> Shape:
        core, metadata = peel(annotation)
        if not metadata:
            return self._shape(core, Notes())
        if any(map(is_pydantic_note, metadata)):
            return Foreign(Annotated[core, *metadata])
        notes = Notes(metadata)
        shape = self._shape(core, notes)
        return Refined(shape, notes) if notes.checks or notes.words else shape

    def _shape(self, core: Any, notes: Notes) -> Shape:
        origin = origin_of(core)
        if origin is Union or origin is types.UnionType:
            return self._union(get_args(core), notes)
        if is_alias(origin):
            return self._alias(core, notes)
        shape = self._measured(core, origin, notes)
        if shape is not None:
            if notes.constraints:
                _check(shape.annotation)
            return shape
        if notes.constraints:
            raise SchemaError(f"{title_of(core)} takes no {', '.join(notes.constraints)}")
        return self._unmeasured(core, origin)

    def _measured(self, core: Any, origin: Any, notes: Notes) -> Scalar | Array | Table | None:
        """Return the shape of a type that supports a range, a length or a pattern."""
        arguments = get_args(core)
        if origin is None:
            origin = _NULL
        if origin is LiteralString:
            origin = str
        if not _is_hashable(origin):
            raise SchemaError(f"{origin!r} is not a type")
        if origin in _PLAIN:
            return Scalar(notes.constrained(origin), *_PLAIN[origin])
        if origin in _SPELLED:
            is_decimal = origin is decimal.Decimal
            if is_decimal:
                notes.compare_typed_values()
            spelled = notes.constrained(origin)
            convert = partial(attempt, partial(msgspec.convert, type=spelled))
            if is_decimal:
                return DecimalScalar(
                    spelled,
                    _TEXT | {int, float},
                    NOTHING,
                    lambda value: convert(decimal_text(value)),
                    _SPELLED[origin],
                )
            return Scalar(spelled, _TEXT, NOTHING, convert, _SPELLED[origin])
        if origin in _NAMED_BY_TEXT:
            call, words = _NAMED_BY_TEXT[origin]
            return Scalar(notes.constrained(str), _TEXT, NOTHING, partial(attempt, call), words)
        if origin in _LISTS:
            collection, build = _LISTS[origin]
            item = self.read(arguments[0]) if arguments else Unknown()
            return Array(notes.constrained(collection), item, build)
        if core is tuple or core is typing.Tuple or arguments[-1:] == (...,):  # noqa: UP006
            item = self.read(arguments[0]) if arguments else Unknown()
            return Array(notes.constrained(list), item, tuple)
        if origin in _TABLES:
            key, value = arguments if len(arguments) == 2 else (*arguments, Any, Any)[:2]
            if origin is Counter:
                value = int
            shape = self.read(value)
            return Table(notes.constrained(dict), self._key(key), shape, _TABLES[origin])
        return self._subclass(origin, notes)

    def _subclass(self, cls: Any, notes: Notes) -> Scalar | None:
        """Return the shape of a subclass of a string or a number."""
        if not isinstance(cls, type) or issubclass(cls, enum.Enum):
            return None
        for base in (str, int, float):
            if issubclass(cls, base):
                kinds, _, plain = _PLAIN[base]
                call: Converter = partial(attempt, cls)
                convert = call if plain is None else _after(plain, call)
                return Scalar(notes.constrained(base), kinds, NOTHING, convert)
        return None

    def _unmeasured(self, core: Any, origin: Any) -> Shape:
        if origin in {Any, object, Never, NoReturn}:
            return Unknown()
        if origin is Literal:
            return _choice(get_args(core))
        if origin is tuple:
            return FixedTuple(tuple(self.read(item) for item in get_args(core)))
        if is_pydantic(core):
            return Foreign(core)
        if isinstance(core, type) and issubclass(core, enum.Enum):
            return self._define(core, lambda: _enumeration(core))
        reader = record_reader(origin)
        if reader is not None:
            return self._define(core, lambda: reader(core, self.read))
        if isinstance(core, (str, ForwardRef)):
            raise SchemaError(f"{core!r} is the name of a type: use the type itself")
        raise SchemaError(
            f"{title_of(core)} cannot be converted to JSON; use a type such as str, a dataclass or a TypedDict"
        )

    def _define(self, annotation: Any, target: Callable[[], Shape]) -> Named:
        """Return one shape for each named type, also while the type is being read."""
        # Unhashable metadata makes the type unhashable, so it cannot be cached.
        key = annotation if _is_hashable(annotation) else id(annotation)
        named = self._named.get(key)
        if named is None:
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", title_of(annotation)).strip("_") or "type"
            named = self._named[key] = Named(key, name)
            named.target = target()
        return named

    def _alias(self, core: Any, notes: Notes) -> Shape:
        if notes.constraints:
            return self.read(notes.constrained(alias_value(core)))
        named = self._define(core, lambda: self.read(alias_value(core)))
        # A reference to a string or number definition would be longer than the schema itself.
        return named.target if isinstance(named.target, Scalar) else named

    def _union(self, members: tuple[Any, ...], notes: Notes) -> Shape:
        """Return the shape of a union; a constraint on the union applies to the members that support it."""
        shapes: list[Shape] = []
        constrained = False
        for member in members:
            if member is msgspec.UnsetType:
                continue
            if notes.constraints and member is not _NULL:
                try:
                    shapes.append(self.read(notes.constrained(member)))
                except SchemaError:
                    pass
                else:
                    constrained = True
                    continue
            shapes.append(self.read(member))
        if notes.constraints and not constrained:
            raise SchemaError(f"no member of the union takes {', '.join(notes.constraints)}")
        return shapes[0] if len(shapes) == 1 else Either(tuple(shapes))

    def _key(self, annotation: Any) -> Shape | None:
        """Return the shape of the keys of a mapping, which are always strings in JSON."""
        shape = self.read(annotation)
        target = shape
        while isinstance(target, Named) or (
            isinstance(target, Refined) and not target.notes.checks
        ):
            target = target.target if isinstance(target, Named) else target.shape
        if isinstance(target, Unknown) or (
            isinstance(target, Scalar) and target.annotation is str and target.convert is None
        ):
            return None
        if isinstance(target, Enumeration):
            return Enumeration(
                tuple((_digits(value), meaning) for value, meaning in target.options)
            )
        if isinstance(target, Scalar) and int in target.exact:
            digits = Annotated[str, msgspec.Meta(pattern="^(0|-?[1-9][0-9]*)$")]
            number = partial(attempt, partial(msgspec.convert, type=target.annotation))
            return Scalar(digits, _TEXT, NOTHING, _after(partial(attempt, int), number))
        if str not in target.kinds:
            raise SchemaError(f"{title_of(annotation)} cannot be the key of a JSON object")
        return shape


def _check(annotation: Any) -> None:
    try:
        msgspec.json.schema(annotation)
    except TypeError as error:
        raise SchemaError(str(error)) from None


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _after(first: Converter, second: Converter) -> Converter:
    return lambda value: second(first(value))


def _choice(options: Iterable[Any], words: JSONObject | None = None) -> Enumeration:
    seen: dict[bytes, Any] = {}
    pairs: list[tuple[Any, Any]] = []
    for option in options:
        try:
            value = to_json(option)
        except JSONValueError as error:
            raise SchemaError(
                f"the option {option!r} cannot be converted to JSON: {error}"
            ) from None
        if seen.setdefault(canonical(value), option) is not option:
            raise SchemaError(f"{option!r} and {seen[canonical(value)]!r} are the same in JSON")
        pairs.append((value, option))
    return Enumeration(tuple(pairs), words or {})


def _digits(value: Any) -> str:
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise SchemaError(f"{value!r} cannot be the key of a JSON object")


def _flags(cls: Any, value: int) -> Any:
    """Return a combination of flags. The class itself would read a negative number as the complement."""
    with suppress(ValueError):
        found = cls(value)
        if getattr(found, "value", None) == value:
            return found
    raise ConversionError("it is not a combination of flags")


def _enumeration(cls: type[enum.Enum]) -> Shape:
    words, _ = class_texts(cls, cls.__name__)
    if issubclass(cls, enum.Flag):
        convert = _after(to_int, partial(attempt, partial(_flags, cls)))
        return Scalar(int, _NUMBER, NOTHING, convert, words)
    return _choice(cls, words)
