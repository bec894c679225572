"""The command line: parses arguments, calls one verb, and turns what users can cause into one clear
message.

Exit status: what the verb returns (0, or 1 for a broken promise), 2 for an error, 130 for Ctrl-C.
"""

from residency._cli._main import main

__all__ = ["main"]
