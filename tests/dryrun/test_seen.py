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


def test_a_forked_child_that_trains_is_counted(dry_run, tmp_path) -> None:
    outcome = dry_run(FORKED)
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["steps"] == 2
    assert outcome.answer["peak_allocated"] == int((tmp_path / "peak").read_text())


@pytest.mark.timeout(900)  # many runs
@pytest.mark.whole
def test_the_largest_batch_ends_where_the_data_do(dry_run) -> None:
    outcome = dry_run(FEW, options=("--capacity", "2GiB", "--largest", "batch"))
    assert outcome.status == 0, outcome.errors
    assert (outcome.answer["largest"], outcome.answer["ends_at"]) == (24, 24)
    assert "largest batch that was seen to fit: 24" in outcome.errors
