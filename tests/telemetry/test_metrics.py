import pytest

from operations import OperationContext, OperationRegistry
from operations.errors import CallError
from operations.observe import CallAbandoned
from operations.telemetry.metrics import BUCKETS, CallMetrics


async def test_calls_items_and_failures_are_counted(registry: OperationRegistry) -> None:
    metrics = CallMetrics(registry)
    registry.observe(metrics)

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
    metrics(CallAbandoned(request_id="r", operation_id="test.run", timestamp=1))
    lines = metrics.render().decode().splitlines()

    assert 'operations_calls_total{operation="test.run",code=""} 1' in lines
    assert 'operations_calls_total{operation="test.run",code="ODD\\"\\n\\\\"} 1' in lines
    assert 'operations_calls_total{operation="(unknown)",code="OPERATION_NOT_FOUND"} 1' in lines
    assert 'operations_items_total{operation="test.items"} 2' in lines
    assert 'operations_calls_running{operation="test.run"} 0' in lines
    assert 'operations_abandoned_total{operation="test.run"} 1' in lines
    assert 'operations_call_seconds_bucket{operation="test.run",le="+Inf"} 2' in lines
    assert 'operations_call_seconds_count{operation="test.run"} 2' in lines
    assert not any("made.up" in line for line in lines)


def test_histograms_are_cumulative() -> None:
    lines = CallMetrics([]).render().decode()

    assert list(BUCKETS) == sorted(BUCKETS)
    assert lines.count("# TYPE") == 5
