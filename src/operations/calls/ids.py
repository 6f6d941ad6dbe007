"""Request ids: 128 random bits in hex.

Drawn from the system's generator by the hundred, because asking it once per call costs more than the rest
of making a request.
"""

import os

_BATCH = 256

_drawn: list[str] = []


def new_request_id() -> str:
    """An id nobody can guess."""
    if not _drawn:
        text = os.urandom(16 * _BATCH).hex()
        _drawn.extend(text[start : start + 32] for start in range(0, 32 * _BATCH, 32))
    return _drawn.pop()


# A forked child must not repeat what its parent says.
os.register_at_fork(after_in_child=_drawn.clear)
