"""Import the operations of a remote registry.

Rule 1: an import consists of the operations that the remote lists for this client.
Rule 2: one spec that cannot be read does not hide the others.
Rule 3: the operations that describe a worker are not imported.
Rule 4: when workers add, change or remove operations, the registries with the import are updated.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from sys import maxsize
from typing import Any, Self, TypeAlias

from msgspec.structs import replace

from operations.authority.grants import Delegate
from operations.base.errors import CallError, RegistrationError, TransportError, timeout_error
from operations.base.slots import Bulkhead
from operations.base.tasks import cancel_tasks, shielded
from operations.base.text import enforce_durations, enforce_lists, printable
from operations.base.types import Count, Seconds, options_of
from operations.calls.protocol.services import DESCRIBE, SERVICES, SpecDecoder
from operations.calls.serving.jobs import DEFAULT_GROUP
from operations.calls.source.client import PendingRequestMap
from operations.contract.access import AccessControl
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import (
    SOURCE_NAMESPACE,
    InputPolicy,
    Operation,
    OperationSpec,
    OperationType,
    OutputPolicy,
    enforce_policy,
)
from operations.pubsub.base import EventTarget
from operations.registry.registry import OperationRegistry
from operations.registry.remotes import RemoteReader
from operations.registry.streams import Subscription as EnvelopeStream

logger = logging.getLogger("operations")

_PIECE_SECONDS = 10.0
"""Seconds for a response, or for the next piece of it."""

_LISTING_SECONDS = 60.0

_MAX_REASON = 500

_LOOK = 1.0
"""Seconds between two checks that workers are connected."""

_Offer: TypeAlias = tuple[OperationSpec, float | None]
"""An operation of a worker, and its time limit in seconds."""

AccessRule: TypeAlias = AccessControl | Callable[[OperationSpec], AccessControl]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Settings of `from_calls`."""

    group: str = DEFAULT_GROUP
    """The worker group."""

    namespace: str | None = None
    """Import the operations into this namespace, with their whole id as name."""

    access: AccessRule | None = None
    """The access rule for local callers, instead of the access control of the specs."""

    output: OutputPolicy | None = None
    """The output policy; None for the policy of the registry."""

    input: InputPolicy | None = None
    """The input policy; None: `convert` for callers that are models, `strict` for all others."""

    exclude: Collection[str] | Container[str] = ()
    """Ids that are not imported, for example those that a registry already has."""

    credential: str | None = field(default=None, repr=False)
    """A token for the workers' resolver, sent with every call."""

    delegate: Delegate | None = None
    """Returns the credential of each call on behalf of its caller, instead of `credential`: `Grants.delegate`."""

    send_identity: bool | None = None
    """Send the identity of the caller; by default on trusted targets only."""

    timeout: Seconds | None = None
    """The time limit of a call in seconds, even if its caller allows more. By default the limit that the caller sets,
    or else the limit of the operation, from 30 to 600."""

    idle_timeout: Seconds | None = 30
    """The longest time between two items of a subscription in seconds; None for no limit."""

    concurrent_calls: Count | None = None
    """The number of concurrent calls; further calls wait. By default there is no limit."""

    def __post_init__(self) -> None:
        enforce_durations(timeout=self.timeout, idle_timeout=self.idle_timeout)
        enforce_policy(self.output, self.input)
        enforce_lists(exclude=self.exclude)


class RemoteService:
    """The operations of a worker group or of a WebSocket peer. Created by `from_calls`.

    Attributes:
        calls: The running calls.
        operations: The imported operations; empty until it is open, and replaced by a new list when they change.
        problem: The reason why the operations are not available; None if they are.
        on_change: Called after the operations have changed.
        max_operations: The largest number of operations to import.
    """

    def __init__(self, calls: PendingRequestMap, config: RemoteConfig) -> None:
        self.calls = calls
        self.operations: list[Operation] = []
        self.problem: str | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.max_operations = maxsize
        self._is_open = False
        self._registries: list[OperationRegistry] = []
        self._imported: set[str] = set()
        self._replaced: list[Operation] = []
        """Operations that registries may still have, because an update failed."""
        self._changed = calls.specs_changed
        self._following: asyncio.Task[None] | None = None
        self._config = config
        self._left_out = set(SERVICES)
        limit = config.concurrent_calls
        self._bulkhead = (
            nullcontext() if limit is None else Bulkhead(f"group {config.group}", limit)
        )

    def limit_calls(self, concurrency: int) -> None:
        """Change the number of concurrent calls, if there is a limit."""
        if isinstance(self._bulkhead, Bulkhead):
            self._bulkhead.resize(concurrency)

    async def __aenter__(self) -> Self:
        await self.open()
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
        """Import the operations. If this fails, the service is closed; create another one to try again.

        Raises:
            CallError: `UNAVAILABLE` if no worker is connected, `UNKNOWN_ERROR` if the response cannot be decoded.
        """
        try:
            await self.calls.open()
            self.operations = self._import_all(await self._offers())
        except BaseException:
            await self.aclose()
            raise
        # If all workers serve the same operations, one listing is enough.
        if len(self.calls.workers_by_specs) == 1:
            self._imported = set(self.calls.workers_by_specs)
        self._is_open = True
        self._following = asyncio.Task(self._follow())

    def _import_all(self, offered: Iterable[_Offer]) -> list[Operation]:
        known = {operation.spec.id: operation for operation in self.operations}
        operations: list[Operation] = []
        for spec, timeout in offered:
            try:
                imported = self._import(spec, timeout)
            except ValueError as error:
                _left_out(str(error))
                continue
            operation_id = imported.spec.id
            if operation_id not in self._config.exclude and operation_id not in self._left_out:
                old = known.get(operation_id)
                operations.append(imported if old is None or _differ(old, imported) else old)
        if len(operations) > self.max_operations:
            count = len(operations)
            logger.warning("%d of %d operations are imported", self.max_operations, count)
        return operations[: self.max_operations]

    # ---------------------------------------------------------------------------------------- following

    def attach(self, registry: OperationRegistry) -> None:
        """Update `registry`, which has these operations, from now on; `register_all` calls this."""
        if registry not in self._registries:
            self._registries.append(registry)

    def register_free(self, registry: OperationRegistry) -> None:
        """Register the operations whose ids are free."""
        ids = registry.registered
        _update(registry, [], [each for each in self.operations if ids(each.spec.id) is None])

    def leave_out(self, operation_ids: Iterable[str]) -> None:
        """Import these operations neither now nor later."""
        enforce_lists(operation_ids=operation_ids)
        self._left_out.update(operation_ids)
        self.operations = [each for each in self.operations if each.spec.id not in self._left_out]

    def detach(self, registry: OperationRegistry) -> None:
        """Stop updating `registry`."""
        if registry in self._registries:
            self._registries.remove(registry)

    async def _follow(self) -> None:
        """Detect that workers change, disconnect or reconnect."""
        while self._following is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._changed.wait()
            try:
                is_served = await self.calls.has_workers()
                self.problem = (
                    None if is_served else f"no worker of group {self._config.group} is connected"
                )
                if self._changed.is_set():
                    self._changed.clear()
                    await self._refresh()
            except (CallError, TransportError) as error:
                if not self.calls.target.is_connected:
                    self.problem = str(error)
                logger.debug("the workers cannot be asked for their operations: %s", error)
                await asyncio.sleep(_LOOK)
                self._changed.set()
            except Exception:
                # The access rule, for example, is code of the program. The next change is imported again.
                logger.exception("changed operations could not be imported")

    async def _refresh(self) -> None:
        """Import the operations again, from one worker of each version; those of the newest worker take precedence."""
        versions, is_direct = self.calls.workers_by_specs, self.calls.target.direct
        if not is_direct and (not versions or set(versions) == self._imported):
            return
        offered: dict[str, _Offer] = {}
        for worker in [""] if is_direct else versions.values():
            offered |= {offer[0].id: offer for offer in await self._offers(worker)}
        before, self.operations = self.operations, self._import_all(offered.values())
        self._replaced += before
        for registry in self._registries:
            _update(registry, self._replaced, self.operations)
        self.on_change()
        self._replaced, self._imported = [], set(versions)

    async def _offers(self, worker: str = "") -> list[_Offer]:
        decoder = SpecDecoder()
        try:
            async with (
                asyncio.timeout(_LISTING_SECONDS),
                self.calls.subscribe(
                    DESCRIBE, idle_timeout=_PIECE_SECONDS, worker=worker
                ) as pieces,
            ):
                async for piece in pieces:
                    decoder.add(piece.data)
        except TimeoutError as error:
            reason = f"{DESCRIBE} did not end within {_LISTING_SECONDS:g} seconds"
            raise timeout_error(reason) from error
        for reason in decoder.left_out:
            _left_out(reason)
        return [(spec, decoder.timeouts.get(spec.id)) for spec in decoder.specs]

    @shielded
    async def aclose(self) -> None:
        """End the pending calls; the target stays open. Closing twice is harmless."""
        following, self._following = self._following, None
        try:
            # Ended first, because closing the calls would end it with an error.
            await cancel_tasks(following)
        finally:
            await self.calls.aclose()

    def _import(self, spec: OperationSpec, timeout: float | None) -> Operation:
        there = spec.id
        here = spec
        if self._config.namespace is not None:
            here = replace(here, namespace=self._config.namespace, name=there)
        if here.meta.get(SOURCE_NAMESPACE, here.namespace) != here.namespace:
            # It may be that of another source here.
            meta = {key: value for key, value in here.meta.items() if key != SOURCE_NAMESPACE}
            here = replace(here, meta=meta)
        if self._config.access is not None:
            access = self._config.access
            here = replace(here, access_control=access(spec) if callable(access) else access)
        calls, replayable, bulkhead = self.calls, spec.replayable, self._bulkhead
        seconds = self._config.timeout or timeout

        async def call(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
            async with bulkhead:
                limit = seconds if context.deadline is None else None
                return await calls.call(
                    there,
                    input,
                    context,
                    timeout=limit,
                    replayable=replayable or (spec.keyed and context.key is not None),
                    key=context.key,
                )

        def subscribe(input: Any, context: OperationContext) -> EnvelopeStream:
            return calls.subscribe(there, input, context)

        check = partial(calls.call, replayable=True)
        reader = RemoteReader(there, check) if spec.converts_input else None
        is_stream = spec.type is OperationType.SUBSCRIPTION
        return Operation(
            here,
            subscribe if is_stream else call,
            self._config.output,
            source_timeout=None if is_stream else seconds,
            reader=reader,
            forwards=True,
            input=self._config.input,
        )


def _differ(old: Operation, new: Operation) -> bool:
    return old.source_timeout != new.source_timeout or old.spec.encode() != new.spec.encode()


def _update(registry: OperationRegistry, before: list[Operation], after: list[Operation]) -> None:
    """Replace the operations of an import in a registry; other operations are not changed."""
    old = {operation.handler: operation for operation in before}
    new = {operation.spec.id: operation for operation in after}
    for operation in before:
        if operation.spec.id not in new:
            registry.remove_imported(operation)
    for operation_id, operation in new.items():
        registered = registry.registered(operation_id)
        if registered is not None and registered.handler is operation.handler:
            continue
        known = None if registered is None else old.get(registered.handler)
        if registered is not None and known is None:
            logger.warning("%s is not imported: another operation has this id", operation_id)
            continue
        try:
            registry.register(registry.restricted(operation, known), replace=True)
        except RegistrationError as error:
            _left_out(str(error))


def _left_out(reason: str) -> None:
    # The text of another process must not add lines to the log.
    logger.warning("an operation cannot be imported: %s", printable(reason[:_MAX_REASON]))


@options_of(RemoteConfig)
def from_calls(config: RemoteConfig, target: EventTarget) -> RemoteService:
    """Return a service with the operations at the other end of `target`.

        async with from_calls(target) as service:
            registry.register_all(service)

    Call it as `from_calls(target, **options)`, with the fields of `RemoteConfig`.
    """
    calls = PendingRequestMap(
        target,
        group=config.group,
        credential=config.credential,
        delegate=config.delegate,
        send_identity=config.send_identity,
        timeout=config.timeout,
        idle_timeout=config.idle_timeout,
    )
    return RemoteService(calls, config)
