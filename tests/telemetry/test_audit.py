import asyncio
import logging
import os
import time
from pathlib import Path

import msgspec
import pytest
from tests.support import soon

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.authority import Grants
from operations.telemetry import Audit, AuditFile, AuditRecord


@pytest.mark.requirement("R46")
async def test_every_call_leaves_one_record_without_arguments(registry: OperationRegistry) -> None:
    records: list[AuditRecord] = []
    registry.record(Audit(records.append))

    @registry.operation("test.inner")
    async def inner(secret: str) -> str:
        return secret

    @registry.operation("test.run", scopes=["run"])
    async def run(secret: str, context: OperationContext) -> str:
        return str((await context.env.test.inner({"secret": secret})).data)

    alice = OperationContext(identity=Identity("alice", ["run"]), request_id="req-1")
    await registry.execute("test.run", {"secret": "CANARY"}, alice)
    with pytest.raises(CallError):
        await registry.execute("test.run", {"secret": "CANARY"})
    with pytest.raises(CallError):
        await registry.execute("test.nope", {"secret": "CANARY"}, alice)

    outer = records[1]
    assert [(r.operation_id, r.outcome, r.identity_id) for r in records] == [
        ("test.inner", "ok", "alice"),
        ("test.run", "ok", "alice"),
        ("test.run", "ACCESS_DENIED", None),
        ("test.nope", "OPERATION_NOT_FOUND", "alice"),
    ]
    assert outer.request_id == "req-1"
    assert records[0].parent_request_id == "req-1"
    assert outer.milliseconds >= 0
    assert b"CANARY" not in msgspec.json.encode(records)


@pytest.mark.requirement("R46")
async def test_a_record_names_the_agent_that_acts_for_the_caller(
    registry: OperationRegistry,
) -> None:
    records: list[AuditRecord] = []
    registry.record(Audit(records.append))

    @registry.operation("test.run")
    async def run() -> None:
        pass

    grants = Grants(b"k" * 32)
    token = grants.create(Identity("ann"), "assistant", operations=["test.*"], seconds=60)
    agent = OperationContext(identity=await grants.resolve(token))
    await registry.execute("test.run", {}, agent)

    (record,) = records
    assert (record.identity_id, record.acting) == ("ann", ("assistant",))
    assert msgspec.json.decode(msgspec.json.encode(record))["acting"] == ["assistant"]


@pytest.mark.requirement("R46", "R47")
async def test_records_are_lines_of_json_on_a_logger(
    registry: OperationRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.record(Audit())

    @registry.operation("test.run")
    async def run() -> None:
        pass

    eve = OperationContext(identity=Identity("eve\nCRITICAL owned"))
    with caplog.at_level(logging.INFO, "operations.audit"):
        await registry.execute("test.run", {}, eve)

    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert msgspec.json.decode(record.getMessage())["identityId"] == "eve\nCRITICAL owned"


async def test_an_abandoned_handler_is_recorded(registry: OperationRegistry) -> None:
    records: list[AuditRecord] = []
    registry.record(Audit(records.append))
    stop = asyncio.Event()

    @registry.operation("test.block")
    def block() -> None:
        while not stop.is_set():
            time.sleep(0.01)

    with pytest.raises(CallError):
        await registry.execute("test.block", {}, soon(1000))
    stop.set()

    assert {record.outcome for record in records} == {"abandoned", "TIMEOUT"}
    await registry.aclose()


@pytest.mark.requirement("R46")
async def test_records_can_be_written_to_a_pipe(
    registry: OperationRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file = AuditFile(pipe)
    registry.record(Audit(file))
    with pytest.raises(CallError):
        await registry.execute("test.nope", {})
    file.close()

    assert b"OPERATION_NOT_FOUND" in os.read(reader, 10_000)
    assert "cannot be written" not in caplog.text
    os.close(reader)


@pytest.mark.requirement("R46")
async def test_a_call_that_ends_after_closing_leaves_a_record(
    registry: OperationRegistry, tmp_path: Path
) -> None:
    file = AuditFile(tmp_path / "audit")
    registry.record(Audit(file))
    file.close()
    for _ in range(2):
        with pytest.raises(CallError):
            await registry.execute("test.nope", {})

    assert (tmp_path / "audit").read_text().count("OPERATION_NOT_FOUND") == 2
