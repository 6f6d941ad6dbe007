"""Making a document safe to compile, and making sure that its validator looks at every text.

Each `pattern` gets a `maxLength` beside it, each `patternProperties` a cap on the names of its object, so that
the bound costs nothing more at run time than any other keyword. See `patterns` for the bounds.

A validator that is only told `type: string` does not look into the text, and lets lone surrogates pass. A
pattern that every text matches makes it look, for a fifth of what a look of our own would take.
"""

from operations._json import is_list, is_object
from operations.errors import SchemaError
from operations.schema.reading.patterns import ANY_TEXT, MAX_WEIGHT, is_linear, longest_text, weight
from operations.schema.reading.references import Site
from operations.types import JSONObject


class Tamer:
    """Alters the schemas of a document in place, and notes what it met.

    Args:
        drop: Leave out what cannot be used, instead of raising.

    Attributes:
        fancy: Whether some pattern needs the back-tracking engine.
        dropped: The patterns left out because no engine runs them safely, with their places.
    """

    def __init__(self, *, drop: bool) -> None:
        self._drop = drop
        self._weights: dict[str, int] = {}
        self.fancy = False
        self.dropped: list[str] = []

    def tame(self, sites: list[Site]) -> None:
        """Bound every regular expression of the schemas at `sites`, which must not be shared.

        Raises:
            SchemaError: If a pattern cannot be used and is not to be dropped.
        """
        for site in sites:
            if is_object(site.schema):
                self._tame(site.schema, site.pointer)

    def _tame(self, schema: JSONObject, place: str) -> None:
        pattern, named = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str):
            cap = self._cap(pattern, place + "/pattern")
            if cap is None:
                del schema["pattern"]
            else:
                _lower(schema, cap)
        if is_object(named):
            self._tame_names(schema, named, place + "/patternProperties")
        types = schema.get("type")
        if "pattern" not in schema and (
            types == "string" or (is_list(types) and "string" in types)
        ):
            schema["pattern"] = ANY_TEXT

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
        if cap is not None and pattern not in self._weights:
            self._weights[pattern] = weight(pattern)
            if sum(self._weights.values()) > MAX_WEIGHT:
                del self._weights[pattern]
                cap = None
        if cap is None:
            shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
            if not self._drop:
                raise SchemaError(f"{place}: {shown!r} is no pattern that can be run safely")
            self.dropped.append(f"{place}: {shown}")
        elif not is_linear(pattern):
            self.fancy = True
        return cap


def _lower(schema: JSONObject, cap: int) -> None:
    limit = schema.get("maxLength", cap)
    if isinstance(limit, (int, float)):
        schema["maxLength"] = min(limit, cap)
