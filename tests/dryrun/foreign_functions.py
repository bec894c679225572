"""Starts the watch of a dry run with all of its changes, and judges each function that then stands
around another: whether it takes what that takes. Prints what it found as JSON, and ends at once.

Nothing is listed here. Functions around others are found among all objects; what was put in a
foreign place besides, by the names of all modules and classes. Run by ``test_wrappers.py``.
"""

import ast
import gc
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import textwrap
import types
from pathlib import Path

SETTINGS = {
    "folder": tempfile.mkdtemp(),
    "capacity": 1 << 30,
    "steps": 2,
    "ranks": 2,
    "random_weights": True,
    "offload": 0,
    "loads_on_host": True,
    "defers_state": True,
    "defers_template": True,
    "calls_back": True,
    "views_buckets": True,
    "saves_on_host": True,
    "parks_state": True,
    "checkpointing": True,
}
os.environ["RESIDENCY_DRY_RUN"] = json.dumps(SETTINGS)

import residency  # noqa: E402  # after the settings, as in a dry run
from residency import sim  # noqa: E402
from residency._dryrun import _child, _methods, _ranks, _rewriting  # noqa: E402
from residency._dryrun._settings import RunSettings  # noqa: E402
from residency._memory import ImportWatch  # noqa: E402

ROOT = Path(residency.__file__).parent
WATCHES = (str(ROOT / "_dryrun"), str(ROOT / "_memory"))
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
METHODS = (classmethod, staticmethod, types.MethodType)
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def start():
    settings = RunSettings.of(os.environ)
    _rewriting.rewrite_loops()
    sim.enable(settings.capacity, device="cuda", dry=True, schedule="eager", devices=1)
    _ranks.be_one_rank(settings.ranks)
    _ranks.be_first_rank()
    _child.Run(settings).start()


def import_watched(packages):
    """Imports the modules of some packages that a dry run waits for, or all; returns those that are
    not installed.
    """
    missing = []
    for _ in range(2):  # some watches start with the import of others
        watches = [each for each in sys.meta_path if isinstance(each, ImportWatch)]
        for name in sorted({name for each in watches for name in each._calls}):
            if packages and name.partition(".")[0] not in packages:
                continue
            try:
                importlib.import_module(name)
            except ImportError:
                missing.append(name)
    return sorted(set(missing))


def is_ours(function):
    return type(function) is types.FunctionType and function.__code__.co_filename.startswith(
        WATCHES
    )


def file_of(function):
    return Path(function.__code__.co_filename).name


def told(function):
    """Returns the function that reads the arguments, the names that it gets for others, and how
    many arguments it gets before them.
    """
    if function.__code__.co_filename == _methods.__file__:
        found = inspect.getclosurevars(function).nonlocals
        return found["wrapper"], found["renamed"], len(found["before"])
    return function, {}, 0


def ways(signature):
    """Yields the ways in which a function with this signature can be called."""
    parameters = [
        each
        for each in signature.parameters.values()
        if each.kind in (*BY_POSITION, inspect.Parameter.KEYWORD_ONLY)
    ]
    is_method = bool(parameters) and parameters[0].name in ("self", "cls")
    for chosen in (parameters, [p for p in parameters if p.default is inspect.Parameter.empty]):
        positions = [p for p in chosen if p.kind in BY_POSITION]
        if positions != parameters[: len(positions)]:
            continue
        least = max(
            is_method,
            sum(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in positions),
        )
        for number in range(min(least, len(positions)), len(positions) + 1):
            args = [p.name for p in positions[:number]]
            yield args, {p.name: p.name for p in chosen if p.name not in args}
            # Only the last of those that have a default, beside all that have none.
            rest = [p for p in positions[number:] if p.default is not inspect.Parameter.empty]
            needed = [p for p in chosen[number:] if p.default is inspect.Parameter.empty]
            if rest:
                yield args, {p.name: p.name for p in (*needed, rest[-1])}


def faults(function):
    """Yields what a function does not take of what the one that it stands around takes."""
    reader, renamed, num_before = told(function)
    mine = inspect.signature(reader, follow_wrapped=False)
    parameters = [*mine.parameters.values()]
    if parameters[0].kind in BY_POSITION:  # else it hands on all that it gets, as a context does
        mine = mine.replace(parameters=parameters[num_before:])
    first = [p for p in mine.parameters.values() if p.kind in BY_POSITION]
    yield from faults_of_source(reader)
    wrapped = getattr(function.__wrapped__, "__func__", function.__wrapped__)
    try:
        theirs = inspect.signature(wrapped)
    except (TypeError, ValueError):
        if len(first) > 1 + len(renamed):
            yield f"names {[p.name for p in first]}, and the native function tells none"
        return
    order = [p.name for p in theirs.parameters.values() if p.kind in BY_POSITION]
    for args, options in ways(theirs):
        given = {renamed.get(name, name): value for name, value in options.items()}
        try:
            bound = mine.bind(*args, **given).arguments
        except TypeError as error:
            yield f"called with {args}, {sorted(options)}: {error}"
            continue
        for parameter, name in zip(first, order, strict=False):
            if bound.get(parameter.name, name) != name:
                yield f"{parameter.name} is {bound[parameter.name]}, and not {name}"


def faults_of_source(reader):
    """Yields where a function reads an argument by its place alone."""
    kinds = inspect.signature(reader, follow_wrapped=False).parameters.values()
    several = [each.name for each in kinds if each.kind is inspect.Parameter.VAR_POSITIONAL]
    if reader.__code__.co_name == "<lambda>":
        return
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(reader.__code__)))):
        is_read = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        if is_read and node.value.id in several:
            yield f"reads {ast.unparse(node)}"


def foreign_places():
    """Yields each function of a dry run that is in a place of others, with the place's name."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.startswith(("residency", "__main__")):
            continue
        spaces = [(name, vars(module))]
        spaces += [
            (f"{name}.{each.__qualname__}", vars(each))
            for each in list(vars(module).values())
            if type in type(each).__mro__ and each.__module__ == name
        ]
        for owner, space in spaces:
            for key, value in list(space.items()):
                function = value.__func__ if type(value) in METHODS else value
                if is_ours(function) and not key.startswith("__residency_"):
                    yield f"{owner}.{key}", function


def chain_of(function):
    """Returns the files of functions that stand around each other, the outermost first."""
    files = []
    while is_ours(function) and hasattr(function, "__wrapped__"):
        files.append(file_of(told(function)[0]))
        function = getattr(function.__wrapped__, "__func__", function.__wrapped__)
    return files


def main():
    start()
    missing = import_watched(sys.argv[1:])
    found = [
        each
        for each in gc.get_objects()
        if type(each) is types.FunctionType and is_ours(each) and hasattr(each, "__wrapped__")
    ]
    wrong = sorted(
        f"{each.__module__}.{each.__qualname__} in {file_of(told(each)[0])}: {why}"
        for each in found
        for why in dict.fromkeys(faults(each))
    )
    bare = sorted({place for place, each in foreign_places() if not hasattr(each, "__wrapped__")})
    chains = {place: chain_of(each) for place, each in foreign_places()}
    chains = {place: each for place, each in chains.items() if len(each) > 1}
    result = {"number": len(found), "wrong": wrong, "bare": bare, "missing": missing}
    print(json.dumps(result | {"chains": chains}))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # no report of a run that was none


main()
