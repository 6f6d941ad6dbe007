"""Unions: one of several shapes, found by the value's type where that tells, else by trying.

Rule 1: the order of the members decides, except that an exact number stays as it is, and of objects the class
    that knows most of the value's properties comes first.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from operations.schema.document import Schema
from operations.schema.python.shapes import (
    ConversionError,
    Converter,
    Definitions,
    Kinds,
    Scalar,
    Shape,
    Unknown,
    document_of,
)
from operations.types import JSONObject


class Either(msgspec.Struct, frozen=True, eq=False):
    """One of several shapes, the first that fits."""

    members: tuple[Shape, ...]

    @property
    def kinds(self) -> Kinds:
        """Those of all members."""
        return frozenset[type]().union(*(member.kinds for member in self.members))

    @property
    def exact(self) -> Kinds:
        """Those that no member would convert."""
        return self.kinds - self._routes().keys()

    def schema(self, definitions: Definitions) -> JSONObject:
        """Any of the members."""
        schemas = [member.schema(definitions) for member in self.members]
        return {} if {} in schemas else {"anyOf": schemas}

    def converter(self) -> Converter | None:
        """By the value's own type, then by trying."""
        routes = self._routes()
        if not routes:
            return None

        def converter(value: Any) -> Any:
            convert = routes.get(type(value))  # pyright: ignore[reportUnknownArgumentType]
            return value if convert is None else convert(value)

        return converter

    def _routes(self) -> dict[type, Converter]:
        """What to do with each kind of JSON value; kinds that stay as they are have no entry."""
        routes: dict[type, Converter] = {}
        for kind in self.kinds:
            members = [member for member in self.members if kind in member.kinds]
            if kind in {int, float}:
                # 1 is an int and 1.0 a float, whichever of the two is named first.
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
    """Whether every value of `kind` belongs to `shape` and stays as it is: nobody after it is asked."""
    is_free = isinstance(shape, Unknown) or (
        isinstance(shape, Scalar) and isinstance(shape.annotation, type)
    )
    return is_free and kind in shape.exact


class _Trial:
    """Finds the member of a union that a value belongs to, where its type alone does not tell."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self._shapes = shapes

    @cached_property
    def _members(self) -> list[tuple[Schema, Converter | None]]:
        # Not before a value comes: a recursive type is not complete while its converters are made.
        return [(Schema(document_of(shape)), shape.converter()) for shape in self._shapes]

    def __call__(self, value: Any) -> Any:
        failure = ConversionError("the value fits no member of the union")
        for schema, convert in self._ranked(value):
            try:
                if schema.check(value):
                    return value if convert is None else convert(value)
            except ConversionError as error:
                failure = error
        raise failure

    def _ranked(self, value: Any) -> list[tuple[Schema, Converter | None]]:
        """In the order written; of objects, first who knows most of the value's properties."""
        if type(value) is not dict:
            return self._members
        known: JSONObject = value  # pyright: ignore[reportUnknownVariableType]
        return sorted(
            self._members, key=lambda member: -len(known.keys() & _properties(member[0]).keys())
        )


def _properties(schema: Schema) -> JSONObject:
    document = schema.document
    return document.get("properties", {}) if isinstance(document, dict) else {}
