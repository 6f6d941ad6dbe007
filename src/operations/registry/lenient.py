"""Convert values in the inputs of models that the schema rejects, if the conversion is lossless.

    "[1, 2]" for an array, "{...}" for an object      the value that the text contains, as JSON
    "5" for 5, "true" for true                        the number or boolean
    null for an optional property                     the property is removed

Rule 1: a value is converted only if the schema rejects the original and accepts the result. If a value cannot be
        converted, the whole input is rejected unchanged.
Rule 2: every conversion is a change of kind `input`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any, Final, TypeAlias

import msgspec

from operations.base.json.decoding import decode_json
from operations.base.json.references import steps
from operations.base.json.values import (
    MAX_REQUEST_VALUES,
    JSONValueError,
    is_object,
    kind_of,
    unescape,
)
from operations.base.work import Explanation, Work
from operations.contract.envelopes import ResponseEnvelope, add_changes
from operations.registry.middleware import Envelope
from operations.registry.plan import CallPlan
from operations.schema import CastResult, Change, CompiledSchema
from operations.schema.casting.changes import MAX_PATH
from operations.schema.values import ARTICLES

_ROUNDS: Final = 4
"""How many levels of JSON inside strings are decoded."""

_FIXED: Final = frozenset({
    "additionalProperties", "budget", "dependentRequired", "json", "maxItems", "maxProperties", "minItems",
    "minProperties", "propertyNames", "required", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
"""Keywords whose failures no conversion can fix; in particular, unknown properties are never removed."""

_INDEX: Final = re.compile(r"/\d+(?=/|$)")
_Note: TypeAlias = tuple[str, str]


def convert_input(
    compiled: CompiledSchema, value: Any, whole: Work | None = None
) -> CastResult | None:
    """Convert a rejected input so that it is valid; return None if that is impossible.

    Args:
        compiled: The schema of the input.
        value: The input, plain JSON; it is not modified.
        whole: The work of which this is a part.
    """
    holder: list[Any] = [msgspec.to_builtins(value)]  # a copy
    notes: dict[_Note, Change] = {}
    counts = Counter[_Note]()
    budget = MAX_REQUEST_VALUES
    work = Explanation() if whole is None else whole.explaining()
    for _ in range(_ROUNDS):
        issues = compiled.errors(holder[0], work)
        if not issues:
            changes = [
                msgspec.structs.replace(change, count=counts[note])
                for note, change in notes.items()
            ]
            return CastResult(holder[0], changes)
        converted = set[str]()
        for issue in issues:
            if issue.path in converted:
                # Several keywords may reject the same value, such as `type` and `enum`.
                continue
            converted.add(issue.path)
            place = None if issue.keyword in _FIXED else _place(holder, issue.path)
            if place is None:
                return None
            container, key = place
            text = container[key]
            if isinstance(text, str):
                # An upper bound of the number of values in the text.
                budget -= 1 + sum(map(text.count, ",[{"))
            message = None if budget < 0 else _convert(container, key)
            if message is None:
                return None
            note = (_INDEX.sub("/*", issue.path), message)
            notes.setdefault(note, Change(issue.path[:MAX_PATH], "input", 1, message))
            counts[note] += 1
    return None


def _convert(container: Any, key: Any) -> str | None:
    """Convert a value in its container and describe the change; return None if that is impossible."""
    value = container[key]
    if value is None and is_object(container):
        del container[key]
        return "was null and is omitted"
    found = _read(value) if isinstance(value, str) else None
    if found is None:
        return None
    container[key] = found
    return f"was a string and is read as {ARTICLES[kind_of(found)]}"


def _read(text: str) -> Any:
    """Return the JSON value that a text contains; None if it is not JSON or is a string."""
    try:
        found: Any = decode_json(text, max_values=MAX_REQUEST_VALUES)
    except JSONValueError:
        return None
    if isinstance(found, str):
        return None
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    # A number must have the same text when it is encoded again, so that no digit is lost.
    return None if is_number and msgspec.json.encode(found) != text.encode() else found


def _place(holder: list[Any], path: str) -> tuple[Any, str | int] | None:
    """Return the container and the key of the value at a path."""
    found = steps(holder, f"/0{path}")
    if not found:
        return None
    container = found[-2][1] if len(found) > 1 else holder
    token = found[-1][0].rpartition("/")[2]
    return container, unescape(token) if is_object(container) else int(token)


def noting(plan: CallPlan, changes: Sequence[Change]) -> CallPlan:
    """Return a plan for one call that adds `changes` to its first envelope."""
    noting, finish, waiting = copy(plan), plan.finish, [changes]

    def noted(result: Any, work: Work | None = None) -> Envelope:
        envelope = finish(result, work)
        if not waiting:
            return envelope
        return ResponseEnvelope(envelope.data, add_changes(envelope.meta, waiting.pop()))

    noting.finish = noted
    return noting
