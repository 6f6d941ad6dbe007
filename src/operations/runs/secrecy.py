"""The places of secrets in results and errors, stored beside them.

A process that lists runs may not know their operations.

{"data": ..., "meta": ..., "secrets": ["/token"]}
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from operations.base.errors import CallError
from operations.base.json.secrets import marks_secrets, masked, secret_places
from operations.base.json.values import object_of
from operations.base.types import JSONObject
from operations.contract.specs import Operation

_KEY: Final = "secrets"


def result_places(operation: Operation, data: Any, *, is_page: bool = False) -> tuple[str, ...]:
    """Return the places of secrets in a result, or in the first page of one."""
    schema = operation.result_schema or operation.spec.output_schema
    if is_page:
        return ("/value",) if marks_secrets(schema.document) else ()
    return secret_places(schema.document, data)


def error_places(operation: Operation | None, error: CallError) -> tuple[str, ...]:
    """Return the places of secrets in the details of an error."""
    if operation is None or error.details is None:
        return ()
    declared = [each for each in operation.spec.error_schemas if each.code == error.code]
    return tuple(
        place for each in declared for place in secret_places(each.schema.document, error.details)
    )


def with_places(data: bytes, places: Sequence[str]) -> bytes:
    """Return an envelope as it is stored, with the places of its secrets."""
    return (
        b'%s,"%s":%s}' % (data[:-1], _KEY.encode(), msgspec.json.encode(places)) if places else data
    )


def error_with_places(wire: JSONObject, places: Sequence[str]) -> JSONObject:
    """Return an error as it is stored, with the places of its secrets."""
    return {**wire, _KEY: list(places)} if places else wire


def taken_places(wire: Any) -> tuple[str, ...]:
    """Remove the places of secrets from a stored envelope or error, and return them."""
    return tuple(object_of(wire).pop(_KEY, ()))


def masked_error(wire: JSONObject) -> JSONObject:
    """Return a stored error with masked secrets."""
    places = taken_places(wire)
    return {**wire, "details": masked(wire.get("details"), places)} if places else wire
