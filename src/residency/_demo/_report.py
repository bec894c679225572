"""What a case found, as data: rows, promises and facts, the same for the table and for JSON.

Bytes are whole numbers; a figure that a run did not reach is None and never zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["finished", "out of memory"]


@dataclass(frozen=True)
class CaseRow:
    """The figures of one run of a case.

    Attributes:
        case: The name of the case.
        setting: What distinguishes this run from the case's other runs.
        capacity_bytes: Device bytes that the run was allowed, or None for no limit of ours.
        peak_bytes: The most device bytes allocated at once.
        outcome: Whether the run finished.
        phase: The phase that ran out of memory, or None.
        step: The step that ran out of memory, from 1, or None.
        asked_bytes: What the failing request asked for, or None when the error does not say.
        first_loss: Training loss of the first step, or None when there was none.
        last_loss: Training loss of the last step that gave one.
        heldout_loss: Loss on files that were not trained on, or None when the run did not finish.
        identical: Whether the run equals the reference run bit for bit, or None when not compared.
        seconds: Wall time of the run.
    """

    case: str
    setting: str
    capacity_bytes: int | None
    peak_bytes: int
    outcome: Outcome
    phase: str | None
    step: int | None
    asked_bytes: int | None
    first_loss: float | None
    last_loss: float | None
    heldout_loss: float | None
    identical: bool | None
    seconds: float


@dataclass(frozen=True)
class Promise:
    """Something that the package promises, and whether this run of the case held it."""

    name: str
    held: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """Everything that one case has to say.

    Attributes:
        case: The name of the case.
        device: The device it ran on, in words.
        facts: What was run, by label, in words.
        rows: One per run.
        promises: One per promise of the case.
        snippet: The lines of code that make the difference.
    """

    case: str
    device: str
    facts: dict[str, str]
    rows: tuple[CaseRow, ...]
    promises: tuple[Promise, ...]
    snippet: str

    @property
    def stock(self) -> CaseRow:
        """The run of stock code under the capacity."""
        return next(row for row in self.rows if row.capacity_bytes is not None)

    @property
    def ours(self) -> CaseRow:
        """The run with this package under the same capacity."""
        return next(row for row in reversed(self.rows) if row.capacity_bytes is not None)

    def is_held(self) -> bool:
        """Returns whether every promise held."""
        return all(promise.held for promise in self.promises)


def reports_to_json(reports: Iterable[Report]) -> str:
    """Returns the reports as one JSON object, with the fields of the dataclasses as keys."""
    reports = list(reports)
    document: dict[str, Any] = {
        "held": all(report.is_held() for report in reports),
        "reports": [asdict(report) for report in reports],
    }
    return json.dumps(document, indent=2)


def report_from(fields: Mapping[str, Any]) -> Report:
    """Returns the report of which ``dataclasses.asdict`` made these fields."""
    rows = tuple(CaseRow(**row) for row in fields["rows"])
    promises = tuple(Promise(**promise) for promise in fields["promises"])
    return Report(**{**fields, "rows": rows, "promises": promises})
