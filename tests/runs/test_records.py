"""What is told of runs: lines of the ledger, events, spans and metrics."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import ADA, MANAGER, Effects, crash, durable, ended
from tests.server.asgi import Client

from operations import CallError, OperationContext, OperationRegistry
from operations.authority import Ledger
from operations.contract.events import RunChanged, RunEnded, RunResumed, RunStarted
from operations.runs import Run
from operations.server import create_app
from operations.telemetry.otel import instrument

KEY = "k" * 32


class Book:
    """A ledger, whose lines can be read."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.ledger = Ledger(path, KEY, **options)

    def lines(self, run: Run) -> list[tuple[Any, ...]]:
        """Return the event of each line of a run, and what else it tells."""
        found: list[tuple[Any, ...]] = []
        for text in self.path.read_text().splitlines():
            line = msgspec.json.decode(text)
            if line.get("run") == run.id:
                told = ("by", "as", "attempt", "reason", "status", "code", "key", "outcome")
                step = line.get("step")
                where = None if step is None else step.partition("#")[0]
                found.append((line["event"], where, *(line[name] for name in told if name in line)))
        return found


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "ledger")


@pytest.fixture
async def effects() -> Effects:
    return Effects()


async def test_the_ledger_tells_how_a_run_came_to_its_end(
    registries: OpenRegistry, effects: Effects, book: Book
) -> None:
    async def order(context: OperationContext) -> int:
        first = await context.call(effects.charge, 1)
        return int(first + await context.call(effects.slow, 2))

    operations = durable(order), effects.charge, effects.slow
    first = registries(*operations, sink=book.ledger)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await crash(first)
    second = registries(*operations, sink=book.ledger)
    await second.run_store.open()  # type: ignore[union-attr]
    run = await second.run(run.id, MANAGER)
    assert (await ended(run)).status == "unknown"
    effects.released.set()
    await run.retry(not_run=True)
    assert (await ended(run)).status == "completed"

    assert book.lines(run) == [
        ("run.started", None),
        ("begun", "."),
        ("begun", "shop.charge"),
        ("ended", "shop.charge", "ok"),
        ("begun", "shop.slow"),
        # The call was cancelled with the attempt, whose process is gone.
        ("ended", "shop.slow", "ABORTED"),
        ("ended", ".", "ABORTED"),
        ("run.resumed", None, 2, "shutdown"),
        ("run.ended", None, "unknown", "OUTCOME_UNKNOWN"),
        ("run.settled", "shop.slow", "max", "not run"),
        ("run.resumed", None, 3, "retry"),
        ("begun", "."),
        # The recorded call is not there again.
        ("begun", "shop.slow"),
        ("ended", "shop.slow", "ok"),
        ("ended", ".", "ok"),
        ("run.ended", None, "completed"),
    ]


async def test_the_ledger_tells_who_has_answered_cancelled_and_retried(
    registries: OpenRegistry, book: Book
) -> None:
    async def order(context: OperationContext) -> Any:
        await context.wait_for("paid")
        return await context.elicit("Sure?", {"type": "object"})

    registry = registries(durable(order), sink=book.ledger)
    run = await registry.start("shop.order", {}, ADA)
    await run.signal("paid")
    async for state in run.watch():
        if state.waiting and state.waiting[0].kind == "elicit":
            break
    managed = await registry.run(run.id, MANAGER)
    await managed.answer(managed.state.waiting[0].key, {"action": "cancel"})
    await ended(run)
    other = await registry.start("shop.order", {}, ADA, delay=100)
    await other.cancel()
    await other.retry()
    await other.cancel()

    told = [line for line in book.lines(run) if line[0] == "run.answered"]
    assert [line[2] for line in told] == ["ada", "max"]
    assert told[0][3] == "signal:paid"
    assert [line for line in book.lines(other) if line[0].startswith("run.")][:4] == [
        ("run.started", None),
        ("run.cancelled", None, "ada"),
        ("run.ended", None, "cancelled", "ABORTED"),
        ("run.retried", None, "ada", "cancelled"),
    ]


async def test_a_strict_ledger_rejects_what_it_cannot_record(
    registries: OpenRegistry, effects: Effects, tmp_path: Path
) -> None:
    book = Book(tmp_path / "missing" / "ledger", strict=True)
    registry = registries(effects.charge, sink=book.ledger)

    with pytest.raises(CallError) as caught:
        await registry.start("shop.charge", {"amount": 1}, ADA)
    assert caught.value.code == "UNAVAILABLE"
    assert not (await registry.runs(MANAGER)).runs

    (tmp_path / "missing").mkdir()
    run = await registry.start("shop.charge", {"amount": 1}, ADA)
    assert (await ended(run)).status == "completed"


async def test_a_run_whose_end_cannot_be_recorded_ends_later(
    registries: OpenRegistry,
    effects: Effects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = Book(tmp_path / "strict", strict=True)
    note, refused = book.ledger.note, asyncio.Event()
    loop = asyncio.get_running_loop()

    def full(event: RunChanged) -> None:
        if event.change == "run.ended":
            loop.call_soon_threadsafe(refused.set)
            raise OSError("no space left")
        note(event)

    monkeypatch.setattr(book.ledger, "note", full)
    registry = registries(effects.charge, sink=book.ledger)
    run = await registry.start("shop.charge", {"amount": 1}, ADA)
    await refused.wait()
    monkeypatch.setattr(book.ledger, "note", note)
    state = await ended(run)

    assert (state.status, state.attempt, effects.made) == ("completed", 1, [1])
    assert [line[0] for line in book.lines(run)].count("run.ended") == 1


async def resumed_once(
    registries: OpenRegistry, effects: Effects, watch: Any
) -> tuple[Run, OperationRegistry]:
    """Return a run that has completed in its second attempt; `watch` sees each registry first."""
    traced: OperationContext = ADA.with_metadata(traceparent=PARENT)

    async def order(context: OperationContext) -> int:
        if not effects.begun.is_set():
            effects.begun.set()
            await asyncio.Event().wait()
        return int(await context.call(effects.charge, 1))

    operations = durable(order), effects.charge
    first = registries(*operations)
    watch(first)
    run = await first.start("shop.order", {}, traced)
    await effects.begun.wait()
    await crash(first)
    second = registries(*operations)
    watch(second)
    await second.run_store.open()  # type: ignore[union-attr]
    run = await second.run(run.id, ADA)
    assert (await ended(run)).status == "completed"
    return run, second


async def test_observers_see_runs_start_continue_and_end(
    registries: OpenRegistry, effects: Effects
) -> None:
    events: list[Any] = []

    run, _ = await resumed_once(
        registries, effects, lambda registry: registry.observe(events.append)
    )

    told: list[Any] = [
        each for each in events if isinstance(each, RunStarted | RunResumed | RunEnded)
    ]
    assert [type(each) for each in told] == [RunStarted, RunResumed, RunEnded]
    assert {each.run for each in told} == {run.id}
    assert (told[1].attempt, told[1].reason, told[2].status) == (2, "shutdown", "completed")
    started = [each for each in events if getattr(each, "step", None) == "."]
    assert [each.attempt for each in started] == [1, 2]


TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def test_each_attempt_is_a_trace_with_a_link_to_the_start(
    registries: OpenRegistry, effects: Effects
) -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))

    run, _ = await resumed_once(
        registries, effects, lambda registry: instrument(registry, tracer_provider=tracers)
    )

    spans = exporter.get_finished_spans()
    attempts = [span for span in spans if span.name == "shop.order"]
    (charge,) = (span for span in spans if span.name == "shop.charge")

    assert [facts(span) for span in attempts] == [(run.id, 1), (run.id, 2)]
    for span in attempts:
        assert span.parent is None
        assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE]
    last = attempts[1].context
    assert last is not None
    assert charge.parent is not None
    assert charge.parent.span_id == last.span_id


def facts(span: ReadableSpan) -> tuple[Any, ...]:
    known = span.attributes or {}
    return known["operations.run.id"], known["operations.run.attempt"]


async def test_metrics_count_runs_and_attempts(registries: OpenRegistry, effects: Effects) -> None:
    run, registry = await resumed_once(registries, effects, lambda _: None)
    await registry.start("shop.charge", {"amount": 1}, ADA, delay=100)

    client = Client(create_app(registry))
    text = (await client.get("/metrics")).body.decode()

    assert run.status == "completed"
    for line in (
        "operations_run_attempts_total 1",
        'operations_runs_ended_total{status="completed"} 1',
        'operations_runs{status="queued"} 1',
        'operations_runs{status="unknown"} 0',
        "operations_runs_oldest_seconds 0",
    ):
        assert line in text
