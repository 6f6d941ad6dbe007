"""What most commands begin with: the config loaded, its sources open, and what is wrong with them told."""

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

from operations.cli.hub import ALL, Hub, Wish, open_hub
from operations.cli.known_ids import remember_ids
from operations.cli.options import Common
from operations.cli.render import Screen
from operations.config import ConfigFile


@asynccontextmanager
async def open_session(common: Common, screen: Screen, wish: Wish = ALL) -> AsyncGenerator[Hub]:
    """The hub a command works with, for the length of an `async with` block.

    Args:
        common: Which config, and how much to say.
        screen: Where to say it.
        wish: Which of its sources are opened.

    Raises:
        ConfigError: If the config is missing or wrong.
    """
    async with open_file(common.load(), screen, wish, verbose=common.verbose) as hub:
        yield hub


@asynccontextmanager
async def open_file(
    file: ConfigFile, screen: Screen, wish: Wish = ALL, *, verbose: bool = False
) -> AsyncGenerator[Hub]:
    """`open_session` for a config that is loaded already."""
    busy = screen.err.is_terminal and not screen.json
    async with AsyncExitStack() as stack:
        with screen.err.status("opening sources ...") if busy else nullcontext():
            hub = await stack.enter_async_context(open_hub(file, wish))
        _tell(hub, screen, verbose=verbose)
        if wish.is_all:
            remember_ids(file, (spec.id for spec in hub.registry.specs()))
        if not verbose:
            # From here on warnings are about calls, and nothing else tells them.
            logging.getLogger("operations").setLevel(logging.WARNING)
        yield hub


def _tell(hub: Hub, screen: Screen, *, verbose: bool) -> None:
    """What is missing, on standard error: the command goes on with the rest."""
    for source in hub.sources:
        if source.failure is not None:
            screen.warn(f"{source.label} is not there: {source.failure}")
        for part in source.failed:
            screen.warn(f"{source.label}: {part.where} is not there: {part.reason}")
        for part in source.ignored:
            screen.warn(f"{source.label}: {part.where} {part.reason}")
        if source.kind == "local" or verbose:
            for skipped in source.skipped:
                screen.warn(f"{source.label}: skipped {skipped.where}: {skipped.reason}")
        elif source.skipped:
            count = len(source.skipped)
            screen.note(
                f"{source.label}: {count} part{'s' * (count != 1)} of it cannot be used; "
                f"`operations import {source.origin}` tells why"
            )
