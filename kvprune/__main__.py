"""`python -m kvprune` is `kvprune`."""

import sys

from kvprune.cli import main

if __name__ == "__main__":
    sys.exit(main())
