"""What a dry run is asked besides: what makes a script fit, the largest batch, one rank of many."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import WORKER_SECONDS

SCRIPTS = Path(__file__).parent / "scripts"

SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, {"rank": dist.get_rank()})
assert gathered == [{"rank": 0}] * 4
total = torch.ones(3, device="cuda")
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(900)  # many runs
@pytest.mark.whole
def test_the_largest_batch_is_the_largest_that_fits(dry_run) -> None:
    options = ("--capacity", "900MiB", "--others", "0B", "--largest", "batch")
    outcome = dry_run(SCRIPTS / "loop.py", "256", "{batch}", options=options)
    assert outcome.status == 0, outcome.errors
    largest = outcome.answer["largest"]
    fitting = dry_run(SCRIPTS / "loop.py", "256", str(largest), options=options[:4])
    assert fitting.answer["fits"]
    failing = dry_run(SCRIPTS / "loop.py", "256", str(largest + 1), options=options[:4])
    assert not failing.answer["fits"]


@pytest.mark.whole
def test_one_rank_of_four_has_a_quarter_of_the_states(dry_run) -> None:
    alone = dry_run(SHARDED.replace("* 4", "* 1"), options=("--capacity", "4GiB"))
    assert alone.status == 0, alone.errors
    one = dry_run(SHARDED, options=("--capacity", "4GiB", "--ranks", "4"))
    assert one.status == 0, one.errors
    whole = alone.phase("optimizer step")["at_peak"]
    part = one.phase("optimizer step")["at_peak"]
    for kind in ("parameters", "gradients", "optimizer state"):
        assert 4 * part[kind] == whole[kind]


@pytest.mark.whole
def test_torchrun_is_run_as_its_first_rank(tmp_path: Path) -> None:
    done = run_by_torchrun(tmp_path, SHARDED, "train.py")
    assert "fits" in done.stdout
    assert "optimizer step" in done.stdout


OF_MANY_ROUNDS = """
import pickle, sys, torch
class Settings: pass
assert pickle.loads(pickle.dumps(Settings)) is sys.modules["__main__"].Settings
weight = torch.ones(64, requires_grad=True, device="cuda")
optimizer = torch.optim.SGD([weight])
for _ in range(1000):
    weight.sum().backward()
    optimizer.step()
print("after the loop", __name__, sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]])
def test_the_loops_of_a_script_that_torchrun_starts_are_ended(
    words: list[str], tmp_path: Path
) -> None:
    done = run_by_torchrun(tmp_path, OF_MANY_ROUNDS, *words, "--size", "3")
    assert "after the loop __main__ ['--size', '3']" in done.stdout
    assert "2 optimizer steps" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def run_by_torchrun(folder: Path, script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "residency", "dry-run", "--capacity", "4GiB", "--"]
    launcher = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, *launcher, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.whole
def test_an_interrupt_prints_what_is_known(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "import torch, time\n"
        "model = torch.nn.Linear(512, 512).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.ones(8, 512, device='cuda')).sum().backward()\n"
        "optimizer.step()\n"
        "open('ready', 'w').close()\n"
        "while True: time.sleep(0.1)\n"
    )
    command = [sys.executable, "-m", "residency", "dry-run", "--capacity", "4GiB", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            limit = time.monotonic() + 240
            while not (tmp_path / "ready").exists() and time.monotonic() < limit:
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            output, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "ended the run before its time" in output
    assert "optimizer step" in output


def test_a_question_of_a_backward_pass_comes_from_no_line_and_is_answered(dry_run) -> None:
    # Torch asks whether eigenvectors are the real ones in a thread of autograd's, without a frame.
    outcome = dry_run(
        "import torch\n"
        "a = torch.randn(5, 5, device='cuda', requires_grad=True)\n"
        "torch.linalg.eigvals(a).abs().sum().backward()\n"
    )
    assert outcome.has_run, outcome.errors
