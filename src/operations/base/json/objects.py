"""Convert objects to JSON in C if the result is the same as that of `to_json`.

Rule 1: each class is examined once. It qualifies if msgspec, or the serializer of a pydantic model, gives exactly the
        result of `to_json`. Attrs classes do not qualify, because msgspec omits their private attributes; nor do
        pydantic dataclasses, because msgspec ignores their serializers.
Rule 2: the result is checked afterwards, because NaN, lone surrogates and deep nesting pass.
"""

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import msgspec

from operations.base.json.values import JSON_TYPES, count_values, is_list, lift
from operations.base.work import CONVERTED, INLINE, InlineWork, Work

_MAX_CLASSES = 10_000
"""How many classes are cached."""

_TOGETHER = 200
"""The number of objects in a list that are converted together."""

_exact: dict[type, bool] = {}


pack_objects = msgspec.msgpack.Encoder(enc_hook=lift).encode
"""Encode dataclasses and structs that `holds_objects` accepts as MessagePack, which distinguishes bytes and aware
datetimes from text."""


def holds_objects(value: Any) -> bool:
    """Return whether `value` is an object, or a list of objects, that can be converted in C."""
    kind: type = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is list:
        if not value or type(value[0]) in JSON_TYPES:
            return False
        return all(map(_is_exact, set(map(type, value))))
    return kind not in JSON_TYPES and _is_exact(kind)


def holds_models(value: Any) -> bool:
    """Return whether `value` is an instance of a pydantic type, or a list that begins with one."""
    kind: Any = type(value[0] if is_list(value) else value)  # pyright: ignore[reportUnknownVariableType]
    return hasattr(kind, "__pydantic_serializer__")


def without_objects(value: Any, work: Work | None = None) -> Any:
    """Return an object, or a list of objects, as new builtins if possible, and any other value unchanged.

    Args:
        value: The value.
        work: The budget for a long list; by default that of the event loop.

    Raises:
        BudgetSpentError: If the budget does not suffice.
    """
    if not holds_objects(value):
        return value
    if not is_list(value) or len(value) <= _TOGETHER:
        return _converted(value)
    work = work or InlineWork()
    result: list[Any] = []
    for start in range(0, len(value), _TOGETHER):
        several = value[start : start + _TOGETHER]
        converted = _converted(several)
        # Known afterwards only, because the objects may contain any number of others.
        work.spend(count_values(converted, INLINE) * CONVERTED)
        result += converted
    return result


def _converted(value: Any) -> Any:
    try:
        dumped = _dumped_models(value)
        return msgspec.to_builtins(value, enc_hook=lift) if dumped is None else dumped
    except Exception:  # noqa: BLE001 - serializers of models are code and may raise anything
        # `to_json` raises an error with the path, and without the text of the exception.
        return value


def _dumped_models(value: Any) -> Any:
    """Return a pydantic model, or a list of instances of one, as fresh JSON; None for other values."""
    if not holds_models(value):
        return None
    if not is_list(value):
        return value.__pydantic_serializer__.to_python(value, mode="json", by_alias=True)
    cls: Any = type(value[0])  # pyright: ignore[reportUnknownVariableType]
    # A type of pydantic that is not a model, such as a secret, has a serializer only.
    if len(set(map(type, value))) > 1 or not hasattr(cls, "__pydantic_core_schema__"):
        return None
    return _list_serializer(cls).to_python(value, mode="json", by_alias=True)


@lru_cache(_MAX_CLASSES)
def _list_serializer(cls: Any) -> Any:
    """Return the serializer of a list of models: one call for the list takes half the time of one call per model."""
    schema = cls.__pydantic_core_schema__
    if schema["type"] == "definitions":
        items = {"type": "list", "items_schema": schema["schema"]}
        schema = {**schema, "schema": items}
    else:
        schema = {"type": "list", "items_schema": schema}
    return type(cls.__pydantic_serializer__)(schema)


def forget_classes() -> None:
    """Let go of the classes that were examined: those of modules that were imported again are not used any more."""
    _exact.clear()
    _list_serializer.cache_clear()


def _is_exact(cls: type) -> bool:
    known = _exact.get(cls)
    if known is None:
        if len(_exact) >= _MAX_CLASSES:
            _exact.clear()
        _exact[cls] = True  # while it is being examined: a class may contain itself
        known = _exact[cls] = _examine(cls)
    return known


def _examine(cls: type) -> bool:
    """Return whether msgspec converts instances, and the types that their annotations name, as `to_json` does."""
    if hasattr(cls, "__pydantic_serializer__"):
        # A pydantic model converts itself and its contents.
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
