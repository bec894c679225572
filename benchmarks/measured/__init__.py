"""Peaks of this repository's own scripts as cards showed them, and dry runs of the same."""
