"""Bounding the regular expressions of a document before they are compiled.

Each `pattern` gets a `maxLength` beside it, each `patternProperties` a cap on the names of its object, so that
the bound costs nothing more at run time than any other keyword. See `patterns` for the bounds.
"""

from typing import Any, NamedTuple

from operations._json import to_json
from operations.errors import SchemaError
from operations.schema.kinds import is_array, is_object
from operations.schema.limits import MAX_SCHEMA_DEPTH
from operations.schema.patterns import is_linear, longest_text
from operations.schema.references import Document
from operations.types import JSONObject, JSONSchema


class Tamed(NamedTuple):
    """A document whose patterns are safe to run."""

    root: JSONSchema

    fancy: bool
    """Whether some pattern needs the back-tracking engine."""

    dropped: list[str]
    """The patterns left out because no engine runs them safely, with their places."""


def tame_patterns(document: Document, *, drop: bool) -> Tamed:
    """`document` with every regular expression bounded; it is itself not altered.

    Args:
        document: What to read.
        drop: Leave out what cannot be used, instead of raising.

    Raises:
        SchemaError: If a pattern cannot be used and `drop` is false.
    """
    places = [
        site.pointer
        for site in document.sites
        if isinstance(site.schema, dict)
        and ("pattern" in site.schema or "patternProperties" in site.schema)
    ]
    if not places:
        return Tamed(document.root.schema, fancy=False, dropped=[])
    tamer = _Tamer(drop)
    root = to_json(document.root.schema, MAX_SCHEMA_DEPTH)
    for place in places:
        tamer.tame(_find(root, place), place)
    return Tamed(root, tamer.fancy, tamer.dropped)


def _find(root: Any, place: str) -> Any:
    for token in place.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        root = root[int(name)] if is_array(root) else root[name]
    return root


class _Tamer:
    """Alters schemas of its own copy, and notes what it met."""

    def __init__(self, drop: bool) -> None:
        self.drop = drop
        self.fancy = False
        self.dropped: list[str] = []

    def tame(self, schema: JSONObject, place: str) -> None:
        """Bound the patterns of one schema."""
        pattern, named = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str):
            cap = self._cap(pattern, place + "/pattern")
            if cap is None:
                del schema["pattern"]
            else:
                _lower(schema, cap)
        if is_object(named):
            self._tame_names(schema, named, place + "/patternProperties")

    def _tame_names(self, schema: JSONObject, named: JSONObject, place: str) -> None:
        caps: list[int] = []
        for pattern in list(named):
            cap = self._cap(pattern, place)
            if cap is None:
                del named[pattern]
            else:
                caps.append(cap)
        if caps:
            names: JSONObject = {"maxLength": min(caps)}
            others = schema.get("propertyNames", True)
            schema["propertyNames"] = names if others is True else {"allOf": [names, others]}

    def _cap(self, pattern: str, place: str) -> int | None:
        """How long a text may be that meets `pattern`; None once it is dropped."""
        cap = longest_text(pattern)
        if cap is None:
            shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
            if not self.drop:
                raise SchemaError(f"{place}: {shown!r} is no pattern that can be run safely")
            self.dropped.append(f"{place}: {shown}")
        elif not is_linear(pattern):
            self.fancy = True
        return cap


def _lower(schema: JSONObject, cap: int) -> None:
    limit = schema.get("maxLength", cap)
    if isinstance(limit, (int, float)):
        schema["maxLength"] = min(limit, cap)
