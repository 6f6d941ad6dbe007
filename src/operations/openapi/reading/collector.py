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
            if not gc.get_freeze_count():
                # All of it is here to stay: count it as old at once, instead of visiting it as new.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
