"""Shapes that contain other shapes: arrays, tuples, mappings, and classes with named fields.

The classes are dataclasses, attrs classes, TypedDicts, named tuples and msgspec structs.

Rule 1: a class is built by calling it, so that its own code runs.
Rule 2: unknown fields are rejected, except for a struct that allows them.
Rule 3: an error has a location: each level adds its own token to the path.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import InitVar
from functools import partial
from itertools import count, repeat
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    get_origin,
)

import msgspec
from msgspec import NODEFAULT, UNSET

from operations.base.json.values import JSONValueError, to_json
from operations.base.types import JSONObject
from operations.schema.python.annotations import (
    Docstring,
    hints_of,
    is_class,
    is_read_only,
    is_typed_dict,
    origin_of,
    parse_docstring,
)
from operations.schema.python.shapes import (
    MISSING,
    NOTHING,
    CollectedDefs,
    ConversionError,
    Converter,
    Kinds,
    Shape,
    attempt,
    convert_parts,
)


class Array(msgspec.Struct, frozen=True, eq=False):
    """An array of any number of items of one shape."""

    annotation: Any
    """The collection type with its constraints, without its item type."""

    item: Shape
    build: Callable[[list[Any]], Any] | None = None
    """Builds the collection from a list; `None` for a list."""

    kinds: Kinds = frozenset({list})

    @property
    def exact(self) -> Kinds:
        """All kinds, if no conversion is needed."""
        return self.kinds if self.converter() is None else NOTHING

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema that msgspec writes for the collection, with our items."""
        schema = msgspec.json.schema(self.annotation)
        items = self.item.schema(definitions)
        return {**schema, "items": items} if items else schema

    def converter(self) -> Converter | None:
        """Return a converter of the items and of the collection."""
        convert, build = self.item.converter(), self.build
        if convert is None:
            return build

        def converter(value: list[Any]) -> Any:
            items = _convert_each(value, repeat(convert))
            return items if build is None else build(items)

        return converter


def _convert_each(items: list[Any], converters: Iterable[Converter | None]) -> list[Any]:
    """Return each item converted by its own converter."""
    return list(convert_parts(zip(count(), items, converters)).values())


class FixedTuple(msgspec.Struct, frozen=True, eq=False):
    """A tuple whose items have their own types."""

    items: tuple[Shape, ...]
    kinds: Kinds = frozenset({list})
    exact: Kinds = NOTHING

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema of exactly these items."""
        places: JSONObject = {"minItems": len(self.items), "maxItems": len(self.items)}
        if self.items:
            places["prefixItems"] = [item.schema(definitions) for item in self.items]
        return {"type": "array", **places}

    def converter(self) -> Converter:
        """Return a converter of each item."""
        converters = [item.converter() for item in self.items]
        if not any(converters):
            return tuple
        return lambda value: tuple(_convert_each(value, converters))


class Table(msgspec.Struct, frozen=True, eq=False):
    """An object with any number of values of one shape."""

    annotation: Any
    """The mapping type with its constraints, without its key and value types."""

    key: Shape | None
    """The shape of the keys; None if any string is allowed."""

    value: Shape
    build: Callable[[dict[Any, Any]], Any] | None = None
    kinds: Kinds = frozenset({dict})

    @property
    def exact(self) -> Kinds:
        """All kinds, if no conversion is needed."""
        return self.kinds if self.converter() is None else NOTHING

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema that msgspec writes for the mapping, with our keys and values."""
        schema = msgspec.json.schema(self.annotation)
        if self.key is not None:
            names = self.key.schema(definitions)
            # Keys are always strings, so the type is omitted.
            schema["propertyNames"] = {k: v for k, v in names.items() if k != "type"}
        values = self.value.schema(definitions)
        return {**schema, "additionalProperties": values} if values else schema

    def converter(self) -> Converter | None:
        """Return a converter of the keys, the values and the mapping."""
        convert_key = None if self.key is None else self.key.converter()
        convert, build = self.value.converter(), self.build
        if convert is None and convert_key is None:
            return build

        def convert_pair(pair: tuple[str, Any]) -> tuple[Any, Any]:
            name = pair[0] if convert_key is None else convert_key(pair[0])
            return name, pair[1] if convert is None else convert(pair[1])

        def converter(value: dict[str, Any]) -> Any:
            if convert_key is None:
                result = convert_parts((key, item, convert) for key, item in value.items())
            else:
                pairs = convert_parts((pair[0], pair, convert_pair) for pair in value.items())
                result = dict(pairs.values())
            if len(result) != len(value):
                raise ConversionError("two keys are equal after conversion")
            return result if build is None else build(result)

        return converter


class Field(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One field of a record."""

    name: str
    """The name in JSON."""

    argument: str
    """The name of the constructor's parameter."""

    shape: Shape
    required: bool
    default: Any = MISSING
    """The default as JSON, if JSON can represent it."""

    description: str = ""
    taken: bool = True
    """Whether the constructor accepts the field; False for fields that a class sets itself."""

    shown: bool = True
    """Whether the field is part of the value; False for arguments that only the constructor uses."""

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema of the shape, with the description and default of the field."""
        schema = dict(self.shape.schema(definitions))
        if self.description:
            schema.setdefault("description", self.description)
        if self.default is not MISSING:
            schema["default"] = self.default
        return schema


class Record(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A class with named fields, as an object or, for example for a named tuple, as an array."""

    fields: tuple[Field, ...]
    construct: Callable[..., Any] | None
    """Builds the value from keyword arguments; `None` if it stays a `dict`."""

    layout: Literal["object", "array"] = "object"
    closed: bool = True
    extra: Shape | None = None
    """The shape of properties without a field; None if they are not allowed."""

    tag: tuple[str, str | int] | None = None
    """The name and value of the tag, which is a property or, in an array, the first item."""

    words: JSONObject = {}

    @property
    def kinds(self) -> Kinds:
        """Object or array."""
        return frozenset({dict if self.layout == "object" else list})

    @property
    def exact(self) -> Kinds:
        """All kinds, if no conversion is needed."""
        return self.kinds if self.converter() is None else NOTHING

    def schema(self, definitions: CollectedDefs) -> JSONObject:
        """Return the schema of all fields, in order."""
        taking = definitions.mode == "validation"
        fields = [each for each in self.fields if (each.taken if taking else each.shown)]
        schemas = {each.name: each.schema(definitions) for each in fields}
        required = [each.name for each in fields if each.required]
        if self.tag is not None:
            name, value = self.tag
            schemas = {name: {"const": value}, **schemas}
            required = [name, *required]
        if self.layout == "array":
            return {**self.words, **self._array(list(schemas.values()), len(required))}
        schema = {**self.words, "type": "object", "properties": schemas}
        if required:
            schema["required"] = required
        if self.extra is not None:
            schema["additionalProperties"] = self.extra.schema(definitions)
        elif self.closed:
            schema["additionalProperties"] = False
        return schema

    def _array(self, items: list[JSONObject], required: int) -> JSONObject:
        schema: JSONObject = {"type": "array", "prefixItems": items, "minItems": required}
        return {**schema, "maxItems": len(items)} if self.closed else schema

    def converter(self) -> Converter | None:
        """Return a converter of the fields and of the class."""
        construct = self.construct
        convert = self._from_array() if self.layout == "array" else self._from_object()
        if construct is None:
            return convert

        def build(value: Any) -> Any:
            return construct(**value)

        make: Converter = partial(attempt, build)
        if convert is not None:
            make = lambda value: attempt(build, convert(value))  # noqa: E731
        own = [(each.name, each.shape.converter()) for each in self.fields if not each.taken]
        return _setting_own_fields(make, own) if own else make

    def _from_object(self) -> Converter | None:
        """Return the conversion from an object to keyword arguments; `None` if they are the same."""
        fields = [each for each in self.fields if each.taken]
        arguments = {each.name: each.argument for each in fields}
        steps = [
            (each.name, next(iter(each.shape.exact), None), convert)
            for each in fields
            if (convert := each.shape.converter()) is not None
        ]
        convert_extra = None if self.extra is None else self.extra.converter()
        # A class that allows unknown fields, has a tag, or renames or sets fields receives only those that it accepts.
        select = self.construct is not None and (
            not self.closed
            or self.tag is not None
            or len(fields) < len(self.fields)
            or any(name != argument for name, argument in arguments.items())
        )
        if not steps and not select and convert_extra is None:
            return None

        def converter(value: JSONObject) -> JSONObject:
            used = steps
            if convert_extra is not None:
                extra = value.keys() - arguments.keys()
                used = [*steps, *((name, None, convert_extra) for name in extra)]
            result = value | convert_parts(
                (name, value[name], convert)
                for name, kind, convert in used
                if name in value and type(value[name]) is not kind
            )
            if not select:
                return result
            return {arguments[name]: item for name, item in result.items() if name in arguments}

        return converter

    def _from_array(self) -> Converter:
        """Return the conversion from an array to keyword arguments."""
        skipped = 0 if self.tag is None else 1
        names = [each.argument for each in self.fields]
        converters = [None] * skipped + [each.shape.converter() for each in self.fields]

        def converter(value: list[Any]) -> JSONObject:
            items = _convert_each(value, converters)
            return dict(zip(names, items[skipped:], strict=False))

        return converter


def _setting_own_fields(make: Converter, own: list[tuple[str, Converter | None]]) -> Converter:
    """Return a converter that also restores the fields that the class sets itself, which only results contain."""

    def converter(value: JSONObject) -> Any:
        result = make(value)
        parts = ((name, value[name], convert) for name, convert in own if name in value)
        for name, item in convert_parts(parts).items():
            # The class may be frozen.
            object.__setattr__(result, name, item)
        return result

    return converter


Read: TypeAlias = Callable[[Any], Shape]
"""Reads the annotation of a field."""

_FACTORIES = frozenset({dict, frozenset, list, set, tuple})
"""Factories that return an equal value each time."""


def record_reader(cls: Any) -> Callable[[Any, Read], Record] | None:
    """Return the function that reads records of this kind; `None` if `cls` is not such a class."""
    if not is_class(cls):
        return None
    if issubclass(cls, msgspec.Struct):
        return _struct
    if dataclasses.is_dataclass(cls):
        return _dataclass
    if is_typed_dict(cls):
        return _typed_dict
    if hasattr(cls, "__attrs_attrs__"):
        return _attrs
    return _named_tuple if hasattr(cls, "_fields") and issubclass(cls, tuple) else None


def default_of(value: Any, shape: Shape) -> Any:
    """Return a default as JSON, or `MISSING` if it cannot be converted to JSON or contradicts its annotation."""
    try:
        default = to_json(value)
    except JSONValueError:
        return MISSING
    return default if type(default) in shape.kinds else MISSING


def class_texts(cls: Any, title: str) -> tuple[JSONObject, Docstring]:
    """Return the title and description of a class, and its parsed docstring."""
    text: str | None = cls.__dict__.get("__doc__")
    if text is not None and text.startswith(f"{cls.__name__}("):
        text = None  # generated by dataclasses: the signature, not a description
    docstring = parse_docstring(text)
    words: JSONObject = {"title": title}
    if docstring.description:
        words["description"] = docstring.description
    return words, docstring


def title_of(annotation: Any) -> str:
    """Return the name of a class, with its arguments if it is generic."""
    origin = get_origin(annotation)
    if origin is None:
        return str(getattr(annotation, "__name__", annotation))
    arguments = ", ".join(map(title_of, getattr(annotation, "__args__", ())))
    return f"{title_of(origin)}[{arguments}]" if arguments else title_of(origin)


class _ClassReader:
    """A class that is being read."""

    def __init__(self, annotation: Any, read: Read) -> None:
        self.cls = origin_of(annotation)
        self.hints = hints_of(annotation)
        self.words, self._docstring = class_texts(self.cls, title_of(annotation))
        self._read = read

    def field(
        self,
        name: str,
        *,
        required: bool,
        default: Any = MISSING,
        factory: Any = None,
        json_name: str | None = None,
        argument: str | None = None,
        taken: bool = True,
        shown: bool = True,
        hint: Any = Any,
    ) -> Field:
        """Return the field `name`, with its default and description; `hint` is its type if it has no annotation."""
        shape = self._read(self.hints.get(name, hint))
        if default is not MISSING:
            default = default_of(default, shape)
        elif origin_of(factory) in _FACTORIES:
            default = to_json(factory())
        return Field(
            name=json_name or name,
            argument=argument or name,
            shape=shape,
            required=required,
            default=default,
            description=self._docstring.names.get(name, ""),
            taken=taken,
            shown=shown,
        )


def _dataclass(annotation: Any, read: Read) -> Record:
    source = _ClassReader(annotation, read)
    none = dataclasses.MISSING
    fields = [
        source.field(
            each.name,
            required=each.init and each.default is none and each.default_factory is none,
            default=MISSING if each.default is none else each.default,
            factory=each.default_factory,
            taken=each.init,
        )
        for each in dataclasses.fields(source.cls)
    ]
    for name, hint in source.hints.items():
        if isinstance(hint, InitVar):
            default = getattr(source.cls, name, MISSING)
            required = default is MISSING
            fields.append(source.field(name, required=required, default=default, shown=False))
    return Record(fields=tuple(fields), construct=source.cls, words=source.words)


def _attrs(annotation: Any, read: Read) -> Record:
    source = _ClassReader(annotation, read)
    parameters = inspect.signature(source.cls).parameters
    fields: list[Field] = []
    for each in source.cls.__attrs_attrs__:
        # attrs has its own marker for "no default", which is not available without importing attrs.
        parameter = parameters.get(each.alias)
        optional = parameter is not None and parameter.default is not parameter.empty
        factory = getattr(each.default, "factory", None)
        fields.append(
            source.field(
                each.name,
                argument=each.alias,
                required=each.init and not optional,
                default=each.default if optional and factory is None else MISSING,
                factory=factory,
                taken=each.init,
                hint=Any if each.type is None else each.type,
            )
        )
    return Record(fields=tuple(fields), construct=source.cls, words=source.words)


def _typed_dict(annotation: Any, read: Read) -> Record:
    source = _ClassReader(annotation, read)
    fields = tuple(
        source.field(name, required=_is_required(source.cls, name, hint))
        for name, hint in source.hints.items()
    )
    return Record(fields=fields, construct=None, words=source.words)


def _is_required(cls: Any, name: str, hint: Any) -> bool:
    """Return whether a key is required. Postponed annotations hide this from the class itself."""
    while (origin := get_origin(hint)) is not None:
        if origin is Required or origin is NotRequired:
            return origin is Required
        if origin is not Annotated and not is_read_only(origin):
            break
        hint = hint.__origin__ if origin is Annotated else hint.__args__[0]
    return name in cls.__required_keys__


def _named_tuple(annotation: Any, read: Read) -> Record:
    source = _ClassReader(annotation, read)
    defaults: JSONObject = source.cls._field_defaults
    fields = tuple(
        source.field(name, required=name not in defaults, default=defaults.get(name, MISSING))
        for name in source.cls._fields
    )
    return Record(fields=fields, construct=source.cls, layout="array", words=source.words)


def _struct(annotation: Any, read: Read) -> Record:
    source = _ClassReader(annotation, read)
    config = source.cls.__struct_config__
    fields = tuple(
        source.field(
            each.name,
            json_name=each.encode_name,
            required=each.required,
            default=MISSING if each.default is NODEFAULT or each.default is UNSET else each.default,
            factory=each.default_factory,
        )
        for each in msgspec.structs.fields(source.cls)
    )
    return Record(
        fields=fields,
        construct=source.cls,
        layout="array" if config.array_like else "object",
        closed=config.forbid_unknown_fields,
        tag=None if config.tag is None else (config.tag_field, config.tag),
        words=source.words,
    )
