"""Describe the JSON form of Python types: schemas, and conversions from JSON to typed values.

Rule 1: a converter receives only values that its schema accepts, and never modifies them.
Rule 2: a conversion that would lose information fails.
Rule 3: the first matching member of a union is used, with two exceptions: an exact number stays unchanged, and for
        objects the class that declares most of the value's properties is tried first.
"""

import operator
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import islice
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from operations.base.json.values import JSON_TYPES, is_list, is_object, short_pointer, with_texts
from operations.base.text import numbered_name, shortened
from operations.base.types import JSONObject
from operations.base.work import checkpoint
from operations.schema.document import Schema
from operations.schema.explain import MAX_ISSUES, ValidationIssue
from operations.schema.python.annotations import Notes
from operations.schema.values import identity

Converter: TypeAlias = Callable[[Any], Any]
Mode: TypeAlias = Literal["validation", "serialization"]
"""Whether a schema describes inputs or outputs; few classes distinguish them."""

Kinds: TypeAlias = frozenset[type]
"""Exact types of JSON values."""

NOTHING: Kinds = frozenset()
MISSING: Any = object()
"""Marks the absence of a default; `None` is a default."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that are not allowed in a reference."""


_MAX_REASON = 200
"""Characters of a reason: the text of an exception may be long."""


class ConversionError(ValueError):
    """A JSON value has the right form but is not valid for its type, such as a date that does not exist.

    Attributes:
        reasons: The first reasons, each with its location as a JSON pointer.
    """

    def __init__(self, reasons: str | Iterable[tuple[str, str]]) -> None:
        found = [("", reasons)] if isinstance(reasons, str) else islice(reasons, MAX_ISSUES)
        self.reasons = tuple((path, shortened(why, _MAX_REASON)) for path, why in found)
        super().__init__("; ".join(f"{path}: {why}" if path else why for path, why in self.reasons))

    def issues(self) -> list[ValidationIssue]:
        """Return one issue per location."""
        return [ValidationIssue(path, f"is not valid: {why}", "type") for path, why in self.reasons]


def convert_parts(parts: Iterable[tuple[Any, Any, Converter | None]]) -> dict[Any, Any]:
    """Return the parts of a value by index or name, each converted by its own converter.

    Raises:
        ConversionError: With the reasons of the first invalid parts.
    """
    result: dict[Any, Any] = {}
    reasons: list[tuple[str, str]] = []
    for token, item, convert in parts:
        if len(result) & 7 == 7:
            checkpoint()
        try:
            result[token] = item if convert is None else convert(item)
        except ConversionError as error:
            reasons += [(short_pointer(token) + path, reason) for path, reason in error.reasons]
            if len(reasons) >= MAX_ISSUES:
                break
    if reasons:
        raise ConversionError(reasons)
    return result


def attempt(convert: Converter, value: Any, *, is_located: bool = False) -> Any:
    """Return `convert(value)`, which runs code of other libraries.

    Args:
        convert: Converts the value.
        value: Any value.
        is_located: Whether the locations of pydantic's errors are in `value`.

    Raises:
        ConversionError: For the exceptions that a type raises to reject a value.
    """
    try:
        return convert(value)
    except ConversionError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        details: Callable[..., list[JSONObject]] | None = getattr(error, "errors", None)
        if details is None:
            # The validators of attrs raise errors with further arguments, such as the value.
            first, *more = error.args or ("",)
            text = str(first if more and type(error).__str__ is Exception.__str__ else error)
            raise ConversionError(_without_texts_of(value, text) or type(error).__name__) from error
        # pydantic's own text spans lines and ends in links.
        failures = details(include_url=False, include_context=False, include_input=False)
        raise ConversionError(
            (_location(each, value if is_located else None), _without_texts_of(value, each["msg"]))
            for each in islice(failures, MAX_ISSUES)
        ) from error


def _without_texts_of(value: Any, text: str) -> str:
    """Return the text of an exception in one line, without the texts in the value, which it may quote."""
    quoted: list[str] = []
    with_texts(value, lambda each: quoted.append(repr(each)))
    for each in quoted:
        text = text.replace(each, "the value")
    return " ".join(text.split())


def _location(failure: JSONObject, value: Any) -> str:
    """Return the location of an error of pydantic, without tokens that are not in `value` unless it is `None`.

    pydantic adds the names of members of unions, and "[key]" for errors of keys.
    """
    tokens: list[Any] = []
    for token in failure["loc"]:
        if value is not None:
            try:
                value = value[token]
            except (IndexError, KeyError, TypeError):
                if failure["type"] != "missing" or token != failure["loc"][-1]:
                    continue
        tokens.append(token)
    return "".join(map(short_pointer, tokens))


class Shape(Protocol):
    """A JSON form of a type."""

    @property
    def kinds(self) -> Kinds:
        """The types of JSON values this accepts."""
        ...

    @property
    def exact(self) -> Kinds:
        """Those of `kinds` whose values already have the Python type."""
        ...

    def schema(self, definitions: "CollectedDefs") -> JSONObject:
        """Return the schema; named types become references to `definitions`."""
        ...

    def converter(self) -> Converter | None:
        """Return the conversion from JSON to the typed value; `None` if they are the same."""
        ...


class CollectedDefs:
    """The `$defs` of one document, filled while its schemas are written."""

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self._schemas: dict[str, JSONObject] = {}
        self._names: dict[Any, str] = {}
        self._uses: dict[str, int] = {}

    def refer(self, named: "Named") -> JSONObject:
        """Return a reference to `named`, whose definition is created with the first reference."""
        name = self._names.get(named.key)
        if name is None:
            name = self._names[named.key] = numbered_name(named.name, self._schemas)
            self._schemas[name] = {}  # reserves the name, because a recursive type refers to itself
            self._schemas[name] = named.target.schema(self)
        return self._reference(name)

    def adopt(self, name: str, write: Callable[[str], JSONObject]) -> JSONObject:
        """Return a schema written by another library, with its `$defs` moved here; an object becomes a reference.

        Args:
            name: The name of the schema.
            write: Writes the schema, given a template for references in which `{model}` stands for a name.
        """
        name = _UNSAFE.sub("_", name)
        document, theirs = _written(write, "")
        if any(self._schemas.get(key, value) != value for key, value in theirs.items()):
            document, theirs = _written(write, numbered_name(name, self._schemas) + ".")
        self._schemas.update(theirs)
        if "properties" not in document:
            return document
        if self._schemas.get(name, document) != document:
            name = numbered_name(name, self._schemas)
        self._schemas[name] = document
        return self._reference(name)

    def _reference(self, name: str) -> JSONObject:
        self._uses[name] = self._uses.get(name, 0) + 1
        return {"$ref": f"#/$defs/{name}"}

    def close(self, schema: JSONObject) -> JSONObject:
        """Return the whole document: `schema`, with a reference replaced by its target, and its definitions."""
        name = schema.get("$ref", "").removeprefix("#/$defs/")
        if name in self._schemas:
            schema = self._schemas[name] | {k: v for k, v in schema.items() if k != "$ref"}
            if self._uses.get(name) == 1:
                del self._schemas[name]
        return {**schema, "$defs": self._schemas} if self._schemas else schema


def _written(write: Callable[[str], JSONObject], prefix: str) -> tuple[JSONObject, JSONObject]:
    """Return a schema written by another library and its `$defs`, whose names have a prefix."""
    document = dict(write(f"#/$defs/{prefix}{{model}}"))
    theirs = {prefix + key: value for key, value in document.pop("$defs", {}).items()}
    return _with_text_names(document, theirs), _with_text_names(theirs, theirs)


def _with_text_names(part: Any, theirs: JSONObject) -> Any:
    """Return a schema of pydantic in which the names of properties are text: it names integer enums as integers."""
    if is_list(part):
        return [_with_text_names(item, theirs) for item in part]
    if not is_object(part):
        return part
    result = {key: _with_text_names(item, theirs) for key, item in part.items()}
    names = part.get("propertyNames")
    if is_object(names) and part.get("type") == "object":
        target = theirs.get(names.get("$ref", "").rpartition("/")[2], names)
        if target.get("type") == "integer" and "enum" in target:
            result["propertyNames"] = {"enum": list(map(str, target["enum"]))}
    return result


def document_of(shape: Shape, mode: Mode = "validation") -> JSONObject:
    """Return the schema of `shape` as a complete document."""
    definitions = CollectedDefs(mode)
    return definitions.close(shape.schema(definitions))


class Unknown(msgspec.Struct, frozen=True, eq=False):
    """Any JSON, unchanged."""

    kinds: Kinds = JSON_TYPES
    exact: Kinds = JSON_TYPES

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return an empty schema."""
        return {}

    def converter(self) -> None:
        """Return None: no conversion is needed."""


class Scalar(msgspec.Struct, frozen=True, eq=False):
    """A string, number, boolean or null, which may be converted to another type."""

    annotation: Any
    """The type for msgspec, with its constraints."""

    kinds: Kinds
    exact: Kinds
    convert: Converter | None = None
    words: JSONObject = {}

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema that msgspec writes."""
        return {**msgspec.json.schema(self.annotation), **self.words}

    def converter(self) -> Converter | None:
        """Return the given converter."""
        return self.convert


class DecimalScalar(Scalar, frozen=True, eq=False):
    """A decimal: a text, or in inputs also a number, which is read by its digits."""

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema that msgspec writes, which inputs extend by numbers."""
        schema = super().schema(definitions)
        return (
            {**schema, "type": ["string", "number"]} if definitions.mode == "validation" else schema
        )


def decimal_text(value: Any) -> Any:
    """Return a number as the text of a decimal; other values unchanged."""
    return repr(value) if type(value) is int or type(value) is float else value


def to_int(value: Any) -> int:
    """Return a JSON integer as an `int`; in JSON Schema 1.0 is an integer."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    raise ConversionError("it is not an integer")


def to_float(value: Any) -> float:
    """Return a JSON number as a `float` of exactly the same value."""
    if type(value) is float:
        return value
    try:
        number = float(value)
    except OverflowError:
        raise ConversionError("it is too large for a float") from None
    if number != value:
        raise ConversionError("a float cannot represent it exactly")
    return number


class Refined(msgspec.Struct, frozen=True, eq=False):
    """A shape with the metadata of `Annotated` that is not part of its type."""

    shape: Shape
    notes: Notes

    @property
    def kinds(self) -> Kinds:
        """The kinds of the shape."""
        return self.shape.kinds

    @property
    def exact(self) -> Kinds:
        """The exact kinds of the shape; none if typed values are checked."""
        return NOTHING if self.notes.checks else self.shape.exact

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema of the shape, with title, description and examples."""
        return {**self.shape.schema(definitions), **self.notes.words}

    def converter(self) -> Converter | None:
        """Return a converter that also checks the typed value; `None` has no bounds."""
        convert = self.shape.converter()
        if not self.notes.checks:
            return convert
        return lambda value: attempt(self._checked, value if convert is None else convert(value))

    def _checked(self, value: Any) -> Any:
        for name, bound in self.notes.bounds.items():
            meets, words = _COMPARISONS[name]
            if value is not None and not meets(value, bound):
                raise ConversionError(f"it is not {words} {bound}")
        for predicate in self.notes.predicates:
            if not predicate(value):
                name = getattr(predicate, "__name__", repr(predicate))
                raise ConversionError(f"it does not meet the condition {name}")
        return value


_COMPARISONS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "ge": (operator.ge, "greater than or equal to"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "less than or equal to"),
    "lt": (operator.lt, "less than"),
    "multiple_of": (lambda value, bound: not value % bound, "a multiple of"),
}


class Named(msgspec.Struct, eq=False):
    """A shape that is defined once and referred to by name, so that it may contain itself."""

    key: Any
    """Equal for shapes of the same type."""

    name: str
    target: Shape = Unknown()
    _converter: Converter | None = None
    _known: bool = False

    @property
    def kinds(self) -> Kinds:
        """The kinds of the target."""
        return self.target.kinds

    @property
    def exact(self) -> Kinds:
        """All kinds or none: reading the kinds of the target would not terminate for a recursive type."""
        return self.kinds if self.converter() is None else NOTHING

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return a reference to the definition."""
        return definitions.refer(self)

    def converter(self) -> Converter | None:
        """Return the converter of the target; inside a recursive type, a function that looks it up when called."""
        if not self._known:
            self._known, self._converter = True, self._late
            self._converter = self.target.converter()
        return self._converter

    def _late(self, value: Any) -> Any:
        return value if self._converter is None else self._converter(value)


class Enumeration(msgspec.Struct, frozen=True, eq=False):
    """One of a few values: a `Literal` or an `Enum`."""

    options: tuple[tuple[Any, Any], ...]
    """Pairs of a JSON value and the Python value for it."""

    words: JSONObject = {}

    @property
    def kinds(self) -> Kinds:
        """The types of the options; JSON's 1.0 stands for 1."""
        kinds = self._types()
        return kinds | {int, float} if kinds & {int, float} else kinds

    @property
    def exact(self) -> Kinds:
        """The kinds whose options all stay unchanged."""
        changed = (value for value, meaning in self.options if value is not meaning)
        return self._types() - set(map(type, changed))

    def _types(self) -> Kinds:
        return frozenset(map(type, (value for value, _ in self.options)))

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the options, with their common type."""
        names = {_TYPE_NAMES.get(kind) for kind in self._types()}
        typed = {"type": names.pop()} if len(names) == 1 and None not in names else {}
        return {**self.words, **typed, "enum": [value for value, _ in self.options]}

    def converter(self) -> Converter | None:
        """Return a lookup in a table."""
        if self.exact >= self.kinds:
            return None
        # In Python True equals 1, in JSON it does not.
        meanings = {identity(value): meaning for value, meaning in self.options}

        def converter(value: Any) -> Any:
            try:
                return meanings[identity(value)]
            except KeyError:
                raise ConversionError("it is none of the options") from None

        return converter


_TYPE_NAMES = {str: "string", int: "integer", bool: "boolean"}


class Either(msgspec.Struct, frozen=True, eq=False):
    """A union: the first matching shape is used."""

    members: tuple[Shape, ...]

    @property
    def kinds(self) -> Kinds:
        """The kinds of all members."""
        return frozenset[type]().union(*(member.kinds for member in self.members))

    @property
    def exact(self) -> Kinds:
        """The kinds that no member converts."""
        return self.kinds - self._routes().keys()

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the union of the members."""
        schemas = [member.schema(definitions) for member in self.members]
        return {} if {} in schemas else {"anyOf": schemas}

    def converter(self) -> Converter | None:
        """Return a converter that selects a member by the type of the value, then tries each in turn."""
        routes = self._routes()
        if not routes:
            return None

        def converter(value: Any) -> Any:
            convert = routes.get(type(value))  # pyright: ignore[reportUnknownArgumentType]
            return value if convert is None else convert(value)

        return converter

    def _routes(self) -> dict[type, Converter]:
        """Return the conversion of each kind of JSON value; kinds that stay unchanged have no entry."""
        routes: dict[type, Converter] = {}
        for kind in self.kinds:
            members = [member for member in self.members if kind in member.kinds]
            if kind in {int, float}:
                # 1 becomes an int and 1.0 a float, independent of the order in the union.
                members.sort(key=lambda member: kind not in member.exact)
            final = next((at for at, each in enumerate(members) if _takes_all(each, kind)), None)
            if final is not None:
                del members[final + 1 :]
            if all(kind in member.exact for member in members):
                continue
            convert = members[0].converter() if len(members) == 1 else None
            routes[kind] = convert or _Trial(members)
        return routes


def _takes_all(shape: Shape, kind: type) -> bool:
    """Return whether every value of `kind` matches `shape` unchanged, so that later members need not be tried."""
    is_free = isinstance(shape, Unknown) or (
        isinstance(shape, Scalar) and isinstance(shape.annotation, type)
    )
    return is_free and kind in shape.exact


class _Trial:
    """Finds the member of a union that a value matches, if its type alone does not decide."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self._shapes = shapes

    @cached_property
    def _members(self) -> list[tuple[Schema, Converter | None]]:
        # Created with the first value, because a recursive type is incomplete while its converters are created.
        return [(Schema(document_of(shape)), shape.converter()) for shape in self._shapes]

    def __call__(self, value: Any) -> Any:
        failure = ConversionError("it matches no member of the union")
        for schema, convert in self._ranked(value):
            checkpoint()
            try:
                if schema.check(value):
                    return value if convert is None else convert(value)
            except ConversionError as error:
                failure = error
        raise failure

    def _ranked(self, value: Any) -> list[tuple[Schema, Converter | None]]:
        """Return the members in their order; for objects, those that declare most of the value's properties first."""
        if type(value) is not dict:
            return self._members
        known: JSONObject = value  # pyright: ignore[reportUnknownVariableType]
        return sorted(
            self._members, key=lambda member: -len(known.keys() & _properties(member[0]).keys())
        )


def _properties(schema: Schema) -> JSONObject:
    document = schema.document
    return document.get("properties", {}) if isinstance(document, dict) else {}
