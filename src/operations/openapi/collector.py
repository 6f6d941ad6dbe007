"""Keeps the cyclic garbage collector out of work that makes many objects and no garbage."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Generator[None]:
    """No collection for the length of a short block.

    Decoding and importing a large document make tens of thousands of objects, all of which stay. Each
    collection meanwhile visits every node there is, which can cost more than the work itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
