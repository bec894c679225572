"""Follows a script that no loader loads: text that it compiles or runs itself, a file that
``runpy`` runs, a cell of a notebook, ``python -c`` and ``python -``. Its loops are rewritten, too.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from residency._dryrun._places import is_ours, is_script, line_of, note_text
from residency._dryrun._rewriting import has_rewritten, hide_ours_from_errors, let_ask

_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)
_COMMAND, _STDIN = "<python -c>", "<stdin>"
_NOT_FROM_FILES = (["-c"], ["-"], [""])  # what Python has as the name of its script
_Compile = Callable[..., Any]


def follow_texts() -> None:
    """Follows them from now on."""
    compile_as_python = builtins.compile
    builtins.compile = _following(compile_as_python)
    let_ask("text", functools.partial(_text, builtins.exec))
    if sys.argv[:1] in _NOT_FROM_FILES:
        sys.addaudithook(_run_what_is_no_file)


def _following(compile_as_python: _Compile) -> _Compile:
    @functools.wraps(compile_as_python)
    def compiled(
        source: Any,
        filename: Any,
        mode: str,
        flags: int = 0,
        dont_inherit: bool = False,
        optimize: int = -1,
        **options: Any,
    ) -> Any:
        caller = sys._getframe(1)
        if not dont_inherit:
            flags |= _futures_of(caller)
        if mode == "exec" and not flags & ast.PyCF_ONLY_AST and _is_followed(filename, caller):
            source = _rewritten(compile_as_python, source, filename, flags)
        return compile_as_python(source, filename, mode, flags, True, optimize, **options)

    return compiled


def _is_followed(filename: object, caller: FrameType) -> bool:
    """Returns whether what is compiled is the script's: by its own call, or a file of it."""
    by = caller.f_code.co_filename
    if not isinstance(filename, str) or is_ours(by) or by.startswith("<frozen importlib"):
        return False
    if filename.startswith("<"):
        return is_script(by)
    return is_script(filename) and (is_script(by) or filename.endswith(".py") or "runpy" in by)


def _futures_of(frame: FrameType) -> int:
    return frame.f_code.co_flags & _FUTURES


def _rewritten(compile_as_python: _Compile, source: Any, filename: str, flags: int) -> Any:
    """Returns a tree whose loops can be ended; the source itself, where there is none in it."""
    try:
        if isinstance(source, ast.AST):
            tree = copy.deepcopy(source)
        else:
            tree = compile_as_python(source, filename, "exec", flags | ast.PyCF_ONLY_AST, True)
        if not has_rewritten(tree):
            return source
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return source  # Python says what is wrong with it
    note_text(filename)
    return tree


def _text(execute: object, function: object, source: Any) -> Any:
    """Returns what the script gives to ``exec``, compiled; as it is for another function."""
    if function is not execute or not isinstance(source, str | bytes):
        return source
    caller = sys._getframe(1)
    if not is_script(caller.f_code.co_filename):
        return source
    name = f"<text at {line_of(caller.f_code.co_filename, caller.f_lineno)}>"
    flags = _futures_of(caller)
    tree = _rewritten(compile, source, name, flags)
    return source if tree is source else compile(tree, name, "exec", flags, True)


def _run_what_is_no_file(event: str, arguments: tuple[Any, ...]) -> None:
    """Runs a command or the standard input in Python's place, which is about to run it.

    Python says so by an event, and ends with the error that a listener raises.
    """
    if event == "cpython.run_command":
        _run_in_main(arguments[0], _COMMAND)
    elif event == "cpython.run_stdin" and not sys.stdin.isatty():
        _run_in_main(sys.stdin.buffer.read(), _STDIN, is_read=True)


# A listener is not traced but with this: coverage and debuggers see the script.
_run_what_is_no_file.__cantrace__ = True  # type: ignore[attr-defined]


def _run_in_main(source: str | bytes, name: str, *, is_read: bool = False) -> None:
    tree = _rewritten(compile, source, name, 0)
    if tree is source and not is_read:
        return
    code: CodeType = compile(tree, name, "exec", 0, True)
    hide_ours_from_errors()
    exec(code, vars(sys.modules["__main__"]))
    raise SystemExit(0)
