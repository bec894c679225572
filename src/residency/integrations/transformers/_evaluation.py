"""Outputs of an evaluation that leave the device batch by batch.

A ``Trainer`` keeps the predictions of a whole evaluation on the device, in an ``EvalLoopContainer``
each for losses, predictions, labels and inputs. Here these containers hand what they hold to a ring
of page-locked memory. Invariant, which ``tests/integrations/test_transformers.py`` tries to break:
what a container gives in the end is what the stock one gives, bit for bit, and it holds one batch
on the device at most.

[Note: whose containers] A callback does not see the containers, and hears of an evaluation when
its first batch is in them. So the name in ``transformers.trainer`` has a class that does what the
stock one does until `claim`: a callback that hears of a prediction step claims those that its
thread has made since, which are the loop's that tells it. Where another module's function stands
as ``Trainer.evaluation_loop``, as Axolotl's does, it reads the name in that module.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from residency import _device
from residency._transfer import Carried, HostRing, host_bytes
from residency.integrations._common._framework import load_framework, missing_in

if TYPE_CHECKING:
    from transformers.trainer_pt_utils import EvalLoopContainer
else:
    _utilities = load_framework("transformers.trainer_pt_utils", extra="transformers")
    EvalLoopContainer = vars(_utilities).get("EvalLoopContainer", object)

_NAME = "EvalLoopContainer"
_users: weakref.WeakSet[object] = weakref.WeakSet()  # the callbacks for which the name is changed
_of_thread = threading.local()  # the containers that no callback has claimed


class _Form(NamedTuple):
    """The form of a tree: what a list, a tuple or a mapping is made of again.

    Attributes:
        kind: Its class.
        keys: Those of a mapping, in their order; else None.
        inner: The forms of what is in it; None for a leaf.
    """

    kind: Callable[..., object]
    keys: list[object] | None
    inner: list[_Form | None]


class HostContainer(EvalLoopContainer):  # type: ignore[misc]  # is not analysed: too large
    """A container of an evaluation loop, which is on the host once it is claimed."""

    tensors: object
    padding_index: int

    def __init__(self, do_nested_concat: bool = True, padding_index: int = -100) -> None:
        super().__init__(do_nested_concat, padding_index)
        self._ring: HostRing | None = None
        self._form: _Form | None = None
        self._columns: list[deque[object]] = []  # for each leaf of the form, those of the batches
        self._coming: Carried | None = None  # the newest batch
        _unclaimed().append(weakref.ref(self))

    def hand_to(self, ring: HostRing) -> None:
        """Lets a ring have what is on the device, and what will come."""
        self._ring = ring
        held, self.tensors = self.tensors, None
        if held is None:
            return
        for each in [held] if self.do_nested_concat or not isinstance(held, list) else held:
            self.add(each)

    def add(self, tensors: object) -> None:
        """Adds those of a batch; waits for the batch before.

        Raises:
            RefusedError: Tensors of the batch before were written in place since.
        """
        if self._ring is None:
            super().add(tensors)
            return
        form, leaves = _taken_apart(tensors)
        leaves = self._on_host(self._ring, leaves)
        if not self.do_nested_concat:
            super().add(_put_together(form, iter(leaves)))
        elif not self._columns:
            self._form, self._columns = form, [deque([leaf]) for leaf in leaves]
        elif form == self._form and all(map(_goes_below, self._columns, leaves)):
            for column, leaf in zip(self._columns, leaves, strict=True):
                column.append(leaf)
        else:  # what the stock class makes of these two, or its error
            self._settle()
            self.tensors = self._joined()
            super().add(_put_together(form, iter(leaves)))
            self._form, leaves = _taken_apart(self.tensors)
            self._columns, self.tensors = [deque([leaf]) for leaf in leaves], None

    def to_cpu_and_numpy(self) -> None:
        """Makes arrays of what is there, as the stock class does."""
        self._settle()
        if self._columns:
            self.tensors = self._joined()
        super().to_cpu_and_numpy()

    def _on_host(self, ring: HostRing, leaves: list[object]) -> list[object]:
        """Returns the leaves with host tensors, whose bytes are on their way, for tensors."""
        self._settle()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and ring.takes(leaf)]
        self._coming = ring.carry(tensors)
        arriving = iter(self._coming.tensors)
        return [next(arriving) if ring.takes(leaf) else leaf for leaf in leaves]

    def _settle(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.wait()

    def _joined(self) -> object:
        """Returns all batches as the stock class has them, and keeps none of them."""
        joined = [_stacked(column, self.padding_index) for column in self._columns]
        self._columns = []
        return _put_together(self._form, iter(joined))


def put_on(user: object) -> None:
    """Makes evaluation loops take `HostContainer`, for the sake of a callback.

    Raises:
        RefusedError: This Transformers has no such containers. Nothing was changed.
    """
    namespaces = _namespaces()
    if _NAME not in namespaces[0]:
        raise missing_in(
            "transformers",
            f"transformers.trainer.{_NAME}",
            "pass ResidencyCallback(outputs_on_host=False)",
        )
    for names in namespaces:
        if names.get(_NAME) is EvalLoopContainer:
            names[_NAME] = HostContainer
    _users.add(user)


def take_off(user: object) -> None:
    """Gives Transformers its own class back with the last callback."""
    _users.discard(user)
    for names in _namespaces() if not _users else ():
        if names.get(_NAME) is HostContainer:
            names[_NAME] = EvalLoopContainer


def claim() -> None:
    """Hands the containers of the loop that is under way to a ring. [Note: whose containers]"""
    made = [container for ref in _unclaimed() if (container := ref()) is not None]
    _unclaimed().clear()
    if made and _device.accelerator() is not None:
        ring = HostRing()
        for container in made:
            container.hand_to(ring)


def _namespaces() -> list[dict[str, object]]:
    """Returns the names of ``transformers.trainer``, and those that the loop in use reads."""
    module = load_framework("transformers.trainer", extra="transformers")
    loop = inspect.unwrap(module.Trainer.evaluation_loop)
    return [vars(module), *([loop.__globals__] if inspect.isfunction(loop) else [])]


def _unclaimed() -> list[weakref.ref[HostContainer]]:
    found: list[weakref.ref[HostContainer]] = vars(_of_thread).setdefault("unclaimed", [])
    found[:] = [ref for ref in found if ref() is not None]
    return found


def _taken_apart(tree: object) -> tuple[_Form | None, list[object]]:
    """Returns the form and the leaves of what the stock functions take for a tree."""
    if isinstance(tree, (list, tuple)):
        keys, values = None, list(tree)
    elif isinstance(tree, Mapping):
        keys, values = list(tree), list(tree.values())
    else:
        return None, [tree]
    inner = [_taken_apart(value) for value in values]
    form = _Form(type(tree), keys, [each for each, _ in inner])
    return form, [leaf for _, leaves in inner for leaf in leaves]


def _put_together(form: _Form | None, leaves: Iterator[object]) -> object:
    if form is None:
        return next(leaves)
    made = [_put_together(each, leaves) for each in form.inner]
    return form.kind(made if form.keys is None else dict(zip(form.keys, made, strict=True)))


def _rows(tensor: Tensor) -> Tensor:
    """Returns a tensor with at least one dimension, as the stock functions take it."""
    return tensor if tensor.dim() else tensor.view(1)


def _goes_below(column: deque[object], leaf: object) -> bool:
    """Returns whether the rows of a leaf go below those of a column, but for padding."""
    shapes, dtypes = [], set()
    for each in (column[0], leaf):
        if not (isinstance(each, Tensor) and each.is_cpu and HostRing.takes(each)):
            return False
        shapes.append(_rows(each).shape)
        dtypes.add(each.dtype)
    return len(dtypes) == 1 and len(shapes[0]) == len(shapes[1]) and shapes[0][2:] == shapes[1][2:]


def _stacked(column: deque[object], padding_index: int) -> object:
    """Returns the rows of a column below one another, shorter ones padded on the right.

    Each part goes once it is copied, so that the host has the outputs once, and one part.
    """
    if len(column) == 1:
        return column.popleft()
    parts = deque(_rows(part) for part in column if isinstance(part, Tensor))
    column.clear()
    first = parts[0]
    shape = [sum(part.shape[0] for part in parts), *first.shape[1:]]
    if first.dim() > 1:
        shape[1] = max(part.shape[1] for part in parts)
    data = host_bytes(torch.Size(shape).numel() * first.element_size())
    whole = data.view(first.dtype).view(shape)
    del first
    start = 0
    while parts:
        part = parts.popleft()
        rows = whole[start : start + part.shape[0]]
        start += part.shape[0]
        if rows.shape != part.shape:
            rows[:, part.shape[1] :] = padding_index
            rows = rows[:, : part.shape[1]]
        rows.copy_(part)
    return whole
