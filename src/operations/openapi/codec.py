"""Operations of an exported registry, restored as they were: the input is the body, errors have their own codes.

This happens only if the operator trusts the export (`HTTPServiceConfig.restore`), because such a document decides
names, types and which calls may be repeated.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from operations._json import is_object, list_of, object_of, text_of
from operations.access import AccessControl
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError
from operations.openapi.endpoint import Endpoint, Shared
from operations.openapi.exchange.attempts import Draft
from operations.openapi.exporting.extension import Exported, item_schema, restore_schema
from operations.openapi.reading.document import Entry
from operations.openapi.reading.model import EVENT_STREAM
from operations.openapi.requests.body_plan import BODY
from operations.specs import Operation, OperationSpec, OperationType
from operations.types import JSONObject, JSONSchema

_JSON = "application/json"


class ExportedEndpoint(Endpoint):
    """One operation of an exported registry."""

    __slots__ = ("_exported",)

    def __init__(self, shared: Shared, entry: Entry, exported: Exported) -> None:
        super().__init__(shared, entry, is_stream=exported.type is OperationType.SUBSCRIPTION)
        self._exported = exported

    def input_schema(self) -> JSONSchema:
        """The schema the operation was exported with."""
        body = object_of(self._entry.operation.get("requestBody"))
        return self._original(_schema_in(body, _JSON), self._exported.input_schema)

    def output_schema(self) -> JSONSchema:
        """The schema the operation was exported with."""
        good = object_of(object_of(self._entry.operation.get("responses")).get("200"))
        shown = _schema_in(good, EVENT_STREAM if self.is_stream else _JSON)
        if self.is_stream:
            shown = item_schema(shown)
        return self._original(shown, self._exported.output_schema)

    async def call(self, input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        """One exchange.

        Raises:
            CallError: What the operation raised there.
        """
        try:
            return await super().call(input, context)
        except CallError as error:
            raise told(error) from error

    async def subscribe(
        self, input: Any, context: OperationContext
    ) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """The operation's items.

        Raises:
            CallError: What the operation raised there.
        """
        try:
            async with aclosing(super().subscribe(input, context)) as items:
                async for item in items:
                    yield item
        except CallError as error:
            raise told(error) from error

    def _draft(self, input: Any) -> Draft:
        draft = super()._draft({BODY: input})
        if not self.is_stream:
            # Bytes come as bytes where the server may choose.
            draft.headers["Accept"] = "*/*"
        return draft

    def _original(self, shown: JSONSchema, whole: JSONSchema | None) -> JSONSchema:
        if whole is not None:
            return whole
        return restore_schema(shown, _components(self._shared), self._exported.components)


def _components(shared: Shared) -> JSONObject:
    components = object_of(shared.description.document.get("components"))
    return object_of(components.get("schemas"))


def _schema_in(holder: JSONObject, media_type: str) -> JSONSchema:
    content = object_of(holder.get("content"))
    schema: Any = object_of(content.get(media_type)).get("schema", True)
    return schema if is_object(schema) or isinstance(schema, bool) else True


def told(error: CallError) -> CallError:
    """The error that an exported operation raised, which its response reports; any other as it is."""
    body = object_of(object_of(error.details).get("body"))
    if text_of(body.get("code")) and isinstance(body.get("message"), str):
        return CallError.from_wire(body)
    return error


def restored(
    shared: Shared, entry: Entry, exported: Exported, access: AccessControl, source: str
) -> Operation:
    """The operation that was exported.

    Raises:
        ValueError: If what the extension says cannot be an operation.
    """
    namespace, _, name = exported.id.partition(".")
    endpoint = ExportedEndpoint(shared, entry, exported)
    operation = entry.operation
    spec = OperationSpec(
        namespace=namespace,
        name=name,
        version=exported.version,
        type=exported.type or OperationType.MUTATION,
        title=text_of(operation.get("summary")) or None,
        description=text_of(operation.get("description")),
        tags=tuple(tag for tag in list_of(operation.get("tags")) if type(tag) is str),
        input_schema=endpoint.input,
        output_schema=endpoint.output,
        error_schemas=exported.error_schemas(_components(shared)),
        access_control=access,
        idempotent=exported.idempotent,
        meta={"method": entry.method, "path": entry.path, "source": source},
    )
    handler = endpoint.subscribe if endpoint.is_stream else endpoint.call
    return Operation(
        spec,
        handler,
        shared.config.output,
        blocking=False,
        source_timeout=shared.config.timeout,
    )
