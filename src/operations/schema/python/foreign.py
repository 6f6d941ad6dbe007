"""Types of pydantic, without importing it: whoever made such a type has loaded pydantic already.

Rule 1: pydantic writes its own schemas and reads its own values, by the type's own configuration.
"""

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from operations.errors import SchemaError
from operations.schema.python.records import record_reader, title_of
from operations.schema.python.shapes import ANY, NOTHING, Converter, Definitions, Kinds, attempt
from operations.types import JSONObject


def is_pydantic(annotation: Any) -> bool:
    """Whether pydantic knows a type better than we do: a model, its dataclass, or made for them."""
    if not isinstance(annotation, type) or "pydantic" not in sys.modules:
        return False
    return hasattr(annotation, "__pydantic_validator__") or (
        hasattr(annotation, "__get_pydantic_core_schema__")
        and not issubclass(annotation, Enum)
        and record_reader(annotation) is None
    )


def is_pydantic_note(note: Any) -> bool:
    """Whether something in `Annotated` is for pydantic to act upon: a validator, say."""
    return hasattr(note, "__get_pydantic_core_schema__") and "pydantic" in sys.modules


class Foreign(msgspec.Struct, frozen=True, eq=False):
    """A type that pydantic reads and writes."""

    annotation: Any
    exact: Kinds = NOTHING

    @property
    def kinds(self) -> Kinds:
        """Models are objects, unless made of a single root value."""
        is_object = getattr(self.annotation, "__pydantic_root_model__", None) is False
        return frozenset({dict}) if is_object else ANY

    def schema(self, definitions: Definitions) -> JSONObject:
        """As pydantic writes it.

        Raises:
            SchemaError: If it cannot.
        """
        write: Callable[..., JSONObject] = _method(
            self.annotation, "model_json_schema", "json_schema"
        )
        try:
            return definitions.adopt(
                title_of(self.annotation),
                lambda template: write(mode=definitions.mode, ref_template=template),
            )
        except Exception as error:
            raise SchemaError(f"{title_of(self.annotation)} has no JSON Schema: {error}") from error

    def converter(self) -> Converter:
        """As pydantic reads it.

        From JSON text: strict models, and settings for bytes and dates, hold Python values to
        other rules.
        """
        read: Converter = _method(self.annotation, "model_validate_json", "validate_json")
        return lambda value: attempt(read, msgspec.json.encode(value))


def _method(cls: Any, of_model: str, of_adapter: str) -> Any:
    method = getattr(cls, of_model, None)
    if method is not None:
        return method
    return getattr(sys.modules["pydantic"].TypeAdapter(cls), of_adapter)
