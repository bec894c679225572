"""Parts for ``torch.distributed.checkpoint``: a stager, a training state, and a storage writer and
reader that use this library's format.
"""

from residency.integrations._common._framework import names_of

with names_of("torch", remedy="install torch 2.11 or newer"):
    from residency.integrations.dcp._reader import ResidencyStorageReader
    from residency.integrations.dcp._stager import PinnedStager
    from residency.integrations.dcp._train_state import TrainState, TrainStatePlanner
    from residency.integrations.dcp._writer import ResidencyStorageWriter

__all__ = [
    "PinnedStager",
    "ResidencyStorageReader",
    "ResidencyStorageWriter",
    "TrainState",
    "TrainStatePlanner",
]
