"""Open the sources that a config names, and put their operations into one registry.

Rule 1: sources are opened concurrently and kept open. A failed source is reported and retried; it does not affect the
        others.
Rule 2: the code for a kind of source is imported only if the config has such a source.
Rule 3: a command may need only some sources (`SourceFilter`); the others stay closed until a handler calls one of their
        operations.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from anyio import move_on_after

from operations._text import suggestion
from operations.access import Identity
from operations.authority.grants import PREFIX, GrantError
from operations.config import ConfigFile
from operations.errors import CallError, ErrorCode, operation_not_found
from operations.front import Front
from operations.front.config import ASGIApp
from operations.hub.journal import recall_ids
from operations.hub.source import (
    ListedServer,
    Opened,
    Source,
    SourceState,
    Supervisor,
    file_times,
    fingerprint,
)
from operations.hub.sources import Access, open_source, sources_of
from operations.registry import OperationRegistry
from operations.specs import OperationSpec
from operations.tools import ToolConfig, configure_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFilter:
    """Selects sources; all by default.

    Attributes:
        operation: One operation, by its id, and the operations that it calls.
        namespace: The operations of a namespace.
        source: The operations of a source: its kind, its name, or both.
        without: A source to leave out, as `kind:name`.
    """

    operation: str | None = None
    namespace: str | None = None
    source: str | None = None
    without: str | None = None

    def includes(self, source: Source) -> bool:
        """Return whether the filter selects a source.

        Workers and local modules may have operations in any namespace.
        """
        if self.source is not None:
            return source.is_called(self.source)
        return source.label != self.without and (
            self.namespace is None
            or source.kind in ("local", "broker")
            or source.name == self.namespace
            or is_unreadable(source)
        )

    @property
    def is_all(self) -> bool:
        """Whether every source is selected."""
        return self == ALL


ALL = SourceFilter()

_START_SECONDS = 30.0
"""Seconds that a hub is not ready because its sources are connecting for the first time."""


class Hub:
    """A registry, the sources of its operations, and the application that serves them.

    Attributes:
        registry: The operations of all open sources.
        file: The config.
        wanted: The sources that this hub opens.
        resolvers: Further `IdentityResolver`s of the application, which `setup` may add.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        file: ConfigFile,
        wanted: SourceFilter,
        build_app: Callable[["Hub"], ASGIApp],
    ) -> None:
        self.registry = registry
        registry.is_absent = self._may_be_absent
        self.file = file
        self.wanted = wanted
        self._build_app = build_app
        self.tools = configure_tools(registry, tools_of(file))
        """The settings of `[tools]`."""
        self.file_times = times_read(file)
        """The modification times of the files that this hub was built from."""

        self.resolvers: list[Any] = []
        self.fronts: list[Front] = []
        """The fronts of this hub's servers, which limit and admit their callers."""
        self.reload_others: Callable[[], None] = lambda: None
        """Makes the other processes that serve the same config read it again."""

        self.on_reload: list[Callable[[], None]] = []
        """Called after each reload, to apply the parts of the file that the application uses."""

        self.supervisors: list[Supervisor] = []
        self.changing = asyncio.Lock()
        """Held while a config is applied, so that changes do not overlap."""

        self._removed: list[Supervisor] = []
        self._started_at = monotonic()
        self._by_id: dict[str, Source] = {}
        self._indexed = -1

    @property
    def sources(self) -> list[Source]:
        """The selected sources, in the order of the config."""
        return [supervisor.source for supervisor in self.supervisors]

    @cached_property
    def app(self) -> ASGIApp:
        """The ASGI application that `operations serve` runs, with the HTTP API, MCP, WebSocket and console.

        Raises:
            ConfigError: If a key cannot be read.
        """
        return self._build_app(self)

    @cached_property
    def access(self) -> Access:
        """The callers of `[access]`.

        Raises:
            ConfigError: If a key cannot be read.
        """
        return Access(self.file, self.registry.authority.store)

    def serve_authority(self, is_up: Callable[[], bool] = lambda: True) -> None:
        """Register the operations that answer approvals, and open the ledger; every entry point needs both.

        Args:
            is_up: Returns False while the server shuts down.

        Raises:
            LedgerError: If the ledger cannot be used.
        """
        authority = self.registry.authority
        if authority.ledger is not None:
            authority.ledger.open()
        authority.approvals.is_up = is_up
        self.registry.register_object(authority.approvals, replace=True)

    # ------------------------------------------------------------ opening

    async def open(self, sources: Iterable[Source], wait: float | None) -> None:
        """Open sources concurrently, and keep them open.

        Brokers are opened last, one by one: an operation of a worker is registered only if no other source has its id.

        Args:
            sources: The sources to open.
            wait: Seconds to wait for each source to connect or fail; None for no limit.
        """
        for source in sources:
            self.supervisors.append(self._supervise(source))
        started = [each for each in self.supervisors if each.source.is_enabled]
        brokers = [each for each in started if each.source.kind == "broker"]
        others = [each for each in started if each.source.kind != "broker"]
        with move_on_after(wait):
            for some in (others, *([each] for each in brokers)):
                _start(some)
                await asyncio.gather(*(each.attempted() for each in some))
        _start(started)

    async def settled(self, seconds: float) -> None:
        """Wait until each source has connected or failed, for at most this many seconds."""
        enabled = [each for each in self.supervisors if each.source.is_enabled]
        with move_on_after(seconds):
            await asyncio.gather(*(each.attempted() for each in enabled))

    async def remove(self, supervisor: Supervisor) -> None:
        """Close a source permanently, after its running calls have finished."""
        await supervisor.disable()
        self.supervisors.remove(supervisor)
        self._removed = [each for each in self._removed if not each.is_closed]
        self._removed.append(supervisor)

    def _supervise(self, source: Source) -> Supervisor:
        return Supervisor(
            source,
            self._open,
            self.registry,
            owner=self._owner,
            drain_seconds=self.file.config.limits.timeout,
        )

    async def _open(self, source: Source) -> Opened:
        source.made_of = fingerprint(source, self.file)
        opened = await open_source(source, self.file)
        # The file may have changed meanwhile.
        opened.configure(self.file)
        return opened

    def _owner(self, operation_id: str) -> str:
        source = self.source_of(operation_id)
        return "this process" if source is None else source.label

    async def aclose(self) -> None:
        """Close all sources."""
        await asyncio.gather(*(each.aclose() for each in (*self.supervisors, *self._removed)))

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of a source, by name or `kind:name`.

        Raises:
            KeyError: If there is no such source, or more than one.
        """
        found = [each for each in self.supervisors if name in each.source.names]
        if len(found) != 1:
            raise KeyError(name)
        return found[0]

    # ------------------------------------------------------------ lookup

    def source_of(self, operation_id: str) -> Source | None:
        """Return the source that an operation comes from."""
        revision = self.registry.revision
        if self._indexed != revision:
            self._indexed = revision
            self._by_id = {
                self.registry.current_id(each): source
                for source in self.sources
                for each in source.operations
            }
        return self._by_id.get(operation_id)

    @property
    def offered(self) -> int:
        """The number of operations of all sources."""
        return sum(len(source.operations) for source in self.sources)

    def has_namespace(self, namespace: str) -> bool:
        """Return whether a source is called `namespace` or has operations in it."""
        return any(
            source.name == namespace
            or any(each.partition(".")[0] == namespace for each in source.operations)
            for source in self.sources
        )

    def absent(self, namespace: str | None = None) -> list[Source]:
        """Return the sources that are not available, in one namespace or in all."""
        return [
            source
            for source in self.sources
            if source.is_enabled and source.problem is not None and namespace in (None, source.name)
        ]

    def _may_be_absent(self, namespace: str) -> bool:
        """Return whether a source that is not available may have operations of a namespace."""
        return any(
            namespace == source.name or (source.kind == "broker" and source.opened is None)
            for source in self.absent()
        )

    @property
    def is_starting(self) -> bool:
        """Whether a source is still connecting for the first time, and the hub started a short time ago."""
        return monotonic() < self._started_at + _START_SECONDS and any(
            source.state is SourceState.CONNECTING for source in self.sources
        )

    def spec(self, operation_id: str) -> OperationSpec:
        """Return the contract of one operation.

        Raises:
            CallError: `OPERATION_NOT_FOUND` with a suggestion or closed sources; `UNAVAILABLE` if its source failed.
        """
        spec = self.registry.get_spec(operation_id)
        if spec is not None:
            return spec
        self.enforce_open(operation_id)
        raise self._not_found(operation_id)

    def _not_found(self, operation_id: str) -> CallError:
        known = [spec.id for spec in self.registry.specs()]
        recalled = recall_ids(self.file)
        absent = self.absent()
        if operation_id in recalled and absent:
            missing = ", ".join(source.label for source in absent)
            return CallError(
                ErrorCode.UNAVAILABLE,
                f"{operation_id} was available before, but these are not available now: {missing}",
            )
        near = suggestion(operation_id, {*known, *recalled} - {operation_id})
        namespace = operation_id.partition(".")[0]
        unasked = ", ".join(
            source.label
            for source in absent
            if source.kind == "broker"
            and source.entry.options.get("namespace") in (None, namespace)
        )
        if unasked and not self.has_namespace(namespace):
            return CallError(
                ErrorCode.UNAVAILABLE,
                f"no connected source has {operation_id}, and {unasked} cannot be asked.{near}",
            )
        left_out = ", ".join(
            source.label
            for source in self._left_out()
            if source.name == namespace
            or (operation_id in recalled and source.kind in ("local", "broker"))
        )
        if left_out:
            message = f"No open source has {operation_id}; the SourceFilter leaves out {left_out}"
        else:
            message = f"There is no operation {operation_id!r}.{near}".removesuffix(".")
        return operation_not_found(operation_id, message)

    def _left_out(self) -> list[Source]:
        """Return the sources of the config that the `SourceFilter` of this hub leaves out."""
        if self.wanted.is_all:
            return []
        opened = {source.label for source in self.sources}
        return [source for source in sources_of(self.file) if source.label not in opened]

    def enforce_open(self, operation_id: str) -> None:
        """Raise an error if the source of an operation is not connected.

        Raises:
            CallError: `UNAVAILABLE`, with the sources and reasons.
        """
        absent = self.absent(operation_id.partition(".")[0])
        if absent:
            reasons = "\n".join(f"{each.label} is not: {each.problem}" for each in absent)
            message = f"{operation_id} is not available, because {reasons}"
            raise CallError(ErrorCode.UNAVAILABLE, message)

    async def identity(self, name: str) -> Identity | None:
        """Return the identity of a caller in `[access.keys]` or of a grant; None for `anonymous`.

        Raises:
            ConfigError: If there is no such caller.
            CallError: `ACCESS_DENIED` if the grant is not valid.
        """
        if not self.is_grant(name):
            return self.named_identity(name)
        try:
            return await self.access.grant(name)
        except GrantError as error:
            raise CallError(ErrorCode.ACCESS_DENIED, f"Access denied: {error}") from None

    def is_grant(self, name: str) -> bool:
        """Return whether the name of a caller is a grant."""
        return self.file.config.access.grants is not None and name.startswith(PREFIX)

    def named_identity(self, name: str) -> Identity | None:
        """Return the identity of a caller in `[access.keys]`; None for `anonymous`.

        Raises:
            ConfigError: If there is no such caller.
        """
        keys = self.file.config.access.keys
        if name in keys:
            return Identity(name, **self.file.options(Identity, keys[name]))
        if name == "anonymous":
            return None
        known = ", ".join([*keys, "anonymous"])
        hint = suggestion(name, keys) or f" Known: {known}."
        raise self.file.fault(f"there is no caller {name!r} in [access.keys].{hint}")


def tools_of(file: ConfigFile) -> dict[str, ToolConfig]:
    """Return the settings of `[tools]`, by pattern."""
    return {
        pattern: ToolConfig(**file.options(ToolConfig, entry))
        for pattern, entry in file.config.tools.items()
    }


def _start(supervisors: Iterable[Supervisor]) -> None:
    for supervisor in supervisors:
        # It may have been disabled in the meantime.
        if supervisor.source.is_enabled:
            supervisor.start()


def is_unreadable(source: Source) -> bool:
    """Return whether a source is an unreadable `mcp.json`, which may contain any server."""
    return isinstance(source.entry, ListedServer) and source.entry.entry is None


def times_read(file: ConfigFile) -> dict[Path, int | None]:
    """Return the modification times of a config's files before they are read, so that later changes are noticed."""
    times = file_times(file)
    if file.path is not None and file.modified is not None:
        times[file.path] = file.modified
    return times
