"""Bodies of responses, decompressed and bounded."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing

from operations.base.errors import CallError, ErrorCode
from operations.io.http.client import HTTPResponse


def over_limit(what: str, limit: int) -> CallError:
    """Return the error for something that exceeds a limit in bytes."""
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, f"{what} is larger than {limit} bytes.")


_STEP = 1 << 16
_TURN = 1 << 20

_NO_CODINGS = frozenset({"", "identity", "none", "binary", "utf-8", "aws-chunked"})
"""Values of `Content-Encoding` that do not change the content; some servers send a charset or a transfer coding."""


async def decoded(response: HTTPResponse, *, max_bytes: int | None = None) -> AsyncGenerator[bytes]:
    """Yield the body of a response as it arrives, without its content coding.

    Args:
        response: The response.
        max_bytes: The largest total number of decoded bytes; None for an endless stream.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` if `max_bytes` is exceeded, `EXECUTION_ERROR` for an unknown or invalid coding,
            `UNAVAILABLE` if a stream is cut off.
    """
    listed, chunks = response.headers.get("content-encoding", "").lower(), response.chunks()
    codings = [name for each in listed.split(",") if (name := each.strip()) not in _NO_CODINGS]
    decoder = _Decompressor(", ".join(codings)) if codings else None
    total = turn = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            if not chunk:
                continue
            for piece in decoder.steps(chunk) if decoder else (chunk,):
                total += len(piece)
                if max_bytes is not None and total > max_bytes:
                    raise over_limit("The response", max_bytes)
                yield piece
                if decoder and total > turn:
                    # Compressed data may expand greatly: let other tasks run in between.
                    turn = total + _TURN
                    await asyncio.sleep(0)
    if decoder and not decoder.is_whole:
        # A stream that is cut off can be continued.
        code = ErrorCode.UNAVAILABLE if max_bytes is None else ErrorCode.EXECUTION_ERROR
        raise CallError(code, "The response's compressed content is incomplete.")


class _Decompressor:
    """Decodes one content coding step by step."""

    def __init__(self, name: str) -> None:
        self._is_gzip = name in {"gzip", "x-gzip"}
        if not self._is_gzip and name != "deflate":
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"The response has the content coding {name!r}, which was not requested.",
            )
        self._decoder = zlib.decompressobj(31 if self._is_gzip else 15)
        self._raw_fallback = not self._is_gzip
        self._is_fresh = True

    @property
    def is_whole(self) -> bool:
        """Whether the compressed data is complete, or no data arrived."""
        return self._is_fresh or self._decoder.eof

    def steps(self, chunk: bytes) -> Generator[bytes]:
        waiting = chunk
        while True:
            if self._decoder.eof:
                if not self._is_gzip or not waiting.strip(b"\0"):
                    # Bytes after the end are padding.
                    return
                # A gzip file may consist of several concatenated members.
                self._decoder = zlib.decompressobj(31)
            self._is_fresh = False
            try:
                piece = self._decoder.decompress(waiting, _STEP)
            except zlib.error:
                if not self._raw_fallback:
                    raise CallError(
                        ErrorCode.EXECUTION_ERROR, "The content coding of the response is invalid."
                    ) from None
                # "deflate" means zlib, but some servers send raw deflate.
                self._raw_fallback = False
                self._decoder = zlib.decompressobj(-15)
                continue
            self._raw_fallback = False
            if piece:
                yield piece
            waiting = self._decoder.unconsumed_tail or self._decoder.unused_data
            # After a full step, output may remain even if all input was consumed.
            if not waiting and (self._decoder.eof or len(piece) < _STEP):
                return


async def read_whole(response: HTTPResponse, limit: int) -> bytes:
    """Return the body of a response without its content coding.

    Raises:
        CallError: As `decoded`; also before any byte is read, if the response declares more than `limit` bytes.
    """
    if not response.headers.get("content-encoding"):
        buffered: Callable[[], bytes | None] | None = getattr(response, "buffered", None)
        content = None if buffered is None else buffered()
        length = response.headers.get("content-length", "")
        size = int(length) if content is None and length.isdigit() else len(content or b"")
        if size > limit:
            raise over_limit("The response", limit)
        if content is not None:
            return content
    # Not a list, because many small pieces would take several times their size.
    body = bytearray()
    async with aclosing(decoded(response, max_bytes=limit)) as chunks:
        async for piece in chunks:
            body += piece
    return bytes(body)
