"""What several schemas say together: the values, the types and the names that all or any of them mention."""

from typing import Any

import msgspec

from operations._json import is_list
from operations.schema.planning.assertions import identity, type_of
from operations.schema.reading.references import Site
from operations.types import JSONObject

_EVERY_TYPE = ("string", "integer", "number", "boolean", "null", "object", "array")


class Facet(msgspec.Struct, frozen=True, gc=False):
    """The keywords of one of the merged schemas."""

    site: Site
    keywords: JSONObject


def names_in(facets: tuple[Facet, ...], keyword: str) -> list[str]:
    """The property names that any of the schemas mentions under `keyword`."""
    return [name for facet in facets for name in facet.keywords.get(keyword, ())]


def constants_of(facets: tuple[Facet, ...]) -> list[Any] | None:
    """The values that every `const` and `enum` allows."""
    allowed: list[Any] | None = None
    for facet in facets:
        keywords = facet.keywords
        for listed in ([keywords["const"]] if "const" in keywords else None, keywords.get("enum")):
            if is_list(listed):
                before = None if allowed is None else set(map(identity, allowed))
                allowed = [
                    member for member in listed if before is None or identity(member) in before
                ]
    return allowed


def types_of(facets: tuple[Facet, ...], constants: list[Any] | None) -> tuple[str, ...] | None:
    """The types that every `type` allows; an integer is also a number."""
    allowed: tuple[str, ...] | None = None
    for facet in facets:
        named = facet.keywords.get("type")
        if named is not None:
            names = named if is_list(named) else [named]
            allowed = tuple(names) if allowed is None else _both(allowed, names)
    if constants is None:
        return allowed
    seen = list(dict.fromkeys(type_of(constant) for constant in constants))
    return tuple(seen) if allowed is None else _both(allowed, seen)


def _both(first: tuple[str, ...], second: list[str]) -> tuple[str, ...]:
    found = [
        name
        for name in _EVERY_TYPE
        if (name in first or (name == "integer" and "number" in first))
        and (name in second or (name == "integer" and "number" in second))
    ]
    if "number" in found and "integer" in found:
        found.remove("integer")
    order = {name: index for index, name in enumerate(first)}
    return tuple(sorted(found, key=lambda name: order.get(name, order.get("number", 0))))
