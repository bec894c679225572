"""Errors that are the dry run's doing (`d_`), and the script's own (`s_`).

A dry run's is said to be one; of the script's own nothing is said.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def loss():
    model = nn.Linear(8, 8).cuda()
    given, labels = torch.randn(64, 8, device="cuda"), torch.randint(8, (64,), device="cuda")
    return functional.cross_entropy(model(given), labels)


def d_assert_on_the_line(blame):
    assert 1 < loss().item() < 3


def d_assert_on_a_name(blame):
    value = loss().item()
    print("loss", value)
    assert 1 < value < 3


def d_average(blame):
    total = 0.0
    for _ in range(4):
        total += loss().item()
    mean = total / 4
    if mean < 1.5:
        raise ValueError("did not start where it should")


def d_list_of_losses(blame):
    losses = []
    for _ in range(4):
        losses.append(loss().item())
    1 / (losses[0] - 1)


def check(values):
    if max(values) <= 1:
        raise RuntimeError("loss too small")


def d_through_a_function(blame):
    values = [loss().item()]
    check(values)


def d_tensor_test(blame):
    value = loss()
    if value < 1.5:
        raise RuntimeError("collapsed")


def d_numpy(blame):
    p = torch.sigmoid(loss().repeat(4)).detach().cpu().numpy()
    np.random.choice(4, p=p)


def d_accuracy(blame):
    guess = torch.randn(16, 4, device="cuda").argmax(1).cpu()
    right = (guess == torch.zeros(16)).sum().item()
    {0: "a", 16: "b"}[right + 3]


def d_index(blame):
    names = ["zero"]
    k = torch.randn(40, device="cuda").argmax().item()
    names[k]


def d_large_copy(blame):
    values = torch.randn(1 << 20, device="cuda").cpu().numpy()
    {}[values[0] + 7]


def d_dict_of_metrics(blame):
    metrics = {}
    metrics["loss"] = loss().item()
    assert metrics["loss"] > 1


class Trainer:
    last = 5.0

    def step(self):
        self.last = loss().item()

    def finish(self):
        assert self.last > 1


def d_in_an_object(blame):
    trainer = Trainer()
    trainer.step()
    trainer.finish()


def d_a_branch_that_left_nothing(blame):
    best = None
    if loss().item() > 1.5:
        best = {"step": 1}
    best["step"]


def d_a_length(blame):
    frames = int(loss().clamp_min(1))
    wave = torch.randn(1, 1, frames, device="cuda")
    functional.pad(wave, (384, 384), mode="reflect")


def d_simulators_object(blame):
    from residency_sim import _backend

    _backend.core().no_such_function_here  # noqa: B018 - what is asked for is the case


def d_histc(blame):
    raise NotImplementedError("\"histogram_cpu\" not implemented for 'Int'")


def d_nvidia_smi(blame):
    subprocess.run(["nvidia-smi"], env={"PATH": "/nowhere"}, check=True)


def d_nvml(blame):
    class NVMLError_LibraryNotFound(Exception):  # noqa: N801 - as pynvml has it
        pass

    raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")


def s_key(blame):
    {"lr": 1}["learning_rate"]


def s_key_after_a_print(blame):
    value = loss().item()
    print("loss", value)
    {"lr": 1}["learning_rate"]


def s_shape(blame):
    nn.Linear(8, 8).cuda()(torch.randn(4, 9, device="cuda"))


def s_shape_after_reads(blame):
    model = nn.Linear(8, 8).cuda()
    for _ in range(3):
        made, wanted = model(torch.randn(4, 8).cuda()), torch.randn(4, 8).cuda()
        print(functional.mse_loss(made, wanted).item())
    model(torch.randn(4, 9, device="cuda"))


def s_file(blame):
    Path("/nowhere/data.json").read_text()


class Picture:
    def __init__(self, values):
        self.values = values

    def save(self, place, suffix=".gif"):
        name = str(place) + suffix
        with open(name, "wb") as file:
            file.write(self.values)


def s_folder_of_a_picture(blame):
    pictures = []
    for epoch in range(2):
        pictures.append(Picture(loss().cpu().detach().numpy()))
        pictures[0].save(f"/nowhere/sample_{epoch}")


def s_folder_of_the_best(blame):
    best = 5.0
    value = loss().item()
    if value < best:
        path = "/nowhere/best.pt"
        torch.save({"loss": value}, path)


@torch.no_grad()
def write(values, path):
    np.save(path, values)


def s_folder_of_what_a_function_writes(blame):
    write(loss().cpu(), "/nowhere/values")


def s_folder_by_a_method_of_a_path(blame):
    Path("/nowhere").joinpath("log.txt").write_text(str(loss().item()))


def d_name_of_a_picture(blame):
    Picture(b"").save(f"/nowhere/{loss().item():.1f}")


def d_name_of_the_best(blame):
    name = "/bad/last.pt"
    if loss().item() < 1.5:
        name = "/good/last.pt"
    torch.save({}, name)


def d_name_of_what_a_function_writes(blame):
    value = loss().item()
    write(np.zeros(3), path=f"/nowhere/{value}")


def s_argument(blame):
    epochs, value = 0, loss().item()
    print(value)
    1 / epochs


def s_assert_on_config(blame):
    value = loss().item()
    batch, world = 3, 2
    assert batch % world == 0, value


def s_import(blame):
    import no_such_package_here  # noqa: F401


def s_type(blame):
    value = loss().item()
    "step " + 3  # noqa: B018
    print(value)


def s_known_number(blame):
    n = torch.tensor([1, 2, 3], device="cuda").sum().item()
    assert n == 7


def s_log_then_fail(blame):
    for step in range(2):
        value = loss().item()
        row = {"step": step, "loss": value}
        json.dumps({"row": row, "model": object()})


def s_print_of_a_loss_in_the_same_line(blame):
    print(f"loss {loss().item()} lr {undefined_name}")  # noqa: F821


def fit(steps):
    for _ in range(steps):
        print(loss().item())
    {"lr": 1}["learning_rate"]


def s_in_a_call_that_has_read(blame):
    fit(3)


CASES = [value for name, value in list(vars().items()) if name[:2] in ("d_", "s_")]
