"""A checkpointer publishes saves whole and in order, within its memory."""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import residency
from residency import InvalidArgumentError, RefusedError, _device
from residency._transfer import lending
from residency._units import format_bytes

BUCKET = 2048
BOTH = pytest.mark.parametrize("offload", [False, True], ids=["plain", "offloaded"])


@pytest.fixture
def waits(held_writer, monkeypatch):
    """Holds every write until somebody waits for the end of a loan; lists those waits."""
    found = []
    wait_until = lending.wait_until

    def note(is_done):
        found.append(is_done)
        held_writer.set()
        wait_until(is_done)

    monkeypatch.setattr(lending, "wait_until", note)
    return found


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(directory / f"step-{step:08d}" / "model.safetensors")


@BOTH
def test_every_save_holds_the_weights_of_its_moment(lab, tmp_path, offload):
    run = lab.run(offload=offload)
    expected = {}
    with residency.Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            run.step()
            expected[step] = run.copy()["model"]
            checkpointer.save(step, run.state)
    assert residency.Checkpointer(tmp_path).steps() == [0, 1, 2, 3]
    for step, model in expected.items():
        found = weights(tmp_path, step)
        for name, value in model.items():
            if name != "3.weight":  # tied to 0.weight, and stored once
                lab.same(found[f"model.{name}"], value)
    assert os.readlink(tmp_path / "latest") == "step-00000003"


@BOTH
def test_a_save_takes_no_device_memory_and_the_host_waits_for_nothing(
    lab, tmp_path, offload, held_writer
):
    run = lab.run(offload=offload)
    run.step()
    torch.accelerator.synchronize()
    with residency.Checkpointer(tmp_path, spare="all") as checkpointer:
        checkpointer.prepare(run.state)
        run.step()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        save = checkpointer.save(1, run.state)
        assert torch.accelerator.max_memory_allocated() == before
        if lab.device.type == "sim":
            # Nothing runs here before the host waits for it, for something that comes after it, or
            # looks: so one look at the first of them.
            job = checkpointer._memories[0].job
            on_device = [held for held in job.captured.held if held.group.flight is not None]
            assert not on_device[0].is_done()
        run.step()
        held_writer.set()
        save.wait()
    figures = save.statistics()
    assert figures.write_seconds is not None
    assert figures.written_bytes >= figures.copied_from_device_bytes + figures.lent_bytes


def test_figures_of_a_save_print_in_units_of_people(tmp_path):
    with residency.Checkpointer(tmp_path) as checkpointer:
        figures = checkpointer.save(1, {"x": torch.ones(1 << 20)}).wait().statistics()
    printed = {line.split()[0]: line.split()[1:] for line in str(figures).splitlines()[1:]}
    assert list(printed) == [field.name for field in dataclasses.fields(figures)]
    size = format_bytes(figures.copied_from_host_bytes)
    assert size.endswith("MiB")
    assert printed["copied_from_host_bytes"][:2] == size.split()
    assert printed["write_seconds"][1] in ("s", "ms")


@BOTH
@pytest.mark.parametrize("num_before", [0, 1])
def test_after_prepare_nothing_more_is_pinned(lab, tmp_path, pinned_bytes, offload, num_before):
    """Also when the first step, which makes the optimizer's state, comes after it."""
    run = lab.run(offload=offload)
    for _ in range(num_before):
        run.step()
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(run.state)
        prepared = pinned_bytes()
        for step in range(4):
            run.step()
            checkpointer.save(step, run.state)
            assert pinned_bytes() == prepared


def test_after_prepare_every_page_is_there_where_none_is_pinned(tmp_path, monkeypatch):
    monkeypatch.setattr(_device, "is_pinning_available", lambda: False)
    num_bytes = 64 << 20
    state = {"weight": torch.ones(num_bytes // 4)}

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    with residency.Checkpointer(tmp_path) as checkpointer:
        before = resident_bytes()
        checkpointer.prepare(state)
        assert resident_bytes() - before > num_bytes // 2  # other memory may have gone meanwhile


def test_close_gives_the_pinned_memory_back(lab, tmp_path, pinned_bytes):
    run = lab.run(offload=False)
    run.step()
    before = pinned_bytes()
    with residency.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(0, run.state)
        pinned = save.statistics().pinned_bytes
        sizes = [v.numel() * v.element_size() for v in run.copy()["model"].values()]
        assert pinned >= sum(sizes)
    assert pinned_bytes() == before


def test_with_the_policy_wait_a_save_waits_for_the_one_before(lab, tmp_path, held_writer):
    run = lab.run(offload=False)
    order = []
    with residency.Checkpointer(tmp_path) as checkpointer:
        first = checkpointer.save(0, run.state)
        timer = threading.Timer(0.05, lambda: (order.append("released"), held_writer.set()))
        timer.start()
        second = checkpointer.save(1, run.state)
        order.append("second")
        assert first.is_done()
        assert order == ["released", "second"]
        second.wait()
    assert checkpointer.steps() == [0, 1]


def test_with_the_policy_skip_a_save_is_left_out(lab, tmp_path, held_writer):
    run = lab.run(offload=False)
    with residency.Checkpointer(tmp_path, policy="skip") as checkpointer:
        first = checkpointer.save(0, run.state)
        second = checkpointer.save(1, run.state)
        assert second.is_skipped
        assert second.wait().is_done()
        held_writer.set()
        first.wait()
        third = checkpointer.save(2, run.state)
        assert not third.is_skipped
    assert checkpointer.steps() == [0, 2]


def test_with_the_policy_replace_the_newest_waiting_save_gives_way(lab, tmp_path, held_writer):
    run = lab.run(offload=True)
    run.step()
    with residency.Checkpointer(tmp_path, policy="replace", max_in_flight=2) as checkpointer:
        saves = []
        for step in range(4):
            saves.append(checkpointer.save(step, run.state))
        assert [save.is_skipped for save in saves] == [False, True, True, False]
        held_writer.set()
    assert checkpointer.steps() == [0, 3]


def test_only_as_many_saves_as_asked_for_stay_and_the_best(lab, tmp_path):
    model = {"model": nn.Linear(2, 2)}
    losses = [3.0, 1.0, 2.0, 4.0, 5.0]
    keep = residency.Retention(newest=2, best=1, metric="loss")
    with residency.Checkpointer(tmp_path, keep=keep) as checkpointer:
        for step, loss in enumerate(losses):
            checkpointer.save(step, model, metrics={"loss": loss})
    assert checkpointer.steps() == [1, 3, 4]
    with residency.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(9, model)
    assert checkpointer.steps() == [9]


def test_a_step_goes_on_while_its_states_are_lent_and_waits_only_without_spare(
    lab, tmp_path, waits
):
    """The spare is two buckets; the state has more."""
    run, alone = lab.run(offload=True, bucket=BUCKET), lab.run(offload=False)
    for each in (run, alone):
        each.step()
    expected = run.copy()["optimizer"]["state"]
    homes = run.optimizer.statistics().home_bytes
    before = run.optimizer.statistics().pinned_bytes
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, run.state)
        for each in (run, alone):
            each.step()
        assert homes > 3 * BUCKET
        assert waits
        assert run.optimizer.statistics().pinned_bytes - before <= 2 * BUCKET
        checkpointer.wait()
    found = load_file(tmp_path / "step-00000000" / "optimizer.safetensors")
    names = [name for name, _ in run.model.named_parameters()]
    for index, name in enumerate(names):
        lab.same(found[f"optimizer.state.{name}.exp_avg"], expected[index]["exp_avg"])
    lab.same(run.copy(), alone.copy())


def test_with_a_full_second_set_no_step_waits_for_the_disk(lab, tmp_path, held_writer, monkeypatch):
    run = lab.run(offload=True)
    run.step()
    expected = run.copy()["optimizer"]["state"][0]
    with residency.Checkpointer(tmp_path, spare="all") as checkpointer:
        checkpointer.save(0, run.state)
        monkeypatch.setattr(lending, "wait_until", None)
        run.step()
        run.step()
        held_writer.set()
    found = load_file(tmp_path / "step-00000000" / "optimizer.safetensors")
    lab.same(found["optimizer.state.0.weight.exp_avg_sq"], expected["exp_avg_sq"])


def test_a_second_writer_of_the_directory_is_refused(lab, tmp_path):
    model = {"model": nn.Linear(2, 2)}
    with residency.Checkpointer(tmp_path) as first:
        first.save(0, model).wait()
        second = residency.Checkpointer(tmp_path)
        assert second.steps() == [0]
        with pytest.raises(RefusedError, match=str(os.getpid())):
            second.save(1, model)
    second.save(1, model).wait()
    second.close()
    assert first.steps() == [0, 1]
    with pytest.raises(RefusedError, match="closed"):
        first.save(2, model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep": 0}, "keep is 0"),
        ({"keep": True}, "keep is True"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"policy": "hurry"}, "policy is 'hurry'"),
        ({"verify": "never"}, "verify is 'never'"),
        ({"spare": "2 buckets"}, "spare"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_arguments_that_mean_nothing_are_refused(tmp_path, arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        residency.Checkpointer(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("step", "state", "words"),
    [
        (-1, {}, "step is -1"),
        (1.0, {}, "step is 1.0"),
        (True, {}, "step is True"),
        (0, [1], "the state is a list"),
        (0, {1: 2}, "names as keys"),
        (0, {"rng": 1}, "pass rng=False"),
    ],
    ids=str,
)
def test_a_step_or_a_state_that_means_nothing_is_refused(tmp_path, step, state, words):
    with (
        residency.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(InvalidArgumentError, match=words),
    ):
        checkpointer.save(step, state)
    assert not list(tmp_path.iterdir())


def test_a_save_with_progress_is_published_when_it_returns(lab, tmp_path, capsys):
    with residency.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(7, {"model": nn.Linear(2, 2)}, progress=True)
        assert save.is_done()
        assert save.path.is_dir()
    assert "saving step 7" in capsys.readouterr().err


def test_a_directory_that_is_a_file_is_refused_before_anything_is_copied(lab, tmp_path, no_loans):
    run = lab.run(offload=True)
    run.step()
    (tmp_path / "file").write_text("mine")
    with residency.Checkpointer(tmp_path / "file") as checkpointer, pytest.raises(RefusedError):
        checkpointer.save(0, run.state)
    assert no_loans()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_save_that_is_read_back_restores_as_any_other(device, tmp_path):
    model = torch.nn.Linear(512, 512).to(device)
    saved = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    with residency.Checkpointer(tmp_path, keep=1, verify="read") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": model}).wait()
        with torch.no_grad():
            model.weight.zero_()
        assert checkpointer.restore({"model": model}) == 2
    assert all(torch.equal(v.cpu(), saved[n]) for n, v in model.state_dict().items())
    with pytest.raises(residency.InvalidArgumentError, match="'gate', 'full' or 'read'"):
        residency.Checkpointer(tmp_path, verify="reed")
