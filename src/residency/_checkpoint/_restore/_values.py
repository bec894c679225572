"""Values of a save's document that are made anew: planned, then understood, then put in place.

A value is understood while nothing has been changed: its bytes are read, it is made, and what it is
for has had a look at it. So what makes no sense is damage that is found before any other byte
moves, and the save before it can be tried; ``test_senseless_documents.py`` draws such documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residency import _device
from residency._checkpoint._disk._manifest import MANIFEST
from residency._checkpoint._document._decode import decode, tensor_nodes
from residency._checkpoint._document._nodes import Node
from residency._dtensor import moved
from residency._errors import CheckpointError, CorruptSaveError, RefusedError


@contextmanager
def unusable_is_damage(what: str) -> Iterator[None]:
    """Takes what a block raises for damage of the save, but for a lack of memory, a lost device,
    what is refused by name and the damage of a file.

    Args:
        what: The sentence that the error begins with, without its end.

    Raises:
        CorruptSaveError: The block raised; the message has its error.
    """
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError, RefusedError):
        raise
    except CheckpointError as error:
        if not isinstance(error, CorruptSaveError) or error.file is not None:
            raise
        raise CorruptSaveError(f"{what}: {error}", file=MANIFEST, tensor=error.tensor) from error
    except Exception as error:  # each class raises its own
        if _device.is_lost(error):
            raise
        raise CorruptSaveError(f"{what}: {error!r}.", file=MANIFEST) from error


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
    raise CorruptSaveError(f"the save has the tensor {name} instead of a plain value.")


def settled_value(planned: object) -> object:
    """Returns the object that a plan puts at a place, or the value of a ``SavedValue``."""
    return planned() if isinstance(planned, SavedValue) else planned


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
