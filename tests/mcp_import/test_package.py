"""The extra: what importing the module needs and gives."""

import subprocess
import sys

import operations.mcp


def test_a_missing_extra_is_named_in_one_sentence() -> None:
    code = "import sys; sys.modules['mcp'] = None; import operations.mcp"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stderr.splitlines()[-1].endswith(
        "operations.mcp needs the 'mcp' extra: pip install 'alkdev-operations[mcp]'"
    )


def test_the_contracts_names_are_exported() -> None:
    promised = {"connect_mcp", "MCPClientLoader", "MCPClientConfig", "map_content_blocks"}

    assert promised <= set(operations.mcp.__all__)
    assert all(hasattr(operations.mcp, name) for name in operations.mcp.__all__)
