"""Callers, workers and faults in any order: each call ends once with the right result, runs once, and leaks
nothing."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.limits import scaled

from operations.base.errors import CallError
from operations.calls import CallServer, PendingRequestMap
from operations.calls.serving.jobs import WorkerConfig
from operations.contract.context import OperationContext
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry

T = TypeVar("T")

ALLOWED = {"ok", "cancelled", "TIMEOUT", "UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED", "BOOM"}


class LossyTarget(MemoryTarget):
    """Memory that can lose or repeat the next message in either direction."""

    def __init__(self) -> None:
        super().__init__()
        self.next_put: list[str] = []
        self.next_send: list[str] = []

    async def enqueue(self, queue: str, body: bytes, **options: Any) -> str:
        fate = self.next_put.pop() if self.next_put else ""
        if fate == "lose":
            return ""
        await super().enqueue(queue, body, **options)
        if fate == "repeat":
            await super().enqueue(queue, body, **options)
        return ""

    async def send(self, address: str, body: bytes) -> None:
        fate = ""
        if self.next_send and (b"call.responded" in body or b"call.error" in body):
            fate = self.next_send.pop()
        if fate == "lose":
            return
        await super().send(address, body)
        if fate == "repeat":
            await super().send(address, body)


class Calls(RuleBasedStateMachine):
    """Two callers, up to three workers, and every fault between them."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.target = LossyTarget()
        self.runs: Counter[str] = Counter()
        self.gates: dict[str, asyncio.Event] = {}
        self.outcomes: dict[int, list[str]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.workers: list[CallServer] = []
        self.registry = self._registry()
        self.callers = [
            PendingRequestMap(self.target, heartbeat=0.02, silence=0.2) for _ in range(2)
        ]
        for caller in self.callers:
            self.run(caller.open())
        self.start_worker()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(scaled(20)):
                return await work

        return self.loop.run_until_complete(bounded())

    def _registry(self) -> OperationRegistry:
        registry = OperationRegistry()

        @registry.operation("do.once")
        async def once(key: str, context: OperationContext) -> str:
            self.runs[key] += 1
            await self.gates.setdefault(key, asyncio.Event()).wait()
            return key

        @registry.operation("do.often", type="query")
        async def often(key: str) -> str:
            await self.gates.setdefault(key, asyncio.Event()).wait()
            return key

        @registry.operation("do.fail")
        async def fail(key: str) -> str:
            self.runs[key] += 1
            raise CallError("BOOM", key)

        return registry

    @rule()
    def start_worker(self) -> None:
        if len(self.workers) >= 3:
            return

        async def start() -> CallServer:
            config = WorkerConfig(concurrency=3, max_waiting=2, grace=0.05, expose_errors=True)
            server = CallServer(self.registry, self.target, config)
            await server.start()
            return server

        self.workers.append(self.run(start()))

    @rule(
        who=st.integers(0, 1),
        operation=st.sampled_from(["do.once", "do.often", "do.fail"]),
        timeout=st.sampled_from([0.05, 2.0]),
    )
    def call(self, who: int, operation: str, timeout: float) -> None:
        number = len(self.outcomes)
        key = f"key{number}"
        ends = self.outcomes[number] = []

        async def wait() -> None:
            try:
                envelope = await self.callers[who].call(operation, {"key": key}, timeout=timeout)
            except CallError as error:
                ends.append(error.code)
            except asyncio.CancelledError:
                ends.append("cancelled")
            else:
                ends.append("ok" if envelope.data == key else f"the answer to {envelope.data}")

        self.tasks[number] = self.loop.create_task(wait())
        self.run(asyncio.sleep(0.001))

    @precondition(lambda self: self.gates)
    @rule(data=st.data())
    def let_finish(self, data: st.DataObject) -> None:
        self.gates[data.draw(st.sampled_from(sorted(self.gates)))].set()
        self.run(asyncio.sleep(0.001))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.tasks[data.draw(st.sampled_from(sorted(self.tasks)))].cancel()
        self.run(asyncio.sleep(0.001))

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def drain_worker(self, data: st.DataObject) -> None:
        self.run(self._pick(data).aclose())

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        """Simulate a killed process: it receives and sends nothing, and is not present."""
        victim = self._pick(data)

        async def kill() -> None:
            await victim._accepting.aclose()
            await victim._listening.aclose()
            victim._replies.target = MemoryTarget()
            for task in (*victim._runner.running, *victim._replies.background):
                task.cancel()
            await asyncio.sleep(0.001)

        self.run(kill())

    def _pick(self, data: st.DataObject) -> CallServer:
        return self.workers.pop(data.draw(st.integers(0, len(self.workers) - 1)))

    @rule(fate=st.sampled_from(["lose", "repeat"]), answer=st.booleans())
    def disturb(self, fate: str, answer: bool) -> None:
        (self.target.next_send if answer else self.target.next_put).append(fate)

    @invariant()
    def no_call_ends_twice_or_with_anothers_answer(self) -> None:
        for ends in getattr(self, "outcomes", {}).values():
            assert len(ends) <= 1
            assert set(ends) <= ALLOWED, ends

    @invariant()
    def no_mutation_runs_twice(self) -> None:
        assert all(times == 1 for times in getattr(self, "runs", {}).values())

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return

        async def finish() -> None:
            for _ in range(600):
                for gate in self.gates.values():
                    gate.set()
                # The callers may still be probing for a call.
                if not any(map(len, self.callers)):
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert all(task.done() for task in self.tasks.values()), "a call did not end"
            assert all(len(ends) == 1 for ends in self.outcomes.values())
            for caller in self.callers:
                assert len(caller) == 0
                await caller.aclose()
            for worker in self.workers:
                await worker.aclose()
                assert worker.active == 0
                assert not worker.jobs
            await asyncio.sleep(0.01)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not left, left

        try:
            self.run(finish())
            self.no_call_ends_twice_or_with_anothers_answer()
            self.no_mutation_runs_twice()
        finally:
            self.loop.close()


TestCalls = pytest.mark.requirement("R12", "R36", "R10")(Calls.TestCase)
TestCalls.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
