"""Search, describe and call any operation of a registry: the fixed gateway of HTTP, MCP and the command line.

Rule 1: everything runs as the caller. Operations that it may not call are neither found nor described.
"""

import asyncio
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import msgspec

from operations._json import to_json
from operations._words import enforce_lists
from operations.access import Identity, check_access
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, map_error, operation_not_found
from operations.registry import OperationRegistry
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

_WORDS, _WORD_LENGTH = 16, 40
"""How much of a query counts: each word costs a look at the whole vocabulary."""

MAX_BATCH: Final = 100
"""Calls in one batch."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"\d+|[^\W\d_]+")

_NAME, _TAG, _TITLE, _DESCRIPTION = 8.0, 5.0, 4.0, 1.0
"""What a word counts for where it stands."""

_PREFIX = 0.4
"""What the beginning of a word counts for, against the whole word."""


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


def words_of(text: str) -> list[str]:
    """The words in a text; `listOpenTasks`, `list_open_tasks` and `list open tasks` have the same."""
    return [word.lower() for word in _WORD.findall(_HUMP.sub(" ", text))]


def may_call(spec: OperationSpec, context: OperationContext) -> bool:
    """Whether a caller may call, and so may see, an operation."""
    return context.trusted or check_access(spec.access_control, context.identity)


def visible_specs(
    registry: OperationRegistry, context: OperationContext
) -> Iterator[OperationSpec]:
    """What a caller may call, in the order of registration."""
    return (spec for spec in registry.specs() if may_call(spec, context))


class Gateway:
    """Search, describe and call the operations of a registry as one caller.

    Args:
        registry: The operations.
        admit: Raises unless the identity may know of an operation; called before each call.
        max_query: Characters of a search query.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        admit: Callable[[str, Identity | None], object] | None = None,
        max_query: int = 1_000,
    ) -> None:
        self._registry = registry
        self._admit = admit
        self._max_query = max_query
        self._index = _Index([])
        self._revision = -1

    def search(
        self,
        query: str,
        context: OperationContext,
        *,
        limit: int = 20,
        namespace: str | None = None,
        tags: Collection[str] = (),
        type: OperationType | None = None,
    ) -> list[Found]:
        """The operations that match best, best first; without a query, in the order of their ids.

        Args:
            query: Words that stand in an operation's name, title, tags or description; their beginnings count too.
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
        if len(query) > self._max_query:
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                f"A search query has at most {self._max_query} characters, not {len(query)}",
            )

        def wanted(spec: OperationSpec) -> bool:
            return (
                (namespace is None or spec.namespace == namespace)
                and (type is None or spec.type is type)
                and all(tag in spec.tags for tag in tags)
                and may_call(spec, context)
            )

        found: list[Found] = []
        for spec, score in self._current().ranked(words_of(query)):
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

    def schema(self, operation_id: str, context: OperationContext) -> OperationSpec:
        """The contract of one operation.

        Raises:
            CallError: `OPERATION_NOT_FOUND`, also for what exists but is not the caller's to see.
        """
        spec = self._registry.get_spec(operation_id)
        if spec is None or not may_call(spec, context):
            raise operation_not_found(operation_id)
        return spec

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
            describe: What the caller is told of an error; a door to outsiders says less than all.

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

    def _current(self) -> "_Index":
        if self._revision != self._registry.revision:
            self._revision = self._registry.revision
            self._index = _Index(self._registry.specs())
        return self._index


def _as_caller(context: OperationContext) -> OperationContext:
    """A context for one call on a caller's behalf: its own id, the caller's rights, and no more."""
    return OperationContext(
        parent_request_id=context.request_id,
        identity=context.identity,
        trusted=context.trusted,
        metadata=context.metadata,
        deadline=context.deadline,
        door=context.door,
    )


class _Index:
    """Which operations a word stands in, and how much it counts there."""

    def __init__(self, specs: Sequence[OperationSpec]) -> None:
        self._specs = sorted(specs, key=lambda spec: spec.id)
        self._postings: dict[str, dict[int, float]] = {}
        for number, spec in enumerate(self._specs):
            for text, weight in (
                (f"{spec.namespace} {spec.name}", _NAME),
                (" ".join(spec.tags), _TAG),
                (spec.title or "", _TITLE),
                (spec.description, _DESCRIPTION),
            ):
                for word in set(words_of(text)):
                    posting = self._postings.setdefault(word, {})
                    posting[number] = max(posting.get(number, 0.0), weight)

    def ranked(self, words: Sequence[str]) -> Iterator[tuple[OperationSpec, float]]:
        """Every operation that has all the words, or at least the most of them, best first."""
        words = [word[:_WORD_LENGTH] for word in dict.fromkeys(words)][:_WORDS]
        if not words:
            yield from ((spec, 0.0) for spec in self._specs)
            return
        scores: dict[int, float] = {}
        for word in words:
            for number, score in self._matches(word).items():
                scores[number] = scores.get(number, 0.0) + score
        # Shorter ids first among equals: the plain operation before its special cases.
        order = sorted(
            scores, key=lambda n: (-scores[n], len(self._specs[n].id), self._specs[n].id)
        )
        yield from ((self._specs[number], scores[number]) for number in order)

    def _matches(self, word: str) -> dict[int, float]:
        """Where a word stands, whole or as a beginning; rare words count for more."""
        matches: dict[int, float] = {}
        for known, posting in self._postings.items():
            if known == word:
                share = 1.0
            elif known.startswith(word) or (
                len(word) > 3 and word.startswith(known) and len(known) > 2
            ):
                share = _PREFIX
            else:
                continue
            rarity = math.log(1 + len(self._specs) / len(posting))
            for number, weight in posting.items():
                matches[number] = max(matches.get(number, 0.0), share * weight * rarity)
        return matches
