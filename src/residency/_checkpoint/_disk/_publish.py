"""A directory of saves: what is published in it, and how a save becomes published.

A save is written into a directory of its own beside its target. Its files are on the disk before
its manifest is, the manifest before the directory gets the name that counts, and that name before
anything older is removed. At every moment the directory holds the saves that it held before, or
those and the new one; never a part of one.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from residency._checkpoint._disk._check import read_back
from residency._checkpoint._disk._lock import FileLock, WriterLock
from residency._checkpoint._disk._manifest import (
    MANIFEST,
    Manifest,
    RankReport,
    dump_manifest,
)
from residency._checkpoint._disk._marks import WRITERS
from residency._checkpoint._disk._open_save import StoredSave, open_save, read_manifest
from residency._checkpoint._disk._parts import Lease, leased
from residency._checkpoint._disk._published import (
    LOCK,
    PublishedSaves,
    new_token,
    saving_name,
)
from residency._checkpoint._disk._ranks import Attempt
from residency._checkpoint._disk._request import SaveRequest
from residency._checkpoint._disk._retention import Retention, steps_above
from residency._checkpoint._disk._system import (
    System,
    close_quietly,
    exists,
    make_folders,
    sync_folder,
    system_in_use,
    write_file,
)
from residency._checkpoint._disk._write import CHUNK_BYTES, write_files
from residency._errors import CheckpointError, InvalidArgumentError, RefusedError
from residency._units import MIB, format_bytes

__all__ = ["CheckpointDirectory", "Retention", "SaveRequest", "StoredSave"]

# Headers and the manifest of a state of usual make; what is above it shows when it is written.
_ROOM_BESIDE_TENSORS_BYTES = MIB

_logger = logging.getLogger("residency")


class CheckpointDirectory:
    """A directory in which saves are published, found and removed.

    Making one reads nothing and creates nothing. One thread at a time may use it to write.

    Args:
        path: The directory; it is made by the first call that writes.
        system: Makes the system calls; None for those of this process's saves.
        chunk_bytes: What is summed and written at once; a multiple of 4096.
        reads_back: Whether each rank reads what it wrote, past the page cache, before the save is
            published; a save of which the disk gives back other bytes fails.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        system: System | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        reads_back: bool = False,
    ) -> None:
        self.path = Path(path).absolute()  # once: a later os.chdir changes nothing
        system = system or system_in_use()
        self._reads_back = reads_back
        self._chunk_bytes = chunk_bytes
        self._system = system
        self._published = PublishedSaves(system, self.path)
        self._lock = WriterLock(system, self.path / LOCK)
        self._failed: deque[Attempt] = deque()  # the last: not cleaned up, so that others see it
        self._known: frozenset[Path] = frozenset()  # failures that this rank's attempts have seen
        self._left: dict[Path, int] = {}  # rank 0's: what failed, by the number of its own call

    def steps(self) -> list[int]:
        """Returns the steps whose saves are published, ascending."""
        with self._explaining("be listed"):
            return list(self._published.published())

    def folder(self, step: int) -> Path:
        """Returns where the save of a step lies.

        Raises:
            CheckpointError: There is none.
        """
        with self._explaining("be listed"):
            published = self._published.published()
        if step not in published:
            known = ", ".join(map(str, published)) or "none"
            raise CheckpointError(
                f"{self.path} has no save of step {step}; it has: {known}. Check the path, or "
                "restore another step."
            )
        return self.path / published[step]

    def open(self, step: int) -> StoredSave:
        """Returns what the save of a step holds: manifest and headers are read, and all sizes.

        Raises:
            CheckpointError: There is no such save.
            CorruptSaveError: It is not as it was written.
        """
        return open_save(self.folder(step), step, system=self._system)

    def manifest(self, step: int) -> Manifest:
        """Returns what the manifest of a step's save says, whatever became of its other files.

        Raises:
            CheckpointError: There is no such save.
            CorruptSaveError: The manifest is damaged.
        """
        return read_manifest(self.folder(step), step, system=self._system)

    def lock(self) -> None:
        """Makes this object the directory's one writer, and repairs what a dead one left midway.

        Calling it again is fine.

        Raises:
            RefusedError: Another process, or another object, writes here.
            CheckpointError: A system call failed.
        """
        if self._lock.is_held:
            return
        with self._explaining("be locked"):
            self.check_writable(0)
            self._lock.take_or_refuse()
            try:
                self._published.repair()
            except BaseException:
                self._lock.give_back()
                raise

    @property
    def is_locked(self) -> bool:
        """Whether this object is the directory's one writer; not, once the lock was removed."""
        return self._lock.is_held and self._lock.is_at_its_path()

    def unlock(self) -> None:
        """Gives the directory back."""
        while self._failed:
            self._failed.popleft().folder.leave()
        self._lock.give_back()

    def check_writable(self, num_bytes: int) -> None:
        """Makes the directory, and returns if a save of this size can be written there now.

        Raises:
            RefusedError: It cannot, and why.
        """
        probe = self.path / f".probe-{new_token()}"
        try:
            make_folders(self._system, self.path)
            self._published.names()
            close_quietly(self._system, self._system.open(probe, os.O_WRONLY | os.O_CREAT))
            with suppress(FileNotFoundError):
                self._system.unlink(probe)
            room = self._system.room_bytes(self.path)
        except OSError as error:
            raise RefusedError(
                f"{self.path} cannot be written to: {error}. Nothing was saved; give a directory "
                "that can."
            ) from error
        if room < num_bytes:
            raise RefusedError(
                f"{self.path} has {format_bytes(room)} left and the save needs "
                f"{format_bytes(num_bytes)}: {room} of {num_bytes} bytes. Nothing was saved; "
                "make room, or give another directory."
            )

    def save(
        self,
        request: SaveRequest,
        *,
        on_total: Callable[[int], None] | None = None,
        on_bytes: Callable[[int], None] | None = None,
        timeout_seconds: float,
    ) -> None:
        """Writes one rank's share of a save, and returns when the whole save is published.

        Args:
            request: What to write. Every part is released exactly once, whatever happens.
            on_total: Is called once, before, with the size of this rank's files.
            on_bytes: Is called with each number of bytes written, one call at a time.
            timeout_seconds: How long to wait for other ranks, once this one has written; a tenth
                of it, and at most 10 s, for one that said that it failed and may try again.

        Raises:
            RefusedError: Another process writes here, or the directory cannot take the save.
            CheckpointError: Something failed, here or on another rank. The saves that were
                published before are as they were; a save that replaces another step's has either
                not happened or wholly.
        """
        notes = on_total, on_bytes
        with leased(request.files) as files:
            request.check()
            attempt = self._attempt_at(request, timeout_seconds)
            is_kept = False
            try:
                with self._explaining(f"take the save of step {request.step}"):
                    if request.rank != 0:
                        self._save(request, attempt, files, notes)
                        return
                    with self._locked():
                        # Not this step's own: another rank may have failed, and said so.
                        self._clean_up(spare=f"{saving_name(request.step, request.token)}-")
                        self._save(request, attempt, files, notes)
            except BaseException as error:
                attempt.fail(error)
                is_kept = request.rank == 0 and request.world_size > 1
                raise
            finally:
                self._end(request, attempt, is_kept=is_kept)

    def give_up(self, request: SaveRequest, error: BaseException) -> None:
        """Tells the other ranks of a save that this one will not write its share.

        Args:
            request: What would have been written; its parts are left alone.
            error: Why not; it is what they raise.
        """
        if request.world_size == 1:
            return
        with suppress(CheckpointError, OSError, InvalidArgumentError):
            request.check()
            make_folders(self._system, self.path)
            attempt = self._attempt_at(request)
            attempt.fail(error)
            self._end(request, attempt, is_kept=True)

    def _attempt_at(self, request: SaveRequest, timeout_seconds: float = 0.0) -> Attempt:
        return Attempt(
            self._published,
            self._system,
            request,
            timeout_seconds=timeout_seconds,
            known=self._known,
        )

    def _end(self, request: SaveRequest, attempt: Attempt, *, is_kept: bool) -> None:
        """Unlocks an attempt, or keeps one that failed, for which ranks look, and ends the one
        before it.
        """
        with suppress(OSError):
            self._known = attempt.failures()
        if not is_kept:
            attempt.folder.leave()
            return
        self._failed.append(attempt)
        while len(self._failed) > 1:
            self._failed.popleft().folder.leave()
        if request.rank == 0:
            self._left |= dict.fromkeys({attempt.folder.path, *self._known}, request.number)

    def _remove_left(self, request: SaveRequest, attempt: Attempt) -> None:
        """Removes what failed at the step of a published save, and what earlier saves left that
        failed: every rank has gone on to this one.
        """
        earlier = [path for path, n in list(self._left.items()) if n < request.number]
        for path in (*attempt.failures(), *earlier):
            self._published.remove(path)
            self._left.pop(path, None)

    def _save(
        self,
        request: SaveRequest,
        attempt: Attempt,
        files: list[tuple[str, list[Lease]]],
        notes: tuple[Callable[[int], None] | None, Callable[[int], None] | None],
    ) -> None:
        on_total, on_bytes = notes
        needed = sum(lease.record.num_bytes for _, leases in files for lease in leases)
        self.check_writable(needed + _ROOM_BESIDE_TENSORS_BYTES)
        attempt.begin()
        written = write_files(
            attempt.folder.path,
            files,
            system=self._system,
            on_total=on_total,
            on_bytes=on_bytes,
            chunk_bytes=self._chunk_bytes,
        )
        if self._reads_back:
            read_back(attempt.folder.path, written, system=self._system)
        report = RankReport(request.document, written)
        if request.rank == 0:
            self._publish(request, attempt, report)
        else:
            attempt.hand_over(report)

    def _publish(self, request: SaveRequest, attempt: Attempt, report: RankReport) -> None:
        is_alone = request.world_size == 1 or self._system.is_alone
        reports = [report] if is_alone else attempt.collect(report)
        path = attempt.folder.path
        manifest = Manifest(request.step, attempt.name, dict(request.metrics), reports)
        write_file(self._system, path / MANIFEST, dump_manifest(manifest))
        if not is_alone:
            request.check_whole(open_save(path, request.step, system=self._system))
        attempt.folder.strip()
        sync_folder(self._system, path)
        self.publish(path, request.step)
        if request.world_size > 1:
            try:
                self._remove_left(request, attempt)
            except OSError as error:  # the save is published
                _logger.warning("%s was not tidied up after a save: %s", self.path, str(error))

    def publish(self, folder: Path, step: int) -> None:
        """Makes a whole save in this directory the one of its step, and removes the one before.

        Args:
            folder: Holds the files and the manifest, all on the disk.
            step: Its step.

        Raises:
            OSError: It could not be renamed; what was published before is as it was.
        """
        replaced = self._published.publish(folder, step)
        try:
            if replaced is not None:
                self._published.remove(replaced)
            self._published.point_latest()
        except OSError as error:  # the save is published: an error here would say that it is not
            _logger.warning("%s was not tidied up after a save: %s", self.path, str(error))

    def beyond(self, retention: Retention, *, spare: int | None = None) -> list[int]:
        """Returns the steps that a retention does not keep, ascending.

        The newest save stays, and so does the newest whose manifest can be read, and one to spare.
        """
        steps = self.steps()
        if retention.newest is None and retention.best == 0:
            return []
        kept = {*steps[-(retention.newest or 1) :], spare}
        kept.update(next(([step] for step in reversed(steps) if self._is_readable(step)), []))
        if retention.metric is not None:
            rated = [(self._rate(step, retention), step) for step in steps]
            rated = [item for item in rated if item[0] is not None]
            kept.update(step for _, step in sorted(rated)[-retention.best :])
        return [step for step in steps if step not in kept]

    def _is_readable(self, step: int) -> bool:
        try:
            read_manifest(self.folder(step), step, system=self._system)
        except CheckpointError:
            return False
        return True

    def _rate(self, step: int, retention: Retention) -> float | None:
        """Returns how good a save is, greater for better, or None where that is not known."""
        try:
            manifest = read_manifest(self.folder(step), step, system=self._system)
        except CheckpointError:
            return None
        value = manifest.metrics.get(str(retention.metric), math.nan)
        if math.isnan(value):
            return None
        return value if retention.greatest else -value

    def apply(self, retention: Retention, *, spare: int | None = None) -> list[int]:
        """Removes the saves that a retention does not keep, and returns their steps.

        Args:
            retention: What stays.
            spare: A step that stays, too: the one just saved, which need not be the highest.

        Raises:
            RefusedError: Another process writes here.
            CheckpointError: One could not be removed; no part of it counts as a save any more.
        """
        return self._remove(lambda: self.beyond(retention, spare=spare))

    def remove_above(self, step: int) -> list[int]:
        """Removes the saves above a step; raises as ``apply`` and ``steps_above`` do."""
        return self._remove(lambda: steps_above(self.steps(), step))

    def _remove(self, find: Callable[[], list[int]]) -> list[int]:
        with self._locked():
            removed = []
            with self._explaining("be thinned out"):
                self._published.sync()
                for step in find():
                    folder = self.folder(step)
                    if self._published.remove(folder) or not exists(
                        self._system, folder / MANIFEST
                    ):
                        removed.append(step)
            return removed

    def clean_up(self) -> list[Path]:
        """Removes what saves of dead writers left, and returns what it was.

        A save that a living process writes, on this machine or another, is left alone.

        Raises:
            RefusedError: Another process writes here.
        """
        with self._locked(), self._explaining("be cleaned up"):
            return self._clean_up()

    def _clean_up(self, spare: str = "") -> list[Path]:
        removed = []
        self._published.repair()
        for folder in self._published.saving():
            if not (spare and folder.name.startswith(spare)):
                lock = FileLock(self._system, folder / WRITERS)
                try:
                    is_dead = lock.take(shared=False) and lock.is_enforced
                    if is_dead and self._published.remove(folder):
                        removed.append(folder)
                except FileNotFoundError:
                    continue  # its last writer removed it meanwhile
                finally:
                    lock.give_back()
        return removed

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, for this block only if it was not held before."""
        was_held = self._lock.is_held
        self.lock()
        try:
            yield
        finally:
            if not was_held:
                self.unlock()

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """Turns an error of the system into one that says what could not be done."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} could not {what}: {error}. Check the path, its permissions and the "
                "free space."
            ) from error
