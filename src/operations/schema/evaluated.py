"""What some schema has already judged, so that `unevaluatedProperties` and `unevaluatedItems` need not."""

from collections.abc import Iterator
from typing import Any

from operations.schema.planning.plans import Planner
from operations.schema.reading.dialects import item_keywords
from operations.schema.reading.patterns import matcher
from operations.schema.reading.references import Site
from operations.types import JSONObject


def evaluated_names(planner: Planner, site: Site, value: JSONObject) -> set[str]:
    """The properties that some schema at `site`, other than `unevaluatedProperties`, has judged."""
    schema = planner.document.keywords(site)
    if "additionalProperties" in schema:
        return set(value)
    names = set(schema.get("properties", ())) & value.keys()
    for pattern in schema.get("patternProperties", ()):
        names.update(filter(matcher(pattern), value))
    for member in _applied(planner, site, value):
        if "unevaluatedProperties" in planner.document.keywords(member):
            return set(value)
        names |= evaluated_names(planner, member, value)
    return names


def evaluated_places(planner: Planner, site: Site, value: list[Any]) -> set[int]:
    """The items that some schema at `site`, other than `unevaluatedItems`, has judged."""
    schema = planner.document.keywords(site)
    first, rest = item_keywords(schema)
    if rest in schema:
        return set(range(len(value)))
    places = set(range(len(schema.get(first, ()))))
    # Up to 2019-09 what is contained did not count as judged.
    if "contains" in schema and first == "prefixItems":
        wanted = planner.plan((planner.document.at(site, "contains"),))
        places.update(index for index, item in enumerate(value) if wanted.accepts(item))
    for member in _applied(planner, site, value):
        if "unevaluatedItems" in planner.document.keywords(member):
            return set(range(len(value)))
        places |= evaluated_places(planner, member, value)
    return places


def _applied(planner: Planner, site: Site, value: Any) -> Iterator[Site]:
    """The schemas that apply to the same value as `site`, and accept it."""
    at, schema = planner.document.at, planner.document.keywords(site)
    candidates = [target for _, target in planner.document.references(site) if target]
    for keyword in ("allOf", "anyOf", "oneOf"):
        candidates += [at(site, keyword, index) for index in range(len(schema.get(keyword, ())))]
    if "if" in schema:
        holds = planner.plan((at(site, "if"),)).accepts(value)
        candidates += [
            at(site, name) for name in ("if", "then" if holds else "else") if name in schema
        ]
    dependents: JSONObject = schema.get("dependentSchemas", {})
    candidates += [at(site, "dependentSchemas", name) for name in dependents if name in value]
    yield from (member for member in candidates if planner.plan((member,)).accepts(value))
