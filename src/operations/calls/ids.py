"""Request ids: 128 random bits in hex.

Drawn from the system's generator by the hundred, because asking it once per call costs more than the rest
of making a request.
"""

import os
from collections.abc import Iterator

_BATCH = 256


def _draw() -> Iterator[str]:
    process = os.getpid()
    while True:
        text = os.urandom(16 * _BATCH).hex()
        for start in range(0, 32 * _BATCH, 32):
            if os.getpid() != process:
                # A forked child must not repeat what its parent says.
                break
            yield text[start : start + 32]
        process = os.getpid()


_ids = _draw()


def new_request_id() -> str:
    """An id nobody can guess."""
    return next(_ids)
