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

An operation that is a prompt returns:

    "text"                                                  one message of the user
    {"role": "assistant", "content": "text" or a block}     one message
    [message or text, ...]                                  several
    {"description": "...", "messages": [...]}               with a description
    an MCP envelope                                         one message of the user for each of its blocks

Rule 1: a catalog describes one revision of the registry, and builds each listing on first use.
Rule 2: the name of an operation is a function of its id (`operations.base.text`), unless `meta["mcp"]["name"]` sets
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
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import mcp_types as types
from mcp import MCPError
from mcp.shared.uri_template import InvalidUriTemplate
from msgspec import to_builtins

from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_REQUEST_VALUES,
    JSONValueError,
    is_list,
    is_object,
    list_of,
    object_of,
)
from operations.base.text import TOOL_NAME, NameStyle, tool_name
from operations.base.types import JSONObject
from operations.contract.envelopes import (
    HTTPResponseMeta,
    MCPResponseMeta,
    ResourceContent,
    ResponseEnvelope,
    sniffed,
)
from operations.contract.specs import OperationSpec, SourceInfo
from operations.mcp.serving.apps import view_of, views_of
from operations.mcp.serving.tools import GATEWAY_TOOLS, Tool, model_text, text_block
from operations.mcp.shared import codec
from operations.mcp.shared.addresses import (
    LISTED,
    SCOPED,
    parse_template,
    rescoped,
    scoped,
    unscoped,
)
from operations.mcp.source.catalog import READ
from operations.registry.registry import OperationRegistry

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
        self.source = codec.server_of(spec)
        """The namespace of its server, if it was imported."""

        self.uri = str(options.get("uri", ""))
        self.public_uri = self.uri
        """The URI that clients use."""

        self.template = None
        if listed is None and "{" in self.uri:
            self.template = parse_template(self.uri)
        self.mime_type: str | None = options.get("mimeType") or codec.mcp_meta(spec).get("mimeType")

    def match(self, uri: str) -> JSONObject | None:
        """Return the variables of a template in a URI that clients use; None if the URI does not match."""
        if self.template is None:
            return None
        at_server = unscoped(uri) if self.public_uri != self.uri else None
        if at_server is not None:
            return self.template.match(at_server[1]) if at_server[0] == self.source else None
        prefix = self.public_uri.removesuffix(self.uri)
        if not uri.startswith(prefix):
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
            listed = rescoped(listed, self.source)
            entry = {key: listed[key] for key in LISTED if listed.get(key) is not None}
            entry = {**entry, uri_key: self.public_uri, "name": str(listed.get("name") or self.uri)}
            return codec.with_passed(entry, listed, codec.export_spec(spec))
        wire = {
            uri_key: self.uri,
            **codec.entry_of(spec, str(codec.mcp_meta(spec).get("name") or spec.id)),
        }
        if self.mime_type is not None:
            wire["mimeType"] = self.mime_type
        wire["_meta"] = {codec.META_KEY: codec.export_spec(spec)}
        return wire


class Addresses:
    """The resources and templates of a registry by the URIs that clients use.

    Args:
        offered: All resources and templates.
        readers: The operations that read any resource of a server, by namespace.
        pages: The addresses of the views of tools, each with the namespace of its server.
        skilled: The namespaces of servers with skills.
    """

    def __init__(
        self,
        offered: Iterable[Resource],
        readers: Mapping[str, OperationSpec],
        pages: Iterable[tuple[str, str]] = (),
        skilled: Collection[str] = (),
    ) -> None:
        self.resources: dict[str, Resource] = {}
        self.templates: list[Resource] = []
        self._readers = readers
        offered = list(offered)
        self._servers: dict[str, set[str]] = {}
        """The servers that have an address of a view or skill, by that address."""
        for uri, namespace in (*pages, *((each.uri, each.source) for each in offered)):
            if namespace is not None and uri.lower().startswith(SCOPED):
                self._servers.setdefault(uri, set()).add(namespace)
        self.scopes = set(skilled).union(*self._servers.values())
        """The namespaces of servers with such addresses."""
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
        place = self._place(uri)
        of_template = self._find_template(uri, sees)
        if of_template is not None and _spells(*of_template, place):
            return of_template
        namespace, address = place
        reader = self._readers.get(namespace)
        if reader is None or not address or not sees(reader):
            return of_template
        return Resource(reader, {"uri": address}, {"uri": address}), {"uri": address}

    def _find_template(
        self, uri: str, sees: Callable[[OperationSpec], bool]
    ) -> tuple[Resource, JSONObject] | None:
        for template in self.templates:
            variables = template.match(uri)
            if variables is not None and sees(template.spec):
                return template, variables
        return None

    def _place(self, uri: str) -> tuple[str, str]:
        """Return the namespace and the address at its server for a URI of clients, or one that only one server has."""
        if uri.startswith(f"{_SCHEME}//"):
            namespace, _, address = uri.removeprefix(f"{_SCHEME}//").partition("/")
            return namespace, address
        namespace, address = unscoped(uri) or ("", "")
        servers = self._servers.get(uri, set())
        if namespace in servers:
            return namespace, uri
        if len(servers) == 1 and namespace not in self._readers:
            return next(iter(servers)), uri
        return namespace, address

    def is_known(self, namespace: str, uri: str) -> bool:
        """Return whether a server lists an address of a view or skill, or names it as the view of a tool."""
        return namespace in self._servers.get(uri, ())

    def public(self, namespace: str, uri: str) -> str | None:
        """Return the URI that clients use for a URI of a server; None if no resource claims it."""
        if uri.lower().startswith((_SCHEME, *SCOPED)):
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


def _spells(resource: Resource, variables: JSONObject, place: tuple[str, str]) -> bool:
    """Return whether a template gives the address at the server in the spelling that was asked for.

    Its variables have other encodings of the same characters. Other addresses than those of views and skills are always
    read by their template, which checks them.
    """
    if resource.source is None or unscoped(resource.public_uri) is None:
        return True
    try:
        return resource.address(variables) == place[1]
    except (TypeError, ValueError):
        return True


def prefixed(namespace: str, uri: str) -> str:
    """Return the URI of a server's resource that no other source can claim."""
    return scoped(namespace, uri) or f"{_SCHEME}//{namespace}/{uri}"


def _claimed(template: str) -> str:
    """Return the prefix of all URIs of a template; empty if it has no scheme."""
    text = template.partition("{")[0]
    is_ours = text.lower().startswith((_SCHEME, *SCOPED))
    return text if _NAMED.match(text) and not is_ours else ""


def _is_free(
    resource: Resource,
    listed: Mapping[str, set[str | None]],
    claims: Iterable[tuple[str, str | None]],
) -> bool:
    """Return whether no other source can claim the URI of an imported resource or template."""
    own = _claimed(resource.uri) if resource.template is not None else resource.uri
    if not own or own.lower().startswith((_SCHEME, *SCOPED)):
        return False
    if resource.template is None and len(listed[resource.uri]) > 1:
        return False
    others = (claim for claim, source in claims if source != resource.source)
    if resource.template is None:
        return not any(own.startswith(claim) for claim in others)
    return not any(own.startswith(claim) or claim.startswith(own) for claim in others)


# ------------------------------------------------------------ names


def specs_by_name(
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


def _chosen(spec: OperationSpec) -> str | None:
    name = codec.mcp_meta(spec).get("name")
    return name if isinstance(name, str) and TOOL_NAME.fullmatch(name) else None


# ------------------------------------------------------------ prompts

logger = logging.getLogger("operations.mcp")


class Prompt:
    """An operation as a prompt."""

    def __init__(self, name: str, spec: OperationSpec) -> None:
        self.name = name
        self.spec = spec
        self.source = codec.server_of(spec)

    def wire(self) -> JSONObject:
        """Return the prompt in a listing."""
        wire = codec.entry_of(self.spec, self.name)
        wire["arguments"] = self._arguments()
        return codec.with_passed(wire, self.spec.meta, codec.export_spec(self.spec))

    def _arguments(self) -> list[JSONObject]:
        if codec.is_imported(self.spec):
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


def prompt_result(envelope: ResponseEnvelope[Any], spec: OperationSpec) -> JSONObject:
    """Return the `prompts/get` result of an envelope."""
    data, meta = envelope.data, envelope.meta
    description = "" if codec.is_imported(spec) else spec.description
    if is_object(data) and is_list(data.get("messages")):
        description = data.get("description") or description
        data = data["messages"]
    elif isinstance(meta, MCPResponseMeta):
        data = [{"role": "user", "content": block} for block in to_builtins(meta.content)]
    messages = data if is_list(data) else [data]
    result: JSONObject = {"messages": [_message(message) for message in messages]}
    if description:
        result["description"] = description
    passed = codec.passed_meta(meta.meta) if isinstance(meta, MCPResponseMeta) else {}
    return {**result, "_meta": passed} if passed else result


def _message(value: Any) -> JSONObject:
    content = object_of(value).get("content")
    if isinstance(content, str):
        content = text_block(content)
    if is_object(content):
        return {"role": value.get("role", "user"), "content": content}
    return {"role": "user", "content": text_block(model_text(value))}


# ------------------------------------------------------------ contents of resources


def resource_result(
    envelope: ResponseEnvelope[Any], uri: str, resource: Resource, addresses: Addresses
) -> JSONObject:
    """Return the `resources/read` result of an envelope: text, a blob, or the contents that an MCP server returned.

    Args:
        envelope: The outcome of the operation.
        uri: The requested URI.
        resource: The resource that was read.
        addresses: The URIs of all resources.
    """
    data, meta, mime_type = envelope.data, envelope.meta, resource.mime_type
    if resource.source is not None and isinstance(meta, MCPResponseMeta):
        return _imported(envelope, uri, resource, addresses)
    if isinstance(meta, MCPResponseMeta):
        passed_on = [
            to_builtins(block.resource)
            for block in meta.content
            if isinstance(block, ResourceContent)
        ]
        if passed_on:
            return {"contents": passed_on}
    if mime_type is None and isinstance(meta, HTTPResponseMeta):
        mime_type = meta.content_type or None
    content: JSONObject = {"uri": uri}
    if isinstance(data, bytes):
        content["mimeType"] = mime_type or sniffed(data)
        content["blob"] = b64encode(data).decode("ascii")
    else:
        content["mimeType"] = mime_type or (
            "text/plain" if isinstance(data, str) else "application/json"
        )
        content["text"] = model_text(data)
    return {"contents": [content]}


def _imported(
    envelope: ResponseEnvelope[Any], uri: str, resource: Resource, addresses: Addresses
) -> JSONObject:
    namespace = cast("str", resource.source)
    contents: list[JSONObject] = []
    for each in list_of(envelope.data):
        content: JSONObject = dict(object_of(each))
        given = str(content.get("uri", ""))
        # The requested resource has the requested URI; other contents have their own URIs.
        is_read = prefixed(namespace, given) == uri
        content["uri"] = uri if is_read or given == uri else addresses.link(namespace, given)
        if "_meta" in content:
            content["_meta"] = codec.passed_meta(rescoped(content["_meta"], namespace))
        contents.append(content)
    result: JSONObject = {"contents": contents}
    passed = codec.passed_meta(cast("MCPResponseMeta", envelope.meta).meta)
    return {**result, "_meta": rescoped(passed, namespace)} if passed else result


def publish_addresses(blocks: Iterable[JSONObject], namespace: str, addresses: Addresses) -> None:
    """Replace the URIs in blocks of an imported tool or prompt by the URIs that clients of this server use.

    The URI of an embedded resource changes only if another source claims it.
    """
    for block in blocks:
        if "_meta" in block:
            block["_meta"] = rescoped(block["_meta"], namespace)
        if block.get("type") == "resource_link":
            block["uri"] = addresses.link(namespace, str(block.get("uri", "")))
        elif block.get("type") == "resource":
            resource = object_of(block.get("resource"))
            uri = str(resource.get("uri", ""))
            resource = {**resource, "uri": addresses.public(namespace, uri) or uri}
            if "_meta" in resource:
                resource["_meta"] = rescoped(resource["_meta"], namespace)
            block["resource"] = resource


def arguments_from_text(spec: OperationSpec, values: Mapping[str, Any]) -> JSONObject:
    """Convert an input whose values were sent as text: decode values that should not be strings as JSON."""
    properties = properties_of(spec)
    return {name: _read(value, properties.get(name, {})) for name, value in values.items()}


def _read(value: Any, schema: JSONObject) -> Any:
    kind = schema.get("type")
    if not isinstance(value, str) or kind is None or kind == "string" or "string" in kind:
        return value
    try:
        return decode_json(value, max_values=MAX_REQUEST_VALUES)
    except JSONValueError:
        # The validation of the operation reports the error.
        return value


# ------------------------------------------------------------ the catalog


class Catalog:
    """The listings of a registry at one revision.

    Attributes:
        views: The tools of each server with views, by namespace and by their names at the server.

    It also contains operations whose schemas cannot be built, because building all takes long: they are omitted when
    they are listed, and not found when they are called.
    """

    def __init__(self, registry: OperationRegistry, style: NameStyle, budget: int) -> None:
        self.revision = registry.revision
        prompts = [spec for spec in registry.specs() if codec.mcp_meta(spec).get("prompt")]
        self.prompts = {
            name: Prompt(name, spec) for name, spec in specs_by_name(prompts, style).items()
        }
        offered: list[Resource] = []
        tools: list[OperationSpec] = []
        readers: dict[str, OperationSpec] = {}
        self.instructions: dict[tuple[str, str], list[OperationSpec]] = {}
        """The operations of sources with instructions, by namespace and instructions."""
        self.sources: dict[str, SourceInfo] = {}
        """The MCP servers of imported operations, by namespace."""
        self.of_sources: dict[str, list[OperationSpec]] = {}
        """These operations, by namespace."""
        for operation in registry:
            spec = operation.spec
            info, source = operation.source_info, codec.server_of(spec) or spec.namespace
            if info is not None:
                self.sources[source] = info
                self.of_sources.setdefault(source, []).append(spec)
                if info.instructions:
                    key = (source, info.instructions)
                    self.instructions.setdefault(key, []).append(spec)
            if codec.is_imported(spec) and spec.name == READ:
                readers[spec.namespace] = spec
                offered += [Resource(spec, entry, entry) for entry in operation.resources]
            if self._place(spec, codec.mcp_meta(spec), offered):
                tools.append(spec)
        imported = [(spec, codec.server_of(spec)) for spec in registry.specs()]
        pages = {(view_of(spec.meta), source) for spec, source in imported if source is not None}
        skilled = {source for spec, source in imported if source and spec.name == "skills.list"}
        self.addresses = Addresses(offered, readers, pages, skilled)
        self.resources = self.addresses.resources
        self.templates = self.addresses.templates
        names = specs_by_name(tools, style, reserved=GATEWAY_TOOLS)
        counts = Counter(spec.namespace for spec in tools)
        self.tools = {
            name: Tool(
                name,
                spec,
                budget,
                operation=registry.get(spec.id),
                siblings=counts[spec.namespace],
                policy=registry.output_of(spec.id),
            )
            for name, spec in names.items()
        }
        self.by_id = {tool.spec.id: tool for tool in self.tools.values()}
        self.views = views_of(self.tools.values())

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


# ------------------------------------------------------------ pages of a listing

ItemT = TypeVar("ItemT")


def page_of(
    items: Sequence[ItemT], cursor: str | None, size: int
) -> tuple[Sequence[ItemT], str | None]:
    """Return the items after the one that the cursor names, and the cursor of the next page.

    Raises:
        MCPError: If there is no such item: it was removed, or the cursor is not valid.
    """
    start = 0
    if cursor is not None:
        start = next((at for at, item in enumerate(items, 1) if _cursor(item) == cursor), 0)
        if not start:
            message = "Invalid cursor: the list has changed; list again from the beginning"
            raise MCPError(types.INVALID_PARAMS, message)
    end = start + size
    return items[start:end], _cursor(items[end - 1]) if end < len(items) else None


def _cursor(item: Any) -> str:
    """Return the cursor of the page after an item: its operation and, if it is a resource, its URI."""
    return f"{item.spec.id} {getattr(item, 'uri', '')}"
