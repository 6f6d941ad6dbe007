"""Journals whose contents are encrypted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import ADA, Effects, crash, durable, ended, resumed

from operations import CallError, OperationContext
from operations.runs import Runs, RunStatus

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

    sealed = Sealer(KEY.encode()).seal(b"{}")
    with pytest.raises(ValueError, match="another key"):
        Sealer(KEY.encode()).open(sealed[:-1] + bytes([sealed[-1] ^ 1]))
