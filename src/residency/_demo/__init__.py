"""The main job of the package, run on this machine: each case shows what stock code does, and the
same run kept inside.

Owns the list of cases and how one is run; a case only yields rows and promises, and only `_render`
knows about tables and colours. A case is never skipped silently: what cannot run raises.
"""

from residency._demo._apart import Apart
from residency._demo._cases import CASES, run_case
from residency._demo._progress import show_progress
from residency._demo._render import print_report, print_summary, render_report
from residency._demo._report import CaseRow, Promise, Report, reports_to_json
from residency._demo._settings import Settings

__all__ = [
    "CASES",
    "Apart",
    "Promise",
    "Report",
    "CaseRow",
    "Settings",
    "print_report",
    "print_summary",
    "render_report",
    "reports_to_json",
    "run_case",
    "show_progress",
]
