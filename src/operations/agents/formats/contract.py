"""What the form of a model provider implements: `ToolFormat`, with the values that it reads and writes.

    class AcmeFormat:
        limits = ToolLimits(longest_description=1000, most_tools=64)

        def write(self, tool): return {"tool": tool.name, "about": tool.description, "arguments": tool.schema}

        def read_call(self, raw): return ToolCall(raw["tool"], raw["with"]) if "tool" in raw else None

        def write_result(self, call, outcome): return {"tool": call.name, "says": outcome.text}

A package registers an instance as an entry point of the group `operations.providers`, under the name of its format.

Rule 1: a format only changes the form; `schemas` simplifies the schemas that do not fit its limits.
Rule 2: tool calls may be objects of the provider's package or plain dicts: `member` reads both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import msgspec

from operations.base.types import JSONObject

Report: TypeAlias = Callable[[str, str], None]
"""Called with the location and the consequence of each loss."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of an operation that a provider cannot express."""

    operation_id: str

    place: str
    """The location: a JSON pointer into the input schema, or `name`, `description`, `type`."""

    what: str
    """The consequence."""

    def to_json(self) -> JSONObject:
        """Return the loss as JSON."""
        return {"operationId": self.operation_id, "place": self.place, "what": self.what}


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """An operation as a tool: its name, its description, and the schema of its arguments."""

    name: str
    description: str
    schema: JSONObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """What a provider accepts."""

    longest_description: int
    most_tools: int

    is_plain: bool = False
    """Whether only the keywords of OpenAPI 3.0 are known."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a result."""

    media_type: str

    data: str
    """The image as base64."""

    @property
    def url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.data}"


Block: TypeAlias = str | Image

BlockT = TypeVar("BlockT")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a tool call: JSON data, texts and images, or an error."""

    data: Any = None
    error: JSONObject | None = None
    blocks: Sequence[Block] = ()

    def content(self, write: Callable[[Block], BlockT]) -> str | list[BlockT]:
        """Return the outcome as a text or, if it contains images, as blocks in the form of a provider or framework."""
        return [write(block) for block in self.blocks] if self.blocks else self.text

    @property
    def text(self) -> str:
        """The outcome as text for the model: a string unchanged, any other value as JSON."""
        if self.error is not None:
            return msgspec.json.encode({"error": self.error}).decode()
        return self.data if isinstance(self.data, str) else msgspec.json.encode(self.data).decode()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's request to run a tool."""

    name: str
    arguments: Any
    """An object, or its JSON text."""

    id: Any = None
    """The id that the result names; None if the provider sent none."""

    takes_images: bool = False
    """Whether a result may contain images."""


class ToolFormat(Protocol):
    """The form in which a model provider writes tools, calls and results."""

    @property
    def limits(self) -> ToolLimits:
        """What the provider accepts."""
        ...

    def write(self, tool: ToolDefinition) -> JSONObject:
        """Return a tool in the form of the provider."""
        ...

    def read_call(self, raw: Any) -> ToolCall | None:
        """Return a tool call; None if it is in another form."""
        ...

    def write_result(self, call: ToolCall, outcome: Outcome) -> JSONObject:
        """Return the message with the result of a call."""
        ...


def member(value: Any, name: str, default: Any = None) -> Any:
    """Return a member of a dict, or an attribute of an object."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name, default)
    return getattr(value, name, default)


def name_in(call: Any) -> str:
    """Return the name of a tool; if it is not a text, how it is written, which is the name of no tool."""
    found = member(call, "name")
    return found if isinstance(found, str) else repr(found)


def described(tool: ToolDefinition, key: str) -> JSONObject:
    """Return the name, the description and, under `key`, the schema of a tool."""
    return {"name": tool.name, "description": tool.description, key: tool.schema}
