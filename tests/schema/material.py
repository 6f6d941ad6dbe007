"""The location of the test material, beside the project; it may be absent."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
SUITE = SHARED / "json-schema-test-suite"
RECORDS = SHARED / "typebox-cast"


@cache
def records(name: str) -> list[dict[str, Any]]:
    """Return the lines of one file of casting records; none if the folder does not exist."""
    path = RECORDS / f"{name}.jsonl"
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


class Canary:
    """A web server that must get no request."""

    def __init__(self, url: str, count: Callable[[], int]) -> None:
        self.url = url
        self._count = count

    @property
    def hits(self) -> int:
        """The number of requests that it got."""
        return self._count()
