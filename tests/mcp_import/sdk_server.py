"""The demo server of `support.py` as a child on stdio."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.mcp_import.support import demo_server

if __name__ == "__main__":
    demo_server().run("stdio")
