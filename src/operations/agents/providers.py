"""Operations as the tools of a model provider.

    openai, anthropic   any JSON Schema whose root is a plain object
    gemini              the OpenAPI 3.0 subset: few keywords, no references, string enums

Rule 1: a schema that a provider rejects is simplified, and every simplification is reported as a `Loss`. The operation
        still validates its input with the full schema.

Tool calls and results have the form of each provider:

    OpenAI, chat         {"id", "function": {"name", "arguments": "..."}}     -> {"role": "tool", ...}
    OpenAI, responses    {"type": "function_call", "call_id", ...}            -> {"type": "function_call_output", ...}
    Anthropic            {"type": "tool_use", "id", "name", "input"}          -> {"type": "tool_result", ...}
    LangChain            {"type": "tool_call", "id", "name", "args"}          -> {"role": "tool", ...}
    Gemini               {"name", "args", "id"?}, or a part that contains it  -> {"function_response": {...}}

Calls may be objects of the provider's package or plain dicts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_REQUEST_VALUES, object_of
from operations.base.text import tool_name
from operations.base.types import JSONObject
from operations.contract.specs import OperationSpec, OperationType
from operations.schema.outline import Outline
from operations.schema.references import with_items

Provider: TypeAlias = Literal["openai", "anthropic", "gemini"]
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
class ProviderLimits:
    """The limits of one provider."""

    longest_description: int
    most_tools: int

    wrap: Callable[[ToolDefinition], JSONObject]
    """Returns a tool in the form of the provider."""

    is_plain: bool = False
    """Whether only the keywords of OpenAPI 3.0 are known."""


def _wrapped(key: str, tool: ToolDefinition) -> JSONObject:
    return {"name": tool.name, "description": tool.description, key: tool.schema}


PROVIDER_LIMITS: dict[Provider, ProviderLimits] = {
    "openai": ProviderLimits(
        longest_description=1024,
        most_tools=128,
        wrap=lambda tool: {"type": "function", "function": _wrapped("parameters", tool)},
    ),
    "anthropic": ProviderLimits(
        longest_description=100_000,
        most_tools=10_000,
        wrap=partial(_wrapped, "input_schema"),
    ),
    "gemini": ProviderLimits(
        longest_description=100_000,
        most_tools=512,
        wrap=partial(_wrapped, "parameters"),
        is_plain=True,
    ),
}

_AT_ROOT = ("allOf", "anyOf", "oneOf", "enum", "const", "not", "if", "then", "else")
"""Keywords that are not allowed at the root of a tool's schema."""

_PLAIN = frozenset({
    "description", "title", "default", "example", "nullable", "minimum", "maximum", "minLength", "maxLength",
    "pattern", "minItems", "maxItems", "minProperties", "maxProperties",
})  # fmt: skip
"""Keywords of OpenAPI 3.0 that are copied unchanged."""

_SILENT = frozenset({
    "$schema", "$id", "$defs", "definitions", "$comment", "examples", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType",
})  # fmt: skip
"""Keywords that do not affect validation, so their loss is not reported; the same applies to those that begin with
`x-`."""

_FORMATS = {
    "number": {"float", "double"},
    "integer": {"int32", "int64"},
    "string": {"date-time", "enum"},
}
_DEEPEST = 12


def _object_root(outline: Outline, report: Report) -> JSONObject:
    """Return the schema with a plain object at its root, because the arguments of a tool are an object."""
    schema = outline.schema
    if _is_wrapped(outline):
        report("", "is not an object: the value is the argument `input`")
        return {
            "type": "object",
            "properties": {"input": outline.standalone},
            "required": ["input"],
        }
    root: JSONObject = {
        key: value for key, value in outline.standalone.items() if key not in _AT_ROOT
    }
    root["type"] = "object"
    if "allOf" in schema:
        root["properties"] = {name: each.schema for name, each in outline.properties.items()}
        root["required"] = outline.required
    root.setdefault("properties", {})
    for keyword in _AT_ROOT:
        if keyword in schema and keyword != "allOf":
            report(f"/{keyword}", "is not allowed at the root: omitted")
    return root


def _is_wrapped(outline: Outline) -> bool:
    """Return whether the input is not an object, and is therefore passed as the argument `input`."""
    return bool(outline.schema and outline.types and "object" not in outline.types)


class _Plain:
    """Converts JSON Schema to the subset of OpenAPI 3.0."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def convert(self, outline: Outline, path: str, depth: int) -> JSONObject:
        """Return the schema at `path`, converted."""
        if outline.is_recursive or depth > _DEEPEST:
            self._report(path, "refers to itself: its content is omitted")
            return {"type": "object", "description": outline.description or "As above."}
        schema = outline.schema
        plain: JSONObject = {key: schema[key] for key in schema if key in _PLAIN}
        self._type(outline, plain, path)
        self._values(outline, plain, path)
        self._format(schema, plain, path)
        if outline.properties:
            plain["properties"] = {
                name: self.convert(inner, f"{path}/properties/{name}", depth + 1)
                for name, inner in outline.properties.items()
            }
            required = [name for name in outline.required if name in plain["properties"]]
            if required:
                plain["required"] = required
        if plain.get("type") == "array":
            plain["items"] = self.convert(outline.items, f"{path}/items", depth + 1)
        self._alternatives(outline, plain, path, depth)
        known = _PLAIN | _SILENT | _READ
        for keyword in schema:
            if keyword not in known and not keyword.startswith("x-"):
                self._report(f"{path}/{keyword}", "is not supported: omitted")
        return plain

    def _type(self, outline: Outline, plain: JSONObject, path: str) -> None:
        named = sorted(outline.types - {"null"})
        if "null" in outline.types:
            plain["nullable"] = True
        if len(named) == 1:
            plain["type"] = named[0]
        elif len(named) > 1 and not outline.members:
            plain["anyOf"] = [{"type": name} for name in named]
        elif not named and not outline.members:
            self._report(path, "has no type: treated as a string")
            plain["type"] = "string"

    def _values(self, outline: Outline, plain: JSONObject, path: str) -> None:
        choices = [choice for choice in outline.choices if choice is not None]
        if not choices:
            return
        if all(isinstance(choice, str) for choice in choices):
            plain["type"], plain["enum"] = "string", choices
        else:
            self._report(f"{path}/enum", "contains values other than strings: omitted")

    def _format(self, schema: JSONObject, plain: JSONObject, path: str) -> None:
        form: Any = schema.get("format")
        if form is None:
            return
        if form in _FORMATS.get(str(plain.get("type")), ()):
            plain["format"] = form
        else:
            self._report(f"{path}/format", f"{form} is not supported: omitted")

    def _alternatives(self, outline: Outline, plain: JSONObject, path: str, depth: int) -> None:
        members = [member for member in outline.members if set(member.types) != {"null"}]
        if not members or outline.choices:
            return
        word = "anyOf" if "anyOf" in outline.schema else "oneOf"
        inner = [
            self.convert(member, f"{path}/{word}/{number}", depth + 1)
            for number, member in enumerate(members)
        ]
        if len(inner) == 1:
            plain |= inner[0] | {key: value for key, value in plain.items() if key != "type"}
            return
        plain.pop("type", None)
        plain["anyOf"] = inner
        if word == "oneOf":
            self._report(f"{path}/oneOf", "is converted to anyOf, which accepts several matches")


_READ = frozenset({
    "type", "enum", "const", "format", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref",
})  # fmt: skip
"""Keywords that have their own conversion."""


def input_of(spec: OperationSpec, arguments: JSONObject) -> Any:
    """Return the input of an operation for the arguments of a tool call."""
    return arguments.get("input") if _is_wrapped(Outline.of(spec.input_schema)) else arguments


def definition(spec: OperationSpec, limits: ProviderLimits, report: Report) -> ToolDefinition:
    """Return an operation as a tool."""
    name = tool_name(spec.id)
    if "__" not in name:
        report("name", f"is called {name}, from which the id cannot be derived")
    description, longest = spec.description or spec.title or spec.id, limits.longest_description
    if len(description) > longest:
        report("description", f"is truncated to {longest} characters")
        description = description[: longest - 1] + "…"
    schema = object_of(with_items(_object_root(Outline.of(spec.input_schema), report)))
    if limits.is_plain:
        schema = _Plain(report).convert(Outline(schema), "", 0)
    # Copied, so that users and frameworks cannot change the operation.
    return ToolDefinition(name, description, msgspec.to_builtins(schema))


def provider_tools(
    specs: Sequence[OperationSpec], provider: Provider
) -> tuple[list[JSONObject], list[Loss]]:
    """Return every query and mutation as a tool, and the losses: omitted operations first."""
    limits = PROVIDER_LIMITS[provider]
    losses: list[Loss] = []
    omitted: list[Loss] = []
    tools: list[JSONObject] = []
    for spec in specs:

        def report(place: str, what: str, operation_id: str = spec.id) -> None:
            losses.append(Loss(operation_id, place or "/", what))

        if spec.type is OperationType.SUBSCRIPTION:
            what = "is a subscription, and a tool returns one result: omitted"
            omitted.append(Loss(spec.id, "type", what))
        elif len(tools) == limits.most_tools:
            what = f"is omitted: {provider} accepts {limits.most_tools} tools at a time"
            omitted.append(Loss(spec.id, "/", what))
        else:
            tools.append(limits.wrap(definition(spec, limits, report)))
    return tools, omitted + losses


# ------------------------------------------------------------ tool calls and their results


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

    reply: Callable[[Outcome], JSONObject]
    """Returns the provider's result message."""

    takes_images: bool = False
    """Whether a result message may contain images."""


def read_arguments(name: str, arguments: Any) -> JSONObject:
    """Return the arguments of a tool call, given as an object or as its JSON text.

    Raises:
        CallError: `VALIDATION_ERROR` if they are not a JSON object.
    """
    if isinstance(arguments, (str, bytes)):
        try:
            arguments = decode_json(arguments or b"{}", max_values=MAX_REQUEST_VALUES)
        except ValueError as error:
            reason = f"Invalid arguments of {name}: {error}"
            raise CallError(ErrorCode.VALIDATION_ERROR, reason) from error
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(cast("Mapping[str, Any]", arguments))
    raise CallError(ErrorCode.VALIDATION_ERROR, f"The arguments of {name} must be an object")


def read_call(call: Any) -> ToolCall:
    """Read a tool call in the form of any provider.

    Raises:
        TypeError: If `call` is not a tool call of a known provider.
    """
    function = _get(call, "function")
    if _get(function, "name"):
        return _openai_chat(call, function)
    kind = _get(call, "type")
    if kind == "function_call":
        return _openai_responses(call)
    if kind == "tool_use":
        return _anthropic(call)
    if kind == "tool_call":
        return _langchain(call)
    part = _get(call, "function_call") or _get(call, "functionCall")
    if part is None and _get(call, "args", ...) is not ...:
        part = call
    if _get(part, "name"):
        return _gemini(part)
    raise TypeError(
        f"{call!r} is not a tool call of a known provider: pass the call as the provider's package returns it."
        " To run an operation that no model requested, call it with registry.execute."
    )


def _get(value: Any, name: str, default: Any = None) -> Any:
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name, default)
    return getattr(value, name, default)


def _name(call: Any, name: str) -> str:
    """Return the name of a tool; if it is not a text, how it is written, which is the name of no tool."""
    found = _get(call, name)
    return found if isinstance(found, str) else repr(found)


def _openai_chat(call: Any, function: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        return {"role": "tool", "tool_call_id": _get(call, "id"), "content": outcome.text}

    return ToolCall(_name(function, "name"), _get(function, "arguments"), reply)


def _responses_block(block: Block) -> JSONObject:
    if isinstance(block, str):
        return {"type": "input_text", "text": block}
    return {"type": "input_image", "image_url": block.url, "detail": "auto"}


def _openai_responses(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        call_id, output = _get(call, "call_id"), outcome.content(_responses_block)
        return {"type": "function_call_output", "call_id": call_id, "output": output}

    return ToolCall(_name(call, "name"), _get(call, "arguments"), reply, takes_images=True)


def _anthropic_block(block: Block) -> JSONObject:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    source = {"type": "base64", "media_type": block.media_type, "data": block.data}
    return {"type": "image", "source": source}


def _anthropic(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        return {
            "type": "tool_result",
            "tool_use_id": _get(call, "id"),
            "content": outcome.content(_anthropic_block),
            "is_error": outcome.error is not None,
        }

    return ToolCall(_name(call, "name"), _get(call, "input"), reply, takes_images=True)


def _langchain(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        return {
            "role": "tool",
            "name": _get(call, "name"),
            "tool_call_id": _get(call, "id"),
            "content": outcome.text,
            "status": "success" if outcome.error is None else "error",
        }

    # Not every model behind LangChain accepts images in the result of a tool.
    return ToolCall(_name(call, "name"), _get(call, "args"), reply)


def _gemini(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        key, value = ("result", outcome.data) if outcome.error is None else ("error", outcome.error)
        response: JSONObject = {"name": _get(call, "name"), "response": {key: value}}
        if _get(call, "id") is not None:
            response["id"] = _get(call, "id")
        return {"function_response": response}

    return ToolCall(_name(call, "name"), _get(call, "args"), reply)
