"""Makes the states of a unit as views of the slot that they were copied to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from residency._dtensor import local_of, remade
from residency._optim._plan import Unit

_FEW = 4  # views, which are made as quickly one by one


def views_in(slot: Tensor | None, unit: Unit, *, at_once: bool) -> list[Tensor]:
    """Returns the states of a unit as views of its slot, for each piece those of its keys.

    Args:
        slot: ``uint8`` of shape ``[num_bytes]``; None where the unit has no state in one.
        unit: Says where they are.
        at_once: Whether views that are alike come from one operation. While it records gradients,
            autograd refuses writes to those, which steps outside of ``torch.optim`` may make.
    """
    if slot is None:
        return []
    # Entries and slots are aligned to more than any itemsize.
    typed = {dtype: slot.view(dtype) for dtype in {each.dtype for each in unit.views}}
    made: list[Tensor] = []
    for dtype, shape, stride, in_slot, count, distance in unit.views:
        offset = in_slot + typed[dtype].storage_offset()  # a slot may lie in a larger block
        if at_once and count >= _FEW:
            shapes, strides = (count, *shape), (distance, *stride)
            made += typed[dtype].as_strided(shapes, strides, offset).unbind()
        else:
            offsets = [offset + index * distance for index in range(count)]
            made += [typed[dtype].as_strided(shape, stride, each) for each in offsets]
    return made


def by_key(made: Iterable[Tensor], unit: Unit) -> list[dict[str, Tensor]]:
    """Returns what ``views_in`` made, of each piece by key."""
    views = iter(made)
    return [
        {keys[0]: next(views)} if len(keys) == 1 else dict(zip(keys, views, strict=False))
        for keys in unit.keys
    ]


def apart(after: dict[str, Any], views: dict[str, Tensor]) -> dict[str, Any]:
    """Returns what a step left, with copies of what lies in another key's place in the slot: that
    may be written before it is read.
    """
    slot = next((view.untyped_storage().data_ptr() for view in views.values()), 0)
    found = {}
    for key, value in after.items():
        view = views.get(key)
        if value is view or not isinstance(value, Tensor) or not slot:
            continue
        local = local_of(value)
        is_its_own = view is not None and local.data_ptr() == view.data_ptr()
        if local.untyped_storage().data_ptr() == slot and not is_its_own:
            found[key] = remade(value, Tensor.clone)
    return {**after, **found} if found else after
