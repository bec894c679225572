"""Rewrites the loops of a script as Python loads it, so that each can be ended (``_loops``).

``for x in items`` goes over ``each(items)``; ``while test`` becomes ``while goes_on() and test``,
in a context that says when it is over. A ``while True:`` loop that only a ``return`` can leave
executes that ``return`` when it is ended. Lines stay as they are. What comes from no file has its
own room (``_texts``). An ``except`` says first what it has caught (``_caught``).

Of libraries, modules that train are rewritten, too (``_trains``), but for those of torch and of
frameworks whose trainers are asked to stop. What cannot be rewritten stays as it is.

Python looks for a module ``__main__`` at the path of the script that it is to run, as it may be an
archive. A finder of ours says that there is one, and loads it.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, TracebackType
from typing import Any, TypeVar

from residency._dryrun._caught import caught
from residency._dryrun._loops import loops
from residency._dryrun._places import is_installed, is_ours, is_script
from residency._dryrun._turning import turning

# By a script, by these names.
_ASKED = (caught.caught, loops.each, loops.enter, loops.goes_on, loops.mapped, loops.repeat)
_NAME = "__residency_{}__"
_AS_A_SCRIPT = "__spec__ = __package__ = __cached__ = None"  # which an archive's module has
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Libraries that are left as they are: they end by themselves, or train nothing.
_LEFT = frozenset({"torch", "functorch", "torchgen", "residency", "accelerate", "deepspeed"}) | {
    *("transformers", "lightning", "lightning_fabric", "pytorch_lightning", "ultralytics"),
}
_COMPILERS = frozenset({"numba", "triton", "taichi"})  # which read a function's code
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})
_PASSES = frozenset({"backward", "zero_grad"})
_TRAINING = re.compile(r"(?:train|fit)(?:_\w+)?")  # what a loop of epochs calls
_IS_FUNCTION = 0x1  # inspect.CO_OPTIMIZED, which the code of a class or of a module has not
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

_Kind = TypeVar("_Kind", bound=ast.AST)


class _Rewriting(ast.NodeTransformer):
    """The rewriting of a syntax tree in place; loops that call nothing stay as they are.

    Attributes:
        num_changes: How many nodes ask now.
    """

    def __init__(self) -> None:
        """Begins with no change."""
        self.num_changes = 0
        self._turning: set[ast.AST] = set()

    def ask(self, name: str, at: ast.AST, *arguments: ast.expr) -> ast.Call:
        """Returns a call of what the script asks, in the place of a node."""
        self.num_changes += 1
        return _call(name, at, *arguments)

    def visit(self, node: ast.AST) -> ast.AST:
        """Rewrites a node and what is in it."""
        if isinstance(node, _LOOPS):
            self._turning |= set(turning(node))
        self.generic_visit(node)
        if node in self._turning and isinstance(node, ast.If):
            node.body.insert(0, ast.copy_location(ast.Expr(self.ask("enter", node)), node))
        elif isinstance(node, ast.For) and _calls(node.body):
            node.iter = self.ask("each", node.iter, node.iter)
        elif isinstance(node, ast.Call) and _name(node.func) in ("map", "starmap"):
            if len(node.args) > 1 and not any(isinstance(e, ast.Starred) for e in node.args[:2]):
                node.args[1] = self.ask("mapped", node.args[1], node.func, node.args[1])
        elif isinstance(node, ast.Call) and _name(node.func) == "exec" and node.args:
            if not isinstance(node.args[0], ast.Starred):
                node.args[0] = self.ask("text", node.args[0], node.func, node.args[0])
        elif isinstance(node, ast.ExceptHandler):
            if node.type is not None and _name(node.type) in _IMPORT_ERRORS:
                return node  # the script expects that a module is missing, and goes on without
            node.body.insert(0, ast.copy_location(ast.Expr(self.ask("caught", node)), node))
        elif isinstance(node, _Comprehension) and _calls([node]):
            for each in node.generators:
                if not each.is_async:
                    each.iter = self.ask("each", each.iter, each.iter)
        elif isinstance(node, ast.While) and _calls([node.test, *node.body]):
            is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
            if is_endless and not any(_inside(node, ast.Break, but=_LOOPS)):
                returned = list(_inside(node, ast.Return))[-1:]
                node.orelse = [copy.deepcopy(each) for each in returned]
            test = ast.BoolOp(ast.And(), [self.ask("goes_on", node.test), node.test])
            node.test = ast.copy_location(test, node.test)
            context = ast.withitem(self.ask("repeat", node.test))
            return ast.copy_location(ast.With([context], [node]), node)
        return node


def rewritten(source: bytes, file: str, *, is_main: bool = False) -> CodeType:
    """Compiles a script whose loops can be ended.

    Args:
        source: The script.
        file: Where it stands.
        is_main: Whether Python takes its file for an archive.

    Raises:
        SyntaxError: As of the script.
        ValueError: It is no text.
    """
    tree = ast.parse(source, file)
    has_rewritten(tree)
    if is_main:
        first = _first_to_run(tree.body)
        tree.body[first:first] = ast.parse(_AS_A_SCRIPT).body
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


def has_rewritten(tree: ast.AST) -> bool:
    """Rewrites a syntax tree in place, and returns whether anything in it was to be."""
    rewriting = _Rewriting()
    rewriting.visit(tree)
    ast.fix_missing_locations(tree)
    return rewriting.num_changes > 0


def _trains(code: CodeType) -> bool:
    """Returns whether a module trains: a function of it makes a backward pass or, where the module
    imports torch, calls one that trains.
    """
    of_module = set(code.co_names)
    of_functions: set[str] = set()
    for each in _codes_in(code):
        names = of_functions if each.co_flags & _IS_FUNCTION else of_module
        names.update(each.co_names)
    if _COMPILERS & (of_module | of_functions):
        return False
    if _PASSES & of_functions:
        return True
    return "torch" in of_module and any(map(_TRAINING.fullmatch, of_functions))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_in(each)


def _inside(node: ast.AST, kind: type[_Kind], but: tuple[type, ...] = ()) -> Iterator[_Kind]:
    """Yields the nodes of a kind in another one, but for what is in functions, or in ``but``."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, kind):
            yield each
        if not isinstance(each, (*but, *_SCOPES)):
            yield from _inside(each, kind, but)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.attr  # a second look at it does nothing
    return function.id if isinstance(function, ast.Name) else ""


def _calls(nodes: Iterable[ast.AST]) -> bool:
    return any(isinstance(each, ast.Call) for node in nodes for each in ast.walk(node))


def _call(name: str, at: ast.AST, *arguments: ast.expr) -> ast.Call:
    function = ast.Name(_NAME.format(name), ast.Load())
    call = ast.copy_location(ast.Call(function, list(arguments), []), at)
    return ast.fix_missing_locations(call)


def _first_to_run(body: list[ast.stmt]) -> int:
    """Returns where the statements begin that may follow others: no docstring, no future."""
    for number, each in enumerate(body):
        is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        is_future = isinstance(each, ast.ImportFrom) and each.module == "__future__"
        if not is_future and not (is_text and number == 0):
            return number
    return len(body)


class _Script(SourceFileLoader):
    """The loader of the script that Python is to run, and the finder that says it is there."""

    def __init__(self, file: str, path: str) -> None:
        super().__init__("__main__", file)
        self._path = path
        self._code = rewritten(self.get_data(file), file, is_main=True)

    def find_spec(self, name: str, target: object = None) -> ModuleSpec | None:
        """Finds the script itself, and nothing beside it."""
        return ModuleSpec(name, self, origin=self.path) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """Returns its code, about to be run."""
        if sys.path and sys.path[0] == self._path:  # as of an archive
            folder = os.path.dirname(os.path.realpath(self.path))
            sys.path[:1] = [] if sys.flags.safe_path else [folder]
        hide_ours_from_errors()
        return self._code


def _find_script(path: str) -> _Script:
    """Finds the script that Python is about to run: it has run none yet."""
    file = os.path.join(os.getcwd(), path)  # as Python names it
    if hasattr(sys.modules.get("__main__"), "__file__") or not is_script(file):
        raise ImportError
    try:
        return _Script(file, path)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ImportError from error  # Python runs it by itself, and says what is wrong


def hide_ours_from_errors() -> None:
    """Leaves what loads and ends loops out of the traceback that Python shows of an error."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        at = _of_script(at)
        before(kind, error.with_traceback(at), at)

    sys.excepthook = hook


def _of_script(at: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without what loads and ends loops."""
    shown = []
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if name != "<frozen runpy>" and not is_ours(name):
            shown.append(at)
        at = at.tb_next
    for each, following in zip(shown, [*shown[1:], None], strict=True):
        each.tb_next = following
    return shown[0] if shown else None


def let_ask(name: str, function: object) -> None:
    """Gives rewritten code a function that it asks."""
    setattr(builtins, _NAME.format(name), function)


def rewrite_loops() -> None:
    """Rewrites what is loaded of the script from now on."""
    for each in _ASKED:
        let_ask(each.__name__, each)
    let_ask("text", lambda function, source: source)  # where texts are not followed
    sys.path_hooks.append(_find_script)
    loader: Any = SourceFileLoader
    load = loader.get_code

    @functools.wraps(load)
    def get_code(self: Any, fullname: str) -> Any:
        file = self.get_filename(fullname)
        found = None
        if not is_script(file):
            found = load(self, fullname)
            is_plain = type(self) is SourceFileLoader and is_installed(file)
            if fullname.partition(".")[0] in _LEFT or not (is_plain and _trains(found)):
                return found
        try:
            return rewritten(self.get_data(file), file)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return found or load(self, fullname)

    loader.get_code = get_code
