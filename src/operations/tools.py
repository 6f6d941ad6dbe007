"""Settings for operations of every source, by id or pattern: access, limits, retries, cache, names and results.

    configure_tools(registry, {"github.delete_*": ToolConfig(scopes=["admin"], timeout=5)})

Rule 1: these settings override those of the operation, which override those of its service and of the registry.
Rule 2: access and input are checked first, so that neither the cache nor a limit reveals an operation to a caller
        without access.
Rule 3: settings also apply to operations that are registered or changed later.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from inspect import isawaitable
from time import monotonic
from typing import Annotated, Any, Final, TypeAlias, cast

import msgspec
from msgspec import Meta
from msgspec.structs import replace as with_fields

from operations._json import is_list, is_object, unescape
from operations._pipeline.path import invoke, prepare
from operations._pipeline.plan import CallPlan
from operations._resilience import Backoff, RetryBudget, wanted_pause
from operations._text import enforce_lists, printable
from operations.access import HIDDEN, AccessControl
from operations.context import OperationContext
from operations.envelopes import MCPResponseMeta, ResponseEnvelope, TextContent
from operations.errors import CallError, ErrorCode, RegistrationError
from operations.front.limits import ConcurrencyLimiter, RateLimiter
from operations.registry import OperationRegistry
from operations.result_pages import MIN_PAGE, NEXT, ResultPages, next_operation, result_owner
from operations.specs import (
    UNKNOWN,
    ApprovalRule,
    InputPolicy,
    Operation,
    OperationType,
    OutputPolicy,
    enforce_policy,
)
from operations.types import Count, Seconds

logger = logging.getLogger("operations")

_MAX_ENTRIES = 1_000
_MAX_BYTES = 16 << 20
"""Limits of the cache of one operation: number of results, and bytes."""

_LONGEST_PAUSE = 60.0
"""The longest pause before a retry, in seconds. If an API asks for a longer pause, the call fails."""

_RUNNING: Final = ("rate", "concurrency", "retry", "cache", "select", "max_bytes")
"""The settings that need their own handler."""

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Defines how calls of an operation are retried after a retryable error, at every entry point.

    Queries and idempotent operations are retried after every such error. Other operations are retried only if the error
    shows that the operation was not started. There is no retry after `APPROVAL_REQUIRED` or past the caller's deadline.
    """

    attempts: Count = 3
    """The total number of attempts, including the first."""

    first_pause: Annotated[float, Meta(ge=0)] = 0.05
    """The longest first pause, in seconds. Each pause is a random part of its maximum, which grows with the attempts
    and with the time since the first error."""

    last_pause: Annotated[float, Meta(ge=0)] = 5
    """The longest pause, in seconds. The time that an error asks for is added: `Retry-After` of an HTTP API, or
    `retryAfterMs` in its details."""

    budget: Annotated[float, Meta(ge=0)] = 0.2
    """The number of retries per call of the operation, on average. Ten at once and one per second are always
    allowed."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")
        for name in ("first_pause", "last_pause", "budget"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a number that is not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolConfig:
    """Settings for the operations that match an id or a pattern; None leaves a setting unchanged.

    Raises:
        ValueError: If a field is not valid; the message names it.
    """

    scopes: Collection[str] | None = None
    """Scopes that a caller needs, instead of those of the operation."""

    hide: bool | None = None
    """Hide the operation from all external callers; code in this process may still call it."""

    rename: str | None = None
    """The new id, `namespace.name`; only for a single operation, not for a pattern."""

    output: OutputPolicy | None = None
    """How results are normalised."""

    input: InputPolicy | None = None
    """How input that does not match its schema is handled."""

    timeout: Seconds | None = None
    """The time limit of a query or mutation in seconds, instead of the entry point's default, unless the caller's
    deadline is earlier. The timer stops while a person answers a question, and restarts with each progress report."""

    rate: Annotated[float, Meta(gt=0)] | None = None
    """Calls per second of one caller, on average, to each of the operations. Callers without identity count as one."""

    concurrency: Count | None = None
    """Concurrent calls to each of the operations, from all callers."""

    retry: RetryPolicy | Annotated[int, Meta(ge=0)] | None = None
    """How calls are retried after a retryable error; a number sets the retries, with the default pauses."""

    cache: Seconds | None = None
    """Seconds for which the result of a query is cached, per input and caller."""

    select: Collection[str] | None = None
    """JSON pointers to the parts of a result to keep, such as `/items/*/id`; `*` stands for every item or property. The
    operation then has no output schema."""

    max_bytes: Annotated[int, Meta(ge=MIN_PAGE)] | None = None
    """The largest result, in bytes of JSON. A larger result is returned in pages: each page is complete JSON with a
    `cursor` for the next page, which `results.next` returns. The operation then has no output schema."""

    approve: ApprovalRule | bool | None = None
    """The calls that a person must approve, and the scope to approve them; `true` for all calls with the defaults."""

    authority: bool | None = None
    """Whether the operation administers authority, so that no pattern of a grant allows it. Only `true`, for operations
    whose source does not declare it, such as a proxy that does not pass it on."""

    def __post_init__(self) -> None:
        enforce_lists(scopes=self.scopes, select=self.select)
        enforce_policy(self.output, self.input)
        if self.rename is not None and not all(self.rename.partition(".")):
            raise ValueError("rename must be a whole id, namespace.name")
        for pointer in self.select or ():
            if not pointer.startswith("/"):
                raise ValueError("select must contain JSON pointers, which begin with /")
        if self.authority is False:
            raise ValueError("authority can only be true: no setting removes it from an operation")
        if self.max_bytes is not None and self.max_bytes < MIN_PAGE:
            raise ValueError(f"max_bytes must be at least {MIN_PAGE}")


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
    if config.select is not None or config.max_bytes is not None:
        spec = with_fields(spec, output_schema=UNKNOWN)
    ready = with_fields(
        operation,
        spec=spec,
        **policies,
        timeout=config.timeout or operation.timeout,
        approve=approve,
    )
    if all(getattr(config, name) is None for name in _RUNNING):
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
        self._cache = _Cache(config.cache) if config.cache is not None and is_query else None
        self._select = _paths(config.select or ()) or None

    @property
    def _plan(self) -> CallPlan:
        if self._made is None:
            self._made = prepare(self._operation, cast("Any", self._registry), is_inner=True)
        return self._made

    async def call(self, value: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        """Run a query or mutation."""
        return await self._bounded(await self._cached(value, context), context)

    async def _cached(self, value: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        key = None if self._cache is None else _key(value, context)
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
        if limit is None or context.whole:
            return envelope
        return await self._pages.bound(envelope, context, self._id, limit)

    async def _limited(self, value: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        self._rate.spend(_caller(context))
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
        self._rate.spend(_caller(context))
        plan = self._plan
        async with AsyncExitStack() as stack:
            if self._slots is not None:
                stack.enter_context(self._slots.enter(""))
            opened: Any = plan.handler(value, context)
            items: Any = aiter(await opened if isawaitable(opened) else opened)
            if hasattr(items, "aclose"):
                await stack.enter_async_context(aclosing(items))
            async for item in items:
                yield await self._bounded(self._selected(plan.finish(item)), context)

    def _selected(self, envelope: ResponseEnvelope[Any]) -> ResponseEnvelope[Any]:
        if self._select is None or isinstance(envelope.data, bytes):
            return envelope
        meta: Any = envelope.meta
        if isinstance(meta, MCPResponseMeta):
            if meta.is_error:
                return envelope
            data: Any = _select_paths(envelope.data, self._select)
            # The blocks repeat the whole result.
            text = TextContent(text=msgspec.json.encode(data).decode())
            structured = data if is_object(data) else None
            meta = with_fields(meta, content=[text], structured_content=structured)
            return ResponseEnvelope(data, meta)
        return ResponseEnvelope(_select_paths(envelope.data, self._select), meta)


class _Cache:
    """Caches results by caller and input, up to a limit. They are encoded so that callers cannot change them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[float, bytes, Any]] = OrderedDict()

    def get(self, key: bytes) -> ResponseEnvelope[Any] | None:
        expires, data, meta = self._entries.get(key, (0.0, b"", None))
        if expires <= monotonic():
            return None
        self._entries.move_to_end(key)
        return ResponseEnvelope(msgspec.msgpack.decode(data), deepcopy(meta))

    def put(self, key: bytes, envelope: ResponseEnvelope[Any]) -> None:
        meta: Any = envelope.meta
        if isinstance(envelope.data, bytes) or getattr(meta, "is_error", False):
            return
        try:
            data = msgspec.msgpack.encode(envelope.data)
        except (OverflowError, TypeError):
            # Not encodable, such as an integer of more than 64 bits: do not cache it.
            return
        if len(data) + len(key) > _MAX_BYTES:
            return
        self._drop(key)
        self._entries[key] = (monotonic() + self._seconds, data, deepcopy(meta))
        self._bytes += len(data) + len(key)
        while len(self._entries) > _MAX_ENTRIES or self._bytes > _MAX_BYTES:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        _, data, _ = self._entries.pop(key, (0.0, None, None))
        if data is not None:
            self._bytes -= len(data) + len(key)


def _caller(context: OperationContext) -> str:
    return "" if context.identity is None else context.identity.limit_key


def _key(value: Any, context: OperationContext) -> bytes | None:
    """Return a canonical key from the input and the caller without its expiry; None if the input has files."""
    caller = [*result_owner(context), context.trusted]
    try:
        return msgspec.json.encode([value, caller], order="deterministic")
    except TypeError:
        return None


_Path: TypeAlias = tuple[str, ...]
"""The tokens of a JSON pointer. An empty path keeps a whole value."""

_Paths: TypeAlias = tuple[_Path, ...]


def _paths(pointers: Collection[str]) -> _Paths:
    return tuple(tuple(map(unescape, pointer.split("/")[1:])) for pointer in pointers)


def _select_paths(value: Any, paths: _Paths) -> Any:
    found = _part(value, paths)
    return None if found is _ABSENT else found


def _part(value: Any, paths: _Paths) -> Any:
    """Return the parts of a value at these paths; `_ABSENT` if it is a text or number without such parts."""
    if () in paths:
        return value
    if is_object(value):
        return dict(_parts(value.items(), paths))
    if is_list(value):
        return [part for _, part in _parts(enumerate(value), paths)]
    return _ABSENT


def _parts(items: Iterable[tuple[Any, Any]], paths: _Paths) -> Iterator[tuple[Any, Any]]:
    """Yield the items or properties that have a part at one of the paths, each with its parts."""
    every, named = _by_token(paths)
    for key, value in items:
        below = every + named.get(str(key), ())
        if below and (part := _part(value, below)) is not _ABSENT:
            yield key, part


@lru_cache
def _by_token(paths: _Paths) -> tuple[_Paths, dict[str, _Paths]]:
    """Group the remaining paths by their first token: those after `*`, and those after each other token."""
    rests: dict[str, list[_Path]] = {}
    for first, *rest in paths:
        rests.setdefault(first, []).append(tuple(rest))
    named = {token: tuple(below) for token, below in rests.items()}
    return named.pop("*", ()), named
