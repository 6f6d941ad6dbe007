"""Search, describe and call any operation of a registry: the fixed gateway of HTTP, MCP and the command line.

Rule 1: everything runs as the caller. Operations that it may not call are neither found nor described.
Rule 2: a search ranks operations by how well they match a few keywords, by BM25F with stemming, synonyms of verbs and a
        preference for titles.
"""

import asyncio
import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from operations.base.errors import CallError, ErrorCode, SchemaError, forward_error, unusable_schema
from operations.base.json.values import object_of
from operations.base.text import enforce_lists
from operations.base.types import JSONObject
from operations.contract.context import OperationContext, may_call
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import OperationSpec, OperationType, describable, is_for_models
from operations.registry.registry import OperationRegistry

# ------------------------------------------------------------ ranking

_MAX_WORDS: Final = 16
"""The largest number of words of a query that are used."""

_MAX_WORD: Final = 40
"""The largest number of characters of a word that are used."""

_MAX_TEXT: Final = 4_000
"""Characters of a description that are indexed."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"\d+|[^\W\d_]+")
_PATH_PARAMETER = re.compile(r"\{[^}]*\}")


_WEIGHTS: Final = {
    "name": 3.0,
    "title": 3.0,
    "path": 1.5,
    "tags": 1.0,
    "parameters": 0.4,
    "description": 0.4,
}
"""The weight of each field of an operation."""

_LENGTH: Final = 0.6
"""The influence of the length of a field (`b` of BM25)."""

_SATURATION: Final = 1.5
"""Limits the effect of repeated words (`k1` of BM25)."""

_SYNONYM: Final = 0.8
"""The weight of a synonym, relative to the word itself."""

_PREFIX: Final = 0.4
"""The weight of a word that only begins with the word of the query."""

_UNCOVERED: Final = 0.4
"""The factor for the score of an operation if no word of its title and name is in the query."""

_CANDIDATES: Final = 200
"""The number of best matches that are also compared by title and name."""

_SYNONYMS: Final = (
    "create add new make open insert register post",
    "delete remove erase drop destroy unset",
    "list all every show enumerate",
    "get read show fetch retrieve view load download see",
    "update edit change modify set patch replace write save",
    "update close reopen archive rename move",
    "search find lookup query",
    "run trigger start dispatch execute launch",
    "cancel stop abort halt",
    "send post submit publish",
    "upload attach send put",
    "write store put upsert",
    "authenticated i me my mine current self",
    "repository repo",
    "organization org organisation",
    "invite invitation",
    "user person member account",
)


def words_of(text: str) -> list[str]:
    """Return the words of a text; the same for `listOpenTasks`, `list_open_tasks` and `list open tasks`."""
    return [word[:_MAX_WORD].lower() for word in _WORD.findall(_HUMP.sub(" ", text))]


@lru_cache(maxsize=16_384)
def stem(word: str) -> str:
    """Return the stem of an English word: `issu` for `issues`, `merg` for `merged`."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "ls":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def _stems(text: str) -> list[str]:
    return [stem(word) for word in words_of(text)]


def _synonyms_of() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in _SYNONYMS:
        group = set(_stems(line))
        for word in group:
            found.setdefault(word, set()).update(group - {word})
    return found


_SYNONYMS_OF: Final = _synonyms_of()
_STOP_STEMS: Final = frozenset(
    _stems(
        "a am an and any are as at be by can do for from how if in into is it its of on or some someone that the"
        " their them these this those to two was what where which who with you your"
    )
)


class Ranking:
    """An index of operations by the words that describe them."""

    def __init__(self, specs: Sequence[OperationSpec]) -> None:
        self._specs = sorted(specs, key=lambda spec: spec.id)
        counts = [
            {field: Counter(_stems(text)) for field, text in _texts(spec).items()}
            for spec in self._specs
        ]
        averages = {
            field: sum(fields[field].total() for fields in counts) / max(len(counts), 1)
            for field in _WEIGHTS
        }
        self._postings: dict[str, dict[int, float]] = {}
        for number, fields in enumerate(counts):
            for field, words in fields.items():
                length = words.total() / (averages[field] or 1)
                factor = _WEIGHTS[field] / (1 - _LENGTH + _LENGTH * length)
                for word, count in words.items():
                    posting = self._postings.setdefault(word, {})
                    posting[number] = posting.get(number, 0.0) + factor * count
        self._rarity = {
            word: math.log(1 + (len(counts) - len(posting) + 0.5) / (len(posting) + 0.5))
            for word, posting in self._postings.items()
        }
        self._headings = [
            [fields[field].keys() - _STOP_STEMS for field in ("title", "name")] for fields in counts
        ]

    def ranked(self, query: str) -> Iterator[tuple[OperationSpec, float]]:
        """Yield the operations that match a query with their scores, best first; without a query, all, by id."""
        ideas = self._ideas(words_of(query)[:_MAX_WORDS])
        if not ideas:
            yield from ((spec, 0.0) for spec in self._specs)
            return
        scores: dict[int, float] = {}
        for idea in ideas:
            for number, score in self._matches(idea).items():
                scores[number] = scores.get(number, 0.0) + score
        best = heapq.nlargest(_CANDIDATES, scores, key=scores.__getitem__)
        known = {word: share for idea in ideas for word, share in idea.items()}
        chosen = {number: scores.pop(number) * self._fit(number, known) for number in best}
        for part, factor in ((chosen, 1.0), (scores, _UNCOVERED)):
            # The general operation comes before its special cases.
            for number in sorted(part, key=lambda n: (-round(part[n], 6), len(self._specs[n].id))):
                yield self._specs[number], part[number] * factor

    def _ideas(self, given: Sequence[str]) -> list[dict[str, float]]:
        """Return the concepts of a query: for each, its word and synonyms with their weights."""
        stems = [stem(word) for word in given]
        ideas: list[dict[str, float]] = []
        for word in [word for word in stems if word not in _STOP_STEMS] or stems:
            same = next((idea for idea in ideas if word in idea), None)
            if same is not None:
                same[word] = 1.0
                continue
            idea = dict.fromkeys(_SYNONYMS_OF.get(word, ()), _SYNONYM)
            if word not in self._postings:
                idea |= {known: _PREFIX for known in self._postings if known.startswith(word)}
            ideas.append(idea | {word: 1.0})
        return ideas

    def _matches(self, idea: Mapping[str, float]) -> dict[int, float]:
        """Return the score of each operation for the words of one concept."""
        found: dict[int, float] = {}
        present = [word for word in idea if word in self._postings]
        least = min((self._rarity[word] for word in present), default=0.0)
        for word in present:
            share = idea[word]
            factor = self._rarity[word] if share == 1 else share * least
            for number, frequency in self._postings[word].items():
                score = factor * frequency / (_SATURATION + frequency)
                if score > found.get(number, 0.0):
                    found[number] = score
        return found

    def _fit(self, number: int, known: Mapping[str, float]) -> float:
        """Return the factor for the score of an operation, by the part of its title or name that the query covers."""
        best = 0.0
        for heading in self._headings[number]:
            whole = sum(self._rarity[word] for word in heading)
            covered = sum(self._rarity[word] * known[word] for word in heading if word in known)
            best = max(best, covered / (whole or 1))
        return _UNCOVERED + (1 - _UNCOVERED) * best


def _texts(spec: OperationSpec) -> dict[str, str]:
    """Return the indexed texts of an operation by field."""
    document = spec.input_schema.document
    properties = object_of(document).get("properties")
    return {
        "name": f"{spec.namespace} {spec.name}",
        "title": spec.title or "",
        "path": _PATH_PARAMETER.sub(" ", str(spec.meta.get("path", ""))),
        "tags": " ".join(spec.tags),
        "parameters": " ".join(object_of(properties)),
        "description": spec.description[:_MAX_TEXT],
    }


MAX_BATCH: Final = 100
"""The largest number of calls in a batch."""

MAX_RESULTS: Final = 200
"""The largest number of results of a search."""

_OperationId: TypeAlias = Annotated[
    str, Meta(description="The id of the operation, as search returns it.")
]


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a gateway path or tool."""


class Found(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An operation that a search found."""

    id: str
    type: OperationType
    title: str | None
    description: str
    tags: tuple[str, ...]
    score: float


class Search(_Request, frozen=True, kw_only=True):
    """A search; without a query, all operations."""

    query: Annotated[str, Meta(description="The search words; empty lists all operations.")] = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_RESULTS)] = 20
    namespace: str | None = None
    tags: Annotated[list[str], Meta(max_length=100)] = []
    type: OperationType | None = None


class SchemaRequest(_Request, frozen=True, kw_only=True):
    """The contract of one operation."""

    operation: _OperationId
    output: Annotated[
        bool, Meta(description="Whether to include outputSchema, which is often large.")
    ] = False


class OperationCall(_Request, frozen=True, kw_only=True):
    """One operation and its input."""

    operation: _OperationId
    input: Annotated[
        Any, Meta(description="The input of the operation, which must match its inputSchema.")
    ] = None


class Batch(_Request, frozen=True, kw_only=True):
    """Several calls, at most `MAX_BATCH`."""

    calls: list[OperationCall]


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The operations that a search found, best first."""

    operations: list[Found]


def visible_specs(
    registry: OperationRegistry, context: OperationContext
) -> Iterator[OperationSpec]:
    """Return the operations that a caller may call, in the order of registration."""
    return (spec for spec in registry.specs() if may_call(spec, context))


def may_find(spec: OperationSpec, context: OperationContext) -> bool:
    """Return whether a caller may call an operation, and models may see it."""
    return may_call(spec, context) and is_for_models(spec)


class Gateway:
    """Search, describe and call the operations of a registry as one caller.

    Args:
        registry: The operations.
        shows: Returns whether a caller finds an operation with a search.
        describes: Returns whether a caller that names an operation sees its contract.

    Attributes:
        max_query: The largest number of characters of a search query.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        shows: Callable[[OperationSpec, OperationContext], bool] = may_find,
        describes: Callable[[OperationSpec, OperationContext], bool] = may_call,
    ) -> None:
        self._registry = registry
        self._shows, self._describes = shows, describes
        self.max_query = 1_000
        self._specs: Sequence[OperationSpec] = ()
        self._ranking: Ranking | None = None
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
            query: A few keywords, such as `close an issue`; prefixes of words match too.
            context: The context of the caller.
            limit: The largest number of results.
            namespace: Return only operations in this namespace.
            tags: Return only operations with all of these tags.
            type: Return only operations of this type.

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
        for spec, score in await self._ranked(query):
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
            CallError: `OPERATION_NOT_FOUND`, also if the caller may not call the operation.
        """
        spec = self._registry.get_spec(operation_id)
        if spec is None or not self._describes(spec, context):
            raise self._registry.not_found(operation_id, context)
        return spec

    def schema(
        self, operation_id: str, context: OperationContext, *, output: bool = False
    ) -> JSONObject:
        """Return the contract of one operation in its wire form, with the schema of its output only on request.

        Raises:
            CallError: As `spec`, and `EXECUTION_ERROR` if a schema of the operation cannot be built.
        """
        spec = self.spec(operation_id, context)
        try:
            contract = spec.to_wire()
        except SchemaError as error:
            raise unusable_schema(operation_id, error) from error
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
        try:
            return await self._registry.execute(operation_id, input, _as_caller(context))
        except CallError as error:
            forward_error(error)
            raise

    async def _ranked(self, query: str) -> Iterator[tuple[OperationSpec, float]]:
        """Return the operations that match a query with their scores; list and index many operations in a thread."""
        async with self._indexing:
            if self._revision != self._registry.revision:
                revision, specs = self._registry.revision, self._registry.specs()
                self._specs = await asyncio.to_thread(
                    lambda: sorted(describable(specs), key=lambda spec: spec.id)
                )
                self._revision, self._ranking = revision, None
            if not words_of(query):
                # An index of 1,000 operations takes longer than the whole list.
                return ((spec, 0.0) for spec in self._specs)
            if self._ranking is None:
                self._ranking = await asyncio.to_thread(Ranking, self._specs)
            return self._ranking.ranked(query)


def _as_caller(context: OperationContext) -> OperationContext:
    """Return a context for one call on behalf of the caller: a new request id with the caller's access."""
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
