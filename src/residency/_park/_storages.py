"""Which tensors share a storage, and how they are bound to another one together.

A storage is moved once, whole, and every tensor over it is bound to the copy at its old offset and
strides, so that ties and views stay. Invariant, which ``tests/park/test_park.py`` tries to break: a
tensor that is rebound stays the same object with the same autograd state, its hooks and its
``AccumulateGrad`` node included.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from residency._errors import RefusedError
from residency._storages import is_gone, storage_key, weak_reference
from residency._transfer import align_up, gate_of


@dataclass(slots=True, eq=False)
class Tie:
    """One storage, with every known tensor over it.

    Attributes:
        storage: The bytes.
        tensors: Each of them once; the bases of views among them.
        sites: The names under which the owner has them.
    """

    storage: torch.UntypedStorage
    tensors: list[Tensor] = field(default_factory=list)
    sites: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """The storage's bytes."""
        return self.storage.nbytes()

    @property
    def allocated_bytes(self) -> int:
        """What the device's allocator counts for it."""
        return align_up(self.num_bytes)

    def as_bytes(self) -> Tensor:
        """Returns the storage as ``uint8`` of shape ``[num_bytes]``."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return flat.set_(self.storage, 0, (self.num_bytes,), (1,))


def ties_of(tensors: Iterable[tuple[str, Tensor]]) -> list[Tie]:
    """Groups plain tensors, each with its site, by storage, in the order of their coming."""
    ties: dict[int, Tie] = {}
    for site, tensor in tensors:
        storage = tensor.untyped_storage()
        tie = ties.setdefault(storage_key(tensor), Tie(storage))
        tie.sites.add(site)
        # A view keeps its base, and the base the storage, though all others let go of it.
        base = tensor._base if tensor._is_view() else None
        for each in (tensor, base):
            if each is not None and all(each is not known for known in tie.tensors):
                tie.tensors.append(each)
    return list(ties.values())


def shared_with_others(ties: Sequence[Tie], device: torch.device) -> list[Tie]:
    """Returns those whose storage unknown code holds too, so that moving it would free nothing
    and tear what is tied apart. A save that is still copying is known.
    """
    reading: dict[int, set[int]] = {}
    for source in gate_of(device).sources_of(t.storage.data_ptr() for t in ties):
        reading.setdefault(storage_key(source), set()).add(id(source))
    return [
        tie
        for tie in ties
        # Each tensor counts once, and the Python object `tie.storage` once.
        if torch._C._storage_Use_Count(tie.storage._cdata)
        > 1 + len({id(t) for t in tie.tensors} | reading.get(tie.storage._cdata, set()))
    ]


_Watched = list[tuple[StorageWeakRef, int]]


def watched(ties: Iterable[Tie]) -> _Watched:
    """Returns a weak reference to each storage, with the bytes that the allocator counts for it."""
    return [(weak_reference(tie.storage), tie.allocated_bytes) for tie in ties]


def gone_bytes(storages: _Watched) -> int:
    """Returns the bytes of the storages that are no more.

    The device's figure from before and after would count what others free meanwhile, such as a
    garbage collection that begins in between.
    """
    return sum(num_bytes for weak, num_bytes in storages if is_gone(weak))


class Rebound:
    """A tensor that was bound to another storage, and can be bound again.

    ``tensor.data = ...`` on another device makes torch forget the ``AccumulateGrad`` node, and with
    it the hooks that DDP, or a caller, keeps on it. A leaf that has one therefore gets another body
    on the host, while the one that the node knows stays on the device, without bytes. [Note: two
    bodies]

    [Note: two bodies] The bodies share one version counter. All else that can arrive at the body on
    the host is given to the other before they are swapped: gradient, hooks, ``requires_grad``.
    Python's attributes belong to the object and need nothing. The swap is one call, before which
    nothing has changed and after which only memory is left to be freed; which body the tensor has
    is read from it and not kept beside it. So an interrupt finds it whole, wherever it comes.
    ``test_whatever_is_done_to_a_parked_parameter_is_there_when_it_is_back`` compares with torch.

    Attributes:
        tensor: The tensor, the same object before and after.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._other: Tensor | None = None  # has the body on the device while the tensor has not
        self._device_body = 0  # its address
        self._is_gradient_shown = False
        self._hooks: tuple[object, object] = (None, None)

    @property
    def is_split(self) -> bool:
        """Whether the tensor's body on the device waits for its return."""
        # The address of the body; torch has no public name for it (2.13).
        return self._other is not None and self.tensor._cdata != self._device_body

    def is_in_use(self) -> bool:
        """Returns whether more than this object has the tensor."""
        tensor = self.tensor  # one reference, beside the attribute and the argument
        return (
            self.is_split or sys.getrefcount(tensor) > 3 or tensor._use_count() > 1  # type: ignore[attr-defined]  # what C++ has
        )

    def check(self, site: str) -> None:
        """Finds out that the tensor can be bound anew.

        Raises:
            RefusedError: It has, or needs, another body, and C++ code keeps weak references.
        """
        if self.is_split or has_live_accumulator(self.tensor):
            _swap(self.tensor, self.tensor.detach(), site, times=2)

    def to_host(self, storage: torch.UntypedStorage) -> None:
        """Binds the tensor to a host storage with the bytes of its own; gradients go first."""
        tensor = self.tensor
        view = _view_like(tensor, storage)
        if self.is_split:
            tensor.data = view
        elif not has_live_accumulator(tensor):
            tensor.data = view
            return
        else:
            gradient = tensor.grad
            body = tensor.detach()
            body.data = view
            body.requires_grad_(True)
            body.grad_dtype = tensor.grad_dtype
            self._hooks = _hooks_of(tensor)
            _give_hooks(body, self._hooks)
            self._is_gradient_shown = gradient is not None and gradient.device == view.device
            if self._is_gradient_shown:
                body.grad = gradient
            self._device_body = tensor._cdata  # see `is_split`
            self._other = body
            _swap(tensor, body)
        assert self._other is not None
        self._other.data = self._other.data.new_empty(0)

    def to_device(self, storage: torch.UntypedStorage) -> None:
        """Binds the tensor to a device storage with the bytes of its own; gradients go first."""
        tensor, body = self.tensor, self._other
        view = _view_like(tensor, storage)
        if body is None or not self.is_split or body.device != view.device:
            tensor.data = view
        elif body.dtype != view.dtype or not tensor.is_leaf:
            tensor.data = view  # as torch does it, the node is forgotten
        else:
            gradient, hooks = tensor.grad, _hooks_of(tensor)
            body.data = view
            body.requires_grad_(tensor.requires_grad)
            if tensor.requires_grad and tensor.grad_dtype != body.grad_dtype:
                body.grad = None  # torch changes the type only where there is none
                body.grad_dtype = tensor.grad_dtype
            _give_hooks(body, hooks, self._hooks)
            if gradient is not None or self._is_gradient_shown:
                body.grad = gradient
            _swap(tensor, body)
        self._other = None


class Binding(NamedTuple):
    """A tensor to bind anew: to which storage, and to which it is bound now."""

    rebound: Rebound
    storage: torch.UntypedStorage
    before: torch.UntypedStorage


def rebind_all(
    moves: Iterable[Binding],
    do: Callable[[Rebound, torch.UntypedStorage], None],
    undo: Callable[[Rebound, torch.UntypedStorage], None],
) -> None:
    """Binds tensors to their new storages, or, where one fails, all of them to the old ones.

    Gradients come before their parameters in both directions: torch takes a gradient only where its
    parameter is.
    """
    begun: list[Binding] = []
    try:
        for move in moves:
            begun.append(move)
            do(move.rebound, move.storage)
    except BaseException:
        for move in begun:  # the last one may or may not have got there
            undo(move.rebound, move.before)
        raise


_Hooks = tuple[object, object]


def _hooks_of(tensor: Tensor) -> _Hooks:
    # torch shows which hooks a tensor has in no other way.
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _give_hooks(body: Tensor, hooks: _Hooks, known: _Hooks = (None, None)) -> None:
    """Lets a body call hooks, if they are others than those it is known to call."""
    if hooks[0] is not known[0]:
        body._backward_hooks = hooks[0]  # type: ignore[assignment]  # a dictionary that is shared
    if hooks[1] is not known[1]:
        body._post_accumulate_grad_hooks = hooks[1]  # type: ignore[assignment]  # likewise


def has_live_accumulator(tensor: Tensor) -> bool:
    """Returns whether a graph, or a caller, keeps the node that adds to the tensor's gradient."""
    if not (tensor.requires_grad and tensor.is_leaf) or tensor.is_inference():
        return False
    before = tensor._use_count()  # type: ignore[attr-defined]  # torch.utils.swap_tensors has it
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    is_new = tensor._use_count() > before  # type: ignore[attr-defined]
    del edge
    return not is_new


def _swap(left: Tensor, right: Tensor, site: str = "a parameter", *, times: int = 1) -> None:
    """Swaps what two Python tensors stand for, autograd state included.

    Args:
        left: The one.
        right: The other.
        site: What an error calls the first.
        times: How often; twice finds out whether it could be done, with no line in between where
            an interrupt might come.

    Raises:
        RefusedError: C++ code keeps a weak reference to one of them; nothing was swapped.
    """
    try:
        # The inner half of torch.utils.swap_tensors, which would swap the Python attributes too.
        deque(map(torch._C._swap_tensor_impl, [left] * times, [right] * times), maxlen=0)
    except RuntimeError as error:
        raise RefusedError(
            f"{site} cannot be moved: a graph that is kept needs the parameter's place in it, and "
            "C++ code has a weak reference to the tensor, as caches of compiled code do "
            f"({str(error).strip()}). Nothing moved; let go of the graph or of the "
            "reference."
        ) from error


def _view_like(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    with torch.inference_mode(mode=tensor.is_inference()):  # or it would be half of each kind
        view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            view = view.conj()
        # there is no public way to make one (torch 2.13)
        return torch._neg_view(view) if tensor.is_neg() else view  # pyright: ignore[reportPrivateImportUsage]
