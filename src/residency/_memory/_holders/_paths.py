"""Puts the way from a name to an object into words: ``train() local 'state_dict' ['model']['w']``.

A way is a chain of objects, each of which refers to the next. What stands between two of them is
read from the first one's type; what Python keeps between (an attribute dict, a closure's tuple and
cell, a module's ``_parameters``) is passed over. Classes, frames and generators have names of their
own, so a path begins anew with them.
"""

from __future__ import annotations

import collections
import functools
import types
from typing import Any, NamedTuple

import torch

from residency._memory import _objects
from residency._memory._holders._roots import frame_locals, frame_name
from residency._memory._holders._walk import Origin, Walk

_MODULE_TABLES = frozenset({"_modules", "_parameters", "_buffers"})
_FRAME_OF = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_READ_ONLY = (  # C types, and what they keep where
    (types.CellType, ("cell_contents",)),
    (types.MethodType, ("__self__", "__func__")),
    (functools.partial, ("func", "args", "keywords")),
    (types.FrameType, ("f_back",)),
    (BaseException, ("__cause__", "__context__", "__traceback__", "args")),
    (types.TracebackType, ("tb_frame", "tb_next")),
    (types.FunctionType, ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")),
    (types.BuiltinMethodType, ("__self__",)),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (property, ("fget", "fset", "fdel")),
)
_PASSED_OVER = frozenset({"tb_frame", "tb_next", "cell_contents", "__func__", "f_back"})


class _Step(NamedTuple):
    """One step of a path: how it is written, how many objects of the chain it led past."""

    text: str
    length: int = 1
    begins: bool = False  # whether `text` stands for everything before it


class Paths:
    """The names of the objects that a search reached, kept as they are worked out."""

    def __init__(self, walk: Walk, touched: list[types.FrameType]) -> None:
        """Makes the namer of one search, which notes the frames that it reads."""
        self._touched = touched
        self.key_names: dict[int, str] = {}  # of tensors that are keys of dicts, by id
        self._walk = walk
        self._keys: dict[int, dict[int, object]] = {}
        self._known: dict[int, str] = {}

    def path(self, position: int, *tail: object) -> str:
        """Returns the path of what was found at a position, or of what that leads to."""
        if not tail and position in self._known:
            return self._known[position]
        chain: list[object] = []
        at = position
        while (origin := self._walk.origin(at)) is None:
            parent = self._walk.parent(at)
            if parent is None:  # another thread took it away meanwhile
                origin = Origin(f"{_objects.type_name(self._walk.objects[at])} let go meanwhile")
                break
            chain.append(self._walk.objects[at])
            at = parent
        chain = [self._walk.objects[at], *reversed(chain), *tail]
        text = origin.text
        if origin.after is not None:
            text += self.path(origin.after) + origin.trail
        text = self._render(text, chain)
        if not tail:
            self._known[position] = text
        return text

    def root_of_graph(self, position: int) -> str | None:
        """Returns the path of the tensor behind which the graph lies that led here; None for none.

        What an operation saved may have a graph of its own: the outermost is taken.
        """
        walk, found, at = self._walk, None, position
        while True:
            origin = walk.origin(at)
            parent = walk.parent(at) if origin is None else origin.after
            if parent is None:
                return None if found is None else self.path(found)
            at = parent
            if origin is not None and origin.is_of_graph:
                found = at

    def _render(self, text: str, chain: list[object]) -> str:
        at = 0
        while at < len(chain) - 1:
            step = self._step(chain, at)
            if step.begins:
                text = step.text
            elif step.text.startswith("[") and text.endswith("'"):
                text += f" {step.text}"
            else:
                text += step.text
            at += step.length
        return text

    def _step(self, chain: list[Any], at: int) -> _Step:
        thing, child = chain[at], chain[at + 1]
        kinds = _objects.bases(type(thing))
        if (item := self._item(thing, child)) is not None:
            return _Step(item)
        if set in kinds or frozenset in kinds:
            return _Step(" (in a set)")
        if type in kinds:
            return self._class_step(thing, chain, at)
        if types.FrameType in kinds or type(thing) in _FRAME_OF:
            return self._frame_step(chain, at)
        table = _objects.attributes(thing)
        if torch.nn.Module in kinds:
            first = (
                at + 2 if table is child else at + 1
            )  # from Python 3.13 on there is no such step
            if first + 1 < len(chain) and self._key_of(table, chain[first]) in _MODULE_TABLES:
                key = self._key_of(chain[first], chain[first + 1])
                return _Step(f".{key}", first + 1 - at)
        if table is not None:
            if table is child and at + 2 < len(chain):
                return _Step(f".{_plain(self._key_of(table, chain[at + 2]))}", 2)
            if (name := self._key_of(table, child)) is not None:
                return _Step(f".{_plain(name)}")
        return self._stored_step(thing, chain, at)

    def _stored_step(self, thing: object, chain: list[object], at: int) -> _Step:
        """Reads what is kept in C structs: functions, exceptions, methods, slots, tensors."""
        child = chain[at + 1]
        kinds = _objects.bases(type(thing))
        for cls, names in _READ_ONLY:
            if cls in kinds:
                for name in names:
                    if _objects.slot(thing, name) is child:
                        return self._named_step(thing, name, chain, at)
        for name, value in _objects.slots(thing):
            if value is child:
                return _Step(f".{name}")
        if torch.Tensor in kinds:
            return _Step(".grad_fn" if _objects.slot(child, "next_functions") is not None else "")
        return _Step(f".<{_objects.type_name(child)}>")

    def _named_step(self, thing: Any, name: str, chain: list[Any], at: int) -> _Step:
        rest = chain[at + 1 :]
        if name == "__closure__" and len(rest) > 1:
            key = self._key_of(rest[0], rest[1])
            variable = thing.__code__.co_freevars[key] if type(key) is int else "?"
            return _Step(f" closure {variable!r}", 3 if len(rest) > 2 else 2)
        if name == "__defaults__" and len(rest) > 1:
            key = self._key_of(rest[0], rest[1])
            code = thing.__code__
            arguments = code.co_varnames[: code.co_argcount][-len(rest[0]) :]
            return _Step(f" default {arguments[key]!r}", 2)
        if name == "__kwdefaults__" and len(rest) > 1:
            return _Step(f" default {self._key_of(rest[0], rest[1])!r}", 2)
        if name == "__traceback__":
            return _Step(" traceback")
        return _Step("" if name in _PASSED_OVER else f".{name}")

    def _frame_step(self, chain: list[Any], at: int) -> _Step:
        frame = thing = chain[at]
        child, length = chain[at + 1], 1
        if type(thing) in _FRAME_OF:
            frame = _objects.slot(thing, _FRAME_OF[type(thing)])
        if frame is None:
            return _Step(f".<{_objects.type_name(child)}>")
        names = frame_locals(frame, self._touched)
        # A dict that a caller asked for, or the cell of a variable that an inner function has, too.
        is_between = child is frame.f_locals or type(child) is types.CellType
        if is_between and at + 2 < len(chain):
            child, length = chain[at + 2], 2
        for name, value in names:
            if value is child:
                return _Step(f" -> {frame_name(frame)} local {name!r}", length)
        if _objects.slot(thing, "f_back") is child:
            return _Step("")
        return _Step(f" -> {frame_name(frame)}")

    def _class_step(self, cls: type, chain: list[object], at: int) -> _Step:
        child = chain[at + 1]
        for name, value in _objects.type_dict(cls).items():
            if value is child:
                return _Step(f"{_objects.class_path(cls)}.{name}", begins=True)
        if type(child) is dict and at + 2 < len(chain):
            for name, value in _objects.type_dict(cls).items():
                if value is chain[at + 2]:
                    return _Step(f"{_objects.class_path(cls)}.{name}", 2, begins=True)
        return _Step(_objects.class_path(cls), begins=True)

    def _item(self, thing: Any, child: Any) -> str | None:
        """Returns where a dict, a list or the like has an object; None where it has not."""
        kinds = _objects.bases(type(thing))
        key = self._key_of(thing, child)
        if dict in kinds:
            if key is None:
                return " (a key)" if any(key is child for key, _ in _objects.items(thing)) else None
            return f"[{self.describe_key(key)}]"
        if key is None:
            return None
        fields = _fields(thing)
        return f".{fields[key]}" if key < len(fields) else f"[{key}]"

    def describe_key(self, key: object) -> str:
        """Returns a key as it is written in brackets; a parameter's is its name."""
        known = self.key_names.get(id(key))
        return _objects.describe_key(key) if known is None else repr(known)

    def _key_of(self, container: Any, child: Any) -> Any:
        """Returns the key or the index at which a container has an object; None where it has not.

        What a container has is read once: many paths may lead through it.
        """
        keys = self._keys.get(id(container))
        if keys is None:
            keys = self._keys[id(container)] = {}
            kinds = _objects.bases(type(container))
            if dict in kinds:
                for key, value in _objects.items(container):
                    keys.setdefault(id(value), key)
            else:
                base = next((b for b in (list, tuple, collections.deque) if b in kinds), None)
                for index, value in enumerate(base.__iter__(container) if base else ()):
                    keys.setdefault(id(value), index)
        return keys.get(id(child))


def _plain(name: object) -> str:
    return name if type(name) is str else _objects.describe_key(name)


def _fields(things: object) -> tuple[str, ...]:
    """Returns the names of a named tuple's fields; none for any other."""
    for cls in _objects.bases(type(things)):
        found = _objects.type_dict(cls).get("_fields")
        if type(found) is tuple and all(type(name) is str for name in found):
            return found
        if cls is tuple or cls is list:
            break
    return ()
