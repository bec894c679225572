"""The rules about the source that a machine can check: layers, cycles, sizes, silence."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "residency"
PACKAGE = "residency"

# From the bottom to the top. A module imports from lines below its own, and from its own package.
LAYERS = (
    ("_errors",),
    ("_units",),
    ("_registries",),
    ("_modes",),
    ("_storages",),
    ("_device",),
    ("_private_pools",),
    ("sim",),
    ("_transfer",),
    ("_memory",),
    ("_optim", "_checkpoint", "_handoff"),  # strangers to each other
    ("_report",),
    ("types",),
    ("",),  # the public door, residency/__init__.py
    ("testing",),
    ("integrations",),
    ("_demo",),  # shows them
    ("_cli",),
    ("__main__",),
)
SIMULATOR_USERS = {"sim", "_cli", "_demo", "testing"}
CUDA_FILES = ("_device.py", "sim/_cuda_", "sim/compat.py", "sim/compat/", "sim/_compat")
UNITS_FILE = "_units.py"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_NAMES = 25
POWERS = {1024**exponent for exponent in (1, 2, 3, 4)}
SOURCES = {".py", ".cpp", ".h", ".hpp", ".cu"}

Tree = dict[str, ast.Module]


def parse(root: Path) -> Tree:
    """Maps each Python file, as a path relative to the root, to its syntax tree."""
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(root.rglob("*.py"))
    }


def module_name(file: str) -> str:
    parts = [PACKAGE, *file.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """Returns the name below the package that decides the layer; "" is the public door."""
    return module.split(".")[1] if "." in module else ""


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
                if alias.name.split(".")[0] == PACKAGE:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.split(".")[0] != PACKAGE:
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
            if other == "sim" and unit not in SIMULATOR_USERS:
                faults.append(f"{file}:{line} imports the simulator")
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
    faults = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in SOURCES:
            continue
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            faults.append(f"{path.relative_to(root)} has {num_lines} lines")
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
        if file.split("/")[0] not in {"_device.py", "sim", "testing"}
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
        or (file.startswith("integrations/") and not file.split("/")[-1].startswith("_"))
    ]


def declared_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            names: list[str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return list(names)
    return None


def door_faults(files: Tree) -> list[str]:
    faults = []
    for file in doors(files):
        names = declared_names(files[file])
        if names is None:
            faults.append(f"{file} has no __all__")
        elif names != sorted(set(names)):
            faults.append(f"{file} has an __all__ that is not sorted: {names}")
    return faults


# The package ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package() -> Tree:
    return parse(ROOT)


def test_every_module_imports_only_from_layers_below_its_own(package: Tree) -> None:
    assert layer_faults(package) == []


def test_no_modules_import_each_other_in_a_circle(package: Tree) -> None:
    assert cycles(package) == []


def test_files_and_functions_are_short() -> None:
    assert length_faults(ROOT) == []


def test_only_one_file_names_torch_cuda(package: Tree) -> None:
    assert cuda_faults(package) == []


def test_only_one_file_knows_the_binary_factor(package: Tree) -> None:
    assert unit_faults(package) == []


def test_no_error_is_passed_over_in_silence(package: Tree) -> None:
    assert except_faults(package) == []


def test_no_record_of_a_log_keeps_the_frames_of_an_error(package: Tree) -> None:
    assert log_faults(package) == []


def test_waits_of_streams_make_their_device_current(package: Tree) -> None:
    assert wait_faults(package) == []


def test_no_stream_that_threads_share_is_entered_as_it_is(package: Tree) -> None:
    assert stream_faults(package) == []


def test_every_public_door_lists_its_names_in_order(package: Tree) -> None:
    assert door_faults(package) == []


def test_the_package_exports_few_names_and_each_can_be_imported() -> None:
    residency = importlib.import_module(PACKAGE)
    assert len(residency.__all__) <= MAX_PUBLIC_NAMES
    for name in residency.__all__:
        assert getattr(residency, name) is not None
        assert name in dir(residency)


# The checker itself, on sources made up to break one rule each ----------------------------------


def made_up(tmp_path: Path, **sources: str) -> Path:
    """Writes files: the keyword `sim__door` is the file sim/door.py."""
    for name, source in sources.items():
        path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("importer", "line", "is_fault"),
    [
        ("_transfer__slab", "from residency._device import accelerator", False),
        ("_transfer__slab", "from residency._transfer.lanes import Lane", False),
        ("_transfer__slab", "from residency._optim import offload_optimizer", True),
        ("_transfer__slab", "import residency", True),
        ("_transfer__slab", "def f():\n    import residency._optim.step", True),
        ("_optim__step", "from residency._checkpoint import Checkpointer", True),
        ("_handoff__park", "from residency import _optim", True),
        ("_optim__step", "from residency import sim", True),
        ("_demo__bench", "from residency import sim", False),
        ("_demo__bench", "import torch", False),
        ("_cli__verb", "from residency import _demo", False),
        ("_demo__bench", "from residency import _cli", True),
    ],
)
def test_an_import_against_the_layers_is_found(
    tmp_path: Path, importer: str, line: str, is_fault: bool
) -> None:
    others = {f"{unit}____init__": "" for unit in ("_optim", "_checkpoint", "_demo", "_cli")}
    made_up(tmp_path, **{importer: line})
    for unit in others:
        folder = tmp_path / unit.removesuffix("____init__")
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "__init__.py").write_text("")
    assert bool(layer_faults(parse(tmp_path))) == is_fault


def test_a_module_in_no_layer_is_an_error(tmp_path: Path) -> None:
    made_up(tmp_path, _helpers="import residency._units", _units="")
    with pytest.raises(LookupError, match="_helpers"):
        layer_faults(parse(tmp_path))


def test_a_circle_is_found_and_an_import_inside_a_function_is_none(tmp_path: Path) -> None:
    one = "from residency._optim.b import x"
    made_up(tmp_path, _optim__a=one, _optim__b="import residency._optim.a")
    assert cycles(parse(tmp_path)) == [
        "residency._optim.a -> residency._optim.b -> residency._optim.a"
    ]
    made_up(tmp_path, _optim__b="def f():\n    import residency._optim.a")
    assert cycles(parse(tmp_path)) == []


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    made_up(tmp_path, fine="x = 1\n" * MAX_FILE_LINES, long="x = 1\n" * (MAX_FILE_LINES + 1))
    made_up(tmp_path, function="def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
    (tmp_path / "long.cpp").write_text("\n" * (MAX_FILE_LINES + 1))
    assert length_faults(tmp_path) == [
        f"long.cpp has {MAX_FILE_LINES + 1} lines",
        f"long.py has {MAX_FILE_LINES + 1} lines",
        f"function.py:1 f has {MAX_FUNCTION_LINES + 1} lines",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "getattr(torch, 'cuda')",
        "import_module('torch.cuda')",
    ],
)
def test_naming_torch_cuda_is_found_and_allowed_in_one_file(tmp_path: Path, line: str) -> None:
    made_up(tmp_path, _optim__step=line, _device=line)
    assert cuda_faults(parse(tmp_path)) == ["_optim/step.py:1 names torch.cuda"]


def test_a_docstring_may_speak_of_torch_cuda(tmp_path: Path) -> None:
    made_up(tmp_path, _optim__step='"""Works as torch.cuda does."""')
    assert cuda_faults(parse(tmp_path)) == []


@pytest.mark.parametrize("value", ["1024", "8 * 1024", "1 << 20", "2**30", "1048576"])
def test_the_binary_factor_is_found(tmp_path: Path, value: str) -> None:
    made_up(tmp_path, _optim__step=f"x = {value}", _units=f"x = {value}")
    assert unit_faults(parse(tmp_path)) == ["_optim/step.py:1 writes a power of 1024"]


@pytest.mark.parametrize(
    ("clause", "body", "is_fault"),
    [
        ("except:", "raise", True),
        ("except Exception:", "pass", True),
        ("except (OSError, BaseException):", "...", True),
        ("except Exception:", "log()", False),
        ("except OSError:", "pass", False),
    ],
)
def test_silent_handlers_are_found(tmp_path: Path, clause: str, body: str, is_fault: bool) -> None:
    made_up(tmp_path, a=f"try:\n    f()\n{clause}\n    {body}")
    assert bool(except_faults(parse(tmp_path))) == is_fault


@pytest.mark.parametrize(("given", "is_fault"), [("e", True), ("str(e)", False)])
def test_an_error_that_is_given_to_a_logger_is_found(
    tmp_path: Path, given: str, is_fault: bool
) -> None:
    made_up(tmp_path, a=f"try:\n    f()\nexcept OSError as e:\n    log.warning('%s', {given})")
    assert bool(log_faults(parse(tmp_path))) == is_fault


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        ("stream.wait_event(e)", True),
        ("a().wait_stream(b)", True),
        ("_device.wait_event(s, e)", False),
    ],
)
def test_a_wait_that_leaves_the_threads_device_current_is_found(
    tmp_path: Path, line: str, is_fault: bool
) -> None:
    made_up(tmp_path, a=line)
    assert bool(wait_faults(parse(tmp_path))) == is_fault


@pytest.mark.parametrize(
    ("entered", "is_fault"),
    [("self.h2d", True), ("no_grad(), lanes.d2h", True), ("on_lane(lanes.d2h)", False)],
)
def test_a_stream_that_is_entered_as_it_is_is_found(
    tmp_path: Path, entered: str, is_fault: bool
) -> None:
    made_up(tmp_path, a=f"with {entered}:\n    pass")
    assert bool(stream_faults(parse(tmp_path))) == is_fault


def test_a_door_without_an_ordered_list_is_found(tmp_path: Path) -> None:
    made_up(tmp_path, integrations__one='__all__ = ["b", "a"]', integrations__two="x = 1")
    assert door_faults(parse(tmp_path)) == [
        "integrations/one.py has an __all__ that is not sorted: ['b', 'a']",
        "integrations/two.py has no __all__",
    ]


# A fact of the format stands in one file.
FORMAT_FACTS = {
    "the key of a node's kind": (r"^\$$", "_checkpoint/_nodes.py"),
    "the name of a published save": (r"step-\(", "_checkpoint/_disk/_layout.py"),
    "what a note says of a tensor": (r"^of_rank$", "_checkpoint/_notes.py"),
    "a dtype's name in the format": (r"^BF16$", "_checkpoint/_dtypes.py"),
}


@pytest.mark.parametrize("fact", FORMAT_FACTS)
def test_a_fact_of_the_format_stands_in_one_file(fact):
    text, home = FORMAT_FACTS[fact]
    users = {
        file
        for file, tree in parse(ROOT).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(text, node.value)
    }
    assert users - {"_checkpoint/_disk/_header.py"} == {home}  # it has the sizes by these names
