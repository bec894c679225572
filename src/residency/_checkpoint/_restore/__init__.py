"""Reads saves and other checkpoints back into live objects, in place.

Read ``_plan`` first (what goes where, and every difference, before a byte moves), then ``_fill``
(the bytes), ``_document`` (values and containers) and ``_optimizers``.
"""
