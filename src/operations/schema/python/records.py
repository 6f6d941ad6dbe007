"""Classes with named fields: dataclasses, attrs classes, TypedDicts, named tuples, msgspec structs.

Rule 1: a class is built by calling it, so that all it does on construction happens.
Rule 2: it is closed to unknown fields, except a struct, which says so itself.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import InitVar
from typing import Annotated, Any, NotRequired, Required, TypeAlias, get_origin, is_typeddict

import msgspec
from msgspec import NODEFAULT, UNSET

from operations._json import JSONValueError, to_json
from operations.schema.python.annotations import hints_of, is_class, origin_of
from operations.schema.python.compounds import Field, Record
from operations.schema.python.docstrings import Docstring, parse_docstring
from operations.schema.python.shapes import MISSING, Shape
from operations.types import JSONObject

Read: TypeAlias = Callable[[Any], Shape]
"""How to read the annotation of a field."""

_FACTORIES = frozenset({dict, frozenset, list, set, tuple})
"""Factories known to make the same thing each time."""


def record_reader(cls: Any) -> Callable[[Any, Read], Record] | None:
    """The function that reads records of this kind; `None` if `cls` is no such class."""
    if not is_class(cls):
        return None
    if issubclass(cls, msgspec.Struct):
        return _struct
    if dataclasses.is_dataclass(cls):
        return _dataclass
    if is_typeddict(cls):
        return _typed_dict
    if hasattr(cls, "__attrs_attrs__"):
        return _attrs
    return _named_tuple if hasattr(cls, "_fields") and issubclass(cls, tuple) else None


def default_of(value: Any, shape: Shape) -> Any:
    """A default as JSON, or `MISSING` where it has none or is not what its own annotation says."""
    try:
        default = to_json(value)
    except JSONValueError:
        return MISSING
    return default if type(default) in shape.kinds else MISSING


def words_of(cls: Any, title: str) -> tuple[JSONObject, Docstring]:
    """Title and description of a class, and its docstring taken apart."""
    text: str | None = cls.__dict__.get("__doc__")
    if text is not None and text.startswith(f"{cls.__name__}("):
        text = None  # written by the machine: the signature, not a description
    docstring = parse_docstring(text)
    words: JSONObject = {"title": title}
    if docstring.description:
        words["description"] = docstring.description
    return words, docstring


def title_of(annotation: Any) -> str:
    """A class by its name, a generic one with its arguments."""
    origin = get_origin(annotation)
    if origin is None:
        return str(getattr(annotation, "__name__", annotation))
    arguments = ", ".join(map(title_of, annotation.__args__))
    return f"{title_of(origin)}[{arguments}]"


class _Source:
    """A class while it is read."""

    def __init__(self, annotation: Any, read: Read) -> None:
        self.cls = origin_of(annotation)
        self.hints = hints_of(annotation)
        self.words, self._docstring = words_of(self.cls, title_of(annotation))
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
    ) -> Field:
        """The field `name`, with what the class says of it."""
        shape = self._read(self.hints.get(name, Any))
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
    source = _Source(annotation, read)
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
    source = _Source(annotation, read)
    parameters = inspect.signature(source.cls).parameters
    fields: list[Field] = []
    for each in source.cls.__attrs_attrs__:
        # The attribute's own marker for "no default" cannot be named without importing attrs.
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
            )
        )
    return Record(fields=tuple(fields), construct=source.cls, words=source.words)


def _typed_dict(annotation: Any, read: Read) -> Record:
    source = _Source(annotation, read)
    fields = tuple(
        source.field(name, required=_is_required(source.cls, name, hint))
        for name, hint in source.hints.items()
    )
    return Record(fields=fields, construct=None, words=source.words)


def _is_required(cls: Any, name: str, hint: Any) -> bool:
    """Whether a key must be there; with postponed annotations the class does not know it."""
    while (origin := get_origin(hint)) is not None:
        if origin is Required or origin is NotRequired:
            return origin is Required
        if origin is not Annotated:
            break
        hint = hint.__origin__
    return name in cls.__required_keys__


def _named_tuple(annotation: Any, read: Read) -> Record:
    source = _Source(annotation, read)
    defaults: JSONObject = source.cls._field_defaults
    fields = tuple(
        source.field(name, required=name not in defaults, default=defaults.get(name, MISSING))
        for name in source.cls._fields
    )
    return Record(fields=fields, construct=source.cls, layout="array", words=source.words)


def _struct(annotation: Any, read: Read) -> Record:
    source = _Source(annotation, read)
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
