"""`operations serve` and `dev`: serve the operations of a config or a Python file to external callers."""

import logging
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from operations.base.errors import OperationsError
from operations.base.tasks import shutdown_event
from operations.base.text import counted
from operations.cli.lan import admitting_guests
from operations.cli.options import (
    DEFAULTS,
    PORT,
    Common,
    Screen,
    command,
    of_file,
    open_session,
    reporting_sources,
    settle,
)
from operations.config import ConfigFile
from operations.front.front import Front
from operations.hub import Hub
from operations.hub import app as serving
from operations.hub.journal import writing_logs
from operations.hub.opening import unused_public_url
from operations.hub.processes import Process, supervise
from operations.hub.reloading import following
from operations.server.http11.running import GRACE, is_loopback, listen

EntryPoint = Literal["http", "mcp", "websocket", "console"]

LOOPBACK = "127.0.0.1"


@command
async def serve(
    file_: Annotated[Path | None, Parameter(name="FILE")] = None,
    /,
    *,
    host: str | None = None,
    port: Annotated[int | None, PORT] = None,
    entry_point: Annotated[tuple[EntryPoint, ...], Parameter(negative="")] = (),
    stdio: Annotated[bool, Parameter(negative="")] = False,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> int | None:
    """Serve all operations until Ctrl-C: as an HTTP API, over MCP and WebSocket, with a web console.

    Args:
        file_: A Python file with operations, or a config; by default the nearest operations.toml. A file uses the
            operations.toml beside it.
        host: The address to listen on, instead of the config's.
        port: The port, instead of the config's; 0 selects a free port.
        entry_point: Serve only this entry point; may be repeated.
        stdio: Serve MCP on standard input and output instead, to the program that started this command.
        as_: With --stdio: the caller of [access.keys] that makes the calls; by default no identity.
        common: Options of every command.
    """
    common = of_file(common, file_)
    file, process = common.load(), Process.inherited()
    screen = common.screen(file)
    if serving.is_shared(file) and process is None and not stdio:
        return await _serve_shared(file, host, port, entry_point, common)
    async with AsyncExitStack() as stack:
        stack.enter_context(writing_logs(file, verbose=common.verbose))
        opened = open_session(common, screen, file=file, wait=stdio, works=True)
        hub = await stack.enter_async_context(opened)
        if stdio:
            server = await serving.mcp_server(hub, as_)
            await stack.enter_async_context(following(hub))
            await server.run_stdio()
            return None
        config = serving.listen_config(hub.file, host, port)
        entry_points = entry_point or serving.entry_points_of(hub.file)
        app = serving.build_app(hub, entry_points=entry_points, host=config.host)
        listener = None if process is None else process.listener
        async with serving.listening(app, config, "serve", listener) as url:
            with shutdown_event() as shutdown:
                await stack.enter_async_context(following(hub))
                if process is not None:
                    hub.reload_others = process.reload_all
                    process.is_ready(end=shutdown.set)
                if process is None or process.announces:
                    exposure = _Exposure(app.state.pipeline.front, config.host, hub, screen)
                    reports = reporting_sources(hub, screen, then=exposure.report_more)
                    await stack.enter_async_context(reports)
                    await settle(hub, screen, common)
                    announce(url, entry_points, hub, screen)
                    exposure.report()
                    if unused := unused_public_url(hub.file):
                        screen.warn(f"serve.public_url {unused}")
                    screen.note("press Ctrl-C to stop")
                await shutdown.wait()
            if process is None:
                screen.note("closing ...")
            return None


@command
async def dev(
    file_: Annotated[Path | None, Parameter(name="FILE")] = None,
    /,
    *,
    port: Annotated[int | None, PORT] = None,
    lan: Annotated[bool, Parameter(negative="")] = False,
    host: str | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Serve operations to yourself while you write them, and import saved changes at once.

    A version with an error is shown here and in the console, and the previous one stays in use. Running calls continue.
    Callers see the text of unexpected errors. Only this machine can connect, unless you give --lan.

    Args:
        file_: A Python file with operations, or a config; by default the nearest operations.toml. A file uses the
            operations.toml beside it.
        port: The port, instead of the config's; 0 selects a free port.
        lan: Also serve other devices of your network, such as a phone: shows a code for one device, as text and as a
            QR code. Enter shows another one.
        host: With --lan: the address of this machine in the network, if it has several.
        common: Options of every command.
    """
    if host is not None and not lan:
        raise OperationsError("--host is for --lan: without it, only this machine can connect")
    common = of_file(common, file_)
    file = common.load()
    screen = common.screen(file)
    async with AsyncExitStack() as stack:
        stack.enter_context(writing_logs(file, verbose=common.verbose))
        opened = open_session(common, screen, file=file, wait=False, works=True, develops=True)
        hub = await stack.enter_async_context(opened)
        config = serving.listen_config(file, LOOPBACK, port)
        entry_points = ("http", "mcp", "websocket", "console")
        app = serving.build_app(hub, entry_points=entry_points, host=LOOPBACK)
        async with serving.listening(app, config, "serve") as url:
            with shutdown_event() as shutdown:
                hub.on_outcome = _Outcomes(hub, screen).report
                await stack.enter_async_context(following(hub))
                await settle(hub, screen, common)
                if hub.problem is not None:
                    screen.failed(f"the code cannot be used yet:\n{hub.problem}")
                announce(url, entry_points, hub, screen)
                if file.program is not None and hub.problem is None and not hub.offered:
                    screen.warn(
                        f"{file.program.name} has no operations: mark functions with @operation"
                    )
                if lan:
                    guests = admitting_guests(hub, url, host, entry_points, screen)
                    show_code = await stack.enter_async_context(guests)
                    show_code()
                screen.note("saved changes are served at once; press Ctrl-C to stop")
                await shutdown.wait()


class _Outcomes:
    """Reports what each change of the files has led to."""

    def __init__(self, hub: Hub, screen: Screen) -> None:
        self._hub = hub
        self._screen = screen
        self._ids = self._offered()

    def report(self) -> None:
        """Print which operations were added and removed, or why the previous version stays."""
        if self._hub.problem is not None:
            message = f"the previous version stays in use:\n{self._hub.problem}"
            self._screen.failed(message)
            return
        before, self._ids = self._ids, self._offered()
        changes = [
            f"{word} {', '.join(sorted(ids)[:5])}{' ...' if len(ids) > 5 else ''}"
            for word, ids in (("added", self._ids - before), ("removed", before - self._ids))
            if ids
        ]
        words = "; ".join([f"reloaded: {counted(len(self._ids), 'operation')}", *changes])
        self._screen.note(words, "green")

    def _offered(self) -> set[str]:
        return {each for source in self._hub.sources for each in source.operations}


async def _serve_shared(
    file: ConfigFile,
    host: str | None,
    port: int | None,
    entry_points: tuple[str, ...],
    common: Common,
) -> int:
    """Serve with several processes, which this process starts."""
    config = serving.listen_config(file, host, port)
    arguments = ["serve", "--host", config.host]
    for each in entry_points:
        arguments += ["--entry-point", each]
    if common.config is not None:
        arguments += ["--config", str(common.config)]
    arguments += [f"--{name}" for name in ("json", "verbose", "trust") if getattr(common, name)]
    if not common.verbose:
        # Report restarted processes.
        logging.getLogger("operations.hub").setLevel(logging.WARNING)
    with ExitStack() as stack:
        with serving.listening_errors(config, "serve"):
            listener = stack.enter_context(listen(config))
        stack.enter_context(writing_logs(file, verbose=common.verbose))
        # The time to finish calls, plus some time to close sources.
        return await supervise(arguments, file.config.serve.processes, listener, 2 * GRACE)


def announce(url: str, entry_points: tuple[str, ...], hub: Hub, screen: Screen) -> None:
    """Print the addresses of the entry points."""
    places = {
        "console": f"{url}/",
        "http": f"{url}/openapi.json",
        "mcp": f"{url}/mcp",
        "websocket": f"{url.replace('http', 'ws', 1)}/ws",
    }
    if screen.json:
        screen.item(
            {
                "url": url,
                "operations": hub.offered,
                "entryPoints": {name: places[name] for name in entry_points},
            }
        )
        return
    screen.line((f"serving {counted(hub.offered, 'operation')} at {url}", "bold"))
    for name in entry_points:
        screen.line((f"  {name:10}", "dim"), (places[name], "cyan"))
    # Flush, because a file or a pipe would buffer it until the end.
    screen.out.file.flush()


class _Exposure:
    """Warns about imported operations that anonymous callers may call with the credentials of this server.

    Args:
        front: Knows whether callers without a credential are served.
        host: The address that the server listens on.
        hub: The hub of the operations.
        screen: Receives the warning.
    """

    def __init__(self, front: Front, host: str, hub: Hub, screen: Screen) -> None:
        self._front, self._hub, self._screen = front, hub, screen
        self._callers = "anyone on this machine" if is_loopback(host) else "anyone"
        self._reported: set[str] | None = None

    def report_more(self) -> None:
        """Warn about sources that have connected since the first report."""
        if self._reported is not None:
            self.report()

    def report(self) -> None:
        """Warn about the connected sources that no earlier warning names."""
        reported = self._reported = self._reported or set()
        if not self._front.serves_anonymous():
            return
        specs = [each for each in self._hub.registry.specs() if each.access_control.is_open]
        sources = map(self._hub.source_of, (spec.id for spec in specs))
        labels = [
            source.label
            for source in sources
            if source is not None and source.kind != "local" and source.label not in reported
        ]
        reported.update(labels)
        if labels:
            self._screen.note(
                f"{self._callers} may call {counted(len(labels), 'imported operation')} "
                f"({', '.join(dict.fromkeys(labels))}); set scopes to restrict access",
                "yellow",
            )
