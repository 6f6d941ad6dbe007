"""`operations work`: a worker, which serves everything of a config to callers on a broker."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from socket import gethostname
from typing import Annotated

from cyclopts import Parameter

from operations._signals import shutdown_event
from operations._text import counted, suggestion
from operations.calls import CallServer, serve_calls
from operations.calls.config import WorkerConfig
from operations.calls.monitoring import monitor_group
from operations.cli.options import DEFAULTS, Common, command
from operations.cli.session import open_file, settle
from operations.config import ConfigFile
from operations.config.model import BrokerEntry, WorkEntry
from operations.errors import OperationsError
from operations.front.config import ListenConfig
from operations.hub.hub import Hub
from operations.hub.journal import writing_logs
from operations.hub.reload import following
from operations.hub.sources.broker import connect_broker, worker_config


@command
async def work(
    broker: str | None = None,
    /,
    *,
    concurrency: int | None = None,
    grace: float | None = None,
    name: str | None = None,
    host: str | None = None,
    port: Annotated[int | None, Parameter(alias="-p")] = None,
    common: Common = DEFAULTS,
) -> None:
    """Serve everything to callers on a broker until Ctrl-C; calls under way are finished first.

    Args:
        broker: Its name in [brokers]; may be left out where there is one.
        concurrency: How many calls run at a time, instead of the config's number.
        grace: Seconds that running calls have to finish at the end, instead of the config's number.
        name: The name of this worker for operators, instead of the config's; by default its machine and process.
        host: The address on which it shows its health and metrics, instead of the one in [work].
        port: The port for that; 0 takes a free one. Without it, and without [work], they are not shown.
        common: Options of every command.
    """
    screen = common.screen()
    file = common.load()
    chosen, entry = chosen_broker(broker, file)

    def adjusted(file: ConfigFile) -> ConfigFile:
        # Its own group is what it serves, not what it imports: it would call itself.
        entry = file.config.brokers.get(chosen)
        if entry is None:
            return file
        others = {**file.config.brokers, chosen: replace(entry, workers=False)}
        return replace(file, config=replace(file.config, brokers=others))

    file = adjusted(file)
    group = worker_config(entry, file).group
    options = file.options(WorkerConfig, entry)
    if concurrency is not None:
        options["concurrency"] = concurrency
    if grace is not None:
        options["grace"] = grace
    options["name"] = name or options.get("name") or f"{gethostname()}-{os.getpid()}"
    async with (
        open_file(file, screen, common=common, wait=False) as hub,
        connect_broker(entry, file) as target,
    ):
        hub.serve_authority()
        async with (
            serve_calls(hub.registry, target, **options, resolve=hub.access.resolve) as worker,
            following(hub),
            _shown(hub, worker, _listen_config(file, host, port)) as url,
        ):
            with writing_logs(file, verbose=common.verbose):
                with shutdown_event() as shutdown:
                    hub.adjust = adjusted
                    await settle(hub, screen, common)
                    count = hub.offered
                    if screen.json:
                        shown = {} if url is None else {"url": url}
                        screen.item(
                            {"broker": chosen, "group": group, "operations": count, **shown}
                        )
                    else:
                        what = counted(count, "operation")
                        screen.write(f"serving {what} to group {group} on {entry.url}")
                        if url is not None:
                            screen.write(f"health and metrics at {url}")
                        screen.note("Ctrl-C ends it")
                        screen.out.file.flush()
                    await shutdown.wait()
                screen.note("finishing what runs ...")
                # `/readyz` reports this.
                await worker.aclose()


def _listen_config(file: ConfigFile, host: str | None, port: int | None) -> ListenConfig | None:
    """Return where the worker shows its health and metrics; None if nowhere."""
    entry = file.config.work
    if entry is None and host is None and port is None:
        return None
    config = ListenConfig(**file.options(ListenConfig, entry or WorkEntry()))
    config = config if host is None else replace(config, host=host)
    return config if port is None else replace(config, port=port)


@asynccontextmanager
async def _shown(
    hub: Hub, worker: CallServer, config: ListenConfig | None
) -> AsyncGenerator[str | None]:
    """Show the health and metrics of a worker for the length of an `async with` block; gives the address."""
    if config is None:
        yield None
        return
    from operations.hub.serving import build_worker_app  # noqa: PLC0415 - needs an extra
    from operations.server.running import InsecureBindError, running  # noqa: PLC0415 - needs an extra

    async with monitor_group(worker.target, worker.group) as monitor:
        app = build_worker_app(hub, worker, monitor, config.host)
        try:
            async with running(app, **asdict(config)) as url:
                yield url
        except InsecureBindError:
            raise OperationsError(
                f"{config.host} lets other machines see the metrics, and nobody has to sign in: "
                "add [access.keys.NAME] to the config, or public = true to [work]"
            ) from None
        except OSError as error:
            reason = f"cannot listen on {config.host}:{config.port}: {error.strerror}"
            raise OperationsError(reason) from error


def chosen_broker(name: str | None, file: ConfigFile) -> tuple[str, BrokerEntry]:
    """Return a broker of a config by its name; the only one if there is no name.

    Raises:
        OperationsError: If there is none, or several.
    """
    brokers = {key: entry for key, entry in file.config.brokers.items() if entry.enabled}
    if name is None and len(brokers) == 1:
        (name,) = brokers
    if name is None:
        known = (
            f"one of {', '.join(brokers)}" if brokers else "one in the config first: [brokers.main]"
        )
        raise OperationsError(f"which broker? Name {known}")
    if name not in brokers:
        raise OperationsError(
            f"there is no broker {name} in the config.{suggestion(name, brokers)}"
        )
    return name, brokers[name]
