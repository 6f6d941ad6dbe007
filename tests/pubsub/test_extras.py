"""A transport whose library is missing names the extra to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "library"), [("redis", "redis"), ("nats", "nats"), ("websocket", "websockets")]
)
def test_a_missing_library_is_named_in_one_sentence(module: str, library: str) -> None:
    script = f"import sys; sys.modules[{library!r}] = None; import operations.pubsub.{module}"
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )

    last = finished.stderr.strip().splitlines()[-1]
    assert last.endswith(
        f"operations.pubsub.{module} needs the '{module}' extra: "
        f"pip install 'alkdev-operations[{module}]'"
    )


def test_memory_and_calls_need_no_library() -> None:
    script = (
        "import sys; import operations.calls, operations.pubsub.memory;"
        "assert not {'redis', 'nats', 'websockets', 'pydantic', 'mcp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
