"""A load in a training's loop is a resume where it reaches what is trained, and no other."""

from collections.abc import Callable
from typing import Any

import pytest

STEPS = 2
RESUMES = 3  # at most, in a loop
TRAINING = """
import torch, residency
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch.distributed.checkpoint as dcp

def network():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).cuda()

def saved():
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    return torch.load("last.pt")

model, judge = network(), network()
optimizer = torch.optim.AdamW(model.parameters())
torch.save(model.state_dict(), "first.pt")
save_file(model.state_dict(), "first.safetensors")
"""
LOOP = """
for epoch in range(100):
    for _ in range(10):
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    loads[epoch % len(loads)]()
"""
OF_OTHERS = """
def into_others():
    judge.load_state_dict(torch.load("first.pt"))
    network().load_state_dict(load_file("first.safetensors"))
    torch.optim.AdamW(judge.parameters()).load_state_dict(saved()["optimizer"])

def what_was_kept_in_memory():
    kept = {name: each.clone() for name, each in model.state_dict().items()}
    torch.load("first.pt")
    model.load_state_dict(kept)

loads = [into_others, what_was_kept_in_memory]
"""
OF_MODULES = """
def with_other_names():
    found = load_file("first.safetensors")
    whole = torch.nn.ModuleDict({"m": model})
    whole.load_state_dict({f"m.{name}": each for name, each in found.items()})

def a_part_of_it():
    model[0].load_state_dict({n[2:]: v for n, v in torch.load("first.pt").items() if n[0] == "0"})

def a_module_in_a_file():
    torch.save(model, "whole.pt")
    found = torch.load("whole.pt", weights_only=False)
    model.load_state_dict(found.state_dict())

loads = [with_other_names, a_part_of_it, a_module_in_a_file]
"""
OF_STATES = """
def the_optimizer():
    optimizer.load_state_dict(saved()["optimizer"])

def in_place():
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=f"dcp{epoch}", no_dist=True)
    dcp.load(state, checkpoint_id=f"dcp{epoch}", no_dist=True)

def a_phase_of_its_own():
    with residency.phase("my load"):
        model.load_state_dict(model.state_dict())

loads = [the_optimizer, in_place, a_phase_of_its_own]
"""

OF_COPIES = """
def converted():
    model.load_state_dict({n: v.double() for n, v in torch.load("first.pt").items()})

def one_by_one():
    with safe_open("first.safetensors", "pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})

def by_hand():
    found = torch.load("first.pt", map_location="cpu")
    for name, each in model.named_parameters():
        each.data.copy_(found[name].to("cuda"))

loads = [converted, one_by_one, by_hand]
"""
FIRST = """
for epoch in range(100):
    model.load_state_dict(torch.load("first.pt"))
    for _ in range(10):
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
"""


def test_what_is_loaded_for_others_is_no_resume(dry_run: Callable[..., Any]) -> None:
    found = dry_run(TRAINING + OF_OTHERS + LOOP)
    assert found.answer["ended"] == "finished", found.errors
    assert found.answer["steps"] == STEPS


@pytest.mark.parametrize(
    "loads", [OF_MODULES, OF_STATES, OF_COPIES], ids=["modules", "states", "copies"]
)
def test_what_reaches_the_training_is_a_resume(dry_run: Callable[..., Any], loads: str) -> None:
    found = dry_run(TRAINING + loads + LOOP)
    assert found.answer["ended"] == "finished", found.errors
    assert found.answer["steps"] == STEPS * (1 + RESUMES)


def test_a_loop_whose_rounds_begin_with_a_load_goes_on(dry_run: Callable[..., Any]) -> None:
    found = dry_run(TRAINING + FIRST)
    assert found.answer["ended"] == "finished", found.errors
    assert found.answer["steps"] == STEPS * (1 + RESUMES)


def test_a_teacher_that_is_loaded_in_each_round_begins_no_training(
    dry_run: Callable[..., Any],
) -> None:
    found = dry_run(TRAINING + FIRST.replace("model.load", "judge.load"))
    assert found.answer["ended"] == "finished", found.errors
    assert found.answer["steps"] == STEPS


def test_a_module_that_is_trained_from_a_file_is_of_none_any_more(
    dry_run: Callable[..., Any],
) -> None:
    kept = """
found = torch.load("first.pt")
model.load_state_dict(found, assign=True)
optimizer = torch.optim.AdamW(model.parameters())

def back():
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()})

loads = [back]
"""
    found = dry_run(TRAINING + kept + LOOP)
    assert found.answer["ended"] == "finished", found.errors
    assert found.answer["steps"] == STEPS


def test_lazy_modules_move_to_the_device(dry_run: Callable[..., Any]) -> None:
    found = dry_run("""
import torch

model = torch.nn.LazyLinear(8).to("cuda").half().float()
model(torch.ones(2, 4, device="cuda"))
other = torch.nn.LazyLinear(8)
other.load_state_dict({name: each.cpu() for name, each in model.state_dict().items()})
assert other.weight.shape == model.weight.shape
""")
    assert found.answer["ended"] == "finished", found.errors
