"""How the ranks of one save find each other, and what they say to each other, through files.

[Note: which attempts make a save] Each call of each rank is an attempt with a directory and a name
of its own, drawn at random. Ranks do not count: one may have failed, or left a call out, that
another made. Another rank offers its attempt by an entry in rank 0's directory; rank 0 takes one of
each rank, by renaming the entry; only then that rank moves its files there. Both have seen the
other's name then, so both are alive, and what an earlier attempt left has no part in it. A rank
that fails says so in its directory's name, which rank 0, or each rank that rank 0 took, obeys at
once.

[Note: a failure in doubt] A rank that sees another rank's failure mark, and no sign that it belongs
to its own attempt, cannot tell whether the other rank failed in this save or in an earlier one that
this rank skipped; no other meeting place would tell it either. It lets some time go by before it
joins a later attempt of the other rank. If the other makes none, or this rank itself is asked for
the step again, the mark belonged to this save.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from residency._checkpoint._disk._folder import SaveFolder
from residency._checkpoint._disk._manifest import (
    MANIFEST,
    RankReport,
    dump_report,
    parse_manifest,
    parse_report,
)
from residency._checkpoint._disk._marks import (
    WRITERS,
    AttemptMark,
    entries_in,
    failure_name,
    remove_own,
    report_name,
)
from residency._checkpoint._disk._published import (
    PublishedSaves,
    RankFolder,
    new_token,
    saving_name,
    step_name,
)
from residency._checkpoint._disk._request import SaveRequest
from residency._checkpoint._disk._system import (
    System,
    close_quietly,
    exists,
    read_file,
    sync_folder,
    write_file,
)
from residency._errors import CheckpointError

_FIRST_PAUSE_SECONDS = 0.001  # ranks in step find each other within milliseconds
_LAST_PAUSE_SECONDS = 0.05  # for those that wait long, 20 looks a second at a shared directory
# [Note: a failure in doubt] A tenth of the time-out, for ranks that are not quite in step.
_PART_IN_DOUBT = 0.1
_MAX_SECONDS_IN_DOUBT = 10.0  # with the longest time-outs, too

T = TypeVar("T")


class Attempt:
    """One attempt of one rank to take part in a save. [Note: which attempts make a save]

    Args:
        layout: The directory of the saves.
        system: Makes the system calls.
        request: What this rank is asked for.
        timeout_seconds: How long to wait for other ranks, each time.
        known: Failures that this rank's earlier attempts knew of, which do not concern this one.

    Attributes:
        folder: Where this rank writes.
        name: What tells the save apart, if this is rank 0's attempt and it is published.
    """

    def __init__(
        self,
        layout: PublishedSaves,
        system: System,
        request: SaveRequest,
        *,
        timeout_seconds: float,
        known: frozenset[Path],
    ) -> None:
        self._attempt = new_token()
        self.name = f"{request.token}-{request.rank:05d}-{self._attempt}"
        self.folder = SaveFolder(system, layout.path / saving_name(request.step, self.name))
        self._published = layout
        self._system = system
        self._step = request.step  # the request has the bytes, and does not stay
        self._token = request.token
        self._rank = request.rank
        self._world_size = request.world_size
        self._is_repeated = request.is_repeated
        self._timeout_seconds = timeout_seconds
        self._known = known
        self._offered: set[Path] = set()
        self._in_doubt_since: dict[int, float] = {}
        self._knows_of_failure = False  # by rank 0, that the save failed

    def begin(self) -> None:
        """Makes this rank's directory, and offers to take part to rank 0, if it is there."""
        for other in self._others():
            if other.rank == self._rank and not other.has_failed:  # of a process that died
                with suppress(OSError):
                    self._published.remove(other.path)
        self.folder.join()
        if self._rank != 0:
            self._offer()

    def failures(self) -> frozenset[Path]:
        """Returns the directories of attempts of which it is known that they failed."""
        return frozenset(other.path for other in self._others() if other.has_failed)

    # ------------------------------------------------------------------------------------- rank 0

    def collect(self, report: RankReport) -> list[RankReport]:
        """Returns what all ranks wrote.

        Args:
            report: What rank 0 wrote.

        Raises:
            CheckpointError: A rank failed, or did not report in time.
        """
        missing: list[int] = []

        def has_all() -> bool:
            names = self._system.listdir(self.folder.path)
            missing[:] = [r for r in range(1, self._world_size) if report_name(r) not in names]
            self._take(entries_in(names), missing)
            return not missing

        if not self._wait(has_all):
            raise CheckpointError(
                f"of {self._world_size} ranks, {', '.join(map(str, missing))} did not report "
                f"within {self._timeout_seconds:g} s; the save of step {self._step} is given up, "
                "and those before it are as they were. Raise timeout_seconds where they are slow."
            )
        reports = [report]
        for rank in range(1, self._world_size):
            name = report_name(rank)
            data = read_file(self._system, self.folder.path / name)
            reports.append(parse_report(data, rank=rank, file=name))
        return reports

    def _take(self, entries: list[AttemptMark], missing: list[int]) -> None:
        """Takes one attempt of each rank that has offered one and has none taken.

        Raises:
            CheckpointError: A rank failed.
        """
        others = self._others()
        attempts = {(entry.rank, entry.attempt) for entry in entries}
        for other in others:
            if other.has_failed and (other.rank, other.attempt) in attempts:
                raise self._failure_of(other)
        taken = {entry.rank for entry in entries if entry.is_taken}
        for rank in missing:
            of_rank = [other for other in others if other.rank == rank]
            if rank in taken or self._is_in_doubt(rank, of_rank):
                continue
            offer = next((entry for entry in entries if entry.rank == rank), None)
            if offer is not None:
                path = self.folder.path
                self._system.rename(path / offer.name, path / replace(offer, is_taken=True).name)

    # ------------------------------------------------------------------------------- other ranks

    def hand_over(self, report: RankReport) -> None:
        """Moves what this rank wrote to rank 0's; returns when rank 0 has published the save.

        Args:
            report: What this rank wrote; its files are on the disk.

        Raises:
            CheckpointError: The save failed, or was not published in time.
        """
        first = self._wait(self._offer)
        if first is None:
            raise CheckpointError(
                f"rank 0 took no part in the save of step {self._step} within "
                f"{self._timeout_seconds:g} s; the save is given up, and those before it are as "
                "they were. Save the same step on every rank."
            )
        try:
            for name in report.files:
                self._system.rename(self.folder.path / name, first.path / name)
            sync_folder(self._system, first.path)
            data = dump_report(report, rank=self._rank)
            # Last: rank 0 may publish as soon as the report is there, and brings its name to the
            # disk with its own.
            write_file(self._system, first.path / report_name(self._rank), data)
        except FileNotFoundError:
            if exists(self._system, first.path):
                raise
            raise self._given_up(first) from None
        self._await_publication(first)
        remove_own(self._system, self.folder.path)

    def _offer(self) -> RankFolder | None:
        """Offers this attempt to rank 0's attempts; returns the one that has taken it, if any.

        Raises:
            CheckpointError: Rank 0 failed.
        """
        open_for_me: list[RankFolder] = []
        failed: list[RankFolder] = []
        for other in self._others():
            if other.rank != 0:
                continue
            try:
                names = self._system.listdir(other.path)
            except FileNotFoundError:
                continue
            entries = entries_in(names)
            mine = {entry.attempt: entry for entry in entries if entry.rank == self._rank}
            own = mine.pop(self._attempt, None)
            if own is not None and own.is_taken:
                if other.has_failed:
                    raise self._failure_of(other)
                return other
            if mine:  # it goes with an earlier attempt of this rank
                continue
            if other.has_failed:
                failed.append(other)
            elif WRITERS in names:  # without it, nothing says that the directory is ours
                open_for_me.append(other)
        if not self._is_in_doubt(0, failed + open_for_me):
            for other in open_for_me:
                self._leave_offer(other.path)
        return None

    def _leave_offer(self, path: Path) -> None:
        if path not in self._offered:  # once: rank 0 may have renamed it
            self._offered.add(path)
            offer = AttemptMark(self._rank, self._attempt, is_taken=False)
            with suppress(FileNotFoundError):
                fd = self._system.open(path / offer.name, os.O_WRONLY | os.O_CREAT)
                close_quietly(self._system, fd)

    def _await_publication(self, first: RankFolder) -> None:
        if not self._wait(lambda: not exists(self._system, first.path)):
            raise CheckpointError(
                f"rank 0 did not publish the save of step {self._step} within "
                f"{self._timeout_seconds:g} s; expected it after every rank's report. "
                "Raise timeout_seconds where it is slow."
            )
        try:
            data = read_file(self._system, self._published.path / step_name(self._step) / MANIFEST)
        except FileNotFoundError:
            data = b""
        name = first.path.name.removeprefix(saving_name(self._step, ""))
        if not data or parse_manifest(data).token != name:
            raise self._given_up(first)

    def _given_up(self, first: RankFolder) -> CheckpointError:
        for other in self._others():
            if other.has_failed and other.attempt == first.attempt:
                return self._failure_of(other)
        self._knows_of_failure = True
        return CheckpointError(f"rank 0 gave up the save of step {self._step}.")

    # -------------------------------------------------------------------------------------- all

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks, and removes what this rank wrote; raises nothing of its own."""
        with suppress(OSError, CheckpointError):
            if self._world_size == 1 or self._knows_of_failure:  # no other rank is to know
                remove_own(self._system, self.folder.path)
                return
            if not self.folder.has_joined:
                self.folder.join()
            self.folder.remove_data()  # the disk may have no room for the reason
            reason = {"rank": self._rank, "reason": str(error) or repr(error)}
            with suppress(OSError):
                mark = self.folder.path / failure_name(self._rank)
                write_file(self._system, mark, json.dumps(reason).encode("ascii"))
            failed = self.folder.path.with_name(f"{self.folder.path.name}-failed")
            self._system.rename(self.folder.path, failed)
            self.folder.path = failed
            self.folder.remove_data()  # what another rank moved here meanwhile

    def _is_in_doubt(self, rank: int, attempts: list[RankFolder]) -> bool:
        """Returns whether a failure of another rank may still concern this attempt.

        [Note: a failure in doubt]

        Raises:
            CheckpointError: It does.
        """
        failed = [each for each in attempts if each.has_failed and each.path not in self._known]
        if not failed:
            return False
        now = self._system.now_seconds()
        begun = self._in_doubt_since.setdefault(rank, now)
        if self._is_repeated():
            raise self._failure_of(failed[-1])
        if now < begun + min(_PART_IN_DOUBT * self._timeout_seconds, _MAX_SECONDS_IN_DOUBT):
            return True
        if all(each.has_failed for each in attempts):
            raise self._failure_of(failed[-1])
        return False

    def _failure_of(self, other: RankFolder) -> CheckpointError:
        """Returns the error of a rank that learns of another's failure."""
        self._knows_of_failure = self._rank != 0  # the others hear it from rank 0
        try:
            reason = str(
                json.loads(read_file(self._system, other.path / failure_name(other.rank)))["reason"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"its reason cannot be read ({error})"
        return CheckpointError(f"rank {other.rank} failed to save step {self._step}: {reason}")

    def _others(self) -> list[RankFolder]:
        found = self._published.of_ranks(self._step, self._token)
        return [each for each in found if each.attempt != self._attempt]

    def _wait(self, look: Callable[[], T]) -> T:
        """Looks until there is something, or the time is over; returns what the last look found."""
        deadline = self._system.now_seconds() + self._timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while not (found := look()) and self._system.now_seconds() < deadline:
            self._system.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        return found
