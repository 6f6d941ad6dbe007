"""Examine a document: problems for callers, and whether its response examples reach callers unchanged.

Rule: an argument is reported as unsatisfiable only if its schema provably accepts no value.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from operations.base.errors import CallError, DocumentError, SchemaError
from operations.base.json.values import list_of, object_of, text_of
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import Operation, OperationSpec, source_of
from operations.io.http.client import header_key, is_owned
from operations.openapi.reading.document import Description, DocumentOperation, Problem
from operations.openapi.reading.expected import EMPTY
from operations.openapi.reading.media import is_json, is_range, is_stream, is_text
from operations.openapi.reading.model import Model, short_names
from operations.openapi.source.endpoint import Endpoint
from operations.openapi.source.service import OpenAPIService
from operations.registry.registry import OperationRegistry
from operations.schema import Schema
from operations.schema.plans import Plan

_TEXT = {"type": "string"}

_SENT = frozenset({"accept", "content-type"})
"""Headers that every request has, even if the document does not require them."""

_MAX_DEPTH = 12
_BOUNDS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example of a response."""

    entry: DocumentOperation
    status: int
    media_type: str
    value: Any
    schema: Any


def examples_of(
    description: Description, entries: Iterable[DocumentOperation]
) -> Iterator[Example]:
    """Yield the examples of all responses that are JSON or text."""
    follow = description.references.object_at
    for entry in entries:
        for status, node in object_of(entry.operation.get("responses")).items():
            for media_type, schema, holder in _media(description, entry, follow(node)):
                for value in map(_meant, _values(description, schema, holder)):
                    sent_type = _sent_type(media_type, value)
                    if sent_type is not None:
                        yield Example(
                            entry=entry,
                            status=_status(str(status)),
                            media_type=sent_type,
                            value=value,
                            schema=schema if is_json(sent_type) else _TEXT,
                        )


def _sent_type(media_type: str, value: Any) -> str | None:
    """Return the media type in which an example can be sent as one response; None if there is none."""
    if is_range(media_type):
        media_type = "text/plain" if isinstance(value, str) else "application/json"
    is_sendable = is_text(media_type) and isinstance(value, str) and not is_stream(media_type)
    return media_type if is_json(media_type) or is_sendable else None


def _media(
    description: Description, entry: DocumentOperation, response: Any
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the media type, the schema, and the object with the examples."""
    if not description.is_swagger:
        for media_type, media in description.references.object_at(response.get("content")).items():
            node = description.references.object_at(media)
            yield media_type, node.get("schema", True), node
        return
    schema = response.get("schema", True)
    for media_type, value in object_of(response.get("examples")).items():
        yield media_type, schema, {"example": value}
    produces = entry.operation.get("produces", description.document.get("produces"))
    kinds = filter(None, map(text_of, list_of(produces)))
    yield next(kinds, "application/json"), schema, {}


def _values(description: Description, schema: Any, holder: dict[str, Any]) -> Iterator[Any]:
    if "example" in holder:
        yield holder["example"]
    for node in description.references.object_at(holder.get("examples")).values():
        example = description.references.object_at(node)
        if "value" in example:
            yield example["value"]
    own = description.schemas.definitions.resolve(schema)
    if "example" in own:
        yield own["example"]


def _status(text: str) -> int:
    digits = text[:1] + text[1:].upper().replace("X", "0")
    return int(digits) if digits.isdecimal() and len(digits) == 3 else 500


def _meant(value: Any) -> Any:
    """Decode an example that is written as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in {"{", "["}:
        try:
            return msgspec.json.decode(value)
        except (ValueError, msgspec.DecodeError):
            return value
    return value


@dataclass(frozen=True, slots=True)
class ChangedExample:
    """A response example that does not reach the caller unchanged."""

    operation_id: str
    status: int

    changes: dict[str, int]
    """The number of reported changes by kind; `rejected` if the caller receives an error."""


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """The findings in a document; operations by id."""

    unsatisfiable: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Required arguments that no value satisfies."""

    hidden_headers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Required headers that only configuration can set."""

    several_responses: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The statuses of operations with several success statuses."""

    unresolved: list[Problem] = field(default_factory=list[Problem])
    """Unresolved references."""

    problems: list[Problem] = field(default_factory=list[Problem])
    """All other parts that could not be used or were reinterpreted."""

    examples: int = 0
    """Response examples in the document."""

    changed: list[ChangedExample] = field(default_factory=list[ChangedExample])


def shortened(specs: Iterable[OperationSpec]) -> dict[str, str]:
    """Return the names in one namespace that `operation_ids = "short"` would change, and the short names."""
    entries = [
        (spec.name, str(spec.meta["method"]), str(spec.meta["path"]))
        for spec in specs
        if source_of(spec) == "openapi"
    ]
    pairs = zip(entries, short_names(entries), strict=True)
    return {name: short for (name, _, _), short in pairs if short != name}


async def diagnose(service: OpenAPIService) -> Diagnosis:
    """Examine every operation of a service, and process the response examples of its document."""
    found = Diagnosis()
    for problem in service.problems:
        is_reference = "$ref cannot be resolved" in problem.reason
        (found.unresolved if is_reference else found.problems).append(problem)
    by_place: dict[tuple[str, str], tuple[Operation, Endpoint]] = {}
    for operation, endpoint in service.endpoints():
        entry = endpoint.entry
        by_place.setdefault((entry.method, entry.path), (operation, endpoint))
        try:
            if empty := _unsatisfiable(operation.spec.input_schema):
                found.unsatisfiable[operation.spec.id] = empty
            model = service.description.reader.read_model(entry.item, entry.operation)
        except (DocumentError, SchemaError, ValueError) as error:
            found.problems.append(Problem(operation.spec.id, str(error), is_skipped=False))
        else:
            _examine(model, operation.spec.id, found)
    entries = [endpoint.entry for _, endpoint in by_place.values()]
    async with OperationRegistry() as registry:
        for example in examples_of(service.description, entries):
            operation, endpoint = by_place[example.entry.method, example.entry.path]
            changes = await _changes(registry, operation, endpoint, example)
            found.examples += changes is not None
            if changes:
                found.changed.append(
                    ChangedExample(operation.spec.id, example.status, dict(changes))
                )
    return found


def _examine(model: Model, operation_id: str, found: Diagnosis) -> None:
    """Add the required headers that arguments cannot set, and the successful responses if there are several."""
    hidden = [
        parameter.name
        for parameter in model.parameters
        if parameter.place == "header"
        and parameter.required
        and is_owned(parameter.name)
        and header_key(parameter.name) not in _SENT
    ]
    if hidden:
        found.hidden_headers[operation_id] = hidden
    good = [response.status for response in model.responses if response.status[:1] == "2"]
    if len(good) > 1:
        found.several_responses[operation_id] = sorted(good)


async def _changes(
    registry: OperationRegistry, operation: Operation, endpoint: Endpoint, example: Example
) -> Counter[str] | None:
    """Return the changes that normalisation makes to an example; None if it cannot be processed."""
    try:
        is_text = isinstance(example.value, str) and "json" not in example.media_type
        content = example.value.encode() if is_text else msgspec.json.encode(example.value)
    except (TypeError, ValueError):
        return None
    if example.status < 200 or example.status in EMPTY or endpoint.entry.method == "HEAD":
        return None
    if example.status >= 300:
        # The body of an error is returned unchanged.
        return Counter()

    async def respond(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        return endpoint.replay(example.status, example.media_type, content)

    spec = msgspec.structs.replace(operation.spec, input_schema=Schema({}))
    if endpoint.is_stream:
        return None
    registry.register(Operation(spec, respond, blocking=False), replace=True)
    try:
        envelope = await registry.execute(spec.id, {})
    except CallError:
        return Counter({"rejected": 1})
    changes = Counter[str]()
    for change in envelope.meta.changes:
        if change.kind != "mismatch":
            changes[change.kind] += change.count
    return changes


# ------------------------------------------------------------ schemas that accept no value


def _unsatisfiable(schema: Schema) -> list[str]:
    """Return the required properties of an input that no value satisfies."""
    plan, known = schema.compile().plan, dict[Plan, bool]()
    return [name for name in plan.required if _lacks(plan, name, known, 0)]


def accepts_nothing(plan: Plan, known: dict[Plan, bool], depth: int = 0) -> bool:
    """Return whether a plan provably accepts no value.

    Args:
        plan: The plan.
        known: The results so far. Types refer to each other, so that without it the time would grow exponentially.
        depth: The nesting depth below the first plan.
    """
    if plan not in known:
        # A plan that refers to itself counts as one that accepts a value.
        known[plan] = False
        known[plan] = _has_no_value(plan, known, depth)
    return known[plan]


def _has_no_value(plan: Plan, known: dict[Plan, bool], depth: int) -> bool:
    if plan.types == () or any(site.schema is False for site in plan.sites):
        return True
    if depth > _MAX_DEPTH:
        return False
    if plan.constants is not None:
        return not any(map(plan.accepts, plan.constants))
    for low, high in _BOUNDS:
        if max(plan.keyword(low), default=-inf) > min(plan.keyword(high), default=inf):
            return True
    for choice in plan.choices:
        members = map(plan.member, choice.members)
        if choice.members and all(accepts_nothing(member, known, depth + 1) for member in members):
            return True
    if plan.types == ("object",):
        return any(_lacks(plan, name, known, depth) for name in plan.required)
    if plan.types == ("array",) and plan.least_items > 0:
        return plan.most_items == 0 or accepts_nothing(plan.item(0), known, depth + 1)
    return False


def _lacks(plan: Plan, name: str, known: dict[Plan, bool], depth: int) -> bool:
    """Return whether a required property cannot be present."""
    field = plan.fields[name]
    return field.barred or accepts_nothing(plan.part(field.sites), known, depth + 1)
