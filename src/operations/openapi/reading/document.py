"""One API description: its version, its operations, and what is wrong with it.

Rule 1: only what an operation's spec needs is read at once; schemas and requests are worked out when asked for.
Rule 2: an invalid part costs its operation, never the document. It is skipped, named and reported.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from operations._json import is_list, is_object, object_of, text_of
from operations._text import counted
from operations.errors import DocumentError
from operations.openapi.headers import is_header
from operations.openapi.reading import openapi3, swagger2
from operations.openapi.reading.model import METHODS, Model
from operations.openapi.reading.references import References
from operations.openapi.reading.schemas import SchemaConverter
from operations.types import JSONObject

_METHODS = {method: method.upper() for method in METHODS}
_CAPITALS = {method: method for method in _METHODS.values()}
"""By spelling: one text for all operations of a method."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a document that could not be used."""

    where: str
    """`GET /path` for an operation, a path, or a part of the document."""

    reason: str

    is_skipped: bool = True
    """Whether an operation was left out because of it."""


class Entry(msgspec.Struct, gc=False):
    """One operation as the document has it; a struct, as there are tens of thousands."""

    path: str
    method: str
    item: JSONObject
    operation: JSONObject


class Description:
    """A decoded OpenAPI or Swagger document.

    Args:
        document: The document, decoded.
        missing: Why files it refers to could not be read, by their paths relative to it.

    Raises:
        DocumentError: If it is no object at all.
    """

    def __init__(self, document: Any, missing: Mapping[str, str] | None = None) -> None:
        if not is_object(document):
            raise DocumentError("an API description is an object")
        self.document: JSONObject = document
        self.problems: list[Problem] = []
        self._is_searched = False
        self.version = self._version()
        self.is_swagger = self.version.startswith("2")
        self.references = References(self.document, missing)
        self.schemas = SchemaConverter(
            self.references, ref_siblings=not self.version.startswith(("2", "3.0"))
        )
        self.info = self.references.object_at(self.document.get("info"))
        self._check: Callable[[JSONObject], str | None] = (
            swagger2.check_parameter if self.is_swagger else openapi3.check_parameter
        )
        self._places = frozenset({"path", "query", "header"})
        self._good: set[str] = set()
        self.authorized: dict[int, JSONObject] = {}
        """By their ids: the path items and operations with a required `Authorization` header."""

    def _version(self) -> str:
        for key in ("openapi", "swagger"):
            version = self.document.get(key)
            if isinstance(version, (str, int, float)):
                return str(version)
        is_swagger = not self.document.keys().isdisjoint(
            {"definitions", "basePath", "host", "securityDefinitions"}
        )
        version = "2.0" if is_swagger else "3.0"
        said = f"it names no version; read as {version}"
        if "paths" not in self.document:
            said = "it names no version and has no paths: is it an OpenAPI document?"
        self.problems.append(Problem("document", said, is_skipped=False))
        return version

    def all_problems(self) -> list[Problem]:
        """Return everything in the document that could not be used, unresolved references included.

        Importing does not search for those: most documents have none, and the search takes longer than the rest.
        """
        if not self._is_searched:
            self._is_searched = True
            self.problems.extend(
                Problem(place, f"its $ref cannot be resolved: {reason}", is_skipped=False)
                for place, reason in self.references.unresolved()
            )
        return self.problems

    def entries(self) -> Iterator[Entry]:
        """Every operation that can be used; the others are in `problems`."""
        paths = self._paths()
        if not paths:
            self._note_webhooks()
        for key, node in paths.items():
            path = str(key)
            if path.startswith("x-"):
                continue
            try:
                item = self._plain(self.references.merged(node))
            except DocumentError as error:
                self.problems.append(Problem(path, f"the path cannot be read: {error}"))
                continue
            shared = self._parameters_problem(item)
            if shared is not None:
                item, shared = self._spread(item, shared)
            for method, operation in item.items():
                # Some documents write GET for get.
                name = _METHODS.get(method)
                if name is None and method.lower() not in item:
                    name = _CAPITALS.get(method)
                if name is not None:
                    entry = self._entry(path, name, item, operation, shared)
                    if entry is not None:
                        yield entry
            # 3.2: methods that have no field of their own.
            for method, operation in object_of(item.get("additionalOperations")).items():
                problem = shared
                if not is_header(method, ""):
                    problem = "its method is no HTTP method"
                entry = self._entry(path, method.upper(), item, operation, problem)
                if entry is not None:
                    yield entry

    def _paths(self) -> JSONObject:
        node = self.document.get("paths", {})
        try:
            return self.references.merged(node)
        except DocumentError as error:
            self.problems.append(
                Problem("paths", f"they cannot be read: {error}", is_skipped=False)
            )
            return {}

    def _note_webhooks(self) -> None:
        """Report a document that describes only requests which the API sends."""
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
    ) -> Entry | None:
        if not is_object(operation):
            problem = "the operation is not an object"
        elif problem is None:
            responses = operation.get("responses")
            try:
                # Nearly every operation has none of these, and this runs for all of them.
                if (
                    "$ref" in operation
                    or type(operation.get("parameters")) is dict
                    or (type(responses) is dict and "$ref" in responses)
                ):
                    operation = self._plain(operation)
                problem = self._parameters_problem(operation)
                if problem is not None:
                    operation, problem = self._spread(operation, problem)
                if problem is None and "requestBody" in operation:
                    problem = self._body_problem(operation["requestBody"])
            except DocumentError as error:
                problem = f"it cannot be read: {error}"
        if problem is None:
            return Entry(path, method, item, operation)
        self.problems.append(Problem(f"{method} {path}", problem))
        return None

    def _body_problem(self, node: Any) -> str | None:
        if node is None or (is_object(node) and "$ref" not in node) or self.is_swagger:
            return None
        try:
            self.references.follow(node)
        except DocumentError as error:
            return f"its body cannot be read: {error}"
        return None

    def _plain(self, holder: JSONObject) -> JSONObject:
        """Return a path item or an operation without references in place of itself, its parameters or its responses.

        Raises:
            DocumentError: If one of these cannot be resolved.
        """
        if "$ref" in holder:
            holder = self.references.merged(holder)
        parameters, responses = holder.get("parameters"), holder.get("responses")
        if is_object(parameters):
            holder = {**holder, "parameters": self.references.value(parameters)}
        if is_object(responses) and "$ref" in responses:
            holder = {**holder, "responses": self.references.merged(responses)}
        return holder

    def _spread(self, holder: JSONObject, problem: str) -> tuple[JSONObject, str | None]:
        """Return `holder` with all its parameters in one list, and what is wrong with them then."""
        parameters = holder.get("parameters")
        if is_list(parameters):
            spread = self.references.list_at(parameters)
            if spread is not parameters:
                # An item of the list referred to a list.
                holder = {**holder, "parameters": spread}
                return holder, self._parameters_problem(holder)
        return holder, problem

    def _parameters_problem(self, holder: JSONObject) -> str | None:
        parameters = holder.get("parameters")
        if parameters is None:
            return None
        if not is_list(parameters):
            return "its parameters are not a list"
        good, places = self._good, self._places
        # The loop that runs most often: what is plainly right is not asked about any further.
        for node in parameters:
            if not is_object(node):
                return "a parameter is not an object"
            ref = node.get("$ref")
            if ref is None:
                place = node.get("in")
                if place in places and type(node.get("name")) is str:
                    if place == "header" and _is_authorization(node):
                        self.authorized[id(holder)] = holder
                    continue
                problem = self._check(node)
            elif ref in good:
                continue
            else:
                try:
                    found = self.references.follow(node)
                    problem = self._check(found)
                except DocumentError as error:
                    return f"a parameter cannot be read: {error}"
                if _is_authorization(found):
                    self.authorized[id(holder)] = holder
                elif problem is None:
                    good.add(ref)
            if problem is not None:
                return problem
        return None

    def model(self, entry: Entry) -> Model:
        """Everything one operation says.

        Raises:
            DocumentError: If a part of it cannot be understood.
        """
        if self.is_swagger:
            return swagger2.read_model(self.references, self.document, entry.item, entry.operation)
        return openapi3.read_model(self.references, entry.item, entry.operation)

    def security_schemes(self) -> JSONObject:
        """The security schemes by name, as 3.x spells them."""
        if self.is_swagger:
            return swagger2.security_schemes(self.document)
        components = self.references.object_at(self.document.get("components"))
        schemes = self.references.object_at(components.get("securitySchemes"))
        found: JSONObject = {}
        for name, node in schemes.items():
            try:
                found[name] = self.references.follow(node)
            except DocumentError:
                continue
        return found

    def servers(self, entry: Entry, variables: Mapping[str, str]) -> list[str]:
        """The addresses the operation may be called at; relative ones as they are."""
        if self.is_swagger:
            return swagger2.server_urls(self.document, entry.operation)
        for holder in (entry.operation, entry.item, self.document):
            urls = openapi3.server_urls(self.references, holder.get("servers"), variables)
            if urls:
                return urls
        return ["/"]

    @property
    def title(self) -> str:
        """What the document calls itself."""
        return self.references.text_at(self.info.get("title"))


def _is_authorization(node: JSONObject) -> bool:
    return (
        node.get("in") == "header"
        and node.get("required") is True
        and text_of(node.get("name")).lower() == "authorization"
    )
