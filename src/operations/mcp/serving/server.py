"""Serve a registry with the SDK's low-level server: one object for all protocol revisions and transports.

Rule 1: a subscription to an imported resource runs as the caller that requested it, and reports only to that caller.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.server import NotificationOptions, Server, subscriptions
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.models import InitializationOptions
from mcp.server.runner import modern_error_data
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.requests import Request

from operations.base.errors import CallError
from operations.base.json.values import list_of
from operations.base.tasks import cancel_tasks
from operations.base.types import JSONObject, options_of
from operations.contract.channel import CallerChannel
from operations.contract.context import OperationContext
from operations.contract.events import trace_context
from operations.front.config import MCPServerSettings, ServerConfig
from operations.front.front import Front
from operations.front.limits import caller_key
from operations.front.pipeline import RequestPipeline
from operations.front.request import STATE, RequestState
from operations.front.timing import Scope
from operations.io.guard import LOOPBACK
from operations.mcp.serving.app import MCPApp, bounded_stdio
from operations.mcp.serving.caller import MCPCaller
from operations.mcp.serving.catalog import Resource
from operations.mcp.serving.channels import (
    channel_for,
    session_key,
    set_level,
)
from operations.mcp.serving.service import Service
from operations.mcp.shared.codec import sent_meta
from operations.mcp.shared.extensions import TASKS
from operations.mcp.shared.sdk import connection_of, outbound_of
from operations.registry.registry import OperationRegistry
from operations.registry.runs import Run

RequestContext = ServerRequestContext[Any, Any]

_WATCHED = "operations.watched"
MAX_WATCHED = 1_000
"""The largest number of subscribed resources of one client, and of streams of changes of one server."""

_EVENTS: dict[str, subscriptions.ServerEvent] = {
    "tools": subscriptions.ToolsListChanged(),
    "resources": subscriptions.ResourcesListChanged(),
    "prompts": subscriptions.PromptsListChanged(),
}


class _TaskParams(types.RequestParams):
    """The parameters of `tasks/get` and `tasks/cancel`."""

    task_id: str


class _TaskUpdateParams(_TaskParams):
    """The parameters of `tasks/update`."""

    input_responses: dict[str, Any]


class _AddressParams(types.PaginatedRequestParams):
    """The parameters of `skills/get` and `resources/directory/read`."""

    uri: str


class RegistryServer(Server[None]):
    """A registry as an MCP server.

    A subclass of the SDK's low-level `Server`, so that the SDK's in-memory client and other users of that class accept
    it.
    """

    def __init__(self, registry: OperationRegistry, settings: MCPServerSettings) -> None:
        self.identity = settings.identity
        """The caller on stdio and in memory."""

        self._settings = settings
        config = ServerConfig(
            limits=settings.limits,
            timeout=settings.timeout,
            heartbeat=settings.heartbeat,
            expose_errors=settings.expose_errors,
            scopes_supported=settings.scopes_supported,
        )
        self.front = Front(registry, config)
        self.service = Service(registry, settings)
        self._bus = _Bus()
        self._listen = subscriptions.ListenHandler(self._bus, max_subscriptions=MAX_WATCHED)
        self._connections: set[Connection] = set()
        self._announced = self.service.catalog
        self._transports = 0
        """The number of running transports."""

        super().__init__(
            settings.name,
            version=settings.version,
            title=settings.title,
            instructions=settings.instructions,
            lifespan=self._running,
            get_tool_input_schema=self._input_schema,
            on_list_tools=self._listing(self.service.list_tools),
            on_call_tool=self._interactive(self.service.call_tool, "name", "arguments"),
            on_list_resources=self._listing(self.service.list_resources),
            on_list_resource_templates=self._listing(self.service.list_templates),
            on_read_resource=self._interactive(self.service.read_resource, "uri"),
            on_subscribe_resource=self._subscribe,
            on_unsubscribe_resource=self._unsubscribe,
            on_subscriptions_listen=self._listen_for,
            on_list_prompts=self._listing(self.service.list_prompts),
            on_get_prompt=self._interactive(self.service.get_prompt, "name", "arguments"),
            on_completion=cast("Any", self._complete),
        )
        # The first one, so that the others see the exception itself.
        self.middleware.insert(0, _hide_unexpected)
        # Set after construction, because the constructor warns about deprecation; clients of the 2025 protocol still
        # use it.
        self.add_request_handler("logging/setLevel", types.SetLevelRequestParams, self._set_level)
        self.add_request_handler("server/discover", types.RequestParams, self._discover)
        self.add_request_handler("tasks/get", _TaskParams, self._get_task)
        self.add_request_handler("tasks/update", _TaskUpdateParams, self._update_task)
        self.add_request_handler("tasks/cancel", _TaskParams, self._cancel_task)
        pages = types.PaginatedRequestParams
        self.add_request_handler("skills/list", pages, self._list_skills)
        self.add_request_handler("skills/get", _AddressParams, self._get_skill)
        self.add_request_handler("resources/directory/read", _AddressParams, self._read_directory)
        self.add_notification_handler(
            "notifications/initialized", types.NotificationParams, self._initialized
        )

    # ------------------------------------------------------------ transports

    async def run_stdio(self) -> None:
        """Serve the process that started this one, until it closes standard input."""
        async with bounded_stdio(self.front) as (incoming, outgoing):
            await self.run(incoming, outgoing, self.create_initialization_options())

    def asgi_app(
        self,
        *,
        path: str | None = "/mcp",
        hosts: Collection[str] | None = LOOPBACK,
        origins: Collection[str] = (),
        lean: bool = True,
    ) -> MCPApp:
        """Return an ASGI application that serves streamable HTTP.

        Args:
            path: The path of the application; None for every path.
            hosts: Accepted host names, by default the names of this machine; None accepts any.
            origins: Other origins whose pages may use the server, such as `https://example.com`.
            lean: Serve plain requests without the SDK.
        """
        identify = self._settings.identify

        def resolve(scope: Scope) -> Any:
            return identify and identify(Request(scope))

        pipeline = RequestPipeline(self.front, None if identify is None else resolve)
        return MCPApp(
            self, self.service, pipeline, path=path, hosts=hosts, origins=origins, lean=lean
        )

    # ------------------------------------------------------------ callers

    def _caller(self, request: RequestContext) -> MCPCaller:
        declared = request.session.client_capabilities
        capabilities = (
            {} if declared is None else declared.model_dump(by_alias=True, exclude_none=True)
        )
        meta = cast("JSONObject", request.meta or {})
        if request.request is not None:
            state: RequestState = request.request.scope[STATE]
            return MCPCaller.of(state, request.protocol_version, capabilities, meta)
        # On stdio and in memory.
        return MCPCaller(
            identity := self.identity,
            request.protocol_version,
            self.front,
            capabilities,
            caller_key(identity, ""),
            metadata=trace_context(meta),
            meta=sent_meta(meta),
        )

    # ------------------------------------------------------------ requests

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        tool = self.service.catalog.tools.get(name)
        return tool.input_schema if tool is not None and tool.mirrors_headers else None

    def _listing(self, page: Callable[[MCPCaller, str | None], Awaitable[JSONObject]]) -> Any:
        """Return the handler for a paged list."""

        async def handle(
            request: RequestContext, params: types.PaginatedRequestParams
        ) -> JSONObject:
            return await page(self._caller(request), params.cursor)

        return handle

    def _interactive(self, method: Callable[..., Awaitable[JSONObject]], *fields: str) -> Any:
        """Return the handler that runs a method of the service with these fields of the parameters.

        Questions are sent in the form of the client's protocol revision.
        """

        async def handle(request: RequestContext, params: Any) -> JSONObject:
            given = [getattr(params, field) for field in fields]
            what: list[Any] = [{} if each is None else each for each in given]
            caller = self._caller(request)
            try:
                # Over HTTP, the pipeline has admitted it.
                is_admitted = request.request is not None
                slot = nullcontext() if is_admitted else caller.front.admit(caller.key)
            except CallError as error:
                raise MCPError(types.INTERNAL_ERROR, error.message, error.to_wire()) from None
            with slot:
                channel = channel_for(
                    outbound_of(request),
                    connection_of(request),
                    caller.capabilities,
                    request.meta,
                    request.close_sse_stream,
                )
                if not caller.modern:
                    return await method(caller, *what, channel)
                return await self.service.run_interactive(
                    caller, method, channel, request.method, request.params or {}, *what
                )

        return handle

    async def _complete(
        self, request: RequestContext, params: types.CompleteRequestParams
    ) -> JSONObject:
        return await self.service.complete(self._caller(request), params)

    async def _set_level(
        self, request: RequestContext, params: types.SetLevelRequestParams
    ) -> types.EmptyResult:
        set_level(connection_of(request), params.level)
        return types.EmptyResult()

    # ------------------------------------------------------------ tasks

    async def _get_task(self, request: RequestContext, params: "_TaskParams") -> JSONObject:
        return await self.service.tasks.get(self._caller(request), params.task_id)

    async def _update_task(
        self, request: RequestContext, params: "_TaskUpdateParams"
    ) -> JSONObject:
        responses = params.input_responses
        return await self.service.tasks.update(self._caller(request), params.task_id, responses)

    async def _cancel_task(self, request: RequestContext, params: "_TaskParams") -> JSONObject:
        return await self.service.tasks.cancel(self._caller(request), params.task_id)

    # ------------------------------------------------------------ skills

    async def _list_skills(
        self, request: RequestContext, _params: types.PaginatedRequestParams
    ) -> JSONObject:
        return await self.service.skills.page(self._caller(request))

    async def _get_skill(self, request: RequestContext, params: "_AddressParams") -> JSONObject:
        return await self.service.skills.get(self._caller(request), params.uri)

    async def _read_directory(
        self, request: RequestContext, params: "_AddressParams"
    ) -> JSONObject:
        return await self.service.skills.directory(self._caller(request), params.uri)

    # ------------------------------------------------------------ changes

    async def resource_updated(self, uri: str) -> None:
        """Report a change of the resource at `uri` to its subscribers."""
        await self._bus.publish(subscriptions.ResourceUpdated(uri=uri))
        for connection in tuple(self._connections):
            if uri in connection.state.get(_WATCHED, ()):
                await connection.send_resource_updated(uri)

    async def _subscribe(
        self, request: RequestContext, params: types.SubscribeRequestParams
    ) -> types.EmptyResult:
        caller, connection = self._caller(request), connection_of(request)
        resource, value = self.service.find_resource(caller, params.uri)
        watched = _watched(connection)
        if params.uri in watched:
            return types.EmptyResult()
        if len(watched) >= MAX_WATCHED:
            raise MCPError(types.INVALID_PARAMS, "too many subscriptions")
        watched[params.uri] = None
        report = partial(connection.send_resource_updated, params.uri)
        session = session_key(connection)
        try:
            task = await follow(self.service, resource, value, caller, report, session)
        except MCPError:
            watched.pop(params.uri, None)
            raise
        if params.uri in watched:
            watched[params.uri] = task
        elif task is not None:
            task.cancel()
        return types.EmptyResult()

    async def _unsubscribe(
        self, request: RequestContext, params: types.UnsubscribeRequestParams
    ) -> types.EmptyResult:
        task = _watched(connection_of(request)).pop(params.uri, None)
        if task is not None:
            task.cancel()
        return types.EmptyResult()

    async def _listen_for(
        self, request: RequestContext, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Return a stream of changes to the operations that the caller may see."""
        caller, wanted = self._caller(request), params.notifications
        readable: dict[str, tuple[Resource, JSONObject]] = {}
        if wanted.resource_subscriptions:
            for uri in wanted.resource_subscriptions:
                with suppress(MCPError):
                    readable[uri] = self.service.find_resource(caller, uri)
            wanted = wanted.model_copy(update={"resource_subscriptions": list(readable)})
            params = params.model_copy(update={"notifications": wanted})
        runs = await self._listened(caller, wanted)
        session = _Session(request.session, None if runs is None else [run.id for run in runs])
        listeners, tasks = list[Listener](), list[asyncio.Task[None]]()
        _listeners.set(listeners)
        try:
            for run in runs or ():
                tasks.append(asyncio.Task(self._report_task(request, caller, run, session.started)))
            for uri, (resource, value) in tuple(readable.items())[:MAX_WATCHED]:
                report = partial(_report, listeners, subscriptions.ResourceUpdated(uri=uri))
                # A resource without support for subscriptions is skipped.
                with suppress(MCPError):
                    task = await follow(self.service, resource, value, caller, report)
                    tasks += [] if task is None else [task]
            return await self._listen(replace(request, session=cast("Any", session)), params)
        finally:
            await cancel_tasks(*tasks)

    async def _listened(
        self, caller: MCPCaller, wanted: types.SubscriptionFilter
    ) -> list[Run] | None:
        """Return the runs of the tasks that a client wants to follow; None if it names none.

        Raises:
            MCPError: If it does not declare the extension for tasks.
        """
        named = list_of((wanted.model_extra or {}).get("taskIds"))
        if not named:
            return None
        self.service.tasks.enforce_taken(caller)
        found: list[Run] = []
        for task_id in named[:MAX_WATCHED]:
            with suppress(MCPError):
                found.append(await self.service.tasks.find(caller, str(task_id)))
        return found

    async def _report_task(
        self, request: RequestContext, caller: MCPCaller, run: Run, started: asyncio.Event
    ) -> None:
        """Send the states of a task on a stream, once the stream is acknowledged."""
        await started.wait()
        outbound = outbound_of(request)
        meta = {subscriptions.SUBSCRIPTION_ID_META_KEY: request.request_id}

        async def report(task: JSONObject) -> None:
            await outbound.notify("notifications/tasks", {**task, "_meta": meta})

        # The stream goes on without this task if its run cannot be read any more.
        with suppress(CallError):
            await self.service.tasks.follow(caller, run, report)

    async def _initialized(
        self, request: RequestContext, _params: types.NotificationParams
    ) -> None:
        connection = connection_of(request)
        self._connections.add(connection)
        connection.exit_stack.callback(self._connections.discard, connection)

    @asynccontextmanager
    async def _running(self, _server: Server[None]) -> AsyncGenerator[None]:
        """Announce changes of the registry while a transport runs; end waiting calls with the last one."""
        changed = asyncio.Event()
        stop = self.service.registry.watch(lambda _event: changed.set())
        announcer = asyncio.Task(self._announce(changed))
        self._transports += 1
        try:
            yield
        finally:
            self._transports -= 1
            if not self._transports:
                self.service.elicitations.cancel()
            stop()
            await cancel_tasks(announcer)

    async def _announce(self, changed: asyncio.Event) -> None:
        while True:
            await changed.wait()
            changed.clear()
            catalog = self.service.catalog
            kinds = catalog.changes_from(self._announced)
            self._announced = catalog
            for kind in sorted(kinds):
                await self._bus.publish(_EVENTS[kind])
                for connection in tuple(self._connections):
                    method = f"notifications/{kind}/list_changed"
                    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                        await connection.notify(method, None)

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        """Return the SDK's options with the instructions of our sources; changes are announced by default."""
        if extensions is None:
            extensions = self.service.extensions(self.identity)
        options = super().create_initialization_options(
            notification_options
            or NotificationOptions(
                prompts_changed=True, resources_changed=True, tools_changed=True
            ),
            experimental_capabilities,
            # Tasks need requests of 2026-07-28.
            {key: each for key, each in extensions.items() if key != TASKS},
        )
        options.instructions = self.service.instructions(self.identity)
        return options

    async def _discover(
        self, request: RequestContext, _params: types.RequestParams
    ) -> types.DiscoverResult:
        """Return the server's capabilities for clients of revision 2026-07-28 or later."""
        identity = self._caller(request).identity
        return types.DiscoverResult(
            supported_versions=list(MODERN_PROTOCOL_VERSIONS),
            capabilities=self.get_capabilities(
                extensions=self.service.extensions(identity),
                protocol_version=request.protocol_version,
            ),
            instructions=self.service.instructions(identity),
        )


class _Session:
    """The session of a stream of changes, whose acknowledgement names the tasks of the stream.

    Args:
        session: The session of the SDK.
        task_ids: The tasks; None if the client names none.
    """

    def __init__(self, session: Any, task_ids: list[str] | None) -> None:
        self._session, self._task_ids = session, task_ids
        self.started = asyncio.Event()
        """Set when the acknowledgement was sent."""

    async def send_notification(self, notification: Any, **options: Any) -> None:
        """Send a notification on the stream."""
        is_first = isinstance(notification, types.SubscriptionsAcknowledgedNotification)
        if is_first and self._task_ids is not None:
            honored = notification.params.notifications.model_copy(
                update={"taskIds": self._task_ids}
            )
            params = notification.params.model_copy(update={"notifications": honored})
            notification = notification.model_copy(update={"params": params})
        await self._session.send_notification(notification, **options)
        self.started.set()


async def _hide_unexpected(ctx: RequestContext, call_next: CallNext) -> HandlerResult:
    """Replace an unexpected exception, because the SDK sends its text to clients before 2026-07-28."""
    try:
        return await call_next(ctx)
    except MCPError:
        raise
    except Exception as error:
        raise MCPError.from_error_data(modern_error_data(error)) from error


def _watched(connection: Connection) -> "dict[str, asyncio.Task[None] | None]":
    """Return the resources that a client subscribed to, each with the task that watches it at its server."""
    watched: dict[str, asyncio.Task[None] | None] | None = connection.state.get(_WATCHED)
    if watched is None:
        watched = connection.state[_WATCHED] = {}
        connection.exit_stack.callback(_cancel_all, watched)
    return watched


def _cancel_all(watched: "dict[str, asyncio.Task[None] | None]") -> None:
    for task in watched.values():
        if task is not None:
            task.cancel()


@options_of(MCPServerSettings)
def to_mcp(settings: MCPServerSettings, registry: OperationRegistry) -> RegistryServer:
    """Return an MCP server of a registry; then `await server.run_stdio()`, or serve `server.asgi_app()`.

    Clients are notified of operations that are added or removed later. Call it as `to_mcp(registry, **options)`, with
    the fields of `MCPServerSettings`.
    """
    return RegistryServer(registry, settings)


# ------------------------------------------------------------ changes of imported resources


Listener: TypeAlias = Callable[[subscriptions.ServerEvent], None]

_listeners: ContextVar[list[Listener]] = ContextVar("operations_mcp_listeners")
"""The listeners of the current request, which alone receive the changes of imported resources."""


class _Bus(subscriptions.InMemorySubscriptionBus):
    """The events for all listeners."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Register a listener, also as a listener of the current request; return the function that removes it."""
        _listeners.get().append(listener)
        return super().subscribe(listener)


async def _report(listeners: list[Listener], event: subscriptions.ServerEvent) -> None:
    for listener in listeners:
        listener(event)


async def follow(
    service: Service,
    resource: Resource,
    value: JSONObject,
    caller: MCPCaller,
    report: Callable[[], Awaitable[None]],
    session: str = "",
) -> "asyncio.Task[None] | None":
    """Watch an imported resource at its server; return the task, which runs until it is cancelled.

    Returns None if the resource was not imported, or the caller cannot watch it.

    Args:
        service: Serves the registry.
        resource: The resource.
        value: The input that reads it.
        caller: The caller.
        report: Called for each change.
        session: The key of the caller's session.

    Raises:
        MCPError: If the server rejects the subscription.
    """
    watcher = service.registry.get_spec(f"{resource.source}.resources.watch")
    if resource.source is None or watcher is None or not caller.sees(watcher):
        return None
    uri = resource.address(value)
    is_active: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        serves_anonymous = caller.front.serves_anonymous
        channel = CallerChannel(session=session, serves_anonymous=serves_anonymous)
        context = OperationContext(identity=caller.identity, channel=channel)
        changes = service.registry.subscribe(watcher.id, {"uri": uri}, context)
        try:
            async with aclosing(changes):
                async for _ in changes:
                    if is_active.done():
                        await report()
                    else:
                        is_active.set_result(None)
        except CallError as error:
            if not is_active.done():
                is_active.set_exception(
                    MCPError(types.INTERNAL_ERROR, error.message, error.to_wire())
                )

    task = asyncio.Task(run())
    try:
        async with asyncio.timeout(caller.front.timeout):
            await asyncio.shield(is_active)
    except TimeoutError:
        task.cancel()
        raise MCPError(
            types.INTERNAL_ERROR, "the server did not confirm the subscription"
        ) from None
    except BaseException:
        task.cancel()
        raise
    return task
