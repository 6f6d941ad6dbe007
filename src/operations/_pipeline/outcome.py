"""The way out: from what a handler returned to the envelope its caller gets."""

import logging
from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any, TypeAlias, cast

import msgspec

from operations._json import to_json
from operations.envelopes import (
    LocalResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    lift_envelope,
    local_envelope,
)
from operations.errors import CallError, ErrorCode, SchemaError
from operations.schema import CompiledSchema, Repair, Schema, format_value_errors
from operations.specs import OperationSpec, OutputPolicy

logger = logging.getLogger("operations")

Envelope: TypeAlias = ResponseEnvelope[Any]
Finisher: TypeAlias = Callable[[Any], Envelope]

_PLAIN = frozenset({bool, float, int, list, str, type(None)})
"""Types of results that are certainly neither envelopes nor bytes."""


def finisher(spec: OperationSpec, policy: OutputPolicy) -> Finisher:
    """What turns a handler's result into the envelope its caller gets."""
    operation_id = spec.id
    normalise = _normaliser(spec, policy)
    is_known = normalise is not to_json

    def finish(result: Any) -> Envelope:
        if type(result) not in _PLAIN:
            envelope = lift_envelope(result)
            if envelope is not None:
                return _pass_on(envelope, normalise, is_known)
            if isinstance(result, (bytes, bytearray, memoryview)):
                return local_envelope(bytes(cast("bytes", result)), operation_id)
        # What `local_envelope` does, without the call: this is the last step of nearly every call.
        return ResponseEnvelope(
            normalise(result),
            LocalResponseMeta(operation_id=operation_id, timestamp=time_ns() // 1_000_000),
        )

    return finish


def _pass_on(envelope: Envelope, normalise: Callable[[Any], Any], is_known: bool) -> Envelope:
    """A handler's own envelope: the same meta, its data normalised where there is something to go by."""
    data, meta = envelope.data, envelope.meta
    if type(data) is bytes:
        return envelope
    if isinstance(meta, LocalResponseMeta):
        return ResponseEnvelope(normalise(data), meta)
    if not is_known:
        return envelope
    if isinstance(meta, MCPResponseMeta) and (meta.is_error or meta.structured_content is None):
        return envelope
    return ResponseEnvelope(normalise(data), meta)


def _normaliser(spec: OperationSpec, policy: OutputPolicy) -> Callable[[Any], Any]:
    """Makes a result JSON, and treats what does not fit the schema as `policy` says."""
    operation_id, schema = spec.id, spec.output_schema
    compiled = None if policy == "off" else _compiled(operation_id, schema)
    if compiled is None:
        return to_json
    is_valid, cast_value = compiled.is_valid, compiled.normalise

    def fits(value: Any) -> bool:
        try:
            return is_valid(value)
        except ValueError:
            return False

    def repair(value: Any) -> Any:
        data, repairs = cast_value(value)
        if repairs is None:
            return data
        if repairs:
            _report_repairs(operation_id, repairs)
        if not fits(data):
            _report_misfit(operation_id, schema, data)
        return data

    def report(value: Any) -> Any:
        data = to_json(value)
        if not fits(data):
            _report_misfit(operation_id, schema, data)
        return data

    def refuse(value: Any) -> Any:
        data = to_json(value)
        if not fits(data):
            errors = schema.errors(data)
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"{operation_id} returned what its output schema does not allow",
                {"errors": [msgspec.to_builtins(error) for error in errors]},
            )
        return data

    return {"cast": repair, "warn": report, "strict": refuse}[policy]


def _compiled(operation_id: str, schema: Schema) -> CompiledSchema | None:
    """The schema ready for use; None where it says nothing, or cannot be used."""
    try:
        return None if schema.is_unknown else schema.compile()
    except SchemaError as error:
        logger.warning("%s: the output schema is not used: %s", operation_id, error)
        return None


def _report_repairs(operation_id: str, repairs: Sequence[Repair]) -> None:
    logger.warning(
        "%s: the result was repaired to fit its schema:\n%s",
        operation_id,
        "\n".join(f"  {repair.path or '(root)'}: {repair.message}" for repair in repairs),
    )


def _report_misfit(operation_id: str, schema: Schema, data: Any) -> None:
    logger.warning(
        "%s: the result does not fit its schema:\n%s",
        operation_id,
        format_value_errors(schema.errors(data)),
    )
