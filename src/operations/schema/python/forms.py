"""The checked form: what a typed handler receives, written as JSON for the rules that read the input.

Grants, resource rules and approval rules are written for the declared input schema, but a typed handler receives
objects: an alias may have several names, a validator may change a value, a number may arrive as text. The checked form
has the names of the input schema and the values of the objects.

Rule 1: only this module writes the form, from the fields of the objects. No serializer or excluded field of a class has
        an effect, and no iterator is consumed.
Rule 2: a value that has no exact form is an error (`FormError`), never a guess.
Rule 3: the form names the places of secrets, so that no display shows them, and of the values that the caller did not
        send.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache
from hashlib import sha256
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from os import PathLike
from re import Pattern
from typing import Any, Final, TypeAlias, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec

from operations.base.json.values import (
    MASK,
    MAX_DEPTH,
    MAX_DOCUMENT_VALUES,
    JSONValueError,
    canonical,
    is_list,
    is_object,
    lift,
    pointer,
    to_json,
)
from operations.base.types import JSONObject
from operations.base.work import checkpoint
from operations.schema.python.annotations import hints_of, is_class, origin_of

Place: TypeAlias = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

GENERATED: Final = "(set when it runs)"
"""Displayed for a value that a default factory creates for each call."""

_EXACT_EXPONENT = 300
"""Larger decimals are not written as integers, because that may take very long."""

_PLAIN_FACTORIES = frozenset({dict, frozenset, list, set, tuple})
"""Default factories that return an equal value each time."""

_ABSENT: Any = object()
"""Marks the absence of the value that the caller sent."""


class FormError(ValueError):
    """A value has no checked form. The text has its place and type, never the value."""

    def __init__(self, reason: str, place: Place = ()) -> None:
        super().__init__(f"{''.join(map(pointer, place)) or 'the input'} {reason}")


class CheckedForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """What a handler receives, as JSON."""

    value: Any

    filled: tuple[Place, ...] = ()
    """The places of values that the caller did not send."""

    generated: tuple[Place, ...] = ()
    """Those of `filled` that a default factory creates for each call."""

    secrets: tuple[Place, ...] = ()

    @cached_property
    def sent(self) -> Any:
        """The form without the values that the caller did not send."""
        return _changed(self.value, [(self.filled, _ABSENT)])

    @cached_property
    def bound(self) -> Any:
        """The form without the values that differ in each call: an approval binds the rest."""
        return _changed(self.value, [(self.generated, _ABSENT)])

    @cached_property
    def shown(self) -> Any:
        """The form for people: without secrets, and without values that differ in each call."""
        return _changed(self.value, [(self.secrets, MASK), (self.generated, GENERATED)])

    @cached_property
    def digest(self) -> str:
        """The digest of `bound`. For a plain input, it is the digest of its JSON."""
        return digest_of(self.bound)


def digest_of(value: Any) -> str:
    """Return SHA-256 of the canonical JSON of a value."""
    return sha256(canonical(value)).hexdigest()


class CheckedInput(msgspec.Struct, kw_only=True):
    """An input that was built for a handler, and its checked form."""

    reader: object
    """The reader that built it."""

    input: Any
    """The input as it was sent, which nothing modifies."""

    form: CheckedForm | None = None

    problem: str = ""
    """The reason why there is no form."""

    is_foreign: bool = False
    """Whether another process builds the input and cannot show the form."""

    def has_form_of(self, other: "CheckedInput") -> bool:
        """Return whether both have the same form, apart from values that differ in each call."""
        mine, its = self.form, other.form
        return mine is not None and its is not None and mine.digest == its.digest

    def is_of(self, reader: object, value: Any) -> bool:
        """Return whether `reader` built it from an equal input."""
        return self.reader is reader and (self.input is value or self.input == value)


_Changes: TypeAlias = dict[str | int, Any]
"""What to change inside a value, by key or index: further changes, or the new value."""


class _New(msgspec.Struct, frozen=True):
    """A new value, in changes."""

    value: Any


def _changed(value: Any, changes: Iterable[tuple[Iterable[Place], Any]]) -> Any:
    """Return a copy of `value` with a new value at each place; the last one counts if two are for the same place.

    All places are changed in one pass, because an input may have many.
    """
    noted: _Changes = {}
    for places, new in changes:
        for place in places:
            checkpoint()
            _note(noted, place, new)
    return _applied(value, noted)


def _note(changes: "_Changes | _New", place: Place, new: Any) -> None:
    for token in place[:-1]:
        if isinstance(changes, _New):
            # An outer value is replaced.
            return
        changes = changes.setdefault(token, {})
    if place and not isinstance(changes, _New):
        changes[place[-1]] = _New(new)


def _applied(value: Any, changes: "_Changes | _New") -> Any:
    if isinstance(changes, _New):
        return changes.value
    checkpoint()
    if is_object(value):
        held = dict(value)
        for token, inside in changes.items():
            if isinstance(token, str) and token in held:
                found = _applied(held[token], inside)
                if found is _ABSENT:
                    del held[token]
                else:
                    held[token] = found
        return held
    if is_list(value):
        items: list[Any] = [*value]
        for token, inside in changes.items():
            if isinstance(token, int) and 0 <= token < len(items):
                found = _applied(items[token], inside)
                # An item keeps its position.
                items[token] = None if found is _ABSENT else found
        return items
    return value


# ------------------------------------------------------------ names


class ClassNames(msgspec.Struct, frozen=True):
    """The names of the fields of a class in its input schema."""

    names: dict[str, str]
    """By field."""

    accepted: dict[str, frozenset[str]] = {}
    """The names that the input may use, by field."""

    bytes_as: str | None = None
    """How the class reads bytes: `utf8`, `base64` or `hex`; None if that depends on the class that contains it."""


class ForeignNames:
    """The names of the fields of pydantic's classes, read from the core schemas that pydantic validates with.

    A standard dataclass has no names of its own: those that pydantic uses for it are only in the core schema of the
    class that contains it.

    Attributes:
        classes: The names by class.
        problems: The reasons why some values have no form.
        has_hidden_names: Whether plain dicts may have other names than in the input schema.
        moved: The classes whose objects a function may build from another part of the input.
    """

    def __init__(self) -> None:
        self.classes: dict[type, ClassNames] = {}
        self.problems: list[str] = []
        self.has_hidden_names = False
        self.moved: set[type] = set()
        self._mixed: set[type] = set()

    def add(self, annotation: Any) -> None:
        """Add the classes in a type that pydantic validates."""
        self._walk(sys.modules["pydantic"].TypeAdapter(annotation).core_schema)

    def of(self, cls: type) -> ClassNames | None:
        """Return the names of a class; None for a class without names of its own.

        Raises:
            FormError: If the class has different names in different places.
        """
        if cls in self._mixed:
            raise FormError(f"is a {cls.__name__}, which has several lists of names")
        if cls not in self.classes and hasattr(cls, "__pydantic_core_schema__"):
            # A validator may return an object of another class.
            self.add(cls)
        return self.classes.get(cls)

    def _walk(self, root: Any) -> None:
        # With a stack, because core schemas nest deeply.
        waiting: list[tuple[Any, Any, bool]] = [(root, None, False)]
        found, has_moved_reference = set[type](), False
        while waiting:
            node, owner, is_moved = waiting.pop()
            if isinstance(node, (list, tuple)):
                waiting += [(each, owner, is_moved) for each in cast("list[Any]", node)]
            if not is_object(node):
                continue
            kind = node.get("type")
            if not isinstance(kind, str):
                # Not a schema, but schemas by name; a field may have the name "type".
                waiting += [(part, owner, is_moved) for part in node.values()]
                continue
            is_moved = is_moved or kind.startswith("function-")
            has_moved_reference = has_moved_reference or (is_moved and kind == "definition-ref")
            if kind in _NO_FORM:
                self.problems.append(_NO_FORM[kind])
            if kind in {"model", "dataclass"}:
                owner = node
                found.add(node["cls"])
                if is_moved:
                    self.moved.add(node["cls"])
            elif kind in {"model-fields", "dataclass-args"}:
                if owner is not None:
                    self._name(owner, node)
                owner = None
            elif kind == "typed-dict":
                self._check_typed_dict(node)
            parts: Iterable[tuple[str, Any]] = node.items()
            if kind == "json-or-python":
                parts = [("schema", node["json_schema"])]
            elif kind == "lax-or-strict":
                parts = [("schema", node["lax_schema"])]
            # Defaults and metadata are no schemas.
            waiting += [(part, owner, is_moved) for key, part in parts if key in _NESTED]
        if has_moved_reference:
            self.moved |= found

    def _name(self, owner: Any, node: Any) -> None:
        cls: Any = owner["cls"]
        config: JSONObject = owner.get("config") or {}
        fields = node["fields"]
        pairs = fields.items() if is_object(fields) else ((each["name"], each) for each in fields)
        names: dict[str, str] = {}
        accepted: dict[str, frozenset[str]] = {}
        for name, field in pairs:
            if field.get("init_only"):
                self.problems.append(f"{cls.__name__}.{name} is only passed to __post_init__")
                self._mixed.add(cls)
                continue
            alias = field.get("validation_alias", name)
            paths: list[Any] = alias if is_list(alias) and alias and is_list(alias[0]) else [alias]
            tokens = [each if is_list(each) else [each] for each in paths]
            accepted[name] = frozenset({name, *(each[0] for each in tokens)})
            single = [each[0] for each in tokens if len(each) == 1]
            # The input schema also has the aliases of a class that does not read them (`validate_by_alias=False`).
            names[name] = single[0] if single else name
        own = is_class(cls) and (
            hasattr(cls, "__pydantic_fields__") or hasattr(cls, "model_fields")
        )
        bytes_as = config.get("val_json_bytes", "utf8") if own else None
        found = ClassNames(names, accepted, bytes_as)
        if self.classes.setdefault(cls, found) != found:
            self._mixed.add(cls)

    def _check_typed_dict(self, node: Any) -> None:
        """Note a TypedDict with aliases: its values are plain dicts, from which the names cannot be restored."""
        for name, field in node["fields"].items():
            if field.get("validation_alias", name) != name:
                cls = node.get("cls")
                title = getattr(cls, "__name__", "a TypedDict")
                problem = f"{title}.{name} has an alias, and the handler receives a plain dict"
                self.problems.append(problem)
                self.has_hidden_names = True


_NESTED: Final = frozenset({
    "schema", "fields", "definitions", "choices", "items_schema", "keys_schema", "values_schema", "extras_schema",
    "extras_keys_schema", "steps", "arguments_schema", "variadic_item", "var_args_schema", "var_kwargs_schema",
})  # fmt: skip
"""The keys of core schemas whose values are, or contain, schemas."""

_NO_FORM: Final = {
    "generator": "an iterator can be read only once",
    "is-instance": "an object of any class has no form",
    "is-subclass": "a class has no form",
    "callable": "a function has no form",
    "arguments": "the arguments of a function have no form",
    "call": "the result of a function has no form",
}


# ------------------------------------------------------------ writing


class FormWriter:
    """Writes the checked form of one input.

    Args:
        names: The names of pydantic's classes.
        reads_bytes: Whether bytes outside pydantic's classes were read from base64.
    """

    def __init__(self, names: ForeignNames, *, reads_bytes: bool = True) -> None:
        self._names = names
        self._bytes_as = "base64" if reads_bytes else None
        self._left = MAX_DOCUMENT_VALUES
        self._is_default = False
        self.filled: list[Place] = []
        self.generated: list[Place] = []
        self.secrets: list[Place] = []

    def form(self, value: Any) -> CheckedForm:
        """Return the form whose JSON this writer has written."""
        return CheckedForm(
            value=value,
            filled=tuple(self.filled),
            generated=tuple(self.generated),
            secrets=tuple(self.secrets),
        )

    def default(self, value: Any, place: Place) -> Any:
        """Return the JSON of a value that the caller did not send."""
        self.filled.append(place)
        outer, self._is_default = self._is_default, True
        try:
            return self.write(value, _ABSENT, place)
        finally:
            self._is_default = outer

    def write(self, value: Any, sent: Any, place: Place) -> Any:
        """Return the JSON of a value that a handler receives.

        Args:
            value: Any object.
            sent: The JSON that it was built from, if that is known.
            place: Its place in the input.

        Raises:
            FormError: If it has no exact form.
        """
        self._left -= 1
        if self._left < 0 or len(place) > MAX_DEPTH:
            raise FormError("is too large to be checked", place)
        if not self._left % 256:
            checkpoint()
        kind = _class_of(value)
        if value is None or kind is bool:
            return value
        try:
            if isinstance(value, Enum):
                return self.write(value.value, _ABSENT, place)
            if isinstance(value, str):
                return to_json(str.__str__(value))
            if isinstance(value, int):
                return to_json(int.__int__(value))
            if isinstance(value, float):
                return to_json(float.__float__(value))
        except JSONValueError as error:
            raise FormError(error.reason, place) from None
        if isinstance(value, Decimal):
            return _number(value, place)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._bytes(bytes(cast("bytes", value)), place)
        if is_class(kind) and hasattr(kind, "get_secret_value"):
            self.secrets.append(place)
            # The caller did not send it, and must not learn it.
            return MASK if self._is_default else self.write(value.get_secret_value(), sent, place)
        text = _text_of(value)
        return self._compound(value, sent, place) if text is None else text

    def _bytes(self, value: bytes, place: Place) -> str:
        if self._bytes_as == "base64":
            return cast("str", lift(value))
        if self._bytes_as == "hex":
            return value.hex()
        try:
            if self._bytes_as == "utf8":
                return value.decode()
        except UnicodeDecodeError:
            pass
        raise FormError("is bytes that are no text", place)

    def _compound(self, value: Any, sent: Any, place: Place) -> Any:
        kind = _class_of(value)
        if isinstance(value, (list, tuple)):
            # Also a named tuple, which is an array in JSON.
            return self._items(cast("Iterable[Any]", value), sent, place)
        if isinstance(value, Set):
            return self._set(cast("Iterable[Any]", value), place)
        if isinstance(value, msgspec.Struct):
            return self._struct(value, sent, place)
        if isinstance(value, Mapping):
            return self._mapping(value, sent, place)  # pyright: ignore[reportUnknownArgumentType]
        if kind.__module__ == "collections" and kind.__name__ == "deque":
            return self._items([*value], sent, place)
        named = self._names.of(kind)
        outer = self._bytes_as
        if named is not None and named.bytes_as is not None:
            self._bytes_as = named.bytes_as
        try:
            if hasattr(kind, "__pydantic_root_model__"):
                return self._model(value, named, sent, place)
            if dataclasses.is_dataclass(kind):
                return self._dataclass(value, named, sent, place)
            if hasattr(kind, "__attrs_attrs__"):
                return self._attrs(value, sent, place)
        finally:
            self._bytes_as = outer
        raise FormError(f"is a {kind.__name__}, which has no JSON form", place)

    def _items(self, items: Iterable[Any], sent: Any, place: Place) -> list[Any]:
        items = [*items]
        given: Iterable[Any] = [_ABSENT] * len(items)
        if is_list(sent) and len(sent) == len(items):
            given = sent
        pairs = enumerate(zip(items, given, strict=True))
        return [self.write(item, raw, (*place, index)) for index, (item, raw) in pairs]

    def _set(self, members: Iterable[Any], place: Place) -> list[Any]:
        """Return the members in the order of their JSON, because the order of a set differs between processes."""
        noted = self.filled, self.generated, self.secrets
        before = [*map(len, noted)]
        forms = self._items(members, _ABSENT, place)
        order = sorted(range(len(forms)), key=lambda index: canonical(forms[index]))
        positions = {old: new for new, old in enumerate(order)}
        depth = len(place)
        for places, known in zip(noted, before, strict=True):
            places[known:] = [
                (*place, positions[cast("int", each[depth])], *each[depth + 1 :])
                for each in places[known:]
            ]
        return [forms[index] for index in order]

    def _mapping(self, value: Mapping[Any, Any], sent: Any, place: Place) -> dict[str, Any]:
        if self._names.has_hidden_names:
            raise FormError("is a dict that may have other names in the input schema", place)
        result: dict[str, Any] = {}
        given: Mapping[str, Any] = sent if is_object(sent) else {}
        for key, item in value.items():
            name = self._key(key, place)
            if name in result:
                raise FormError("has two keys that are the same in JSON", place)
            result[name] = self.write(item, given.get(name, _ABSENT), (*place, name))
        return result

    def _key(self, key: Any, place: Place) -> str:
        found = self.write(key, _ABSENT, place)
        if type(found) is str:
            return found
        if type(found) is int:
            return str(found)
        if isinstance(key, Decimal):
            return str(key)
        raise FormError(f"has a {type(key).__name__} as key", place)

    def _fields(
        self, fields: Iterable["_Field"], sent: Any, place: Place
    ) -> Iterator[tuple[str, Any]]:
        """Yield the names and the forms of the fields of an object."""
        for each in fields:
            where = (*place, each.name)
            if each.is_sent or each.is_derived:
                given = sent.get(each.name, _ABSENT) if is_object(sent) else _ABSENT
                yield each.name, self.write(each.value, given, where)
                continue
            if each.default.is_generated:
                self.generated.append(where)
            yield each.name, self.default(each.value, where)

    def _object(self, parts: Iterable[tuple[str, Any]], place: Place) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, item in parts:
            if name in result:
                raise FormError(f"has two fields that are {name!r} in JSON", place)
            result[name] = item
        return result

    def _model(self, value: Any, named: ClassNames | None, sent: Any, place: Place) -> Any:
        # Read from the dict of the object: a deprecated field, for example, warns when it is read as an attribute.
        kind = _class_of(value)
        held: dict[str, Any] = cast("Any", vars)(value)
        if kind.__pydantic_root_model__:
            return self.write(held["root"], sent, place)
        if named is None:
            raise FormError(f"is a {kind.__name__}, whose names are unknown", place)
        given: Set[str] = value.__pydantic_fields_set__
        missing = _missing_marker()
        own = _fields_of_pydantic(kind)
        fields = [
            _Field(json_name, held[name], name in given, own.get(name, _REQUIRED))
            for name, json_name in named.names.items()
            if name in held and held[name] is not missing
        ]
        result = self._object(self._fields(fields, sent, place), place)
        if not value.__pydantic_extra__:
            return result
        more = self._mapping(value.__pydantic_extra__, sent, place)
        if not result.keys().isdisjoint(more):
            raise FormError("has a further property with the name of a field", place)
        return result | more

    def _dataclass(self, value: Any, named: ClassNames | None, sent: Any, place: Place) -> Any:
        kind = _class_of(value)
        if _has_init_vars(kind):
            raise FormError(
                f"is a {kind.__name__}, which has a field that it does not store", place
            )
        given, defaults = sent if is_object(sent) else None, _fields_of_dataclass(kind)
        # Unlike a model, a dataclass does not note which of its fields were sent.
        is_moved = kind in self._names.moved
        fields: list[_Field] = []
        for each in dataclasses.fields(kind):
            names = {each.name} if named is None else named.accepted.get(each.name, {each.name})
            fields.append(
                _Field(
                    each.name if named is None else named.names.get(each.name, each.name),
                    getattr(value, each.name, _ABSENT),
                    given is None
                    or not names.isdisjoint(given)
                    or (is_moved and defaults[each.name].is_generated),
                    defaults[each.name],
                )
            )
        return self._object(self._fields(_present(fields), sent, place), place)

    def _attrs(self, value: Any, sent: Any, place: Place) -> Any:
        kind = _class_of(value)
        given = sent if is_object(sent) else None
        fields = [
            _Field(
                each.name,
                getattr(value, each.name, _ABSENT),
                given is None or each.name in given,
                _default_of_attrs(each.default),
            )
            for each in kind.__attrs_attrs__
        ]
        return self._object(self._fields(_present(fields), sent, place), place)

    def _struct(self, value: msgspec.Struct, sent: Any, place: Place) -> Any:
        config = value.__struct_config__
        known = _fields_of_struct(type(value))
        pairs = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        held = {encoded: (name, getattr(value, name, _ABSENT)) for encoded, name in pairs}
        if config.array_like:
            items = [item for _, item in held.values()]
            return self._items(items if config.tag is None else [config.tag, *items], sent, place)
        given = sent if is_object(sent) else None
        fields = [
            _Field(encoded, item, given is None or encoded in given, known[name])
            for encoded, (name, item) in held.items()
            if item is not msgspec.UNSET
        ]
        tag = [] if config.tag is None else [(cast("str", config.tag_field), config.tag)]
        return self._object([*tag, *self._fields(_present(fields), sent, place)], place)


def _class_of(value: Any) -> Any:
    """Return the class of a value, without narrowing it to `type[Unknown]`."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    return kind  # pyright: ignore[reportUnknownVariableType]


class _Field(msgspec.Struct, frozen=True):
    """A field of an object."""

    name: str
    """Its name in the input schema."""

    value: Any

    is_sent: bool
    """Whether the caller sent it, as far as that is known."""

    default: "_Default"

    @property
    def is_derived(self) -> bool:
        """Whether the value is not the default of the field, although the caller did not send it.

        A validator or `__post_init__` has made it from other parts of the input.
        """
        default = self.default
        given: object = self.value
        kind = type(given)
        if hasattr(kind, "get_secret_value"):
            return False
        if default.is_generated:
            return False
        try:
            expected = default.value if default.factory is None else default.factory()
            # True equals 1.
            is_other = isinstance(expected, bool) is not isinstance(self.value, bool)
            return is_other or bool(expected != self.value)
        except Exception:  # noqa: BLE001 - code of the class, whose error does not matter here
            return True


class _Default(msgspec.Struct, frozen=True):
    """What a field contains that the caller does not send."""

    value: Any = _ABSENT

    factory: Any = None
    """A default factory that returns an equal value each time."""

    is_generated: bool = False
    """Whether a default factory may create another value for each call, also from other fields."""


_REQUIRED: Final = _Default()
"""Of a field without a default."""


def _made_by(factory: Any) -> _Default:
    if origin_of(factory) in _PLAIN_FACTORIES or factory in _PLAIN_FACTORIES:
        return _Default(factory=factory)
    return _Default(is_generated=True)


def _present(fields: Iterable[_Field]) -> list[_Field]:
    return [each for each in fields if each.value is not _ABSENT]


@lru_cache(maxsize=1024)
def _has_init_vars(cls: Any, /) -> bool:
    """Return whether a dataclass has fields that it only passes to `__post_init__`."""
    if len(cls.__dataclass_fields__) == len(dataclasses.fields(cls)):
        return False
    return any(isinstance(hint, dataclasses.InitVar) for hint in hints_of(cls).values())


@lru_cache(maxsize=1024)
def _fields_of_pydantic(cls: Any, /) -> dict[str, _Default]:
    """Return the defaults of a class of pydantic, by field."""
    found: dict[str, _Default] = {}
    for name, each in cls.__pydantic_fields__.items():
        factory = each.default_factory
        found[name] = _Default(each.default) if factory is None else _made_by(factory)
    return found


@lru_cache(maxsize=1024)
def _fields_of_dataclass(cls: Any, /) -> dict[str, _Default]:
    """Return the defaults of a dataclass, by field."""
    none, found = dataclasses.MISSING, dict[str, _Default]()
    for each in dataclasses.fields(cls):
        if each.default_factory is none:
            found[each.name] = _Default(each.default)
        else:
            found[each.name] = _made_by(each.default_factory)
    if hasattr(cls, "__pydantic_fields__"):
        found |= _fields_of_pydantic(cls)
    return found


@lru_cache(maxsize=1024)
def _fields_of_struct(cls: Any) -> dict[str, _Default]:
    """Return the defaults of a struct, by field."""
    none, found = msgspec.NODEFAULT, dict[str, _Default]()
    for each in msgspec.structs.fields(cls):
        if each.default_factory is none:
            found[each.name] = _Default(each.default)
        else:
            found[each.name] = _made_by(each.default_factory)
    return found


def _default_of_attrs(default: Any) -> _Default:
    """Return the default of a field of attrs."""
    return _made_by(default.factory) if hasattr(default, "factory") else _Default(default)


def _missing_marker() -> Any:
    """Return pydantic's mark for a field without a value."""
    core = sys.modules.get("pydantic_core")
    return getattr(core, "MISSING", _ABSENT)


def _number(value: Decimal, place: Place) -> int | float:
    """Return a decimal as a JSON number of exactly the same value."""
    if value.is_finite():
        if abs(value.adjusted()) <= _EXACT_EXPONENT and value == value.to_integral_value():
            return int(value)
        number = float(value)
        # The shortest text of the float has the same digits: no digit is lost.
        if number - number == 0 and Decimal(repr(number)) == value:
            return number
    raise FormError("is a decimal that no JSON number represents exactly", place)


_BY_TEXT: Final = (
    UUID,
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ZoneInfo,
)
"""Types whose text is their JSON."""


def _text_of(value: Any) -> str | None:
    """Return a value as the text that stands for it in JSON; None if no text does."""
    if isinstance(value, (date, time, timedelta, PathLike)):
        found = lift(value)
        return found if isinstance(found, str) else None
    if isinstance(value, _BY_TEXT):
        return str(value)
    if isinstance(value, Pattern):
        pattern: Any = cast("Any", value).pattern
        return pattern if isinstance(pattern, str) else None
    module, name = type(value).__module__, type(value).__name__
    is_url = module == "pydantic.networks" or module.startswith("pydantic_core")
    return str(value) if is_url and name.endswith(("Url", "Dsn")) else None
