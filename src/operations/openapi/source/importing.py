"""Create operations from a document: names, the operator's rules, specs and handlers.

Rule 1: an import reads the document in one pass, and reads only the parts that specs need.
Rule 2: operations of an exported registry are restored with their own input, names and error codes only if the operator
        trusts the export (`HTTPServiceConfig.restore`), because such a document decides which calls may be repeated.
"""

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import msgspec

from operations.base.errors import CallError
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_RESPONSE_VALUES,
    JSONValueError,
    is_object,
    list_of,
    object_of,
    text_of,
)
from operations.base.text import counted, hides_something, printable, suggestion
from operations.base.types import JSONObject, JSONSchema
from operations.contract.access import OPEN, AccessControl
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope, read_changes
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.io.files import FilesRoot
from operations.io.hosts import TrustedHosts
from operations.io.http.client import REPEATABLE, SAFE, Draft
from operations.openapi.reading.document import (
    Declared,
    DeclaredResponses,
    Description,
    DocumentOperation,
    Problem,
)
from operations.openapi.reading.files import Bundle
from operations.openapi.reading.media import EVENT_STREAM
from operations.openapi.reading.model import operation_names, safe_identifier, short_names
from operations.openapi.serving.components import (
    AUTHORITY,
    Exported,
    item_schema,
    read_extension,
    restore_schema,
)
from operations.openapi.source.client import ServiceClient
from operations.openapi.source.config import HTTPServiceConfig, OperationOutline
from operations.openapi.source.endpoint import Endpoint
from operations.openapi.source.paging import Paging, declared_paging
from operations.openapi.source.parameters import unused_name
from operations.openapi.source.request_plan import BODY
from operations.openapi.source.responses import WholeResponse
from operations.sources.credentials import CallerToken

_JSON = "application/json"
_META = "operations-meta"
"""Requests the meta of an envelope; the response contains it in the header of the same name."""


class ExportedEndpoint(Endpoint):
    """One operation of an exported registry."""

    __slots__ = ("_exported",)

    def __init__(
        self,
        client: ServiceClient,
        description: Description,
        entry: DocumentOperation,
        exported: Exported,
    ) -> None:
        is_stream = exported.type is OperationType.SUBSCRIPTION
        super().__init__(client, description, entry, is_stream=is_stream)
        self._exported = exported

    def input_schema(self) -> JSONSchema:
        """Return the original schema of the exported operation."""
        body = object_of(self.entry.operation.get("requestBody"))
        return self._original(_schema_in(body, _JSON), self._exported.input_schema)

    def output_schema(self) -> JSONSchema:
        """Return the original schema of the exported operation."""
        good = object_of(object_of(self.entry.operation.get("responses")).get("200"))
        shown = _schema_in(good, EVENT_STREAM if self.is_stream else _JSON)
        if self.is_stream:
            shown = item_schema(shown)
        return self._original(shown, self._exported.output_schema)

    async def call(self, input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        """Make one exchange.

        Raises:
            CallError: The error of the remote operation.
        """
        try:
            return await super().call(input, context)
        except CallError as error:
            raise original_error(error) from error

    async def subscribe(
        self, input: Any, context: OperationContext
    ) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the operation's items.

        Raises:
            CallError: The error of the remote operation.
        """
        try:
            async with aclosing(super().subscribe(input, context)) as items:
                async for item in items:
                    yield item
        except CallError as error:
            raise original_error(error) from error

    def _draft(self, input: Any) -> Draft:
        draft = super()._draft(input)
        draft.headers[_META] = "true"
        if not self.is_stream:
            # Request bytes unencoded if the server supports both forms.
            draft.headers["Accept"] = "*/*"
        return draft

    def _arguments(self, input: Any) -> Any:
        return {BODY: super()._arguments(input)}

    def _envelope(self, response: WholeResponse) -> ResponseEnvelope[Any]:
        headers = {name: text for name, text in response.headers.items() if name != _META}
        envelope = super()._envelope(msgspec.structs.replace(response, headers=headers))
        try:
            there = decode_json(response.headers.get(_META, "{}"), max_values=MAX_RESPONSE_VALUES)
        except JSONValueError:
            return envelope
        return read_changes(envelope, there)

    def _original(self, shown: JSONSchema, whole: JSONSchema | None) -> JSONSchema:
        if whole is not None:
            return whole
        return restore_schema(shown, _components(self._description), self._exported.components)


def _components(description: Description) -> JSONObject:
    components = object_of(description.document.get("components"))
    return object_of(components.get("schemas"))


def _schema_in(holder: JSONObject, media_type: str) -> JSONSchema:
    content = object_of(holder.get("content"))
    schema: Any = object_of(content.get(media_type)).get("schema", True)
    return schema if is_object(schema) or isinstance(schema, bool) else True


def original_error(error: CallError) -> CallError:
    """Return the original error of an exported operation from its response; other errors unchanged."""
    body = object_of(object_of(error.details).get("body"))
    if text_of(body.get("code")) and isinstance(body.get("message"), str):
        return CallError.from_wire(body)
    return error


_LOGGER = logging.getLogger("operations")
PAGES = ".pages"
"""Suffix of the name of a subscription to all pages of an operation."""

STREAM = ".stream"
"""Suffix of the name of a subscription to the streamed response of an operation."""


class Importer:
    """Creates the operations of one document.

    Args:
        bundle: The document and the files it refers to.
        config: The operator's settings.
        address: The address that the document was fetched from.
        source: The name of the document in messages.

    Attributes:
        description: The document.
        client: Sends the requests of all operations.
    """

    def __init__(
        self, bundle: Bundle, config: HTTPServiceConfig, *, address: str | None, source: str | None
    ) -> None:
        self._config = config
        self.description = description = Description(
            bundle.document, bundle.missing, address, bundle.memory
        )
        if config.files_root is not None:
            description.schemas.files.root = FilesRoot(config.files_root)
        schemes = description.reader.security_schemes()
        for name in config.credentials:
            if name not in schemes:
                known = ", ".join(schemes) or "none; auth= is used without security schemes"
                _LOGGER.warning(
                    "%s: the credential %r does not belong to a security scheme of the document (it has %s)",
                    config.namespace,
                    name,
                    printable(known),
                )
        urls = [url for url in (config.base_url, address) if url is not None]
        self.client = ServiceClient(
            config,
            TrustedHosts(urls, config.allowed_hosts),
            config.base_url or address or "",
            schemes,
            description.document.get("security"),
        )
        self._responses = DeclaredResponses(description)
        self._restored: list[Operation] = []
        self._taken: set[str] = set()
        self._version = text_of(description.info.get("version")) or "1.0.0"
        self._source = source or description.title or "openapi"

    def operations(self) -> list[Operation]:
        """Return the operations; log parts that cannot be imported, and add them to the problems of the description."""
        # Names are assigned after this pass, because they depend on all operations.
        entries = list(self._exported()) if self._config.restore else self.description.entries()
        found = [self._responses.read(entry) for entry in entries]
        names = self._names(found)
        self._report_unknown({*names, *(each.spec.name for each in self._restored)})
        operations = [*self._restored, *self._created(found, names)]
        self._report_problems()
        # Each text once, because operations may share a long one.
        hiding_texts = set(filter(hides_something, {each.spec.description for each in operations}))
        hiding = [each.spec.id for each in operations if each.spec.description in hiding_texts]
        if hiding:
            text = "%s: the descriptions of %s contain invisible characters, for example that of %s"
            _LOGGER.warning(
                text, printable(self._source), counted(len(hiding), "operation"), hiding[0]
            )
        return operations

    def _names(self, found: list[Declared]) -> list[str]:
        """Return the name of each operation, different from the names of restored operations."""
        wanted = [
            (text_of(each.operation.get("operationId")), each.method, each.path)
            for each in (declared.entry for declared in found)
        ]
        if self._config.operation_ids == "short":
            short = short_names(wanted)
            pairs = zip(short, wanted, strict=True)
            wanted = [(name, method, path) for name, (_, method, path) in pairs]
        names = operation_names(wanted)
        namespace = self._config.namespace
        restored = {each.spec.name for each in self._restored if each.spec.namespace == namespace}
        self._taken = {*names, *restored}
        if restored:
            names = [unused_name(name, self._taken) if name in restored else name for name in names]
            self._taken.update(names)
        return names

    def _report_unknown(self, names: set[str]) -> None:
        """Warn of rules for operations that the document does not have: their names are misspelled, or it changed."""
        for key in ("rename", "pagination"):
            rule: object = getattr(self._config, key)
            for name in cast("Mapping[str, object]", rule) if isinstance(rule, Mapping) else ():
                if name not in names:
                    message = "%s: %s names %r, which is not an operation of the document.%s"
                    near = suggestion(name, names)
                    _LOGGER.warning(message, self._config.namespace, key, name, near)

    def _created(self, found: list[Declared], names: list[str]) -> Iterator[Operation]:
        """Yield the operations that the rules of the config select."""
        config, named = self._config, zip(found, names, strict=True)
        rules = (config.include, config.exclude, config.rename, config.pagination, config.access)
        if all(rule is None for rule in rules):
            for declared, name in named:
                yield from self._operations(declared, name, OPEN)
            return
        outlined = [(declared, _outline(declared.entry, name)) for declared, name in named]
        wanted = [(d, o, self._renamed(o)) for d, o in outlined if self._is_wanted(o)]
        self._taken.update(name for _, _, name in wanted)
        for declared, outline, name in wanted:
            yield from self._ruled(declared, outline, name)

    def _report_problems(self) -> None:
        config, description = self._config, self.description
        is_signed = config.auth is not None or "authorization" in map(str.lower, config.headers)
        if description.unsigned and not is_signed:
            first, *others = description.unsigned
            where = f"{first} and {len(others)} more" if others else first
            reason = "a required header 'Authorization' has no security scheme: set auth="
            description.problems.append(Problem(where, reason, is_skipped=False))
        for problem in description.problems:
            text = f"{self._source}: {problem.where}: {problem.reason}"
            _LOGGER.warning("%s", printable(text))

    def _exported(self) -> Iterator[DocumentOperation]:
        """Yield the entries without a usable extension; add the operations that extensions restore."""
        for entry in self.description.entries():
            exported = read_extension(entry.operation)
            if exported is None:
                yield entry
            elif exported.same_as is None:
                name = exported.id.partition(".")[2]
                self._responses.read(entry)
                outline = _outline(entry, name)
                if self._is_wanted(outline):
                    self._restore(entry, exported, self._access(outline))

    def _restore(self, entry: DocumentOperation, exported: Exported, access: AccessControl) -> None:
        """Add an exported operation, or the problem if its extension does not describe a valid operation."""
        namespace, _, name = exported.id.partition(".")
        endpoint = ExportedEndpoint(self.client, self.description, entry, exported)
        try:
            spec = OperationSpec(
                namespace=namespace,
                name=name,
                version=exported.version,
                type=exported.type or OperationType.MUTATION,
                title=None if exported.untitled else _title(entry.operation),
                description=text_of(entry.operation.get("description")),
                tags=exported.own_tags(_tags(entry.operation)),
                input_schema=endpoint.input,
                output_schema=endpoint.output,
                error_schemas=exported.error_schemas(_components(self.description)),
                access_control=access,
                idempotent=exported.idempotent,
                authority=_is_marked(entry),
                meta={"method": entry.method, "path": entry.path, "source": self._source},
            )
        except ValueError as error:
            where = f"{entry.method} {entry.path}"
            self.description.problems.append(Problem(where, f"it cannot be restored: {error}"))
        else:
            self._restored.append(self._bound(spec, endpoint))

    def _ruled(
        self, declared: Declared, outline: OperationOutline, name: str
    ) -> Iterator[Operation]:
        """Yield the selected variants of one operation: the call, its stream and its pages."""
        first, *streams = self._operations(declared, name, self._access(outline))
        yield first
        exclude = self._config.exclude
        stream = replace(outline, name=outline.name + STREAM)
        if exclude is None or not exclude(stream):
            yield from streams
        yield from self._pages(declared.entry, first, outline)

    def _operations(self, declared: Declared, name: str, access: AccessControl) -> list[Operation]:
        """Return an operation, and a subscription if the document also declares its response as a stream."""
        if not declared.is_split:
            return [self._operation(declared, name, access, is_stream=declared.has_stream)]
        stream = unused_name(name + STREAM, self._taken)
        return [
            self._operation(declared, name, access, is_stream=False),
            self._operation(declared, stream, access, is_stream=True),
        ]

    def _operation(
        self, declared: Declared, name: str, access: AccessControl, *, is_stream: bool
    ) -> Operation:
        entry = declared.entry
        method, operation, title = entry.method, entry.operation, _title(entry.operation)
        description = self.description.references.text_at(operation.get("description"))
        meta: JSONObject = {"method": method, "path": entry.path, "source": self._source}
        if operation.get("deprecated") is True:
            meta["deprecated"] = True
        if declared.links:
            meta["links"] = declared.links
        endpoint = Endpoint(
            self.client,
            self.description,
            entry,
            is_stream=is_stream,
            is_split=declared.is_split,
            is_long=not is_stream and self._is_long(entry, name),
        )
        if is_stream:
            kind = OperationType.SUBSCRIPTION
        else:
            kind = OperationType.QUERY if method in SAFE else OperationType.MUTATION
        spec = OperationSpec(
            name=name,
            namespace=self._config.namespace,
            version=self._version,
            type=kind,
            title=title,
            description=description or title or f"{method} {entry.path}",
            tags=_tags(operation),
            input_schema=endpoint.input,
            output_schema=endpoint.output,
            error_schemas=declared.errors,
            access_control=access,
            idempotent=method in REPEATABLE - SAFE,
            authority=_is_marked(entry),
            meta=meta,
        )
        return self._bound(spec, endpoint, None if is_stream else endpoint)

    def _bound(
        self, spec: OperationSpec, endpoint: Endpoint, files: Endpoint | None = None
    ) -> Operation:
        """Return a spec with the handler that sends one request for each call."""
        return Operation(
            spec,
            endpoint.subscribe if endpoint.is_stream else endpoint.call,
            self._config.output,
            blocking=False,
            files=files,
            source_timeout=self._config.timeout,
            forwards=True,
            input=self._config.input,
            exact_schemas=self._config.exact_schemas,
            descriptions=self._config.descriptions,
            durable=endpoint.is_long,
            keyed=self._config.idempotency,
            needs_token=self._config.exchanges_tokens,
        )

    def _is_long(self, entry: DocumentOperation, name: str) -> bool:
        """Return whether calls of an operation are runs, which wait for what the API does after its response."""
        names = self._config.long_running
        if names is not None:
            return any(fnmatchcase(name, pattern) for pattern in names)
        # A run stores no tokens of its caller.
        of_caller = isinstance(getattr(self._config.auth, "token", None), CallerToken) or any(
            isinstance(each, CallerToken) for each in self._config.credentials.values()
        )
        return not of_caller and entry.operation.get("x-ms-long-running-operation") is True

    def _is_wanted(self, outline: OperationOutline) -> bool:
        include, exclude = self._config.include, self._config.exclude
        if include is not None and not include(outline):
            return False
        return exclude is None or not exclude(outline)

    def _renamed(self, outline: OperationOutline) -> str:
        rename = self._config.rename
        if rename is None:
            return outline.name
        wanted = rename(outline) if callable(rename) else rename.get(outline.name, outline.name)
        name = safe_identifier(wanted)
        if not name:
            raise ValueError(f"{outline.name} cannot be renamed to {wanted!r}")
        return name

    def _access(self, outline: OperationOutline) -> AccessControl:
        access = self._config.access
        if access is None:
            return OPEN
        return access if isinstance(access, AccessControl) else access(outline)

    def _pages(
        self, entry: DocumentOperation, listed: Operation, outline: OperationOutline
    ) -> Iterator[Operation]:
        """Yield the subscription to all pages, if the document declares paging arguments."""
        paging = self._paging(entry, outline)
        spec = listed.spec
        if paging is None or spec.type is not OperationType.QUERY:
            return
        endpoint = Endpoint(self.client, self.description, entry, is_stream=False)
        pages = msgspec.structs.replace(
            spec,
            name=unused_name(spec.name + PAGES, self._taken),
            type=OperationType.SUBSCRIPTION,
            description=f"Every page of {spec.id}, one by one.",
            input_schema=endpoint.input,
            output_schema=endpoint.output,
        )
        handler = partial(endpoint.pages, paging)
        yield Operation(
            pages,
            handler,
            self._config.output,
            blocking=False,
            input=self._config.input,
            exact_schemas=self._config.exact_schemas,
            descriptions=self._config.descriptions,
        )

    def _paging(self, entry: DocumentOperation, outline: OperationOutline) -> Paging | None:
        rule = self._config.pagination
        if rule is None:
            return None
        if rule == "document":
            responses = object_of(entry.operation.get("responses"))
            found = {
                str(s): self.description.schemas.definitions.resolve(r)
                for s, r in responses.items()
            }
            return declared_paging(entry.operation, found)
        return rule(outline) if callable(rule) else rule.get(outline.name)


def _is_marked(entry: DocumentOperation) -> bool:
    """Return whether an operation object says that it administers authority."""
    return entry.operation.get(AUTHORITY) is True


def _title(operation: JSONObject) -> str | None:
    summary = operation.get("summary")
    return summary if isinstance(summary, str) else None


def _tags(operation: JSONObject) -> tuple[str, ...]:
    return tuple([tag for tag in list_of(operation.get("tags")) if type(tag) is str])


def _outline(entry: DocumentOperation, name: str) -> OperationOutline:
    return OperationOutline(
        method=entry.method,
        path=entry.path,
        name=name,
        tags=_tags(entry.operation),
        deprecated=entry.operation.get("deprecated") is True,
    )
