"""Lightning's real Trainer, of both class trees, with the plugin, the callback and the mixin.

The simulator is CUDA in a process for good, so each tree has a worker of its own, and so has each
of two ranks; a test reads what became of one case.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
import zipfile
from pathlib import Path
from typing import Any

import pytest
import workers

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, judge, missing_devices

import residency
from residency.integrations._common import _framework
from residency.integrations._common._ordered_writes import OrderedWrites
from residency.integrations.lightning import _trees

# One process runs all cases, before the first of them: minutes, on a busy machine many.
SECONDS = 700
pytestmark = [pytest.mark.whole, pytest.mark.timeout(2 * SECONDS + 100)]

HERE = Path(__file__).parent
CASES_FOLDER = HERE.parents[0] / "sim"  # has worker_cases
LAST = "a_save_is_whole_when_python_ended_while_it_was_under_way"
TREES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def cases_in(worker: str) -> list[str]:
    return [case for _, case in cases_of(HERE / worker, {"case"})]


def start(worker: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    return workers.start(HERE / worker, *arguments, folder=CASES_FOLDER, variables=variables)


Outcomes = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def of_trees(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folders = {
        tree: tmp_path_factory.mktemp(tree)
        for tree in TREES
        if importlib.util.find_spec(tree) is not None
    }
    processes = [start("lightning_worker.py", TREES[tree], at) for tree, at in folders.items()]
    workers.finish(*processes, seconds=SECONDS)
    return {
        tree: json.loads((folder / "outcomes.json").read_text())
        | {LAST: "passed" if zipfile.is_zipfile(folder / "last.ckpt") else "no file"}
        for tree, folder in folders.items()
    }


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning")
    judge(missing_devices(2) or "passed")
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # What a launcher tells its processes; Lightning reads it.
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks = [
        start("lightning_sharded_worker.py", rank, folder, NODE_RANK=str(rank), **told)
        for rank in range(2)
    ]
    workers.finish(*ranks, seconds=SECONDS)
    return [json.loads((folder / f"sharded{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("case", [*cases_in("lightning_worker.py"), LAST])
def test_under_a_trainer(of_trees: Outcomes, tree: str, case: str) -> None:
    if tree not in of_trees:
        pytest.skip(f"needs {tree}")
    judge(of_trees[tree].get(case))


@pytest.mark.parametrize("case", cases_in("lightning_sharded_worker.py"))
def test_under_a_strategy_that_shards(of_ranks: list[dict[str, str]], case: str) -> None:
    for outcomes in of_ranks:
        judge(outcomes.get(case))


def test_a_machine_without_lightning_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    for name in [name for name in sys.modules if name in TREES.values()]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(_framework.importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"pip install 'residency\[lightning\]'"):
        _trees.trees_in_use()


def test_what_failed_is_told_together_and_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("no room")

    writes = OrderedWrites(2)
    done: list[str] = []
    let_go = threading.Event()
    writes.write("0", let_go.wait)
    writes.write("a", fail)
    writes.write("b", fail)
    writes.remove("c", lambda: done.append("c"))  # is not: nothing replaced it
    let_go.set()
    writes.wait()
    with pytest.raises(residency.CheckpointError, match="a could not be written") as caught:
        writes.raise_failure()
    trace, other = caught.value.__notes__
    assert "in fail" in trace
    assert other == "and the checkpoint b could not be written: OSError: no room"
    assert isinstance(caught.value.__cause__, OSError)
    writes.raise_failure()
    writes.remove("d", lambda: done.append("d"))
    writes.remove("e", fail)
    writes.close()
    assert done == ["d"]
    with pytest.raises(residency.CheckpointError, match="e could not be removed"):
        writes.raise_failure()
    assert "residency keeps c" in caplog.text


def test_a_removal_is_left_out_when_the_write_before_it_fails_and_that_is_told_at_once() -> None:
    let_go, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        assert let_go.wait(60)
        raise OSError("no room")

    writes = OrderedWrites(3)
    removed: list[str] = []
    writes.write("new", fail)
    writes.write("other", go_on.wait)
    writes.remove("old", lambda: removed.append("old"))
    let_go.set()
    assert writes._writes[0][1].wait(60)  # the failure is there, the removal is still to come
    with pytest.raises(residency.CheckpointError, match="no room"):
        writes.raise_failure()
    go_on.set()
    writes.wait()
    assert removed == []
    writes.remove("older", lambda: removed.append("older"))
    writes.close()
    assert removed == ["older"]


def test_writes_run_on_the_device_of_the_thread_that_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from residency import _device

    device_of = threading.local()  # torch keeps the current device for each thread
    monkeypatch.setattr(_device, "current_index", lambda: getattr(device_of, "index", 0))
    monkeypatch.setattr(_device, "use_index", lambda index: setattr(device_of, "index", index))
    device_of.index = 3
    seen: list[int | None] = []
    writes = OrderedWrites(1)
    writes.write("a", lambda: seen.append(getattr(device_of, "index", 0)))
    writes.close()
    assert seen == [3]


def test_the_end_of_the_program_waits_for_writes_and_that_of_a_forked_process_does_not(
    tmp_path: Path,
) -> None:
    program = f"""
        import os, sys, threading
        from pathlib import Path
        from residency.integrations._common._ordered_writes import OrderedWrites
        folder, go_on = Path({str(tmp_path)!r}), threading.Event()
        writes = OrderedWrites(2)
        writes.write("a", lambda: go_on.wait(60) and (folder / "a").touch())
        writes.write("b", (folder / "b").touch)
        child = os.fork()
        if child == 0:
            sys.exit(3)  # the thread, and what it does, are the parent's
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert not any(folder.iterdir())
        go_on.set()
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True, timeout=120
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_write_lets_go_of_what_it_held_before_its_place_is_free() -> None:
    class Large:
        pass

    writes = OrderedWrites(1)
    held: list[weakref.ref[Large]] = []

    def begin(fails: bool) -> None:
        large = Large()
        held.append(weakref.ref(large))

        def write() -> None:
            assert large is not None
            if fails:
                raise OSError("no room")

        writes.write("a", write)

    for fails in (False, True):
        begin(fails)
        writes.make_room()
        assert held[-1]() is None
    writes.close()
    with pytest.raises(residency.CheckpointError, match="no room"):
        writes.raise_failure()
