"""Hosts that become unreachable without closing connections, which stay open but carry no data."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import pytest
from tests.calls.waiting import until
from tests.pubsub.ledger import Ledger
from tests.servers import Broker, NatsServer, proxy, running

from operations.base.errors import CallError
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.source.failure_detector import _ASK_EVERY
from operations.pubsub.config import NatsConfig
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis.connection import KEEPALIVE, SILENCE

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "nats.conf"


@pytest.mark.requirement("R35", "F6")
def test_a_lost_host_is_detected_within_20_seconds() -> None:
    login = NatsConfig().login
    (server_interval,) = re.findall(r'ping_interval: "(\d+)s"', RECIPE.read_text("utf-8"))
    (server_pings,) = re.findall(r"ping_max: (\d+)", RECIPE.read_text("utf-8"))

    assert login["ping_interval"] * (login["max_outstanding_pings"] + 1) < 20
    assert int(server_interval) * (int(server_pings) + 1) < 20
    assert KEEPALIVE + SILENCE < 20
    # A caller on core NATS probes the workers, and does not choose those that did not respond to the previous probe.
    assert 2 * _ASK_EVERY < 20


@pytest.mark.requirement("R35", "F6")
async def test_a_silent_nats_server_is_replaced_by_the_next_one_of_the_list(
    nats_server: Broker,
) -> None:
    async with proxy(nats_server.port) as one, proxy(nats_server.port) as two:
        url = f"nats://127.0.0.1:{one.port},nats://127.0.0.1:{two.port}"
        async with connect_nats(url, options={"ping_interval": 0.1}) as here:
            (one if one.accepted else two).swallow()
            # It does not try the unresponsive server first, which would accept a second connection.
            await until(lambda: one.accepted + two.accepted > 1)
            await until(lambda: here.is_connected)
            assert (one.accepted, two.accepted) == (1, 1)


@pytest.mark.requirement("R35", "F6")
@pytest.mark.parametrize("is_server_watching", [True, False])
async def test_requests_do_not_go_to_a_worker_whose_host_is_lost(
    nats_server: Broker,
    tmp_path: Path,
    is_server_watching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_server_watching:
        # Then the callers detect that it does not respond.
        monkeypatch.setattr("operations.calls.source.failure_detector._ASK_EVERY", 0.4)
    ledger = Ledger(tmp_path / "ledger", timeout=6)
    settings = 'ping_interval: "500ms"\nping_max: 1' if is_server_watching else "debug: false"
    with running(NatsServer(config=settings)) as broker:
        async with (
            proxy(broker.port) as through,
            connect_nats(f"nats://127.0.0.1:{through.port}") as lost,
            serve_calls(ledger.registry(), lost),
            connect_nats(broker.url) as there,
            serve_calls(ledger.registry(), there),
            connect_nats(broker.url) as here,
            PendingRequestMap(here, silence=2) as calls,
        ):
            async with ledger.traffic(calls):
                await ledger.progress(50)
            through.swallow()
            for _ in range(20):
                # Half of these fail at first. Both sides need a moment to notice, and callers ask while they call.
                with suppress(CallError):
                    await calls.call("ledger.unknown", timeout=0.1)
                await asyncio.sleep(0.15)
            async with ledger.traffic(calls):
                await ledger.progress(100)
            through.swallow(False)
            through.cut()

    ledger.check(failures=0)
