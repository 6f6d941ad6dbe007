"""One recorder hands what happens to calls to sinks."""

import logging
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.contract.events import CallRejected, CallStarted
from operations.recorder.recorder import Begin, Digest, End, Note

ALICE = OperationContext(identity=Identity("alice", ["run"]))


class Memory:
    """A sink that keeps its events, and fails while it is told to."""

    def __init__(self, *wants: str, strict: bool = False) -> None:
        self.wants: Collection[str] = wants
        self.strict = strict
        self.seen: list[Any] = []
        self.digests: list[Digest] = []
        self.fails = False

    def open(self) -> None:
        pass

    def begin(self, call: Begin, digest: Digest | None) -> None:
        if digest is not None:
            self.digests.append(digest)
        self._keep(call)

    def end(self, call: End) -> None:
        self._keep(call)

    def note(self, event: Note) -> None:
        self._keep(event)

    def check(self) -> bool:
        return not self.fails

    def close(self) -> None:
        pass

    def _keep(self, event: Any) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.seen.append(event)

    @property
    def tags(self) -> list[str]:
        return [msgspec.to_builtins(each)["event"] for each in self.seen]


@pytest.fixture
def ran(registry: OperationRegistry) -> list[str]:
    done: list[str] = []

    @registry.operation("test.run", scopes=["run"])
    async def run(text: str) -> str:
        done.append(text)
        return text

    @registry.operation("test.count")
    async def count() -> Any:
        for number in range(2):
            yield number

    return done


async def test_a_sink_receives_only_the_events_that_it_wants(
    registry: OperationRegistry, ran: list[str]
) -> None:
    every, ends, handlers = (
        Memory("started", "yielded", "finished"),
        Memory("finished"),
        Memory("admitted", "ended", "rejected"),
    )
    stops = [registry.record(each) for each in (every, ends, handlers)]
    await registry.execute("test.run", {"text": "a"}, ALICE)
    async for _ in registry.subscribe("test.count", {}):
        pass
    with pytest.raises(CallError):
        await registry.execute("test.run", {"text": "a"})
    for stop in stops:
        stop()
    await registry.execute("test.run", {"text": "b"}, ALICE)

    assert every.tags == [
        "started", "finished", "started", "yielded", "yielded", "finished", "started", "finished",
    ]  # fmt: skip
    assert ends.tags == ["finished"] * 3
    assert handlers.tags == ["admitted", "ended"] * 2, "no scope, so no handler"
    assert ran == ["a", "b"]
    assert not registry.recorder.gates
    assert not registry.observed


@pytest.mark.requirement("R46")
async def test_a_strict_sink_rejects_the_call_before_its_handler_starts(
    registry: OperationRegistry, ran: list[str]
) -> None:
    # The operation was called before: its prepared plan follows the new sink.
    await registry.execute("test.run", {"text": "a"}, ALICE)
    lenient = Memory("admitted", "rejected")
    strict = Memory("admitted", "ended", strict=True)
    registry.record(lenient)
    registry.record(strict)
    strict.fails = True

    with pytest.raises(CallError) as caught:
        await registry.execute("test.run", {"text": "b"}, ALICE)

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert ran == ["a"]
    # A strict sink comes first, so the others record no call that it rejects.
    (rejected,) = lenient.seen
    assert isinstance(rejected, CallRejected)
    assert (rejected.identity_id, rejected.code) == ("alice", "UNAVAILABLE")
    strict.fails = False
    await registry.execute("test.run", {"text": "b"}, ALICE)
    assert strict.tags == ["admitted", "ended"]


async def test_an_error_of_a_sink_that_is_not_strict_is_logged(
    registry: OperationRegistry, ran: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sink = Memory("started", "admitted", "ended", "finished")
    sink.fails = True
    registry.record(sink)

    with caplog.at_level(logging.WARNING):
        await registry.execute("test.run", {"text": "a"}, ALICE)

    assert ran == ["a"]
    assert "Memory cannot record CallAdmitted" in caplog.text


async def test_the_end_of_a_call_never_fails_because_of_a_sink(
    registry: OperationRegistry, ran: list[str]
) -> None:
    sink = Memory("admitted", "ended", strict=True)

    @registry.operation("test.break")
    async def fail_then() -> str:
        sink.fails = True
        return "done"

    registry.record(sink)

    assert (await registry.execute("test.break", {})).data == "done"


async def test_the_digest_is_that_of_the_input_and_computed_on_demand(
    registry: OperationRegistry, ran: list[str]
) -> None:
    sink = Memory("admitted")
    registry.record(sink)
    for text in ("a", "a", "b"):
        await registry.execute("test.run", {"text": text}, ALICE)

    first, same, other = (digest() for digest in sink.digests)
    assert first == same != other
    assert len(first) == 64


async def test_a_function_observes_beside_sinks(
    registry: OperationRegistry, ran: list[str]
) -> None:
    seen: list[Any] = []
    registry.observe(seen.append)
    registry.record(Memory("admitted"))
    await registry.execute("test.run", {"text": "a"}, ALICE)

    assert [type(each).__name__ for each in seen] == ["CallStarted", "CallFinished"]
    assert isinstance(seen[0], CallStarted)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (Memory("began"), "wants unknown events: began; known: abandoned, admitted"),
        (Memory("finished", strict=True), "must want 'admitted' or 'run.changed'"),
    ],
)
def test_a_sink_that_could_never_work_is_rejected(
    registry: OperationRegistry, sink: Memory, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        registry.record(sink)
