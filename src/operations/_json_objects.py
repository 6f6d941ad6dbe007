"""Convert dataclasses, structs and pydantic models to JSON builtins in C, if that gives the same as `to_json`.

Rule 1: a class is examined once. It qualifies if msgspec, or the instance's own attributes, give exactly what `to_json`
        gives: not attrs classes, whose private attributes it leaves out, nor pydantic dataclasses, whose serializers it
        does not know.
Rule 2: the result still has to be checked: NaN, lone surrogates and deep nesting pass.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast, get_args, get_type_hints

import msgspec

from operations._json import is_object, lift, object_of

_PLAIN_NODES = frozenset({
    "bool", "date", "decimal", "default", "dict", "enum", "float", "int", "list", "literal",
    "model-field", "model-fields", "none", "nullable", "str", "union", "uuid",
})  # fmt: skip
"""The nodes of a pydantic core schema whose values have the JSON form of `to_json`. Not models: a model writes the
declared fields of a model in it, also if that is an instance of a subclass with more of them."""

_CUSTOM = frozenset({
    "computed_fields", "root_model", "serialization", "serialization_alias", "serialization_exclude",
})  # fmt: skip
"""Keywords of a core schema that change the JSON form of a model."""

_JSON_TYPES = frozenset({dict, list, str, int, float, bool, type(None)})

_MAX_CLASSES = 10_000
"""How many classes are remembered."""

_exact: dict[type, bool] = {}
_plain_models: dict[type, bool] = {}
_list_serializers: dict[type, Any] = {}


def holds_objects(value: Any) -> bool:
    """Return whether `value` is an object, or a list of objects, that can be converted here."""
    kind: type = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is list:
        if not value or type(value[0]) in _JSON_TYPES:
            return False
        return all(map(_is_exact, set(map(type, value))))
    return kind not in _JSON_TYPES and _is_exact(kind)


def without_objects(value: Any) -> Any:
    """Return an object, or a list of objects, as builtins if possible, and any other value unchanged."""
    if not holds_objects(value):
        return value
    try:
        return msgspec.to_builtins(value, enc_hook=_form_of)
    except (TypeError, ValueError, RecursionError):
        # `to_json` raises an error with the reason.
        return value


def dumped_models(value: Any) -> Any:
    """Return a model that converts itself, or a list of its instances, as fresh JSON; None for other values."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    cls: Any = type(cast("list[Any]", value)[0]) if kind is list else kind  # pyright: ignore[reportUnknownVariableType]
    if not hasattr(cls, "__pydantic_serializer__") or _reads_attributes(cls):
        return None
    if kind is not list:
        return cls.__pydantic_serializer__.to_python(value, mode="json", by_alias=True)
    if len(set(map(type, value))) > 1:
        return None
    return _list_serializer(cls).to_python(value, mode="json", by_alias=True)


def _list_serializer(cls: Any) -> Any:
    """Return the serializer of a list of models: one call for all of them takes half the time of one for each."""
    found = _list_serializers.get(cls)
    if found is None:
        schema = cls.__pydantic_core_schema__
        if schema["type"] == "definitions":
            items = {"type": "list", "items_schema": schema["schema"]}
            schema = {**schema, "schema": items}
        else:
            schema = {"type": "list", "items_schema": schema}
        found = type(cls.__pydantic_serializer__)(schema)
        _remember(_list_serializers, cls, found)
    return found


def _form_of(value: Any) -> Any:
    """Return the JSON form of an object that msgspec does not know; its parts may need conversion."""
    cls: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if _plain_models.get(cls) or _reads_attributes(cls):
        return value.__dict__
    if not hasattr(cls, "__pydantic_serializer__"):
        return lift(value)
    return cls.__pydantic_serializer__.to_python(value, mode="json", by_alias=True)


def _reads_attributes(cls: type) -> bool:
    known = _plain_models.get(cls)
    if known is None:
        known = _is_plain_model(getattr(cls, "__pydantic_core_schema__", None))
        _remember(_plain_models, cls, known)
    return known


pack_objects = msgspec.msgpack.Encoder(enc_hook=_form_of).encode
"""Encode what `holds_objects` as MessagePack, in which bytes and aware datetimes are not text."""


def _remember(known: dict[type, Any], cls: type, verdict: Any) -> None:
    if len(known) >= _MAX_CLASSES:
        known.clear()
    known[cls] = verdict


def _is_exact(cls: type) -> bool:
    known = _exact.get(cls)
    if known is None:
        _remember(_exact, cls, True)  # while under way: a class may contain itself
        known = _examine(cls)
        _remember(_exact, cls, known)
    return known


def _examine(cls: type) -> bool:
    """Return whether msgspec converts instances, and what their annotations name, as `to_json` does."""
    if hasattr(cls, "__pydantic_serializer__"):
        # A model converts itself, with everything in it.
        return not dataclasses.is_dataclass(cls)
    if hasattr(cls, "__attrs_attrs__"):
        return False
    if not dataclasses.is_dataclass(cls) and not issubclass(cls, msgspec.Struct):
        return True
    try:
        hints = get_type_hints(cls)
    except Exception:  # noqa: BLE001 - annotations are code and may raise anything
        return False
    return all(_is_exact(part) for hint in hints.values() for part in _classes_in(hint))


def _classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from _classes_in(part)


def _is_plain_model(schema: Any) -> bool:
    """Return whether the attributes of a model with this core schema are its JSON form."""
    if not is_object(schema) or schema.get("type") != "model":
        return False
    config = object_of(schema.get("config"))
    return (
        config.get("extra_fields_behavior") != "allow"
        and not any(name.startswith("ser_json") for name in config)
        and not any(schema.get(keyword) for keyword in _CUSTOM)
        and _is_plain_node(schema.get("schema"))
    )


def _is_plain_node(node: Any) -> bool:
    if isinstance(node, (list, tuple)):
        return all(map(_is_plain_node, cast("list[Any]", node)))
    if not is_object(node):
        return True
    fields = object_of(node.get("fields"))
    return (
        node.get("type") in _PLAIN_NODES
        and not any(node.get(keyword) for keyword in _CUSTOM)
        and all(map(_is_plain_node, fields.values()))
        and all(_is_plain_node(part) for name, part in node.items() if name not in _NOT_NODES)
    )


_NOT_NODES = frozenset({"default", "expected", "fields", "members", "metadata"})
