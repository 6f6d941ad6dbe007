"""The `operations` command."""

import sys

from operations.cli import main

if __name__ == "__main__":
    sys.exit(main())
