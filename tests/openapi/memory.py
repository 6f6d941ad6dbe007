"""The peak memory of imports, each measured in a process of its own: `python memory.py FILE...` prints one line each.

The process is forked after its modules are imported, so that only the import itself counts.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import operations.openapi.reading.yaml  # noqa: F401 - imported before memory is measured
from operations import OperationRegistry
from operations.base.errors import DocumentError
from operations.openapi import HTTPServiceConfig, from_openapi_file

CONFIG = HTTPServiceConfig(namespace="api", base_url="http://127.0.0.1")
FREE = 50_000_000


def peaks(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the size of each document, the peak memory of its import, and its number of operations or its error."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, paths)], capture_output=True, check=True, text=True
    )
    rows = map(json.loads, done.stdout.splitlines())
    return {row.pop("file"): row for row in rows}


def ratio(row: dict[str, Any]) -> float:
    """Return how often the document fits into the peak memory beyond the first 50 MB."""
    return max(0.0, float(row["peak"] - FREE)) / float(row["size"])


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


async def _imported(path: str) -> dict[str, Any]:
    try:
        service = await from_openapi_file(path, CONFIG)
    except DocumentError as error:
        return {"error": str(error)[-200:]}
    registry = OperationRegistry()
    registry.register_all(service)
    return {"operations": len(registry)}


def _print_peak(path: str) -> None:
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
    row = asyncio.run(_imported(path))
    size = sum(each.stat().st_size for each in Path(path).parent.glob(f"{Path(path).stem}*"))
    row |= {"file": Path(path).name, "size": size, "peak": _resident("VmHWM") - before}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    logging.disable()
    for name in sys.argv[1:]:
        child = os.fork()
        if not child:
            _print_peak(name)
            os._exit(0)
        os.waitpid(child, 0)
