"""Looks into Python objects without running a line of theirs.

What an object is and has is read from its type's own table: ``__getattr__``, ``__eq__``,
``__repr__``, ``__class__`` and properties of a user's class are never called, whatever they do.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

_MRO: Any = type.__dict__["__mro__"]
_TYPE_DICT: Any = type.__dict__["__dict__"]
_QUALNAME: Any = type.__dict__["__qualname__"]
_LONGEST_KEY = 60
_PLAIN = frozenset({int, bool, float, complex, type(None)})


def bases(cls: type) -> tuple[type, ...]:
    """Returns a class and its bases, in the order in which they are asked for attributes."""
    found: tuple[type, ...] = _MRO.__get__(cls)
    return found


def is_a(thing: object, cls: type) -> bool:
    """Returns whether an object is of a class or of one derived from it."""
    return cls in bases(type(thing))


def type_dict(cls: type) -> types.MappingProxyType[str, Any]:
    """Returns what a class itself defines."""
    table: types.MappingProxyType[str, object] = _TYPE_DICT.__get__(cls)
    return table


def type_name(thing: object) -> str:
    """Returns the name of an object's class, or of the class that it is."""
    return str(_QUALNAME.__get__(type(thing)))


def class_path(cls: type) -> str:
    """Returns a class's module and name."""
    module = type_dict(cls).get("__module__")
    name = str(_QUALNAME.__get__(cls))
    return f"{module}.{name}" if type(module) is str and module != "builtins" else name


def slot(thing: object, name: str) -> Any:
    """Reads what C code stores under a name in an object; None where it stores nothing."""
    for cls in bases(type(thing)):
        found: Any = type_dict(cls).get(name)
        # What a subclass puts in its place, a property say, is passed over.
        if type(found) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            try:
                return found.__get__(thing)
            except (AttributeError, RuntimeError, ValueError):  # not set, or not to be had now
                return None
    return None


def attributes(thing: object) -> dict[str, Any] | None:
    """Returns the dict of an object's own attributes, itself and not a copy; None without one."""
    for cls in bases(type(thing)):
        found = type_dict(cls).get("__dict__")
        if type(found) is types.GetSetDescriptorType:
            table = found.__get__(thing)
            return table if type(table) is dict else None
    return None


def slots(thing: object) -> Iterator[tuple[str, object]]:
    """Yields names and values of what an object keeps in ``__slots__``, or a C struct."""
    for cls in bases(type(thing)):
        for name, found in type_dict(cls).items():
            if type(found) is types.MemberDescriptorType:
                try:
                    yield name, found.__get__(thing)
                except AttributeError:  # empty
                    continue


def items(thing: object) -> list[tuple[Any, Any]]:
    """Returns the items of a dict, of a subclass's instance too, as dict itself keeps them."""
    return list(dict.items(thing)) if is_a(thing, dict) else []  # type: ignore[arg-type]


def describe_key(key: object) -> str:
    """Returns a key as it is written in brackets."""
    if type(key) in (str, bytes):
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 4]}...{text[-1]}"
    if type(key) in _PLAIN:
        return repr(key)
    if type(key) is tuple:
        inner = ", ".join(describe_key(part) for part in key[:4])
        return f"({inner}, ...)" if len(key) > 4 else f"({inner})"
    return f"<{type_name(key)}>"
