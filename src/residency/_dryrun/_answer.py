"""The answer of a dry run: whether the script fits, the peak of each phase, and who held it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from residency._dryrun._settings import RunSettings
from residency._units import format_bytes, parse_bytes

_ENDED = ("finished", "left")  # as the script has it, or in its loop
_WIDEST = 1000  # columns, of which the table takes what it needs
_OF_ERRORS = 3  # out-of-memory errors that are shown
_SCHEMA = 1  # of the JSON: it grows with a key that is renamed, removed or means something else
# Of what a child found, which keys are bytes, and which are for this package alone.
_SIZES = {"asked", "at_peak", "context", "free", "host_peak", "peak_allocated", "peak_reserved"}
_SIZES |= {"pinned_peak", "saved"}
_INNER = {"timeline", "marks", "kinds", "pid", "started", "arguments", "libraries", "recomputed"}
_INNER |= {"trainer", "has_template", "loads_on_device", "loads_state"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a dry run.

    Attributes:
        found: What the training process found; of a run that failed for memory, of one that had
            enough of it.
        errors: The out-of-memory errors of the run with the capacity that was asked about.
        capacity: Bytes of the device.
        context: Bytes of it that are not torch's.
        title: What the device is called.
    """

    found: dict[str, Any]
    errors: list[dict[str, Any]]
    capacity: int
    context: int
    title: str

    @property
    def peak_allocated(self) -> int:
        """The most bytes that tensors held."""
        return max((phase["peak_allocated"] for phase in self.found["phases"]), default=0)

    @property
    def peak_reserved(self) -> int:
        """The most bytes that torch's allocator had from the device."""
        return max((phase["peak_reserved"] for phase in self.found["phases"]), default=0)

    @property
    def needed(self) -> int:
        """Bytes of the device at the peak, the context among them."""
        return self.peak_reserved + self.context

    @property
    def fits(self) -> bool:
        """Whether no allocation failed, or the script made room and went on to its end."""
        return not self.errors or self.was_caught

    @property
    def was_caught(self) -> bool:
        """Whether the script came to its end in spite of out-of-memory errors."""
        return bool(self.found["out_of_memory"]) and self.found["ended"] in _ENDED

    @property
    def is_complete(self) -> bool:
        """Whether the script came to its end, or to where enough was seen."""
        return self.found["ended"] in (*_ENDED, "stopped")

    @property
    def is_good(self) -> bool:
        """Whether it fits, and the script did not fail for a reason of its own."""
        return self.fits and self.is_complete

    @property
    def headroom(self) -> int:
        """Bytes that the device still had at the peak; negative where they were missing."""
        return self.capacity - self.needed

    def as_dict(self) -> dict[str, Any]:
        """Returns the answer for JSON, without the timeline; its keys are documented."""
        found = {key: value for key, value in self.found.items() if key not in _INNER}
        room = self.capacity - self.context
        found["phases"] = [
            phase | {"headroom_bytes": room - phase["peak_reserved"]} for phase in found["phases"]
        ]
        figures = {
            "schema": _SCHEMA,
            "fits": self.fits,
            "is_complete": self.is_complete,
            "device": self.title,
            "capacity_bytes": self.capacity,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "needed_bytes": self.needed,
            "headroom_bytes": self.headroom,
        }
        made: dict[str, Any] = _with_units(figures | found | {"out_of_memory": self.errors})
        return made


def answer_of(
    found: dict[str, Any], settings: RunSettings, title: str, roomy: dict[str, Any] | None = None
) -> Answer:
    """Makes the answer of a run, and of the one with room enough where the first had too little."""
    complete = found if roomy is None else roomy
    return Answer(complete, found["out_of_memory"], settings.capacity, found["context"], title)


def _with_units(value: Any) -> Any:
    """Returns a value for JSON with the unit of each size in its key."""
    if isinstance(value, list):
        return [_with_units(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key + "_bytes" * (key in _SIZES): _with_units(inner) for key, inner in value.items()}


def print_answer(answer: Answer, console: Console) -> None:
    """Prints the answer for a reader."""
    console.print(_headline(answer), highlight=False, soft_wrap=True)
    if not answer.fits:
        _say_plainly(console, errors_of(answer))
    table = _table(answer)
    wide = console.options.update(width=_WIDEST)
    # In a file or a narrow terminal, too: no figure of it may be cut.
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    _say_plainly(console, notes(answer))


def _say_plainly(console: Console, texts: Iterable[str]) -> None:
    """Prints texts in which brackets are the script's own, or an error's."""
    for text in texts:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _headline(answer: Answer) -> str:
    device = f"{answer.title}, {format_bytes(answer.capacity)}"
    needed, spare = format_bytes(answer.needed), answer.headroom
    what = f"peak {needed} with a context of {format_bytes(answer.context)}"
    if not answer.is_complete:
        what += ", as far as the script came"
    if answer.was_caught:
        number = len(answer.errors)
        what += f"; the script caught {number} out-of-memory error{'s' * (number > 1)} and went on"
    if answer.fits and answer.found["ended"] == "error":
        # Nothing says what the rest takes, and nothing at all where it failed at once.
        return f"[bold yellow]the script failed[/]: {what} ({device})"
    if answer.fits:
        return f"[bold green]fits[/]: {what}, {format_bytes(spare)} to spare ({device})"
    if spare < 0:
        much = f"{format_bytes(-spare)} more than there is"
        return f"[bold red]does not fit[/]: {what}, {much} ({device})"
    return f"[bold red]does not fit[/]: the free bytes lie in pieces; {what} ({device})"


def errors_of(answer: Answer) -> Iterator[str]:
    """Yields where the first run ran out of memory, the first time first."""
    for error in answer.errors[:_OF_ERRORS]:
        where = f" at {error['line']}" if error["line"] else ""
        operation = f" ({error['operation']})" if error["operation"] else ""
        yield (
            f"out of memory in {error['phase']}, step {error['step']}{where}{operation}: "
            f"{format_bytes(error['asked'])} were asked for, and {format_bytes(error['free'])} free"
        )


def _table(answer: Answer) -> Table:
    phases = answer.found["phases"]
    kinds = [
        kind for kind in answer.found["kinds"] if any(each["at_peak"].get(kind) for each in phases)
    ]
    unit = "GiB" if answer.peak_reserved >= parse_bytes("1GiB") else "MiB"
    divisor = parse_bytes(f"1{unit}")

    def size(num_bytes: int) -> str:
        return f"{num_bytes / divisor:,.2f}" if num_bytes else "-"

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"peaks in {unit}")
    for name in ("visits", "allocated", "reserved", "headroom", *kinds):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for phase in phases:
        if phase["peak_reserved"] == 0:
            continue
        table.add_row(
            phase["name"],
            str(phase["visits"]),
            size(phase["peak_allocated"]),
            size(phase["peak_reserved"]),
            f"{(answer.capacity - answer.context - phase['peak_reserved']) / divisor:,.2f}",
            *(size(phase["at_peak"].get(kind, 0)) for kind in kinds),
        )
    return table


def notes(answer: Answer) -> Iterator[str]:
    """Yields what is to be said of a run besides its figures of the device."""
    found = answer.found
    yield (
        f"host memory: about {format_bytes(found['host_peak'])}, page-locked "
        f"{format_bytes(found['pinned_peak'])}"
        + (f"; {found['files']} files saved, {format_bytes(found['saved'])}" * bool(found["files"]))
        + (", and removed" * (bool(found["files"]) and not found["is_real"]))
    )
    yield (
        f"{found['steps']} optimizer steps in {found['seconds']:.0f} s without a GPU; the figures "
        f"hold for torch {found['torch']}, eager"
    )
    if found["has_no_optimizer"]:
        yield "no optimizer was made: each backward pass was taken for one of its steps"
    if found["has_compiled"]:
        yield "torch.compile compiled nothing: the functions ran eagerly, with the memory of that"
    yield _note_of_files(found["files_seen_by"])
    yield from (f"residency warned: {text}" for text in found["warnings"])
    yield from _notes_of_end(answer)
    if found["is_cut"] and not any(each["name"].endswith("save") for each in found["phases"]):
        size = format_bytes(
            max(
                each["at_peak"].get("parameters", 0) + each["at_peak"].get("optimizer state", 0)
                for each in found["phases"]
            )
        )
        yield (
            "no save was seen in these steps. One of parameters and optimizer state that comes "
            f"later writes {size}: torch.save takes nothing more on the device, a copy there {size}"
        )
    if found["retries"]:
        yield (
            f"the allocator gave its cache back {found['retries']} times to find room, which is "
            "slow on a GPU"
        )
    if answer.fits and 0 <= answer.headroom < answer.capacity // 50:
        yield (
            "less than 2 % is to spare: another version of torch or of cuDNN may take as much, and "
            "a display takes some hundred MiB"
        )


def _note_of_files(seen_by: str) -> str:
    """Returns what watched the script's files: what it does not see is not put back."""
    return (
        f"changes of files were seen by Python's {seen_by}: what C++ or other programs changed by "
        "themselves is not put back"
    )


def _notes_of_end(answer: Answer) -> Iterator[str]:
    """Yields how the run ended, and what it was too short or too little for."""
    found = answer.found
    if found["was_interrupted"]:
        yield "you interrupted the run: the figures are what was known by then"
    elif found["ended"] == "left":
        yield (
            "the script was left in its loop after these steps. More: --steps, or the script's own "
            "number of steps with --steps 0"
        )
    elif found["ended"] == "stopped" and found["error"]:
        yield f"the script ended in {found['error']}, after what was to be seen"
    elif found["ended"] == "error" and answer.fits:
        yield f"the script failed for a reason of its own: {found['error']}"
    elif found["ended"] == "running" and not answer.errors:
        yield "the process was killed: the figures are what was known by then"
    if answer.peak_reserved == 0 and found["ended"] not in ("running", "error"):
        yield (
            "nothing was put on the device: what the script did, it did on the CPU. Give it the "
            "arguments with which it uses CUDA, such as --cuda or --device cuda"
        )
    elif found["steps"] == 0 and found["ended"] not in ("running", "error"):
        yield (
            "the script made no optimizer step: there is no peak of training in these figures. "
            "Give it the arguments with which it trains"
        )
