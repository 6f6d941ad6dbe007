"""`python -m operations`."""

import sys

from operations_cli import main

if __name__ == "__main__":
    sys.exit(main())
