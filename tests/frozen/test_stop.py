"""A streamed model in the hands of others: moved, copied, saved, loaded, parked, stopped."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_lab import are_same, batch, frozen, net, passes, trained
from torch import nn

import residency
from residency import RefusedError
from residency._frozen import _homes
from residency._transfer import SlabArena


def _bits(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize("is_on_device", [False, True])
def test_stopping_leaves_ordinary_parameters_on_the_host(
    device: torch.device, is_on_device: bool
) -> None:
    model = net()
    objects, before = list(model.parameters()), _bits(model)
    if is_on_device:
        model.to(device)
    torch.manual_seed(1)
    with residency.stream_frozen(model) as stream:
        streaming = frozen(stream, model)
        expected = passes(model, device)
        assert not stream.is_stopped
    assert stream.is_stopped
    stream.stop()
    assert all(p.is_cpu for p in streaming)
    assert all(p.device == device for p in trained(model))
    assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
    assert are_same(_bits(model), before)
    with pytest.raises(RuntimeError):
        model(batch(device))
    model.to(device)
    torch.manual_seed(1)
    assert are_same([t.cpu() for t in passes(model, device)], [t.cpu() for t in expected])


def test_a_call_that_fails_halfway_leaves_all_where_it_was(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = SlabArena.allocate_all
    for is_on_device in (False, True):
        model = net()
        before = _bits(model)
        if is_on_device:
            model.to(device)
        held = torch.accelerator.memory_allocated()
        calls: list[Any] = []

        def fail_at_the_third(self: Any, sizes: Any, calls: list[Any] = calls) -> Any:
            calls.append(sizes)
            if len(calls) == 3:
                raise RefusedError("no room")
            return arena(self, sizes)

        monkeypatch.setattr(SlabArena, "allocate_all", fail_at_the_third)
        with pytest.raises(RefusedError, match=r"the host has no room for .* of blocks\.2"):
            residency.stream_frozen(model)
        monkeypatch.undo()
        expected = device.type if is_on_device else "cpu"
        assert {p.device.type for p in model.parameters()} == {expected}
        assert are_same(_bits(model), before)
        assert torch.accelerator.memory_allocated() == held
        model.to(device)
        passes(model, device, count=1)


def test_a_device_without_room_for_the_rest_leaves_the_model_on_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    before = _bits(model)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(nn.Linear, "_apply", fail)
    with pytest.raises(torch.OutOfMemoryError):
        residency.stream_frozen(model)
    monkeypatch.undo()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert are_same(_bits(model), before)
    with residency.stream_frozen(model):
        passes(model, device, count=1)


def test_a_move_to_its_own_device_leaves_what_streams_at_home(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    expected = [p.data_ptr() for p in frozen(stream, model)]
    model.to(device)
    model.to(device, torch.float32)
    model.blocks[2].to(device)
    model.float()
    assert [p.data_ptr() for p in frozen(stream, model)] == expected
    passes(model, device, count=1)


@pytest.mark.parametrize(
    "move", [lambda m: m.cpu(), lambda m: m.half(), lambda m: m.blocks[1].to(torch.bfloat16)]
)
def test_any_other_move_is_refused_before_anything_moved(device: torch.device, move: Any) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    before = [(p.device, p.dtype, p.data_ptr()) for p in model.parameters()]
    with pytest.raises(RefusedError, match=r"stream from the host.*call stream.stop\(\) first"):
        move(model)
    assert [(p.device, p.dtype, p.data_ptr()) for p in model.parameters()] == before
    stream.stop()
    move(model)


def test_a_model_that_does_not_stream_moves_as_ever(device: torch.device) -> None:
    streamed, other = net(), net()
    residency.stream_frozen(streamed)
    other.to(device).half().cpu()
    assert {(p.device.type, p.dtype) for p in other.parameters()} == {("cpu", torch.float16)}


def test_copies_and_pickles_are_plain_models(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    passes(model, device, count=1)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    copies = [
        copy.deepcopy(model),
        torch.load(written, weights_only=False),
        pickle.loads(pickle.dumps(model)),
    ]
    for each in copies:
        assert are_same(_bits(each), _bits(model))
        with pytest.raises(RuntimeError):
            each(batch(device))
        each.to(device)
        passes(each, device, count=1)
    assert all(p.is_cpu for p in frozen(stream, model))
    passes(model, device, count=1)


def test_saves_and_loads_take_no_byte_of_the_device(device: torch.device, tmp_path: Path) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    passes(model, device, count=1)
    before = _bits(model)
    held = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    with residency.Checkpointer(tmp_path / "saves") as checkpointer:
        checkpointer.save(1, {"model": model}).wait()
    for parameter in frozen(stream, model):
        with torch.no_grad():
            parameter.zero_()
    residency.load_into(model, tmp_path / "plain.pt")
    assert are_same(_bits(model), before)
    torch.manual_seed(1)
    expected = passes(model, device, count=1)
    for parameter in frozen(stream, model):
        with torch.no_grad():
            parameter.zero_()
    with residency.Checkpointer(tmp_path / "saves") as checkpointer:
        checkpointer.restore({"model": model})
    assert are_same(_bits(model), before)
    torch.manual_seed(1)
    again = passes(model, device, count=1)
    assert are_same([t.cpu() for t in again], [t.cpu() for t in expected])
    assert torch.accelerator.max_memory_allocated() - held < 300_000  # passes, and gradients
    assert all(p.is_cpu for p in frozen(stream, model))


def test_a_hand_off_takes_the_slots_and_the_rest(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    passes(model, device, count=1)
    with residency.hand_off("1MiB", park=[model]):
        residency.park(model)
        assert stream.statistics().here_bytes == 0
        assert all(p.is_cpu for p in model.parameters())
        residency.unpark(model)
    passes(model, device, count=1)
    assert all(p.is_cpu for p in frozen(stream, model))


def test_a_graph_from_before_the_stop_is_refused_by_name(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    loss = model(batch(device)).sum()
    stream.stop()
    with pytest.raises(RefusedError, match=r"before stream\.stop\(\)"):
        loss.backward()


def test_what_the_units_do_not_have_alone_stays_on_the_device(device: torch.device) -> None:
    model = net()
    tied = model.blocks[3].up.weight
    model.beside = nn.Linear(4, 4)
    model.beside.weight = tied
    model.blocks[1].register_parameter(
        "wide", nn.Parameter(torch.zeros(4, 1).expand(4, 8), requires_grad=False)
    )
    stream = residency.stream_frozen(model)
    assert tied.device == model.blocks[1].wide.device == device
    assert model.blocks[3].down.weight.is_cpu
    assert "blocks.3" in stream.units
    passes(model, device, count=1)


def test_interrupts_of_the_call_leave_a_model_that_can_be_used(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    before = _bits(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_homes, "_runs_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        residency.stream_frozen(model)
    monkeypatch.undo()
    assert are_same(_bits(model), before)
    with residency.stream_frozen(model):
        passes(model, device, count=1)
