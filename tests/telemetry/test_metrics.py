import asyncio
import gc
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from operations import OperationContext, OperationRegistry
from operations.base.errors import CallError
from operations.contract.envelopes import mcp_envelope
from operations.registry.counters import BUCKETS, MAX_CODES, MAX_REMOVED, UNKNOWN
from operations.telemetry import CallMetrics
from operations.telemetry import metrics as telemetry


async def test_calls_items_and_failures_are_counted(registry: OperationRegistry) -> None:
    metrics = CallMetrics(registry)

    @registry.operation("test.run")
    async def run(fail: bool = False) -> None:
        if fail:
            raise CallError('ODD"\n\\', "x")

    @registry.operation("test.items")
    async def items():  # type: ignore[no-untyped-def]
        yield 1
        yield 2

    await registry.execute("test.run")
    with pytest.raises(CallError):
        await registry.execute("test.run", {"fail": True})
    with pytest.raises(CallError):
        await registry.execute("made.up", {}, OperationContext())
    _ = [item async for item in registry.subscribe("test.items")]
    lines = metrics.render().decode().splitlines()

    assert 'operations_calls_total{operation="test.run",code=""} 1' in lines
    assert 'operations_calls_total{operation="test.run",code="ODD\\"\\n\\\\"} 1' in lines
    assert 'operations_calls_total{operation="(unknown)",code="OPERATION_NOT_FOUND"} 1' in lines
    assert 'operations_items_total{operation="test.items"} 2' in lines
    assert 'operations_calls_running{operation="test.run"} 0' in lines
    assert 'operations_abandoned_total{operation="test.run"} 0' in lines
    assert 'operations_call_seconds_bucket{operation="test.run",le="+Inf"} 2' in lines
    assert 'operations_call_seconds_count{operation="test.run"} 2' in lines
    assert not any("made.up" in line for line in lines)


def test_histograms_are_cumulative() -> None:
    lines = CallMetrics(OperationRegistry()).render().decode()

    assert list(BUCKETS) == sorted(BUCKETS)
    assert lines.count("# TYPE") == 7


async def test_running_calls_and_slow_calls_are_counted(registry: OperationRegistry) -> None:
    metrics = CallMetrics(registry)
    entered, leave = asyncio.Event(), asyncio.Event()

    @registry.operation("test.wait")
    async def wait() -> None:
        entered.set()
        await leave.wait()

    call = asyncio.create_task(registry.execute("test.wait"))
    await entered.wait()
    running = metrics.render().decode()
    await asyncio.sleep(0.002)  # longer than the first bucket
    leave.set()
    await call
    ended = metrics.render().decode()

    assert 'operations_calls_running{operation="test.wait"} 1' in running
    assert 'operations_call_seconds_count{operation="test.wait"} 0' in running
    assert 'operations_calls_running{operation="test.wait"} 0' in ended
    assert 'operations_call_seconds_bucket{operation="test.wait",le="0.001"} 0' in ended
    assert 'operations_call_seconds_bucket{operation="test.wait",le="+Inf"} 1' in ended


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("seconds", [None, 30])
async def test_every_path_counts_each_call_once(
    registry: OperationRegistry, observed: bool, seconds: float | None
) -> None:
    @registry.operation("test.error")
    async def error() -> Any:
        return mcp_envelope(None, is_error=True, content=[])

    @registry.operation("test.run")
    async def run() -> None: ...

    await registry.execute("test.run")
    metrics = CallMetrics(registry)
    if observed:
        registry.observe(lambda _event: None)
    deadline = None if seconds is None else (time.time() + seconds) * 1000
    for name in ("test.run", "test.error"):
        await registry.execute(name, {}, OperationContext(deadline=deadline))
    lines = metrics.render().decode().splitlines()

    assert 'operations_calls_total{operation="test.run",code=""} 1' in lines
    assert 'operations_calls_total{operation="test.error",code="EXECUTION_ERROR"} 1' in lines
    assert 'operations_call_seconds_count{operation="test.run"} 1' in lines


async def test_a_handler_that_cannot_be_stopped_is_counted(registry: OperationRegistry) -> None:
    metrics = CallMetrics(registry)
    leave = threading.Event()

    @registry.operation("test.block")
    def block() -> None:
        leave.wait(60)

    with pytest.raises(CallError):
        await registry.execute(
            "test.block", {}, OperationContext(deadline=(time.time() + 1) * 1000)
        )
    leave.set()

    assert 'operations_abandoned_total{operation="test.block"} 1' in metrics.render().decode()


async def test_counting_ends_with_the_last_metrics(registry: OperationRegistry) -> None:
    @registry.operation("test.run")
    async def run() -> None: ...

    await registry.execute("test.run")
    first, second = CallMetrics(registry), CallMetrics(registry)
    first.close()
    first.close()
    await registry.execute("test.run")
    assert 'operations_calls_total{operation="test.run",code=""} 1' in second.render().decode()
    assert registry.counters is not None

    del second
    gc.collect()
    assert registry.counters is None
    await registry.execute("test.run")

    first.open()
    assert 'operations_calls_total{operation="test.run"' not in first.render().decode()


async def test_the_counters_of_removed_operations_are_bounded(registry: OperationRegistry) -> None:
    counters, stop = registry.count_calls()

    @registry.operation("test.stays")
    async def stays() -> None: ...

    await registry.execute("test.stays")
    with pytest.raises(CallError):
        await registry.execute("made.up")
    for number in range(2 * MAX_REMOVED):
        operation_id = f"test.n{number}"
        registry.operation(operation_id)(lambda: None)
        await registry.execute(operation_id)
        registry.unregister(operation_id)

    series = dict(counters)
    assert len(series) <= MAX_REMOVED + 3
    assert series["test.stays"].started == 1
    assert f"test.n{2 * MAX_REMOVED - 1}" in series
    assert series[UNKNOWN].codes == {"OPERATION_NOT_FOUND": 1}
    stop()


async def test_the_codes_of_an_operation_are_bounded(registry: OperationRegistry) -> None:
    counters, stop = registry.count_calls()

    @registry.operation("test.fail")
    async def fail(code: str) -> None:
        if code:
            raise CallError(code, "x")

    for number in [*range(2 * MAX_CODES), 0]:
        with pytest.raises(CallError):
            await registry.execute("test.fail", {"code": f"CODE_{number}"})
    await registry.execute("test.fail", {"code": ""})

    codes = counters.of("test.fail").codes
    assert len(codes) == MAX_CODES + 2
    assert codes[""] == 1
    assert codes["CODE_0"] == 2
    assert codes[UNKNOWN] == MAX_CODES
    stop()


def test_the_documents_name_only_existing_metrics() -> None:
    docs = Path(__file__).parents[2] / "docs"
    pages = ("incidents.md", "operate-workers.md", "serving.md", "recipes/alerts.yml")
    named = {
        name
        for page in pages
        for name in re.findall(r"operations_[a-z]\w+", (docs / page).read_text(encoding="utf-8"))
    }
    source = Path(telemetry.__file__).read_text(encoding="utf-8")
    existing = set(re.findall(r'"(operations_\w+)"', source))

    assert len(named) > 20
    assert {name.removesuffix("_bucket") for name in named} <= existing
    # Every metric is documented; the names of a family may be shortened.
    text = "".join((docs / page).read_text(encoding="utf-8") for page in pages)
    assert [name for name in existing - named if "`_" + name.rpartition("_")[2] not in text] == []
