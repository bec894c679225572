"""Shows what a run recorded: tables, a page with a timeline, and files for other viewers."""

from residency._report._about import NO_DEVICE as NO_DEVICE, has_device as has_device
from residency._report._exports import (
    write_tensorboard as write_tensorboard,
    write_trace as write_trace,
)
from residency._report._html import write_page as write_page
from residency._report._read import read_run as read_run, read_runs as read_runs
from residency._report._summary import summarise as summarise
from residency._report._table import compare as compare, print_report as print_report
