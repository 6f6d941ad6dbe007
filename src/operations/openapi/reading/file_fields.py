"""Which schemas of a document describe files, as fields of a form or in a whole body."""

from itertools import chain
from typing import Any

from operations.base.json.references import objects_in, reference_of
from operations.base.json.values import is_list
from operations.base.types import JSONObject
from operations.io.files import FilesRoot
from operations.openapi.reading.definitions import Definitions
from operations.openapi.reading.keywords import FILE_SCHEMA, ROOTED_FILE_SCHEMA, is_file
from operations.openapi.reading.subtypes import UNIONS

_COMPOSED = frozenset({"allOf", *UNIONS})


class FileFields:
    """The schemas of files.

    Args:
        definitions: The unconverted schemas of the document.

    Attributes:
        root: The folder in which a caller may name files to send; None if callers may not name files.
    """

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self.root: FilesRoot | None = None
        self._without_files: set[str] = set()
        """The positions of schemas that describe no files."""

    @property
    def schema(self) -> JSONObject:
        """The schema of a file in an operation's input."""
        return FILE_SCHEMA if self.root is None else ROOTED_FILE_SCHEMA

    def holds_files(self, field: JSONObject, value: Any) -> bool:
        """Return whether a form's field of this schema is a file or a list of files."""
        items: list[Any] = (value or [{}]) if is_list(value) else []
        return is_file(field) or any(
            is_file(self.field(field.get("items"), item)) for item in items
        )

    def field(self, schema: Any, value: Any) -> JSONObject:
        """Return the schema of a form's field, or the part or alternative that describes `value` as a file or a list.

        Args:
            schema: The schema of the field.
            value: The field. If it may be a file or text, a string is text.
        """
        node = self._definitions.resolve(schema)
        if node.keys().isdisjoint(_COMPOSED):
            return node
        found = self._definitions.variants(schema)
        if is_list(value):
            return next((part for part in found if "items" in part), node)
        is_text = type(value) is str and any(
            part.get("type") == "string" and not is_file(part) for part in found
        )
        return node if is_text else next(filter(is_file, found), node)

    def has_files(self, pointer: str, target: Any) -> bool:
        """Return whether a schema, or a schema that it refers to, describes a file."""
        if pointer in self._without_files:
            return False
        seen = {pointer}
        waiting: list[Any] = [target, *self._definitions.subtype_refs(pointer)]
        for node in chain.from_iterable(map(objects_in, waiting)):
            if is_file(node):
                return True
            ref = reference_of(node)
            found = None if ref is None else self._definitions.references.located(ref)
            if found is not None and found[0] not in seen and found[0] not in self._without_files:
                seen.add(found[0])
                waiting += (found[1], *self._definitions.subtype_refs(found[0]))
        self._without_files |= seen
        return False
