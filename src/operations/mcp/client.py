"""One MCP server as a service: its operations, kept true while the server changes and comes and goes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version as installed_version
from typing import Any, Self, cast

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.client.subscriptions import SubscriptionLost, listen
from mcp_types import HEADER_MISMATCH

from operations.context import OperationContext
from operations.errors import CallError, RegistrationError
from operations.mcp.config import MCPClientConfig
from operations.mcp.connection import Connection, Retries
from operations.mcp.failures import ServerError, read_failure, timed_out
from operations.mcp.interaction import callbacks
from operations.mcp.listing import Listing, list_everything, pages
from operations.mcp.names import hides_something, safe_namespace
from operations.mcp.pins import Pins, digest
from operations.mcp.resources import ResourceOperations
from operations.mcp.session import RelaySession
from operations.mcp.tools import build_resume, build_spec, build_tool, is_imported, quarantine
from operations.registry import OperationRegistry
from operations.specs import Operation, OperationSpec
from operations.types import JSONObject

logger = logging.getLogger("operations.mcp")

_LEVELS = {"debug": 10, "info": 20, "notice": 20, "warning": 30, "error": 40}
_LISTEN_AGAIN_SECONDS = 5.0
_REFRESH_SECONDS = 0.1
"""Between two listings, however often a server says that it changed."""

_LONGEST_LOG = 2000


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    name: str
    version: str
    title: str | None = None

    protocol_version: str = ""
    """The revision spoken with it."""

    instructions: str | None = None
    capabilities: JSONObject = field(default_factory=dict[str, Any])


class MCPClient:
    """What `connect_mcp` gives: iterates over the server's operations; `registry.register_all` takes it.

    A registry it was registered with follows the server: tools that appear, change or go do so there too.
    """

    def __init__(self, name: str, config: MCPClientConfig) -> None:
        self.name = name
        self.config = replace(config, namespace=config.namespace or safe_namespace(name))

        self.server_info: ServerInfo | None = None
        """None until the server was reached for the first time."""

        self.skipped: dict[str, str] = {}
        """What the server listed and was left out, with the reason."""

        self._operations: dict[str, Operation] = {}
        self._tools: dict[str, JSONObject] = {}
        self._pins = Pins(config.pin, dict(config.pins))
        self._registries: list[OperationRegistry] = []
        self._listing = Listing()
        self._has_asked = False
        self._is_listening = False
        self._stale = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._connection = Connection(name, self.config, self._callbacks(), self._opened)

    # ------------------------------------------------------------ what it offers

    @property
    def operations(self) -> list[Operation]:
        """Every operation of the server, as it is now."""
        return list(self._operations.values())

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def is_connected(self) -> bool:
        """Whether a call made now would find the server."""
        return self._connection.session is not None

    @property
    def is_listening(self) -> bool:
        """Whether the server will tell of changes (2026-07-28; older servers do so unasked)."""
        return self._is_listening

    @property
    def pins(self) -> dict[str, str]:
        """The accepted digest of every tool; keep them, and give them to the next `MCPClientConfig`."""
        return dict(self._pins.accepted)

    @property
    def quarantined(self) -> list[str]:
        """Tools whose new definition nobody has accepted yet (`pin="strict"`)."""
        return list(self._pins.waiting)

    def accept(self, tool: str) -> None:
        """Accept the new definition of a tool, and let it be called again.

        Raises:
            KeyError: If it is not in quarantine.
        """
        self._pins.accept(tool)
        self._stale.set()
        self._rebuild()

    def attach(self, registry: OperationRegistry) -> None:
        """Keep `registry`, which holds these operations, up to date; `register_all` calls this."""
        if registry not in self._registries:
            self._registries.append(registry)

    def __repr__(self) -> str:
        return f"<MCPClient {self.name} of {len(self)} operations>"

    # ------------------------------------------------------------ lifetime

    async def open(self) -> None:
        """Connect and list.

        Raises:
            CallError: `UNAVAILABLE`, saying why.
        """
        self._follower = asyncio.create_task(self._follow(), name=f"mcp {self.name} changes")
        try:
            await self._connection.open()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Leave the server, and end it if it is our child. From any task; twice is harmless.

        Takes at most a few seconds more than `shutdown_timeout`, and is not cut short by a cancel scope.
        """
        helpers = [task for task in (self._follower, self._listener) if task is not None]
        for task in helpers:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await self._connection.aclose()
            if helpers:
                await asyncio.wait(helpers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _opened(self, session: RelaySession) -> None:
        """In the owner, at every connection: who is it, and what does it offer."""
        said = session.server_info
        capabilities = session.server_capabilities
        self.server_info = ServerInfo(
            name=said.name if said is not None else self.name,
            version=(said.version if said is not None else "") or "1.0.0",
            title=said.title if said is not None else None,
            protocol_version=session.protocol_version or "",
            instructions=session.instructions,
            capabilities=capabilities.model_dump(by_alias=True, mode="json", exclude_none=True)
            if capabilities is not None
            else {},
        )
        await self._ask_for_logs(session)
        if not self._tools and not self._operations:
            self._take(await list_everything(session, self.config.max_tools))
        else:
            # Calls need not wait for the list, but what arguments travel as headers must be known.
            session.learn(self._tools.values())
            self._stale.set()
        if session.is_modern and _tells_of_changes(capabilities):
            if self._listener is not None:
                self._listener.cancel()
            self._listener = asyncio.create_task(
                self._listen(session), name=f"mcp {self.name} listens"
            )

    # ------------------------------------------------------------ calls

    async def request(
        self, method: str, params: JSONObject, context: OperationContext, *, replayable: bool
    ) -> JSONObject:
        """Send a request for a call, within the configured time; again, where that is safe.

        Raises:
            CallError: `UNAVAILABLE`, `TIMEOUT`, `EXECUTION_ERROR` or `RESOURCE_EXHAUSTED`.
        """
        connection = self._connection
        # The call's own deadline is kept by the registry, which cancels us; two timers would race each other and
        # interrupt the message that tells the server to stop.
        seconds = self.config.timeout
        connection.busy += 1
        try:
            async with asyncio.timeout(seconds):
                return await self._send(method, params, context, replayable)
        except TimeoutError:
            raise timed_out(self.name, cast("float", seconds)) from None
        finally:
            connection.busy -= 1
            connection.used = asyncio.get_running_loop().time()

    async def _send(
        self, method: str, params: JSONObject, context: OperationContext, replayable: bool
    ) -> JSONObject:
        """Send until there is an answer, or a failure that cannot be helped.

        What surely was not carried out is sent again for as long as the connection has patience; what may have
        been is sent once more if it only reads.
        """
        connection = self._connection
        retries = Retries(connection, replayable)
        while True:
            session = connection.session or await connection.acquire()
            try:
                result = await session.relay(method, dict(params), context.door.progress)
            except Exception as error:  # noqa: BLE001 - whatever the SDK raises is one of our failures
                failure = read_failure(error, self.name)
                if failure.broken:
                    connection.give_up(session)
                if not await retries.allow(failure) and not await self._was_stale(
                    failure, session, retries
                ):
                    raise failure.error from None
            else:
                connection.is_there()
                return result

    async def _was_stale(
        self, failure: ServerError, session: RelaySession, retries: Retries
    ) -> bool:
        """Whether the server refused because our idea of the tool was out of date (2026-07-28), and now is not."""
        details: Any = failure.error.details
        code = cast("JSONObject", details).get("code") if isinstance(details, dict) else None
        if code != HEADER_MISMATCH or retries.has_refreshed:
            return False
        retries.has_refreshed = True
        with suppress(MCPError):
            self._take(await list_everything(session, self.config.max_tools))
            return True
        return False

    async def _list_all(self, method: str, key: str, context: OperationContext) -> list[JSONObject]:
        session = await self._connection.acquire()
        try:
            async with asyncio.timeout(self.config.timeout):
                return await pages(session, method, key, self.config.max_tools, {}, lambda _: None)
        except MCPError as error:
            raise read_failure(error, self.name).error from None
        except TimeoutError:
            raise timed_out(self.name, self.config.timeout or 0) from None

    # ------------------------------------------------------------ changes

    async def refresh(self) -> None:
        """List the server's offers again now, and let the registries follow.

        Raises:
            CallError: If they cannot be listed.
        """
        session = await self._connection.acquire()
        try:
            async with asyncio.timeout(self.config.connect_timeout):
                self._take(await list_everything(session, self.config.max_tools))
        except MCPError as error:
            raise read_failure(error, self.name).error from None
        except TimeoutError:
            raise timed_out(self.name, self.config.connect_timeout) from None

    async def _follow(self) -> None:
        """Refresh whenever the server says that something changed, once for many notifications."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            if self._connection.session is None:
                continue
            try:
                await self.refresh()
            except CallError as error:
                logger.warning("%s could not be listed again: %s", self.name, error.message)
            except Exception:
                logger.exception("%s: what it listed could not be taken over", self.name)
            await asyncio.sleep(_REFRESH_SECONDS)

    async def _listen(self, session: RelaySession) -> None:
        """The change notifications of 2026-07-28 have to be asked for, and asked for again when lost."""
        while session.is_open:
            try:
                async with listen(
                    session,
                    tools_list_changed=True,
                    prompts_list_changed=True,
                    resources_list_changed=True,
                ) as changes:
                    self._is_listening = True
                    async for _ in changes:
                        self._stale.set()
            except (SubscriptionLost, TimeoutError) as error:
                logger.debug("%s: lost the changes: %s", self.name, error)
            except MCPError as error:
                if error.code != types.CONNECTION_CLOSED:
                    logger.debug("%s does not tell of changes: %s", self.name, error)
                    return
            finally:
                self._is_listening = False
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS)
            self._stale.set()

    def _take(self, listing: Listing) -> None:
        """Make operations of what was listed; tell the registries what is different."""
        self._tools = {}
        changed: list[str] = []
        for tool in listing.tools:
            name = tool["name"]
            if not is_imported(name, self.config):
                continue
            self._tools[name] = tool
            if self._pins.judge(name, digest(tool, self.config.target)):
                changed.append(name)
        if changed:
            outcome = "in quarantine" if self.config.pin == "strict" else "taken over"
            logger.warning(
                "%s changed the definition of %s: %s",
                self.name,
                ", ".join(map(ascii, changed)),
                outcome,
            )
        self._listing = listing
        self._rebuild()

    def _rebuild(self) -> None:
        listing = self._listing
        version = self.server_info.version if self.server_info is not None else "1.0.0"
        found: dict[str, Operation] = {}
        for name, tool in self._tools.items():
            try:
                spec = build_spec(tool, self.name, version, self.config)
            except ValueError as error:
                listing.skipped[ascii(name)[1:-1]] = str(error)
                continue
            if spec.id in found:
                listing.skipped[ascii(name)[1:-1]] = f"its name reads as {spec.id}, which is taken"
            elif name in self._pins.waiting:
                known = self._operations.get(spec.id) or self._tool(spec, name)
                found[spec.id] = quarantine(known, self.name)
            else:
                found[spec.id] = self._tool(spec, name)
            if hides_something(spec.description):
                logger.warning(
                    "the description of %s holds characters that cannot be seen", spec.id
                )
        for extra in self._extras(version, listing):
            found.setdefault(extra.spec.id, extra)
        for name, reason in listing.skipped.items():
            if self.skipped.get(name) != reason:
                logger.warning("%s: %s was left out: %s", self.name, name, reason)
        self.skipped = listing.skipped
        self._replace(found)

    def _extras(self, version: str, listing: Listing) -> Iterator[Operation]:
        yield from ResourceOperations(
            self.name, version, self.config, self.request, self._list_all
        ).build(listing)
        if self._has_asked:
            yield build_resume(self.name, version, self.request, self.config)

    def _tool(self, spec: OperationSpec, name: str) -> Operation:
        return build_tool(spec, name, self.request, self.config, self._asked)

    def _asked(self) -> str:
        """A tool asked its caller something: from now on there is an operation for the answers."""
        if not self._has_asked:
            self._has_asked = True
            self._rebuild()
        return f"{self.config.namespace}.tools.resume"

    def _replace(self, found: dict[str, Operation]) -> None:
        """Take over `found`; an operation that is the same as before stays the very same."""
        before, after = self._operations, dict[str, Operation]()
        for operation_id, new in found.items():
            old = before.get(operation_id)
            after[operation_id] = old if old is not None and old.spec == new.spec else new
        self._operations = after
        for registry in self._registries:
            self._update(registry, before, after)

    def _update(
        self, registry: OperationRegistry, before: dict[str, Operation], after: dict[str, Operation]
    ) -> None:
        for operation_id, known in before.items():
            current = registry.get(operation_id)
            if (
                operation_id not in after
                and current is not None
                and current.handler is known.handler
            ):
                registry.unregister(operation_id)
        for operation_id, new in after.items():
            old = before.get(operation_id)
            if old is new:
                continue
            current = registry.get(operation_id)
            is_ours = old is not None and current is not None and current.handler is old.handler
            try:
                registry.register(new, replace=is_ours)
            except RegistrationError as error:
                logger.warning("%s: a new tool was not registered: %s", self.name, error)

    # ------------------------------------------------------------ the server's own messages

    def _callbacks(self) -> dict[str, Any]:
        return {
            "client_info": types.Implementation(
                name="alkdev-operations", version=installed_version("alkdev-operations")
            ),
            "logging_callback": self._log,
            "message_handler": self._hear,
            "log_level": self.config.log_level,
            **callbacks(self.name, self.config),
        }

    async def _hear(self, message: Any) -> None:
        if isinstance(
            message,
            types.ToolListChangedNotification
            | types.ResourceListChangedNotification
            | types.PromptListChangedNotification,
        ):
            self._stale.set()

    async def _log(self, params: types.LoggingMessageNotificationParams) -> None:
        text = params.data if isinstance(params.data, str) else repr(params.data)
        shown = ascii(text[:_LONGEST_LOG])[1:-1]
        logger.log(_LEVELS.get(params.level, logging.CRITICAL), "%s: %s", self.name, shown)

    async def _ask_for_logs(self, session: RelaySession) -> None:
        offers = session.server_capabilities
        if (
            self.config.log_level is None
            or session.is_modern
            or offers is None
            or offers.logging is None
        ):
            return
        try:
            await session.relay("logging/setLevel", {"level": self.config.log_level})
        except MCPError as error:
            logger.warning("%s does not take a log level: %s", self.name, error.message)


def _tells_of_changes(offers: types.ServerCapabilities | None) -> bool:
    kinds = (offers.tools, offers.resources, offers.prompts) if offers is not None else ()
    return any(kind is not None and kind.list_changed for kind in kinds)


@asynccontextmanager
async def connect_mcp(name: str, config: MCPClientConfig) -> AsyncGenerator[MCPClient]:
    """Connect to an MCP server for the length of an `async with` block.

    Args:
        name: What to call it; its operations' namespace unless `config` says otherwise.
        config: How to reach it.

    Raises:
        CallError: `UNAVAILABLE`, saying why it cannot be used.
    """
    client = MCPClient(name, config)
    await client.open()
    try:
        yield client
    finally:
        await client.aclose()
