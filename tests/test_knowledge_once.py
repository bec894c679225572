"""Each fact that several callers need stands in one place, and they ask that place."""

import ast
import re
from collections.abc import Callable, Iterator

import pytest
from source_rules import PROJECT, TESTS, Tree, docstrings, parse_library, parse_sources, sources


@pytest.fixture(scope="module")
def package() -> Tree:
    """The library, without the simulator and what only shows or tries the library."""
    return {
        file: tree
        for file, tree in parse_sources().items()
        if file.split("/")[0] not in {"residency_sim", "testing", "_demo", "_dryrun"}
    }


def sites(files: Tree, is_one: Callable[[ast.AST], bool]) -> set[str]:
    """Returns the functions, as ``file function``, in which a node is of a kind."""
    return {
        f"{file} {function}"
        for file, tree in files.items()
        for function, node in _with_functions(tree)
        if is_one(node)
    }


def _with_functions(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef) else function
        yield inner, child
        yield from _with_functions(child, inner)


def calls(*names: str) -> Callable[[ast.AST], bool]:
    """Tells a call of a function or a method of one of these names."""

    def is_one(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        return ast.unparse(node.func).rpartition(".")[2] in names

    return is_one


# Copies between host and device ---------------------------------------------------------------

# Both sides are in one memory.
COPIES_WITHIN_ONE_MEMORY = {
    "_checkpoint/_capture/_capture.py copy",  # what the host has, into its region
    "_checkpoint/_restore/_fill.py _carry",  # from a file's tensor into host memory, or a slot
    "_checkpoint/_restore/_overlaps.py _laid",  # host memory that it makes itself
    "_optim/_homes.py apart_from_snapshots",  # from home to home
    "_optim/_homes.py copy_of",  # from home to home
    "_optim/_stand_ins.py give_gradients_back",  # a flat copy that is where the gradient is
    "_optim/_stand_ins.py write_back",  # a master on the device into its parameter there
    "_optim/_stream.py _stop",  # from home to home
    "_optim/_unit_step.py _puts_in_slot",  # on the device, into its slot
    "_optim/_unit_step.py roll_back",  # on the host
    "integrations/transformers/_evaluation.py _stacked",  # what a ring has brought to the host
}
# torch's own ``Tensor.cpu`` or ``Tensor.to``, blocking, into a new tensor.
MOVES_OF_ONE_TENSOR = {
    "_frozen/_stream.py __init__",  # a model's modules, as torch moves them
    "_dtensor.py moved",
    "_optim/_trial/_copies.py is_equal",  # a table of a class, for the comparison
    "_optim/_trial/_copies.py on_host",  # of a small stand-in
    "_optim/_trial/_separable.py _shrink",  # a sample of a state
    "integrations/_common/_pickled.py _take",  # a kind without plain bytes
    "integrations/dcp/_rank_plan.py __init__",  # one at a time, as torch's own writer does
    "integrations/dcp/_rank_plan.py acquire",
    "integrations/torchtitan/_checkpoints.py _in_dtype",  # into another dtype
}


def test_only_the_transfer_copies_between_host_and_device(package: Tree) -> None:
    others = {file: tree for file, tree in package.items() if not file.startswith("_transfer/")}
    assert sites(others, _is_late) == set()
    assert sites(others, calls("copy_", "_foreach_copy_")) == COPIES_WITHIN_ONE_MEMORY
    moves = sites(others, calls("cpu")) | sites(others, _moves_to)
    assert moves == MOVES_OF_ONE_TENSOR


def _is_late(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "non_blocking"


def _moves_to(node: ast.AST) -> bool:
    if not calls("to")(node):
        return False
    assert isinstance(node, ast.Call)
    return any("device" in ast.unparse(each) or "cpu" in ast.unparse(each) for each in node.args)


# The ranks ------------------------------------------------------------------------------------


def test_one_module_knows_whether_this_process_has_others_and_which_of_them_failed(
    package: Tree,
) -> None:
    asked = calls("get_world_size", "is_initialized", "all_gather_object", "all_gather")
    users = sites(package, lambda node: asked(node) and "dist" in ast.unparse(node))
    assert {user for user in users if not user.startswith("_ranks.py ")} == {
        "_handoff/_agreement.py _gather",  # within a time, which a rank that is gone cannot exceed
    }
    assert sites(package, calls("failures_of_ranks")) == {
        "_checkpoint/_job.py together",
        "integrations/lightning/_sharded.py _agree",
    }


# The home of a state --------------------------------------------------------------------------


def test_the_home_for_a_state_is_chosen_by_the_homes_and_found_by_their_record(
    package: Tree,
) -> None:
    looked_up = sites(package, calls("reserved_for"))
    assert looked_up == {
        "_optim/_homes.py reserve",
        "_optim/_offload_record.py home_for",
        "_optim/_placement.py prime_state",  # makes a template in what is reserved
        "_optim/_states.py of",
        "_optim/_states.py _bind",  # to a parameter
        "_optim/_unit_step.py _give_home",  # not one that a caller holds
    }
    assert sites(package, calls("home_for")) == {
        "_optim/_loading.py _put_in_place",
        "_optim/_offload_record.py home_for",
        "_optim/_receive.py _target_for",
        "_optim/_state.py put",
        "_optim/_state.py leave_device",
    }
    assert sites(package, _asks_what_is_reserved) == {
        "_optim/_homes.py reserve",
        "_optim/_offload_record.py home_for",
        "_optim/_placement.py prime_state",
        "_optim/_state.py home_for",
        "_optim/_unit_step.py _give_home",
    }
    allocated = sites(package, lambda node: calls("takes", "is_held")(node) and _is_of_homes(node))
    rooms = {"_optim/_homes.py", "_optim/_state.py", "_optim/_lend.py"}  # a loan: who holds it?
    assert {site.split()[0] for site in allocated} <= rooms


def _asks_what_is_reserved(node: ast.AST) -> bool:
    return calls("get")(node) and "reserved" in ast.unparse(node).partition(".get(")[0]


def _is_of_homes(node: ast.AST) -> bool:
    return "home" in ast.unparse(node).lower()


# What comments cite ---------------------------------------------------------------------------


# Names of torch's that docstrings cite as they cite the library's own.
TORCHS = {
    *("_init_group", "_multi_tensor_adafactor", "_single_tensor_adafactor", "_use_flex_decoding"),
}


def _texts() -> Iterator[tuple[str, str]]:
    for name, path in sources(".py", ".h", ".cpp"):
        yield name, path.read_text(encoding="utf-8")


def test_each_test_and_file_of_tests_that_a_source_or_a_page_cites_is_there() -> None:
    tests = sorted(TESTS.rglob("*.py"))
    known = {path.stem for path in tests}
    for path in tests:
        known.update(re.findall(r"\bdef (test_\w+)", path.read_text(encoding="utf-8")))
    pages = [
        (page.name, page.read_text(encoding="utf-8")) for page in PROJECT.rglob("docs/**/*.md")
    ]
    missing = [
        f"{file} cites {cited}"
        for file, text in [*_texts(), *pages]
        for cited in re.findall(r"(?<![\w/])tests/[\w/]+\.py\b", text)
        if not (PROJECT / cited).is_file()
    ]
    missing += [
        f"{file} cites {cited}"
        for file, text in _texts()
        for cited in re.findall(r"``(test_\w+)(?:\.py)?``", text)
        if cited not in known
    ]
    assert missing == []


def test_each_module_and_name_of_the_librarys_that_a_docstring_cites_is_there() -> None:
    files = parse_sources()
    known = {part for file in files for part in file.removesuffix(".py").split("/")} | TORCHS
    for tree in files.values():
        for node in ast.walk(tree):
            for field in ("id", "attr", "name", "arg", "asname"):
                known.add(getattr(node, field, None))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known.add(node.value)  # what is asked for by ``getattr``
    missing = [
        f"{file} cites {cited}"
        for file, tree in files.items()
        for text in (each.value for each in docstrings(tree) if isinstance(each.value, str))
        for cited in re.findall(r"`(_\w+(?:\.\w+)*?)(?:\.py)?`", text)
        if not known.issuperset(cited.split("."))
    ]
    assert missing == []


def test_a_step_has_three_slots_unless_it_is_asked_for_others() -> None:
    """Signatures say the number; what is reckoned without one has it from them."""
    said = {
        (file, ast.literal_eval(value))
        for file, tree in parse_library().items()
        for name, value in _given(tree)
        if name.lower() in {"slots", "_slots", "_num_slots", "residency_slots"}
        if file.split("/")[0] not in {"_transfer", "_checkpoint", "_frozen"}  # rings, and units
    }
    assert {number for _, number in said} == {3}
    assert {"_optim/_offload.py", "_memory/_stepping.py"} <= dict(said).keys()


def _given(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names of whole numbers that are constants, fields or defaults."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.arguments):
            pairs = [(a.arg, v) for a, v in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        elif isinstance(node, ast.AnnAssign):
            pairs = [(ast.unparse(node.target), node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [(ast.unparse(node.targets[0]), node.value)]
        for name, value in pairs:
            if isinstance(value, ast.Constant) and type(value.value) is int:
                yield name, value


# Background writers ---------------------------------------------------------------------------


def test_one_class_runs_writes_in_the_background(package: Tree) -> None:
    assert sites(package, calls("Thread", "ThreadPoolExecutor")) == {
        "_checkpoint/_background.py start",
        "_checkpoint/_disk/_read.py __init__",  # several at once, which share the pieces of a file
        "_checkpoint/_disk/_write.py run",
        "_pinned.py _touch",  # several at once, which share the pages of a range
    }
    assert sites(package, calls("Background")) == {
        "_checkpoint/_checkpointer.py __init__",
        "integrations/_common/_ordered_writes.py _hand",
    }
