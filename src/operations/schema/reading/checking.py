"""The verdict on a value: jsonschema-rs, bounded, offline, and guarded where it would not look.

Rule 1: formats are annotations. Nothing is fetched. Regular expressions are bounded (`patterns`).
Rule 2: the compiled check is the validator's own bound method wherever that alone is enough.
"""

from collections.abc import Callable
from typing import Any

import jsonschema_rs

from operations._json import pointer
from operations.errors import SchemaError
from operations.schema.guard import guard
from operations.schema.reading.graph import Graph, Verdict
from operations.schema.reading.limits import measured
from operations.schema.reading.patterns import FANCY, LINEAR
from operations.schema.reading.references import Document, Site
from operations.schema.reading.taming import Tamer
from operations.types import JSONObject, JSONSchema

_MAX_MESSAGE = 300


class Checker:
    """Validators for a document and for the schemas inside it.

    Attributes:
        document: A copy of the document as compiled, its patterns bounded.
        verdict: What is known about it before any data comes.
        accepts: Whether a value, already known to be JSON, is valid.
        is_valid: Whether any value is valid; raises ValueError for what is not JSON.
        dropped: Patterns that were left out, with their places.

    Raises:
        SchemaError: Naming the place, if the document is no JSON Schema or beyond a limit.
    """

    __slots__ = (
        "_accepts",
        "_options",
        "_registry",
        "accepts",
        "document",
        "dropped",
        "is_valid",
        "verdict",
    )

    def __init__(self, root: JSONSchema, *, drop_patterns: bool = False) -> None:
        self.document = Document(measured(root))
        tamer = Tamer(drop=drop_patterns)
        tamer.tame(self.document)
        self.dropped = tamer.dropped
        self._options = FANCY if tamer.fancy else LINEAR
        self._registry: jsonschema_rs.Registry | None = None
        self._accepts: dict[tuple[str, ...], Callable[[Any], bool]] = {}
        root_schema = self.document.root.schema
        if not isinstance(root_schema, bool) and self.document.dialect.id_keyword in root_schema:
            # As others see it from here: a relative one would be taken relative to itself.
            root_schema[self.document.dialect.id_keyword] = self.document.uri
        graph = Graph(self.document)
        self.accepts = self._build(self.document.root.schema)
        self.verdict: Verdict = graph.verdict()
        self.is_valid = self.accepts if self.verdict.closed else _guarded(self.accepts)

    def accepts_at(self, sites: tuple[Site, ...]) -> Callable[[Any], bool]:
        """Whether a value, already known to be JSON, is valid for all of `sites`."""
        key = tuple(site.pointer for site in sites)
        found = self._accepts.get(key)
        if found is None:
            targets: list[JSONObject] = [{"$ref": self.document.address(site)} for site in sites]
            found = self._accepts[key] = self._build({"allOf": targets} if targets else True)
        return found

    def _build(self, schema: JSONSchema) -> Callable[[Any], bool]:
        dialect = self.document.dialect
        if self._registry is None and schema is not self.document.root.schema:
            self._registry = jsonschema_rs.Registry(
                [(self.document.uri, self.document.root.schema)], draft=dialect.draft
            )
        try:
            return dialect.validator(
                schema,
                pattern_options=self._options,
                registry=self._registry,
                validate_formats=False,
                offline=True,
            ).is_valid
        except jsonschema_rs.ValidationError as error:
            inner = _innermost(error)
            place = "".join(map(pointer, inner.instance_path)) or "the schema"
            raise SchemaError(f"{place}: {_cut(inner.message)}") from None
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            raise SchemaError(f"the schema cannot be compiled: {_cut(str(error))}") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            # The validator gave up in a way that no `except Exception` sees.
            raise SchemaError("the schema cannot be compiled") from None


def _innermost(error: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """Of what a meta-schema says about alternatives, the failure deepest in the document."""
    alternatives: list[list[jsonschema_rs.ValidationError]] = getattr(error.kind, "context", [])
    inner = [each for alternative in alternatives for each in alternative]
    deepest = max(inner, key=lambda each: len(each.instance_path), default=error)
    if len(deepest.instance_path) <= len(error.instance_path):
        return error
    return _innermost(deepest)


def _cut(message: str) -> str:
    """A message that may repeat what was wrong, however long that was."""
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."


def _guarded(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_valid(value: Any) -> bool:
        guard(value)
        return accepts(value)

    return is_valid
