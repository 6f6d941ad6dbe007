"""The operations of a registry elsewhere, as operations here.

Rule 1: what is imported is what the other side lists to us: no more than we may call.
Rule 2: one spec that cannot be read does not hide the others.
Rule 3: what every worker says about itself is not imported: here it would speak for us.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Self, cast

from msgspec.structs import replace

from operations._text import printable
from operations._upstreams import Bulkhead
from operations.calls.client import PendingRequestMap
from operations.calls.config import RemoteConfig
from operations.calls.describing import SpecDecoder
from operations.calls.pending import CallStream
from operations.calls.services import DESCRIBE, LIST, SERVICES
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, timeout_error
from operations.pubsub.base import EventTarget
from operations.specs import (
    Operation,
    OperationSpec,
    OperationType,
)
from operations.types import options_of

logger = logging.getLogger("operations")

_PATIENCE = 10.0
"""Seconds for an answer, or for the next piece of one."""

_PATIENCE_IN_ALL = 60.0

_MAX_REASON = 500


class RemoteService:
    """What a worker group, or the peer of a WebSocket, offers. Made by `from_calls`.

    Attributes:
        calls: The calls under way there.
        operations: What was imported, once it is open.
    """

    def __init__(self, calls: PendingRequestMap, config: RemoteConfig) -> None:
        self.calls = calls
        self.operations: list[Operation] = []
        self._is_open = False
        self._config = config
        self._bulkhead = None
        if config.concurrent_calls is not None:
            self._bulkhead = Bulkhead(f"group {config.group}", config.concurrent_calls)

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            # Nobody else will: who could not enter does not leave.
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._opened())

    def __len__(self) -> int:
        return len(self._opened())

    def _opened(self) -> list[Operation]:
        if not self._is_open:
            raise RuntimeError("nothing is imported yet: async with from_calls(target) as service")
        return self.operations

    async def open(self) -> None:
        """Ask what is offered. If that fails it is closed: who tries again makes another.

        Raises:
            CallError: `UNAVAILABLE` if nobody serves there, `UNKNOWN_ERROR` if the answer cannot be read.
        """
        try:
            await self.calls.open()
            specs = await self._specs()
        except BaseException:
            await self.aclose()
            raise
        self.operations = []
        for spec in specs:
            try:
                imported = self._import(spec)
            except ValueError as error:
                _left_out(str(error))
            else:
                if (
                    imported.spec.id not in self._config.exclude
                    and imported.spec.id not in SERVICES
                ):
                    self.operations.append(imported)
        self._is_open = True

    async def _specs(self) -> list[OperationSpec]:
        told = SpecDecoder()
        try:
            async with (
                asyncio.timeout(_PATIENCE_IN_ALL),
                self.calls.subscribe(DESCRIBE, idle_timeout=_PATIENCE) as pieces,
            ):
                async for piece in pieces:
                    told.hear(piece.data)
        except TimeoutError as error:
            reason = f"{DESCRIBE} did not end within {_PATIENCE_IN_ALL:g} seconds"
            raise timeout_error(reason) from error
        except CallError as error:
            if error.code != ErrorCode.OPERATION_NOT_FOUND:
                raise
            # Other implementations have only the list.
            return await self._listed()
        for reason in told.left_out:
            _left_out(reason)
        return told.specs

    async def _listed(self) -> list[OperationSpec]:
        listed: Any = (await self.calls.call(LIST, timeout=_PATIENCE)).data
        if not isinstance(listed, list):
            raise CallError(ErrorCode.UNKNOWN_ERROR, f"{LIST} gave no list of operations")
        specs: list[OperationSpec] = []
        for wire in cast("Iterable[Any]", listed):
            try:
                specs.append(OperationSpec.from_wire(wire))
            except ValueError as error:
                _left_out(str(error))
        return specs

    async def aclose(self) -> None:
        """End what is under way there; the target stays open. Closing twice is harmless."""
        await self.calls.aclose()

    def _import(self, spec: OperationSpec) -> Operation:
        there = spec.id
        here = spec
        if self._config.namespace is not None:
            here = replace(here, namespace=self._config.namespace, name=there)
        if self._config.access is not None:
            access = (
                self._config.access(spec) if callable(self._config.access) else self._config.access
            )
            here = replace(here, access_control=access)
        calls, replayable = self.calls, spec.replayable

        bulkhead = self._bulkhead

        async def call(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            if bulkhead is None:
                return await calls.call(there, input, context, replayable=replayable)
            async with bulkhead:
                return await calls.call(there, input, context, replayable=replayable)

        def subscribe(input: Any, context: OperationContext) -> CallStream:
            return calls.subscribe(there, input, context)

        if spec.type is OperationType.SUBSCRIPTION:
            return Operation(here, subscribe, self._config.output)
        return Operation(here, call, self._config.output)


def _left_out(reason: str) -> None:
    # What a stranger says stays on its line.
    logger.warning("an operation cannot be imported: %s", printable(reason[:_MAX_REASON]))


@options_of(RemoteConfig)
def from_calls(config: RemoteConfig, target: EventTarget) -> RemoteService:
    """Return the operations served at the other end of `target`, to be registered here.

        async with from_calls(target) as service:
            registry.register_all(service)

    Call it as `from_calls(target, **options)`, with the fields of `RemoteConfig`.
    """
    calls = PendingRequestMap(
        target,
        group=config.group,
        credential=config.credential,
        send_identity=config.send_identity,
        timeout=config.timeout,
    )
    return RemoteService(calls, config)
