"""Many specs in small pieces, in which a definition that many of them share is told once.

    {"definitions": {"0": {"Customer": {...}, "Address": {...}}},
     "operations": [{"spec": {...}, "scopes": ["0", null]}],
     "leftOut": {"big.one": "..."}}

The scopes of an operation are those of its input, its output and its errors. A schema that has one stands without its
`$defs`, which are the definitions of that scope that it refers to, directly or through others.

Rule 1: nothing is lost. A schema whose definitions would not be found again that way is told whole.
Rule 2: a definition is told no later than the first operation that needs it.
Rule 3: what no message can carry is left out, and said to be: it does not hide the others.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from operations.calls.snapshots import size_of
from operations.errors import CallError, ErrorCode
from operations.schema import Schema
from operations.schema.kinds import is_object
from operations.schema.scopes import References, Scopes
from operations.specs import OperationSpec
from operations.types import JSONObject, JSONSchema

PIECE = 128 * 1024
"""Bytes that are gathered before they are sent."""

MAX_TOLD = 256 * 1024 * 1024
"""Bytes of specs that are taken from one worker."""

_WRAPPING = 4096
"""Bytes of a message that are not the piece in it."""


class Teller:
    """Cuts specs into pieces, one spec after the other.

    Args:
        max_bytes: The largest message.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes - _WRAPPING
        self._scopes = Scopes()
        self._piece: JSONObject = {}
        self._size = 0

    def tell(self, spec: OperationSpec) -> Iterator[JSONObject]:
        """The pieces that are full now that `spec` is to be told as well."""
        placed = [self._scopes.place(schema.document) for schema in _schemas_of(spec)]
        bare = [
            schema if place is None else Schema(place.root)
            for schema, place in zip(_schemas_of(spec), placed, strict=True)
        ]
        entry = {
            "spec": _with_schemas(spec, bare).to_wire(),
            "scopes": [place and place.scope for place in placed],
        }
        moved = [place for place in placed if place is not None]
        sizes = [size for place in moved for _, size in place.fresh.values()]
        sizes.append(len(msgspec.json.encode(entry)))
        if max(sizes) > self._max_bytes:
            for place in moved:
                self._scopes.take_back(place)
            reason = f"a part of its spec takes {max(sizes):,} bytes, and a message holds {self._max_bytes:,}"
            yield from self._make_room(len(reason) + len(spec.id))
            self._piece.setdefault("leftOut", {})[spec.id] = reason
            return
        for place in moved:
            for name, (definition, size) in place.fresh.items():
                yield from self._make_room(size)
                told = self._piece.setdefault("definitions", {}).setdefault(place.scope, {})
                told[name] = definition
        yield from self._make_room(sizes[-1])
        self._piece.setdefault("operations", []).append(entry)

    def rest(self) -> Iterator[JSONObject]:
        """What has not been told yet."""
        if self._piece:
            yield self._taken()

    def _make_room(self, size: int) -> Iterator[JSONObject]:
        if self._size and self._size + size > min(PIECE, self._max_bytes):
            yield self._taken()
        self._size += size

    def _taken(self) -> JSONObject:
        piece, self._piece, self._size = self._piece, {}, 0
        return piece


class _Entry(msgspec.Struct):
    spec: Any
    scopes: list[str | None]


class _Piece(msgspec.Struct, rename="camel"):
    definitions: dict[str, dict[str, Any]] = {}
    operations: list[Any] = []
    left_out: dict[str, str] = {}


class Listener:
    """Puts the pieces together again.

    Attributes:
        specs: What was told, in the order in which it was.
        left_out: Why something was not, or could not be read, by its id as far as that is known.
    """

    def __init__(self) -> None:
        self.specs: list[OperationSpec] = []
        self.left_out: list[str] = []
        self._scopes: dict[str, JSONObject] = {}
        self._references = References()
        self._left = MAX_TOLD

    def hear(self, piece: Any) -> None:
        """Take in one piece.

        Raises:
            CallError: `UNKNOWN_ERROR` if it is none, `RESOURCE_EXHAUSTED` if there is no end to them.
        """
        self._left -= size_of(piece, MAX_TOLD)
        if self._left < 0:
            reason = f"the specs take more than {MAX_TOLD:,} bytes"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=False)
        try:
            told = msgspec.convert(piece, _Piece)
        except msgspec.ValidationError as error:
            raise CallError(
                ErrorCode.UNKNOWN_ERROR, f"the description is not one: {error}"
            ) from error
        self.left_out += [f"{name}: {reason}" for name, reason in told.left_out.items()]
        for scope, definitions in told.definitions.items():
            self._scopes.setdefault(scope, {}).update(definitions)
        for entry in told.operations:
            try:
                self.specs.append(self._spec(msgspec.convert(entry, _Entry)))
            except ValueError as error:
                self.left_out.append(str(error))

    def _spec(self, entry: _Entry) -> OperationSpec:
        spec = OperationSpec.from_wire(entry.spec)
        schemas = list(_schemas_of(spec))
        if len(entry.scopes) != len(schemas):
            raise ValueError(
                f"{spec.id} has {len(schemas)} schemas, and {len(entry.scopes)} scopes"
            )
        for index, scope in enumerate(entry.scopes):
            if scope is not None:
                held = self._scopes.setdefault(scope, {})
                whole = partial(self._completed, schemas[index].document, held)
                schemas[index] = Schema(whole, lenient=True)
        return _with_schemas(spec, schemas)

    def _completed(self, root: JSONSchema, scope: JSONObject) -> JSONSchema:
        if not is_object(root):
            return root
        reached = self._references.reach(root, scope)
        definitions = {name: held for name, held in scope.items() if name in reached}
        return {**root, "$defs": definitions}


def _schemas_of(spec: OperationSpec) -> Iterator[Schema]:
    yield spec.input_schema
    yield spec.output_schema
    for error in spec.error_schemas:
        yield error.schema


def _with_schemas(spec: OperationSpec, schemas: list[Schema]) -> OperationSpec:
    """`spec` with other schemas, in the order of `_schemas_of`."""
    errors = tuple(
        replace(error, schema=schema)
        for error, schema in zip(spec.error_schemas, schemas[2:], strict=True)
    )
    return replace(spec, input_schema=schemas[0], output_schema=schemas[1], error_schemas=errors)
