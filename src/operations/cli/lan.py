"""`operations dev --lan`: other devices of the network, each of which signs in with a code.

Rule 1: the addresses of this machine alone are served as without --lan. Only the address in the network is added, and
        it admits nobody without a credential.
Rule 2: a code is in the part of an address that browsers keep to themselves, behind `#`. Keys are in no address.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from operations.base.errors import OperationsError
from operations.cli.options import Screen
from operations.cli.qr import qr_lines
from operations.contract.access import Identity
from operations.hub import Hub
from operations.hub import app as serving
from operations.io.hosts import own_address
from operations.server.signin.codes import CODE_SECONDS, OneTimeCodes

GUEST = Identity("guest")


@asynccontextmanager
async def admitting_guests(
    hub: Hub, own_url: str, host: str | None, entry_points: tuple[str, ...], screen: Screen
) -> AsyncGenerator[Callable[[], None]]:
    """Serve a hub to the network, and yield a function that shows a code to sign in with.

    Args:
        hub: The hub.
        own_url: The address for this machine, whose port is used.
        host: The address of this machine in the network; by default the one of its default route.
        entry_points: What is served.
        screen: Shows the codes.

    Raises:
        OperationsError: If there is no network, or the address cannot be used.
    """
    host = host or own_address()
    if host is None:
        raise OperationsError("no network was found: give the address of this machine with --host")
    codes = OneTimeCodes(GUEST, on_use=lambda: screen.note("a device signed in", "green"))
    config = serving.listen_config(hub.file, host, urlsplit(own_url).port)
    app = serving.build_app(hub, entry_points=entry_points, host=host, guests=codes)
    async with serving.listening(app, config, "serve") as url:

        def show() -> None:
            _show(codes.new(), url, screen)

        with suppress(OSError, ValueError, NotImplementedError):
            # A file as standard input has no events, nor has Windows.
            _on_enter(show)
        try:
            yield show
        finally:
            with suppress(OSError, ValueError, NotImplementedError):
                asyncio.get_running_loop().remove_reader(sys.stdin.fileno())


def _on_enter(act: Callable[[], None]) -> None:
    """Call `act` for each line on standard input."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        # A program in the background that reads from its terminal would be stopped.
        is_ours = not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp()
        if is_ours and os.read(descriptor, 1024):
            act()
        else:
            loop.remove_reader(descriptor)

    loop.add_reader(descriptor, read)


def _show(code: str, url: str, screen: Screen) -> None:
    minutes = int(CODE_SECONDS // 60)
    if screen.json:
        screen.item({"network": url, "code": code, "seconds": int(CODE_SECONDS)})
        return
    screen.line(("other devices of your network: open ", ""), (url, "cyan"))
    screen.line(
        ("  and sign in with ", ""), (code, "bold"), (f" (once, within {minutes} minutes)", "dim")
    )
    if screen.is_terminal:
        for line in qr_lines(f"{url}/#code={code}"):
            screen.line((line, "bright_white on black"), overflow="keep")
    screen.note("press Enter for another code")
    screen.out.file.flush()
