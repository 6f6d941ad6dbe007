"""The plans of a registry: one for each operation, prepared at its first call.

Rule 1: a call that fails before it has a plan is reported like any other.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from operations.base.errors import (
    CallError,
    ErrorCode,
    SchemaError,
    operation_not_found,
    unusable_schema,
)
from operations.base.tasks import enforce_asyncio
from operations.contract.context import OperationContext
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.registry.cache import PlanCache
from operations.registry.catalog import Catalog
from operations.registry.counters import CallCounters
from operations.registry.path import prepare
from operations.registry.plan import CallPlan
from operations.registry.remotes import forward
from operations.registry.reports import report_refusal
from operations.registry.services import CallServices
from operations.schema import Schema


class Plans:
    """The plans of the operations in a catalog.

    Args:
        catalog: The operations.
        services: What all calls share.

    Attributes:
        recent: The plans of queries and mutations that were called lately, by id, except durable ones: `execute` must
            not find those, because the call may be a run.
    """

    def __init__(self, catalog: Catalog, services: CallServices) -> None:
        self._catalog, self._services = catalog, services
        self._plain, self._durable, self._streams = PlanCache(), PlanCache(), PlanCache()
        self.recent = self._plain.recent

    async def of_call(self, operation_id: str, context: OperationContext) -> CallPlan:
        """Return the plan of a query or mutation.

        Raises:
            CallError: If it cannot be called.
        """
        plan = (
            self._plain.find(operation_id) or self._durable.find(operation_id)
            if _is_id(operation_id)
            else None
        )
        if plan is None:
            enforce_asyncio()
            await self._compile_aside(operation_id)
            plan = self._prepare(operation_id, context)
        return plan

    async def of_stream(self, operation_id: str, context: OperationContext) -> CallPlan:
        """Return the plan of a subscription.

        Raises:
            CallError: If it cannot be opened.
        """
        plan = self._streams.find(operation_id) if _is_id(operation_id) else None
        if plan is None:
            await self._compile_aside(operation_id)
            plan = self._prepare(operation_id, context, streaming=True)
        return plan

    async def of_any(self, operation_id: str, context: OperationContext) -> CallPlan:
        """Return the plan of an operation of any type.

        Raises:
            CallError: If it cannot be called.
        """
        spec = self._catalog.get_spec(operation_id)
        if spec is not None and spec.type is OperationType.SUBSCRIPTION:
            return await self.of_stream(operation_id, context)
        return await self.of_call(operation_id, context)

    def forget(self, operation_ids: Collection[str]) -> None:
        """Forget the plans of operations that were removed or replaced."""
        for plans in (self._plain, self._durable, self._streams):
            plans.remove(operation_ids)

    def count(self, counters: CallCounters | None) -> None:
        """Count all calls with these counters from now on; None ends it."""
        self._services.counters = counters
        for plan in (*self._plain, *self._durable, *self._streams):
            plan.series = None if counters is None else counters.of(plan.id)

    def follow_sinks(self) -> None:
        """Let the plans find out again whether calls are admitted one by one."""
        for plan in (*self._plain, *self._durable, *self._streams):
            plan.follow_sinks()

    async def _compile_aside(self, operation_id: Any) -> None:
        """Compile the schemas of an imported operation in a thread, because they may have hundreds of definitions."""
        spec = self._catalog.get_spec(operation_id) if _is_id(operation_id) else None
        if spec is not None:
            slow = [
                each for each in (spec.input_schema, spec.output_schema) if each.compiles_slowly
            ]
            if slow:
                await asyncio.to_thread(_compile, slow)

    def _prepare(
        self, operation_id: str, context: OperationContext, *, streaming: bool = False
    ) -> CallPlan:
        """Prepare an operation at its first call; raise an error if it cannot be called."""
        try:
            if not _is_id(operation_id):
                is_function = callable(operation_id)
                operation_id = repr(operation_id)
                if is_function:
                    message = "An id is expected, not a function: use registry.call(function, ...)"
                    raise operation_not_found(operation_id, message)
            known = self._catalog.get(operation_id)
            if known is None:
                # Not cached, because callers can send any number of unknown ids.
                unregistered = self._unregistered(operation_id, context, streaming=streaming)
                return prepare(unregistered, self._services)
            if (known.spec.type is OperationType.SUBSCRIPTION) != streaming:
                method = "execute" if streaming else "subscribe"
                reason = f"{operation_id} is a {known.spec.type}: use {method}"
                raise CallError(ErrorCode.VALIDATION_ERROR, reason)
            plans = self._streams if streaming else self._plain
            if known.durable and not streaming:
                plans = self._durable
            plan = prepare(known, self._services, log=plans.log(operation_id))
            plans.add(operation_id, plan)
        except CallError as error:
            error.operation_id = operation_id
            report_refusal(self._services, operation_id, context, error)
            raise
        except SchemaError as unusable:
            refusal = unusable_schema(operation_id, unusable, "the input schema")
            report_refusal(self._services, operation_id, context, refusal)
            raise refusal from unusable
        return plan

    def _unregistered(
        self, operation_id: str, context: OperationContext, *, streaming: bool
    ) -> Operation:
        """Return an operation for an unregistered id that calls the remote; the remote checks access."""
        remote = self._catalog.remote
        if remote is not None:
            namespace, _, name = operation_id.partition(".")
            kind = OperationType.SUBSCRIPTION if streaming else OperationType.MUTATION
            with suppress(ValueError):
                # The remote may administer authority with it, so that no pattern allows it.
                spec = OperationSpec(namespace=namespace, name=name, type=kind, authority=True)
                # Nor is it known whether the remote converts the input.
                return forward(spec, remote, converts_input=True)
        raise self._catalog.not_found(operation_id, context)


def _is_id(operation_id: Any) -> bool:
    """Return whether this can be an id at all; other values may not even be hashable."""
    return isinstance(operation_id, str)


def _compile(schemas: list[Schema]) -> None:
    # Errors are reported when the operation is prepared.
    with suppress(Exception):
        for schema in schemas:
            schema.compile()
