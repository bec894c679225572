"""Small scripts of which a dry run has seen less than they may look like, and what it says."""

import pytest

SWALLOWED = """
import torch
net = torch.nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.AdamW(net.parameters())  # whose state does not fit
try:
    for _ in range(5):
        net(torch.randn(4, 4096, device="cuda")).sum().backward()
        optimizer.step()
except RuntimeError as error:
    print("logged", error)
torch.save(net.state_dict(), "last.pt")
"""
BEFORE_THE_STEP = """
import torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters())
try:
    net(torch.randn(8, 64).cuda())
    int("")
    optimizer.step()
except Exception as error:
    print("logged", error)
"""
INTERRUPTED = """
import os, signal, torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters())
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have shut out
try:
    for number in range(9):
        net(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
except KeyboardInterrupt:
    torch.save(net.state_dict(), "last.pt")
"""
KILLED = """
import os, signal, torch
x = torch.zeros(1 << 28, device="cuda")
os.kill(os.getpid(), signal.SIGKILL)
"""
INFERRING = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
for _ in range(3):
    with torch.no_grad():
        net(torch.randn(8, 64, device="cuda"))
"""
MERGING = """
import torch
net = torch.nn.Linear(1024, 1024, bias=False).cuda()
with torch.no_grad():
    net.weight += torch.zeros(1024, 8, device="cuda") @ torch.zeros(8, 1024, device="cuda")
torch.save(net.state_dict(), "merged.pt")
"""
SUPPRESSED = """
import contextlib, torch
net = torch.nn.Linear(64, 64).cuda()
with contextlib.suppress(Exception):
    batch = [][3]
    torch.optim.SGD(net.parameters())
"""
PLAIN = """
import torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(2):
    net(torch.randn(8, 64).cuda()).sum().backward()
    optimizer.step()
"""
FORKED = """
import multiprocessing, torch
def train(queue):
    net = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(5):
        net(torch.randn(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    queue.put(torch.cuda.max_memory_allocated())
if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    child = fork.Process(target=train, args=(queue,))
    child.start()
    open("peak", "w").write(str(queue.get()))
    child.join()
"""
GROWING = """
import torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters())
for epoch in range(4):
    for number, size in enumerate([8, 8, 8]):
        net(torch.randn(size * 8**epoch, 64, device="cuda")).sum().backward()
        optimizer.step()
"""
FEW = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
data = torch.utils.data.TensorDataset(torch.zeros(24, 64))
loader = torch.utils.data.DataLoader(data, batch_size=parser.parse_args().batch)
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters())
for batch, in loader:
    net(batch.cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "status", "verdict", "said"),
    [
        (SWALLOWED, 1, "does not fit", "out of memory in optimizer step, step 1"),
        (BEFORE_THE_STEP, 3, "nothing of a training was seen", "base 10: '' (script.py:7)"),
        (INTERRUPTED, 3, "interrupted", "SIGINT ended the run"),
        (INFERRING, 0, "fits", "no training: 3 forward passes and no optimizer step"),
        (MERGING, 0, "fits", "; no training step was seen: this is of the script as it ran"),
        pytest.param(
            SUPPRESSED,
            3,
            "nothing of a training was seen",
            "caught: IndexError: list",
            marks=pytest.mark.whole,
        ),
        (GROWING, 0, "fits", "left out: 3 of 4 rounds of the loop at script.py:5, 1 of 3 rounds"),
        pytest.param(KILLED, 3, "killed", "the process was killed", marks=pytest.mark.whole),
        pytest.param(FEW, 0, "fits", "24 samples, fewer than a batch", marks=pytest.mark.whole),
    ],
)
def test_the_first_line_says_what_was_seen(dry_run, script, status, verdict, said) -> None:
    words = ["--batch", "32"] if script is FEW else []
    capacity = "4GiB" if script is KILLED else "800MiB"
    outcome = dry_run(script, *words, options=("--capacity", capacity))
    assert outcome.errors.splitlines()[0].startswith(verdict), outcome.errors
    assert said in outcome.errors
    assert (outcome.status, outcome.answer["verdict"]) == (status, verdict)
    assert outcome.answer["fits"] == (verdict == "fits")


@pytest.mark.whole
def test_of_a_loop_that_came_to_its_own_end_nothing_was_left_out(dry_run) -> None:
    outcome = dry_run(PLAIN)
    assert (outcome.status, outcome.answer["steps"]) == (0, 2), outcome.errors
    assert not outcome.answer["is_cut"]
    assert "left out" not in outcome.errors
    assert "comes later" not in outcome.errors


def test_a_forked_child_that_trains_is_counted(dry_run, tmp_path) -> None:
    outcome = dry_run(FORKED)
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["steps"] == 2
    assert outcome.answer["peak_allocated"] == int((tmp_path / "peak").read_text())


HISTORY = """
import sys, torch
net = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-3, max_iter=4, history_size=10)
x = torch.randn(64, 512, device="cuda")
def closure():
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss
for _ in range(int(sys.argv[1])):
    optimizer.step(closure)
"""
LATER = """
import torch
one, other = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(1024, 1024, bias=False).cuda()
optimizers = [torch.optim.Adam(each.parameters()) for each in (one, other)]
for step in range(10_000):
    one(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizers[0].step()
    if step > 5_000:
        other(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizers[1].step()
"""
REFUSING = """
import json, os, torch
if os.path.isdir("out") and os.listdir("out"):
    raise ValueError("out is not empty")
os.makedirs("out", exist_ok=True)
net = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    net(torch.randn(8, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(net.state_dict(), "out/model.pt")
json.dump({}, open("out/config.json", "w"))
"""


@pytest.mark.whole
@pytest.mark.parametrize("steps", [2, 1000])
def test_the_history_of_lbfgs_is_as_long_as_a_card_would_have_it(dry_run, steps) -> None:
    outcome = dry_run(HISTORY, str(steps))
    assert outcome.status == 0, outcome.errors
    vector = 4 * (512 * 512 + 512)
    directions = min(10, 4 * steps - 1)
    held = outcome.phase("optimizer step")["at_peak"]["optimizer state"]
    # Two vectors for each, the direction, the gradient before, scalars, and the rest of a block.
    assert 0 <= held - (2 * directions + 2) * vector < 3 << 20


@pytest.mark.whole
def test_an_optimizer_that_made_no_step_is_named(dry_run) -> None:
    outcome = dry_run(LATER)
    assert outcome.answer["unstepped"] == 4 << 20
    assert "an optimizer of 4.00 MiB of parameters made no step" in outcome.errors.splitlines()[0]


@pytest.mark.whole
@pytest.mark.parametrize("more", [(), ("--fit",)])
def test_each_run_finds_the_files_that_the_first_one_found(dry_run, tmp_path, more) -> None:
    for _ in range(2):
        outcome = dry_run(REFUSING, options=("--capacity", "570MiB", *more))
        assert (outcome.status, outcome.answer["verdict"]) == (1, "does not fit"), outcome.errors
        assert outcome.answer["is_complete"]
        assert "not empty" not in outcome.errors
        # What is left is of the run with room enough, whose folder goes with its save.
        assert sorted(each.name for each in tmp_path.iterdir()) == ["script.py"]


@pytest.mark.whole
def test_of_several_processes_the_one_that_is_out_of_memory_is_told(dry_run, tmp_path) -> None:
    (tmp_path / "large.py").write_text("import torch; torch.empty(4 << 30, device='cuda')")
    (tmp_path / "small.py").write_text(INFERRING)
    script = "import subprocess, sys\n" + "".join(
        f"subprocess.run([sys.executable, {name!r}])\n" for name in ("large.py", "small.py")
    )
    outcome = dry_run(script, options=("--capacity", "2GiB"))
    assert (outcome.status, outcome.answer["verdict"]) == (1, "does not fit"), outcome.errors
    assert outcome.answer["needed"] > 4 << 30
    assert "1 other process of the command used a device before or after" in outcome.errors


@pytest.mark.timeout(900)  # many runs
@pytest.mark.whole
def test_the_largest_batch_ends_where_the_data_do(dry_run) -> None:
    outcome = dry_run(FEW, options=("--capacity", "2GiB", "--largest", "batch"))
    assert outcome.status == 0, outcome.errors
    assert (outcome.answer["largest"], outcome.answer["ends_at"]) == (24, 24)
    assert "largest batch that was seen to fit: 24" in outcome.errors
