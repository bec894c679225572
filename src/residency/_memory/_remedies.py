"""The remedies that would have made room, in the order to try them: one table, one reckoning.

A remedy stands as one that fits only where the bytes that it gives at the moment of the failure are
as many as were missing then, with what an optimizer's step or a module's move is known to take
besides. What nothing tells in bytes, or what may be wanted, is said to be possible, and after those
that were reckoned.
`tests/memory/test_advice.py` plants failures, does what is said, and looks whether the run ends.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from residency._memory._buckets import bytes_beside_buckets
from residency._memory._groups import IN_CYCLES, HolderGroup
from residency._memory._history import SteadyGrowth
from residency._memory._holders._autograd import LEAF_OF_GRAPH
from residency._memory._holders._holders import Holder
from residency._memory._moving import FailedMove
from residency._memory._state import MemoryState
from residency._memory._stepping import FailedStep, offload_of_states, offload_of_step
from residency._units import MIB, format_bytes

_FEWEST_GRAPHS = 3  # that a list keeps
_LONG_LIST = 6  # tensors: fewer may be what one computation needs
_PART_OF_SHAPES = 0.9  # of a model's bytes that another one has in the same shapes
_ROUNDING = 0.01  # of the sizes in torch's messages
_OWNED = ("parameter", "buffer", "optimizer state")
_PASSES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes room.

    Attributes:
        num_bytes: What it gives at the moment of the failure; 0 for nothing.
        text: What to do.
        is_sure: Whether it gives that much wherever it can be done at all.
        is_enough: Whether it was reckoned to fit in another way than by these bytes.
    """

    num_bytes: int
    text: str
    is_sure: bool = True
    is_enough: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The moment in which memory ran out, as far as it is known.

    Attributes:
        state: The memory.
        groups: Who holds it.
        growing: Of which groups it is known that they grow, by their places, and how.
        growth: How what is held grows; None where it does not.
        asked: The bytes that were asked for; None where nothing was.
        room: The bytes that could still be had.
        phase: The name of the phase; empty outside of all.
        step: The optimizer's step that failed.
        move: The move of a module that failed.
        is_backward: Whether a backward pass failed.
        is_outside_known: Whether what lies outside of this process's torch may be in the way.
        is_new: Whether no visit of the phase has come to its end, so that nothing tells its rest.
        is_cache_known: Whether what is free in the cache was there when it failed.
    """

    state: MemoryState
    groups: Sequence[HolderGroup]
    growing: Mapping[int, str]
    growth: SteadyGrowth | None = None
    asked: int | None = None
    room: int = 0
    phase: str = ""
    step: FailedStep | None = None
    move: FailedMove | None = None
    is_backward: bool = False
    is_outside_known: bool = True
    is_new: bool = False
    is_cache_known: bool = True

    @property
    def missing(self) -> int:
        """The bytes that were missing: for the request, and for the rest of a step or a move."""
        short = max(0, (self.asked or 0) - self.room)
        rests = [each.missing_bytes(self.room) for each in (self.step, self.move) if each]
        return max(short, *rests, 0)

    @property
    def is_of_training(self) -> bool:
        """Whether a pass or a step failed, which asks for what it computes."""
        return self.step is not None or self.is_backward or self.phase in _PASSES

    @property
    def holders(self) -> Iterator[Holder]:
        """Those of all groups but of errors that are kept."""
        for group in self.groups:
            if group.what != "error":
                yield from group.holders


def remedies(failure: Failure) -> list[Remedy]:
    """Returns what would make room, in the order to try it, each with the bytes that it gives."""
    found = [remedy for make in _TABLE for remedy in make(failure) if remedy.num_bytes > 0]
    return sorted(found, key=lambda remedy: not remedy.is_sure)


def fitting(failure: Failure, found: Sequence[Remedy]) -> tuple[list[Remedy], list[Remedy]]:
    """Returns the remedies that were reckoned to fit, and those that may, both in their order.

    Where what is held grows, and by what is not known, none is sure to last.
    """
    enough = [each for each in found if each.is_enough or each.num_bytes >= failure.missing]
    is_lasting = failure.growth is None or bool(failure.growing)
    sure = [each for each in enough if each.is_sure and is_lasting]
    return sure, [each for each in enough if each not in sure]


# ------------------------------------------------------------------------------- the table's lines


def _kept_errors(failure: Failure) -> Iterator[Remedy]:
    for group in failure.groups:
        if group.what != "error":
            continue
        if group.path.startswith(("sys.", "IPython")):
            done = "residency.reclaim(errors=True) lets go of it"
        else:
            done = "let go of it, or keep str() of it alone"
        yield Remedy(group.num_bytes, f"held by an error from before, under {group.path}: {done}")


def _what_grows(failure: Failure) -> Iterator[Remedy]:
    for at, rate in failure.growing.items():
        group = failure.groups[at]
        yield Remedy(group.num_bytes, f"in {group}, {rate}: {let_go_text(group)}")


def let_go_text(group: HolderGroup) -> str:
    """Returns how to let go of what a list or a graph keeps."""
    if group.what == "graph":
        return "let go of the graph, with .item() or .detach(), before you keep a value"
    if group.what == "cycle":
        return "gc.collect() frees it, or break the cycle"
    return "let go of it, or keep it on the host, with .detach().cpu()"


def _free_in_cache(failure: Failure) -> Iterator[Remedy]:
    state = failure.state
    if failure.is_cache_known:
        yield Remedy(
            state.returnable, "cached here and free: torch.accelerator.empty_cache() returns it"
        )
    yield Remedy(state.draining, "freed, but a stream still uses it: synchronise before asking")


def _cycles(failure: Failure) -> Iterator[Remedy]:
    num_bytes = sum(e.num_bytes for e in failure.holders if e.path.startswith(IN_CYCLES))
    yield Remedy(num_bytes, "in reference cycles: gc.collect() frees it, or break the cycle")


def _bucket_views(failure: Failure) -> Iterator[Remedy]:
    yield Remedy(
        bytes_beside_buckets(),
        "of gradients beside the buckets of DistributedDataParallel: give it "
        "gradient_as_bucket_view=True, and they are views of those",
    )


def _pieces(failure: Failure) -> Iterator[Remedy]:
    yield Remedy(
        failure.state.stuck or 0,
        "free, but in pieces between live tensors: "
        "PYTORCH_ALLOC_CONF=expandable_segments:True lets pieces that lie side by side be used",
        is_sure=False,  # a piece between two tensors stays one
    )


def _copies(failure: Failure) -> Iterator[Remedy]:
    """Counts tensors without an owner, of an owned one's shape: each of these has one copy."""
    owned: collections.Counter[tuple[object, object]] = collections.Counter()
    sizes = {}
    for holder in failure.holders:
        if holder.kind in _OWNED:
            owned[holder.shape, holder.dtype] += 1
            sizes[holder.shape, holder.dtype] = holder.num_bytes
    grows = {id(each) for at in failure.growing for each in failure.groups[at].holders}
    num_bytes, where = 0, ""
    for holder in failure.holders:  # the largest come first
        key = holder.shape, holder.dtype
        if holder.kind != "tensor" or holder.path.startswith(LEAF_OF_GRAPH):
            continue  # which is a parameter itself
        if owned[key] > 0 and id(holder) not in grows:
            owned[key] -= 1
            num_bytes += holder.num_bytes
            where = where or holder.path
    left = [size for key, size in sizes.items() if owned[key] > 0]
    if num_bytes and not failure.is_of_training:
        num_bytes += _of_next(failure, left)
    yield Remedy(
        num_bytes,
        "in copies of parameters or states, a clone for a save perhaps, which "
        f"residency.snapshot() or .cpu() make on the host: {where}",
    )


def _second_model(failure: Failure) -> Iterator[Remedy]:
    """Finds a copy of a model that is being made, or a model with no gradients whose tensors
    another one has in the same shapes.
    """
    move = failure.move
    if move is not None and move.copied_bytes:
        whole = move.copied_bytes + move.rest_bytes
        yield Remedy(
            whole,
            f"in a copy of a model that copy.deepcopy makes; {format_bytes(whole)} of it are to "
            "come to the device: residency.park(model) before, residency.unpark(model) after, and "
            "the copy is on the host",
        )
        return
    models: dict[str, list[Holder]] = {}
    trained = {each.root for each in failure.holders if each.kind == "gradient"}
    for holder in failure.holders:
        if holder.kind == "parameter" and holder.root:
            models.setdefault(holder.root, []).append(holder)
    wholes = {root: _shapes_of(failure, held) for root, held in models.items()}
    pairs = [
        (second, first)
        for second in models
        for first in models
        if second != first
        and second not in trained
        and _is_twin(wholes[second], wholes[first], is_part=_is_loaded_like(failure, models[first]))
    ]
    for second, first in pairs[:1]:
        num_bytes = sum(each.num_bytes for each in models[second])
        if _is_moving(failure, models[second]) and failure.move is not None:
            num_bytes += failure.move.rest_bytes
        elif not failure.is_of_training:
            num_bytes += _of_next(failure, [each.num_bytes for each in models[first]])
        yield Remedy(
            num_bytes,
            f"in a second model of the same shapes, {second}, beside {first}: keep it on the host, "
            "or let go of one of the two first",
        )


def _is_moving(failure: Failure, held: Sequence[Holder]) -> bool:
    """Returns whether a model is the one that was being moved, by where its tensors are."""
    move = failure.move
    return move is not None and any(each.address in move.addresses for each in held)


def _shapes_of(failure: Failure, held: Sequence[Holder]) -> collections.Counter[object]:
    """Returns a model's bytes by shapes, with those of its tensors that are yet to be moved."""
    if failure.move is not None and _is_moving(failure, held):
        return collections.Counter(failure.move.shapes)
    shapes: collections.Counter[object] = collections.Counter()
    for each in held:
        shapes[each.shape] += each.num_bytes
    return shapes


def _is_loaded_like(failure: Failure, held: Sequence[Holder]) -> bool:
    """Returns whether a load may have failed in which a model like this one was made in part."""
    sizes = [each.num_bytes for each in held]
    return failure.move is None and not failure.is_of_training and _of_next(failure, sizes) > 0


def _is_twin(
    second: collections.Counter[object], first: collections.Counter[object], *, is_part: bool
) -> bool:
    """Returns whether two models have little but what the other one has, too.

    Args:
        second: Its bytes by shapes.
        first: Those of the other.
        is_part: Whether the second may be there in part.
    """
    same = (second & first).total()
    least = _PART_OF_SHAPES * (second.total() if is_part else max(second.total(), first.total()))
    return second.total() >= MIB and same >= least


def _gradients(failure: Failure) -> Iterator[Remedy]:
    if failure.step is not None or failure.is_backward or failure.phase in ("backward",):
        return  # which need them, or make them
    num_bytes = sum(each.num_bytes for each in failure.holders if each.kind == "gradient")
    # After a forward pass they come back.
    yield Remedy(
        num_bytes,
        "of gradients: optimizer.zero_grad() before this phase",
        is_sure=failure.phase != "forward",
    )


def _lists(failure: Failure) -> Iterator[Remedy]:
    for at, group in enumerate(failure.groups):
        if group.what == "list" and group.kind == "tensor" and at not in failure.growing:
            yield Remedy(
                group.num_bytes,
                f"in {group}: {let_go_text(group)}",
                is_sure=len(group.holders) >= _LONG_LIST,
            )


def _graphs(failure: Failure) -> Iterator[Remedy]:
    """Finds lists of losses with their graphs, of which the last one may be needed."""
    for at, group in enumerate(failure.groups):
        sizes: collections.Counter[str] = collections.Counter()
        for holder in group.holders:
            sizes[holder.root or holder.path] += holder.num_bytes
        if group.what == "graph" and len(sizes) >= _FEWEST_GRAPHS and at not in failure.growing:
            yield Remedy(group.num_bytes - max(sizes.values()), f"in {group}: {let_go_text(group)}")


def _offload(failure: Failure) -> Iterator[Remedy]:
    if failure.step is not None:
        offer = offload_of_step(failure.step, failure.room)
        if offer is not None:
            yield Remedy(offer.num_bytes, offer.text, is_enough=True)
            return
    sizes: collections.Counter[str] = collections.Counter()
    for holder in failure.holders:
        if holder.kind == "optimizer state":
            sizes[holder.path.rpartition("[")[0]] += holder.num_bytes
    offer = offload_of_states(sizes)
    if offer is not None:
        yield Remedy(offer.num_bytes, offer.text)


def _activations(failure: Failure) -> Iterator[Remedy]:
    num_bytes = sum(
        holder.num_bytes
        for at, group in enumerate(failure.groups)
        if at not in failure.growing and group.what != "error"
        for holder in group.holders
        if holder.kind == "autograd"
    )
    yield Remedy(
        num_bytes,
        "saved for backward: a smaller batch, activation checkpointing, or torch.no_grad() if "
        "nothing is trained",
        is_sure=False,
    )


def _largest_unowned(failure: Failure) -> Iterator[Remedy]:
    for at, group in enumerate(failure.groups):
        is_said = at in failure.growing or group.what in ("error", "list")
        if group.kind == "tensor" and not is_said:
            yield Remedy(group.num_bytes, f"to be let go, if it may: {group}", is_sure=False)
            return


def _outside(failure: Failure) -> Iterator[Remedy]:
    if failure.is_outside_known:
        yield Remedy(
            failure.state.outside,
            "used outside of this process's torch: other processes, contexts",
            is_sure=False,
        )


def _of_next(failure: Failure, sizes: Sequence[int]) -> int:
    """Returns the bytes that were asked for, where they are one of the sizes; else 0.

    Those of a move are the moved module's own.
    """
    asked = (failure.asked or 0) if failure.move is None else 0
    is_next = any(abs(asked - size) <= max(MIB // 64, _ROUNDING * size) for size in sizes)
    return asked if is_next else 0


_TABLE: tuple[Callable[[Failure], Iterator[Remedy]], ...] = (
    _what_grows,
    _kept_errors,
    _free_in_cache,
    _cycles,
    _bucket_views,
    _copies,
    _pieces,
    _second_model,
    _gradients,
    _graphs,
    _lists,
    _offload,
    _activations,
    _largest_unowned,
    _outside,
)


def remedy_lines(failure: Failure, found: Sequence[Remedy]) -> Iterator[str]:
    """Yields what would have fitted, or what may help, or that nothing is known to."""
    growth = failure.growth
    if growth is not None and not failure.growing:
        yield (
            f"the held memory grows by {format_bytes(growth.bytes_per_visit)} {growth.when}, and "
            "by which name is not known: any room that is made now lasts for a while only."
        )
    sure, possible = fitting(failure, found)
    if sure:
        yield _heading(failure)
        yield _line(sure[0])
    elif possible:
        yield "changes that may make room, which these figures cannot tell:"
        yield from map(_line, possible)
    elif found:
        yield "none of these would have been enough alone:"
        yield from map(_line, found)
    else:
        yield "nothing that is known here would have made room."


def _heading(failure: Failure) -> str:
    if failure.phase in _PASSES and failure.is_new:
        return f"this makes room for that; the rest of this {failure.phase!r} is new:"
    return "this would have made room:"


def _line(remedy: Remedy) -> str:
    return f"  {format_bytes(remedy.num_bytes):>12}  {remedy.text}"
