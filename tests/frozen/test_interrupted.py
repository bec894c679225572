"""An interrupt, or a failed allocation, at any line of a pass: the next pass has the right bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frozen_lab import are_same, batch, frozen, net, passes, run
from interruptions import count_lines, interrupted_at, spread

import residency
from residency._frozen import _guards

pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity="64MiB", schedule="late", workspaces=False),
]
LINES = [24, pytest.param(150, marks=pytest.mark.whole)]


@pytest.mark.parametrize("most", LINES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_forward_pass_may_end_at_any_line(
    device: torch.device, error: type[BaseException], most: int
) -> None:
    expected = [t.cpu() for t in run(net, passes, device, streams=False).results]
    model = net()
    torch.manual_seed(0)
    model.load_state_dict(net().state_dict())
    stream = residency.stream_frozen(model)
    x = batch(device)
    slots = stream.statistics()

    def forward() -> None:
        model(x)

    forward()
    for line in spread(count_lines(forward), most, seed=3):
        where = interrupted_at(line, forward, error)
        autograd: Any = torch._C._autograd
        assert autograd._top_saved_tensors_default_hooks(True) is None, where
        assert all(p.is_cpu for p in frozen(stream, model)), where
        assert stream.statistics().here_bytes <= slots.num_slots * slots.slot_bytes, where
        torch.manual_seed(1)
        found = [t.cpu() for t in passes(model, device)]
        assert are_same(found, expected), where
    stream.stop()


@pytest.mark.parametrize("most", LINES)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_the_call_may_end_at_any_line(device: torch.device, is_on_device: bool, most: int) -> None:
    model = net(num_blocks=3)
    before = [p.detach().clone() for p in model.parameters()]
    if is_on_device:
        model.to(device)
    held = torch.accelerator.memory_allocated()

    def begin_and_stop() -> None:
        with residency.stream_frozen(model):
            pass
        model.to(device if is_on_device else "cpu")

    begin_and_stop()
    for line in spread(count_lines(begin_and_stop), most, seed=4):
        where = interrupted_at(line, begin_and_stop, KeyboardInterrupt)
        if left := _guards.streamed_in(model):  # between the call and its block, or before the end
            assert where.startswith(("_stream.py:", "_passes.py:")), where
            _guards.end(left)
        assert are_same([p.detach().cpu() for p in model.parameters()], before), where
        model.to(device if is_on_device else "cpu")
    assert torch.accelerator.memory_allocated() == held
