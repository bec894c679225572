"""Which tensors share a storage, and how they are bound to another one together.

A storage is moved once, whole, and every tensor over it is bound to the copy at its old offset and
strides, so that ties and views stay. Invariant: a tensor that is rebound stays the same object with
the same autograd state, its hooks and its ``AccumulateGrad`` node included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from residency._transfer import align_up, gate_of


@dataclass(slots=True, eq=False)
class Tie:
    """Is one storage, with every known tensor over it.

    Attributes:
        storage: The bytes.
        tensors: Each of them once; the bases of views among them.
        slots: The names under which the owner has them.
    """

    storage: torch.UntypedStorage
    tensors: list[Tensor] = field(default_factory=list)
    slots: set[str] = field(default_factory=set)

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
    """Groups plain tensors, each with its slot, by storage, in the order of their coming."""
    ties: dict[int, Tie] = {}
    for slot, tensor in tensors:
        storage = tensor.untyped_storage()
        tie = ties.setdefault(storage._cdata, Tie(storage))
        tie.slots.add(slot)
        # A view keeps its base, and the base the storage, whoever else has let go of it.
        base = tensor._base if tensor._is_view() else None
        for each in (tensor, base):
            if each is not None and all(each is not known for known in tie.tensors):
                tie.tensors.append(each)
    return list(ties.values())


def shared_with_others(ties: Sequence[Tie], device: torch.device) -> list[Tie]:
    """Returns those whose storage somebody unknown holds too, so that moving it would free nothing
    and tear what is tied apart. A save that is still copying is known.
    """
    reading: dict[int, set[int]] = {}
    for source in gate_of(device).sources_of(t.storage.data_ptr() for t in ties):
        reading.setdefault(source.untyped_storage()._cdata, set()).add(id(source))
    return [
        tie
        for tie in ties
        # Each tensor counts once, and the Python object `tie.storage` once.
        if torch._C._storage_Use_Count(tie.storage._cdata)
        > 1 + len({id(t) for t in tie.tensors} | reading.get(tie.storage._cdata, set()))
    ]


class Rebound:
    """Is a tensor that was bound to another storage, and can be bound again.

    ``tensor.data = ...`` on another device makes torch forget the ``AccumulateGrad`` node, and with
    it the hooks that DDP, or a caller, keeps on it. A leaf that has one therefore gets another body
    on the host, while the one that the node knows stays on the device, without bytes.

    Attributes:
        tensor: The tensor, the same object before and after.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._device_body: Tensor | None = None
        self._is_gradient_shown = False

    @property
    def is_split(self) -> bool:
        """Whether the tensor's body on the device waits for its return."""
        return self._device_body is not None

    def is_in_use(self) -> bool:
        """Says whether anybody but this object has the tensor."""
        tensor = self.tensor  # one reference, beside the attribute and the argument
        return (
            self.is_split or sys.getrefcount(tensor) > 3 or tensor._use_count() > 1  # type: ignore[attr-defined]  # what C++ has
        )

    def to_host(self, storage: torch.UntypedStorage) -> None:
        """Binds the tensor to a host storage with the bytes of its own."""
        tensor = self.tensor
        view = _view_like(tensor, storage)
        if not _has_live_accumulator(tensor):
            tensor.data = view
            return
        gradient = tensor.grad
        body = view.requires_grad_(tensor.requires_grad)
        empty = tensor.data.new_empty(0)
        _swap_bodies(tensor, body)
        self._device_body = body
        body.data = empty
        self._is_gradient_shown = gradient is not None and gradient.device == tensor.device
        if self._is_gradient_shown:
            tensor.grad = gradient

    def to_device(self, storage: torch.UntypedStorage) -> None:
        """Binds the tensor to a device storage with the bytes of its own; gradients go first."""
        tensor, body = self.tensor, self._device_body
        view = _view_like(tensor, storage)
        if body is None or body.device != storage.device or body.dtype != view.dtype:
            tensor.data = view
            return
        gradient, requires_grad = tensor.grad, tensor.requires_grad
        body.data = view
        _swap_bodies(tensor, body)
        self._device_body = None
        if requires_grad != tensor.requires_grad:
            tensor.requires_grad_(requires_grad)
        if gradient is not None or self._is_gradient_shown:
            tensor.grad = gradient


def _has_live_accumulator(tensor: Tensor) -> bool:
    if not (tensor.requires_grad and tensor.is_leaf) or tensor.is_inference():
        return False
    before = tensor._use_count()  # type: ignore[attr-defined]  # torch.utils.swap_tensors has it
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    is_new = tensor._use_count() > before  # type: ignore[attr-defined]
    del edge
    return not is_new


def _swap_bodies(left: Tensor, right: Tensor) -> None:
    """Swaps what two Python tensors stand for, autograd state included."""
    torch._C._swap_tensor_impl(left, right)


def _view_like(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    with torch.inference_mode(mode=tensor.is_inference()):  # or it would be half of each kind
        view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            view = view.conj()
        return torch._neg_view(view) if tensor.is_neg() else view
