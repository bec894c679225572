"""What cannot be streamed exactly is refused by name, and nothing has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from frozen_lab import WIDTH, Block, Net, batch, freeze, net, passes
from torch import Tensor, nn

import residency
from residency import InvalidArgumentError, RefusedError, _device


def _shared() -> Any:
    model = Net()
    model.blocks[4].up.weight = model.blocks[1].up.weight
    return freeze(model)


def _compiled() -> Any:
    model = net()
    model.blocks[1].compile(backend="eager")
    return model


def _wrapped_in_compile() -> Any:
    model = net()
    model.blocks[1].up = torch.compile(model.blocks[1].up, backend="eager")
    return model


def _meta() -> Any:
    with torch.device("meta"):
        return net()


def _trained() -> Any:
    return Net()


def _without_lists() -> Any:
    return nn.Linear(4, 4).requires_grad_(False)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "nothing frozen": (_trained, {}, "has no frozen parameters"),
    "no list of blocks": (_without_lists, {}, "no list of repeated blocks"),
    "as many slots as units": (net, {"slots": 6}, "6 units .* for 6 slots"),
    "a weight of two units": (
        _shared,
        {},
        r"units blocks\.1 and blocks\.4 share blocks\.4\.up\.weight \(16\.00 KiB\)",
    ),
    "a unit within another": (
        net,
        {"units": ["blocks.0", "blocks.1", "blocks.2", "blocks.0.up"]},
        r"units blocks\.0 and blocks\.0\.up share",
    ),
    "a compiled unit": (_compiled, {}, r"blocks\.1 of class Block is compiled"),
    "a compiled part": (_wrapped_in_compile, {}, r"blocks\.1\.up of class OptimizedModule is comp"),
    "no bytes": (_meta, {}, "is on the meta device"),
}


@pytest.mark.parametrize(("make", "options", "words"), CASES.values(), ids=CASES.keys())
def test_a_model_that_cannot_stream_is_refused(
    device: torch.device, make: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    model = make()
    before = [(p.device, p.data_ptr()) for p in model.parameters() if not p.is_meta]
    held = torch.accelerator.memory_allocated()
    with pytest.raises(RefusedError, match=words) as caught:
        residency.stream_frozen(model, **options)
    assert "Nothing was changed" in str(caught.value)
    assert [(p.device, p.data_ptr()) for p in model.parameters() if not p.is_meta] == before
    assert torch.accelerator.memory_allocated() == held


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 1}, "at least 2"),
        ({"slots": 2.0}, "at least 2"),
        ({"units": []}, "units is empty"),
        ({"units": ["blocks.9"]}, r"'blocks\.9', which is no module"),
        ({"units": [nn.Linear(2, 2)]}, "'Linear', which is no module"),
        ({"units": [3]}, "'int', which is no module"),
    ],
)
def test_an_argument_that_means_nothing_is_an_error(
    device: torch.device, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        residency.stream_frozen(net(), **options)
    with pytest.raises(InvalidArgumentError, match="expected a module"):
        residency.stream_frozen([net()])  # type: ignore[arg-type]


def test_a_unit_larger_than_the_device_is_refused_by_name_and_bytes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(num_blocks=16, hidden=(40, 200, 8, 960))
    monkeypatch.setattr(_device, "device_room", lambda device: (0, 500_000))
    with pytest.raises(RefusedError, match=r"2 slots of blocks\.3, .* \(26\d\.\d\d KiB of frozen"):
        residency.stream_frozen(model)
    assert all(p.is_cpu for p in model.parameters())


def test_a_model_streams_once_at_a_time(device: torch.device) -> None:
    model = net()
    with residency.stream_frozen(model):
        with pytest.raises(RefusedError, match=r"blocks\.0 of this Net streams already"):
            residency.stream_frozen(model)
        with pytest.raises(RefusedError, match="streams already"):
            residency.stream_frozen(model, units=["blocks.0.q", "blocks.1.q", "blocks.2.q"])
    with residency.stream_frozen(model):
        passes(model, device)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a gradient": (lambda m: m.requires_grad_(True), "requires a gradient"),
    "other memory": (
        lambda m: setattr(m.blocks[2].k.weight, "data", torch.zeros(WIDTH, WIDTH)),
        r"k\.weight of blocks\.2 was given other memory",
    ),
    "another parameter": (
        lambda m: setattr(m.blocks[2].k, "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
        r"blocks\.2 has another object as its k\.weight",
    ),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_what_streams_is_named_by_the_next_pass(
    device: torch.device, change: Callable[[Any], object], words: str
) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    passes(model, device, count=1)
    change(model)
    with pytest.raises(RefusedError, match=words) as caught:
        passes(model, device, count=1)
    assert "stream.stop()" in str(caught.value)
    stream.stop()
    model.to(device)
    passes(model, device, count=1)


def test_a_double_backward_is_refused(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    x = batch(device)
    with pytest.raises(RefusedError, match="create_graph=True"):
        torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    passes(model, device, count=1)
    stream.stop()


def test_a_pass_without_hooks_of_saved_tensors_is_refused(device: torch.device) -> None:
    model = net()
    with (
        residency.stream_frozen(model),
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    ):
        with pytest.raises(RefusedError, match="hooks of saved tensors are disabled"):
            model(batch(device))
        with torch.no_grad():
            model(batch(device))


def test_a_second_thread_is_refused_while_a_pass_runs(device: torch.device) -> None:
    model = net()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            model.blocks[2](batch(device))
        except RefusedError as error:
            errors.append(error)

    def beside(*_: object) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with residency.stream_frozen(model):
        handle = model.blocks[1].register_forward_pre_hook(beside)
        passes(model, device, count=1)
        handle.remove()
    assert ["second thread" in str(error) for error in errors] == [True]


def test_more_units_at_once_than_slots_are_refused(device: torch.device) -> None:
    class Deep(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.others[0](x) if self.others else x)

    model = freeze(nn.Sequential(*(Deep() for _ in range(5))))
    for number, block in enumerate(model):
        object.__setattr__(block, "others", [model[number + 1]] if number < 2 else [])
    with residency.stream_frozen(model), pytest.raises(RefusedError, match="there are 2 slots"):
        model[0](batch(device))
    with residency.stream_frozen(model, slots=3):
        passes(model[0], device, count=1)


def test_stopping_within_a_pass_is_refused(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: stream.stop())
    with pytest.raises(RefusedError, match="within a forward or backward pass"):
        model(batch(device))
    handle.remove()
    handle = model.blocks[1].register_full_backward_hook(lambda *_: stream.stop())
    with pytest.raises(RefusedError, match="within a forward or backward pass"):
        model(batch(device)).sum().backward()
    handle.remove()
    stream.stop()


def test_without_an_accelerator_there_is_nothing_to_stream_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_device, "accelerator", lambda: None)
    with pytest.raises(RefusedError, match="there is no accelerator"):
        residency.stream_frozen(net())
