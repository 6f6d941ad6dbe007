"""Every case of the shared event-stream table, under every way to cut it."""

import base64
import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operations.base.errors import CallError, ErrorCode
from operations.io.lines import JSONLinesDecoder
from operations.io.sse import ALIVE, EventStreamDecoder, ServerSentEvent, comment, encoded_event

TABLE = Path(__file__).parents[3] / "shared" / "sse" / "cases.json"
CASES: list[dict[str, Any]] = json.loads(TABLE.read_bytes())["cases"] if TABLE.exists() else []

needs_table = pytest.mark.skipif(not CASES, reason="the shared event-stream cases are not here")


def decode(chunks: list[bytes]) -> tuple[list[ServerSentEvent], EventStreamDecoder]:
    decoder = EventStreamDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)], decoder


def expected(case: dict[str, Any]) -> list[ServerSentEvent]:
    return [
        ServerSentEvent(event=e["event"], data=e["data"], last_event_id=e["lastEventId"])
        for e in case["events"]
    ]


@needs_table
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_a_case_yields_the_same_events_however_it_is_split(case: dict[str, Any]) -> None:
    body = base64.b64decode(case["body_b64"])
    whole, decoder = decode([body])
    assert whole == expected(case)
    assert decoder.retry == case.get("retry")

    assert decode([bytes([byte]) for byte in body])[0] == whole
    for cut in range(len(body) + 1):
        assert decode([body[:cut], body[cut:]])[0] == whole
    if "chunks_b64" in case:
        assert decode([base64.b64decode(chunk) for chunk in case["chunks_b64"]])[0] == whole


@needs_table
@settings(deadline=None)
@given(data=st.data())
def test_random_cuts_change_nothing(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES))
    body = base64.b64decode(case["body_b64"])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=6)) | {0, len(body)})
    assert decode([body[a:b] for a, b in pairwise(cuts)])[0] == expected(case)


@pytest.mark.requirement("R13")
@settings(deadline=None)
@given(chunks=st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_are_read_without_an_exception(chunks: list[bytes]) -> None:
    decode(chunks)


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("piece", [b"data: " + b"x" * 99 + b"\n", b"x" * 100, b"id" * 50])
def test_an_event_without_end_is_rejected_while_it_arrives(piece: bytes) -> None:
    decoder = EventStreamDecoder(max_event_bytes=1000)
    with pytest.raises(CallError) as caught:
        for _ in range(20):
            decoder.feed(piece)
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R18")
@pytest.mark.parametrize(
    "event",
    [b"data: " + b"x" * 990, b"data: " + "\u20ac".encode() * 330, b": " + b"x" * 990],
)
@pytest.mark.parametrize("extra", [0, 10])
def test_the_limit_counts_bytes_and_does_not_depend_on_chunks(event: bytes, extra: int) -> None:
    body = event + b"x" * (1000 - len(event) + extra) + b"\n\n"
    outcomes: list[bool] = []
    for step in (1, 7, len(body)):
        decoder = EventStreamDecoder(max_event_bytes=1000)
        try:
            for at in range(0, len(body), step):
                decoder.feed(body[at : at + step])
        except CallError:
            outcomes.append(False)
        else:
            outcomes.append(True)
    assert outcomes == [extra == 0] * 3


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("piece", [b"xy", b"data:xy\n"])
def test_many_small_pieces_take_no_more_memory_than_their_bytes(piece: bytes) -> None:
    size = 1 << 18
    decoder = EventStreamDecoder(max_event_bytes=size)
    tracemalloc.start()
    try:
        for _ in range(size // len(piece)):
            decoder.feed(piece)
        assert tracemalloc.get_traced_memory()[1] < 3 * size
    finally:
        tracemalloc.stop()


def test_an_id_is_committed_by_the_blank_line_only() -> None:
    decoder = EventStreamDecoder(last_event_id="1")
    decoder.feed(b"id: 2\ndata: x\n")
    assert decoder.last_event_id == "1"
    decoder.feed(b"\n")
    assert decoder.last_event_id == "2"


def test_a_huge_retry_is_capped() -> None:
    _, decoder = decode([b"retry: " + b"9" * 5000 + b"\n\n"])
    assert decoder.retry == 10**9


@settings(deadline=None)
@given(st.lists(st.binary(max_size=8), max_size=8), st.integers(1, 6))
def test_lines_do_not_depend_on_their_chunks(pieces: list[bytes], step: int) -> None:
    body = b"\n".join(pieces)
    whole = JSONLinesDecoder()
    split = JSONLinesDecoder()
    chunks = [body[at : at + step] for at in range(0, len(body), step)]
    lines = whole.feed(body) + whole.finish()
    assert [line for each in chunks for line in split.feed(each)] + split.finish() == lines
    ends = body.replace(b"\x1e", b"\n").split(b"\n")
    if b"\x1e" not in body:
        assert lines == [line for line in ends if line.strip()]
    assert b"".join(b"".join(lines).split()) == b"".join(b"".join(ends).split())


RECORD = b'{\n  "a": [\n    1, "]\\"}"\n  ]\n}'


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_record_of_a_sequence_may_have_several_lines(step: int) -> None:
    body = b"\x1e" + RECORD + b"\n\x1e7\n\x1e\x1e" + RECORD + b'\n\x1e{"cut":\n\x1e"x"\n'
    decoder = JSONLinesDecoder()
    chunks = [body[at : at + step] for at in range(0, len(body), step)]
    lines = [line for each in chunks for line in decoder.feed(each)]
    assert lines == [RECORD, b"7", RECORD, b'{"cut":\n', b'"x"']
    assert decoder.finish() == []


def test_a_record_ends_with_its_last_line() -> None:
    decoder = JSONLinesDecoder()
    assert decoder.feed(b"\x1e{\n") == []
    assert decoder.feed(b"}\n") == [b"{\n}"]


@pytest.mark.parametrize("piece", [b'"', b'\\"', b"{\n", b'["\n'])
def test_lines_of_a_record_are_not_searched_again(piece: bytes) -> None:
    # Searching all lines for each new one would take longer than the time limit of a test.
    size = 1 << 20
    decoder = JSONLinesDecoder(max_event_bytes=2 * size)
    decoder.feed(b'\x1e{"')
    for _ in range(size // 1024):
        assert decoder.feed(piece * (1024 // len(piece))) == []
    decoder.feed(b"\n")
    assert sum(map(len, decoder.finish())) >= size - 1024


def test_the_chunks_of_one_line_are_not_searched_again() -> None:
    # Searching the whole line for each chunk would take longer than the time limit of a test.
    size = 1 << 22
    decoder = JSONLinesDecoder(max_event_bytes=size)
    for _ in range(size // 8):
        assert decoder.feed(b"x" * 8) == []
    assert decoder.finish() == [b"x" * size]
    with pytest.raises(CallError) as caught:
        decoder.feed(b"x" * (size + 1))
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("event_id", [None, b"", b"7"])
@pytest.mark.parametrize("name", [b"", b"error"])
@pytest.mark.parametrize("retry", [None, 500])
def test_an_event_that_was_written_is_read_again(
    event_id: bytes | None, name: bytes, retry: int | None
) -> None:
    text = encoded_event(b'{"a":1}', name=name, event_id=event_id, retry=retry)
    decoder = EventStreamDecoder(last_event_id="before")

    (event,) = decoder.feed(ALIVE + comment(b"to be ignored") + text)

    assert (event.event, event.data) == (name.decode() or "message", '{"a":1}')
    # An empty id resets that of earlier events.
    assert event.last_event_id == ("before" if event_id is None else event_id.decode())
    assert decoder.retry == retry
