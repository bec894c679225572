"""Frees a device for another phase: parked modules, reclaimed memory, the hand-off."""
