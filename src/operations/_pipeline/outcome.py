"""The way out: from what a handler returned to the envelope its caller gets."""

import logging
from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any, TypeAlias, cast

import msgspec

from operations._json import TOO_LONG, as_json, to_json
from operations.envelopes import (
    DescribedEnvelope,
    LocalResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    lift_envelope,
    local_envelope,
)
from operations.errors import CallError, ErrorCode, SchemaError
from operations.schema import CompiledSchema, Repair, Schema, ValueFault, format_value_errors
from operations.specs import OperationSpec, OutputPolicy

logger = logging.getLogger("operations")

Envelope: TypeAlias = ResponseEnvelope[Any]
Finisher: TypeAlias = Callable[[Any], Envelope]

_BITS = TOO_LONG.bit_length()
_PLAIN = frozenset({bool, float, int, list, str, type(None)})
"""Types of results that are certainly neither envelopes nor bytes."""


def finisher(spec: OperationSpec, policy: OutputPolicy) -> Finisher:
    """What turns a handler's result into the envelope its caller gets."""
    operation_id = spec.id
    compiled = None if policy == "off" else _compiled(operation_id, spec.output_schema)
    normalise, settle = _treatment(operation_id, compiled, policy)
    certain = frozenset[type]() if compiled is None else compiled.certain

    def finish(result: Any) -> Envelope:
        kind = type(result)  # pyright: ignore[reportUnknownVariableType]
        if kind in certain and (kind is not int or result.bit_length() < _BITS):
            data = result
        else:
            if kind is int:
                to_json(result)  # refused if it has too many digits
            elif kind not in _PLAIN and (kind is not dict or "meta" in result):
                envelope = lift_envelope(result)
                if envelope is not None:
                    return pass_on(envelope)
                if isinstance(result, (bytes, bytearray, memoryview)):
                    return local_envelope(bytes(cast("bytes", result)), operation_id)
            data, doubt = normalise(result)
            if doubt is not None:
                settle(data, doubt)
        # What `local_envelope` does, without the call: this is the last step of nearly every call.
        return ResponseEnvelope(
            data, LocalResponseMeta(operation_id=operation_id, timestamp=time_ns() // 1_000_000)
        )

    def pass_on(envelope: Envelope) -> Envelope:
        """A handler's own envelope: the same meta, and data that fits where there is something to go by."""
        if isinstance(envelope, DescribedEnvelope):
            return finish_described(envelope)
        meta = envelope.meta
        raw: Any = envelope.data
        if isinstance(raw, (bytes, bytearray, memoryview)):
            whole = bytes(cast("bytes", raw))
            return envelope if isinstance(raw, bytes) else ResponseEnvelope(whole, meta)
        if not isinstance(meta, LocalResponseMeta) and (
            compiled is None
            or (
                isinstance(meta, MCPResponseMeta)
                and (meta.is_error or meta.structured_content is None)
            )
        ):
            return proper(envelope)
        data, doubt = normalise(envelope.data)
        if doubt is not None:
            settle(data, doubt)
        return ResponseEnvelope(data, meta)

    finish_described = _described_finisher(spec, policy, pass_on)
    return finish


def _described_finisher(
    spec: OperationSpec, policy: OutputPolicy, finish: Finisher
) -> Callable[[DescribedEnvelope[Any]], Envelope]:
    """Return the function that normalises an envelope with the schema that it names.

    Args:
        spec: The operation.
        policy: How results are normalised.
        finish: Normalises an envelope with the operation's own output schema.
    """
    finishers: dict[int, tuple[Schema, Finisher]] = {
        id(spec.output_schema): (spec.output_schema, finish)
    }

    def finish_described(envelope: DescribedEnvelope[Any]) -> Envelope:
        plain: Envelope = ResponseEnvelope(envelope.data, envelope.meta)
        schema = envelope.schema
        if schema is None:
            return proper(plain)
        known = finishers.get(id(schema))
        if known is None:
            # The schema is kept as well, so that its id stays its own.
            described = msgspec.structs.replace(spec, output_schema=schema)
            known = finishers[id(schema)] = (schema, finisher(described, policy))
        return known[1](plain)

    return finish_described


def proper(envelope: Envelope) -> Envelope:
    """An envelope that was made by hand, its data JSON or bytes."""
    data: Any = envelope.data
    if type(data) is bytes:
        return envelope
    if isinstance(data, (bytes, bytearray, memoryview)):
        return ResponseEnvelope(bytes(cast("bytes", data)), envelope.meta)
    plain = as_json(data)
    return envelope if plain is data else ResponseEnvelope(plain, envelope.meta)


Doubt: TypeAlias = list[Repair] | None
"""What is still to be said of a result: nothing (None), or its repairs, after which it may still not fit."""


def _treatment(
    operation_id: str, compiled: CompiledSchema | None, policy: OutputPolicy
) -> tuple[Callable[[Any], tuple[Any, Doubt]], Callable[[Any, list[Repair]], None]]:
    """What makes a result JSON, and what deals with the doubt that leaves, as `policy` says."""

    def leave(value: Any) -> tuple[Any, Doubt]:
        return to_json(value), None

    def look(value: Any) -> tuple[Any, Doubt]:
        return to_json(value), []

    if compiled is None:
        return leave, _nothing_to_settle
    errors, is_valid = compiled.errors, compiled.is_valid

    def report(data: Any, repairs: list[Repair]) -> None:
        if repairs:
            _report_repairs(operation_id, repairs)
        if not is_valid(data):
            _report_misfit(operation_id, errors(data))

    def refuse(data: Any, _repairs: list[Repair]) -> None:
        if not is_valid(data):
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"{operation_id} returned what its output schema does not allow",
                {"errors": msgspec.to_builtins(errors(data))},
            )

    if policy in {"cast", "keep", "create"}:
        return compiled.normalise, report
    return look, refuse if policy == "strict" else report


def _nothing_to_settle(_data: Any, _repairs: list[Repair]) -> None:
    """Without a schema there is no doubt."""


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
        # The words may be a third party's: no line of the log is theirs to begin.
        "\n".join(
            f"  {repair.path or '(root)'}: {repair.message}".encode("unicode_escape").decode()
            for repair in repairs
        ),
    )


def _report_misfit(operation_id: str, faults: Sequence[ValueFault]) -> None:
    logger.warning(
        "%s: the result does not fit its schema:\n%s", operation_id, format_value_errors(faults)
    )
