"""Runs the command line: ``python -m residency``."""

import sys

from residency._cli import main

if __name__ == "__main__":
    sys.exit(main())
