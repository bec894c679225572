"""For `Trainer` of Transformers and TRL, with and without PEFT: one callback, and one mixin.

`ResidencyCallback` goes into ``Trainer(callbacks=[...])`` and covers everything callbacks can see.
`ResidencyTrainerMixin` stands before a trainer class and covers the rest: resuming without the
optimizer on the device, and saves that are written while training goes on. `save_pretrained` writes
a snapshot in the files that ``from_pretrained`` reads.
"""

from __future__ import annotations

from residency.integrations.transformers._callback import ResidencyCallback
from residency.integrations.transformers._saves import save_pretrained
from residency.integrations.transformers._trainer import ResidencyTrainerMixin

__all__ = ["ResidencyCallback", "ResidencyTrainerMixin", "save_pretrained"]
