"""Hand what happens to calls to sinks: the ledger, audit lines, the trace, spans, recent calls, or your own.

    stop = registry.record(CallGraph())
    stop = registry.observe(print)      # a function receives all `CallEvent`s

Rule 1: a sink names the events that it wants. Events about handlers, and changes of runs before they are stored, exist
        only while a sink wants them, so that other calls do not pay for them.
Rule 2: a strict sink receives `CallAdmitted` and `RunChanged` before the others, and before the handler starts or the
        change is stored. If it raises, the call or the change is rejected with `UNAVAILABLE`.
Rule 3: no other error of a sink changes a call: it is logged, and the call continues.
Rule 4: events contain no arguments and no results. The digest of an input is computed when a sink asks for it.
"""

import logging
from collections.abc import Callable, Collection
from functools import cache
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final, Protocol, TypeAlias, get_args

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import canonical
from operations.base.logs import LogThrottle
from operations.contract.context import OperationContext
from operations.contract.events import (
    CallAbandoned,
    CallAdmitted,
    CallEvent,
    CallFinished,
    CallRejected,
    CallStarted,
    CallYielded,
    HandlerEnded,
    HandlerEvent,
    Observer,
    RegistryChanged,
    RunChanged,
    RunEvent,
    now,
)

logger = logging.getLogger("operations")

Digest: TypeAlias = Callable[[], str]
"""Returns the SHA-256 of an input in hexadecimal. It reveals short inputs: sign it with a key before you store it."""

Begin: TypeAlias = CallStarted | CallAdmitted
End: TypeAlias = CallFinished | HandlerEnded | CallRejected
Note: TypeAlias = CallYielded | CallAbandoned | RegistryChanged | RunEvent | RunChanged


class Sink(Protocol):
    """Receives events in order. Its methods must be quick and must not block; several threads may call them."""

    @property
    def wants(self) -> Collection[str]:
        """The tags of the events that it receives.

        Every call: `started` when it arrives, `yielded` for each item, `finished`, `abandoned`. The handlers of
        admitted calls: `admitted`, `ended`; `rejected` instead if the call is denied. Others: `changed` (the registry),
        `run.started`, `run.resumed`, `run.ended`, and `run.changed` before a change is stored.
        """
        ...

    @property
    def strict(self) -> bool:
        """Whether calls and changes of runs that it cannot record are rejected."""
        ...

    def open(self) -> None:
        """Open now what it writes to, so that a problem is reported before a server accepts calls.

        Raises:
            OperationsError: If it cannot be used.
        """
        ...

    def begin(self, call: Begin, digest: Digest | None) -> None:
        """Record that a call begins; `digest` is that of its input, for `CallAdmitted`."""
        ...

    def end(self, call: End) -> None:
        """Record how a call ended."""
        ...

    def note(self, event: Note) -> None:
        """Record any other event."""
        ...

    def check(self) -> bool:
        """Return whether it can record events now."""
        ...

    def close(self) -> None:
        """Close what it has opened. Events that follow, of calls that still run, must not fail."""
        ...


@cache
def _tags(union: Any) -> dict[type, str]:
    return {each: each.__struct_config__.tag for each in get_args(union)}


_GATE: Final = frozenset({"admitted", "rejected", "ended"})
_KNOWN: Final = frozenset({*_tags(CallEvent).values(), *_tags(HandlerEvent).values()})


class Recorder:
    """The sinks and observers of a registry.

    Attributes:
        observers: Functions that receive all `CallEvent`s.
        gates: The sinks that want events about handlers, the strict ones first.
    """

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.gates: tuple[Sink, ...] = ()
        self.failures: dict[int, LogThrottle] = {}
        """Limits how often errors are logged, by the id of the sink or observer."""
        self._runs: tuple[Sink, ...] = ()

    def add(self, sink: Sink) -> Callable[[], None]:
        """Hand events to a sink; return the function that stops this. It does not close the sink.

        Raises:
            ValueError: If the sink wants events that do not exist, or is strict and wants none that it could reject.
        """
        wants = frozenset(sink.wants)
        if wants - _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise ValueError(
                f"{sink!r} wants unknown events: {', '.join(sorted(wants - _KNOWN))}; known: {known}"
            )
        if sink.strict and not wants & {"admitted", "run.changed"}:
            raise ValueError(f"{sink!r} is strict, so it must want 'admitted' or 'run.changed'")
        observe = _observer(sink, wants)
        if observe is not None:
            self.observers.append(observe)
        if wants & _GATE:
            self.gates = _strict_first((*self.gates, sink))
        if "run.changed" in wants:
            self._runs = _strict_first((*self._runs, sink))

        def stop() -> None:
            if observe in self.observers:
                self.observers.remove(observe)
            self.gates, self._runs = _without(sink, self.gates), _without(sink, self._runs)

        return stop

    def admitted(
        self, operation_id: str, value: Any, context: OperationContext, approval: str | None
    ) -> None:
        """Record that the handler of a call starts next.

        Raises:
            CallError: `UNAVAILABLE` if a strict sink cannot record it.
        """
        event = CallAdmitted(**_facts(operation_id, context), approval=approval)
        texts: list[str] = []

        def digest() -> str:
            # Once for all sinks.
            if not texts:
                texts.append(_digest(value))
            return texts[0]

        for sink in self.gates:
            if "admitted" in sink.wants:
                self._hand(sink, event, lambda sink=sink: sink.begin(event, digest))  # type: ignore[misc]

    def rejected(self, operation_id: str, context: OperationContext, code: str) -> None:
        """Record that a call was rejected before its handler started."""
        self._end(CallRejected(**_facts(operation_id, context), code=code), "rejected")

    def ended(self, operation_id: str, context: OperationContext, code: str | None) -> None:
        """Record how a handler ended."""
        self._end(HandlerEnded(**_facts(operation_id, context), code=code), "ended")

    def run_changed(
        self,
        change: str,
        run: str,
        operation_id: str,
        context: OperationContext | None,
        facts: dict[str, Any],
    ) -> None:
        """Record a change of a run before it is stored; `context` is that of the call that made it, if there is one.

        Raises:
            CallError: `UNAVAILABLE` if a strict sink cannot record it.
        """
        if not self._runs:
            return
        call = None if context is None else CallAdmitted(**_facts(operation_id, context))
        event = RunChanged(
            run=run,
            operation_id=operation_id,
            timestamp=now(),
            change=change,
            facts=facts,
            call=call,
        )
        for sink in self._runs:
            self._hand(sink, event, lambda sink=sink: sink.note(event))  # type: ignore[misc]

    def _end(self, event: CallRejected | HandlerEnded, tag: str) -> None:
        for sink in self.gates:
            if tag in sink.wants:
                try:
                    sink.end(event)
                except Exception:  # noqa: BLE001 - `_log` logs it
                    self._log(sink, event)

    def _hand(self, sink: Sink, event: HandlerEvent, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            if sink.strict:
                message = "This call cannot be recorded, so it is rejected"
                raise CallError(ErrorCode.UNAVAILABLE, message) from error
            self._log(sink, event)

    def _log(self, sink: Sink, event: HandlerEvent) -> None:
        level = self.failures.setdefault(id(sink), LogThrottle()).level()
        message = "%s cannot record %s"
        logger.log(level, message, type(sink).__name__, type(event).__name__, exc_info=True)


def _without(sink: Sink, sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    """Return the sinks without one occurrence of a sink."""
    place = next((number for number, each in enumerate(sinks) if each is sink), len(sinks))
    return sinks[:place] + sinks[place + 1 :]


def _strict_first(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    return tuple(sorted(sinks, key=attrgetter("strict"), reverse=True))


def _observer(sink: Sink, wants: frozenset[str]) -> Observer | None:
    """Return the function that hands `CallEvent`s to the methods of a sink; None if the sink wants none of them."""
    methods: dict[type, Callable[[Any], None]] = {
        kind: sink.note for kind, tag in _tags(CallEvent).items() if tag in wants
    }
    if CallStarted in methods:
        methods[CallStarted] = lambda call: sink.begin(call, None)
    if CallFinished in methods:
        methods[CallFinished] = sink.end
    if not methods:
        return None

    def observe(event: CallEvent, /) -> None:
        method = methods.get(type(event))
        if method is not None:
            method(event)

    return observe


def _digest(value: Any) -> str:
    try:
        text = canonical(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = b"not JSON"
    return sha256(text).hexdigest()


def _facts(operation_id: str, context: OperationContext) -> dict[str, Any]:
    """Return the fields of events about the handler of a call."""
    identity, scope = context.identity, context.scope
    return {
        "request_id": context.request_id,
        "operation_id": operation_id,
        "timestamp": now(),
        "parent_request_id": context.parent_request_id,
        "identity_id": None if identity is None else identity.id,
        "issuer": None if identity is None else identity.issuer,
        "acting": () if identity is None else identity.acting,
        "authority": context.authority_id,
        "run": None if scope is None else scope.run_id,
        "step": None if scope is None else scope.step_name,
        "script": None if context.claim is None else _text_of(context.claim.get("script")),
    }


def _text_of(value: object) -> str | None:
    """Return a claim, which another process may have made, if it is a text."""
    return value if isinstance(value, str) else None
