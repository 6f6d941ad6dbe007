"""The tree of the calls of a registry."""

import logging
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from operations.base.files import LineFile
from operations.base.text import counted
from operations.base.types import JSONObject
from operations.contract.events import (
    CallAbandoned,
    CallFinished,
    CallStarted,
    CallYielded,
    add_counts,
)
from operations.recorder.kinds import SinkPlace
from operations.recorder.recorder import Begin, Digest, End, Note

logger = logging.getLogger("operations.recorder.graph")

_PENDING = "pending"
_SUCCESS = "success"
_MAX_BYTES = 4 << 20
"""The size of the file for `operations trace`."""


class CallRecord(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True):
    """One call."""

    request_id: str
    operation_id: str
    parent_request_id: str | None = None
    identity_id: str | None = None

    issuer: str | None = None
    """The issuer of the token that named the caller."""

    acting: tuple[str, ...] = ()
    """The parties that acted for the caller, in the order of delegation."""

    grants: tuple[str, ...] = ()
    """The blocks of the grant that the caller presented."""

    authority: str | None = None
    """The operation on whose authority it ran; None if it ran as the caller."""

    started_at: int
    """Milliseconds since the epoch."""

    duration: float | None = None
    """Seconds; None while it runs."""

    outcome: str = _PENDING
    """`pending`, `success`, or the code of the error."""

    items: int = 0
    """The number of items of a subscription."""

    changes: dict[str, int] = {}
    """How many values of its results normalisation changed, by kind."""

    abandoned: bool = False
    """Its caller left, but the handler could not be stopped."""


class CallGraph:
    """Records the calls of a registry: `registry.record(CallGraph())`.

    Args:
        path: A file to which every call that ends is added, one JSON object per line. After log rotation has moved or
            removed it, a new file begins.
        limit: How many calls are kept; the oldest are dropped first.
        max_bytes: A larger file is renamed to `previous_file(path)`, and a new one begins. Other processes that write
            to it notice.
    """

    wants, strict = frozenset({"started", "yielded", "finished", "abandoned"}), False

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        limit: int = 10_000,
        max_bytes: float = math.inf,
    ) -> None:
        self._records: OrderedDict[str, CallRecord] = OrderedDict()
        self._limit = limit
        self._file = None if path is None else LineFile(path, "calls", max_bytes=max_bytes)

    def open(self) -> None:
        """Do nothing: a file is open already."""

    def begin(self, call: Begin, digest: Digest | None) -> None:
        """Record that a call arrived."""
        if isinstance(call, CallStarted):
            self._records[call.request_id] = CallRecord(
                request_id=call.request_id,
                operation_id=call.operation_id,
                parent_request_id=call.parent_request_id,
                identity_id=call.identity_id,
                issuer=call.issuer,
                acting=call.acting,
                grants=call.grants,
                authority=call.authority,
                started_at=call.timestamp,
            )
            if len(self._records) > self._limit:
                self._records.popitem(last=False)

    def note(self, event: Note) -> None:
        """Record an item, or that the handler of a call still runs."""
        if isinstance(event, CallYielded):
            record = self._records.get(event.request_id)
            if record is not None:
                record.items += 1
                add_counts(record.changes, event.changes or {})
        elif isinstance(event, CallAbandoned):
            record = self._records.get(event.request_id)
            if record is not None:
                record.abandoned = True

    def end(self, call: End) -> None:
        """Record that a call ended."""
        record = self._records.get(call.request_id)
        if record is not None and isinstance(call, CallFinished):
            record.duration = call.duration
            record.outcome = call.code or _SUCCESS
            add_counts(record.changes, call.changes or {})
            if self._file is not None:
                self._file.write(msgspec.json.encode(record))

    def check(self) -> bool:
        """Return True: a line that cannot be written is logged."""
        return True

    def __iter__(self) -> Iterator[CallRecord]:
        return iter(tuple(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, request_id: str) -> CallRecord:
        return self._records[request_id]

    def children(self, request_id: str) -> list[CallRecord]:
        """Return the calls made as part of this one."""
        return [record for record in self if record.parent_request_id == request_id]

    def tree(self) -> str:
        """Return all recorded calls as a tree of text."""
        return render_tree(self)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_graph(paths: Iterable[str | Path]) -> list[CallRecord]:
    """Return the calls in files that `CallGraph` wrote, by the time they started; a line that is cut off is skipped."""
    records: list[CallRecord] = []
    for path in paths:
        for line in Path(path).read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                records.append(msgspec.json.decode(line, type=CallRecord))
    return sorted(records, key=lambda record: record.started_at)


_MAX_LEVELS = 30
"""The largest depth of a tree of calls, which is printed as JSON with at most 64 levels. Deeper calls are shown on the
last level."""


class Span(NamedTuple):
    """One call and its nested calls."""

    record: CallRecord
    calls: list["Span"]

    @property
    def has_failed(self) -> bool:
        """Whether the call or a nested call failed."""
        return self.record.outcome != _SUCCESS or any(call.has_failed for call in self.calls)

    def has_request(self, request_id: str) -> bool:
        """Return whether this is the id of the call, of a nested call, or of the call in another process above it."""
        return request_id in (self.record.request_id, self.record.parent_request_id) or any(
            call.has_request(request_id) for call in self.calls
        )

    def lines(self, *, ids: bool = False) -> Iterator[str]:
        """Yield the call and its nested calls as the lines of a tree, optionally with their ids and grants."""
        yield _line(self.record, ids=ids)
        for number, call in enumerate(self.calls, 1):
            first, *rest = call.lines(ids=ids)
            is_last = number == len(self.calls)
            yield ("└─ " if is_last else "├─ ") + first
            yield from (("   " if is_last else "│  ") + line for line in rest)

    def to_json(self) -> JSONObject:
        """Return the span as JSON, for scripts."""
        record: JSONObject = msgspec.to_builtins(self.record)
        return {**record, "calls": [call.to_json() for call in self.calls]}


def spans(records: Iterable[CallRecord]) -> list[Span]:
    """Return the root calls with their nested calls, in the order they started.

    Other processes name the parents of their calls. Of calls that name each other, one counts as a root, so that no
    caller can hide its calls.
    """
    ordered = sorted(records, key=lambda record: record.started_at)
    by_id = {record.request_id: Span(record, []) for record in ordered}
    nested: defaultdict[str | None, list[Span]] = defaultdict(list)
    for span in by_id.values():
        nested[span.record.parent_request_id].append(span)
    roots: list[Span] = []
    for span in list(by_id.values()):
        if span.record.request_id not in by_id:
            continue
        root, passed = span, set[str | None]()
        while (parent_id := root.record.parent_request_id) in by_id and parent_id not in passed:
            passed.add(parent_id)
            root = by_id[parent_id]
        roots.append(by_id.pop(root.record.request_id))
        waiting = deque([(root, root, 1)])
        while waiting:
            # The calls of the last level go to the same place as the call itself.
            above, place, level = waiting.popleft()
            for call in nested[above.record.request_id]:
                if by_id.pop(call.record.request_id, None) is not None:
                    place.calls.append(call)
                    waiting.append((call, call if level + 1 < _MAX_LEVELS else place, level + 1))
    return sorted(roots, key=lambda root: root.record.started_at)


def render_tree(records: Iterable[CallRecord]) -> str:
    """Return calls as a tree: each below the call it was part of, in the order they started."""
    return "\n".join(line for root in spans(records) for line in root.lines())


def _line(record: CallRecord, *, ids: bool = False) -> str:
    parts: list[Any] = [record.operation_id, record.outcome]
    if record.duration is not None:
        parts.append(f"{record.duration * 1000:.1f} ms")
    if record.items:
        parts.append(counted(record.items, "item"))
    if record.abandoned:
        parts.append("abandoned")
    if ids:
        parts += [f"request {record.request_id}", *(f"grant {block}" for block in record.grants)]
        if record.authority is not None:
            parts.append(f"on the authority of {record.authority}")
    return "  ".join(parts)


# ------------------------------------------------------------ the kind of sink


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """The data for `operations trace`: start and end of calls, never their input or results.

    Attributes:
        enabled: Set to false to record no data.
        file: The path of the data, relative to this file; by default in the user's state folder.
    """

    enabled: bool = True
    file: str | None = None

    def path(self, place: SinkPlace) -> Path:
        """Return the path of the data."""
        return place.state.with_suffix(".jsonl") if self.file is None else place.resolve(self.file)


class TraceKind:
    """The data for `operations trace`, as a kind of sink."""

    about = "The data for `operations trace`."
    entry = TraceEntry
    is_default = True

    def open(self, entry: TraceEntry, place: SinkPlace) -> CallGraph | None:
        """Open the file. If it cannot be written, this is logged, so that calls still work."""
        if not entry.enabled:
            return None
        path = entry.path(place)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return CallGraph(path, max_bytes=_MAX_BYTES)
        except OSError as error:
            reason = f"{error.filename or path} cannot be written: {error.strerror}"
            message = "operations trace will not show calls: %s; set record.trace.file"
            logger.log(place.level, message, reason)
            return None


KIND = TraceKind()
