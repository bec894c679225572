"""The library on a system that lacks parts of POSIX, as Windows and macOS do: a process of Linux in
which these parts are taken away. It shows what imports and what is refused, and no device.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from limits import WORKER_SECONDS

LACKS_BOTH = {
    "os": ("O_DIRECT", "O_CLOEXEC", "O_TMPFILE", "sched_getaffinity", "posix_fadvise"),
    "mmap": ("MADV_HUGEPAGE",),
}
WITHOUT = """
import importlib.abc, mmap, os, sys
import torch, safetensors.torch
modules, lacks = {modules!r}, {lacks!r}
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in modules:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
for name in modules:
    sys.modules.pop(name, None)
for owner, names in lacks.items():
    for name in names:
        if hasattr(sys.modules[owner], name):
            delattr(sys.modules[owner], name)
import residency, residency.optim, residency.types, residency.testing, residency.sim
from residency._cli import main
for name in residency.__all__:
    getattr(residency, name)
assert main([]) == main(["doctor"]) == 0
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
expected = model.weight.detach().clone()
taken = residency.snapshot(dict(w=model.weight)).wait()
safetensors.torch.save_file(dict(model.state_dict()), "w.safetensors")
with torch.no_grad():
    model.weight.zero_()
residency.load_into(model, "w.safetensors")
assert torch.equal(model.weight, expected) and torch.equal(taken.tree["w"], expected)
"""
SAVES = """
state = dict(model=model, optimizer=optimizer)
with residency.Checkpointer("saves") as checkpointer:
    checkpointer.save(1, state)
with torch.no_grad():
    model.weight.zero_()
with residency.Checkpointer("saves") as checkpointer:
    assert checkpointer.restore(state) == 1
assert torch.equal(model.weight, expected)
"""
IS_REFUSED = """
try:
    residency.Checkpointer("saves").save(1, dict(model=model))
except residency.RefusedError as error:
    assert "this system lacks Python's module fcntl" in str(error), error
else:
    raise AssertionError("a Checkpointer was made")
assert not os.path.exists("saves") or not os.listdir("saves")
"""


def run(folder: Path, modules: tuple[str, ...], lacks: dict[str, tuple[str, ...]], then: str):
    code = WITHOUT.format(modules=modules, lacks=lacks) + then
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
        check=False,
    )


@pytest.mark.whole
def test_without_what_macos_lacks_saves_come_back(tmp_path: Path) -> None:
    process = run(tmp_path, (), LACKS_BOTH, SAVES)
    assert process.returncode == 0, process.stderr
    assert "no limit by ulimit" in process.stdout or "at most" in process.stdout


@pytest.mark.whole
def test_without_what_windows_lacks_all_imports_and_locks_are_refused(tmp_path: Path) -> None:
    lacks = {**LACKS_BOTH, "os": (*LACKS_BOTH["os"], "register_at_fork", "O_NOFOLLOW", "getuid")}
    process = run(tmp_path, ("fcntl", "resource", "pwd", "grp", "termios"), lacks, IS_REFUSED)
    assert process.returncode == 0, process.stderr
    assert "as much as the system lets it" in process.stdout
