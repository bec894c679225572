"""An optimizer's own step on fewer parameters than it has: whether that changes a bit, and how.

Read ``_separable`` first (which optimizers a step may be divided for), then ``_partial_step`` (the
step on some parameters), ``_first_step`` (which states a step will make) and ``_copies``.
"""

from residency._optim._trial._first_step import Schema as Schema, Schemas as Schemas
