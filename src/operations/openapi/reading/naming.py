"""The definitions that converted schemas refer to, each with its name.

A position in the document has a definition for each direction, and a base of subtypes has another without them.

Rule: a union never contains a schema that contains the union: subtypes refer to the base without its subtypes (its own
part).
"""

import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from operations.base.errors import DocumentError
from operations.base.json.values import unescape
from operations.base.types import JSONObject, JSONSchema
from operations.openapi.reading.definitions import Definitions
from operations.openapi.reading.file_fields import FileFields
from operations.openapi.reading.references import BUNDLED
from operations.openapi.reading.subtypes import UNIONS

_LOGGER = logging.getLogger("operations")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class Direction(StrEnum):
    """The direction of the data, which determines the meaning of `readOnly`, `writeOnly` and binary strings."""

    REQUEST = "request"
    UPLOAD = "upload"
    """A request that is not JSON: binary strings are files."""
    RESPONSE = "response"


@dataclass(slots=True, eq=False)
class Definition:
    """One definition: its position in the document and, once used, its conversion and the references in it."""

    name: str
    """Its name among the `$defs`."""

    pointer: str
    """Its position."""

    target: Any
    """The schema there, not converted."""

    direction: Direction

    is_own_part: bool
    """Whether this is a base without its subtypes, which the subtypes refer to."""

    schema: JSONSchema | None = None
    """The conversion; None until it is needed."""

    refs: "set[Definition]" = field(default_factory=set["Definition"])
    """The definitions that the conversion refers to."""

    is_checked: bool = False
    """Whether the conversion was searched for cycles."""

    @property
    def ref(self) -> JSONObject:
        """A reference to this definition."""
        return {"$ref": f"#/$defs/{self.name}"}


class NamedDefinitions:
    """The definitions that converted schemas refer to.

    Args:
        definitions: The unconverted schemas of the document.
        files: Which of them describe files.
    """

    def __init__(self, definitions: Definitions, files: FileFields) -> None:
        self._definitions, self._files = definitions, files
        self._named: dict[tuple[Direction, str, bool], Definition] = {}
        self._broken: set[str] = set()
        """The references that do not resolve, of which each is reported once."""

    def find(self, ref: str, direction: Direction, bases: Iterable[str] = ()) -> Definition | None:
        """Return the definition that `ref` refers to; None if it does not exist.

        Args:
            ref: The reference.
            direction: The direction of the data.
            bases: Pointers of the bases to use without their subtypes.
        """
        try:
            pointer, target = self._definitions.references.locate(ref)
            if bases:
                pointer, target = self._definitions.references.locate_final(ref)
        except DocumentError as error:
            if ref not in self._broken:
                self._broken.add(ref)
                _LOGGER.warning(
                    "A reference in a schema cannot be resolved and allows any value: %s", error
                )
            return None
        return self.at(pointer, target, direction, is_own_part=pointer in bases)

    def at(
        self, pointer: str, target: Any, direction: Direction, *, is_own_part: bool
    ) -> Definition:
        """Return the definition of the schema `target`, which is at `pointer`."""
        if direction is Direction.UPLOAD and not self._files.has_files(pointer, target):
            direction = Direction.REQUEST
        known = self._named.get((direction, pointer, is_own_part))
        if known is None:
            name = _definition_name(pointer)
            if is_own_part:
                name = self._unused(f"{name}.base", pointer)
                # A base that lists its subtypes itself: the subtypes refer to the rest of the base.
                target = {key: item for key, item in target.items() if key not in UNIONS}
            if direction is Direction.UPLOAD:
                name = self._unused(f"{name}.upload", pointer)
            known = Definition(name, pointer, target, direction, is_own_part)
            self._named[direction, pointer, is_own_part] = known
        return known

    def _unused(self, name: str, pointer: str) -> str:
        """Return `name`, with a digest appended if the document has another schema of this name."""
        is_used = self._definitions.references.has(f"{pointer.rpartition('/')[0]}/{name}")
        return f"{name}_{_digest(pointer)}" if is_used else name


def _definition_name(pointer: str) -> str:
    """Return a stable name for the definition at `pointer`: its own name if that is safe."""
    *_, parent, name = ("", *pointer.split("/"))
    if parent == BUNDLED:
        # A whole file: its name without folders and extension.
        name = unescape(name).rpartition("/")[2].partition(".")[0]
    safe = _UNSAFE.sub("_", name).strip("_") or "schema"
    if safe == name and parent in {"schemas", "definitions", "$defs"} and pointer.count("/") <= 3:
        return safe
    return f"{safe[:60]}_{_digest(pointer)}"


def _digest(pointer: str) -> str:
    return hashlib.sha256(pointer.encode()).hexdigest()[:8]
