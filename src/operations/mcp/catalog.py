"""The operations of one server: built from its listings, pinned, and kept up to date in every registry that has them.

Rule 1: an unchanged operation stays the same object; changes are added, replaced or removed, and reported.
Rule 2: operations that others registered are not touched.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

from msgspec.structs import replace as with_fields

from operations._mcp_config import MCPClientConfig
from operations.errors import RegistrationError
from operations.mcp.listing import INSTRUCTIONS, Listing, Pins, hides_something
from operations.mcp.resources import ListAll, ResourceOperations, Source, WatchResource
from operations.mcp.tools import (
    Request,
    build_resume,
    build_spec,
    build_tool,
    is_imported,
    quarantine,
)
from operations.registry import OperationRegistry
from operations.specs import Operation, OperationSpec
from operations.types import JSONObject

logger = logging.getLogger("operations.mcp")

_SHOWN = 5
"""Entries that were left out and are named in the log."""


class Catalog:
    """The operations of a server.

    Args:
        server: Its name.
        config: Selects the imports and their settings.
        request: How an operation reaches the server.
        list_all: How one of its lists is read.
        watch: How changes of one of its resources are followed.
    """

    def __init__(
        self,
        server: str,
        config: MCPClientConfig,
        request: Request,
        list_all: ListAll,
        watch: WatchResource,
    ) -> None:
        self.operations: dict[str, Operation] = {}
        """By id."""

        self.tools: dict[str, JSONObject] = {}
        """As the server listed them, by name; only those that are imported."""

        self.skipped: dict[str, str] = {}
        """Definitions that were left out, with the reason."""

        self.pins = Pins(config.pin, dict(config.pins), config.target)
        self._server = server
        self._version = ""
        self._config = config
        self._request = request
        self._list_all = list_all
        self._watch_resource = watch
        self._listing = Listing()
        self._ids: dict[str, str] = {}
        """The operation of each tool."""

        self._has_asked = False
        self._registries: list[OperationRegistry] = []

    def attach(self, registry: OperationRegistry) -> None:
        """Keep `registry`, which holds these operations, up to date."""
        if registry not in self._registries:
            self._registries.append(registry)

    def detach(self, registry: OperationRegistry) -> None:
        """Leave `registry` alone from now on."""
        if registry in self._registries:
            self._registries.remove(registry)

    def accept(self, key: str) -> None:
        """Accept a definition in quarantine, so that it can be used again.

        Raises:
            KeyError: If it is not in quarantine.
        """
        self.pins.accept(key)
        self._rebuild()

    def take(self, listing: Listing, version: str) -> bool:
        """Build operations from the listings of a server `version`; return whether anything changed."""
        if (listing, version) == (self._listing, self._version):
            return False
        self.tools = {
            tool["name"]: tool for tool in listing.tools if is_imported(tool["name"], self._config)
        }
        changed = self.pins.check(replace(listing, tools=list(self.tools.values())))
        if changed:
            logger.warning(
                "%s added or changed the definition of %s: %s",
                self._server,
                ", ".join(map(ascii, changed)),
                "in quarantine" if self._config.pin == "strict" else "accepted",
            )
        self._listing, self._version = listing, version
        self._rebuild()
        return True

    def _rebuild(self) -> None:
        skipped = dict(self._listing.skipped)
        found: dict[str, Operation] = {}
        self._ids = {}
        for name, tool in self.tools.items():
            label = ascii(name)[1:-1]
            try:
                spec = build_spec(tool, self._server, self._version, self._config)
            except ValueError as error:
                skipped[label] = str(error)
                continue
            if spec.id in found:
                skipped[label] = f"its name reads as {spec.id}, which is taken"
            else:
                found[spec.id] = self._operation(spec, name)
                self._ids[name] = spec.id
        for extra in self._extras(skipped):
            found.setdefault(extra.spec.id, extra)
        instructions = self._listing.instructions
        if instructions and INSTRUCTIONS not in self.pins.waiting:
            if hides_something(instructions):
                logger.warning("the instructions of %s hold invisible characters", self._server)
            found = {
                operation_id: with_fields(operation, source_instructions=instructions)
                for operation_id, operation in found.items()
            }
        new = [f"{name} ({reason})" for name, reason in skipped.items() - self.skipped.items()]
        if new:
            new.sort()
            more = len(new) - _SHOWN
            logger.warning(
                "%s: left out %s%s",
                self._server,
                ", ".join(new[:_SHOWN]),
                f" and {more} more, see `client.skipped`" if more > 0 else "",
            )
        self.skipped = skipped
        self._replace(found)

    def _operation(self, spec: OperationSpec, name: str) -> Operation:
        if name in self.pins.waiting:
            return quarantine(spec, self.operations.get(spec.id), self._server)
        if hides_something(spec.description):
            logger.warning("the description of %s holds characters that cannot be seen", spec.id)
        return build_tool(spec, name, self._request, self._config, self._asked)

    def _extras(self, skipped: dict[str, str]) -> Iterator[Operation]:
        source = Source(
            self._server, self._version, self._config, self._request, self._watch_resource
        )
        built = ResourceOperations(source, self._list_all, self.pins).build(self._listing, skipped)
        for key, operation in built:
            if key in self.pins.waiting:
                known = self.operations.get(operation.spec.id)
                yield quarantine(operation.spec, known, self._server)
            else:
                yield operation
        if self._has_asked:
            yield build_resume(self._server, self._version, self._request, self._config, self._find)

    def _find(self, name: str) -> tuple[Operation, JSONObject] | None:
        operation = self.operations.get(self._ids.get(name, ""))
        return None if operation is None else (operation, self.tools[name])

    def _asked(self) -> str:
        """A tool asked its caller something: from now on there is an operation for the answers."""
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
        for registry in self._registries:
            self._update(registry, before)

    def _update(self, registry: OperationRegistry, before: dict[str, Operation]) -> None:
        """Update `registry` from the operations `before` to the current ones."""

        def is_ours(operation_id: str) -> bool:
            current, known = registry.registered(operation_id), before.get(operation_id)
            return current is not None and known is not None and current.handler is known.handler

        for operation_id in before.keys() - self.operations.keys():
            if is_ours(operation_id):
                registry.unregister(operation_id)
        for operation_id, new in self.operations.items():
            if before.get(operation_id) is new:
                continue
            try:
                registry.register(new, replace=is_ours(operation_id))
            except RegistrationError as error:
                logger.warning("%s: a new tool was not registered: %s", self._server, error)


def _is_same(old: Operation, new: Operation) -> bool:
    return (
        old.spec == new.spec
        and old.resources == new.resources
        and old.source_instructions == new.source_instructions
    )
