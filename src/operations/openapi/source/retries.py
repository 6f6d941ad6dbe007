"""Decide whether and when the request of a call is sent again.

Rule 1: a request that the server may have processed is retried only if its method is repeatable, and never beyond the
        call's deadline.
Rule 2: a request that the server rejected is retried with any method: after a 401 with a new token, after a 429
        with `Retry-After`, and after a 503 if the operator allows it (`retry_refused`).
"""

from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import TypeAlias

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import object_of
from operations.base.retry import Backoff, CircuitOpenError, retry_after
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.io.http.client import REPEATABLE, Draft, HTTPResponse
from operations.openapi.source.config import HTTPServiceConfig
from operations.openapi.source.security import NOTHING, RequestCredentials

_FIRST_PAUSE = 0.2
OpenResponse: TypeAlias = AbstractAsyncContextManager[HTTPResponse]


class HTTPCall(msgspec.Struct):
    """One call with all its attempts."""

    config: HTTPServiceConfig
    draft: Draft
    context: OperationContext

    end: float
    """The deadline, by the monotonic clock."""

    closings: int
    """The client's `closings` when the call began."""

    is_repeatable: bool
    """Whether the body and the target file allow a second attempt."""

    repeats_at_once: bool
    """Whether the request is repeated without a pause if it loses its connection: only the first attempt."""

    signature: RequestCredentials = NOTHING
    """The signature of the last attempt."""

    retries: int = 0
    """The number of retries so far, not counting the one with a new token."""

    was_lost: bool = False
    """Whether the connection of the last attempt was lost."""

    has_new_token: bool = False
    """Whether a rejected token was replaced."""

    backoff: Backoff | None = None
    """The pauses between attempts; None until the first has failed."""

    opened: OpenResponse | None = None
    """The open response of the last request."""

    @property
    def temporary_statuses(self) -> frozenset[int]:
        """The statuses after which the request may be sent again: it is repeatable, or was not processed."""
        if self.draft.method in REPEATABLE:
            return frozenset({429, 502, 503, 504})
        return frozenset({429, 503}) if self.config.retry_refused else frozenset({429})

    def pause_after(self, error: CallError, closings: int) -> float | None:
        """Return the seconds to wait before a retry, or None if the request must not be retried.

        Args:
            error: The reason why the last attempt failed.
            closings: How often the client has been closed now.
        """
        is_over = monotonic() >= self.end or closings != self.closings
        if is_over or not self.is_repeatable or isinstance(error, CircuitOpenError):
            return None
        details = object_of(error.details)
        status, headers = details.get("statusCode"), object_of(details.get("headers"))
        if status == 401 and self.signature.tokens and not self.has_new_token:
            self.has_new_token = True
            return 0
        if self.retries >= self.config.retries or not self._may_repeat(error, status, headers):
            return None
        self.was_lost = is_lost(error)
        is_at_once, self.repeats_at_once = self.was_lost and self.repeats_at_once, False
        self.retries += 1
        if is_at_once:
            return 0
        self.backoff = self.backoff or Backoff(_FIRST_PAUSE)
        pause = self.backoff.pause() + retry_after(headers)
        return pause if monotonic() + pause < self.end else None

    def _may_repeat(self, error: CallError, status: object, headers: JSONObject) -> bool:
        is_repeatable = self.draft.method in REPEATABLE
        if status is None:
            return is_repeatable and error.code == ErrorCode.UNAVAILABLE
        is_certain = status != 429 or is_repeatable or bool(headers.get("retry-after"))
        return is_certain and status in self.temporary_statuses


def is_lost(error: BaseException) -> bool:
    """Return whether a connection was lost, which the server may have closed while it was unused."""
    return (
        isinstance(error, CallError) and error.code == ErrorCode.UNAVAILABLE and error.begun is None
    )
