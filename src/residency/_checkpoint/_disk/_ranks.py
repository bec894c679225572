"""What the ranks of one save say to each other, through files in its directory.

Each rank writes its files, then its report. Rank 0 waits for all reports; the others wait until it
has published. Who fails leaves a mark, so that nobody waits for nothing; a rank that dies leaves
none, and the others give up when their time is over. A rank that has reported touches its files no
more: rank 0 may be about to publish them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from residency._checkpoint._disk._layout import Layout, saving_name, step_name
from residency._checkpoint._disk._lock import FileLock
from residency._checkpoint._disk._manifest import (
    MANIFEST,
    RankReport,
    dump_report,
    parse_manifest,
    parse_report,
)
from residency._checkpoint._disk._marks import WRITERS, failure_name, remove_own, report_name
from residency._checkpoint._disk._system import (
    System,
    read_file,
    sync_folder,
    write_file,
)
from residency._errors import CheckpointError

_MAX_ATTEMPTS = 100
_FIRST_PAUSE_SECONDS = 0.001
_LAST_PAUSE_SECONDS = 0.05


class SaveFolder:
    """Is the directory of one save under way, as one rank sees it."""

    def __init__(
        self, layout: Layout, system: System, *, step: int, token: str, rank: int, world_size: int
    ) -> None:
        self.path = layout.path / saving_name(step, token)
        self._system = system
        self._published = layout.path / step_name(step)
        self._step = step
        self._token = token
        self._rank = rank
        self._world_size = world_size
        self._has_joined = False
        self._has_reported = False
        self._lock = FileLock(system, self.path / WRITERS)

    def join(self) -> None:
        """Makes the directory, or finds it, and locks it against being cleaned up."""
        for _ in range(_MAX_ATTEMPTS):
            with suppress(FileExistsError):
                self._system.mkdir(self.path)
            # Someone who cleans up may remove the directory before it is locked.
            with suppress(FileNotFoundError):
                if self._lock.take(shared=True) and self._lock.is_at_its_path():
                    self._has_joined = True
                    self._raise_if_failed(self._system.listdir(self.path))
                    return
            self._lock.give_back()
            self._system.sleep(_FIRST_PAUSE_SECONDS)
        raise CheckpointError(f"{self.path} was removed {_MAX_ATTEMPTS} times; is it cleaned up?")

    def report(self, report: RankReport) -> None:
        """Says what this rank wrote; its files are on the disk."""
        self._has_reported = True
        name = report_name(self._rank)
        write_file(self._system, self.path / name, dump_report(report, rank=self._rank))
        sync_folder(self._system, self.path)

    def collect(self, timeout_seconds: float) -> list[RankReport]:
        """Returns what all ranks wrote, with the sizes of their files checked.

        Raises:
            CheckpointError: A rank failed, did not report in time, or its files are not there.
        """
        missing: list[str] = []

        def has_all() -> bool:
            names = self._system.listdir(self.path)
            self._raise_if_failed(names)
            missing[:] = [
                str(rank) for rank in range(self._world_size) if report_name(rank) not in names
            ]
            return not missing

        if not self._wait(has_all, timeout_seconds):
            raise CheckpointError(
                f"of {self._world_size} ranks, {', '.join(missing)} did not report within "
                f"{timeout_seconds:g} s; the save of step {self._step} is given up, and those "
                "before it are as they were."
            )
        reports = []
        for rank in range(self._world_size):
            name = report_name(rank)
            data = read_file(self._system, self.path / name)
            reports.append(parse_report(data, rank=rank, file=name))
        self._check_sizes(reports)
        return reports

    def _check_sizes(self, reports: list[RankReport]) -> None:
        for report in reports:
            for name, record in report.files.items():
                found = self._system.stat(self.path / name).st_size
                if found != record.num_bytes:
                    raise CheckpointError(
                        f"{name} has {found} bytes, and its rank reported {record.num_bytes}."
                    )

    def strip(self) -> None:
        """Removes what is no part of a published save."""
        reports = [report_name(rank) for rank in range(self._world_size)]
        own = {WRITERS, *reports, *(f"{name}.partial" for name in reports)}
        for name in self._system.listdir(self.path):
            if name in own:
                self._system.unlink(self.path / name)

    def await_publication(self, timeout_seconds: float) -> None:
        """Returns when rank 0 has published the save.

        Raises:
            CheckpointError: It did not, or not in time.
        """

        def is_over() -> bool:
            try:
                names = self._system.listdir(self.path)
            except FileNotFoundError:
                return True
            self._raise_if_failed(names)
            return False

        if not self._wait(is_over, timeout_seconds):
            raise CheckpointError(
                f"rank 0 did not publish the save of step {self._step} within "
                f"{timeout_seconds:g} s; expected it after every rank's report."
            )
        try:
            data = read_file(self._system, self._published / MANIFEST)
        except FileNotFoundError:
            data = b""
        if not data or parse_manifest(data).token != self._token:
            raise CheckpointError(f"rank 0 gave up the save of step {self._step}.")

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks, and removes what this rank wrote; raises nothing of its own."""
        with suppress(OSError):
            if self._world_size == 1:
                remove_own(self._system, self.path)
                return
            if not self._has_joined:
                with suppress(FileExistsError):
                    self._system.mkdir(self.path)
            mark = json.dumps({"rank": self._rank, "reason": str(error) or repr(error)})
            write_file(self._system, self.path / failure_name(self._rank), mark.encode("ascii"))

    def remove_files(self, names: list[str]) -> None:
        """Gives the room of this rank's files back, unless rank 0 may be about to publish them."""
        if self._has_reported or self._world_size == 1:
            return
        for name in names:
            with suppress(OSError):
                self._system.unlink(self.path / name)

    def leave(self) -> None:
        """Unlocks the directory."""
        self._lock.give_back()

    def _wait(self, is_done: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = self._system.now_seconds() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while not is_done():
            if self._system.now_seconds() >= deadline:
                return False
            self._system.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        return True

    def _raise_if_failed(self, names: list[str]) -> None:
        for rank in range(self._world_size):
            if rank == self._rank or failure_name(rank) not in names:
                continue
            try:
                mark = json.loads(read_file(self._system, self.path / failure_name(rank)))
                reason = str(mark["reason"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = f"its reason cannot be read ({error})"
            raise CheckpointError(f"rank {rank} failed to save step {self._step}: {reason}")
