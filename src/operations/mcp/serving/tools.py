"""An operation as a tool: its entry in a listing, its results, and the four gateway tools.

Rule 1: data is sent twice, as structured content and as text, for clients that read only one of them.
Rule 2: an error is also a result, so that the model can read it. An undeclared error shows only its code and the id of
        the request.
Rule 3: a listed output schema is either exact or open. If it is exact, a result of an operation of this registry that
        does not match is an error, because clients would drop it; a result of an imported tool passes as its server
        sent it, and an export of ours has checked it there. If it is open, it accepts every result.

The gateway tools find operations, read a contract, call one operation, or call several. They have specs, so that they
are listed like all other tools.
"""

from base64 import b64encode
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any, Final, cast

import msgspec
from mcp.shared.inbound import x_mcp_header_map
from msgspec import convert, to_builtins
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode, SchemaError, unusable_schema, with_code
from operations.base.json.values import list_of, object_of
from operations.base.text import first_sentence
from operations.base.types import JSONObject, JSONSchema
from operations.base.work import BudgetSpentError, Explanation, InlineWork
from operations.contract.envelopes import (
    ERROR_KEY,
    HTTPResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    changes_to_wire,
    sniffed,
)
from operations.contract.specs import (
    Operation,
    OperationSpec,
    OperationType,
    OutputPolicy,
    is_describable,
    is_for_models,
    source_of,
)
from operations.front import search
from operations.front.public_errors import public_error
from operations.mcp.shared import codec
from operations.mcp.shared.addresses import rescoped
from operations.registry.lenient import convert_input
from operations.schema import (
    NOT_NORMALISED,
    CastPolicy,
    Change,
    Schema,
    schema_for,
    validate_or_raise,
    within_budget,
)
from operations.schema.references import possible_types, with_items

_ERROR_BUDGET = 1024
"""The largest size of the definitions in the schema of a declared error, in bytes of JSON."""

_OPEN_BUDGET = 2 * 1024
"""The largest size of a listed output schema that is not exact, in bytes of JSON."""

_SOURCE_BUDGET = 64 * 1024
"""The largest size of all such schemas of one source. Each may take an equal share."""

_FORCING: Final = ("strict", "create")
"""The output policies with which every result matches its schema."""

_KEPT: Final = ("input", "mismatch", "address")
"""The kinds of changes that the data of a server may have when it arrives."""

MISMATCH: Final = "The operation ran; its result does not match its schema. Do not repeat it."
"""The message for a result that clients would drop."""


class Tool:
    """An operation as a tool.

    Args:
        name: The name of the tool.
        spec: The operation.
        budget: The largest size of the definitions in a schema, in bytes of JSON.
        operation: The registered operation; None for a gateway tool.
        siblings: The number of tools of its source.
        policy: The output policy of the operation.
    """

    def __init__(
        self,
        name: str,
        spec: OperationSpec,
        budget: int,
        *,
        operation: Operation | None = None,
        siblings: int = 1,
        policy: OutputPolicy = "strict",
    ) -> None:
        self.name = name
        self.spec = spec
        self.operation = operation
        self.id = spec.id
        self.source = codec.server_of(spec)
        self._budget = budget
        self._open_budget = min(_OPEN_BUDGET, _SOURCE_BUDGET // siblings)
        self._is_short = operation is not None and operation.descriptions == "short"
        self._policy: OutputPolicy = policy
        self._is_export = codec.META_KEY in object_of(spec.meta.get("_meta"))
        self._wires: dict[bool, JSONObject] = {}
        self._listed_outputs: dict[bool, Schema] = {}

    @cached_property
    def _input(self) -> JSONSchema:
        return _document_of(self.spec.input_schema)

    @cached_property
    def _output(self) -> JSONSchema:
        return _document_of(self.spec.output_schema)

    @cached_property
    def takes_box(self) -> bool:
        """Whether the input is not an object, and is therefore passed as the argument `input`."""
        return bool(self._input) and not codec.accepts_only_objects(self._input)

    @cached_property
    def gives_object(self) -> bool:
        """Whether results are always objects."""
        return self.spec.type is OperationType.SUBSCRIPTION or codec.accepts_only_objects(
            self._output
        )

    @cached_property
    def is_exact(self) -> bool:
        """Whether the listed output schema is that of the operation; otherwise it accepts every result."""
        if self.operation is None or self._policy in _FORCING:
            return True
        if self._is_export and codec.is_open(self.spec.meta.get("_meta")):
            return False
        wanted = self.operation.exact_schemas
        return source_of(self.spec) != "openapi" if wanted is None else wanted

    @cached_property
    def _passes_results(self) -> bool:
        """Whether results are structured as the server of an imported tool sent them."""
        return self.source is not None and self._policy not in _FORCING

    @property
    def _structures_data(self) -> bool:
        """Whether data is structured content although the server of an imported tool sent it as text, or as null."""
        return self._is_export or not self._passes_results

    @cached_property
    def mime_type(self) -> str | None:
        """The declared media type of bytes."""
        mime_type = codec.mcp_meta(self.spec).get("mimeType")
        return mime_type if isinstance(mime_type, str) else None

    @cached_property
    def requires(self) -> tuple[str, ...]:
        """The capabilities that a client needs to call the tool."""
        return tuple(map(str, list_of(codec.mcp_meta(self.spec).get("requires"))))

    @cached_property
    def is_for_models(self) -> bool:
        """Whether models may see it; if not, only views call it."""
        return is_for_models(self.spec)

    @property
    def is_usable(self) -> bool:
        """Whether the schemas can be built. If not, they may be later."""
        return bool(self._wires) or is_describable(self.spec)

    @cached_property
    def mirrors_headers(self) -> bool:
        """Whether arguments are repeated in HTTP headers (`x-mcp-header`)."""
        return self.is_usable and bool(x_mcp_header_map(self.input_schema))

    @cached_property
    def size(self) -> int:
        """The size in a listing in bytes of JSON, without `_meta`, which models do not read."""
        wire = self.wire(modern=False)
        return len(msgspec.json.encode({key: wire[key] for key in wire if key != "_meta"}))

    @property
    def exported(self) -> JSONObject:
        """The tool in a listing, without the contract for importers."""
        wire = self.wire(modern=True)
        meta = {key: value for key, value in wire["_meta"].items() if key != codec.META_KEY}
        rest = {key: value for key, value in wire.items() if key != "_meta"}
        return {**rest, "_meta": meta} if meta else rest

    @cached_property
    def _gives_null(self) -> bool:
        """Whether a result may be null, which the protocol does not distinguish from missing structured content."""
        return bool(self._output) and "null" in possible_types(self._output, self._output)

    def is_boxed(self, *, modern: bool) -> bool:
        """Return whether results are boxed in the property `result`, for clients that accept only objects."""
        return not self.gives_object and (not modern or self._gives_null)

    def wire(self, *, modern: bool) -> JSONObject:
        """Return the tool in a listing for clients since 2026-07-28 (`modern`), or before."""
        wire = self._wires.get(modern)
        if wire is None:
            wire = self._wires[modern] = self._written(modern)
        return wire

    def enforce_usable(self) -> None:
        """Raise an error if a schema of the operation cannot be built.

        Raises:
            CallError: `EXECUTION_ERROR`.
        """
        try:
            self.wire(modern=True)
        except SchemaError as error:
            raise unusable_schema(self.spec.id, error) from error

    def declares_output(self) -> bool:
        """Return whether the listing has an output schema."""
        return "outputSchema" in self.wire(modern=True)

    def accepts(self, structured: Any, modern: bool) -> bool:
        """Return whether structured content matches the listed output schema; False if that cannot be found out."""
        listed = self._listed_outputs.get(modern)
        if listed is None:
            document = self.wire(modern=modern).get("outputSchema", {})
            listed = self._listed_outputs[modern] = Schema(document, lenient=True)
        try:
            return listed.compile().fits(structured, InlineWork())
        except BudgetSpentError:
            return False

    def result(self, envelope: ResponseEnvelope[Any], *, modern: bool) -> JSONObject:
        """Return the `tools/call` result of an envelope for clients since 2026-07-28 (`modern`), or before."""
        mismatches = self._mismatches(envelope)
        if mismatches:
            return self._mismatch(envelope.data, mismatches)
        if self._passes_results:
            envelope = self._as_sent(envelope)
        result = self._result(envelope, is_boxed=self.is_boxed(modern=modern))
        if envelope.meta.changes:
            noted = {codec.CHANGES_KEY: changes_to_wire(envelope.meta)}
            result["_meta"] = {**result.get("_meta", {}), **noted}
        return result

    def _mismatches(self, envelope: ResponseEnvelope[Any]) -> list[Change]:
        """Return why clients would drop a result of this registry; empty for results of imported tools."""
        data, meta = envelope.data, envelope.meta
        is_noted = self._policy == "off" or any(each.kind == "mismatch" for each in meta.changes)
        if (
            not (is_noted or isinstance(data, bytes))
            or not self.is_exact
            or self.source is not None
            or (isinstance(meta, MCPResponseMeta) and meta.is_error)
            or not self.declares_output()
        ):
            return []
        compiled = self._result_schema.compile()
        if isinstance(data, bytes):
            is_valid = compiled.check.is_valid(_base64(data))
            return [] if is_valid else [Change("", "mismatch", 1, "is bytes instead of JSON")]
        # An earlier hop may have noted a mismatch with another schema.
        work = Explanation()
        try:
            return [] if compiled.fits(data, work) else compiled.mismatches(data, work)
        except BudgetSpentError:
            return [Change("", "mismatch", 1, NOT_NORMALISED)]

    @cached_property
    def _result_schema(self) -> Schema:
        schema = self.spec.output_schema
        is_stream = self.spec.type is OperationType.SUBSCRIPTION
        return Schema(items_schema(schema.document), lenient=True) if is_stream else schema

    def _mismatch(self, data: Any, mismatches: list[Change]) -> JSONObject:
        """Return the error for a result that does not match the listed schema."""
        found: list[JSONObject] = to_builtins(mismatches)
        details: JSONObject = {"data": data, "mismatches": found}
        if isinstance(data, bytes):
            del details["data"]
        error = CallError(ErrorCode.EXECUTION_ERROR, MISMATCH, details, retryable=False)
        content = [text_block(MISMATCH), text_block(model_text(details))]
        if isinstance(data, bytes):
            content.append(binary_block(data, self.mime_type))
        result: JSONObject = {"content": content, "isError": True}
        return result | self._structured_error(error.to_wire())

    def _as_sent(self, envelope: ResponseEnvelope[Any]) -> ResponseEnvelope[Any]:
        """Return the result of an imported tool with the data that its server sent.

        Data that other code in this process changed, such as a middleware, stays as it is.
        """
        data, meta = envelope.data, envelope.meta
        if not isinstance(meta, MCPResponseMeta) or meta.is_error or isinstance(data, bytes):
            return envelope
        sent = meta.structured_content
        if not meta.changes or data == sent or (sent is None and self._is_export):
            return envelope
        policy = cast("CastPolicy", self._policy)
        if sent is not None and self._normalised(sent, policy) != data:
            return envelope
        kept = tuple(each for each in meta.changes if each.kind in _KEPT)
        count = sum(each.count for each in kept)
        return ResponseEnvelope(sent, replace(meta, changes=kept, changes_count=count))

    def _normalised(self, data: Any, policy: CastPolicy) -> Any:
        normalise = self.spec.output_schema.compile().normaliser(policy)
        return within_budget(normalise, data, InlineWork())[0]

    def _result(self, envelope: ResponseEnvelope[Any], *, is_boxed: bool) -> JSONObject:
        """Return a tool result; `is_boxed` if the output schema has the data in the property `result`."""
        data, meta, declares = envelope.data, envelope.meta, self.declares_output()
        if isinstance(data, bytes):
            result: JSONObject = {
                "content": [binary_block(data, self.mime_type or _content_type(envelope))],
                "_meta": {codec.DATA_KEY: "bytes"},
            }
            if declares:
                text = _base64(data)
                exact = {codec.RESULT: text} if is_boxed else text
                result["structuredContent"] = exact if self.is_exact else {}
            return result
        box: JSONObject = {codec.RESULT: data}
        structured: Any = box if is_boxed else data
        noted: JSONObject = {}
        is_refused = data is None or (self.gives_object and not isinstance(data, dict))
        if is_refused and not is_boxed:
            # Clients reject a result with another type than the output schema. The SDK omits structured null.
            structured = box
            noted = {"_meta": {codec.DATA_KEY: "boxed"}}
        if not isinstance(meta, MCPResponseMeta):
            content = [text_block(model_text(data))]
            return {"content": content, "structuredContent": structured, **noted}
        result = {"content": to_builtins(meta.content)}
        if meta.is_error:
            result["isError"] = True
            if meta.structured_content is not None and self.source and not self._is_export:
                result["structuredContent"] = meta.structured_content
            elif meta.structured_content is not None:
                result |= self._structured_error(meta.structured_content)
        elif meta.structured_content is not None or (declares and self._structures_data):
            if is_boxed and not declares and isinstance(data, dict):
                # An object stays as the source sent it.
                structured, noted = cast("JSONObject", data), {"_meta": {codec.DATA_KEY: "plain"}}
            result |= {"structuredContent": structured, **noted}
        passed = codec.passed_meta(meta.meta)
        if passed:
            result["_meta"] = {**passed, **result.get("_meta", {})}
        return result

    def failure(self, error: CallError, request_id: str, *, expose: bool) -> JSONObject:
        """Return the `tools/call` result of an error.

        Args:
            error: The error.
            request_id: The id of the call.
            expose: Whether clients may read the text of unexpected errors.
        """
        return self.failed(public_error(error, request_id, expose=expose).to_wire())

    def failed(self, wire: JSONObject) -> JSONObject:
        """Return the `tools/call` result of a public error in its wire form."""
        text = with_code(wire["code"], wire["message"])
        if "details" in wire:
            text = f"{text}\n{msgspec.json.encode(wire['details']).decode()}"
        result: JSONObject = {"content": [text_block(text)], "isError": True}
        return result | self._structured_error(wire)

    def _structured_error(self, wire: Any) -> JSONObject:
        # Some clients validate the structured content of errors with the output schema.
        return (
            {"_meta": {ERROR_KEY: wire}} if self.declares_output() else {"structuredContent": wire}
        )

    def _written(self, modern: bool) -> JSONObject:
        spec = self.spec
        wire = codec.entry_of(spec, self.name)
        if self._is_short and spec.description:
            wire["description"] = first_sentence(spec.description, codec.SHORT)
        wire["inputSchema"] = self.input_schema
        export = self._export(modern)
        output = self._output_schema(modern)
        if output is not None and self.is_exact:
            wire["outputSchema"] = output
        elif output is not None and len(msgspec.json.encode(output)) <= self._open_budget:
            # Clients drop a result that does not match the schema, so they receive a schema that every result matches.
            wire["outputSchema"] = codec.with_alternative(output)
            export["outputSchema"] = codec.EXACT_OUTPUT
        wire["annotations"] = _annotations(spec)
        execution = spec.meta.get("execution")
        if not modern and self.source is not None and isinstance(execution, Mapping):
            # A field of 2025-11-25. Clients ignore it unless the server of the connection offers tasks.
            wire["execution"] = execution
        listed = (
            spec.meta
            if self.source is None
            else {**spec.meta, "_meta": rescoped(spec.meta.get("_meta"), self.source)}
        )
        return codec.with_passed(wire, listed, export)

    @cached_property
    def _pruned_input(self) -> JSONSchema:
        return codec.pruned(self._input, self._budget)

    @cached_property
    def _inlined_input(self) -> JSONSchema:
        document = codec.inlined(self._pruned_input, self._budget)
        return with_items(codec.shortened(document) if self._is_short else document)

    @cached_property
    def input_schema(self) -> JSONObject:
        """Return the schema of the arguments."""
        document = self._inlined_input
        return (
            codec.boxed(document, codec.INPUT) if self.takes_box else codec.object_schema(document)
        )

    def _output_schema(self, modern: bool) -> JSONSchema | None:
        if self.spec.type is OperationType.SUBSCRIPTION:
            return items_schema(codec.pruned(self._output, self._budget))
        if not self._output or self.spec.output_schema.is_binary:
            return None
        document = codec.pruned(self._output, self._budget)
        if self.gives_object:
            return codec.object_schema(document)
        return codec.boxed_result(document) if self.is_boxed(modern=modern) else document

    def _export(self, modern: bool) -> JSONObject:
        """Return the contract that an import needs to restore the operation."""
        spec = self.spec
        # Always included, because the annotation marks every query as idempotent.
        export = {**codec.export_spec(spec), "idempotent": spec.idempotent}
        if spec.error_schemas:
            export["errorSchemas"] = [
                {**error.to_wire(), "schema": codec.pruned(error.schema.document, _ERROR_BUDGET)}
                for error in spec.error_schemas
            ]
        if self._inlined_input is not self._pruned_input:
            export["inputSchema"] = self._pruned_input
        if not self._input:
            export["input"] = "any"
        elif self.takes_box:
            export["input"] = "boxed"
        elif "type" not in cast("JSONObject", self._input):
            export["input"] = "object"
        if spec.type is OperationType.SUBSCRIPTION:
            export["output"] = "items"
        elif spec.output_schema.is_binary:
            export["output"] = "bytes"
        elif self.is_boxed(modern=modern):
            export["output"] = "boxed"
        elif self.gives_object and "type" not in cast("JSONObject", self._output):
            export["output"] = "object"
        return export


def _document_of(schema: Schema) -> JSONSchema:
    return {} if schema.is_empty else schema.document


def items_schema(item: JSONSchema) -> JSONObject:
    """Return the result schema of a subscription as a tool: its first items, and whether they are complete."""
    return {
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": codec.moved(item, "#/properties/items/items")},
            "complete": {
                "type": "boolean",
                "description": "False if the subscription had more items.",
            },
        },
        "required": ["items", "complete"],
    }


def _annotations(spec: OperationSpec) -> JSONObject:
    reads = spec.type is not OperationType.MUTATION
    annotations: JSONObject = {"readOnlyHint": reads}
    if reads:
        annotations["destructiveHint"] = False
    if spec.replayable:
        annotations["idempotentHint"] = True
    if codec.is_imported(spec):
        claimed = object_of(spec.meta.get("annotations"))
        # The operator's configuration that a tool is read-only overrides the server's annotation.
        annotations = {**claimed, **annotations} if reads else {**annotations, **claimed}
    own = codec.mcp_meta(spec).get("annotations")
    return {**annotations, **cast("JSONObject", own)} if isinstance(own, Mapping) else annotations


# ------------------------------------------------------------ content


def text_block(text: str) -> JSONObject:
    """Return a block of text."""
    return {"type": "text", "text": text}


def model_text(data: Any) -> str:
    """Return data as text for a model: a string unchanged, any other value as JSON."""
    return data if isinstance(data, str) else msgspec.json.encode(data).decode()


def binary_block(data: bytes, mime_type: str | None) -> JSONObject:
    """Return bytes as an image, audio or blob block."""
    mime_type = mime_type or sniffed(data)
    encoded = _base64(data)
    for kind in ("image", "audio"):
        if mime_type.startswith(f"{kind}/"):
            return {"type": kind, "data": encoded, "mimeType": mime_type}
    resource = {"uri": "operations:result", "mimeType": mime_type, "blob": encoded}
    return {"type": "resource", "resource": resource}


def _base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _content_type(envelope: ResponseEnvelope[Any]) -> str | None:
    if isinstance(envelope.meta, HTTPResponseMeta):
        return envelope.meta.content_type.partition(";")[0].strip().lower() or None
    return None


# ------------------------------------------------------------ gateway tools

_REQUESTS: Final = {
    "search": search.Search,
    "schema": search.SchemaRequest,
    "call": search.OperationCall,
    "batch": search.Batch,
}
GATEWAY_TOOLS: Final = tuple(_REQUESTS)


def _spec(
    name: str, type: OperationType, title: str, description: str, output: Schema
) -> OperationSpec:
    return OperationSpec(
        # A hub that imports these tools must not let a pattern allow them: they call every operation, under any id.
        authority=type is OperationType.MUTATION,
        namespace="gateway",
        name=name,
        type=type,
        title=title,
        description=description,
        input_schema=schema_for(_REQUESTS[name]),
        output_schema=output,
    )


@cache
def gateway_tools() -> dict[str, Tool]:
    """Return the four tools by name."""
    results = {"type": "object", "properties": {"results": {"type": "array"}}}
    specs = (
        _spec(
            "search",
            OperationType.QUERY,
            "Search operations",
            "Find operations by words in their names, titles, tags and descriptions, best first. "
            "Then read an operation's contract with schema and run it with call.",
            schema_for(search.SearchResult),
        ),
        _spec(
            "schema",
            OperationType.QUERY,
            "Read an operation's contract",
            "Read the input schema, the declared errors and, on request, the output schema of one operation.",
            Schema({"type": "object"}),
        ),
        _spec(
            "call",
            OperationType.MUTATION,
            "Call an operation",
            "Run one operation and return its result.",
            Schema({}),
        ),
        _spec(
            "batch",
            OperationType.MUTATION,
            "Call several operations",
            f"Run up to {search.MAX_BATCH} operations concurrently. Returns the envelope or the error of each, "
            "in order; a failure does not stop the others.",
            Schema(results),
        ),
    )
    return {spec.name: Tool(spec.name, spec, budget=16 * 1024) for spec in specs}


def gateway_request(tool: Tool, arguments: JSONObject, *, lenient: bool) -> tuple[Any, JSONObject]:
    """Return the request in the arguments of a gateway tool, and the `_meta` of its result: converted arguments.

    Raises:
        CallError: If the arguments are not valid.
    """
    schema = tool.spec.input_schema.compile()
    may_convert = lenient and schema.errors(arguments)
    converted = convert_input(schema, arguments) if may_convert else None
    meta: JSONObject = {}
    if converted is not None:
        arguments, changes = converted
        count = sum(change.count for change in changes)
        meta = {codec.CHANGES_KEY: {"changes": to_builtins(changes), "changesCount": count}}
    else:
        validate_or_raise(tool.spec.input_schema, arguments, subject=f"arguments of {tool.name}")
    return convert(arguments, _REQUESTS[tool.name], strict=False), meta
