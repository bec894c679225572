"""Saves of a training state: what they hold, how they are written, and how they are read back.

Read ``_checkpointer`` first, then ``_capture`` (what a state is, which bytes it has, and how they
are taken beside training), ``_document`` (the part of a save that is text), ``_disk`` (files,
without torch) and ``_restore``. Nothing is imported before it is asked for: ``_disk`` starts
without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._checkpoint._arguments import (
        check_count as check_count,
        spare_bytes as spare_bytes,
    )
    from residency._checkpoint._background import Background as Background
    from residency._checkpoint._capture._snapshot import Snapshot as Snapshot, snapshot as snapshot
    from residency._checkpoint._checkpointer import Checkpointer as Checkpointer
    from residency._checkpoint._disk._dry import be_dry as be_dry, watch_files as watch_files
    from residency._checkpoint._disk._header import make_header as make_header
    from residency._checkpoint._disk._manifest import Record as Record
    from residency._checkpoint._disk._publish import Retention as Retention
    from residency._checkpoint._document._dtypes import (
        DTYPES as DTYPES,
        STORED_DTYPES as STORED_DTYPES,
    )
    from residency._checkpoint._once import Once as Once
    from residency._checkpoint._progress import progress_bar as progress_bar
    from residency._checkpoint._restore._load_into import load_into as load_into
    from residency._checkpoint._rng import random_states as random_states
    from residency._checkpoint._save import Save as Save

__getattr__ = door(
    __name__,
    {
        "_arguments": ["check_count", "spare_bytes"],
        "_background": ["Background"],
        "_capture._snapshot": ["Snapshot", "snapshot"],
        "_checkpointer": ["Checkpointer"],
        "_disk._dry": ["be_dry", "watch_files"],
        "_disk._header": ["make_header"],
        "_disk._manifest": ["Record"],
        "_disk._publish": ["Retention"],
        "_document._dtypes": ["DTYPES", "STORED_DTYPES"],
        "_once": ["Once"],
        "_progress": ["progress_bar"],
        "_restore._load_into": ["load_into"],
        "_rng": ["random_states"],
        "_save": ["Save"],
    },
)
