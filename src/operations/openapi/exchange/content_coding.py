"""Takes the content coding off a body as it arrives, and stops at a size.

Rule: no more than the limit is ever held, however little was sent: decompression goes in bounded steps.
"""

import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing

from operations.errors import CallError, ErrorCode

ACCEPTED = "gzip, deflate"
"""What we ask for: what the standard library decodes in bounded steps."""

_STEP = 1 << 16
_MAX_LAYERS = 3


async def decoded(
    chunks: AsyncGenerator[bytes], coding: str, *, max_bytes: int | None
) -> AsyncGenerator[bytes]:
    """`chunks` without their content coding.

    Args:
        chunks: The body as it arrives.
        coding: The Content-Encoding header.
        max_bytes: How many decoded bytes to let through in all; None for a stream that has no end.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` beyond `max_bytes`, `EXECUTION_ERROR` for an unknown or broken coding.
    """
    names = [name for part in coding.split(",") if (name := part.strip().lower())]
    layers = [_Layer(name) for name in reversed(names) if name != "identity"]
    if len(layers) > _MAX_LAYERS:
        raise CallError(ErrorCode.EXECUTION_ERROR, "The answer has too many content codings.")
    total = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            if not chunk:
                continue
            for piece in _through(chunk, layers) if layers else (chunk,):
                total += len(piece)
                if max_bytes is not None and total > max_bytes:
                    raise CallError(
                        ErrorCode.RESOURCE_EXHAUSTED,
                        f"The answer is larger than {max_bytes} bytes.",
                    )
                yield piece
    if max_bytes is not None and not all(layer.is_whole for layer in layers):
        raise CallError(ErrorCode.EXECUTION_ERROR, "The answer's content coding breaks off.")


def _through(chunk: bytes, layers: list["_Layer"]) -> Generator[bytes]:
    if not layers:
        yield chunk
        return
    first, *rest = layers
    for piece in first.steps(chunk):
        yield from _through(piece, rest)


class _Layer:
    """One content coding, taken off step by step."""

    def __init__(self, name: str) -> None:
        self._is_gzip = name in {"gzip", "x-gzip"}
        if not self._is_gzip and name != "deflate":
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"The answer has the content coding {name!r}, not asked for.",
            )
        self._decoder = zlib.decompressobj(31 if self._is_gzip else 15)
        self._raw_fallback = not self._is_gzip
        self._is_fresh = True

    @property
    def is_whole(self) -> bool:
        """Whether what arrived has come to its end, or nothing arrived."""
        return self._is_fresh or self._decoder.eof

    def steps(self, chunk: bytes) -> Generator[bytes]:
        waiting = chunk
        while True:
            if self._decoder.eof:
                if not self._is_gzip or not waiting.strip(b"\0"):
                    # What stands behind the end is padding.
                    return
                # A gzip file may consist of several, one behind the other.
                self._decoder = zlib.decompressobj(31)
            self._is_fresh = False
            try:
                piece = self._decoder.decompress(waiting, _STEP)
            except zlib.error:
                if not self._raw_fallback:
                    raise CallError(
                        ErrorCode.EXECUTION_ERROR, "The answer's content coding is broken."
                    ) from None
                # "deflate" means zlib, and some servers send it bare.
                self._raw_fallback = False
                self._decoder = zlib.decompressobj(-15)
                continue
            self._raw_fallback = False
            if piece:
                yield piece
            waiting = self._decoder.unconsumed_tail or self._decoder.unused_data
            # A full step may have left output behind even where all input was taken.
            if not waiting and (self._decoder.eof or len(piece) < _STEP):
                return
