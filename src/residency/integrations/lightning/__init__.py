"""Parts for Lightning's Trainer, of ``lightning`` and of ``pytorch_lightning``.

`ResidencyCheckpointIO` saves in the background, `ResidencyCallback` offloads the optimizers, and
`ResidencyShardedStrategy` does both's work for strategies that pass the first by.
"""

from __future__ import annotations

from residency.integrations.lightning._callback import ResidencyCallback
from residency.integrations.lightning._checkpoint_io import ResidencyCheckpointIO
from residency.integrations.lightning._sharded import ResidencyShardedStrategy

__all__ = ["ResidencyCallback", "ResidencyCheckpointIO", "ResidencyShardedStrategy"]
