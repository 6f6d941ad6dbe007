"""What can be set for an operation."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from operations.base.text import enforce_durations, enforce_lists
from operations.base.types import Count, Seconds
from operations.contract.specs import (
    ApprovalRule,
    Descriptions,
    InputPolicy,
    OutputPolicy,
    enforce_descriptions,
    enforce_policy,
)
from operations.tools.pages import MIN_PAGE


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

    descriptions: Descriptions | None = None
    """The descriptions in lists of MCP tools: `full`, or `short` for the first sentences."""

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
        enforce_durations(timeout=self.timeout, cache=self.cache)
        enforce_policy(self.output, self.input)
        enforce_descriptions(self.descriptions)
        if self.rename is not None and not all(self.rename.partition(".")):
            raise ValueError("rename must be a whole id, namespace.name")
        for pointer in self.select or ():
            if not pointer.startswith("/"):
                raise ValueError("select must contain JSON pointers, which begin with /")
        if self.authority is False:
            raise ValueError("authority can only be true: no setting removes it from an operation")
        if self.max_bytes is not None and self.max_bytes < MIN_PAGE:
            raise ValueError(f"max_bytes must be at least {MIN_PAGE}")
