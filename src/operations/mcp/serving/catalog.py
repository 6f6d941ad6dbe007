"""The listings of a registry for MCP clients: tools, prompts, resources and resource templates, and their URIs.

An operation is a tool, unless `spec.meta["mcp"]` has other settings:

    {"name": "add"}                                              the name of the tool or prompt
    {"resource": {"uri": "config://app", "mimeType": "text/plain"}}   a resource
    {"resource": {"uri": "task://{id}"}}                         a template; its variables are the input
    {"prompt": True}                                             a prompt; its arguments are the input
    {"tool": True, ...}                                          a tool as well
    {"mimeType": "image/png"}                                    the type of the bytes that a tool returns
    {"requires": ["elicitation"]}                                capabilities that a client needs to call it
    {"annotations": {"openWorldHint": False}}                    hints that differ from those of the type

Rule 1: a catalog describes one revision of the registry, and builds each listing on first use.
Rule 2: the name of an operation is a function of its id (`operations._text`), unless `meta["mcp"]["name"]` sets
        another.
Rule 3: a custom name must be unique, and must not be the default name of another operation or of a gateway tool;
        otherwise the operations with this name keep their default names.
Rule 4: an operation that is a resource has the URI that its author set.
Rule 5: a resource or template of another server keeps its URI only if no other source can claim it. Otherwise, and
        always for our own scheme, its URI is `operations://<namespace>/<URI>`. So no server can present its resources
        as those of another, and every resource can be read by its longer URI.
Rule 6: a template claims every URI that begins with the text before its first variable. If that text has no scheme, the
        template claims none.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, Final, cast

import msgspec
from mcp.shared.inbound import x_mcp_header_map
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate

from operations._json import list_of, object_of
from operations._text import TOOL_NAME, NameStyle, tool_name
from operations.mcp.catalog import LISTED, READ
from operations.mcp.codec import (
    EXACT_OUTPUT,
    INPUT,
    META_KEY,
    as_object,
    boxed,
    boxed_result,
    export_spec,
    is_imported,
    is_never_null,
    is_object,
    mcp_meta,
    moved,
    pruned,
    with_alternative,
    with_passed,
)
from operations.registry import OperationRegistry
from operations.schema import Schema
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject, JSONSchema

# ------------------------------------------------------------ resources and their URIs

_SCHEME: Final = "operations:"
_NAMED: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_FOREIGN: Final = re.compile(r"https?:", re.IGNORECASE)


class Resource:
    """An operation as a resource, or as a template of resources.

    Args:
        spec: The operation.
        options: `uri`, which may be a template, and `mimeType`.
        listed: The entry of an imported resource in the listing of its server; None if the operation is the resource
            itself.

    Raises:
        InvalidUriTemplate: If its URI is not a valid template.
    """

    def __init__(
        self,
        spec: OperationSpec,
        options: Mapping[str, Any],
        listed: JSONObject | None = None,
    ) -> None:
        self.spec = spec
        self.listed = listed
        self.source = spec.namespace if is_imported(spec) else None
        """The namespace of its server, if it was imported."""

        self.uri = str(options.get("uri", ""))
        self.public_uri = self.uri
        """The URI that clients use."""

        self.template = None
        if listed is None and "{" in self.uri:
            self.template = UriTemplate.parse(self.uri)
        self.mime_type: str | None = options.get("mimeType") or mcp_meta(spec).get("mimeType")

    def match(self, uri: str) -> JSONObject | None:
        """Return the variables of a template in a URI that clients use; None if the URI does not match."""
        prefix = self.public_uri.removesuffix(self.uri)
        if self.template is None or not uri.startswith(prefix):
            return None
        return cast("JSONObject | None", self.template.match(uri.removeprefix(prefix)))

    def address(self, value: JSONObject) -> str:
        """Return the URI at the server for an imported resource or template with this input."""
        return self.uri if self.template is None else self.template.expand(value)

    def wire(self) -> JSONObject:
        """Return the entry of the resource or template in a listing."""
        spec = self.spec
        uri_key = "uri" if self.template is None else "uriTemplate"
        listed = spec.meta if self.template is not None else self.listed or {}
        if self.source is not None:
            entry = {key: listed[key] for key in LISTED if listed.get(key) is not None}
            entry = {**entry, uri_key: self.public_uri, "name": str(listed.get("name") or self.uri)}
            return with_passed(entry, listed, export_spec(spec))
        wire = {uri_key: self.uri, **_named(spec, str(mcp_meta(spec).get("name") or spec.id))}
        if self.mime_type is not None:
            wire["mimeType"] = self.mime_type
        wire["_meta"] = {META_KEY: export_spec(spec)}
        return wire


class Addresses:
    """The resources and templates of a registry by the URIs that clients use.

    Args:
        offered: All resources and templates.
        readers: The operations that read any resource of a server, by namespace.
    """

    def __init__(self, offered: Iterable[Resource], readers: Mapping[str, OperationSpec]) -> None:
        self.resources: dict[str, Resource] = {}
        self.templates: list[Resource] = []
        self._readers = readers
        offered = list(offered)
        templates = [each for each in offered if each.template is not None]
        listed: dict[str, set[str | None]] = {}
        for each in offered:
            if each.template is None:
                listed.setdefault(each.uri, set()).add(each.source)
        claims = [(_claimed(each.uri), each.source) for each in templates if _claimed(each.uri)]
        for each in offered:
            if each.source is not None and not _is_free(each, listed, claims):
                each.public_uri = prefixed(each.source, each.uri)
            if each.template is None:
                self.resources[each.public_uri] = each
            else:
                self.templates.append(each)

    def find(
        self, uri: str, sees: Callable[[OperationSpec], bool]
    ) -> tuple[Resource, JSONObject] | None:
        """Return the resource at a URI and the values of its variables; None if there is no visible resource."""
        resource = self.resources.get(uri)
        if resource is not None and sees(resource.spec):
            return resource, {} if resource.listed is None else {"uri": resource.uri}
        for template in self.templates:
            variables = template.match(uri)
            if variables is not None and sees(template.spec):
                return template, variables
        namespace, _, address = uri.removeprefix(f"{_SCHEME}//").partition("/")
        reader = self._readers.get(namespace) if uri.startswith(f"{_SCHEME}//") else None
        if reader is None or not address or not sees(reader):
            return None
        return Resource(reader, {"uri": address}, {"uri": address}), {"uri": address}

    def public(self, namespace: str, uri: str) -> str | None:
        """Return the URI that clients use for a URI of a server; None if no resource claims it."""
        if uri.lower().startswith(_SCHEME):
            return prefixed(namespace, uri)
        known = self.resources.get(uri)
        if known is not None:
            return uri if known.source == namespace else prefixed(namespace, uri)
        for template in self.templates:
            if template.public_uri == template.uri and template.match(uri) is not None:
                return uri if template.source == namespace else prefixed(namespace, uri)
        return prefixed(namespace, uri) if prefixed(namespace, uri) in self.resources else None

    def link(self, namespace: str, uri: str) -> str:
        """Return the URI with which a client can read a resource that a server links to."""
        public = self.public(namespace, uri)
        if public is None and namespace in self._readers and not _FOREIGN.match(uri):
            return prefixed(namespace, uri)
        return public or uri


def prefixed(namespace: str, uri: str) -> str:
    """Return the URI of a server's resource that no other source can claim."""
    return f"{_SCHEME}//{namespace}/{uri}"


def _claimed(template: str) -> str:
    """Return the prefix of all URIs of a template; empty if it has no scheme."""
    text = template.partition("{")[0]
    is_ours = text.lower().startswith(_SCHEME)
    return text if _NAMED.match(text) and not is_ours else ""


def _is_free(
    resource: Resource,
    listed: Mapping[str, set[str | None]],
    claims: Iterable[tuple[str, str | None]],
) -> bool:
    """Return whether no other source can claim the URI of an imported resource or template."""
    own = _claimed(resource.uri) if resource.template is not None else resource.uri
    if not own or own.lower().startswith(_SCHEME):
        return False
    if resource.template is None and len(listed[resource.uri]) > 1:
        return False
    others = (claim for claim, source in claims if source != resource.source)
    if resource.template is None:
        return not any(own.startswith(claim) for claim in others)
    return not any(own.startswith(claim) or claim.startswith(own) for claim in others)


# ------------------------------------------------------------ names


def names_of(
    specs: Iterable[OperationSpec], style: NameStyle, *, reserved: Collection[str] = ()
) -> dict[str, OperationSpec]:
    """Return every operation by its name."""
    defaults = {tool_name(spec.id, style): spec for spec in specs}
    chosen = Counter(_chosen(spec) for spec in defaults.values())
    names: dict[str, OperationSpec] = {}
    for default, spec in defaults.items():
        name = _chosen(spec)
        is_free = name is not None and chosen[name] == 1 and name not in reserved
        names[name if name and is_free and name not in defaults else default] = spec
    return names


def _named(spec: OperationSpec, name: str) -> JSONObject:
    """Return the common fields of an entry in a listing."""
    wire: JSONObject = {"name": name}
    if spec.title is not None:
        wire["title"] = spec.title
    if spec.description:
        wire["description"] = spec.description
    return wire


def _chosen(spec: OperationSpec) -> str | None:
    name = mcp_meta(spec).get("name")
    return name if isinstance(name, str) and TOOL_NAME.fullmatch(name) else None


# ------------------------------------------------------------ tools and prompts

logger = logging.getLogger("operations.mcp")

GATEWAY_TOOLS: Final = ("search", "schema", "call", "batch")

_ERROR_BUDGET = 1024
"""The largest size of the definitions in the schema of a declared error, in bytes of JSON."""


class Tool:
    """An operation as a tool.

    Args:
        name: The name of the tool.
        spec: The operation.
        budget: The largest size of the definitions in a schema, in bytes of JSON.
        always_fits: Whether every result matches the output schema, because the output policy is `strict` or `create`.
    """

    def __init__(
        self, name: str, spec: OperationSpec, budget: int, *, always_fits: bool = False
    ) -> None:
        self.name = name
        self.spec = spec
        self.id = spec.id
        self.is_imported = is_imported(spec)
        self._budget = budget
        self._always_fits = always_fits
        self._wires: dict[bool, JSONObject] = {}
        self._raws: dict[bool, msgspec.Raw] = {}

    @cached_property
    def _input(self) -> JSONSchema:
        return _document_of(self.spec.input_schema)

    @cached_property
    def _output(self) -> JSONSchema:
        return _document_of(self.spec.output_schema)

    @cached_property
    def takes_box(self) -> bool:
        """Whether the input is not an object, and is therefore passed as the argument `input`."""
        return bool(self._input) and not is_object(self._input)

    @cached_property
    def gives_object(self) -> bool:
        """Whether results are always objects."""
        return self.spec.type is OperationType.SUBSCRIPTION or is_object(self._output)

    @cached_property
    def mime_type(self) -> str | None:
        """The declared media type of bytes."""
        mime_type = mcp_meta(self.spec).get("mimeType")
        return mime_type if isinstance(mime_type, str) else None

    @cached_property
    def requires(self) -> tuple[str, ...]:
        """The capabilities that a client needs to call the tool."""
        return tuple(map(str, list_of(mcp_meta(self.spec).get("requires"))))

    @cached_property
    def mirrors_headers(self) -> bool:
        """Whether arguments are repeated in HTTP headers (`x-mcp-header`)."""
        return bool(x_mcp_header_map(self._input))

    @cached_property
    def size(self) -> int:
        """The size in a listing in bytes of JSON, without `_meta`, which models do not read."""
        wire = self.wire(modern=False)
        return len(msgspec.json.encode({key: wire[key] for key in wire if key != "_meta"}))

    @cached_property
    def _gives_null(self) -> bool:
        """Whether a result may be null, which the protocol does not distinguish from missing structured content."""
        return bool(self._output) and not is_never_null(self._output)

    def is_boxed(self, *, modern: bool) -> bool:
        """Return whether results are boxed in the property `result`, for clients that accept only objects."""
        return not self.gives_object and (not modern or self._gives_null)

    def raw(self, *, modern: bool) -> msgspec.Raw:
        """Return `wire`, encoded as JSON."""
        raw = self._raws.get(modern)
        if raw is None:
            raw = self._raws[modern] = msgspec.Raw(msgspec.json.encode(self.wire(modern=modern)))
        return raw

    def wire(self, *, modern: bool) -> JSONObject:
        """Return the tool in a listing for clients since 2026-07-28 (`modern`), or before."""
        wire = self._wires.get(modern)
        if wire is None:
            wire = self._wires[modern] = self._written(modern)
        return wire

    def declares_output(self) -> bool:
        """Return whether the listing has an output schema."""
        return "outputSchema" in self.wire(modern=True)

    def _written(self, modern: bool) -> JSONObject:
        spec = self.spec
        wire = _named(spec, self.name)
        wire["inputSchema"] = self.input_schema
        export = self._export(modern)
        output = self._output_schema(modern)
        if output is not None:
            wire["outputSchema"] = output
            if not self._always_fits:
                # Clients drop a result that does not match the schema, so they receive a schema that every result
                # matches.
                wire["outputSchema"] = with_alternative(output)
                export["outputSchema"] = EXACT_OUTPUT
        wire["annotations"] = _annotations(spec)
        return with_passed(wire, spec.meta, export)

    @cached_property
    def input_schema(self) -> JSONObject:
        """Return the schema of the arguments."""
        document = pruned(self._input, self._budget)
        return boxed(document, INPUT) if self.takes_box else as_object(document)

    def _output_schema(self, modern: bool) -> JSONSchema | None:
        if self.spec.type is OperationType.SUBSCRIPTION:
            return items_schema(pruned(self._output, self._budget))
        if not self._output or self.spec.output_schema.is_binary:
            return None
        document = pruned(self._output, self._budget)
        if self.gives_object:
            return as_object(document)
        return boxed_result(document) if self.is_boxed(modern=modern) else document

    def _export(self, modern: bool) -> JSONObject:
        """Return the contract that an import needs to restore the operation."""
        spec = self.spec
        # Always included, because the annotation marks every query as idempotent.
        export = {**export_spec(spec), "idempotent": spec.idempotent}
        if spec.error_schemas:
            export["errorSchemas"] = [
                {**error.to_wire(), "schema": pruned(error.schema.document, _ERROR_BUDGET)}
                for error in spec.error_schemas
            ]
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
            "items": {"type": "array", "items": moved(item, "#/properties/items/items")},
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
    if is_imported(spec):
        claimed = object_of(spec.meta.get("annotations"))
        # The operator's configuration that a tool is read-only overrides the server's annotation.
        annotations = {**claimed, **annotations} if reads else {**annotations, **claimed}
    own = mcp_meta(spec).get("annotations")
    return {**annotations, **cast("JSONObject", own)} if isinstance(own, Mapping) else annotations


class Prompt:
    """An operation as a prompt."""

    def __init__(self, name: str, spec: OperationSpec) -> None:
        self.name = name
        self.spec = spec

    def wire(self) -> JSONObject:
        """Return the prompt in a listing."""
        wire = _named(self.spec, self.name)
        wire["arguments"] = self._arguments()
        return with_passed(wire, self.spec.meta, export_spec(self.spec))

    def _arguments(self) -> list[JSONObject]:
        if is_imported(self.spec):
            return list_of(self.spec.meta.get("arguments"))
        required = object_of(self.spec.input_schema.document).get("required", ())
        arguments: list[JSONObject] = []
        for name, schema in properties_of(self.spec).items():
            argument: JSONObject = {"name": name}
            if isinstance(schema.get("description"), str):
                argument["description"] = schema["description"]
            argument["required"] = name in required
            arguments.append(argument)
        return arguments


def properties_of(spec: OperationSpec) -> dict[str, JSONObject]:
    """Return the schemas of the properties of an operation's input."""
    properties = object_of(object_of(spec.input_schema.document).get("properties"))
    return {name: object_of(schema) for name, schema in properties.items()}


class Catalog:
    """The listings of a registry at one revision."""

    def __init__(self, registry: OperationRegistry, style: NameStyle, budget: int) -> None:
        self.revision = registry.revision
        prompts = [spec for spec in registry.specs() if mcp_meta(spec).get("prompt")]
        self.prompts = {name: Prompt(name, spec) for name, spec in names_of(prompts, style).items()}
        offered: list[Resource] = []
        tools: list[OperationSpec] = []
        readers: dict[str, OperationSpec] = {}
        self.instructions: dict[tuple[str, str], list[OperationSpec]] = {}
        """The operations of sources with instructions, by namespace and instructions."""
        for operation in registry:
            spec = operation.spec
            if operation.source_instructions:
                key = (spec.namespace, operation.source_instructions)
                self.instructions.setdefault(key, []).append(spec)
            if is_imported(spec) and spec.name == READ:
                readers[spec.namespace] = spec
                offered += [Resource(spec, entry, entry) for entry in operation.resources]
            if self._place(spec, mcp_meta(spec), offered):
                tools.append(spec)
        self.addresses = Addresses(offered, readers)
        self.resources = self.addresses.resources
        self.templates = self.addresses.templates
        names = names_of(tools, style, reserved=GATEWAY_TOOLS)
        self.tools = {
            name: Tool(
                name, spec, budget, always_fits=registry.output_of(spec.id) in ("strict", "create")
            )
            for name, spec in names.items()
        }
        self.by_id = {tool.spec.id: tool for tool in self.tools.values()}

    def _place(self, spec: OperationSpec, meta: Mapping[str, Any], offered: list[Resource]) -> bool:
        """Add an operation to the resources if `meta` requires it; return whether the operation is a tool."""
        options = meta.get("resource")
        if isinstance(options, Mapping):
            try:
                offered.append(Resource(spec, cast("Mapping[str, Any]", options)))
            except InvalidUriTemplate as error:
                logger.warning("%s is not served as a resource: %s", spec.id, error)
        return bool(meta.get("tool", not (options or meta.get("prompt"))))

    def changes_from(self, other: "Catalog") -> set[str]:
        """Return the listings that differ from another catalog: `tools`, `resources`, `prompts`."""
        mine, theirs = self.listed(), other.listed()
        return {kind for kind, listed in mine.items() if listed != theirs[kind]}

    def listed(self) -> dict[str, dict[str, Any]]:
        """Return the listed specs by name. Specs are frozen, so that comparing their identities is enough."""
        resources = (*self.resources.values(), *self.templates)
        return {
            "tools": {name: id(tool.spec) for name, tool in self.tools.items()},
            "resources": {
                resource.public_uri: (id(resource.spec), resource.listed) for resource in resources
            },
            "prompts": {name: id(prompt.spec) for name, prompt in self.prompts.items()},
        }
