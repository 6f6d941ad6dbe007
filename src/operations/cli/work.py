"""`operations work`: a worker, which serves everything of a config to callers on a broker."""

from dataclasses import replace

from operations._signals import shutdown_event
from operations._text import counted, suggestion
from operations.calls import serve_calls
from operations.calls.config import WorkerConfig
from operations.cli.options import DEFAULTS, Common, command
from operations.cli.session import open_file, settle
from operations.config import ConfigFile
from operations.config.model import BrokerEntry
from operations.errors import OperationsError
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
    common: Common = DEFAULTS,
) -> None:
    """Serve everything to callers on a broker until Ctrl-C; calls under way are finished first.

    Args:
        broker: Its name in [brokers]; may be left out where there is one.
        concurrency: How many calls run at a time, instead of the config's number.
        grace: Seconds that running calls have to finish at the end, instead of the config's number.
        common: What every command takes.
    """
    screen = common.screen()
    file = common.load()
    name, entry = _chosen(broker, file)

    def adjusted(file: ConfigFile) -> ConfigFile:
        # Its own group is what it serves, not what it imports: it would call itself.
        entry = file.config.brokers.get(name)
        if entry is None:
            return file
        others = {**file.config.brokers, name: replace(entry, workers=False)}
        return replace(file, config=replace(file.config, brokers=others))

    file = adjusted(file)
    group = worker_config(entry, file).group
    options = file.options(WorkerConfig, entry)
    if concurrency is not None:
        options["concurrency"] = concurrency
    if grace is not None:
        options["grace"] = grace
    async with (
        open_file(file, screen, common=common, wait=False) as hub,
        connect_broker(entry, file) as target,
        serve_calls(
            hub.registry,
            target,
            **options,
            resolve=hub.access.resolve,
        ),
        following(hub),
    ):
        with writing_logs(file, verbose=common.verbose), shutdown_event() as shutdown:
            hub.adjust = adjusted
            if hub.registry.authority.ledger is not None:
                hub.registry.authority.ledger.open()
            await settle(hub, screen, common)
            if screen.json:
                screen.item({"broker": name, "group": group, "operations": len(hub.registry)})
            else:
                screen.write(
                    f"serving {counted(len(hub.registry), 'operation')} to group {group} on {entry.url}"
                )
                screen.note("Ctrl-C ends it")
                screen.out.file.flush()
            await shutdown.wait()
        screen.note("finishing what runs ...")


def _chosen(name: str | None, file: ConfigFile) -> tuple[str, BrokerEntry]:
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
