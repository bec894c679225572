"""Reads saves and other checkpoints back into live objects, in place.

Read ``_plan`` first (what goes where, and every difference, before a byte moves), then ``_fill``
(the bytes), ``_values`` (what is understood before that), ``_document`` (containers), ``_modules``
and ``_optimizers``.
"""

from residency._checkpoint._restore._own_loads import load_through as load_through
from residency._checkpoint._restore._plain_optimizers import (
    PlainReception as PlainReception,
    receive_plain as receive_plain,
)
from residency._checkpoint._restore._values import understood as understood
