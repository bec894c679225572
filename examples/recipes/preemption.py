"""Preemption: SIGTERM in a step, a save, and a new process that ends at the same bits.

python examples/recipes/preemption.py
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import residency

NUM_STEPS = 12
memory = torch.accelerator.memory_allocated


def train(folder, kill, at):
    """Trains, goes on from the newest save in the folder, and saves if it is asked to end.

    For the trial it sends itself the signal ``kill`` in the middle of step ``at``.
    """
    if not torch.accelerator.is_available():
        residency.sim.enable("256MiB")  # a simulated device; compiled once, for about a minute
        torch.set_num_threads(1)  # whichever thread runs its kernels, they have the same bits
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Dropout(0.1), nn.Linear(1024, 1024)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def note_more():
        taken.append(torch.accelerator.max_memory_allocated() - memory())

    def train_step(step):
        if step > begin:
            note_more()  # the bytes that a save after the last step took
        loss = model(torch.randn(16, 1024, device=device)).square().mean()
        if step == at:
            checkpointer.wait()  # so that this trial prints the same each time
            os.kill(os.getpid(), kill)  # as a cluster does, or a host that is out of memory
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        del loss
        torch.accelerator.reset_peak_memory_stats()

    asked_to_end, taken = [], []
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_end.append(number))
    with residency.Checkpointer(folder, keep=2) as checkpointer:
        begin = checkpointer.restore(state) + 1 if checkpointer.steps() else 0
        checkpointer.prepare(state)  # page-locks the host memory now, not under the signal
        for step in range(begin, NUM_STEPS):
            train_step(step)
            if step % 4 == 3 or asked_to_end:
                checkpointer.save(step, state)
            if asked_to_end:
                break
    note_more()
    num_bytes = max(taken)
    assert num_bytes == 0, "a save took memory of the device"
    took = f"steps {begin} to {step}, saves {residency.Checkpointer(folder).steps()}"
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(f"{took} took {num_bytes} B, sum {digest.hexdigest()[:8]}")


def run(folder, kill=0, at=-1):
    """Trains in a process of its own; returns the last word of its output."""
    options = ["--folder", folder, "--kill", str(int(kill)), "--at", str(at)]
    command = [sys.executable, __file__, *options]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode < 0:  # by a signal
        print(f"ended by {signal.Signals(-ended.returncode).name}", end="")
        print(f", saves {residency.Checkpointer(folder).steps()}")
    else:
        ended.check_returncode()
        print(ended.stdout, end="")
    return ended.stdout.split()[-1:]


def main():
    with tempfile.TemporaryDirectory() as root:
        print("no interruption:    ", end="", flush=True)
        expected = run(str(Path(root, "whole")))
        cut = str(Path(root, "cut"))
        print("SIGTERM in step 5:  ", end="", flush=True)
        run(cut, signal.SIGTERM, at=5)
        print("SIGKILL in step 10: ", end="", flush=True)
        run(cut, signal.SIGKILL, at=10)
        print("a third process:    ", end="", flush=True)
        found = run(cut)
    assert found == expected
    print("the parameters have the same bits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--kill", type=int)
    parser.add_argument("--at", type=int)
    arguments = parser.parse_args()
    if arguments.folder:
        train(arguments.folder, arguments.kill, arguments.at)
    else:
        main()
