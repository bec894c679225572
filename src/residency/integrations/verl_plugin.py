"""Installs the guard when it is imported; the entry point in ``verl.plugins`` names this module.

verl loads it in every process, on ``import verl``; before verl 0.9, which has no entry points,
``VERL_USE_EXTERNAL_MODULES=residency.integrations.verl_plugin`` does. Imports no torch, and changes
nothing before verl's workers are imported.
"""

from residency.integrations._verl_guard import ensure_guard  # beside verl.py, which imports torch

__all__: list[str] = []

ensure_guard()
