"""The operations of one server: built from its listings, pinned, and updated in every registry that has them.

Its resources, resource templates and prompts become operations too:

<server>.resources.list          the current resources
<server>.resources.templates     the resource templates
<server>.resources.read          {"uri": ...}
<server>.resources.watch         {"uri": ...}: one item when the subscription is active, and one for each change
<server>.templates.<name>        reads a resource of one template; the input has the variables
<server>.prompts.<name>          returns one prompt; the input has the arguments
<server>.completions.complete    suggests values for an argument of a prompt or template

If these are served over MCP, prompts and templates are listed as such, and resources are read by `resources.read`.

Rule 1: an unchanged operation stays the same object; changes are added, replaced or removed, and reported.
Rule 2: operations that other code registered are not changed.
"""

import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, cast

from msgspec.structs import replace as with_fields

from operations.base.errors import CallError, ErrorCode, RegistrationError
from operations.base.json.values import list_of, object_of, unsafe_in_path
from operations.base.text import hides_something, printable, safe_name
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import (
    SOURCE_NAMESPACE,
    Operation,
    OperationSpec,
    OperationType,
    SourceInfo,
)
from operations.mcp.shared.addresses import LISTED, is_url, parse_template
from operations.mcp.shared.interaction import is_question, question_envelope
from operations.mcp.source import tools
from operations.mcp.source.listing import INSTRUCTIONS, Listing, Pins, pin_key
from operations.mcp.source.skills import SkillEntries
from operations.registry.registry import OperationRegistry
from operations.schema import from_schema

logger = logging.getLogger("operations.mcp")

# ------------------------------------------------------------ resources and prompts

READ: Final = "resources.read"
"""The name of the operation that reads any resource of a server."""

_NOTHING: JSONObject = {"type": "object", "additionalProperties": False}
_URI: JSONObject = {
    "type": "object",
    "properties": {"uri": {"type": "string", "minLength": 1}},
    "required": ["uri"],
    "additionalProperties": False,
}
_TEXT: JSONObject = {"type": "string"}
_COMPLETION: JSONObject = {
    "type": "object",
    "properties": {
        "ref": {
            "type": "object",
            "properties": {"type": _TEXT, "name": _TEXT, "uri": _TEXT},
            "required": ["type"],
        },
        "argument": {
            "type": "object",
            "properties": {"name": _TEXT, "value": _TEXT},
            "required": ["name", "value"],
        },
        "context": {"type": "object"},
    },
    "required": ["ref", "argument"],
    "additionalProperties": False,
}
"""The fields of a listed prompt, resource or template that are forwarded."""
_QUERY: Final = re.compile("[?#]")


class ResourceOperations:
    """Builds the operations for one server's listing."""

    def __init__(self, source: tools.ServerAccess, pins: Pins) -> None:
        self._source = source
        self._config = source.config
        self._pins = pins
        self._skills: SkillEntries | None = None

    def build(self, listing: Listing, skipped: dict[str, str]) -> Iterator[tuple[str, Operation]]:
        """Yield each operation with its pin key; add entries without a usable name to `skipped`."""
        shown: list[JSONObject] = [
            {key: entry[key] for key in LISTED if key in entry}
            for entry in listing.resources
            if pin_key("resources", entry) not in self._pins.waiting and is_url(entry["uri"])
        ]
        if listing.resources or listing.templates:
            yield "", self._lister("resources", "list", "The resources of the server.")
            about = "The resource templates of the server."
            yield "", self._lister("templates", "templates", about)
        if listing.has_skills:
            self._skills = SkillEntries(self._source.server, self._source.request)
            yield from (("", each) for each in self._skill_operations(self._skills))
        if listing.can_read:
            spec = self._spec(READ, "Read a resource by its URI.", _URI)
            timeout = self._config.timeout
            yield "", Operation(spec, self._read_any, resources=shown, source_timeout=timeout)
            if listing.can_watch:
                yield "", self._watcher()
        named = [("templates", each, self._template) for each in listing.templates]
        named += [("prompts", each, self._prompt) for each in listing.prompts]
        for kind, entry, build in named:
            given = entry.get("name") or entry.get("uriTemplate")
            try:
                yield pin_key(kind, entry), build(entry, f"{kind}.{safe_name(str(given))}")
            except ValueError as error:
                skipped[f"{kind}.{ascii(given)[1:-1]}"] = str(error)
        if listing.can_complete and (listing.templates or listing.prompts):
            yield "", self._completer()

    async def _read_any(self, input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        return await self._read(input["uri"], context)

    async def _read(self, uri: str, context: OperationContext) -> ResponseEnvelope[Any]:
        """Read the resource at a URI.

        Raises:
            CallError: If it is in quarantine, or cannot be read.
        """
        key = f"resources/{uri}"
        if key in self._pins.waiting:
            raise tools.in_quarantine(key, self._source.server)
        params = {"uri": uri}
        result = await self._source.settled("resources/read", params, context, replayable=True)
        if is_question(result):
            return question_envelope(result)
        if self._skills is not None:
            await self._skills.check(uri, result, context)
        return tools.resource_envelope(result)

    def _skill_operations(self, skills: SkillEntries) -> Iterator[Operation]:
        async def list_now(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            return tools.data_envelope(await skills.read_all(context))

        async def get(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            return tools.data_envelope(await skills.get(input["uri"], context))

        yield Operation(self._spec("skills.list", "The skills of the server.", _NOTHING), list_now)
        about = "The entry of a skill, by the address of its SKILL.md."
        yield Operation(self._spec("skills.get", about, _URI), get)

    def _spec(
        self,
        name: str,
        description: str,
        input_schema: JSONObject,
        entry: JSONObject | None = None,
        mcp: JSONObject | None = None,
        kind: OperationType = OperationType.QUERY,
    ) -> OperationSpec:
        config = self._config
        entry = entry or {}
        meta: JSONObject = {"source": "mcp", "server": self._source.server}
        meta[SOURCE_NAMESPACE] = config.namespace
        meta |= {key: entry[key] for key in LISTED if entry.get(key)}
        meta["mcp"] = mcp or {"tool": False}
        title = entry.get("title")
        spec = OperationSpec(
            name=name,
            namespace=cast("str", config.namespace),
            version=self._source.version,
            type=kind,
            title=title if isinstance(title, str) else None,
            description=description,
            input_schema=from_schema(input_schema, lenient=True),
            meta=meta,
        )
        return config.guarded(spec)

    def _lister(self, kind: str, name: str, description: str) -> Operation:
        async def list_now(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            entries = await self._source.list_all(kind, context)
            if self._config.pin == "strict":
                entries = [
                    entry
                    for entry in entries
                    if not self._pins.is_different(pin_key(kind, entry), entry)
                ]
            return tools.data_envelope(entries)

        return Operation(self._spec(f"resources.{name}", description, _NOTHING), list_now)

    def _watcher(self) -> Operation:
        watch = self._source.watch

        async def follow(input: Any, context: OperationContext) -> AsyncIterator[JSONObject]:
            async with aclosing(watch(input["uri"], context)) as changes:
                async for uri in changes:
                    yield {"uri": uri}

        spec = self._spec(
            "resources.watch",
            "Report that the subscription to a resource is active, and then each change of the resource.",
            _URI,
            kind=OperationType.SUBSCRIPTION,
        )
        return Operation(spec, follow)

    def _completer(self) -> Operation:
        async def complete(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            result = await self._source.request(
                "completion/complete", dict(input), context, replayable=True
            )
            return tools.data_envelope(result.get("completion"))

        description = "Suggest values for an argument of a prompt or template."
        return Operation(self._spec("completions.complete", description, _COMPLETION), complete)

    def _template(self, entry: JSONObject, name: str) -> Operation:
        template = parse_template(entry["uriTemplate"])
        schema: JSONObject = {
            "type": "object",
            "properties": {
                variable.name: {"type": "array", "items": _TEXT} if variable.explode else _TEXT
                for variable in template.variables
            },
            "additionalProperties": False,
        }

        async def read(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            try:
                uri = template.expand(input or {})
            except (TypeError, ValueError) as error:
                raise CallError(ErrorCode.VALIDATION_ERROR, str(error)) from None
            if unsafe := unsafe_in_path(_QUERY.split(uri, maxsplit=1)[0]):
                message = f"The path of the resource may not contain {unsafe}."
                raise CallError(ErrorCode.VALIDATION_ERROR, message)
            return await self._read(uri, context)

        mcp = {"resource": {"uri": entry["uriTemplate"]}}
        spec = self._spec(name, str(entry.get("description") or ""), schema, entry, mcp)
        return Operation(spec, read, source_timeout=self._config.timeout)

    def _prompt(self, entry: JSONObject, name: str) -> Operation:
        prompt_name = entry["name"]
        arguments = _arguments(entry.get("arguments"))
        schema: JSONObject = {
            "type": "object",
            "properties": {
                argument["name"]: {
                    "type": "string",
                    "description": str(argument.get("description") or ""),
                }
                for argument in arguments
            },
            "required": [
                argument["name"] for argument in arguments if argument.get("required") is True
            ],
            "additionalProperties": False,
        }

        async def get(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            params = {"name": prompt_name, "arguments": dict(input or {})}
            return await self._source.read("prompts/get", params, context, tools.prompt_envelope)

        mcp = {"prompt": True}
        spec = self._spec(name, str(entry.get("description") or ""), schema, entry, mcp)
        return Operation(spec, get, source_timeout=self._config.timeout)


def _arguments(listed: Any) -> list[JSONObject]:
    """Return the arguments of a prompt that have a name."""
    return [each for each in map(object_of, list_of(listed)) if isinstance(each.get("name"), str)]


# ------------------------------------------------------------ the catalog


_SHOWN = 5
"""The number of skipped entries that the log names."""


class ServerCatalog:
    """The operations of a server.

    Args:
        source: The server, with the settings of the import; its version is that of the last listing.
    """

    def __init__(self, source: tools.ServerAccess) -> None:
        self.operations: dict[str, Operation] = {}
        """The operations by id."""

        self.tools: dict[str, JSONObject] = {}
        """The imported tools by name, in the form of the server's listing."""

        self.skipped: dict[str, str] = {}
        """Definitions that were skipped, with the reason."""

        self._source = source
        self._server = source.server
        self._config = config = source.config
        self.pins = Pins(config.pin, dict(config.pins), config.target)
        self._listing = Listing()
        self._ids: dict[str, str] = {}
        """The operation ids of the tools by name."""

        self._has_asked = False

        self.registries: dict[OperationRegistry, None] = {}
        """The registries that have these operations and are updated, in order."""

    def accept(self, key: str) -> None:
        """Accept a definition in quarantine, so that it can be used again.

        Raises:
            KeyError: If it is not in quarantine.
        """
        self.pins.accept(key)
        self._rebuild()

    def take(self, listing: Listing, version: str, *, offers_tasks: bool = False) -> bool:
        """Build the operations from the listings of a server `version`; return whether any operation changed."""
        known = self._source
        if (listing, version, offers_tasks) == (self._listing, known.version, known.offers_tasks):
            return False
        self.tools = {
            tool["name"]: tool
            for tool in listing.tools
            if tools.is_selected(tool["name"], self._config)
        }
        changed = self.pins.check(replace(listing, tools=list(self.tools.values())))
        if changed:
            logger.warning(
                "%s added or changed the definition of %s: %s",
                self._server,
                ", ".join(map(ascii, changed)),
                "in quarantine" if self._config.pin == "strict" else "accepted",
            )
        marks_tasks = any(_task_support(tool) for tool in listing.tools)
        self._source = replace(
            known, version=version, offers_tasks=offers_tasks, marks_tasks=marks_tasks
        )
        self._listing = listing
        self._rebuild()
        return True

    def _rebuild(self) -> None:
        """Replace the operations by those of the current listing; quarantine definitions that changed."""
        skipped = dict(self._listing.skipped)
        found: dict[str, Operation] = {}
        self._ids = {}
        extras = ResourceOperations(self._source, self.pins).build(self._listing, skipped)
        built = [*self._tools(skipped), *extras]
        if self._has_asked:
            built.append(("", tools.build_resume(self._source, self._find)))
        for key, operation in built:
            spec, tool = operation.spec, operation.spec.meta.get("tool")
            if spec.id in found:
                skipped[ascii(tool or spec.name)[1:-1]] = f"its id {spec.id} is taken"
                continue
            if tool is not None:
                self._ids[tool] = spec.id
            if key in self.pins.waiting:
                known = self.operations.get(spec.id)
                found[spec.id] = tools.quarantine(spec, known, self._server)
                continue
            found[spec.id] = operation
            if tool is not None and hides_something(spec.description):
                logger.warning("the description of %s contains invisible characters", spec.id)
        listing = self._listing
        instructions = "" if INSTRUCTIONS in self.pins.waiting else listing.instructions
        if hides_something(instructions):
            logger.warning("the instructions of %s contain invisible characters", self._server)
        info = SourceInfo(instructions, listing.server, listing.freshness, listing.offers)
        found = {
            operation_id: with_fields(operation, source_info=info)
            for operation_id, operation in found.items()
        }
        self._log_skipped(skipped)
        self.skipped = skipped
        self._replace(found)

    def _log_skipped(self, skipped: dict[str, str]) -> None:
        new = [f"{name} ({reason})" for name, reason in skipped.items() - self.skipped.items()]
        if new:
            new.sort()
            more = len(new) - _SHOWN
            logger.warning(
                "%s: skipped %s%s",
                self._server,
                printable(", ".join(new[:_SHOWN])),
                f" and {more} more, see `client.skipped`" if more > 0 else "",
            )

    def _tools(self, skipped: dict[str, str]) -> Iterator[tuple[str, Operation]]:
        """Yield each tool with its pin key, which is its name; add tools without a usable name to `skipped`."""
        for name, tool in self.tools.items():
            try:
                spec = tools.build_spec(tool, self._source)
            except ValueError as error:
                skipped[ascii(name)[1:-1]] = str(error)
            else:
                durable = self._is_durable(name, tool)
                yield name, tools.build_tool(spec, name, self._source, self._asked, durable=durable)

    def _is_durable(self, name: str, tool: JSONObject) -> bool:
        """Return whether the calls of a tool are runs."""
        source, config = self._source, self._config
        if config.durable is not None:
            return tools.matches(name, config.durable)
        # A run stores no tokens of its caller.
        if not source.offers_tasks or callable(config.auth):
            return False
        return _task_support(tool) or not source.marks_tasks

    def _find(self, name: str) -> Operation | None:
        return self.operations.get(self._ids.get(name, ""))

    def _asked(self) -> str:
        """Add the operation that accepts answers, because a tool has asked its caller a question."""
        if not self._has_asked:
            self._has_asked = True
            self._rebuild()
        return f"{self._config.namespace}.tools.resume"

    def _replace(self, found: dict[str, Operation]) -> None:
        before, after = self.operations, dict[str, Operation]()
        for operation_id, new in found.items():
            old = before.get(operation_id)
            after[operation_id] = old if old is not None and _is_same(old, new) else new
        self.operations = after
        for registry in self.registries:
            self._update(registry, before)

    def _update(self, registry: OperationRegistry, before: dict[str, Operation]) -> None:
        """Update `registry` from the operations `before` to the current ones."""
        for operation_id in before.keys() - self.operations.keys():
            registry.remove_imported(before[operation_id])
        for operation_id, new in self.operations.items():
            known = before.get(operation_id)
            if known is new:
                continue
            is_ours = known is not None and registry.imported(known) is not None
            try:
                registry.register(registry.restricted(new, known), replace=is_ours)
            except RegistrationError as error:
                logger.warning("%s: a new tool was not registered: %s", self._server, error)


def _task_support(tool: JSONObject) -> bool:
    """Return whether a listed tool is marked as one whose calls may be tasks."""
    return object_of(tool.get("execution")).get("taskSupport") in ("optional", "required")


def _is_same(old: Operation, new: Operation) -> bool:
    return (
        old.spec == new.spec
        and old.resources == new.resources
        and old.source_info == new.source_info
        and old.durable == new.durable
    )
