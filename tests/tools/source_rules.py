"""The rules about the source that a machine can check: each function finds what breaks one."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
ROOT = PROJECT / "src" / "residency"
SIMULATOR = PROJECT / "sim" / "src" / "residency_sim"
TESTS = PROJECT / "tests"
PACKAGE = "residency"

# From the bottom to the top. A module imports from lines below its own, and from its own package.
LAYERS = (
    ("_errors",),
    ("_units",),
    ("_registries",),
    ("_nesting",),
    ("_whole",),
    ("_commands",),
    ("_lazy",),
    ("_system",),
    ("_modes",),
    ("_storages",),
    ("_module_calls",),
    ("_threads",),
    ("_device",),
    ("_pinned",),
    ("_private_pools",),
    ("residency_sim",),
    ("sim",),  # its door
    ("_dtensor",),
    ("_ranks",),
    ("_transfer",),
    ("_memory",),
    ("_park",),
    ("_optim", "_frozen", "_checkpoint", "_handoff"),  # strangers to each other
    ("_report",),
    ("types", "optim"),
    ("",),  # the public door, residency/__init__.py
    ("testing",),
    ("integrations",),
    ("_demo",),  # shows them
    ("_dryrun",),
    ("_cli",),
    ("__main__",),
)
SIMULATORS = {"residency_sim", "sim"}
SIMULATOR_USERS = {*SIMULATORS, "_cli", "_demo", "_dryrun", "testing"}
# What the simulator, a distribution of its own, uses of the library.
SHARED = {"_errors", "_lazy", "_units"}
# The dry run and the demo: a verb alone imports them, and they import what `SHARED` and the public
# doors offer. Each of these names of other rooms is a debt, and the list may only get shorter.
APART = {"_demo", "_dryrun"}
DEBTS = {
    "_checkpoint": ["DTYPES", "Record", "STORED_DTYPES", "be_dry", "make_header", "watch_files"],
    "_commands": ["start_command"],
    "_device": [""],  # the demo's figures
    "_dtensor": ["is_sharded", "local_of", "moved"],
    "_memory": [
        *("ImportWatch", "KnownCalls", "OPTIMIZER_STEP", "Visit", "asked_bytes", "boundaries"),
        *("find_growth", "find_holders", "grouped", "let_go_text", "measure", "open_phases"),
        *("remedy_for", "segment_bytes"),
    ],
    "_optim": ["record_of"],
    "_transfer": ["state_stays"],
}
MAX_DEBTS = 27
CUDA_FILES = ("_device.py", "residency_sim/_cuda/", "residency_sim/compat.py")
UNITS_FILE = "_units.py"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_NAMES = 27
MAX_ANY = 25  # of 1,000 lines
# Public, and of one name in each framework's own terms.
NAMES_OF_FRAMEWORKS = {"Config", "ResidencyCallback"}
POWERS = {1024**exponent for exponent in (1, 2, 3, 4)}
SOURCES = {".py", ".cpp", ".h", ".hpp", ".cu"}

Tree = dict[str, ast.Module]


def sources(*suffixes: str) -> Iterator[tuple[str, Path]]:
    """Yields the sources of both distributions, each with its name: as `parse` has it."""
    for path in sorted(ROOT.rglob("*")):
        if path.suffix in suffixes:
            yield path.relative_to(ROOT).as_posix(), path
    for path in sorted(SIMULATOR.rglob("*")):
        if path.suffix in suffixes:
            yield path.relative_to(SIMULATOR.parent).as_posix(), path


@functools.cache
def parse_sources() -> Tree:
    """Maps each Python file of both distributions to its syntax tree: of the library, as a path
    relative to its package; of the simulator, to the folder with its package.
    """
    return {file: ast.parse(path.read_text(encoding="utf-8")) for file, path in sources(".py")}


def parse_library() -> Tree:
    """Returns what `parse_sources` has of the library."""
    simulator = f"{SIMULATOR.name}/"
    return {f: tree for f, tree in parse_sources().items() if not f.startswith(simulator)}


def parse(root: Path) -> Tree:
    """Maps each Python file, as a path relative to the root, to its syntax tree."""
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(root.rglob("*.py"))
    }


def module_name(file: str) -> str:
    parts = file.removesuffix(".py").split("/")
    parts = parts if parts[0] == SIMULATOR.name else [PACKAGE, *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """Returns the name below the package that decides the layer; "" is the public door."""
    names = module.split(".")
    return names[0] if names[0] == SIMULATOR.name else names[1] if names[1:] else ""


def layer_of(unit: str) -> int:
    for index, units in enumerate(LAYERS):
        if unit in units:
            return index
    raise LookupError(f"{unit!r} is in no layer; add it to LAYERS")


def imports(tree: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yields line and module of each import of this package, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in {PACKAGE, SIMULATOR.name}:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.split(".")[0] not in {PACKAGE, SIMULATOR.name}:
                continue
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in modules else node.module


def layer_faults(files: Tree) -> list[str]:
    modules = {module_name(file) for file in files}
    faults = []
    for file, tree in files.items():
        unit = unit_of(module_name(file))
        for line, target in imports(tree, modules):
            other = unit_of(target)
            if other == unit and (unit or target != PACKAGE):
                continue
            if layer_of(other) >= layer_of(unit):
                faults.append(f"{file}:{line} imports {target}, which is not below it")
            if other in SIMULATORS and unit not in SIMULATOR_USERS:
                faults.append(f"{file}:{line} imports the simulator")
            if other in APART and unit != "_cli":
                faults.append(f"{file}:{line} imports {target}, as a verb alone may")
            if unit == SIMULATOR.name and other not in SHARED:
                faults.append(f"{file}:{line} imports {target}, which it is not to need")
    return faults


def imports_when_loaded(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yields what a module imports while it is itself imported: not inside functions."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (target for _, target in imports(node, modules))
        pending += ast.iter_child_nodes(node)


def cycles(files: Tree) -> list[str]:
    modules = {module_name(file) for file in files}
    edges = {
        module_name(file): set(imports_when_loaded(tree, modules)) & modules - {module_name(file)}
        for file, tree in files.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(edges[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return found


def length_faults(root: Path) -> list[str]:
    """Finds long files, then long functions."""
    return file_length_faults(root) + function_length_faults(root)


def file_length_faults(root: Path) -> list[str]:
    faults = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in SOURCES:
            continue
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            faults.append(f"{path.relative_to(root)} has {num_lines} lines")
    return faults


def function_length_faults(root: Path) -> list[str]:
    faults = []
    for file, tree in parse(root).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    faults.append(f"{file}:{node.lineno} {node.name} has {num_lines} lines")
    return faults


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Returns the string nodes that are statements: docstrings and notes, not values."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def names_cuda(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
            return True
        case ast.Import(names=names):
            return any(alias.name.startswith("torch.cuda") for alias in names)
        case ast.ImportFrom(module="torch", names=names):
            return any(alias.name == "cuda" for alias in names)
        case ast.ImportFrom(module=str(module)):
            return module.startswith("torch.cuda")
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="torch"), second, *_]):
            return isinstance(second, ast.Constant) and second.value == "cuda"
        case ast.Constant(value=str(text)):
            return "torch.cuda" in text
    return False


def cuda_faults(files: Tree) -> list[str]:
    faults = []
    for file, tree in files.items():
        if file.startswith(CUDA_FILES):
            continue
        ignored = docstrings(tree)
        for node in ast.walk(tree):
            if node not in ignored and names_cuda(node):
                faults.append(f"{file}:{node.lineno} names torch.cuda")  # type: ignore[attr-defined]
    return faults


def is_power_of_1024(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=int(value)):
            return value in POWERS
        case ast.BinOp(left=ast.Constant(value=1), op=ast.LShift(), right=ast.Constant(value=n)):
            return n in {10, 20, 30, 40}
        case ast.BinOp(left=ast.Constant(value=2), op=ast.Pow(), right=ast.Constant(value=n)):
            return n in {10, 20, 30, 40}
    return False


def unit_faults(files: Tree) -> list[str]:
    return [
        f"{file}:{node.lineno} writes a power of 1024"  # type: ignore[attr-defined]
        for file, tree in files.items()
        if file != UNITS_FILE
        for node in ast.walk(tree)
        if is_power_of_1024(node)
    ]


def except_faults(files: Tree) -> list[str]:
    faults = []
    for file, tree in files.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            if node.type is None:
                faults.append(f"{file}:{node.lineno} catches everything")
                continue
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            silent = all(
                isinstance(line, ast.Pass | ast.Continue | ast.Break)
                or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            )
            if silent and caught & {"Exception", "BaseException"}:
                faults.append(f"{file}:{node.lineno} passes over every error in silence")
    return faults


def log_faults(files: Tree) -> list[str]:
    """Finds errors given to a logger as they are: who keeps the record keeps their frames, and what
    those have of a model.
    """
    return [
        f"{file}:{call.lineno} gives a logger an error: give it its text"
        for file, tree in files.items()
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler) and handler.name is not None
        for call in ast.walk(handler)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in {"debug", "info", "warning", "error", "critical"}
        if any(isinstance(arg, ast.Name) and arg.id == handler.name for arg in call.args)
    ]


def wait_faults(files: Tree) -> list[str]:
    """Finds waits of streams that do not go through the function that makes their device current:
    elsewhere torch makes a context on the thread's own.
    """
    return [
        f"{file}:{call.lineno} waits: call _device.wait_event"
        for file, tree in files.items()
        if file.split("/")[0] not in {"_device.py", SIMULATOR.name, "testing"}
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in {"wait_event", "wait_stream"}
        if ast.unparse(call.func.value) != "_device"
    ]


def stream_faults(files: Tree) -> list[str]:
    """Finds stream objects that are entered as they are: one that threads share swaps their current
    streams.
    """
    return [
        f"{file}:{node.lineno} enters {ast.unparse(item.context_expr)}: enter on_lane of it"
        for file, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Name | ast.Attribute)
        if re.search(r"(h2d|d2h|lane|stream)$", ast.unparse(item.context_expr))
    ]


def doors(files: Tree) -> list[str]:
    return [
        file
        for file in files
        if file in {"__init__.py", "sim/__init__.py", "testing/__init__.py", "testing.py"}
        or re.fullmatch(r"integrations/[^_/][^/]*(\.py|/__init__\.py)", file)
        or re.fullmatch(r"residency_sim/(__init__|[^_/][^/]*)\.py", file)
    ]


def declared_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            names: list[str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return list(names)
    return None


def offered_names(tree: ast.Module) -> list[str]:
    """Returns what a door lists: its ``__all__``, or what it imports as ``name as name``."""
    return declared_names(tree) or [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]


def door_faults(files: Tree) -> list[str]:
    faults = []
    for file in doors(files):
        names = declared_names(files[file])
        if names is None:
            faults.append(f"{file} has no __all__")
        elif names != sorted(set(names)):
            faults.append(f"{file} has an __all__ that is not sorted: {names}")
    return faults


def passage_faults(files: Tree) -> list[str]:
    """Finds imports that go past another package's door, or ask it for what it does not offer."""
    packages = {module_name(file) for file in files if file.endswith("__init__.py")}
    offered = {module_name(file): offered_names(tree) for file, tree in files.items()}
    modules = set(offered)
    faults = []
    for file, tree in files.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module not in modules:
                continue
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = inner if inner in modules else node.module
                unit = unit_of(target)
                is_package = unit == SIMULATOR.name or f"{PACKAGE}.{unit}" in packages
                if unit == unit_of(module_name(file)) or not is_package:
                    continue
                if not unit:
                    continue
                if is_in_a_room(target, packages):
                    faults.append(f"{file}:{node.lineno} goes past the door, to {target}")
                elif target == node.module and alias.name not in offered[target]:
                    faults.append(f"{file}:{node.lineno}: {target} does not offer {alias.name}")
    return faults


def is_in_a_room(module: str, packages: set[str]) -> bool:
    """Returns whether a module is one that a package keeps to itself."""
    return module not in packages and module.split(".")[-1].startswith("_")


def debts(files: Tree) -> dict[str, list[str]]:
    """Returns what the rooms apart import that no public door offers, by its unit."""
    modules = {module_name(file): file for file in files}
    found: dict[str, set[str]] = {}
    for file, tree in files.items():
        room = unit_of(module_name(file))
        for node in ast.walk(tree) if room in APART else ():
            if not isinstance(node, ast.ImportFrom) or node.module not in modules:
                continue
            offered = declared_names(files[modules[node.module]]) or []
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target, name = (inner, "") if inner in modules else (node.module, alias.name)
                is_public = "._" not in target and name in {"", "__version__", *offered}
                if not is_public and unit_of(target) not in {room, *SHARED}:
                    found.setdefault(unit_of(target), set()).add(name)
    return {unit: sorted(found[unit]) for unit in sorted(found)}


def lazy_door_faults(files: Tree) -> list[str]:
    """Finds doors whose lists differ: for type checkers, and for ``_lazy.door``."""
    faults = []
    for file, tree in files.items():
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "door"
        ]
        if not calls or file == "__init__.py":
            continue
        named: dict[str, list[str]] = ast.literal_eval(calls[0].args[1])
        for_checkers = {
            (node.module, alias.name)
            for each in tree.body
            if isinstance(each, ast.If)
            for node in each.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        found = {
            (f"{module_name(file)}.{module}", name) for module in named for name in named[module]
        }
        if found != for_checkers:
            faults.append(f"{file}: its lists differ")
    return faults


def name_faults(files: Tree) -> list[str]:
    """Finds classes of one name in two files; an underscore before it makes no difference."""
    homes: dict[str, list[str]] = {}
    for file, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(file)
    return [
        f"{name} is in {', '.join(found)}"
        for name, found in homes.items()
        if len(found) > 1 and name not in NAMES_OF_FRAMEWORKS
    ]


def share_of_any() -> float:
    """Returns how often the source says ``Any``, imports apart, for each 1,000 of its lines."""
    lines = [line for _, path in sources(".py") for line in path.read_text().splitlines()]
    used = [line for line in lines if "import" not in line]
    return 1000 * sum(len(re.findall(r"\bAny\b", line)) for line in used) / len(lines)
