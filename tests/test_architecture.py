"""The source keeps the rules of ``tools/source_rules.py``: layers, cycles, sizes, silence."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from source_rules import (
    DEBTS,
    MAX_ANY,
    MAX_DEBTS,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MAX_PUBLIC_NAMES,
    PACKAGE,
    ROOT,
    SIMULATOR,
    TESTS,
    Tree,
    cuda_faults,
    cycles,
    debts,
    door_faults,
    except_faults,
    file_length_faults,
    layer_faults,
    lazy_door_faults,
    length_faults,
    log_faults,
    name_faults,
    parse,
    parse_sources,
    passage_faults,
    share_of_any,
    stream_faults,
    unit_faults,
    wait_faults,
)

# The package ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package() -> Tree:
    return parse_sources()


def test_every_module_imports_only_from_layers_below_its_own(package: Tree) -> None:
    assert layer_faults(package) == []


def test_no_modules_import_each_other_in_a_circle(package: Tree) -> None:
    assert cycles(package) == []


def test_files_and_functions_are_short() -> None:
    assert length_faults(ROOT) + length_faults(SIMULATOR) == []


def test_files_of_tests_are_short() -> None:
    assert file_length_faults(TESTS) == []


def test_a_class_has_a_name_of_its_own(package: Tree) -> None:
    assert name_faults(package) == []


def test_few_values_are_of_any_type() -> None:
    assert share_of_any() <= MAX_ANY


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


def test_other_packages_come_in_by_a_packages_door(package: Tree) -> None:
    assert passage_faults(package) == []


def test_the_dry_run_and_the_demo_import_public_names_and_what_is_listed(package: Tree) -> None:
    assert debts(package) == DEBTS
    assert sum(map(len, DEBTS.values())) <= MAX_DEBTS


def test_the_lists_of_a_door_are_the_same(package: Tree) -> None:
    assert lazy_door_faults(package) == []


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
        write(tmp_path, name.replace("__", "/") + ".py", source)
    return tmp_path


def write(root: Path, file: str, source: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source)


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
        ("_demo__bench", "from residency import _dryrun", True),
        ("_optim__step", "import residency_sim", True),
        ("_dryrun__child", "from residency_sim import dry_run", False),
        ("residency_sim__gpus", "from residency._units import MIB", False),
        ("residency_sim__gpus", "from residency import sim", True),
        ("residency_sim__gpus", "from residency._device import on", True),
        ("residency_sim___enable", "from residency_sim._gpus import Gpu", False),
    ],
)
def test_an_import_against_the_layers_is_found(
    tmp_path: Path, importer: str, line: str, is_fault: bool
) -> None:
    made_up(tmp_path, **{importer: line})
    for unit in ("_optim", "_checkpoint", "_demo", "_dryrun", "_cli", "sim", "residency_sim"):
        write(tmp_path, f"{unit}/__init__.py", "")
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


def test_an_import_that_goes_past_a_door_is_found(tmp_path: Path) -> None:
    write(tmp_path, "_memory/__init__.py", "from residency._memory._phase import phase as phase")
    write(tmp_path, "_memory/_state.py", "")
    write(tmp_path, "_units.py", "x = 1")
    lines = "from residency._memory import phase, measure\nfrom residency._memory._state import x\n"
    lines += "from residency._memory import _state\nfrom residency._units import x"
    write(tmp_path, "_optim/_step.py", lines)
    assert passage_faults(parse(tmp_path)) == [
        "_optim/_step.py:1: residency._memory does not offer measure",
        "_optim/_step.py:2 goes past the door, to residency._memory._state",
        "_optim/_step.py:3 goes past the door, to residency._memory._state",
    ]


def test_what_the_dry_run_imports_that_no_public_door_offers_is_found(tmp_path: Path) -> None:
    write(tmp_path, "__init__.py", '__all__ = ["park"]')
    write(tmp_path, "_park/__init__.py", '__all__ = ["park", "room"]')
    write(tmp_path, "_units.py", "")
    write(tmp_path, "_device.py", "")
    write(tmp_path, "residency_sim/dry_run.py", '__all__ = ["has_context"]')
    lines = "from residency import park, other, _device\nfrom residency._park import room\n"
    lines += "from residency._units import MIB\nfrom residency_sim.dry_run import has_context, x\n"
    write(tmp_path, "_dryrun/_child.py", lines)
    write(tmp_path, "_cli/_verb.py", "from residency._park import room")
    found = {"": ["other"], "_device": [""], "_park": ["room"], "residency_sim": ["x"]}
    assert debts(parse(tmp_path)) == found


@pytest.mark.parametrize("offered", ['["a"]', '["a", "b"]', '["b"]'])
def test_a_door_whose_lists_differ_is_found(tmp_path: Path, offered: str) -> None:
    door = "if TYPE_CHECKING:\n    from residency._memory._a import a as a\n"
    door += f'__getattr__ = door(__name__, {{"_a": {offered}}})'
    write(tmp_path, "_memory/__init__.py", door)
    assert bool(lazy_door_faults(parse(tmp_path))) == (offered != '["a"]')


def test_a_class_name_that_stands_twice_is_found(tmp_path: Path) -> None:
    made_up(tmp_path, a="class Run: ...", b="def f():\n    class _Run: ...", c="class Runs: ...")
    assert name_faults(parse(tmp_path)) == ["Run is in a.py, b.py"]


# A fact of the format stands in one file.
FORMAT_FACTS = {
    "the key of a node's kind": (r"^\$$", "_checkpoint/_document/_nodes.py"),
    "the name of a published save": (r"step-\(", "_checkpoint/_disk/_published.py"),
    "what a note says of a tensor": (r"^of_rank$", "_checkpoint/_document/_notes.py"),
    "a dtype's name in the format": (r"^BF16$", "_checkpoint/_document/_dtypes.py"),
}


@pytest.mark.parametrize("fact", FORMAT_FACTS)
def test_a_fact_of_the_format_stands_in_one_file(package, fact):
    text, home = FORMAT_FACTS[fact]
    users = {
        file
        for file, tree in package.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(text, node.value)
    }
    assert users - {"_checkpoint/_disk/_header.py"} == {home}  # it has the sizes by these names


def test_the_record_of_an_offloaded_optimizer_is_read_in_one_file(package):
    """What reads it elsewhere, from a dict of any values, no type checker sees."""
    users = {
        file
        for file, tree in package.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript | ast.Call)
        if "__dict__" in ast.unparse(node) and re.search(r"[\[(]PRIVATE\b", ast.unparse(node))
    }
    assert users == {"_optim/_offload_record.py"}
