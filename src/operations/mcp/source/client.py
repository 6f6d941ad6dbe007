"""One MCP server as a service, whose operations follow changes and reconnections of the server."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any, Self, cast

import mcp_types as types
from mcp import MCPError
from mcp.client.subscriptions import listen
from mcp_types import HEADER_MISMATCH
from mcp_types.version import KNOWN_PROTOCOL_VERSIONS

from operations.base.errors import CallError, ErrorCode, timed_out
from operations.base.json.values import object_of
from operations.base.logs import LogBudget
from operations.base.redaction import Redactor
from operations.base.retry import CircuitBreaker
from operations.base.slots import Bulkhead
from operations.base.tasks import cancel_tasks, shielded
from operations.base.text import counted, printable, safe_namespace
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.contract.specs import Operation
from operations.front.timing import CallTimeout
from operations.mcp.config import MCPClientConfig
from operations.mcp.shared.codec import with_caller_meta
from operations.mcp.shared.extensions import TASKS, passed_on
from operations.mcp.shared.failures import Failure, read_failure
from operations.mcp.shared.interaction import (
    CallInFlight,
    CallsInFlight,
    client,
    is_known,
    own_config,
)
from operations.mcp.shared.sdk import OnProgress, RelaySession
from operations.mcp.source.catalog import ServerCatalog
from operations.mcp.source.connection import CallerConnections, LiveConnection, Retries
from operations.mcp.source.listing import ResourceWatches, ServerInfo, list_entries, list_everything
from operations.mcp.source.tools import ServerAccess
from operations.registry.registry import OperationRegistry
from operations.sources.credentials import CallerToken

logger = logging.getLogger("operations.mcp")

_LEVELS = {"debug": 10, "info": 20, "notice": 20, "warning": 30, "error": 40}
_LISTEN_AGAIN_SECONDS = 5.0
_CHECK_SECONDS = 30.0
"""Seconds between two listings of an idle HTTP server, because no lost connection shows that it has stopped."""

_REFRESH_SECONDS = 0.1
_LONGEST_REFRESH_SECONDS = 30.0
"""The longest pause in seconds between two listings. The pause grows with each change notification without a change."""

_LONGEST_LOG = 2000


class MCPClient:
    """A connected server. Iterate it for its operations, or pass it to `registry.register_all`.

    A registry that it was registered with is updated when tools are added, changed or removed.

    Raises:
        ValueError: If the config names a protocol revision that does not exist.
    """

    def __init__(self, name: str, config: MCPClientConfig) -> None:
        if config.version not in ("auto", *KNOWN_PROTOCOL_VERSIONS):
            known = ", ".join(KNOWN_PROTOCOL_VERSIONS)
            raise ValueError(f"version must be auto or one of {known}, not {config.version!r}")
        self.name = name
        self.config = replace(config, namespace=config.namespace or safe_namespace(name))

        self.server_info: ServerInfo | None = None
        """None until the first connection."""

        self.is_listening = False
        """Whether the subscription to change notifications is active (2026-07-28; older servers need none)."""

        self._changes = 0
        """The number of listings with changes."""

        self._stale = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._log_budget = LogBudget()
        self._breaker = CircuitBreaker(name)
        self._bulkhead = Bulkhead(name, self.config.concurrency)
        self._connection = LiveConnection(name, self.config, self._callbacks, self._opened)
        self._connection.on_away = self._stale.set
        self._own = CallerConnections(
            lambda: LiveConnection(
                name, own_config(self.config), self._callbacks, self._opened_for_caller
            )
        )
        self._watches = ResourceWatches(name, self._connection_for)
        source = ServerAccess(
            name, "", self.config, self.request, self._list_all, self._watches.watch
        )
        self._catalog = ServerCatalog(source)

    # ------------------------------------------------------------ the catalog

    @property
    def operations(self) -> list[Operation]:
        """The current operations of the server."""
        return list(self._catalog.operations.values())

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self._catalog.operations)

    @property
    def skipped(self) -> dict[str, str]:
        """Listed definitions that were skipped, with the reason."""
        return dict(self._catalog.skipped)

    @property
    def is_connected(self) -> bool:
        """Whether the server is connected."""
        return self._connection.session is not None

    @property
    def problem(self) -> str | None:
        """The reason why the server is not available; None if it is, or if it is started for the next call."""
        failure = self._connection.failure
        if failure is not None:
            return failure.message
        return None if self._connection.away_since is None else f"{self.name} does not respond"

    @property
    def next_attempt(self) -> float | None:
        """The time of the next attempt to reach a lost server, by the loop's clock; None if none is planned."""
        return self._connection.next_attempt

    @property
    def pins(self) -> dict[str, str]:
        """The accepted digests by key: store them, and pass them to the next `MCPClientConfig`.

        A key is a tool's name, `prompts/NAME`, `templates/TEMPLATE`, `resources/URI` or `server/instructions`.
        """
        return dict(self._catalog.pins.accepted)

    @property
    def quarantined(self) -> list[str]:
        """The keys (see `pins`) of definitions that have not been accepted yet (`pin="strict"`)."""
        return list(self._catalog.pins.waiting)

    def accept(self, key: str) -> None:
        """Accept a definition in quarantine: a tool's name, or another key of `quarantined`.

        Raises:
            KeyError: If it is not in quarantine.
        """
        self._catalog.accept(key)

    def attach(self, registry: OperationRegistry) -> None:
        """Update `registry`, which has these operations, from now on; `register_all` calls this."""
        self._catalog.registries[registry] = None

    def detach(self, registry: OperationRegistry) -> None:
        """Stop updating `registry`."""
        self._catalog.registries.pop(registry, None)

    def __repr__(self) -> str:
        return f"<MCPClient {self.name} of {counted(len(self), 'operation')}>"

    # ------------------------------------------------------------ lifetime

    async def open(self) -> None:
        """Connect and read the listings; if already open, only wait for the connection.

        Raises:
            CallError: `UNAVAILABLE`, with the reason.
        """
        if self._follower is not None:
            await self._connection.acquire()
            return
        self._follower = asyncio.Task(self._follow(), name=f"mcp {self.name} changes")
        try:
            self._connection.start()
            await self._connection.acquire()
        except BaseException:
            await self.aclose()
            raise

    @shielded
    async def aclose(self) -> None:
        """Disconnect, and stop the server if it is a child process. May be called from any task, and more than once.

        Takes at most a few seconds more than `shutdown_timeout`, and is not interrupted by a cancel scope.
        """
        # All at once, because each may take seconds if the server does not respond.
        await asyncio.gather(
            cancel_tasks(self._follower, self._listener),
            self._connection.aclose(),
            self._own.aclose(),
            self._watches.aclose(),
        )
        # Another listener may have started while the connection closed.
        await cancel_tasks(self._listener)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _opened(self, session: RelaySession) -> None:
        """Read the server's description and listings. Runs in the owner task after every connection."""
        self._breaker.succeed()
        info = session.server_info or types.Implementation(name="", version="")
        offers = session.offers
        self.server_info = ServerInfo(
            name=info.name or self.name,
            version=info.version or "1.0.0",
            title=info.title,
            description=info.description,
            website_url=info.website_url,
            icons=[
                icon.model_dump(by_alias=True, mode="json", exclude_none=True)
                for icon in info.icons or ()
            ],
            protocol_version=session.protocol_version or "",
            instructions=session.instructions,
            capabilities=offers.model_dump(by_alias=True, mode="json", exclude_none=True),
        )
        await self._ask_for_logs(session)
        if not self._catalog.operations:
            await self._take(session)
        else:
            # Calls need not wait for the listing, but must know which arguments are sent as headers.
            session.learn(self._catalog.tools.values())
            self._stale.set()
        kinds = (offers.tools, offers.resources, offers.prompts)
        tells_of_changes = any(kind is not None and kind.list_changed for kind in kinds)
        if session.is_modern and tells_of_changes:
            if self._listener is not None:
                self._listener.cancel()
            self._listener = asyncio.Task(self._listen(session), name=f"mcp {self.name} listens")

    # ------------------------------------------------------------ calls

    @property
    def calls(self) -> int:
        """The number of running and waiting calls."""
        return self._bulkhead.calls

    def limit_calls(self, concurrency: int) -> None:
        """Change the number of concurrent calls."""
        self._bulkhead.resize(concurrency)

    async def request(
        self, method: str, params: JSONObject, context: OperationContext, *, replayable: bool
    ) -> JSONObject:
        """Send a request for a call within the configured time limit; retry it if that is safe.

        Raises:
            CallError: `UNAVAILABLE`, `TIMEOUT`, `EXECUTION_ERROR` or `RESOURCE_EXHAUSTED`.
        """
        connection = await self._connection_for(context)
        # The registry enforces the call's own deadline by cancellation. A second timer here could interrupt the message
        # that cancels the request at the server.
        seconds = self.config.timeout
        timeout = CallTimeout(
            seconds, answer_seconds=self.config.answer_timeout, max_seconds=self.config.max_timeout
        )
        # Without a session, the connection itself fails calls and notices when the server is available again.
        breaker = None if connection.session is None else self._breaker
        is_probe = breaker is not None and breaker.enter()
        responds: bool | None = None
        call = CallInFlight(context, timeout)
        try:
            # Also while the call waits, so that its connection is not closed for another caller.
            with connection.in_use():
                async with self._bulkhead:
                    try:
                        async with timeout:
                            with connection.calls.enter(call):
                                result = await self._send(
                                    connection, call, method, params, replayable
                                )
                                await call.settle()
                    except TimeoutError:
                        # The caller did not answer in time, which is not a failure of the server.
                        responds = None if call.is_unanswered else False
                        raise timed_out(self.name, cast("float", seconds), "answer") from None
                    except CallError as error:
                        responds = not _is_away(error)
                        raise
                    responds = True
                    return result
        finally:
            connection.used = asyncio.get_running_loop().time()
            if breaker is not None:
                breaker.record(responds, is_probe=is_probe)

    async def _connection_for(self, context: OperationContext) -> LiveConnection:
        """Return the connection for a call: the shared connection, or that of its caller.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if too many callers have running calls; `ACCESS_DENIED` if the caller has no
                credential.
        """
        if self.config.per_caller and isinstance(self.config.auth, CallerToken):
            # A caller without a credential gets an error at once, without a connection that would fail repeatedly.
            await self.config.auth(context)
        is_shared = not self.config.per_caller or not is_known(context)
        if is_shared or self._connection.is_closed:
            return self._connection
        return self._own.find(context)

    async def _opened_for_caller(self, session: RelaySession) -> None:
        """Prepare the connection of one caller, which uses the listings of the shared connection."""
        await self._ask_for_logs(session)
        session.learn(self._catalog.tools.values())

    async def _send(
        self,
        connection: LiveConnection,
        call: CallInFlight,
        method: str,
        params: JSONObject,
        replayable: bool,
    ) -> JSONObject:
        """Send a request until it succeeds or must not be retried.

        A request that certainly did not run is retried until `reconnect_timeout` ends. A request that may have run is
        retried once if it is read-only.
        """
        retries = Retries(connection, replayable)
        context = call.context
        while True:
            try:
                session = connection.session or await connection.acquire()
            except CallError as error:
                error.begun = retries.begun
                raise
            try:
                sent = with_caller_meta(
                    params, context, modern=session.is_modern, baggage=self.config.baggage
                )
                progress = _progress(call, connection.redactor)
                result = await session.relay(
                    method, sent, progress, self._declared(method, connection, session)
                )
            except Exception as error:  # noqa: BLE001 - any error of the SDK is a failure of the call
                failure = read_failure(error, self.name, connection.redactor)
                if failure.broken:
                    session.finished.set()
                if not await retries.allow(failure) and not await self._was_stale(
                    failure, session, retries
                ):
                    raise failure.error from None
            else:
                connection.is_there()
                of_task = object_of(result.get("result"))
                said = result.get("statusMessage")
                if isinstance(said, str):
                    result = {**result, "statusMessage": connection.redactor.redact(said)}
                is_error = any(each.get("isError") is True for each in (result, of_task))
                is_error = is_error or "error" in result
                return connection.redactor.redact_all(result) if is_error else result

    def _declared(
        self, method: str, connection: LiveConnection, session: RelaySession
    ) -> JSONObject:
        """Return the extensions that a request declares, besides those of its connection."""
        is_own = connection is not self._connection
        allowed = self.config.extensions
        named = passed_on(client.get().extensions, allowed) if is_own else {}
        if offers_tasks(session) and (method == "tools/call" or method.startswith("tasks/")):
            named[TASKS] = {}
        return named

    async def _was_stale(self, failure: Failure, session: RelaySession, retries: Retries) -> bool:
        """Return whether the server rejected an outdated tool definition (2026-07-28) that has been updated now."""
        code = object_of(failure.error.details).get("code")
        if code != HEADER_MISMATCH or retries.has_refreshed:
            return False
        retries.has_refreshed = True
        with suppress(MCPError):
            # Without the context of the call, so that its caller's token is not used.
            await asyncio.Task(self._take(session), context=Context())
            return True
        return False

    async def _list_all(self, kind: str, context: OperationContext) -> list[JSONObject]:
        """Return every entry of one of the server's lists, for a call."""
        fetch = partial(self.request, context=context, replayable=True)
        return await list_entries(fetch, kind, self.config.max_tools)

    # ------------------------------------------------------------ changes

    async def refresh(self) -> None:
        """Read the listings again now, and update the registries; start the server if it is stopped.

        Raises:
            CallError: If the listings cannot be read.
        """
        with self._connection.in_use():
            session = await self._connection.acquire()
            try:
                async with asyncio.timeout(self.config.connect_timeout):
                    await self._take(session)
            except MCPError as error:
                failure = read_failure(error, self.name, self._connection.redactor)
                if failure.broken:
                    session.finished.set()
                if failure.unsent or failure.broken:
                    self._connection.is_away()
                raise failure.error from None
            except TimeoutError:
                self._connection.is_away()
                raise timed_out(self.name, self.config.connect_timeout, "answer") from None
        self._connection.is_there()
        self._breaker.succeed()

    async def _follow(self) -> None:
        """Refresh when the server reports changes, once for several notifications."""
        loop, pause, changes = asyncio.get_running_loop(), _REFRESH_SECONDS, self._changes
        reported = ""
        while True:
            began = loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_seconds()):
                    await self._stale.wait()
            self._stale.clear()
            session = self._connection.session
            if session is None:
                continue
            was_quiet = loop.time() - began > pause
            try:
                await self.refresh()
                if reported:
                    logger.info("%s is listed again", self.name)
                reported = ""
            except CallError as error:
                # A server may be lost for hours: log one line, until it is available again or fails in another way.
                # The loss of the session itself has its own line.
                is_lost = session.finished.is_set() or session is not self._connection.session
                if not is_lost and error.message != reported:
                    logger.warning(
                        "%s could not be listed again: %s", self.name, printable(error.message)
                    )
                    reported = error.message
            except Exception:
                logger.exception("%s: its listing could not be imported", self.name)
            if self._connection.away_since is not None:
                continue
            is_telling = was_quiet or changes != self._changes
            pause = _REFRESH_SECONDS if is_telling else min(2 * pause, _LONGEST_REFRESH_SECONDS)
            changes = self._changes
            await asyncio.sleep(pause)

    def _check_seconds(self) -> float | None:
        """Return the seconds until an HTTP server is checked again; None if its transport reports a lost connection."""
        if self.config.kind not in ("http", "sse"):
            return None
        connection = self._connection
        is_away = connection.away_since is not None and connection.session is not None
        return connection.plan_attempt() if is_away else _CHECK_SECONDS

    async def _listen(self, session: RelaySession) -> None:
        """Subscribe to change notifications (2026-07-28), again whenever the subscription is lost."""
        while session.is_open:
            try:
                async with listen(
                    session,
                    tools_list_changed=True,
                    prompts_list_changed=True,
                    resources_list_changed=True,
                ) as changes:
                    self.is_listening = True
                    async for _ in changes:
                        self._stale.set()
            except MCPError as error:
                if error.code != types.CONNECTION_CLOSED:
                    text = printable(error.message)
                    logger.debug("%s does not announce changes: %s", self.name, text)
                    return
            except Exception:
                logger.debug("%s: the subscription to changes was lost", self.name, exc_info=True)
            finally:
                self.is_listening = False
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS)
            self._stale.set()

    async def _take(self, session: RelaySession) -> None:
        listing = await list_everything(session, self.config.max_tools)
        version = self.server_info.version if self.server_info else "1.0.0"
        self._changes += self._catalog.take(listing, version, offers_tasks=offers_tasks(session))

    # ------------------------------------------------------------ the server's own messages

    def _callbacks(self, calls: CallsInFlight, redactor: Redactor) -> dict[str, Any]:
        async def log(params: types.LoggingMessageNotificationParams) -> None:
            call = calls.addressee()
            send = None if call is None else call.context.channel.log
            if call is None or send is None:
                self._log(params, redactor)
            else:
                data = redactor.redact_all(params.data)
                call.deliver(partial(send, params.level, data, params.logger))

        return {
            "client_info": types.Implementation(
                name="alkdev-operations", version=installed_version("alkdev-operations")
            ),
            "logging_callback": log,
            "message_handler": partial(self._hear, calls),
            "log_level": self.config.log_level,
            **calls.callbacks(),
        }

    async def _hear(self, calls: CallsInFlight, message: Any) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            self._watches.updated(str(message.params.uri), calls)
        elif str(getattr(message, "method", "")).endswith("/list_changed"):
            self._stale.set()

    def _log(self, params: types.LoggingMessageNotificationParams, redactor: Redactor) -> None:
        level = _LEVELS.get(params.level, logging.CRITICAL)
        if not logger.isEnabledFor(level):
            return
        left = self._log_budget.spend()
        if left < 0:
            return
        text = params.data if isinstance(params.data, str) else repr(params.data)
        # Redacted before the end is cut off, because a part of a secret is not recognised.
        text = redactor.redact(text[: 2 * _LONGEST_LOG])[:_LONGEST_LOG]
        logger.log(level, "%s: %s", self.name, ascii(text)[1:-1])
        if left == 0:
            logger.warning("%s: its further log messages of this minute are dropped", self.name)

    async def _ask_for_logs(self, session: RelaySession) -> None:
        if self.config.log_level is None or session.is_modern or session.offers.logging is None:
            return
        try:
            await session.relay("logging/setLevel", {"level": self.config.log_level})
        except MCPError as error:
            logger.warning("%s does not take a log level: %s", self.name, printable(error.message))


def _progress(call: CallInFlight, redactor: Redactor) -> OnProgress:
    """Return the function that receives progress of a call: it restarts the time limit and forwards the progress."""
    report = call.context.channel.progress

    async def progress(done: float, total: float | None, message: str | None) -> None:
        call.timeout.restart()
        if call.context.limit is not None:
            call.context.limit.restart()
        if report is not None:
            await report(done, total, redactor.redact(message) if message else message)

    return progress


def offers_tasks(session: RelaySession) -> bool:
    """Return whether a server offers tasks."""
    return session.is_modern and TASKS in (session.offers.extensions or {})


def _is_away(error: CallError) -> bool:
    """Return whether a request got no response; an HTTP error status is a response."""
    status = object_of(error.details).get("statusCode")
    return error.code == ErrorCode.UNAVAILABLE and status is None


@asynccontextmanager
async def connect_mcp(
    name: str, config: MCPClientConfig | Mapping[str, Any]
) -> AsyncGenerator[MCPClient]:
    """Connect to an MCP server for the duration of an `async with` block.

    Args:
        name: The name of the server, which is also the namespace of its operations unless `config` has another.
        config: The configuration, or an entry of an `mcp.json`.

    Raises:
        CallError: `UNAVAILABLE`, with the reason.
        ValueError: If the entry is not valid.
    """
    if not isinstance(config, MCPClientConfig):
        config = MCPClientConfig.from_entry(config)
    async with MCPClient(name, config) as client:
        await client.open()
        yield client
