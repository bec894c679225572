"""Which Python name keeps each tensor on the device alive.

A search goes forward from everything that has a name, through what the garbage collector can see
and what it cannot (gradients, tensors saved by autograd), and groups the tensors that it meets by
storage. What the allocator has beyond them is held by C++.

[Note: foreign code] Nothing of a user's objects is called: see `_objects`. Torch's own properties
are read below ``__torch_function__``. Nothing is allocated on the device, and nothing waits for it.
"""

from __future__ import annotations

import functools
import gc
import logging
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from residency import _device
from residency._memory import _objects
from residency._memory._holders._autograd import Graphs
from residency._memory._holders._cpp import describe_blocks
from residency._memory._holders._paths import Paths
from residency._memory._holders._roots import frames_read, named_objects, namespaces
from residency._memory._holders._walk import Origin, Walk
from residency._memory._kept_errors import TRAIL, errors_kept
from residency._memory._owners import Owners, gradient_of
from residency._transfer import align_up
from residency._units import format_bytes, parse_bytes

_log = logging.getLogger("residency")

STORAGE: Any = torch._C.StorageBase  # what every kind of storage is, untyped or typed (torch 2.13)
_MOST_OTHERS = 4
_MOST_ALIASES = 8
_CPP = "held by C++ or autograd, not reachable from Python"
_UNSEEN = "held by tensors that the search did not come to in its time"
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, types.CellType, types.MethodType})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The object that keeps the bytes of one storage on the device; this record keeps none alive.

    Attributes:
        num_bytes: The storage's size.
        path: The Python name that leads to it: ``train() local 'state_dict' ['model']['w']``.
        kind: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"``, ``"tensor"``,
            ``"autograd"`` (an operation saved it for the backward pass) or ``"c++"``.
        others: The first few other paths that keep it; for C++, at most a note on its blocks.
        shape: The shape of one tensor in the storage; None if no tensor is known.
        dtype: The dtype of this tensor, such as ``"float32"``.
        num_tensors: How many tensors that Python knows share the storage.
        root: The path of the whole that it is a part of: its module, its optimizer, or the tensor
            whose graph keeps it. None for a tensor that stands alone.
        address: Where the storage begins on the device; 0 where it has no address of its own.
    """

    num_bytes: int
    path: str
    kind: str
    others: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    num_tensors: int = 0
    root: str | None = None
    address: int = 0

    def __str__(self) -> str:
        return f"{format_bytes(self.num_bytes)}  {self.path}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # of a notebook
        printer.text(str(self))


@dataclass(slots=True)
class _SharedStorage:
    """One storage while the search lasts, with the positions of the tensors that share it."""

    num_bytes: int
    positions: list[int]
    address: int


def holders(
    min_bytes: int | str = "1MiB", *, device: torch.device | int | str | None = None
) -> list[Holder]:
    """Says what keeps the device's tensors alive, the largest storage first.

    Looks at everything that Python can reach, which takes about a microsecond an object. Calls no
    code of the objects that it looks at, waits for nothing on the device, and keeps nothing alive.

    Args:
        min_bytes: Leave out smaller storages.
        device: The accelerator, by default the current one.

    Returns:
        A holder for each storage, and one for the other allocated bytes, to which no Python object
        leads, if they are ``min_bytes`` or more. Nothing without a device, which is logged once.

    Raises:
        InvalidArgumentError: The size does not parse, or there is no such accelerator.
    """
    least_bytes = parse_bytes(min_bytes, name="min_bytes")
    named = _device.resolve(device)
    if named is None:
        _say_that_there_is_none()
    return find_holders(named, least_bytes)


@functools.cache
def _say_that_there_is_none() -> None:
    _log.warning(
        "residency: there is no accelerator, so holders() lists nothing; "
        "residency.sim.enable() makes a simulated one."
    )


def find_holders(
    device: torch.device | None,
    least_bytes: int,
    *,
    seconds: float | None = None,
    error: BaseException | None = None,
) -> list[Holder]:
    """Searches a device that is known to be there.

    Args:
        device: The accelerator, or None.
        least_bytes: The smallest storage that is named.
        seconds: Of this thread's own work, some more at the most, after which the search ends
            with what it has found.
        error: An error whose traceback keeps tensors; names lead through it first.
    """
    figures = {} if device is None else _device.allocator_figures(device)
    if device is None or not figures:
        return []
    with frames_read() as touched, torch._C.DisableTorchFunction():  # [Note: foreign code]
        found = _find(device, figures, least_bytes, seconds, error, touched)
    return sorted(found, key=lambda holder: (-holder.num_bytes, holder.path))


def _find(
    device: torch.device,
    figures: Mapping[str, object],
    least_bytes: int,
    seconds: float | None,
    error: BaseException | None,
    touched: list[types.FrameType],
) -> list[Holder]:
    population = gc.get_objects()  # first of all: what is made for the search is not in it
    walk = Walk([*namespaces(), touched], seconds=seconds)
    try:
        _search(walk, population, error, touched)
        groups = _group(walk, device)
        found = _name(walk, [g for g in groups if g.num_bytes >= least_bytes], touched)
    finally:
        walk.clear()
    rest_bytes = _rest(figures, groups)
    if rest_bytes >= max(1, least_bytes):
        path = _CPP if walk.is_complete else _UNSEEN
        others: tuple[str, ...] = ()
        if seconds is not None and walk.is_complete:  # an explanation has the time
            known = {group.address for group in groups}
            others = tuple(filter(None, [describe_blocks(device, known, least_bytes)]))
        found.append(Holder(num_bytes=rest_bytes, path=path, kind="c++", others=others))
    return found


def _search(
    walk: Walk,
    population: list[object],
    error: BaseException | None,
    touched: list[types.FrameType],
) -> None:
    # What else leads to a tensor names it: a kept error has what goes when it is let go.
    kept = errors_kept(but=error)
    walk.pass_over(thing for thing, _ in kept)
    if error is not None:
        name = _objects.type_name(error)
        walk.add(error, Origin(name))
        trace = error.__traceback__
        while trace is not None:  # a part of it is a local of who handles the error
            walk.add(trace, Origin(f"{name}{TRAIL}"))
            trace = trace.tb_next
    for thing, name in named_objects(touched):
        walk.add(thing, Origin(name))
    walk.go()
    graphs = Graphs(walk)
    follow_torch(walk, graphs)
    walk.admit(thing for thing, _ in kept)
    for thing, name in kept:
        walk.add(thing, Origin(name))
        walk.go()
    follow_torch(walk, graphs)
    if walk.is_complete:
        _add_cycles(walk, *add_held_by_cpp(walk, population))
        follow_torch(walk, graphs)


def follow_torch(walk: Walk, graphs: Graphs) -> None:
    """Goes from tensors to what torch keeps with them, which the garbage collector cannot see."""
    first = 0
    while walk.is_complete and first < len(walk.tensors):
        new, first = walk.tensors[first:], len(walk.tensors)
        for position in new:
            gradient = gradient_of(walk.objects[position])
            if gradient is not None:
                walk.add(gradient, Origin("", position, ".grad"))
        walk.go()
        graphs.follow()


def add_held_by_cpp(walk: Walk, population: list[Any]) -> tuple[list[Any], set[int]]:
    """Goes through live objects that no name and no other object leads to: C++ holds them.

    Returns:
        What had not been reached before, and the ids of all that this refers to. What is not
        reached now lives in reference cycles alone.
    """
    left = [thing for thing in population if not walk.has_seen(thing)]
    inner: set[int] = set()
    if not any(walk.is_telling(cls) for cls in set(map(type, left))):
        return [], inner
    pending = iter(left)
    while batch := list(islice(pending, 256)):
        inner.update(map(id, gc.get_referents(*batch)))
    for thing in left:
        # A storage's Python object lives as long as its bytes, whatever holds them.
        if id(thing) not in inner and not _objects.is_a(thing, torch.UntypedStorage):
            is_tensor = _objects.is_a(thing, torch.Tensor)
            name = f"{_objects.type_name(thing)} held by C++ or a running expression"
            walk.add(thing, Origin(_CPP if is_tensor else name))
    walk.go()
    return left, inner


def _add_cycles(walk: Walk, left: list[object], inner: set[int]) -> None:
    for thing in sorted(left, key=_rank_in_cycle):
        if walk.is_complete and id(thing) in inner and not walk.has_seen(thing):
            walk.add(thing, Origin(f"reference cycle: {_objects.type_name(thing)}"))
            walk.go()


def _rank_in_cycle(thing: object) -> int:
    """Orders objects by how well they name a cycle: instances before what they consist of."""
    if _objects.is_a(thing, torch.Tensor) or _objects.is_a(thing, torch.UntypedStorage):
        return 2
    return int(type(thing) in _CONTAINERS)


def _group(walk: Walk, device: torch.device) -> list[_SharedStorage]:
    groups: dict[int, _SharedStorage] = {}
    for position in sorted([*walk.tensors, *walk.storages]):
        for storage in storages_of(walk.objects[position]):
            if _objects.slot(storage, "device") != device:
                continue
            num_bytes = STORAGE.nbytes(storage)
            if num_bytes:
                key = _objects.slot(storage, "_cdata")
                if key not in groups:
                    groups[key] = _SharedStorage(num_bytes, [], _address_of(storage))
                groups[key].positions.append(position)
    return list(groups.values())


def addresses_of(tensor: object) -> set[int]:
    """Returns where the storages of a tensor begin on its device."""
    return {address for storage in storages_of(tensor) if (address := _address_of(storage))}


def _address_of(storage: object) -> int:
    try:
        return int(STORAGE.data_ptr(storage))
    except RuntimeError:  # it has none of its own
        return 0


def storages_of(thing: Any) -> Iterator[Any]:
    """Yields the storage of a tensor that has one; the parts of a sparse one are C++'s alone."""
    if _objects.is_a(thing, torch.UntypedStorage):
        yield thing
        return
    try:
        storage = torch._C.TensorBase.untyped_storage(thing)  # past a subclass's own method
        if torch._C._dispatch_keys(thing).has(torch._C.DispatchKey.Python):
            STORAGE.data_ptr(storage)  # raises where another tensor has the bytes
        yield storage
    except (NotImplementedError, RuntimeError):
        yield from ()


def _name(walk: Walk, groups: list[_SharedStorage], touched: list[types.FrameType]) -> list[Holder]:
    paths = Paths(walk, touched)
    owners = Owners(walk, paths)
    others = _other_paths(walk, paths, groups)
    return [_holder(walk, paths, owners, group, others) for group in groups]


def _holder(
    walk: Walk, paths: Paths, owners: Owners, group: _SharedStorage, others: dict[int, list[str]]
) -> Holder:
    things = [walk.objects[position] for position in group.positions]
    first = group.positions[0]
    owned = next(filter(None, map(owners.name, things)), None)
    kind, path, root = owned or (
        _kind(walk.origin(first)),
        paths.path(first),
        paths.root_of_graph(first),
    )
    further: dict[str, None] = {}
    if owned is None:
        for thing in things[:_MOST_ALIASES]:
            further.update(dict.fromkeys(others.get(id(thing), ())))
    further.pop(path, None)
    tensor = next((t for t in things if _objects.is_a(t, torch.Tensor)), None)
    return Holder(
        num_bytes=group.num_bytes,
        path=path,
        kind=kind,
        others=tuple(islice(further, _MOST_OTHERS)),
        shape=None if tensor is None else tuple(_objects.slot(tensor, "shape")),
        dtype=None if tensor is None else str(_objects.slot(tensor, "dtype"))[len("torch.") :],
        num_tensors=len(things),
        root=root,
        address=group.address,
    )


def _kind(origin: Origin | None) -> str:
    if origin is None:
        return "tensor"
    return "c++" if origin.text == _CPP else "autograd" if origin.is_saved else "tensor"


def _other_paths(
    walk: Walk, paths: Paths, groups: Iterable[_SharedStorage]
) -> dict[int, list[str]]:
    """Returns every path to a tensor by one object that refers to it, by the tensor's id."""
    things = {
        id(thing): thing
        for group in groups
        for thing in (walk.objects[position] for position in group.positions[:_MOST_ALIASES])
    }
    found: dict[int, list[str]] = {key: [] for key in things}
    for key, thing in things.items():
        for origin in walk.aliases(thing):
            before = "" if origin.after is None else paths.path(origin.after)
            found[key].append(origin.text + before + origin.trail)
    for group in groups:
        for position in group.positions[:_MOST_ALIASES]:
            if walk.origin(position) is not None:
                found[id(walk.objects[position])].append(paths.path(position))
    for position, key in walk.parents(things.values()):
        if len(found[key]) <= _MOST_OTHERS:
            found[key].append(paths.path(position, things[key]))
    return found


def _rest(figures: Any, groups: Iterable[_SharedStorage]) -> int:
    """Returns the bytes that the allocator has given out beyond the storages found.

    What is freed but waits for a stream still counts as requested; what is allocated counts whole
    blocks. The smaller of the two remainders is nearer to the truth.
    """
    held = int(figures.get("allocated_bytes.all.current", 0))
    blocks = sum(align_up(group.num_bytes) for group in groups)
    rest = held - blocks
    requested = figures.get("requested_bytes.all.current")
    if requested is not None:
        rest = min(rest, int(requested) - sum(group.num_bytes for group in groups))
    return max(0, rest)
