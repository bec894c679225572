"""What keeps tensors alive: searched from Python's roots, through objects, to each tensor.

Read ``_holders`` first (the public function), then ``_walk`` (the search), ``_paths`` (how an
object is named), ``_roots`` and ``_autograd``.
"""
