"""Values of a save's document that are made anew: planned, then understood, then put in place.

A value is understood while nothing has been changed: its bytes are read, it is made, and what it is
for has had a look at it. So what makes no sense is damage that is found before any other byte
moves, and the save before it can be tried; ``test_senseless_documents.py`` draws such documents.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._document._decode import decode, tensor_nodes
from residency._checkpoint._document._nodes import Node
from residency._checkpoint._restore._unusable import unusable_is_damage
from residency._dtensor import moved
from residency._errors import CorruptSaveError


def senseless_is_damage(path: str) -> AbstractContextManager[None]:
    """Takes whatever the reading of a node raises for damage of the save, by the node's place."""
    return unusable_is_damage(f"the save has a value at {path!r} that makes no sense")


def understood(
    path: str,
    node: Node,
    fetch: Callable[[str], Tensor] | None = None,
    check: Callable[[Any], object] | None = None,
) -> Any:
    """Returns the value of a node.

    Args:
        path: Where it stands in the state, for errors.
        node: The node.
        fetch: Returns the tensor of a name, with its bytes; None where there can be none.
        check: Called with the value; raises where it cannot be used.

    Raises:
        CorruptSaveError: The node means nothing, whatever its decoder raised.
    """
    with senseless_is_damage(path):
        value = decode(node, fetch or _no_tensor)
        if check is not None:
            check(value)
    return value


def _no_tensor(name: str) -> Tensor:
    raise CorruptSaveError(f"the save has the tensor {name} where a plain value is expected.")


@dataclass(slots=True, eq=False)
class SavedValue:
    """A value that is read anew; called, it returns the value, with its tensors on the host.

    Called with a device, it has those there that were on one.

    Attributes:
        path: Where it stands in the state.
        node: What the document has.
        check: See ``understood``.
        value: The value, once it is understood.
        fetch: Returns the tensor of a name, from then on.
    """

    path: str
    node: Node
    check: Callable[[Any], object] | None = None
    value: Any = None
    fetch: Callable[[str], Tensor] = field(default=_no_tensor)

    def understand(self, fetch: Callable[[str], Tensor]) -> None:
        """Makes the value, whose tensors have their bytes by now.

        Raises:
            CorruptSaveError: It makes no sense.
        """
        self.value = understood(self.path, self.node, fetch, self.check)
        self.fetch = fetch

    def __call__(self, device: torch.device | None = None) -> Any:
        nodes = () if device is None else tensor_nodes(self.node)
        placed = {each["name"] for each in nodes if each.get("place") == "device"}
        if device is None or not placed:
            return self.value
        fetch = self.fetch
        return decode(
            self.node, lambda name: moved(fetch(name), device) if name in placed else fetch(name)
        )
