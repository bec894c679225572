"""What a caller keeps of a state is live, and whole, whatever keeps its bytes."""

import copy
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from exchanged import FEW, everything, three

import residency
from residency._transfer import lending

KEEPERS = {
    "a state": lambda o, p: o.state[p]["exp_avg"],
    "a view": lambda o, p: o.state[p]["exp_avg"].view(-1)[5:],
    "an array": lambda o, p: (
        torch.from_numpy(o.state[p]["exp_avg"].numpy())
        if o.state[p]["exp_avg"].is_cpu
        else o.state[p]["exp_avg"]
    ),
    "a state dict": lambda o, p: o.state_dict()["state"][0]["exp_avg"],
    "a copy of the mapping": lambda o, p: dict(o.state[p])["exp_avg"],
    "an item": lambda o, p: dict(o.state[p].items())["exp_avg"],
    "step": lambda o, p: o.state[p]["step"],
}


@pytest.mark.parametrize("place", FEW.values(), ids=FEW)
@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_what_a_caller_keeps_is_the_live_state_to_read_and_to_write(lab, keep, place):
    results = []
    for offload in (False, True):
        optimizer, parameters = three(lab, offload, place=place)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        kept = keep(optimizer, parameters[0])
        seen = []
        for step in range(2, 5):
            lab.take_steps(optimizer, parameters, [step], missing=False)
            seen.append(kept.cpu().clone())  # with no new look at the state
            kept.mul_(0.5)
        del kept
        lab.take_steps(optimizer, parameters, range(5, 7), missing=False)
        results.append([*seen, *everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))


def test_what_is_assigned_leaves_bytes_alone_that_a_save_reads(lab):
    parameters = lab.parameters(shapes=((32, 64),))
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    residency.offload_optimizer(optimizer)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    state = optimizer.state[parameters[0]]
    state.fence()
    lent, borrower = state.homes_by_key["momentum_buffer"].tensor, object()
    before = lent.clone()
    lending.lend(lent, borrower)
    state["momentum_buffer"] = torch.full_like(parameters[0], 7)
    assert torch.equal(lent, before)
    assert state["momentum_buffer"].eq(7).all()
    lending.give_back(lent, borrower)


@pytest.mark.parametrize("kept", ["a state", "a view", "both"])
@pytest.mark.parametrize(
    "how",
    ["save, then look", "look, then save", "snapshot, then look", "look, then snapshot", "no tree"],
)
def test_what_a_caller_keeps_is_live_whatever_keeps_the_bytes(lab, tmp_path, kept, how):
    results = []
    for offload in (False, True):
        optimizer, parameters = three(lab, offload)
        lab.take_steps(optimizer, parameters, range(1), missing=False)
        taken, seen = None, []
        for action in how.split(", then ") if "then" in how else ("snapshot", "look"):
            if action == "look":
                state = optimizer.state[parameters[0]]["exp_avg"]
                seen += [state] if kept != "a view" else []
                seen += [state.view(-1)[7:]] if kept != "a state" else []
                del state
            elif offload and action == "save":
                taken = residency.Checkpointer(tmp_path)
                taken.save(1, {"optimizer": optimizer})
            elif offload:
                taken = residency.snapshot({"optimizer": optimizer})
                taken = None if how == "no tree" else taken.tree
        values = []
        for step in range(1, 4):
            lab.take_steps(optimizer, parameters, [step], missing=False)
            values += [each.cpu().clone() for each in seen]  # with no new look at the state
            seen[0].mul_(0.5)
        if how.endswith("save"):
            taken = taken.close() if offload else None
        results.append([*values, *everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))


def test_a_step_waits_for_a_save_of_bytes_of_which_a_caller_has_a_view(lab):
    optimizer, parameters = three(lab, True)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    optimizer._residency.host.homes.arena.make_room(
        [1 << 20]
    )  # into which steps go on beside a save
    whole, part = (optimizer.state[p]["exp_avg"] for p in parameters[:2])
    part = part[1:]
    home = optimizer.state.peek(parameters[1]).homes_by_key["exp_avg"]
    lending.lend(home.tensor, "a save")
    ended = []

    def end():
        ended.append(True)
        lending.give_back(home.tensor, "a save")

    timer = threading.Timer(0.2, end)
    timer.start()
    lab.take_steps(optimizer, parameters, [1], missing=False)
    assert ended
    timer.join()
    assert torch.equal(part, optimizer.state[parameters[1]]["exp_avg"][1:])
    assert whole is optimizer.state[parameters[0]]["exp_avg"]


def test_a_step_waits_only_while_a_caller_has_a_state(lab):
    optimizer, parameters = three(lab, True)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    optimizer.state_dict()  # looked at, and not kept
    homes = optimizer._residency.host.homes
    optimizer.step()
    assert not homes.held()
    kept = optimizer.state[parameters[0]]["exp_avg"].t()
    assert len(homes.held()) == 1
    optimizer.step()
    assert homes.newest.query()
    del kept
    assert not homes.held()
    optimizer.step()
    if lab.device.type == "sim":
        assert not homes.newest.query()  # nothing has made the host wait for it


def test_a_load_leaves_alone_what_a_caller_has_kept(lab):
    results = []
    for offload in (False, True):
        optimizer, parameters = three(lab, offload)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        before = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(before))
        frozen = optimizer.state[parameters[1]]["exp_avg"]
        optimizer.state[parameters[1]]["exp_avg"] = torch.zeros_like(parameters[1])
        lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
        results.append([t.cpu().clone() for t in (frozen, before["state"][0]["exp_avg"])])
        optimizer.load_state_dict(before)
        lab.take_steps(optimizer, parameters, range(4, 6), missing=False)
        results[-1] += everything(lab, optimizer, parameters)
    assert all(map(torch.equal, *results))
