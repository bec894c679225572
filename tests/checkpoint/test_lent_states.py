"""Writes into the state that an offloaded optimizer has lent to a snapshot or a save."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

import residency
from residency import CheckpointError

LOOKS = {
    "kept": lambda run, kept: kept,
    "looked at": lambda run, kept: run.optimizer.state[run.model[0].weight]["exp_avg"],
    "of a state dict": lambda run, kept: run.optimizer.state_dict()["state"][0]["exp_avg"],
    "a view": lambda run, kept: run.optimizer.state[run.model[0].weight]["exp_avg"][1:],
}


def stepped(lab, count=1, **settings):
    run = lab.run(**settings)
    for _ in range(count):
        run.step()
    return run


def tensors_of(tree):
    states = tree["optimizer"]["state"].values()
    return [value for state in states for value in state.values() if torch.is_tensor(value)]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_into_the_tree_of_a_snapshot_changes_no_training(lab, seed):
    """At whatever moment it is asked for and written, on whatever thread, once or twice."""
    chance = random.Random(seed)
    kind = chance.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
    settings = {"kind": kind, "bucket": chance.choice([2048, 1 << 20])}
    run, alone = (stepped(lab, 2, offload=offload, **settings) for offload in (True, False))
    taken = []
    for _ in range(6):
        act = chance.choice(["snapshot", "snapshot", "step", "write", "look"])
        if act == "snapshot":
            taken.append((residency.snapshot(run.state), alone.copy()))
        elif act == "step":
            run.step()
            alone.step()
        elif act == "look":
            lab.same(run.copy(), alone.copy())
        elif taken:
            snapshot, expected = taken.pop(chance.randrange(len(taken)))
            if chance.random() < 0.5:
                asking = threading.Thread(target=snapshot.wait)
                asking.start()
                asking.join()
            lab.same(snapshot.tree, expected)
            for tensor in tensors_of(snapshot.tree):
                tensor.fill_(7)
    for snapshot, expected in taken:
        lab.same(snapshot.tree, expected)
        for tensor in tensors_of(snapshot.tree):
            tensor.fill_(7)
    lab.same(run.copy(), alone.copy())
    run.step()
    alone.step()
    lab.same(run.copy(), alone.copy())


def test_a_tree_that_is_loaded_stays_as_it_is_when_the_training_goes_on(lab):
    run = stepped(lab, offload=True)
    tree = residency.snapshot(run.state).tree
    expected = lab.copied(tree)
    run.step()
    run.optimizer.load_state_dict(tree["optimizer"])
    first = run.model[0].weight
    run.optimizer.state[first]["exp_avg"] = tree["optimizer"]["state"][0]["exp_avg"]
    run.step()
    lab.same(tree, expected)


def test_a_tree_before_a_step_takes_the_memory_that_the_step_would_have(
    lab, pinned_bytes, no_loans
):
    run = stepped(lab, offload=True)
    snapshot = residency.snapshot({"optimizer": run.optimizer})
    before = pinned_bytes()
    tree = snapshot.tree
    run.step()
    assert pinned_bytes() == before
    del snapshot, tree
    gc.collect()
    assert no_loans()
    again = residency.snapshot({"optimizer": run.optimizer}).wait()
    run.step()
    assert pinned_bytes() == before
    del again


@pytest.mark.parametrize("verify", ["gate", "full", "read"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_write_into_state_that_a_save_reads_fails_the_save_by_name(
    lab, tmp_path, held_writer, look, verify
):
    run = stepped(lab, offload=True)
    kept = run.optimizer.state[run.model[0].weight]["exp_avg"]
    with residency.Checkpointer(tmp_path, verify=verify) as checkpointer:
        save = checkpointer.save(1, run.state)
        LOOKS[look](run, kept).zero_()
        held_writer.set()
        with pytest.raises(CheckpointError, match=r"optimizer\.state\.0\.weight\.exp_avg was writ"):
            save.wait()
        assert checkpointer.steps() == []
        expected = run.copy()
        checkpointer.save(2, run.state).wait()
        fresh = lab.run(offload=False)
        assert checkpointer.restore(fresh.state) == 2
        lab.same(fresh.copy(), expected)


@pytest.mark.parametrize("seed", range(6))
def test_what_moves_off_the_memory_that_a_save_reads_fails_no_save(
    lab, tmp_path, held_writer, seed
):
    """Steps, assignments, deletions and looks, also of tensors that were written before."""
    chance = random.Random(seed)
    run = stepped(lab, 2, offload=True)
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    kept = [run.optimizer.state[p]["exp_avg"] for p in parameters if chance.random() < 0.5]
    for each in kept:
        each.mul_(1.5)
    expected = run.copy()
    with residency.Checkpointer(tmp_path, spare="all") as checkpointer:
        save = checkpointer.save(1, run.state)
        for _ in range(5):
            act = chance.choice(["step", "assign", "look", "delete", "load"])
            state = run.optimizer.state[chance.choice(parameters)]
            if act == "step":
                run.step()
                for each in kept:  # the state has other memory now
                    each.mul_(1.5)
            elif act == "assign":
                kept = []
                state["exp_avg"] = torch.ones_like(state["exp_avg"])
            elif act == "look":
                lab.copied(run.optimizer.state_dict())
            elif act == "delete":
                kept = []
                run.optimizer.state.pop(chance.choice(parameters), None)
            else:
                kept = []
                run.optimizer.load_state_dict(lab.copied(run.optimizer.state_dict()))
        held_writer.set()
        save.wait()
        fresh = lab.run(offload=False)
        checkpointer.restore(fresh.state)
        lab.same(fresh.copy(), expected)
