"""Any order of starts, cancels, answers, crashes and retries: final states stay, and the ledger tells why they are."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.limits import time_limit
from tests.runs.test_runs import ADA, crash

from operations import CallError, OperationContext, OperationRegistry, operation
from operations.authority import Ledger
from operations.runs import Run, Runs, RunState

KINDS = ("done", "fail", "ask", "slow")
FORM = {"type": "object", "properties": {}}


class RunsInAnyOrder(RuleBasedStateMachine):
    """One process after the other works on one file."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.ledger = Ledger(self.path / "ledger", "k" * 32)
        self.made = Counter[str]()
        self.allowed = Counter[str]()
        self.kinds: dict[str, str] = {}
        self.final: dict[str, RunState] = {}
        self.registry = self.opened()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of all processes."""

        async def limited() -> Any:
            with time_limit(20):
                return await work

        return self.runner.run(limited())

    def opened(self) -> OperationRegistry:
        """Return the registry of a new process."""

        @operation("shop.charge", scopes=["shop"])
        async def charge(context: OperationContext) -> int:
            assert context.run is not None
            self.made[context.run.id] += 1
            return 1

        @operation("shop.slow", scopes=["shop"])
        async def slow(context: OperationContext) -> int:
            assert context.run is not None
            self.made[context.run.id] += 1
            return await asyncio.Event().wait()

        @operation("shop.order", scopes=["shop"], durable=True)
        async def order(kind: str, context: OperationContext) -> Any:
            await context.call(slow if kind == "slow" else charge)
            if kind == "fail":
                raise CallError("NO_TRAIN", "no train")
            return await context.elicit("Go on?", FORM) if kind == "ask" else 1

        runs = Runs(f"sqlite:{self.path / 'runs.db'}", grace=0.0)
        registry = OperationRegistry([charge, slow, order], runs=runs)
        registry.record(self.ledger)
        return registry

    async def settled(self, run_id: str) -> Run:
        """Return a run once it has ended, or waits for the test."""
        run = await self.registry.run(run_id, ADA)
        async for state in run.watch():
            if state.is_final or state.waiting:
                break
            if self.kinds[run_id] == "slow" and self.made[run_id] == self.allowed[run_id]:
                break
            await asyncio.sleep(0)
        return run

    async def state(self, run_id: str) -> RunState:
        return (await self.registry.run(run_id, ADA)).state

    @rule(kind=st.sampled_from(KINDS))
    def start(self, kind: str) -> None:
        async def work() -> None:
            run = await self.registry.start("shop.order", {"kind": kind}, ADA)
            self.kinds[run.id], self.allowed[run.id] = kind, 1
            await self.settled(run.id) if kind != "slow" else await self.begun(run.id)

        self.do(work())

    async def begun(self, run_id: str) -> None:
        while self.made[run_id] < self.allowed[run_id]:
            await asyncio.sleep(0.001)

    @precondition(lambda self: self.kinds)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(list(self.kinds)))

        async def work() -> None:
            run = await self.registry.run(run_id, ADA)
            await run.cancel()
            async for _ in run.watch():
                pass

        self.do(work())

    @precondition(lambda self: self.kinds)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(list(self.kinds)))

        async def work() -> None:
            run = await self.settled(run_id)
            key = run.state.waiting[0].key if run.state.waiting else "other"
            answered = await run.answer(key, {"action": "decline"})
            assert answered == (key != "other")
            if answered:
                async for _ in run.watch():
                    pass

        self.do(work())

    @precondition(lambda self: self.kinds)
    @rule()
    def crash_and_take_over(self) -> None:
        async def work() -> None:
            await crash(self.registry)
            self.registry = self.opened()
            await self.registry.run_store.open()  # type: ignore[union-attr]
            for run_id, kind in self.kinds.items():
                run = await self.registry.run(run_id, ADA)
                if kind == "slow" and not run.state.is_final:
                    async for _ in run.watch():
                        pass

        self.do(work())

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), decision=st.sampled_from(["none", "ran", "not run"]))
    def retry(self, data: st.DataObject, decision: str) -> None:
        run_id = data.draw(st.sampled_from(list(self.kinds)))

        async def work() -> None:
            run = await self.registry.run(run_id, ADA)
            given = {"none": {}, "ran": {"ran": 7}, "not run": {"not_run": True}}[decision]
            begun = self.kinds[run_id] == "slow" and run.state.is_final
            if begun and decision == "not run" and run.status != "completed":
                self.allowed[run_id] += 1
            try:
                await run.retry(**given)  # type: ignore[arg-type]
            except CallError as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                return
            del self.final[run_id]
            if begun and decision == "not run":
                await self.begun(run_id)
            else:
                await self.settled(run_id)

        self.do(work())

    @invariant()
    def final_states_stay_and_have_their_reason(self) -> None:
        lines = []
        if (self.path / "ledger").exists():
            text = (self.path / "ledger").read_bytes()
            lines = [msgspec.json.decode(line) for line in text.splitlines()]
        for run_id in self.kinds:
            assert self.made[run_id] <= self.allowed[run_id]
            state = self.do(self.state(run_id))
            if not state.is_final:
                assert run_id not in self.final
                continue
            assert self.final.setdefault(run_id, state) == state
            told = [line for line in lines if line.get("run") == run_id and "run." in line["event"]]
            assert (told[-1]["event"], told[-1]["status"]) == ("run.ended", state.status)
            assert told[-1].get("code") == (state.error and state.error["code"])
            if state.status == "cancelled":
                assert "run.cancelled" in [line["event"] for line in told]

    def teardown(self) -> None:
        self.do(self.registry.aclose())
        self.ledger.close()
        self.runner.close()
        self.folder.cleanup()


RunsInAnyOrder.TestCase.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
TestRunsInAnyOrder = RunsInAnyOrder.TestCase
