"""Reads saves and other checkpoints back into live objects, in place.

Read ``_plan`` first (what goes where, and every difference, before a byte moves), then ``_fill``
(the bytes), ``_values`` (what is understood before that), ``_document`` (containers), ``_modules``
and ``_optimizers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._checkpoint._restore._own_loads import load_through
    from residency._checkpoint._restore._plain_optimizers import PlainReception, receive_plain
    from residency._checkpoint._restore._values import understood

__all__ = ["PlainReception", "load_through", "receive_plain", "understood"]

__getattr__ = door(
    __name__,
    {
        "_own_loads": ["load_through"],
        "_plain_optimizers": ["PlainReception", "receive_plain"],
        "_values": ["understood"],
    },
)
