"""Journals whose contents are encrypted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import ADA, BEN, Effects, crash, durable, ended, resumed

from operations import CallError, OperationContext
from operations.runs import Runs, RunStatus
from operations.runs.database import Unreadable

KEY = "a key of at least thirty-two bytes"


@pytest.fixture
async def effects() -> Effects:
    return Effects()


async def test_a_run_with_an_encrypted_journal_continues_and_keeps_its_key(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(secret: str, context: OperationContext) -> Any:
        first = await context.call(effects.charge, 1)
        if not effects.begun.is_set():
            effects.begun.set()
            await asyncio.Event().wait()
        paid = await context.wait_for("paid")
        return [secret, first, paid]

    operations = durable(order), effects.charge
    first = registries(*operations, key=KEY)
    run = await first.start("shop.order", {"secret": "x"}, ADA, key="k")
    same = await first.start("shop.order", {"secret": "x"}, ADA, key="k")
    await effects.begun.wait()
    await crash(first)
    second = registries(*operations, key=KEY)
    await (await second.run(run.id, ADA)).signal("paid", 5)
    state = await resumed(second, run)

    assert same.id == run.id
    assert (state.status, state.result["data"]) == (RunStatus.COMPLETED, ["x", 1, 5])
    assert effects.made == [1]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_no_content_is_in_the_file(registries: OpenRegistry, url: str) -> None:
    async def order(secret: str, context: OperationContext) -> str:
        await context.step("note", lambda: "SECRET-step")
        answer = await context.elicit("SECRET-question", {"type": "object"})
        await context.progress(1, 2, None)
        return f"SECRET-{answer['action']}"

    registry = registries(durable(order), key=KEY, keep_steps=True)
    run = await registry.start("shop.order", {"secret": "SECRET-input"}, ADA)
    async for state in run.watch():
        if state.waiting:
            await run.answer(state.waiting[0].key, {"action": "accept", "content": {"a": "SECRET"}})
    await registry.aclose()
    path = Path(url.removeprefix("sqlite:"))

    assert run.status == "completed"
    assert all(b"SECRET" not in each.read_bytes() for each in path.parent.glob("runs.db*"))


async def test_another_key_reads_nothing_and_a_journal_without_one_can_get_one(
    registries: OpenRegistry, effects: Effects
) -> None:
    plain = registries(effects.charge)
    run = await plain.start("shop.charge", {"amount": 3}, ADA)
    await ended(run)
    sealed = registries(effects.charge, key=KEY)
    later = await sealed.start("shop.charge", {"amount": 4}, ADA)
    await ended(later)

    assert (await (await sealed.run(run.id, ADA)).result()).data == 3
    for key in (KEY[::-1], None):
        other = registries(effects.charge, key=key)
        with pytest.raises(CallError, match="another key"):
            await other.run(later.id, ADA)
        assert not await other.run_store.works()  # type: ignore[union-attr]


def test_a_short_key_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 32 bytes"):
        Runs(f"sqlite:{tmp_path / 'runs.db'}", key="short")


def test_a_changed_value_is_noticed() -> None:
    from operations.runs.sealing import Sealer  # noqa: PLC0415 - needs an extra

    sealer = Sealer([KEY.encode()])
    sealed = sealer.seal(b"{}")

    assert isinstance(sealer.open(sealed[:-1] + bytes([sealed[-1] ^ 1])), Unreadable)


# ------------------------------------------------------------ another key

NEW = KEY[::-1]


@pytest.mark.parametrize(
    "wrong", [[], ["short"], [KEY, "short"]], ids=["none", "short", "second short"]
)
def test_wrong_lists_of_keys_are_rejected(tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(ValueError, match="key"):
        Runs(f"sqlite:{tmp_path / 'runs.db'}", key=wrong)


async def test_a_key_is_replaced_while_runs_are_live(
    registries: OpenRegistry, effects: Effects
) -> None:
    """First every process knows the new key, then it encrypts, then the old one is removed."""

    async def order(secret: str, context: OperationContext) -> Any:
        first = await context.call(effects.charge, 1)
        return [secret, first, await context.wait_for("paid")]

    operations = durable(order), effects.charge
    old = registries(*operations, key=KEY, park=0)
    run = await old.start("shop.order", {"secret": "x"}, ADA, key="k")
    async for state in run.watch():
        if state.waiting:
            break
    both = [registries(*operations, key=keys, park=0) for keys in ([KEY, NEW], [NEW, KEY])]
    same = [await each.start("shop.order", {"secret": "x"}, ADA, key="k") for each in both]
    await (await both[1].run(run.id, ADA)).signal("paid", 5)
    await old.aclose()
    state = await resumed(both[0], run)
    later = await both[1].start("shop.charge", {"amount": 7}, ADA)
    await ended(later)
    last = registries(*operations, key=NEW)

    assert {each.id for each in same} == {run.id}
    assert (state.status, state.result["data"]) == ("completed", ["x", 1, 5])
    assert (await (await last.run(later.id, ADA)).result(10)).data == 7


async def test_a_run_whose_key_is_missing_is_named_and_holds_up_no_other(
    registries: OpenRegistry, effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    client = registries(effects.charge, key=KEY, executes=False)
    run = await client.start("shop.charge", {"amount": 3}, ADA, key="k")
    second = registries(effects.charge, key=[NEW, KEY], executes=False)
    other = await second.start("shop.charge", {"amount": 4}, ADA)
    only_new = registries(effects.charge, key=NEW)
    handle = await only_new.run(other.id, ADA)

    assert (await handle.result(10)).data == 4
    for call in (
        only_new.run(run.id, ADA),
        only_new.start("shop.charge", {"amount": 3}, ADA, key="k"),
    ):
        with pytest.raises(CallError, match=f"The run {run.id} is encrypted with a key") as caught:
            await call
        assert caught.value.code == "UNAVAILABLE"
    with pytest.raises(CallError, match="There is no run"):
        await only_new.run(run.id, BEN)
    assert [each.id for each in (await only_new.runs(ADA)).runs] == [other.id, run.id]
    errors = [each for each in caplog.messages if "encrypted with a key" in each]
    assert len(errors) == 1
    assert run.id in errors[0]
    # A process with the key continues it.
    await only_new.aclose()
    both = registries(effects.charge, key=[NEW, KEY])
    store: Any = both.run_store
    await store.open()
    await store.write(lambda db: db.count("UPDATE runs SET wake = 0 WHERE wake > 0"))
    await both.start("shop.charge", {"amount": 5}, ADA)
    assert (await (await both.run(run.id, ADA)).result(10)).data == 3
    assert (await both.run(run.id, ADA)).state.attempt == 1


async def test_a_run_whose_key_is_missing_can_be_cancelled(
    registries: OpenRegistry, effects: Effects
) -> None:
    client = registries(effects.charge, key=KEY, executes=False)
    run = await client.start("shop.charge", {"amount": 3}, ADA)
    both = registries(effects.charge, key=[NEW, KEY], executes=False)
    await both.start("shop.charge", {"amount": 4}, ADA)
    store: Any = registries(effects.charge, key=NEW, executes=False).run_store

    assert (await store.cancel(run.id, ADA)).status == "cancelled"
