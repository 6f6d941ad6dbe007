"""Read an API description: its version, its operations, their declared responses, and its problems.

Rule 1: an import reads only the parts that specs need; schemas and requests are read on first use.
Rule 2: an invalid part affects only its operation, which is skipped and reported.
Rule 3: each response, and the target of each reference, is read once, because documents repeat a few responses for
        every operation.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import msgspec

from operations.base.errors import DocumentError
from operations.base.json.values import is_list, is_object, list_of, object_of, text_of
from operations.base.text import counted
from operations.base.types import JSONObject, JSONSchema
from operations.contract.specs import ErrorDefinition
from operations.io.http.client import is_header
from operations.openapi.reading import media
from operations.openapi.reading.media import intended, is_stream
from operations.openapi.reading.memory import (
    ENTRY,
    OPERATION,
    PROBLEM,
    RESPONSE,
    ExpandsError,
    MemoryBudget,
)
from operations.openapi.reading.model import METHODS, OpenAPI3Reader, Swagger2Reader, best
from operations.openapi.reading.references import References
from operations.openapi.reading.schemas import Direction, SchemaConverter
from operations.schema import Schema

_METHODS = {spelled: method.upper() for method in METHODS for spelled in (method, method.upper())}
"""The method for each spelling; operations share the text."""


_VERSION = re.compile(r"2(\.0)?|3(\.[012](\..+)?)?")
_SWAGGER_KEYS = frozenset({"swagger", "definitions", "basePath", "host", "securityDefinitions"})


_MANY = 16
"""The number of parts of an operation up to which it does not matter that other operations share them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A part of a document that could not be used."""

    where: str
    """`GET /path` for an operation, a path, or a part of the document."""

    reason: str

    is_skipped: bool = True
    """Whether an operation was skipped because of the problem."""


class DocumentOperation(msgspec.Struct, gc=False):
    """One operation of the document, unconverted. A struct, because there may be tens of thousands."""

    path: str
    method: str
    item: JSONObject
    operation: JSONObject


class Description:
    """A decoded OpenAPI or Swagger document.

    Args:
        document: The document, decoded.
        missing: The reasons why referenced files could not be read, by path relative to the document.
        address: The address that it was fetched from, which server addresses may be relative to.
        memory: The memory that its operations may take.

    Raises:
        DocumentError: If it is not an object.
    """

    def __init__(
        self,
        document: Any,
        missing: Mapping[str, str] | None = None,
        address: str | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        if not is_object(document):
            raise DocumentError("the document must be an object")
        self.document: JSONObject = document
        self.address = address
        self.memory = memory or MemoryBudget()
        self.problems: list[Problem] = []
        self.version = self._version()
        self.is_swagger = self.version.startswith("2")
        self.references = References(self.document, missing)
        self.schemas = SchemaConverter(
            self.references, ref_siblings=not self.version.startswith(("2", "3.0"))
        )
        self.info = self.references.object_at(self.document.get("info"))
        kind = Swagger2Reader if self.is_swagger else OpenAPI3Reader
        self.reader: OpenAPI3Reader = kind(self.references, self.document)
        # Tuples, because a malformed document may have a value here that is not hashable.
        self._places = ("path", "query", "header")
        self._good: set[str] = set()
        """The references to valid parameters that are not authorization."""

        self._authorized: dict[int, JSONObject] = {}
        """The path items and operations with a required `Authorization` header, by `id()`."""

        self.unsigned: list[str] = []
        """The operations that require the header `Authorization` as a parameter, without a security scheme."""

    def _version(self) -> str:
        """Return the version of the document; report one that is missing or not known."""
        document = self.document
        given = document.get("openapi", document.get("swagger"))
        if _VERSION.fullmatch(str(given)):
            return str(given)
        is_swagger = "openapi" not in document and not _SWAGGER_KEYS.isdisjoint(document)
        version = "2.0" if is_swagger else "3.0" if given is None else "3.2"
        found = "it names no version" if given is None else f"its version {given!r} is not known"
        doubt = "" if "paths" in document else ": is it an OpenAPI document?"
        self.problems.append(
            Problem("document", f"{found}; read as {version}{doubt}", is_skipped=False)
        )
        return version

    @cached_property
    def all_problems(self) -> list[Problem]:
        """All parts of the document that could not be used, including unresolved references.

        Importing does not search for unresolved references, because the search takes longer than the rest.
        """
        self.problems.extend(
            Problem(place, f"its $ref cannot be resolved: {reason}", is_skipped=False)
            for place, reason in self.references.unresolved()
        )
        return self.problems

    def entries(self) -> Iterator[DocumentOperation]:
        """Yield every valid operation; `problems` has the others."""
        paths = self._paths()
        if not paths:
            self._note_webhooks()
        for key, node in paths.items():
            path = str(key)
            if path.startswith("x-"):
                continue
            try:
                item, shared = self._checked(self._merged(node))
            except ExpandsError:
                raise
            except DocumentError as error:
                self.memory.spend(PROBLEM + len(path))
                self.problems.append(Problem(path, f"the path cannot be read: {error}"))
                continue
            for method, operation in item.items():
                # Some documents have GET instead of get.
                name = _METHODS.get(method)
                if name is not None and (name != method or method.lower() not in item):
                    yield from self._entry(path, name, item, operation, shared)
            if "additionalOperations" in item:
                yield from self._additional(path, item, shared)

    def _additional(
        self, path: str, item: JSONObject, shared: str | None
    ) -> Iterator[DocumentOperation]:
        """Yield the operations of a path whose methods have no field of their own (OpenAPI 3.2)."""
        additional = item["additionalOperations"]
        if not is_object(additional):
            self.problems.append(Problem(path, "its additionalOperations are not an object"))
            return
        for method, operation in additional.items():
            problem = shared
            if not is_header(method, ""):
                problem = "its method is not an HTTP method"
            yield from self._entry(path, method.upper(), item, operation, problem)

    def _paths(self) -> JSONObject:
        node = self.document.get("paths", {})
        try:
            return self._merged(node)
        except DocumentError as error:
            self.problems.append(
                Problem("paths", f"they cannot be read: {error}", is_skipped=False)
            )
            return {}

    def _note_webhooks(self) -> None:
        """Report a document that has only webhooks."""
        webhooks = self.references.object_at(
            self.document.get("webhooks", self.document.get("x-webhooks"))
        )
        if webhooks:
            reason = (
                f"the document has {counted(len(webhooks), 'webhook')} and no paths:"
                " it describes requests that the API sends, and none that can be called"
            )
            self.problems.append(Problem("webhooks", reason, is_skipped=False))

    def _entry(
        self, path: str, method: str, item: JSONObject, operation: Any, problem: str | None
    ) -> Iterator[DocumentOperation]:
        """Yield an operation, or add its problem."""
        if not is_object(operation):
            problem = "the operation is not an object"
        elif problem is None:
            try:
                operation, problem = self._checked(operation)
                if problem is None and "requestBody" in operation:
                    problem = self._body_problem(operation["requestBody"])
            except ExpandsError:
                raise
            except DocumentError as error:
                problem = f"it cannot be read: {error}"
        if problem is None:
            kinds = _body_types(operation)
            self.memory.spend(_weight(path, operation, len(kinds)))
            yield self._examined(DocumentOperation(path, method, item, operation), kinds)
        else:
            self.memory.spend(PROBLEM + len(path))
            self.problems.append(Problem(f"{method} {path}", problem))

    def _examined(self, entry: DocumentOperation, kinds: Collection[Any]) -> DocumentOperation:
        """Return an operation after noting the problems of its request, which do not skip it."""
        operation = entry.operation
        for kind in map(text_of, kinds):
            if intended(kind) != kind:
                reason = f"the media type of its body is misspelt and read as {intended(kind)!r}"
                self.note(entry, reason)
        if id(entry.item) in self._authorized or id(operation) in self._authorized:
            own = operation.get("security")
            if not (self.document.get("security") if own is None else own):
                self.unsigned.append(f"{entry.method} {entry.path}")
        return entry

    def note(self, entry: DocumentOperation, reason: str) -> None:
        """Add a problem that does not skip its operation."""
        self.memory.spend(PROBLEM + len(entry.path))
        where = f"{entry.method} {entry.path}"
        self.problems.append(Problem(where, reason, is_skipped=False))

    def _body_problem(self, node: Any) -> str | None:
        if node is None or (is_object(node) and "$ref" not in node) or self.is_swagger:
            return None
        try:
            self.references.follow(node)
        except DocumentError as error:
            return f"its body cannot be read: {error}"
        return None

    def _checked(self, holder: JSONObject) -> tuple[JSONObject, str | None]:
        """Return a path item or an operation, and the problem of its parameters.

        References to itself, its parameters and its responses are resolved.

        Raises:
            DocumentError: If a reference cannot be resolved.
        """
        if "$ref" in holder:
            holder = self._merged(holder)
        parameters, responses = holder.get("parameters"), holder.get("responses")
        if is_object(parameters):
            parameters = self.references.value(parameters)
            holder = {**holder, "parameters": parameters}
        if is_list(parameters) and len(parameters) > _MANY:
            # They take no memory, but time for each operation that shares them.
            self.memory.spend(16 * len(parameters))
        if is_object(responses) and "$ref" in responses:
            holder = {**holder, "responses": self._merged(responses)}
        problem = self._parameters_problem(holder)
        if problem is not None and is_list(parameters := holder.get("parameters")):
            spread = self.references.list_at(parameters)
            if spread is not parameters:
                # An item of the list refers to a list.
                self.memory.spend(8 * len(spread))
                holder = {**holder, "parameters": spread}
                problem = self._parameters_problem(holder)
        return holder, problem

    def _merged(self, node: Any) -> JSONObject:
        """Return the object that `node` refers to, with the keywords beside the reference.

        Raises:
            DocumentError: If there is no object, or references form a cycle.
        """
        found = self.references.merged(node)
        if found is not node and len(node) > 1:
            self.memory.spend(ENTRY * len(found))
        return found

    def _parameters_problem(self, holder: JSONObject) -> str | None:
        parameters = holder.get("parameters")
        if parameters is None:
            return None
        if not is_list(parameters):
            return "its parameters are not a list"
        good, places = self._good, self._places
        # The hottest loop of an import: common valid cases take a short path.
        for node in cast("list[JSONObject]", parameters):
            if type(node) is not dict and not is_object(node):
                return "a parameter is not an object"
            ref = node.get("$ref")
            if ref is None:
                place = node.get("in")
                if place in places and type(node.get("name")) is str:
                    if place == "header" and _is_authorization(node):
                        self._authorized[id(holder)] = holder
                    continue
                problem = self.reader.check_parameter(node)
            elif type(ref) is str and ref in good:
                continue
            else:
                problem = self._referenced_problem(node, holder)
            if problem is not None:
                return problem
        return None

    def _referenced_problem(self, node: JSONObject, holder: JSONObject) -> str | None:
        """Return the problem of a parameter that is a reference; None if it is valid."""
        try:
            found = self.references.follow(node)
            problem = self.reader.check_parameter(found)
        except DocumentError as error:
            return f"a parameter cannot be read: {error}"
        if _is_authorization(found):
            self._authorized[id(holder)] = holder
        elif problem is None:
            self._good.add(node["$ref"])
        return problem

    @property
    def title(self) -> str:
        """The title of the document."""
        return self.references.text_at(self.info.get("title"))


def _weight(path: str, operation: JSONObject, kinds: int) -> int:
    """Return the memory in bytes that an imported operation takes; what it copies may be shared in the document."""
    texts = len(path) + len(text_of(operation.get("operationId")))
    responses, tags = object_of(operation.get("responses")), list_of(operation.get("tags"))
    # The types of its body take no memory, but time for each operation that shares them.
    return OPERATION + 2 * texts + 16 * (len(responses) + len(tags) + kinds)


def _is_authorization(node: JSONObject) -> bool:
    return (
        node.get("in") == "header"
        and node.get("required") is True
        and text_of(node.get("name")).lower() == "authorization"
    )


class Declared(msgspec.Struct, gc=False):
    """The declared responses of one operation."""

    entry: DocumentOperation
    errors: tuple[ErrorDefinition, ...]
    links: JSONObject | None

    has_stream: bool
    """Whether a successful response can be a stream."""

    has_other: bool
    """Whether a successful response can have another type."""

    @property
    def is_split(self) -> bool:
        """Whether a successful response is a stream or has another type, which are separate operations."""
        return self.has_stream and self.has_other


class DeclaredResponses:
    """Reads the declared responses of one document's operations."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._errors: dict[str, dict[str, ErrorDefinition]] = {}
        """Errors by status, then by a key that is equal for equal responses."""
        self._produces = description.document.get("produces")
        self._contents: dict[int, tuple[JSONObject, tuple[Any, ...]]] = {}
        """Many media types, and one of each sort of them, by `id()`."""
        self._seen: set[str] = set()
        """The references to responses that were reported."""

    def read(self, entry: DocumentOperation) -> Declared:
        """Return the declared responses of this operation."""
        errors: list[ErrorDefinition] = []
        links: JSONObject | None = None
        streams = others = False
        shared, references = self._errors, self._description.references
        declared = entry.operation.get("responses", {})
        if not is_object(declared):
            self._ignore(entry, "its responses are not an object")
        responses = cast("dict[str, JSONObject]", object_of(declared))
        for status, node in responses.items():
            if type(status) is not str:
                # YAML parses an unquoted 200 as a number.
                status = str(status)  # noqa: PLW2901 - the same status, spelled
            if type(node) is not dict and not is_object(node):
                if status[:2] != "x-":
                    self._ignore(entry, f"its response {status} is not an object")
                continue
            ref = node.get("$ref")
            same_status = shared.get(status)
            if same_status is not None and type(ref) is str and ref in same_status:
                errors.append(same_status[ref])
                continue
            if status[:1] != "2":
                if status[:2] != "x-":
                    errors.append(self._error(entry, status, node))
                continue
            found = self._found(entry, status, node)
            if "links" in found:
                links = self._with_links(links, object_of(found["links"]))
            content = references.object_at(found.get("content"))
            for kind in content if len(content) <= _MANY else self._kinds(content):
                if is_stream(str(kind)):
                    streams = True
                else:
                    others = True
        if self._description.is_swagger:
            produces = entry.operation.get("produces", self._produces)
            kinds = [is_stream(text_of(kind)) for kind in list_of(produces)]
            streams, others = True in kinds, False in kinds
        return Declared(entry, tuple(errors), links, streams, others or not streams)

    def _with_links(self, links: JSONObject | None, more: JSONObject) -> JSONObject:
        """Return all links; those of a single response are not copied, because operations may share them."""
        if not links:
            return more
        self._description.memory.spend(ENTRY * (len(links) + len(more)))
        return {**links, **more}

    def _kinds(self, content: JSONObject) -> Iterable[Any]:
        """Return at most one stream and one other of many media types, which operations may share."""
        known = self._contents.get(id(content))
        if known is None:
            kinds = {is_stream(str(kind)): kind for kind in content}
            # Holds the object, so that its `id()` stays unique.
            known = self._contents[id(content)] = content, tuple(kinds.values())
        return known[1]

    def _found(self, entry: DocumentOperation, status: str, node: JSONObject) -> JSONObject:
        """Return a response, or the target of a reference; a target that is not an object is reported once."""
        ref = node.get("$ref")
        if ref is None:
            return node
        found = self._description.references.value_at(node)
        if is_object(found) and "$ref" not in found:
            return found
        # Missing targets are reported as unresolved references.
        if found is not None and str(ref) not in self._seen:
            self._seen.add(str(ref))
            self._ignore(entry, f"its response {status} ({ref}) is not an object")
        return {}

    def _ignore(self, entry: DocumentOperation, reason: str) -> None:
        self._description.note(entry, f"{reason}: ignored")

    def _error(self, entry: DocumentOperation, status: str, node: JSONObject) -> ErrorDefinition:
        """Return the error that a response declares; equal responses share one error."""
        key = node.get("$ref")
        if key is None:
            key = node.get("description")
            if "content" in node or "schema" in node:
                ref = _only_ref(node)
                key = f"{key}\n{ref}" if ref and type(key) is str else None
        if type(key) is not str:
            return self._definition(entry, status, node)
        same_status = self._errors.setdefault(status, {})
        known = same_status.get(key)
        if known is None:
            known = same_status[key] = self._definition(entry, status, node)
        return known

    def _definition(
        self, entry: DocumentOperation, status: str, node: JSONObject
    ) -> ErrorDefinition:
        found = self._found(entry, status, node)
        self._description.memory.spend(RESPONSE)
        return ErrorDefinition(
            "HTTP_ERROR" if status == "default" else f"HTTP_{status.upper()}",
            text_of(found.get("description")),
            Schema(
                partial(self._schema, entry, status),
                lenient=True,
                shared=self._description.schemas.responses,
            ),
            int(status) if status.isdecimal() and status.isascii() else None,
        )

    def _schema(self, entry: DocumentOperation, status: str) -> JSONSchema:
        """Return the schema of the details of an error, whose `body` has the schema in the document."""
        description = self._description
        body: Any = True
        for response in description.reader.read_responses(entry.operation):
            if response.status == status:
                chosen = best(response.media)
                if chosen is not None and media.is_json(chosen.media_type):
                    body = chosen.schema
        draft = description.schemas.draft(Direction.RESPONSE)
        return draft.close({"type": "object", "properties": {"body": draft.convert(body)}})


def _only_ref(node: JSONObject) -> str | None:
    """Return the media type and schema of a response that has only these; otherwise None."""
    content = object_of(node.get("content"))
    if len(content) != 1 or not node.keys() <= {"content", "description"}:
        return None
    [(kind, offered)] = content.items()
    schema = object_of(offered).get("schema")
    if not is_object(schema) or schema.keys() != {"$ref"} or len(offered) != 1:
        return None
    return f"{kind}\n{schema['$ref']}"


def _body_types(operation: JSONObject) -> Collection[Any]:
    """Return the media types of a request body, which may not be text."""
    body = operation.get("requestBody")
    if is_object(body):
        return object_of(body.get("content"))
    return list_of(operation.get("consumes"))
