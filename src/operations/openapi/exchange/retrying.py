"""What may be sent again, and when."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from secrets import SystemRandom

from operations.errors import CallError, ErrorCode

REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PUT", "DELETE"})
"""Methods whose requests may be sent again (RFC 9110, 9.2.2)."""

_RETRIED = frozenset({429, 502, 503, 504})
_FIRST_PAUSE = 0.2
_RANDOM = SystemRandom()


def pause_before(error: CallError, attempt: int) -> float | None:
    """Seconds to wait before trying again; None if trying again is pointless."""
    jitter = _RANDOM.uniform(0, _FIRST_PAUSE * 2**attempt)
    if error.code == ErrorCode.UNAVAILABLE:
        return jitter
    details = error.details
    if not isinstance(details, dict) or details.get("statusCode") not in _RETRIED:  # pyright: ignore[reportUnknownMemberType]
        return None
    after = details["headers"].get("retry-after", "")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return jitter + retry_after(str(after))  # pyright: ignore[reportUnknownArgumentType]


def retry_after(text: str) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 where it asks for none."""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
