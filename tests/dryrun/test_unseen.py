"""Layers that a later round trains: the rounds that a dry run sees have nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dryrun.facts import answered, facts, phase

from residency._dryrun._answer import first_line
from residency._dryrun._unseen import branches_left_out

LOOP = "for epoch in range(9):\n    {head}\n        {body}\n    train()\n"
THAWS = (
    "base.requires_grad_(True)",
    "base.requires_grad_()",
    "weight.requires_grad = True",
    "for p in base.parameters(): p.requires_grad = True",
    "optimizer.add_param_group({'params': rest})",
    "model.unfreeze_layers(3)",
    "unfreeze(base)",
)
STAYS = (
    "base.requires_grad_(False)",
    "weight.requires_grad = False",
    "model.freeze()",
    "print(weight.requires_grad)",
)


@pytest.mark.parametrize("body", [*THAWS, *STAYS])
def test_a_branch_of_a_loop_that_was_cut_is_looked_through(tmp_path: Path, body: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(LOOP.format(head="if epoch == 5:", body=body))
    found = branches_left_out([(str(file), 1)], [])
    assert [each.endswith("train.py:3") for each in found["thaws"]] == [True] * (body in THAWS)
    nothing = {"branches": [], "thaws": []}
    assert branches_left_out([(str(file), 4), ("nowhere.py", 1)], []) == nothing
    assert branches_left_out([(str(file), 1)], [(str(file), 2)]) == nothing


@pytest.mark.parametrize("body", THAWS)
def test_what_every_round_does_is_seen_in_the_first(tmp_path: Path, body: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(LOOP.format(head="with nothing():", body=body))
    assert branches_left_out([(str(file), 1)], []) == {"branches": [], "thaws": []}


def test_the_first_line_says_so() -> None:
    left = {"left_out": {**facts()["left_out"], "thaws": ["train.py:5"]}}
    answer = answered([phase("optimizer step", 4000, 0, 0, 0, 0)], 10 << 30, **left)
    assert "train.py:5 trains more parameters in some round" in first_line(answer)[1]


SCRIPT = """
import torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(net.parameters())
step = 0
for epoch in range(9):
    for round in range(20):
        loss = net(torch.randn(4, 64).cuda()).square().mean()
        if round % 2 == 0:
            loss = loss * 2
            loss.mean()
        if step % 16 == 15:
            torch.autograd.grad(loss, net.weight, retain_graph=True)
        if step > 5:
            print("late")
        if epoch == 5:
            net.requires_grad_(True)
        loss.backward()
        optimizer.step()
        step += 1
"""


def test_branches_that_no_round_entered_are_named(dry_run) -> None:
    outcome = dry_run(SCRIPT, options=("--capacity", "4GiB"))
    assert outcome.status == 0, outcome.errors
    left = outcome.answer["left_out"]
    assert [each.rpartition(":")[2] for each in left["branches"]] == ["12", "16"]
    assert [each.rpartition(":")[2] for each in left["thaws"]] == ["17"]
    assert "no round entered the branches at" in outcome.errors
