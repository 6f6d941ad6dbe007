"""`operations workers`: its view of workers, and its actions on dead letters."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.cli.conftest import Ran
from tests.servers import Broker, RedisServer, running

from operations.calls.protocol.events import CallRequested, RequestPayload, encode_event

Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running(RedisServer()) as broker:
        yield broker


@pytest.fixture
def letters(folder: Path, broker: Broker) -> list[str]:
    """Two dead letters, by their ids."""
    with (folder / "operations.toml").open("a") as config:
        config.write(f'[brokers.bus]\nurl = "{broker.url}"\ngroup = "shop"\n')
    client: Any = Redis.from_url(broker.url)
    client.flushall()
    found: list[str] = []
    for number in (1, 2):
        payload = RequestPayload(
            request_id=f"r{number}",
            operation_id="shop.\x1b[31mred",
            input={"id": number},
            attempt=3,
        )
        body = encode_event(CallRequested(payload=payload))
        found.append(client.xadd("operations:aside:shop:any", {"e": body}).decode())
    client.close()
    return found


def test_without_workers_the_command_reports_it(run: Run, letters: list[str]) -> None:
    ran = run("workers")
    assert ran.code == 8
    assert "group shop: 0 workers, 0 running, 0 waiting, 2 dead letters" in ran.err
    report = run("workers", "--json").json
    assert (report["group"], report["workers"], report["deadLetters"]) == ("shop", [], 2)


def test_dead_letters_are_listed_shown_and_dropped(run: Run, letters: list[str]) -> None:
    first, second = letters
    listed = run("workers", "letters")
    assert [line.split("\t")[0] for line in listed.out.splitlines()] == [second, first]
    assert "\x1b" not in listed.out
    shown = run("workers", "letters", first).json
    assert (shown["input"], shown["deliveries"], shown["requestId"]) == ({"id": 1}, 3, "r1")

    assert run("workers", "drop", first).code == 0
    assert [each["id"] for each in run("workers", "letters", "--json").json] == [second]
    ran = run("workers", "drop", first)
    assert ran.code == 6
    assert "no dead letter" in ran.err


def test_a_letter_that_cannot_be_replayed_is_kept(run: Run, letters: list[str]) -> None:
    ran = run("workers", "replay", letters[0])
    assert ran.code == 8
    assert "no worker" in ran.err
    assert len(run("workers", "letters", "--json").json) == 2


def test_a_broker_that_is_not_in_the_config_is_an_error(run: Run, letters: list[str]) -> None:
    ran = run("workers", "--broker", "buss")
    assert ran.code == 1
    assert 'Did you mean "bus"?' in ran.err
