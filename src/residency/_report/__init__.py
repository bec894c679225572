"""Shows what a run recorded: tables, a page with a timeline, and files for other viewers."""

from residency._report._about import NO_DEVICE, has_device
from residency._report._exports import write_tensorboard, write_trace
from residency._report._html import write_page
from residency._report._read import RecordedRun, read_run, read_runs
from residency._report._summary import Row, summarise
from residency._report._table import compare, print_report

__all__ = [
    "NO_DEVICE",
    "Row",
    "RecordedRun",
    "compare",
    "has_device",
    "print_report",
    "read_run",
    "read_runs",
    "summarise",
    "write_page",
    "write_tensorboard",
    "write_trace",
]
