"""Saves of a training state: what they hold, how they are written, and how they are read back."""
