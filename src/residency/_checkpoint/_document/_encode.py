"""Turns Python values into the JSON nodes of a save's document; tensors become named leaves.

No pickle: a value of a kind that is not listed here is refused by its name. Invariant, which
``tests/checkpoint/restore/test_kinds.py`` tries to break: what is encoded shares nothing mutable
with the caller, except the tensors, which the leaves hold.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from residency._checkpoint._document._decode import decode
from residency._checkpoint._document._kinds import inline_bytes, kind_for
from residency._checkpoint._document._nodes import PLAIN, Node, has_halves, tensor_node
from residency._errors import RefusedError
from residency._modes import callers_modes_off
from residency._transfer import Lent

_MOST_LEVELS = 100  # each takes a few calls, when a tree is written and when it is read
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
_MOST_VALUES = 100_000  # that a tree with shared containers may be written as, if it has few
_LONGEST_KEY = 100
SPAN = ".__storage__"  # ends the name under which `_blocks` may store what a tensor lies in

Objects = Callable[[str, Any], Node | None]


@dataclass(slots=True, eq=False)
class Leaf:
    """A tensor of a state tree.

    Attributes:
        name: The dotted path.
        value: What the caller has, detached; a ``DTensor`` of a sharded one.
        is_early: Whether others than optimizers may change it, so that it is copied first.
        lent: The loan, of a state that lives on the host.
    """

    name: str
    value: Tensor
    is_early: bool
    lent: Lent | None = None


class Encoder:
    """An encoder of values, which collects their tensors.

    Attributes:
        leaves: The tensors by name, in the order in which they were met.
    """

    def __init__(self, objects: Objects | None = None) -> None:
        """Begins with no tensors.

        Args:
            objects: Returns the node of what is filled in place only, such as a module, or None.
        """
        self.leaves: dict[str, Leaf] = {}
        self.is_inline = False
        self._objects = objects

    def tensor(
        self, name: str, value: Tensor, *, is_early: bool = True, lent: Lent | None = None
    ) -> Node:
        """Returns the node of a tensor, and takes it among the leaves.

        Raises:
            RefusedError: Two values have this name, or there is no tensor yet.
        """
        if self.is_inline:
            raise RefusedError(
                f"{name.removesuffix('.key')} has a tensor as a key, which is a key by its "
                "identity alone. Nothing was saved; give it a name as its key."
            )
        if name.removesuffix(SPAN) in self.leaves or name + SPAN in self.leaves:
            raise RefusedError(
                f"two tensors of the state have the name {name!r}: a key with a dot in it meets a "
                "path of the same spelling. Nothing was saved; rename one of the keys."
            )
        if is_lazy(value):
            raise RefusedError(
                f"{name} is a {type(value).__name__}, which has no shape before the first forward."
                " Nothing was saved; run one, or leave its module out."
            )
        mine = value.detach() if lent is None else value
        self.leaves[name] = Leaf(name, mine, is_early, lent)
        return tensor_node(name)

    def node(self, name: str, value: Any) -> Node:
        """Returns the node of any value.

        Raises:
            RefusedError: The value, or one inside it, is of a kind that a save does not hold.
        """
        kind = kind_for(value)
        if kind is not None:
            return kind.encode(self, name, value)
        found = self._objects(name, value) if self._objects is not None else None
        if found is not None:
            return found
        if isinstance(value, Lent):
            return self.tensor(name, value.value, lent=value)
        if isinstance(value, Tensor):
            return self.tensor(name, value)
        raise RefusedError(
            f"{name or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, and "
            "a save holds tensors, arrays, plain Python values and containers of them, and objects "
            f"with state_dict and load_state_dict. Nothing was saved; {_hint(value)}."
        )

    def items(self, name: str, values: Iterable[Any]) -> list[Node]:
        """Returns the nodes of values in their order."""
        return [
            self.node(name if type(each) in PLAIN else joined(name, index), each)
            for index, each in enumerate(values)
        ]

    def plain_items(self, name: str, values: Iterable[object]) -> list[Node]:
        """Returns the nodes of values in their order, of which none is filled in place."""
        with self._without_objects():
            return self.items(name, values)

    def plain(self, name: str, value: object) -> Node:
        """Returns the node of a value with nothing in it that is filled in place."""
        with self._without_objects():
            return self.node(name, value)

    def pairs(self, name: str, value: Mapping[object, object]) -> list[list[Node]]:
        """Returns the nodes of keys and values. A key is read before any tensor is."""
        return [
            [self._key(name, key), self.node(joined(name, key), each)]
            for key, each in value.items()
        ]

    def bytes_of(self, name: str, data: Any) -> dict[str, Any]:
        """Returns what a node has of bytes that no other code writes."""
        if self.is_inline:
            return inline_bytes(bytes(data))
        with callers_modes_off():
            stored = (
                torch.frombuffer(data, dtype=torch.uint8)
                if len(data)
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
        return {"tensor": self.tensor(name, stored)["name"]}

    def _key(self, path: str, key: object) -> Node:
        name = f"{path}.key" if path else "key"
        if type(key) is str:
            return self.node(name, key)
        self.is_inline = True
        try:
            node = self.plain(name, key)
        finally:
            self.is_inline = False
        if decode(node, _no_tensor) != key:
            raise RefusedError(
                f"{name.removesuffix('.key')} has the key {_spelled(key)}, which is equal to none "
                "that is read from a file, as NaN is not. Nothing was saved; give it a name."
            )
        return node

    @contextmanager
    def _without_objects(self) -> Iterator[None]:
        objects, self._objects = self._objects, None
        try:
            yield
        finally:
            self._objects = objects


def _no_tensor(name: str) -> Tensor:
    raise AssertionError(f"a key has the tensor {name}")


def _hint(value: object) -> str:
    if isinstance(value, Enum):  # str(it) of one that is a text is another text
        return "give its .value"
    if is_dataclass(value):
        return "give it these two methods, or save dataclasses.asdict of it"
    if isinstance(value, Mapping):
        return "give dict(it)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "give its _asdict()"
    if isinstance(value, list | tuple | set | int | float | str | bytes):
        plain = next(kind for kind in type(value).__mro__ if kind.__module__ == "builtins")
        return f"give {plain.__name__}(it)"
    if callable(getattr(value, "load_state_dict", None)):
        return (
            "a state_dict() has it as it is: let that one give its state_dict() instead, or save "
            "it under a name of its own"
        )
    return "give one of those instead"


def check_is_finite(value: object, name: str = "", *, done: str = "saved") -> None:
    """Looks through the containers of a state for one that contains itself, or that is in so many
    places that the tree would be written as far more than it is.

    Args:
        value: The state.
        name: Its path.
        done: What is not done with it, for the message.

    Raises:
        RefusedError: By the path at which it stands again.
    """
    look = _Look(done)
    num_values = look.through(value, name, 0)
    if num_values > max(_MOST_VALUES, 4 * look.num_values):
        raise RefusedError(
            f"{name or 'the state'} has {look.num_values} values in containers that stand in many "
            f"places, as which {num_values} would be written. Nothing was {done}; make it flatter."
        )


class _Look:
    """A look through a tree that enters each container once.

    Attributes:
        num_values: How many values were met, those within a container once.
    """

    def __init__(self, done: str) -> None:
        self.num_values = 0
        self._nothing = f"Nothing was {done}"
        self._around: dict[int, str] = {}
        self._done: dict[int, tuple[int, int]] = {}
        self._alive: list[object] = []  # an identity is that of something living

    def through(self, value: object, name: str, level: int) -> int:
        """Returns how many values are written of one, its parts included."""
        if not isinstance(value, _CONTAINERS):
            self.num_values += 1
            return 1
        if id(value) in self._around:
            raise RefusedError(
                f"{name} is {self._around[id(value)] or 'the state'} again, which contains it: a "
                f"save of it would have no end. {self._nothing}; take the inner one out."
            )
        count, levels = self._done.get(id(value), (0, 0))
        if level + levels > _MOST_LEVELS:
            raise RefusedError(
                f"{name.partition('.')[0] or 'the state'} is nested deeper than Python can follow, "
                f"by more than {_MOST_LEVELS} levels. {self._nothing}; make it flatter."
            )
        self.num_values += 1
        if count:
            return count
        self._around[id(value)] = name
        self._alive.append(value)
        count, levels = 1, 0
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if type(each) in PLAIN:  # of which a list may have a million
                count, levels, self.num_values = count + 1, levels or 1, self.num_values + 1
                continue
            below = joined(name, key) if isinstance(each, _CONTAINERS) else ""
            count += self.through(each, below, level + 1)
            levels = max(levels, 1 + self._done.get(id(each), (0, 0))[1])
        del self._around[id(value)]
        self._done[id(value)] = count, levels
        return count


def joined(name: str, key: object) -> str:
    """Returns the dotted path of a key below a name, as it may be the name of a tensor."""
    spelled = key if type(key) is str else _spelled(key)
    if not spelled.isascii() and has_halves(spelled):
        spelled = spelled.encode("utf-8", "backslashreplace").decode()
    return f"{name}.{spelled}" if name else spelled


def _spelled(key: object) -> str:
    try:
        spelled = str(key)
    except ValueError:  # of more digits than Python writes
        spelled = hex(key) if isinstance(key, int) else repr(type(key))
    if len(spelled) <= _LONGEST_KEY:
        return spelled
    rest = zlib.crc32(spelled.encode("utf-8", "backslashreplace"))
    return f"{spelled[:_LONGEST_KEY]}-{rest:08x}"
