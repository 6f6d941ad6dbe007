"""`operations serve`: everything of a config, for callers from outside."""

from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.text import Text

from operations._signals import shutdown_event
from operations._text import counted
from operations.cli.options import DEFAULTS, Common, command
from operations.cli.render import Screen
from operations.cli.session import open_session, settle
from operations.errors import OperationsError
from operations.hub.hub import Hub
from operations.hub.journal import writing_logs
from operations.hub.reload import following
from operations.hub.serving import build_app, entry_points_of, listen_config, mcp_server
from operations.server.running import InsecureBindError, is_loopback, running

EntryPoint = Literal["http", "mcp", "websocket", "console"]


@command
async def serve(
    *,
    host: str | None = None,
    port: Annotated[int | None, Parameter(alias="-p")] = None,
    entry_point: Annotated[tuple[EntryPoint, ...], Parameter(negative="")] = (),
    stdio: Annotated[bool, Parameter(negative="")] = False,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> None:
    """Serve everything until Ctrl-C: the HTTP API, MCP, the call protocol on a WebSocket, and a page to look at it.

    Args:
        host: The address to listen on, instead of the config's.
        port: The port, instead of the config's; 0 takes a free one.
        entry_point: Serve only this one; may be repeated.
        stdio: Speak MCP on standard input and output instead, to the program that started this one.
        as_: With --stdio: call as this caller of [access.keys]. By default as nobody: what is open to all.
        common: What every command takes.
    """
    screen = common.screen()
    async with open_session(common, screen, wait=stdio) as hub, AsyncExitStack() as stack:
        stack.enter_context(writing_logs(hub.file, verbose=common.verbose))
        if stdio:
            identity = None if as_ is None else await hub.identity(as_)
            await mcp_server(hub, identity).run_stdio()
            return
        listen = listen_config(hub.file)
        entry_points = entry_point or entry_points_of(hub.file)
        address = host or listen.host
        number = listen.port if port is None else port
        options: dict[str, Any] = {**asdict(listen), "host": address, "port": number}
        app = build_app(hub, entry_points=entry_points, host=address)
        try:
            async with running(app, **options) as url:
                with shutdown_event() as shutdown:
                    await stack.enter_async_context(following(hub))
                    await settle(hub, screen, common)
                    announce(url, entry_points, hub, screen)
                    _point_out_open(address, hub, screen)
                    screen.note("Ctrl-C ends it")
                    await shutdown.wait()
                screen.note("closing ...")
        except InsecureBindError:
            raise OperationsError(
                f"{address} lets other machines in, and nobody has to sign in: "
                "add [access.keys.NAME] to the config, or public = true to [serve]"
            ) from None
        except OSError as error:
            raise OperationsError(
                f"cannot listen on {address}:{number}: {error.strerror}"
            ) from error


def announce(url: str, entry_points: tuple[str, ...], hub: Hub, screen: Screen) -> None:
    """Print where everything is served."""
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
    screen.show(Text(f"serving {counted(hub.offered, 'operation')} at {url}", style="bold"))
    for name in entry_points:
        screen.show(Text(f"  {name:10}", style="dim").append(places[name], style="cyan"))
    # A file or a pipe would keep it until the end.
    screen.out.file.flush()


def _point_out_open(host: str, hub: Hub, screen: Screen) -> None:
    """Say how many imported operations need nobody to sign in: their sources trust us, and we anyone."""
    sources = (
        hub.source_of(spec.id) for spec in hub.registry.specs() if spec.access_control.is_open
    )
    labels = [source.label for source in sources if source is not None and source.kind != "local"]
    if labels:
        who = "anyone on this machine" if is_loopback(host) else "anyone"
        screen.note(
            f"{who} may call {counted(len(labels), 'imported operation')} "
            f"({', '.join(dict.fromkeys(labels))}); give them scopes to ask for more",
            "yellow",
        )
