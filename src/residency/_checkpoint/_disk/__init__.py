"""The files of a save: their names, contents, order of writing, and how they are read back.

No torch here. Read ``_layout`` first (names), then ``_manifest`` (what a save says of its files),
``_write``, ``_publish`` (when a save counts) and ``_read``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._checkpoint._disk._folder import SaveFolder
    from residency._checkpoint._disk._lock import FileLock
    from residency._checkpoint._disk._manifest import (
        MANIFEST,
        FileRecord,
        Manifest,
        RankReport,
        Record,
        dump_manifest,
        file_name,
    )
    from residency._checkpoint._disk._marks import WRITERS, remove_own
    from residency._checkpoint._disk._naming import ADVICE, damage_named
    from residency._checkpoint._disk._parts import FilePlan, Part, leased
    from residency._checkpoint._disk._publish import CheckpointDirectory, Retention
    from residency._checkpoint._disk._published import new_token, saving_name, step_of
    from residency._checkpoint._disk._read import read_files
    from residency._checkpoint._disk._retention import steps_above
    from residency._checkpoint._disk._system import SYSTEM, make_folders, sync_folder, write_file
    from residency._checkpoint._disk._verify import Verification, verify_save
    from residency._checkpoint._disk._wanted import FileReads, Wanted
    from residency._checkpoint._disk._write import write_files

__all__ = [
    "ADVICE",
    "CheckpointDirectory",
    "FileLock",
    "FilePlan",
    "FileReads",
    "FileRecord",
    "MANIFEST",
    "Manifest",
    "Part",
    "RankReport",
    "Record",
    "Retention",
    "SYSTEM",
    "SaveFolder",
    "Verification",
    "WRITERS",
    "Wanted",
    "damage_named",
    "dump_manifest",
    "file_name",
    "leased",
    "make_folders",
    "new_token",
    "read_files",
    "remove_own",
    "saving_name",
    "step_of",
    "steps_above",
    "sync_folder",
    "verify_save",
    "write_file",
    "write_files",
]

__getattr__ = door(
    __name__,
    {
        "_folder": ["SaveFolder"],
        "_published": ["new_token", "saving_name", "step_of"],
        "_lock": ["FileLock"],
        "_manifest": [
            "FileRecord",
            "MANIFEST",
            "Manifest",
            "RankReport",
            "Record",
            "dump_manifest",
            "file_name",
        ],
        "_marks": ["WRITERS", "remove_own"],
        "_naming": ["ADVICE", "damage_named"],
        "_parts": ["FilePlan", "Part", "leased"],
        "_publish": ["CheckpointDirectory", "Retention"],
        "_read": ["read_files"],
        "_retention": ["steps_above"],
        "_system": ["SYSTEM", "make_folders", "sync_folder", "write_file"],
        "_verify": ["Verification", "verify_save"],
        "_wanted": ["FileReads", "Wanted"],
        "_write": ["write_files"],
    },
)
