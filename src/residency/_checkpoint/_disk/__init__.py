"""The files of a save: their names, contents, order of writing, and how they are read back.

No torch here. Read ``_published`` first (names), then ``_manifest`` (what a save says of its
files), ``_write``, ``_publish`` (when a save counts) and ``_read``.
"""

from residency._checkpoint._disk._folder import SaveFolder as SaveFolder
from residency._checkpoint._disk._lock import FileLock as FileLock
from residency._checkpoint._disk._manifest import (
    MANIFEST as MANIFEST,
    FileRecord as FileRecord,
    Manifest as Manifest,
    RankReport as RankReport,
    Record as Record,
    dump_manifest as dump_manifest,
    file_name as file_name,
)
from residency._checkpoint._disk._marks import WRITERS as WRITERS, remove_own as remove_own
from residency._checkpoint._disk._naming import ADVICE as ADVICE, damage_named as damage_named
from residency._checkpoint._disk._parts import FilePlan as FilePlan, Part as Part, leased as leased
from residency._checkpoint._disk._publish import (
    CheckpointDirectory as CheckpointDirectory,
    Retention as Retention,
)
from residency._checkpoint._disk._published import (
    new_token as new_token,
    saving_name as saving_name,
    step_of as step_of,
)
from residency._checkpoint._disk._read import read_files as read_files
from residency._checkpoint._disk._retention import steps_above as steps_above
from residency._checkpoint._disk._system import (
    SYSTEM as SYSTEM,
    make_folders as make_folders,
    sync_folder as sync_folder,
    write_file as write_file,
)
from residency._checkpoint._disk._verify import (
    Verification as Verification,
    verify_save as verify_save,
)
from residency._checkpoint._disk._wanted import FileReads as FileReads, Wanted as Wanted
from residency._checkpoint._disk._write import write_files as write_files
