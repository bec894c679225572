"""Parts for Lightning's Trainer, of ``lightning`` and of ``pytorch_lightning``.

`ResidencyCheckpointIO` saves in the background, `ResidencyCallback` offloads the optimizers, and
`ResidencyShardedStrategy` does both's work where a strategy passes the first by.
"""

from __future__ import annotations

from residency.integrations._lightning_callback import ResidencyCallback
from residency.integrations._lightning_io import ResidencyCheckpointIO
from residency.integrations._lightning_sharded import ResidencyShardedStrategy

__all__ = ["ResidencyCallback", "ResidencyCheckpointIO", "ResidencyShardedStrategy"]
