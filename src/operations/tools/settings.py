"""Settings of operations, by id or pattern."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import fields
from fnmatch import fnmatchcase
from inspect import isawaitable
from typing import Any, cast

import msgspec
from msgspec.structs import replace as with_fields

from operations.base.concurrency import ConcurrencyLimiter
from operations.base.errors import CallError, ErrorCode, RegistrationError
from operations.base.json.values import is_object
from operations.base.rates import RateLimiter
from operations.base.retry import Backoff, RetryBudget, wanted_pause
from operations.base.text import printable
from operations.contract.access import HIDDEN, AccessControl
from operations.contract.context import OperationContext
from operations.contract.envelopes import MCPResponseMeta, ResponseEnvelope, TextContent
from operations.contract.specs import (
    UNKNOWN,
    ApprovalRule,
    Operation,
    OperationType,
)
from operations.registry.path import invoke, prepare, to_envelope
from operations.registry.plan import CallPlan
from operations.registry.registry import OperationRegistry
from operations.tools.cache import RUNNING, ResultCache, cache_key, caller_of
from operations.tools.config import RetryPolicy, ToolConfig
from operations.tools.pages import NEXT, ResultPages, next_operation
from operations.tools.selection import paths_of, select_paths

logger = logging.getLogger("operations")
"""Limits of the cache of one operation: number of results, and bytes."""

_LONGEST_PAUSE = 60.0
"""The longest pause before a retry, in seconds. If an API asks for a longer pause, the call fails."""


def is_pattern(text: str) -> bool:
    """Return whether this may match more than one id."""
    return any(character in text for character in "*?[")


class ToolSettings:
    """The settings of a registry's operations, which can be replaced at run time."""

    def __init__(self, registry: OperationRegistry, tools: Mapping[str, ToolConfig]) -> None:
        self._registry = registry
        self._pages = ResultPages(registry)
        self._originals: dict[str, str] = {}
        self.tools: dict[str, ToolConfig] = {}
        """By id or pattern."""
        self._set(tools)
        registry.adapt(self._adapt)

    @property
    def unmatched(self) -> set[str]:
        """The patterns that match no operation."""
        ids = [self._originals.get(each.spec.id, each.spec.id) for each in self._registry]
        return {
            pattern
            for pattern in self.tools
            if not any(fnmatchcase(operation_id, pattern) for operation_id in ids)
        }

    def change(self, tools: Mapping[str, ToolConfig]) -> None:
        """Replace the settings.

        Raises:
            ValueError: If a pattern has `rename`; the settings are then unchanged.
            RegistrationError: If two operations would have the same id; the settings are then unchanged.
        """
        before = self.tools
        # A later pattern overrides an earlier one, so their order matters.
        if list(tools.items()) == list(before.items()):
            return
        self._set(tools)
        try:
            self._registry.adapt_all()
        except RegistrationError:
            self._set(before)
            raise

    def _set(self, tools: Mapping[str, ToolConfig]) -> None:
        for pattern, config in tools.items():
            if config.rename is not None and is_pattern(pattern):
                raise ValueError(f"rename works for one operation, and {pattern} is a pattern")
        had, has = _has_pages(self.tools), _has_pages(tools)
        if has and not had:
            self._registry.register(next_operation(self._pages))
        elif had and not has:
            self._registry.unregister(NEXT)
        self.tools = dict(tools)

    def _adapt(self, operation: Operation) -> Operation:
        found: dict[str, Any] = {}
        operation_id = operation.spec.id
        for pattern, config in self.tools.items():
            if fnmatchcase(operation_id, pattern):
                values = ((each.name, getattr(config, each.name)) for each in fields(config))
                found |= {name: value for name, value in values if value is not None}
        if operation_id == NEXT:
            found.pop("max_bytes", None)
        if not found:
            return operation
        config = ToolConfig(**found)
        if config.rename is not None:
            self._originals[config.rename] = operation_id
        return self._unchanged(operation, config) or _configured(
            operation, config, self._registry, self._pages
        )

    def _unchanged(self, operation: Operation, config: ToolConfig) -> Operation | None:
        """Return an operation as it is registered with the same settings, because it has the state of rates and caches.

        None if it is not registered in this way, or its settings need no state.
        """
        registry, operation_id = self._registry, operation.spec.id
        if registry.registered(operation_id) is not operation:
            return None
        current = registry.get(registry.current_id(operation_id))
        tool = None if current is None else getattr(current.handler, "__self__", None)
        return current if isinstance(tool, _Tool) and tool.config == config else None


def _has_pages(tools: Mapping[str, ToolConfig]) -> bool:
    return any(config.max_bytes is not None for config in tools.values())


def configure_tools(registry: OperationRegistry, tools: Mapping[str, ToolConfig]) -> ToolSettings:
    """Apply settings to operations of a registry, by id or pattern (`github.delete_*`).

    If several settings match an operation, the later ones override the earlier ones, field by field.

    Raises:
        ValueError: If a pattern has `rename`.
    """
    return ToolSettings(registry, tools)


def _configured(
    operation: Operation, config: ToolConfig, registry: OperationRegistry, pages: ResultPages
) -> Operation:
    spec = operation.spec
    access = spec.access_control
    if config.scopes is not None:
        access = with_fields(access, required_scopes=config.scopes, required_scopes_any=None)
    if config.hide:
        access = AccessControl([HIDDEN])
    if config.rename is not None:
        namespace, _, name = config.rename.partition(".")
        spec = with_fields(spec, namespace=namespace, name=name)
    if config.authority:
        spec = with_fields(spec, authority=True)
    policies = {
        "output": config.output or operation.output,
        "input": config.input or operation.input,
    }
    # Access has been checked before this runs.
    inner = with_fields(
        operation,
        spec=with_fields(spec, access_control=AccessControl()),
        **policies,
    )
    approve = operation.approve
    if config.approve is not None:
        approve = ApprovalRule() if config.approve is True else config.approve or None
    spec = with_fields(spec, access_control=access)
    result_schema = operation.result_schema
    if config.select is not None or config.max_bytes is not None:
        result_schema = result_schema or spec.output_schema
        spec = with_fields(spec, output_schema=UNKNOWN)
    ready = with_fields(
        operation,
        spec=spec,
        **policies,
        timeout=config.timeout or operation.timeout,
        approve=approve,
        descriptions=config.descriptions or operation.descriptions,
        result_schema=result_schema,
    )
    if all(getattr(config, name) is None for name in RUNNING):
        return ready
    tool = _Tool(inner, config, registry, pages)
    handler = tool.stream if spec.type is OperationType.SUBSCRIPTION else tool.call
    return with_fields(ready, handler=handler, blocking=False)


class _Tool:
    """Runs an operation with its settings."""

    def __init__(
        self,
        operation: Operation,
        config: ToolConfig,
        registry: OperationRegistry,
        pages: ResultPages,
    ) -> None:
        self._operation = operation
        self.config = config
        self._registry = registry
        self._pages = pages
        self._made: CallPlan | None = None
        self._id = operation.spec.id
        is_query = operation.spec.type is OperationType.QUERY
        self._rate = RateLimiter(config.rate, math.ceil(config.rate or 1))
        limit = config.concurrency
        what = f"concurrent calls of {self._id}"
        self._slots = None if limit is None else ConcurrencyLimiter(what, limit, limit)
        retry = config.retry or 0
        self._retry = RetryPolicy(attempts=retry + 1) if isinstance(retry, int) else retry
        self._budget = RetryBudget(self._retry.budget)
        self._is_repeatable = is_query or operation.spec.idempotent
        self._cache = ResultCache(config.cache) if config.cache is not None and is_query else None
        self._select = paths_of(config.select or ()) or None

    @property
    def _plan(self) -> CallPlan:
        if self._made is None:
            self._made = prepare(self._operation, cast("Any", self._registry), is_inner=True)
        return self._made

    async def call(self, value: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        """Run a query or mutation."""
        return await self._bounded(await self._cached(value, context), context)

    async def _cached(self, value: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        key = None if self._cache is None else cache_key(value, context)
        if self._cache is None or key is None:
            return await self._limited(value, context)
        found = self._cache.get(key)
        if found is None:
            found = await self._limited(value, context)
            self._cache.put(key, found)
        return found

    async def _bounded(
        self, envelope: ResponseEnvelope[Any], context: OperationContext
    ) -> ResponseEnvelope[Any]:
        limit = self.config.max_bytes
        is_stored = context.scope is not None and context.scope.result_keeper is not None
        if limit is None or (context.whole and not is_stored):
            return envelope
        return await self._pages.bound(envelope, context, self._id, limit)

    async def _limited(self, value: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        self._rate.spend(caller_of(context))
        with self._slots.enter("") if self._slots is not None else nullcontext():
            return self._selected(await self._repeated(value, context))

    async def _repeated(self, value: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        if self._retry.attempts == 1:
            return await invoke(self._plan, value, context)
        self._budget.count_call()
        backoff = Backoff(self._retry.first_pause, self._retry.last_pause)
        while True:
            try:
                return await invoke(self._plan, value, context)
            except CallError as error:
                pause = self._pause_after(error, backoff, context)
                if pause is None:
                    raise
                series = self._registry.counters and self._registry.counters.of(self._id)
                if series:
                    series.retries += 1
                logger.info(
                    "%s is called again in %.2f s, after %s", self._id, pause, printable(error.code)
                )
            await asyncio.sleep(pause)

    def _pause_after(
        self, error: CallError, backoff: Backoff, context: OperationContext
    ) -> float | None:
        """Return the seconds to wait before a retry; None if the call must not be retried."""
        # An approval takes a person's time, so the caller repeats the call.
        if not error.retryable or error.code == ErrorCode.APPROVAL_REQUIRED:
            return None
        # `begun=False` from a nested call does not show that the handler itself has not begun.
        has_begun = error.begun is not False or not self._operation.forwards
        if has_begun and not self._is_repeatable:
            return None
        if backoff.attempt + 1 >= self._retry.attempts:
            return None
        pause = backoff.pause() + wanted_pause(error.details)
        if pause > _LONGEST_PAUSE or pause >= context.remaining:
            return None
        return pause if self._budget.spend() else None

    async def stream(
        self, value: Any, context: OperationContext
    ) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Run a subscription."""
        self._rate.spend(caller_of(context))
        plan = self._plan
        async with AsyncExitStack() as stack:
            if self._slots is not None:
                stack.enter_context(self._slots.enter(""))
            opened: Any = plan.handler(value, context)
            items: Any = aiter(await opened if isawaitable(opened) else opened)
            if hasattr(items, "aclose"):
                await stack.enter_async_context(aclosing(items))
            async for item in items:
                yield await self._bounded(self._selected(await to_envelope(plan, item)), context)

    def _selected(self, envelope: ResponseEnvelope[Any]) -> ResponseEnvelope[Any]:
        if self._select is None or isinstance(envelope.data, bytes):
            return envelope
        meta: Any = envelope.meta
        if isinstance(meta, MCPResponseMeta):
            if meta.is_error:
                return envelope
            data: Any = select_paths(envelope.data, self._select)
            # The blocks repeat the whole result.
            text = TextContent(text=msgspec.json.encode(data).decode())
            structured = data if is_object(data) else None
            meta = with_fields(meta, content=[text], structured_content=structured)
            return ResponseEnvelope(data, meta)
        return ResponseEnvelope(select_paths(envelope.data, self._select), meta)
