"""Bytes to lines, within a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operations.mcp.shared.failures import id_at_edge
from operations.mcp.source.stdio import LineBuffer, Oversized


@given(
    st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))),
    st.data(),
)
def test_lines_are_the_same_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    buffer, found = LineBuffer(1000), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += list(buffer.feed(stream[start:end]))

    assert found == lines


@given(st.integers(1, 50), st.integers(1, 300))
def test_a_line_beyond_the_limit_is_skipped_and_the_next_one_is_read(chunk: int, size: int) -> None:
    stream = b"a" * size + b"\nnext\n"
    buffer, found = LineBuffer(100), []
    for start in range(0, len(stream), chunk):
        found += list(buffer.feed(stream[start : start + chunk]))

    long, after = found
    assert after == b"next"
    assert isinstance(long, Oversized) == (size > 100)
    if isinstance(long, Oversized):
        assert long.size == size


@pytest.mark.parametrize(
    ("head", "tail", "expected"),
    [
        (b'{"jsonrpc":"2.0","id":7,"result":', b"xxxxx", 7),
        (b'{"jsonrpc": "2.0", "id": 12, "result":', b"xxxxx", 12),
        (b'{"id": 8, "jsonrpc": "2.0", "result":', b"xxxxx", 8),
        (b'{"result":{', b'},"jsonrpc":"2.0","id":3}', 3),
        (b'{"result":{', b'},"id":4,"jsonrpc":"2.0"}', 4),
        (b'{"result":{"id":9,', b"xxxxx", None),
        (b'{"jsonrpc":"2.0","id":5,"result":{"method":"GET"', b"xxxxx", 5),
        (b'{"result":{"method":"GET"', b'},"jsonrpc":"2.0","id":6}', 6),
        (b'{"jsonrpc":"2.0","id":5,"method":"ping","params":{', b"xxxxx", None),
        (b'{"method":"ping","params":{', b'},"jsonrpc":"2.0","id":6}', None),
        (b'{"id": 6, "jsonrpc": "2.0", "method": "ping",', b'}, "id": 6}', None),
        (b'{"jsonrpc":"2.0","id":"text",', b"xxxxx", None),
        (b'{"jsonrpc":"2.0","id":99999999999999999999,', b"xxxxx", None),
    ],
)
def test_the_request_that_a_long_line_answers_is_found(
    head: bytes, tail: bytes, expected: int | None
) -> None:
    assert id_at_edge(head, tail) == expected
