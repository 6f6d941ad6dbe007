"""Give every resource an address that belongs to it alone.

Rule 1: an operation that is a resource has the address that its author chose.
Rule 2: a resource or template of another server keeps its address only if no other source can claim it. Otherwise,
        and always under our own scheme, it is `operations://<namespace>/<address>`. So no server can offer its
        resources as those of another, and every one of them can be read by that longer address.
Rule 3: a template claims every address that begins with the text before its first variable. If that text does not
        name a scheme, the template claims none.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from mcp.shared.uri_template import UriTemplate

from operations.mcp.codec import META_KEY, export_spec, is_imported, mcp_meta, with_passed
from operations.mcp.resources import LISTED
from operations.specs import OperationSpec
from operations.types import JSONObject

_SCHEME: Final = "operations:"
_NAMED: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_FOREIGN: Final = re.compile(r"https?:", re.IGNORECASE)


class Resource:
    """An operation as a resource, or as a template of resources.

    Args:
        spec: The operation.
        options: `uri`, which may be a template, and `mimeType`.
        listed: The entry of an imported resource at its server; None if the operation is the resource itself.

    Raises:
        InvalidUriTemplate: If its URI is no such template.
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
        """The namespace of the server that it was imported from."""

        self.uri = str(options.get("uri", ""))
        self.public_uri = self.uri
        """The address that clients use."""

        self.template = None
        if listed is None and "{" in self.uri:
            self.template = UriTemplate.parse(self.uri)
        self.mime_type: str | None = options.get("mimeType") or mcp_meta(spec).get("mimeType")

    def match(self, uri: str) -> JSONObject | None:
        """Return the variables of a template in an address that clients use; None if it is not one of its own."""
        prefix = self.public_uri.removesuffix(self.uri)
        if self.template is None or not uri.startswith(prefix):
            return None
        return cast("JSONObject | None", self.template.match(uri.removeprefix(prefix)))

    def address(self, value: JSONObject) -> str:
        """Return the address at the server of what an imported resource or template reads with this input."""
        return self.uri if self.template is None else self.template.expand(value)

    def wire(self) -> JSONObject:
        """The resource, or template, in a listing."""
        spec = self.spec
        uri_key = "uri" if self.template is None else "uriTemplate"
        listed = spec.meta if self.template is not None else self.listed or {}
        if self.source is not None:
            entry = {key: listed[key] for key in LISTED if listed.get(key) is not None}
            entry = {**entry, uri_key: self.public_uri, "name": str(listed.get("name") or self.uri)}
            return with_passed(entry, listed, export_spec(spec))
        wire: JSONObject = {uri_key: self.uri}
        wire["name"] = str(mcp_meta(spec).get("name") or spec.id)
        if spec.title is not None:
            wire["title"] = spec.title
        if spec.description:
            wire["description"] = spec.description
        if self.mime_type is not None:
            wire["mimeType"] = self.mime_type
        wire["_meta"] = {META_KEY: export_spec(spec)}
        return wire


class Addresses:
    """The resources and templates of a registry by the addresses that clients use.

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
        """Return the resource at an address, and what its variables are; None if there is none to see."""
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
        """Return the address that clients use for an address of a server; None if no resource claims it."""
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
        """Return the address under which a client can read what a server links to."""
        public = self.public(namespace, uri)
        if public is None and namespace in self._readers and not _FOREIGN.match(uri):
            return prefixed(namespace, uri)
        return public or uri


def prefixed(namespace: str, uri: str) -> str:
    """Return the address of a server's resource that no other source can claim."""
    return f"{_SCHEME}//{namespace}/{uri}"


def _claimed(template: str) -> str:
    """Return the text with which every address of a template begins; empty if it does not name a scheme."""
    text = template.partition("{")[0]
    is_ours = text.lower().startswith(_SCHEME)
    return text if _NAMED.match(text) and not is_ours else ""


def _is_free(
    resource: Resource,
    listed: Mapping[str, set[str | None]],
    claims: Iterable[tuple[str, str | None]],
) -> bool:
    """Return whether no other source can claim the address of an imported resource or template."""
    own = _claimed(resource.uri) if resource.template is not None else resource.uri
    if not own or own.lower().startswith(_SCHEME):
        return False
    if resource.template is None and len(listed[resource.uri]) > 1:
        return False
    others = (claim for claim, source in claims if source != resource.source)
    if resource.template is None:
        return not any(own.startswith(claim) for claim in others)
    return not any(own.startswith(claim) or claim.startswith(own) for claim in others)
