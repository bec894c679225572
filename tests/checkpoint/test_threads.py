"""Threads that save, step and take snapshots at once see one another's steps and saves whole."""

from __future__ import annotations

import threading

import numpy
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import residency
from residency import InvalidArgumentError, RefusedError, _device


def in_threads(*actions):
    """Runs actions at once, each on a thread; raises the first error."""
    errors = []

    def run(action):
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("is_shared", [True, False], ids=["one checkpointer", "one for each"])
def test_saves_of_several_threads_are_all_published_with_their_own_bytes(
    lab, tmp_path, is_shared, no_loans
):
    paths = [tmp_path / ("all" if is_shared else str(number)) for number in range(4)]
    made = {path: residency.Checkpointer(path, max_in_flight=2) for path in paths}

    def save(number):
        run = lab.run(offload=number % 2 == 0)
        for index in range(4):
            step = 10 * number + index
            mark = torch.full((500,), float(step), device=lab.device)
            made[paths[number]].save(step, {"mark": mark, "optimizer": run.optimizer})
            mark.zero_()
            run.optimizer.step()

    in_threads(*(lambda number=number: save(number) for number in range(4)))
    for checkpointer in made.values():
        checkpointer.close()
    assert no_loans()
    for number, path in enumerate(paths):
        checkpointer = residency.Checkpointer(path)
        for step in range(10 * number, 10 * number + 4):
            found = {"mark": torch.zeros(500)}
            checkpointer.restore(found, step=step, rng=False)
            assert found["mark"].unique().tolist() == [step]


def test_a_step_in_parts_silences_no_other_threads_hooks(device):
    """By such a hook other steps wait for the copies of a snapshot."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(20)
            return super().step(closure)

    def parameters():
        return [torch.nn.Parameter(torch.ones(64, device=device)) for _ in range(3)]

    parts, plain = parameters(), parameters()
    for each in (*parts, *plain):
        each.grad = torch.ones_like(each)
    in_parts = residency.offload_optimizer(Slow(parts, lr=1.0, momentum=0.9))
    other = torch.optim.SGD(plain, lr=1.0)
    in_parts.step()
    seen = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(id(optimizer)))
    thread = threading.Thread(target=in_parts.step)
    thread.start()
    try:
        assert inside.wait(20)
        seen.clear()
        snapshot = residency.snapshot({"plain": plain})
        other.step()
        assert seen == [id(other)]
        assert all(bool((t == 1).all()) for t in snapshot.tree["plain"])
        seen.clear()
    finally:
        go_on.set()
        thread.join(20)
        handle.remove()
    assert not seen, "a part is no step of its own"


def test_a_state_that_is_in_the_tree_by_itself_too_has_the_bytes_of_the_last_step(lab, tmp_path):
    run = lab.run(offload=True)
    run.step()
    weight = run.model[0].weight
    taken = {key: value for key, value in run.optimizer.state[weight].items() if value.dim()}
    run.step()  # its copies home are under way
    trees = [
        {"extra": taken, "optimizer": run.optimizer, "model": run.model},
        {"model": run.model, "optimizer": run.optimizer, "extra": taken},
        {"extra": taken},
    ]
    for number, tree in enumerate(trees):
        if number:
            run.step()
        snapshot = residency.snapshot(tree)
        with residency.Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(1, tree)
        expected = {key: value.clone() for key, value in run.optimizer.state[weight].items()}
        expected = {key: expected[key] for key in taken}
        lab.same(snapshot.tree["extra"], {key: taken[key].clone() for key in taken})
        found = {"extra": {key: torch.zeros_like(value) for key, value in taken.items()}}
        residency.Checkpointer(tmp_path / str(number)).restore(found, rng=False)
        lab.same(found["extra"], {key: taken[key].clone() for key in taken})
        if number == 0:
            lab.same(found["extra"], expected)
        taken.update({k: v for k, v in run.optimizer.state[weight].items() if k in taken})


def test_metrics_are_those_of_the_call(tmp_path):
    loss, running = torch.tensor(0.25), numpy.array(2.0)
    with residency.Checkpointer(tmp_path, keep=residency.Retention(1, 1, "loss")) as checkpointer:
        for step in range(3):
            loss.fill_([0.5, 0.25, 0.75][step])
            checkpointer.save(step, {"x": step}, metrics={"loss": loss, "mean": running})
            loss.fill_(99)
            running.fill(99)
    assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize(
    "metrics", [{"loss": "0.5"}, {"loss": None}, {"loss": torch.ones(2)}, {3: 0.5}, [0.5]]
)
def test_a_metric_that_is_no_number_is_refused_in_the_call(tmp_path, metrics):
    with residency.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(InvalidArgumentError, match="metric"):
            checkpointer.save(1, {"x": 1}, metrics=metrics)
        checkpointer.save(2, {"x": 1}, metrics={"loss": 1})
    assert checkpointer.steps() == [2]


def test_a_tensor_whose_memory_was_freed_is_refused_and_stays_freed(device, tmp_path):
    freed = torch.ones(1000, device=device)
    freed.untyped_storage().resize_(0)
    with residency.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(RefusedError, match=r"x needs 4000 bytes .* has 0"):
            checkpointer.save(1, {"x": freed})
        with pytest.raises(RefusedError, match="x needs 4000 bytes"):
            residency.snapshot({"x": freed})
    assert freed.untyped_storage().nbytes() == 0


def test_two_tensors_over_one_array_are_saved(tmp_path):
    array = numpy.arange(100, dtype=numpy.float32)
    short, whole = torch.from_numpy(array[:10]), torch.from_numpy(array)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"short": short, "whole": whole})
        array += 1
        found = {"short": torch.zeros(10), "whole": torch.zeros(100)}
        checkpointer.restore(found)
    assert torch.equal(found["whole"], torch.arange(100.0))
    assert torch.equal(found["short"], torch.arange(10.0))


def test_the_threads_that_write_are_on_the_device_of_the_call(lab, tmp_path, monkeypatch):
    chosen = {}
    of_the_call = 1

    def index():  # as torch: a thread begins on the first device
        name = threading.current_thread().name
        return of_the_call if name == "MainThread" else chosen.get(name, 0)

    def use(index):
        chosen[threading.current_thread().name] = index

    monkeypatch.setattr(_device, "current_index", index)
    monkeypatch.setattr(_device, "use_index", use)
    run = lab.run(offload=True)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": run.optimizer}).wait()
    assert "residency-save" in chosen
    assert any(name.startswith("residency-write") for name in chosen)
    assert set(chosen.values()) == {of_the_call}
