"""Parts for torchtitan, which its ``--override.imports`` names.

`offload_optimizers` and `save_with_residency` are the overrides; `OffloadedOptimizers` and
`ResidencyCheckpointManager` are the classes whose configs they put into torchtitan's. Imports
torchtitan, with which it registers the overrides.
"""

from residency.integrations.torchtitan._checkpoints import ResidencyCheckpointManager
from residency.integrations.torchtitan._optimizers import OffloadedOptimizers
from residency.integrations.torchtitan._overrides import offload_optimizers, save_with_residency

__all__ = [
    "OffloadedOptimizers",
    "ResidencyCheckpointManager",
    "offload_optimizers",
    "save_with_residency",
]
