"""What an export of ours says of an operation beyond what MCP has words for: in a tool's `_meta`.

Shared by both directions. The importer believes it only where the operator trusts the server.
"""

from typing import Any, cast

from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

META_KEY = "alkdev.operations/spec"
"""The key in a tool's `_meta`."""

CHANGES_KEY = "alkdev.operations/changes"
"""The key in a result's `_meta`: what normalisation changed, as `changes` and `changesCount` of an envelope's meta."""

ERROR_KEY = "alkdev.operations/error"
"""The key in a result's `_meta`: the error of a tool that declares an output schema."""

EXACT_OUTPUT = "#/outputSchema/anyOf/0"
"""Where a listed tool has the exact output schema, if the listed one accepts every result."""

_CARRIED = ("namespace", "name", "version", "type", "tags", "errorSchemas", "idempotent")


def export_spec(spec: OperationSpec) -> JSONObject:
    """What to put under `META_KEY`: the part of the contract that a tool's own fields do not carry."""
    wire = spec.to_wire()
    return {key: wire[key] for key in _CARRIED if key in wire}


def restore_spec(spec: OperationSpec, meta: Any) -> OperationSpec:
    """`spec` with what its exporter said of it; as it is if that says nothing usable."""
    said: Any = cast("JSONObject", meta).get(META_KEY) if isinstance(meta, dict) else None
    if not isinstance(said, dict):
        return spec
    said = cast("JSONObject", said)
    carried = {key: said[key] for key in _CARRIED if key in said}
    try:
        restored = OperationSpec.from_wire({**spec.to_wire(), **carried})
    except ValueError:
        return spec
    # A tool has one result, whatever the operation behind it was.
    return spec if restored.type is OperationType.SUBSCRIPTION else restored
