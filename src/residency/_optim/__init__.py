"""Optimizer state at home on the host, streamed through the optimizer's own step.

Read ``_offload`` first (the two public functions), then ``_offloaded`` (the class that an optimizer
gets), ``_homes`` (where the state lives), ``_plan`` (what moves together) and ``_stream`` (the step
itself).
"""

from residency._optim._lend import lend_homes as lend_homes  # saves find offloaded state
from residency._optim._offload import (
    offload_optimizer as offload_optimizer,
    onload_optimizer as onload_optimizer,
    parse_bucket as parse_bucket,
    parse_resident as parse_resident,
)
from residency._optim._offload_record import (
    plain_schema_of as plain_schema_of,
    record_of as record_of,
)
from residency._optim._offloaded import OffloadedOptimizer as OffloadedOptimizer
