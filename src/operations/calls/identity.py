"""Who is behind a request.

    a credential      what the resolver says of it; the event can claim what it likes
    no credential     who signed in on the connection, where there is such a thing
    a trusted target  what the event itself says

Rule 1: fail closed. A credential that is refused, that nobody can judge, or whose check breaks, is a refusal
        of the call, never a call without identity.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from operations.access import Identity
from operations.calls.events import RequestPayload
from operations.errors import CallError, ErrorCode
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

CredentialResolver: TypeAlias = Callable[[str], Identity | Awaitable[Identity | None] | None]
"""Who a token belongs to; None if to nobody."""


async def identify(credential: str, resolve: CredentialResolver | None) -> Identity:
    """Who a credential belongs to.

    Raises:
        CallError: `ACCESS_DENIED` if it does not hold; or what the resolver raised.
    """
    found: Any = None
    if resolve is None:
        logger.warning("a credential was refused: give serve_calls(resolve=...) to judge it")
    else:
        try:
            judged = resolve(credential)
            found = await judged if inspect.isawaitable(judged) else judged
        except CallError:
            # The resolver's own words: it is asked too often, say.
            raise
        except Exception:
            logger.exception("a credential could not be judged")
    if found is not None and not isinstance(found, Identity):
        kind = type(found).__name__
        logger.error("a credential was refused: resolve gave a %s and not an Identity", kind)
    if not isinstance(found, Identity):
        raise CallError(ErrorCode.ACCESS_DENIED, "the credential is not valid here")
    return found


def claimed_identity(request: RequestPayload, target: EventTarget) -> Identity | None:
    """Who is behind a request that brings no credential."""
    if target.trusted and request.identity is not None:
        return request.identity
    return target.identity
