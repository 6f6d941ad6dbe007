"""What a server has beyond tools: resources, templates of resources, and prompts, all of them as queries.

<server>.resources.list        what there is, freshly listed
<server>.resources.templates   what can be asked for by filling in a template
<server>.resources.read        {"uri": ...}
<server>.templates.<name>      the variables of one template, filled in and read
<server>.prompts.<name>        the arguments of one prompt
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

from mcp.shared.uri_template import UriTemplate

from operations._mcp_config import MCPClientConfig
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode
from operations.mcp.content import listing_envelope, prompt_envelope, resource_envelope
from operations.mcp.interaction import is_question, question_envelope
from operations.mcp.listing import Listing
from operations.mcp.names import safe_name
from operations.mcp.pins import PIN_FIELDS, Pins, pin_key
from operations.mcp.tools import Request, in_quarantine
from operations.schema import from_schema
from operations.specs import Operation, OperationSpec, OperationType
from operations.types import JSONObject

ListAll = Callable[[str, str, OperationContext], Awaitable[list[JSONObject]]]
"""`(method, key, context)` -> every entry of a paged list."""

_NOTHING: JSONObject = {"type": "object", "additionalProperties": False}
_URI: JSONObject = {
    "type": "object",
    "properties": {"uri": {"type": "string", "minLength": 1}},
    "required": ["uri"],
    "additionalProperties": False,
}


class ResourceOperations:
    """Builds the operations for one server's listing."""

    def __init__(
        self,
        server: str,
        version: str,
        config: MCPClientConfig,
        request: Request,
        list_all: ListAll,
        pins: Pins,
    ) -> None:
        self._server = server
        self._version = version
        self._config = config
        self._request = request
        self._list_all = list_all
        self._pins = pins

    def build(self, listing: Listing, skipped: dict[str, str]) -> Iterator[tuple[str, Operation]]:
        """Yield each operation with its key among the pins; entries without a usable name go to `skipped`."""
        if listing.resources or listing.templates:
            yield "", self._lister("resources", "The resources of the server.", "resources/list")
            yield (
                "",
                self._lister(
                    "templates", "The resource templates of the server.", "resources/templates/list"
                ),
            )
            yield "", self._reader()
        for template in listing.templates:
            yield from self._named(template, "templates", self._template, skipped)
        for prompt in listing.prompts:
            yield from self._named(prompt, "prompts", self._prompt, skipped)

    def _named(
        self,
        entry: JSONObject,
        kind: str,
        build: Callable[[JSONObject, str], Operation],
        skipped: dict[str, str],
    ) -> Iterator[tuple[str, Operation]]:
        name = entry.get("name") or entry.get("uriTemplate")
        try:
            yield pin_key(kind, entry), build(entry, f"{kind}.{safe_name(str(name))}")
        except ValueError as error:
            skipped[f"{kind}.{ascii(name)[1:-1]}"] = str(error)

    def _spec(
        self, name: str, description: str, input_schema: JSONObject, entry: JSONObject | None = None
    ) -> OperationSpec:
        config = self._config
        entry = entry or {}
        meta: JSONObject = {"source": "mcp", "server": self._server}
        for key in ("uriTemplate", "mimeType", "annotations", "_meta", "icons"):
            if entry.get(key):
                meta[key] = entry[key]
        title = entry.get("title")
        spec = OperationSpec(
            name=name,
            namespace=cast("str", config.namespace),
            version=self._version,
            type=OperationType.QUERY,
            title=title if isinstance(title, str) else None,
            description=description,
            input_schema=from_schema(input_schema, lenient=True),
            meta=meta,
        )
        return config.guarded(spec)

    def _lister(self, kind: str, description: str, method: str) -> Operation:
        name, key = ("list", kind) if kind == "resources" else (kind, "resourceTemplates")

        async def list_now(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            entries = await self._list_all(method, key, context)
            if self._config.pin == "strict":
                entries = [
                    entry
                    for entry in entries
                    if isinstance(entry.get(PIN_FIELDS[kind]), str)
                    and not self._pins.is_different(pin_key(kind, entry), entry)
                ]
            return listing_envelope(entries)

        return Operation(self._spec(f"resources.{name}", description, _NOTHING), list_now)

    def _reader(self) -> Operation:
        async def read(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            return await self._read(input["uri"], context)

        return Operation(self._spec("resources.read", "Read a resource by its URI.", _URI), read)

    async def _read(self, uri: str, context: OperationContext) -> ResponseEnvelope[Any]:
        key = f"resources/{uri}"
        if key in self._pins.waiting:
            raise in_quarantine(key, self._server)
        result = await self._request("resources/read", {"uri": uri}, context, replayable=True)
        return question_envelope(result) if is_question(result) else resource_envelope(result)

    def _template(self, entry: JSONObject, name: str) -> Operation:
        template = UriTemplate.parse(entry["uriTemplate"])
        variables = template.variable_names
        schema: JSONObject = {
            "type": "object",
            "properties": {variable: {"type": "string"} for variable in variables},
            "additionalProperties": False,
        }

        async def read(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            try:
                uri = template.expand(input or {})
            except (TypeError, ValueError) as error:
                raise CallError(ErrorCode.VALIDATION_ERROR, str(error)) from None
            return await self._read(uri, context)

        return Operation(self._spec(name, str(entry.get("description") or ""), schema, entry), read)

    def _prompt(self, entry: JSONObject, name: str) -> Operation:
        prompt_name = entry["name"]
        arguments = _arguments(entry.get("arguments"))
        schema: JSONObject = {
            "type": "object",
            "properties": {
                argument["name"]: {
                    "type": "string",
                    "description": str(argument.get("description") or ""),
                }
                for argument in arguments
            },
            "required": [
                argument["name"] for argument in arguments if argument.get("required") is True
            ],
            "additionalProperties": False,
        }

        async def get(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            params = {"name": prompt_name, "arguments": dict(input or {})}
            result = await self._request("prompts/get", params, context, replayable=True)
            return question_envelope(result) if is_question(result) else prompt_envelope(result)

        return Operation(self._spec(name, str(entry.get("description") or ""), schema, entry), get)


def _arguments(listed: Any) -> list[JSONObject]:
    """The arguments of a prompt that have a name."""
    if not isinstance(listed, list):
        return []
    entries = [
        cast("JSONObject", item) for item in cast("list[object]", listed) if isinstance(item, dict)
    ]
    return [entry for entry in entries if isinstance(entry.get("name"), str)]
