"""What a journal stores of a run: values that pass between the journal, the executor and the attempts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from operations.base.types import JSONObject
from operations.contract.grant import Block, GrantOrigin


class Caller(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The caller of a run: never a token, never a signature."""

    id: str | None = None
    issuer: str | None = None
    scopes: tuple[str, ...] = ()
    resources: dict[str, tuple[str, ...]] | None = None
    expires_at: float | None = None
    acting: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    keys: tuple[str, ...] = ()
    origin: GrantOrigin | None = None

    is_granted: bool = False
    """Whether there is a grant, also one without blocks."""

    is_issued: bool = False
    """Whether the grant has an issuer, which knows the revoked ones."""

    authority: tuple[str, str] | None = None
    """The operation that started the run on its own authority, and the called operation."""

    trusted: bool = False
    lenient: bool = False
    whole: bool = False
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that is to be stored."""

    id: str
    operation: str
    digest: str
    input: bytes
    caller: bytes
    owner: str
    agent: str
    account: str | None
    key: str | None
    delay: int
    """Milliseconds until it begins."""

    at: int | None
    priority: int
    lane: str
    lane_limit: int | None
    retention: int | None
    begun: bytes | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that an executor has claimed."""

    id: str
    operation: str
    digest: str
    input: bytes
    caller: bytes
    fence: int
    number: int
    crashes: int
    cancelled_by: str | None
    created: int
    revision: int
    cause: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """A recorded step."""

    name: str
    parent: str
    operation: str
    kind: str
    fence: int
    begun: int
    ended: int | None
    result: bytes | None
    error: bytes | None

    @property
    def is_recorded(self) -> bool:
        """Whether its outcome is known."""
        return self.ended is not None


@dataclass(frozen=True, slots=True)
class Question:
    """Something that a run waits for."""

    key: str
    kind: str
    request: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """What a question has brought."""

    answer: bytes | None

    left: int | None
    """Milliseconds until it ends without an answer; None for no end."""


@dataclass(slots=True)
class End:
    """How a run ends."""

    status: str
    result: bytes | None = None
    error: JSONObject | None = None
    pages: Sequence[bytes] = ()
    """The pages of the result; the first one is the result itself."""

    retention: dict[str, int] = field(default_factory=dict[str, int])


ROOT: Final = "."
"""The name of the step that is the run itself."""

ONCE: Final = "once"
"""A call that must not run twice: its marker is committed before it begins."""

KEYED: Final = "keyed"
"""A call whose service runs requests with the same key once: it has a marker, and is sent again with its key."""

ABANDONED: Final = "abandoned"
"""A call that must not run twice, and that its handler has cancelled: whether it has run is not known."""

MARKED: Final = (ONCE, KEYED, ABANDONED)
"""The calls whose marker is committed before they begin."""

MUTATION: Final = "mutation"
"""An idempotent mutation: it has no marker, but a new one waits until the recorded ones were asked for again."""

QUERY: Final = "query"
"""A call or a function that may run any number of times."""

DURABLE: Final = "durable"
"""An operation whose own nested calls are steps."""

APPROVAL: Final = "approval"
"""A request for approval that has ended, with who has answered it."""

PAGE: Final = "page"
"""A page of the result of a completed run."""

SLEEP: Final = "sleep"
"""The recorded end of a sleep."""
