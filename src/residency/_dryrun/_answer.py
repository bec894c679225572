"""The answer of a dry run: whether the script fits, the peak of each phase, and who held it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from residency._dryrun._lasting import (
    growth_line,
    line_of_passes,
    line_of_trainings,
    steps_that_fit,
)
from residency._dryrun._settings import RunSettings
from residency._dryrun._verdict import (
    BACKWARD,
    FORWARD,
    STEPS,
    Verdict,
    aim_of,
    is_whole,
    left_out,
    verdict_of,
)
from residency._dryrun._workspaces import lines_of_workspaces, most_of_workspaces
from residency._units import format_bytes, parse_bytes

_COLOURS = {Verdict.FITS: "green", Verdict.DOES_NOT_FIT: "red"}
_WIDEST = 1000  # columns, of which the table takes what it needs
_OF_ERRORS = 3  # out-of-memory errors that are shown
_SCHEMA = 2  # of the JSON: it grows with a key that is renamed, removed or means something else
# Of what a child found, which keys are bytes, and which are for this package alone.
_SIZES = {"asked", "at_peak", "context", "free", "host_peak", "peak_allocated", "peak_reserved"}
_SIZES |= {"pinned_peak", "saved", "unstepped", "largest", "most"}
_SIZES |= {"peak_reserved_without_benchmark"}
_INNER = {"timeline", "marks", "kinds", "pid", "started", "arguments", "libraries", "recomputed"}
_INNER |= {"trainer", "has_template", "loads_on_device", "loads_state", "has_optimizer"}
_INNER |= {"since_error", "phase_of_error", "caught", "written_at", "has_framework", "has_failed"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a dry run.

    Attributes:
        found: What the training process found; of a run that failed for memory, of one that had
            enough of it.
        first: What it found with the capacity that was asked about.
        capacity: Bytes of the device.
        context: Bytes of it that are not torch's.
        title: What the device is called.
        rests_on: What the figures rest on: measurements of the card, or sources alone.
    """

    found: dict[str, Any]
    first: dict[str, Any]
    capacity: int
    context: int
    title: str
    rests_on: str = ""

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
    def errors(self) -> list[dict[str, Any]]:
        """The out-of-memory errors with the capacity that was asked about."""
        errors: list[dict[str, Any]] = self.first["out_of_memory"]
        return errors

    @property
    def verdict(self) -> Verdict:
        """What may be said of the script."""
        return verdict_of(self.first)

    @property
    def fits(self) -> bool:
        """Whether the verdict is that it fits."""
        return self.verdict is Verdict.FITS

    @property
    def is_too_large(self) -> bool:
        """Whether the verdict is that it does not fit; neither may be known."""
        return self.verdict is Verdict.DOES_NOT_FIT

    @property
    def is_complete(self) -> bool:
        """Whether the figures are of a script that came to its end, or to where enough was seen."""
        return is_whole(self.found)

    @property
    def headroom(self) -> int:
        """Bytes that the device still had at the peak; negative where they were missing."""
        return self.capacity - self.needed

    @property
    def remedy(self) -> str | None:
        """A change that gives as many bytes as are missing; None where none is known."""
        remedy = self.first["remedy"]
        if remedy is None or remedy[0] < -self.headroom or not self.is_too_large:
            return None
        return f"{format_bytes(remedy[0])} {remedy[1]}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the answer for JSON, without the timeline; its keys are documented."""
        found = {key: value for key, value in self.found.items() if key not in _INNER}
        room = self.capacity - self.context
        found["phases"] = [
            phase | {"headroom_bytes": room - phase["peak_reserved"]} for phase in found["phases"]
        ]
        most = most_of_workspaces(self.found, self.peak_reserved)
        found["workspaces"] = found["workspaces"] | {"most": most} if most else None
        figures = {
            "schema": _SCHEMA,
            "verdict": self.verdict.value,
            "fits": self.fits,
            "is_complete": self.is_complete,
            "device": self.title,
            "rests_on": self.rests_on,
            "capacity_bytes": self.capacity,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "needed_bytes": self.needed,
            "headroom_bytes": self.headroom,
            "steps_that_fit": steps_that_fit(self.found, self.headroom),
        }
        first = {"out_of_memory": self.errors, "remedy": self.remedy}
        made: dict[str, Any] = _with_units(figures | found | first)
        return made


def answer_of(
    found: dict[str, Any],
    settings: RunSettings,
    device: tuple[str, str],
    roomy: dict[str, Any] | None = None,
) -> Answer:
    """Makes the answer of a run, and of the one with room enough where the first had too little.

    Args:
        found: What the run found.
        settings: Its settings.
        device: What it is called, and what its figures rest on.
        roomy: What the second run found.
    """
    complete = found if roomy is None else roomy
    return Answer(complete, found, settings.capacity, found["context"], *device)


def _with_units(value: Any) -> Any:
    """Returns a value for JSON with the unit of each size in its key."""
    if isinstance(value, list):
        return [_with_units(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key + "_bytes" * (key in _SIZES): _with_units(inner) for key, inner in value.items()}


def print_answer(answer: Answer, console: Console, questions: Iterable[str] = ()) -> None:
    """Prints the answer for a reader, and what may be asked next."""
    begin, rest = first_line(answer)
    console.print(f"[bold {_COLOURS.get(answer.verdict, 'yellow')}]{begin}[/]", end="")
    console.print(rest, highlight=False, markup=False, soft_wrap=True)
    _say_plainly(console, (*below_first_line(answer), *questions, *of_second_run(answer)))
    table = _table(answer)
    wide = console.options.update(width=_WIDEST)
    # In a file or a narrow terminal, too: no figure of it may be cut.
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    _say_plainly(console, notes(answer))
    _say_plainly(
        console, ["the sources of these figures, and the limits of a dry run: --html FILE"]
    )


def _say_plainly(console: Console, texts: Iterable[str]) -> None:
    """Prints texts in which brackets are the script's own, or an error's."""
    for text in texts:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def first_line(answer: Answer) -> tuple[str, str]:
    """Returns the first line of an answer: what may be said of the script, and its figures."""
    spare = answer.headroom
    what = f": peak {format_bytes(answer.needed)} with a context of {format_bytes(answer.context)}"
    if not answer.is_complete:
        what += ", as far as the script came"
    if answer.is_too_large and spare < 0:
        what += f", {format_bytes(-spare)} more than there is"
    elif answer.is_too_large:
        what = f": the free bytes lie in pieces; {what[2:]}"
    elif answer.fits:
        what += f", {format_bytes(spare)} to spare"
    what += f" ({answer.title}, {format_bytes(answer.capacity)})"
    if answer.fits:
        what += "".join(f"; {each}" for each in _conditions(answer))
    lasts = steps_that_fit(answer.found, spare) if answer.fits else None
    word = answer.verdict.value
    return word if lasts is None else f"{word} for about {lasts:,} steps", what


def _conditions(answer: Answer) -> Iterator[str]:
    """Yields what is to be known of a script that fits, beside its figures."""
    number = len(answer.errors)
    if number:
        yield f"the script caught {number} out-of-memory error{'s' * (number > 1)} and went on"
    if answer.found["ended"] == "left":
        yield "it was left in its loop"
    if answer.first["seen"][STEPS] and (unstepped := answer.found["unstepped"]):
        yield (
            f"an optimizer of {format_bytes(unstepped)} of parameters made no step, so that their "
            "gradients and its state are not in this"
        )
    if (of_trainings := line_of_trainings(answer.found, answer.headroom)) is not None:
        yield of_trainings
    if thaws := answer.found["left_out"]["thaws"]:
        yield (
            f"{thaws[0]} trains more parameters in some round, and later rounds were left out: "
            "memory that comes with them may not be in this"
        )
    aim = aim_of(answer.first)
    if aim != STEPS:
        seen = answer.first["seen"][aim]
        kind = aim.removesuffix("_passes")
        if seen:
            yield f"no training: {seen} {kind} pass{'es' * (seen > 1)} and no optimizer step"
        else:
            yield "no training step was seen: this is of the script as it ran"


def below_first_line(answer: Answer) -> Iterator[str]:
    """Yields what stands below the first line: where the device ran out of memory, the first time
    first, and what was left out.
    """
    yield from lines_of_workspaces(answer.found, answer.peak_reserved)
    if answer.is_too_large:
        yield from _errors_of(answer)
        if (growing := line_of_passes(answer.found)) is not None:
            yield growing
    if answer.remedy is not None:
        yield f"this would have made room there: {answer.remedy}"
    yield from left_out(answer.found)
    for is_at_once, when in ((True, "at the same time"), (False, "before or after")):
        others = [each for each in answer.found["others"] if each["at_once"] is is_at_once]
        if others:
            number = len(others)
            yield (
                f"{number} other process{'es' * (number > 1)} of the command used a device {when}, "
                f"with {format_bytes(others[0]['peak_reserved'])}{' and less' * (number > 1)} "
                f"({others[0]['script']})" + ": on one card that is to be added" * is_at_once
            )


def _errors_of(answer: Answer) -> Iterator[str]:
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
        f"{found['steps']} optimizer steps in {found['seconds']:.0f} s without a GPU, as with "
        f"torch {found['torch']}, eager"
    )
    if found["has_no_optimizer"]:
        yield "no optimizer was made: each backward pass was taken for one of its steps"
    if found["has_compiled"]:
        yield "torch.compile compiled nothing: the functions ran eagerly, with the memory of that"
    yield from (f"{each['line']}: {each['what']}" for each in found["guesses"])
    if (growing := growth_line(found)) is not None:
        yield growing
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


def foundations(answer: Answer) -> Iterator[str]:
    """Yields what the figures rest on, and what no dry run sees: the same for many scripts."""
    if answer.rests_on:
        yield f"the figures rest on: {answer.rests_on}"
    yield "a torch before 2.4 has taken up to 38 % more"
    yield (
        f"changes of files were seen by Python's {answer.found['files_seen_by']}: changes that C++ "
        "or other programs made by themselves are not put back"
    )


def of_second_run(answer: Answer) -> Iterator[str]:
    """Yields, where the script had too little memory, whose figures the phases have."""
    if answer.is_too_large and answer.found is not answer.first:
        yield "the figures below are of a second run, on a device that holds everything"


def _notes_of_end(answer: Answer) -> Iterator[str]:
    """Yields how the run ended, and what it was too short or too little for."""
    found = answer.found
    if answer.verdict is Verdict.INTERRUPTED or found["was_interrupted"]:
        by = " and ".join(answer.first["signals"]) or "Ctrl-C"
        yield f"{by} ended the run before its time: the figures are as known by then"
    elif found["ended"] == "left":
        yield (
            "the script was left in its loop after these steps. More: --steps, or the script's own "
            "number of steps with --steps 0"
        )
    elif found["ended"] == "stopped" and found["error"]:
        yield f"after enough was seen the script ended in {found['error']}"
    elif answer.verdict is Verdict.FAILED:
        yield f"the script ended in {found['error']}"
    elif answer.verdict is Verdict.KILLED:
        yield "the process was killed: the figures are as known by then"
    if answer.verdict in (Verdict.FITS, Verdict.UNSEEN):
        yield from _notes_of_aim(answer)


def _notes_of_aim(answer: Answer) -> Iterator[str]:
    """Yields what was not seen of a training, and what to give the script for that."""
    if answer.peak_reserved == 0:
        yield (
            "nothing was put on the device: all of the script's work was on the CPU. Give it the "
            "arguments with which it uses CUDA, such as --cuda or --device cuda"
        )
        return
    if answer.fits and not answer.first["seen"][STEPS] and not answer.found["steps"]:
        yield "the script made no optimizer step: there is no peak of training in these figures"
    elif not answer.fits:
        yield from _notes_of_nothing(answer.first)


def _notes_of_nothing(found: dict[str, Any]) -> Iterator[str]:
    """Yields how far a script came that made no step, and what to look for."""
    seen = found["seen"]
    if found["has_optimizer"]:
        came = (
            f"the script made an optimizer, {seen[FORWARD]} forward and {seen[BACKWARD]} backward "
        )
        came += "passes and no step"
    else:
        came = "no optimizer was made, and no model on the device came to the end of a forward pass"
    if found["caught"]:
        yield f"{came}. The last error that it caught: {found['caught']}"
    else:
        yield (
            f"{came}. Look for an error in its output, or give it the arguments with which it "
            "trains"
        )
