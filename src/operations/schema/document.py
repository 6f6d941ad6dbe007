"""`Schema`: a JSON Schema document with its check, its errors and its cast, compiled when first needed.

Rule 1: creating a `Schema` is cheap, because importers create thousands and use few of them.
Rule 2: a third-party document that cannot be compiled is treated as an empty schema, with one warning.
Rule 3: equal documents are compiled once. What is compiled lives as long as a schema uses it.
"""

import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

from msgspec.json import encode

from operations.base.errors import ErrorCode, SchemaError
from operations.base.json.values import (
    MAX_DOCUMENT_DEPTH,
    JSONValueError,
    as_json,
    canonical,
    count_values,
    object_of,
)
from operations.base.text import printable
from operations.base.types import JSONObject, JSONSchema
from operations.base.work import PIECE, BudgetSpentError, Explanation, InlineWork, Work
from operations.schema.casting import (
    MAX_MISMATCHES,
    NOT_NORMALISED,
    CastPolicy,
    Casts,
    Normalise,
    within_budget,
)
from operations.schema.casting.changes import CastResult, Change, Changes
from operations.schema.checking import Checker, SharedDefinitions
from operations.schema.compiling import MAX_SCHEMA_VALUES, ExplosionError
from operations.schema.dividing import fits, size_of
from operations.schema.explain import ValidationIssue, explain, mismatch_error
from operations.schema.members import place_of
from operations.schema.plans import Plan
from operations.schema.references import is_annotation

_logger = logging.getLogger("operations")

NOT_EXPLAINED = "was not examined further: budget"
"""The message of the last issue of a value whose explanation needs too much work."""

_LONG_DOCUMENT = 10_000
"""The bytes of a third party's document that is not compiled in the event loop."""


class CompiledSchema:
    """A compiled schema: its check, its errors and its casts.

    Args:
        root: The document.
        drop_patterns: Remove patterns that cannot be run safely, instead of raising an error.
        shared: Shared definitions to use; the document's own definitions are added to them.

    Attributes:
        check: The validators of the document.

    Raises:
        SchemaError: If the document is not a JSON Schema or exceeds a limit; the message names the location.
    """

    def __init__(
        self,
        root: JSONSchema,
        *,
        drop_patterns: bool = False,
        shared: SharedDefinitions | None = None,
    ) -> None:
        self.check = Checker(root, drop_patterns=drop_patterns, shared=shared)
        self._casts = Casts(self.check)

    @property
    def accepts_all(self) -> bool:
        """Whether the document is `true`, which also replaces a document that cannot be compiled."""
        return self.check.document.root.schema is True

    @property
    def certain(self) -> frozenset[type]:
        """The types all of whose values are valid, so that they need neither a check nor a cast."""
        return self._casts.certain

    @property
    def flat(self) -> Callable[[bytes], JSONObject] | None:
        """Decodes a valid object of scalars from MessagePack, without undeclared properties; None for other schemas.

        Raises `REFUSALS` for any other value, and for some valid objects, such as one with 1.0 as an integer.
        """
        return self._casts.flat

    @property
    def plan(self) -> Plan:
        """The merged requirements of the whole document."""
        return self._casts.plan

    @property
    def check_text(self) -> Callable[[bytes], Any] | None:
        """Raises `REFUSALS` unless a JSON text is valid and needs no change under any policy; see `Schema`."""
        return self._casts.check_text

    def normaliser(self, policy: CastPolicy) -> Normalise:
        """Return the cast under `policy`, which is created once."""
        return self._casts.normaliser(policy).normalise

    def fits(self, value: Any, work: Work) -> bool:
        """Return whether a JSON value is valid.

        Raises:
            BudgetSpentError: If the budget does not suffice.
        """
        return fits(self.plan, value, work)

    def accepts_input(self, value: Any, work: Work | None = None, size: int | None = None) -> bool:
        """Return whether a JSON value is valid.

        Args:
            value: The value.
            work: The budget; by default that of the event loop.
            size: Its size as of `size_of`, if it is known.

        Raises:
            BudgetSpentError: If the budget does not suffice.
        """
        cost = (size_of(value) if size is None else size) * self._weight
        if cost > PIECE:
            return self.fits(value, work or InlineWork())
        if work is not None:
            work.spend(cost)
        return self.check.accepts(value)

    @cached_property
    def _weight(self) -> int:
        return self.plan.weight

    def mismatches(self, value: Any, work: Work) -> list[Change]:
        """Return the mismatches of a JSON value, one entry per location.

        Raises:
            BudgetSpentError: If the budget does not suffice.
        """
        planner = self._casts.planner
        issues = explain(planner, self.check.document.root, value, work, MAX_MISMATCHES)
        return Changes(place_of(planner, [self.plan]), work).add_mismatches(issues, value).listed()

    def errors(self, value: Any, work: Work | None = None) -> list[ValidationIssue]:
        """Return the failures of `value`; empty if it is valid. Never raises.

        If the budget is spent, the last one tells that it was.
        """
        work = work or Explanation()
        found: list[ValidationIssue] = []
        try:
            value = as_json(value)
            if self.fits(value, work):
                return []
            explain(self._casts.planner, self.check.document.root, value, work, into=found)
        except JSONValueError as error:
            return [ValidationIssue(error.path, error.reason, "json")]
        except BudgetSpentError:
            found.append(ValidationIssue("", NOT_EXPLAINED, "budget"))
        return found


class Schema:
    """A JSON Schema 2020-12 document with compiled check, errors and cast.

    A document that names an older draft in `$schema` is interpreted as that draft.

    Args:
        document: The schema, or a function that returns it, which is called once when first needed. The document must
            not be modified afterwards.
        lenient: Whether a document that cannot be compiled accepts any value, with one warning on the logger
            `operations`, instead of raising `SchemaError` when first used.
        shared: Compiles the definitions of many documents once. These documents have the same objects under the same
            names in `$defs`.
    """

    __slots__ = ("_compiled", "_document", "_is_cast", "_lenient", "_shared")

    # Set when first needed: importers create tens of thousands of schemas.
    _is_cast: bool

    def __init__(
        self,
        document: JSONSchema | Callable[[], JSONSchema],
        *,
        lenient: bool = False,
        shared: SharedDefinitions | None = None,
    ) -> None:
        self._document = document
        self._shared = shared
        self._lenient = lenient
        self._compiled: CompiledSchema | None = None

    def __reduce__(self) -> tuple[Callable[..., "Schema"], tuple[JSONSchema, bool]]:
        """Pickle the document; what was compiled from it is compiled again."""
        return _unpickled, (self.document, self._lenient)

    @property
    def document(self) -> JSONSchema:
        """The document as it was given.

        Raises:
            SchemaError: If it is built when first needed, and cannot be built or is not JSON.
        """
        # Read once: another thread may build it at the same time.
        document = self._document
        if callable(document):
            document = self._document = self._build(document)
        return document

    def _build(self, build: Callable[[], JSONSchema]) -> JSONSchema:
        if self._lenient:
            # Importers build JSON only.
            return build()
        try:
            document: JSONSchema = as_json(build(), MAX_DOCUMENT_DEPTH)
        except SchemaError:
            raise
        except JSONValueError as error:
            raise SchemaError(f"the schema is not JSON: {error}") from error
        except Exception as error:
            unusable = SchemaError(f"the schema cannot be built: {type(error).__name__}")
            # Callers see the message, but not the notes: the text of an unexpected error may contain secrets.
            unusable.add_note(str(error))
            raise unusable from error
        return document

    def enforce_document(self) -> None:
        """Raise an error if the application's document cannot be built. A third party's document is not built.

        Raises:
            SchemaError: As `document`.
        """
        if not self._lenient:
            _ = self.document

    @property
    def own(self) -> JSONSchema | None:
        """The document that the application gave; None if it is a third party's, or is built when first needed."""
        return None if self._lenient or callable(self._document) else self._document

    @property
    def is_empty(self) -> bool:
        """Whether the schema has no keyword that restricts values. Compiles nothing."""
        document = self.document
        if isinstance(document, bool):
            return document
        return all(map(is_annotation, document))

    @property
    def is_binary(self) -> bool:
        """Whether values are bytes, as base64."""
        return object_of(self.document).get("contentEncoding") == "base64"

    @property
    def is_unknown(self) -> bool:
        """Whether the schema does not restrict values, or cannot be compiled and is lenient.

        Raises:
            SchemaError: If it cannot be compiled and is not lenient.
        """
        if isinstance(self.document, bool) or self.is_empty:
            return self.is_empty
        return self.compile().accepts_all

    @property
    def casts_slowly(self) -> bool:
        """Whether the next cast may be slow and should run in a thread, after `begin_casts`."""
        return self._shared is not None and not hasattr(self, "_is_cast")

    def begin_casts(self) -> None:
        """Note the first cast, which creates the plans of all definitions that the data reaches."""
        self._is_cast = True

    @property
    def check_text(self) -> Callable[[bytes], Any] | None:
        """Raises `REFUSALS` unless a JSON text is valid and needs no change under any policy.

        None before the first cast, and for schemas without an exact type.
        """
        return None if self._compiled is None else self._compiled.check_text

    @property
    def compiles_slowly(self) -> bool:
        """Whether compiling may be slow and should run in a thread."""
        return self._compiled is None and (
            self._shared is not None or (self._lenient and size_of(self.document) > _LONG_DOCUMENT)
        )

    def compile(self) -> CompiledSchema:
        """Return the compiled schema, which is created once.

        Raises:
            SchemaError: If the document is not a JSON Schema or exceeds a limit; the message names the location.
        """
        compiled = self._compiled
        if compiled is None:
            try:
                compiled = self._compile()
            except RecursionError:
                raise SchemaError("the schema nests too deeply to be compiled") from None
            self._compiled = compiled
        return compiled

    def _compile(self) -> CompiledSchema:
        if not self._lenient:
            return _compiled(self.document)
        try:
            compiled = self._sharing() or _compiled(self.document, drop_patterns=True)
        except SchemaError as error:
            _logger.warning(
                "A schema cannot be used and accepts any value instead: %s", printable(str(error))
            )
            compiled = CompiledSchema(True)
        if compiled.check.dropped:
            _logger.warning(
                "Patterns that cannot be run safely are not checked: %s",
                printable("; ".join(compiled.check.dropped)),
            )
        return compiled

    @property
    def is_compiled(self) -> bool:
        """Whether the schema is compiled already."""
        return self._compiled is not None

    def forget(self) -> None:
        """Release what was compiled, until it is needed again.

        Not for schemas that share definitions, which are compiled once, or whose compilation logged a warning.
        """
        compiled = self._compiled
        if (
            compiled is not None
            and self._shared is None
            and not compiled.check.dropped
            and not compiled.accepts_all
        ):
            self._compiled = None

    def _sharing(self) -> CompiledSchema | None:
        """Return the schema compiled with shared definitions; None if it has none or cannot share them."""
        document = self.document
        if self._shared is None or isinstance(document, bool) or not document.get("$defs"):
            return None
        try:
            return CompiledSchema(document, drop_patterns=True, shared=self._shared)
        except ExplosionError:
            # Alone it would be rejected as well, after the same work.
            raise
        except SchemaError:
            return None

    def check(self, value: Any) -> bool:
        """Return whether `value` is JSON and valid. Does not raise errors for invalid values.

        Raises:
            SchemaError: If the schema itself cannot be compiled.
        """
        compiled = self.compile()
        try:
            return compiled.check.is_valid(value)
        except Exception:  # noqa: BLE001 - the value's own methods may raise anything
            return False

    def errors(self, value: Any) -> list[ValidationIssue]:
        """Return every failure of `value`, with its place; empty when it is valid.

        Raises:
            SchemaError: If the schema itself cannot be compiled.
        """
        return self.compile().errors(value)

    def cast(self, value: Any, policy: CastPolicy = "cast") -> CastResult:
        """Return `value` normalised under `policy`, and the changes. Never modifies `value`.

        A value that cannot be converted to JSON, or that needs more work than its budget, is returned unchanged.

        Raises:
            SchemaError: If the schema itself cannot be compiled.
        """
        normalise = self.compile().normaliser(policy)
        try:
            result, changes = within_budget(normalise, value, Work())
        except BudgetSpentError:
            return CastResult(value, [Change("", "mismatch", 1, NOT_NORMALISED)])
        except JSONValueError:
            return CastResult(value, [])
        return CastResult(result, changes or [])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        return self is other or canonical(self.document) == canonical(other.document)

    def __hash__(self) -> int:
        return hash(canonical(self.document))

    def __repr__(self) -> str:
        if callable(self._document):
            return "Schema(...)"
        text = repr(self._document)
        return f"Schema({text if len(text) <= 60 else text[:57] + '...'})"


_in_use: WeakValueDictionary[tuple[bool, bytes], CompiledSchema] = WeakValueDictionary()
"""The compiled documents that are in use, by a digest of their text: the order of properties matters for results."""


def _compiled(document: JSONSchema, *, drop_patterns: bool = False) -> CompiledSchema:
    if count_values(document, MAX_SCHEMA_VALUES) > MAX_SCHEMA_VALUES:
        # Too large to compile, or it contains itself.
        return CompiledSchema(document, drop_patterns=drop_patterns)
    try:
        text = encode(as_json(document, MAX_DOCUMENT_DEPTH))
    except Exception:  # noqa: BLE001 - compiling it raises the error that explains what is wrong
        return CompiledSchema(document, drop_patterns=drop_patterns)
    key = drop_patterns, blake2b(text, digest_size=16).digest()
    compiled = _in_use.get(key)
    if compiled is None:
        compiled = _in_use[key] = CompiledSchema(document, drop_patterns=drop_patterns)
    return compiled


def _unpickled(document: JSONSchema, lenient: bool) -> Schema:
    return Schema(document, lenient=lenient)


def from_schema(document: JSONSchema, *, lenient: bool = False) -> Schema:
    """Return a `Schema` from a JSON Schema document; see `Schema` for `lenient`."""
    return Schema(document, lenient=lenient)


def collect_errors(schema: Schema | JSONSchema, value: Any) -> list[ValidationIssue]:
    """Return every failure of `value`, with its place; empty when it is valid.

    Raises:
        SchemaError: If the schema cannot be compiled.
    """
    return _schema(schema).errors(value)


def validate_or_raise(schema: Schema | JSONSchema, value: Any, *, subject: str = "value") -> None:
    """Raise an error unless a value is valid.

    Args:
        schema: The schema.
        value: Any Python value.
        subject: The name of the value in the message.

    Raises:
        CallError: With code `VALIDATION_ERROR`; its details name every failing path.
        SchemaError: If the schema cannot be compiled.
    """
    issues = _schema(schema).errors(value)
    if not issues:
        return
    raise mismatch_error(ErrorCode.VALIDATION_ERROR, f"Invalid {subject}", issues)


def format_value_errors(errors: Iterable[ValidationIssue], indent: str = "  ") -> str:
    """Return one line per failure, for logs. Control characters in names are escaped."""
    lines = (
        f"{indent}{printable(issue.path) or '(the value)'} {printable(issue.message)}"
        for issue in errors
    )
    return "\n".join(lines)


def assert_is_schema(document: Any) -> None:
    """Raise an error unless `document` is a `Schema`, or a JSON Schema that this package can use.

    Raises:
        SchemaError: With the location of the error.
    """
    Checker(document.document if isinstance(document, Schema) else document)


def _schema(schema: Schema | JSONSchema) -> Schema:
    return schema if isinstance(schema, Schema) else Schema(schema)
