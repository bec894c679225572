"""The path that an error is about, and what of a call has given it.

Where a file or a folder is missing, nothing but its path can come of a value: what was to be
written there has no part in it, nor has the branch in which that was done.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

_OF_TORCH = re.compile(r"Parent directory (.*) does not exist")  # of `torch.save`, in C++
_FIRST = (("self",), ("cls",))  # names of what a method is called on


def path_of(error: BaseException) -> str:
    """Returns the path that an error is about; "" of an error that is about none."""
    if isinstance(error, OSError):
        return _text(error.filename) if isinstance(error.filename, str | bytes) else ""
    found = _OF_TORCH.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found else ""


def givers(
    call: ast.Call, called: FrameType | None, path: str, needed: Collection[str] | None
) -> list[ast.AST]:
    """Returns the pieces of a call that may have given a path; the whole of it if that is open.

    Args:
        call: The call.
        called: The frame of what it has called; None where that is no function of Python.
        path: The path.
        needed: The names of the function's parameters on which the path hangs; None where that
            is not known.
    """
    if called is None:
        return [*call.args, *(each.value for each in call.keywords)] or [call]
    given = [each for each in _given(call, called) if needed is None or each[0] in needed]
    exact = [piece for _, piece, value in given if _text(value) == path]
    parts = [piece for _, piece, value in given if _shares(_text(value), path)]
    return exact or parts or [call]


def _given(call: ast.Call, called: FrameType) -> Iterator[tuple[str, ast.AST, Any]]:
    """Yields the parameters of a function, what a call has written for them, and their values."""
    code, found = called.f_code, called.f_locals
    names = list(code.co_varnames[: code.co_argcount])
    values = [found.get(name) for name in names]
    others = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]
    if code.co_flags & inspect.CO_VARARGS:
        many = found.get(others[0], ())
        names += [others[0]] * len(many)
        values += many
    rest = others[bool(code.co_flags & inspect.CO_VARARGS) :]
    more = found.get(rest[0], {}) if code.co_flags & inspect.CO_VARKEYWORDS else {}
    pieces: list[ast.AST] = list(call.args)
    is_method = tuple(names[:1]) in _FIRST
    if is_method or (not code.co_argcount and len(values) == len(pieces) + 1):
        pieces.insert(0, call.func.value if isinstance(call.func, ast.Attribute) else call.func)
    yield from zip(names, pieces, values, strict=False)
    for keyword in call.keywords:
        if keyword.arg is not None:
            name = rest[0] if keyword.arg in more else keyword.arg
            yield name, keyword.value, more.get(keyword.arg, found.get(keyword.arg))


def _text(value: object) -> str:
    if isinstance(value, str | bytes | os.PathLike):
        return os.fsdecode(value)
    return str(value) if isinstance(value, int | float) else ""


def _shares(text: str, path: str) -> bool:
    return bool(text) and (text in path or path in text)
