"""What ``residency dry-run`` answers of small scripts, beside torch's figures and arithmetic."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from residency import sim
from residency._units import format_bytes

SCRIPTS = Path(__file__).parent / "scripts"
CONTEXT = 534 << 20


def rounded(*sizes: int) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


def parameters(width: int) -> int:
    return rounded(16 * width * width, 16 * width, 16 * width * width, 4 * width)


def test_peaks_are_those_that_torch_tells_and_owners_sum_to_them(dry_run, tmp_path) -> None:
    outcome = dry_run(SCRIPTS / "loop.py", "256", "32")
    assert outcome.status == 0, outcome.errors
    answer = outcome.answer
    seen = json.loads((tmp_path / "peaks.json").read_text())
    assert seen["step"] == 1
    assert [answer["peak_allocated"], answer["peak_reserved"]] == seen["peaks"]
    assert answer["fits"]
    assert answer["steps"] == 2
    assert answer["ended"] == "finished"
    assert answer["needed"] == answer["peak_reserved"] + CONTEXT
    for phase in answer["phases"]:
        assert sum(phase["at_peak"].values()) == phase["peak_allocated"], phase
    weights = parameters(256)
    step = outcome.phase("optimizer step")["at_peak"]
    assert step["parameters"] == weights
    assert step["gradients"] == weights
    assert step["optimizer state"] == 2 * weights
    backward = outcome.phase("backward")
    assert backward["at_peak"]["parameters"] == weights
    assert backward["at_peak"]["activations"] > 0
    assert outcome.phase("set up")["at_peak"]["parameters"] == weights
    assert "no save was seen" in outcome.errors
    assert f"later writes {format_bytes(3 * weights)}" in outcome.errors


def test_a_script_that_does_not_fit_is_told_where_and_by_how_much(dry_run) -> None:
    roomy = dry_run(SCRIPTS / "loop.py", "1024", "4096", options=("--capacity", "4GiB"))
    assert roomy.status == 0
    tight = dry_run(SCRIPTS / "loop.py", "1024", "4096", options=("--capacity", "700MiB"))
    assert tight.status == 1, tight.errors
    answer = tight.answer
    assert not answer["fits"]
    assert answer["needed"] == roomy.answer["needed"]
    assert answer["headroom"] == (700 << 20) - roomy.answer["needed"] < 0
    first = answer["out_of_memory"][0]
    assert first["phase"] in ("forward", "backward")
    assert "loop.py:" in first["line"]
    assert first["asked"] > first["free"]


COPIED = """
import copy, pickle, torch
class Metric(torch.nn.Linear):
    def __init__(self):
        super().__init__(512, 512, bias=False)
        self.names = ("weight",)
    def __hash__(self):
        return hash(self.names)
model = Metric().cuda()
copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(2, 512, device="cuda")).sum().backward()
optimizer.step()
"""


@pytest.mark.whole
def test_parameters_of_copies_are_parameters_and_a_late_hash_does_no_harm(dry_run) -> None:
    outcome = dry_run(COPIED)
    assert outcome.status == 0, outcome.errors
    assert outcome.phase("optimizer step")["at_peak"]["parameters"] == 3 * 512 * 512 * 4


CATCHING = """
import torch
from torch import nn
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
batch = 1 << 20
while True:
    try:
        model(torch.ones(batch, 1024, device="cuda")).sum().backward()
        optimizer.step()
        break
    except torch.cuda.OutOfMemoryError:
        batch //= 2
"""


@pytest.mark.whole
def test_a_script_that_makes_room_for_itself_fits_and_its_errors_are_told(dry_run) -> None:
    outcome = dry_run(CATCHING, options=("--capacity", "2GiB"))
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["fits"]
    assert len(outcome.answer["out_of_memory"]) > 1
    assert outcome.answer["headroom"] >= 0
    assert "out-of-memory errors and went on" in outcome.errors


def test_loaders_end_and_what_comes_after_the_loop_is_seen(dry_run, tmp_path) -> None:
    outcome = dry_run(SCRIPTS / "epochs.py", "500")
    assert outcome.status == 0, outcome.errors
    names = [phase["name"] for phase in outcome.answer["phases"]]
    assert {"set up", "forward", "backward", "optimizer step", "evaluate", "save", "load"} <= set(
        names
    )
    assert outcome.answer["ended"] == "finished"
    assert outcome.answer["steps"] == 2 + 2  # and of the training that is resumed
    assert outcome.answer["is_cut"]
    assert outcome.answer["saved"] > 6 * 512 * 512 * 4
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.whole
def test_a_saved_counter_of_steps_comes_back(dry_run, tmp_path) -> None:
    outcome = dry_run(SCRIPTS / "epochs.py", "1", options=("--capacity", "8GiB", "--steps", "0"))
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["steps"] == 200


SAFETENSORS = """
import json, os, sys, torch
from safetensors.torch import load_file, save_file
open(sys.argv[1], "w").close()  # a dry run removes files made after a save
rows = torch.zeros(512, 5120)
save_file({"b": rows.half(), "a": rows, "c": torch.arange(4.0)}, "saved.safetensors")
before = torch.cuda.memory_allocated()
loaded = load_file("saved.safetensors", device="cuda")
assert {str(each.device) for each in loaded.values()} == {"cuda:0"}, loaded
assert loaded["c"].tolist() == [0, 1, 2, 3]
with open(sys.argv[1], "w") as file:
    size = os.path.getsize("saved.safetensors")
    json.dump([torch.cuda.memory_allocated() - before, list(loaded), size], file)
"""


@pytest.mark.whole
def test_safetensors_come_back_on_the_device_and_in_files_of_their_size(dry_run, tmp_path) -> None:
    seen = []
    for real in ((), ("--real",)):
        file = f"loaded{len(real)}.json"
        outcome = dry_run(SAFETENSORS, file, options=("--capacity", "4GiB", *real))
        assert outcome.has_run, outcome.errors
        seen.append(json.loads((tmp_path / file).read_text()))
    assert seen[0] == seen[1]


OF_LAUNCHER = """
import subprocess, sys, torch
assert torch.cuda.is_available()
if sys.argv[1:]:
    raise KeyError("of the script's own")
subprocess.run([sys.executable, "-c", "import torch"], check=True)  # a helper
subprocess.run([sys.executable, __file__, "train"], check=True)
"""


def test_an_answer_has_the_error_of_the_script_and_not_of_its_launcher(dry_run) -> None:
    outcome = dry_run(OF_LAUNCHER)
    assert outcome.status == 3, outcome.errors
    assert outcome.answer["processes"] == 3
    assert outcome.answer["error"] == 'KeyError: "of the script\'s own" (script.py:5)'


SAVED_FILE = """
import torch
from safetensors.torch import save_file
save_file({"rows": torch.zeros(8, device="cuda")}, "saved.safetensors")
"""


def test_a_file_of_safetensors_is_written_in_a_save(dry_run) -> None:
    outcome = dry_run(SAVED_FILE)
    assert outcome.has_run, outcome.errors
    assert outcome.phase("save")["visits"] == outcome.answer["files"] == 1


@pytest.mark.whole
def test_a_run_that_is_killed_leaves_what_was_known_and_no_process(tmp_path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, torch\n"
        "model = torch.nn.Linear(512, 512).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.ones(8, 512, device='cuda')).sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        "while True: signal.pause()\n"
    )
    command = [sys.executable, "-m", "residency", "dry-run", "--capacity", "4GiB", "--json", "--"]

    def written() -> list[Path]:
        return list(tmp_path.glob("residency-dry-run-*/*.json"))

    for killed in ("child", "parent"):
        pid = tmp_path / "pid"
        pid.unlink(missing_ok=True)
        process = subprocess.Popen(
            [*command, sys.executable, str(script)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        with process:
            limit = time.monotonic() + 240
            while not (pid.exists() and pid.read_text()) and time.monotonic() < limit:
                time.sleep(0.1)
            child = int(pid.read_text())
            if killed == "child":
                while not any('"steps": 1' in file.read_text() for file in written()):
                    time.sleep(0.1)  # the figures are written twice a second
                os.kill(child, signal.SIGKILL)
                output, _ = process.communicate(timeout=120)
                assert process.returncode == 3
                assert json.loads(output)["steps"] == 1
            else:
                process.terminate()
                process.wait(timeout=120)
                assert process.returncode == 128 + signal.SIGTERM
        limit = time.monotonic() + 60
        while Path(f"/proc/{child}").exists() and time.monotonic() < limit:
            time.sleep(0.1)
        assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("import torch\nx = torch.ones(3).cuda()\nraise ValueError('of its own')", 3, "of its own"),
        ("import torch\nx = torch.ones(3).cuda()", 0, "no training step was seen"),
        ("import torch\nx = torch.ones(3)", 3, "nothing was put on the device"),
        (
            "import os, torch\nx = torch.ones(1 << 20).cuda()\nos._exit(5)",
            3,
            "with status 5",
        ),
        ("import sys, torch\nx = torch.ones(3).cuda()\nsys.exit(3)", 3, "with status 3"),
        ("print('no torch')", 2, "no Python process of it has used torch. After --"),
        ("import no_such_module", 2, "used torch. Run it without --quiet and --json"),
    ],
)
def test_a_script_that_is_none_for_a_dry_run_is_told(dry_run, script, status, said) -> None:
    outcome = dry_run(script)
    assert outcome.status == status
    assert said in outcome.errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--device"),
        (("--device", "voodoo2"), "rtx4090"),
        (("--capacity", "24 parsecs"), "--capacity"),
        (("--capacity", "0"), "--capacity"),
        (("--capacity", "1GiB", "--steps", "-1"), "--steps"),
        (("--capacity", "1GiB", "--ranks", "0"), "--ranks"),
        (("--capacity", "1GiB", "--largest", "batch"), "{batch}"),
    ],
)
def test_bad_options_are_refused_with_what_to_give(dry_run, options, said) -> None:
    outcome = dry_run("import torch", options=options)
    assert outcome.status == 2
    assert said in outcome.errors


def test_every_gpu_has_a_source_and_room_for_its_context() -> None:
    from residency_sim import _gpus

    for name, gpu in _gpus.GPUS.items():
        assert sim.gpu_named(name) == (name, gpu)
        assert "/" in gpu.capacity_source
        assert "/" in gpu.context_source
        assert 200 << 20 < gpu.context < gpu.capacity
        assert gpu.threads_per_multiprocessor >= 1024
    assert sim.gpu_named("NVIDIA L4") == sim.gpu_named("l4")
    assert sim.gpu_named("H100")[0] == "h100-80g"
    assert sim.gpu_named("A100 80GB")[0] == "a100-80g"


BY_HAND = """
import torch
weights = torch.ones(4, 4, device="cuda", requires_grad=True)
def train():
    for _ in range(1000):
        weights.square().sum().backward()
        weights.data.add_(weights.grad, alpha=-0.1)
        weights.grad = None
train()
"""


def test_a_script_without_an_optimizer_ends_after_some_backward_passes(dry_run) -> None:
    outcome = dry_run(BY_HAND)
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["steps"] == 2
    assert outcome.answer["has_no_optimizer"]
    assert outcome.answer["ended"] == "finished"
    assert outcome.phase("backward")["visits"] == 22  # twenty, and two steps
    assert "each backward pass was taken" in outcome.errors


RESIDENCY_FIRST = """
from {module} import {name}
import torch
weights = torch.nn.Linear(512, 512, bias=False).cuda()
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("residency", "Checkpointer"),
        ("residency.integrations.dcp", "TrainState"),
    ],
)
def test_a_script_may_import_residency_before_torch(dry_run, module: str, name: str) -> None:
    outcome = dry_run(RESIDENCY_FIRST.format(module=module, name=name))
    assert outcome.has_run, outcome.errors
    assert outcome.phase("set up")["at_peak"]["parameters"] == 512 * 512 * 4


EPOCHS_THAT_COME_LAST = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters())
loader = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2)
def train():
    losses = []
    for batch, in loader:
        loss = model(batch.cuda()).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)
def main():
    for epoch in range(100):
        print("epoch", epoch, train())
if __name__ == "__main__":
    main()
"""


def test_no_epoch_without_batches_comes_where_the_script_ends_with_its_epochs(dry_run) -> None:
    outcome = dry_run(EPOCHS_THAT_COME_LAST)
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["is_complete"]
    assert outcome.answer["steps"] == 2
    assert "ZeroDivisionError" not in outcome.errors


WORKERS = """
import torch
from torch.utils.data import DataLoader

def broken(batch):
    raise ValueError("no picture is here")

torch.ones(1).cuda()
next(iter(DataLoader(range(4), num_workers=1, collate_fn=broken)))
"""


def test_what_went_wrong_in_a_loaders_worker_is_named(dry_run) -> None:
    outcome = dry_run(WORKERS)
    assert outcome.status == 3
    assert "ValueError: no picture is here" in outcome.answer["error"], outcome.answer["error"]
