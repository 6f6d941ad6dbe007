"""Search, describe and call any operation of a registry: the fixed gateway of HTTP, MCP and the command line.

Rule 1: everything runs as the caller. Operations that it may not call are neither found nor described.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import msgspec

from operations._json import to_json
from operations._text import enforce_lists
from operations.access import Identity, check_access
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, map_error
from operations.front.ranking import Ranking
from operations.registry import OperationRegistry
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

MAX_BATCH: Final = 100
"""Calls in one batch."""


class Found(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An operation that a search found."""

    id: str
    type: OperationType
    title: str | None
    description: str
    tags: tuple[str, ...]
    score: float


class BatchCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a batch."""

    operation: str
    input: Any = None


def may_call(spec: OperationSpec, context: OperationContext) -> bool:
    """Return whether a caller may call, and so may see, an operation."""
    return context.trusted or check_access(spec.access_control, context.identity, spec.id)


def visible_specs(
    registry: OperationRegistry, context: OperationContext
) -> Iterator[OperationSpec]:
    """Return the operations that a caller may call, in the order of registration."""
    return (spec for spec in registry.specs() if may_call(spec, context))


class Gateway:
    """Search, describe and call the operations of a registry as one caller.

    Args:
        registry: The operations.
        admit: Raises unless the identity may know of an operation; called before each call.
        shows: Returns whether a caller sees an operation.
        max_query: Characters of a search query.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        admit: Callable[[str, Identity | None], object] | None = None,
        shows: Callable[[OperationSpec, OperationContext], bool] = may_call,
        max_query: int = 1_000,
    ) -> None:
        self._registry = registry
        self._admit = admit
        self._shows = shows
        self.max_query = max_query
        self._ranking = Ranking(())
        self._revision = -1
        self._indexing = asyncio.Lock()

    async def search(
        self,
        query: str,
        context: OperationContext,
        *,
        limit: int = 20,
        namespace: str | None = None,
        tags: Collection[str] = (),
        type: OperationType | None = None,
    ) -> list[Found]:
        """Return the operations that match best, best first; without a query, in the order of their ids.

        Args:
            query: A few plain words, such as `close an issue`; the beginning of a word counts too.
            context: Who asks.
            limit: How many at most.
            namespace: Only in this one.
            tags: Only with all of these.
            type: Only of this one.

        Raises:
            ValueError: If `tags` is a single string.
            CallError: `VALIDATION_ERROR` if the query is too long.
        """
        enforce_lists(tags=tags)
        if len(query) > self.max_query:
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                f"A search query has at most {self.max_query} characters, not {len(query)}",
            )

        def wanted(spec: OperationSpec) -> bool:
            return (
                (namespace is None or spec.namespace == namespace)
                and (type is None or spec.type is type)
                and all(tag in spec.tags for tag in tags)
                and self._shows(spec, context)
            )

        found: list[Found] = []
        for spec, score in (await self._current()).ranked(query):
            if len(found) >= limit:
                break
            if wanted(spec):
                found.append(
                    Found(
                        id=spec.id,
                        type=spec.type,
                        title=spec.title,
                        description=spec.description,
                        tags=spec.tags,
                        score=round(score, 3),
                    )
                )
        return found

    def spec(self, operation_id: str, context: OperationContext) -> OperationSpec:
        """Return the contract of one operation.

        Raises:
            CallError: `OPERATION_NOT_FOUND`, also if the caller may not call it.
        """
        spec = self._registry.get_spec(operation_id)
        if spec is None or not self._shows(spec, context):
            raise self._registry.not_found(operation_id, context)
        return spec

    def schema(
        self, operation_id: str, context: OperationContext, *, output: bool = False
    ) -> JSONObject:
        """Return the contract of one operation in its wire form, with the schema of its output only on request.

        Raises:
            CallError: As `spec`.
        """
        contract = self.spec(operation_id, context).to_wire()
        if not output:
            contract.pop("outputSchema", None)
        return contract

    async def call(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation as the caller.

        Raises:
            CallError: As `execute`.
        """
        if self._admit is not None:
            self._admit(operation_id, context.identity)
        return await self._registry.execute(operation_id, input, _as_caller(context))

    async def batch(
        self,
        calls: Sequence[BatchCall],
        context: OperationContext,
        *,
        concurrency: int = 8,
        describe: Callable[[CallError], JSONObject] = CallError.to_wire,
    ) -> list[JSONObject]:
        """Run several, each on its own: `{"envelope": ...}` or `{"error": ...}` for each, in order.

        Args:
            calls: What to run.
            context: Who asks.
            concurrency: How many run at a time.
            describe: Returns the public form of an error.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` for more than `MAX_BATCH` calls; then none is run.
        """
        if len(calls) > MAX_BATCH:
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"a batch has at most {MAX_BATCH} calls, not {len(calls)}",
            )
        slots = asyncio.Semaphore(max(concurrency, 1))

        async def one(call: BatchCall) -> JSONObject:
            async with slots:
                try:
                    envelope = await self.call(call.operation, call.input, context)
                    return {"envelope": to_json(envelope.to_wire())}
                except Exception as error:  # noqa: BLE001 - one bad call must not cost the others
                    return {"error": describe(map_error(error))}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
        return [task.result() for task in tasks]

    async def _current(self) -> Ranking:
        """Return the index of the registry as it is now; a large one is built in a thread."""
        async with self._indexing:
            if self._revision != self._registry.revision:
                revision, specs = self._registry.revision, self._registry.specs()
                self._ranking = await asyncio.to_thread(Ranking, specs)
                self._revision = revision
            return self._ranking


def _as_caller(context: OperationContext) -> OperationContext:
    """Return a context for one call on a caller's behalf: its own id, and the caller's rights."""
    return OperationContext(
        parent_request_id=context.request_id,
        identity=context.identity,
        trusted=context.trusted,
        metadata=context.metadata,
        deadline=context.deadline,
        channel=context.channel,
        lenient=context.lenient,
        whole=context.whole,
    )
