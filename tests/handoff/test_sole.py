"""What one hand-off has for itself is free again however the hand-off ended."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from interruptions import count_lines, interrupted_at

import residency
from residency._handoff._hand_off_job import sole_hand_off
from residency._handoff._segments import expandable_segments, is_expandable


def toggle(device):
    return expandable_segments(device, not is_expandable(device))


@pytest.mark.parametrize("block", [sole_hand_off, toggle])
def test_an_interrupt_at_any_line_keeps_nobody_else_out(device, block) -> None:
    def run() -> None:
        with block(device):
            pass

    before = is_expandable(device)
    lines = count_lines(run)
    for line in range(1, lines + 1):
        at = interrupted_at(line, run, KeyboardInterrupt)
        try:
            run()
        except residency.RefusedError as error:
            pytest.fail(f"line {line} of {lines}, {at}: {error}")
        assert is_expandable(device) == before, at


@pytest.mark.parametrize("block", [sole_hand_off, toggle])
def test_two_at_once_are_refused_and_one_after_the_other_are_not(device, block) -> None:
    refused = []

    def enter() -> None:
        try:
            with block(device):
                pass
        except residency.RefusedError as error:
            refused.append(error)

    with block(device):
        other = threading.Thread(target=enter)
        other.start()
        other.join()
        assert len(refused) == 1
    try:
        with block(device):
            raise torch.OutOfMemoryError
    except torch.OutOfMemoryError:
        enter()  # while the exception still has the block's frame
    assert len(refused) == 1


@pytest.mark.parametrize("block", [sole_hand_off, toggle])
def test_a_profiler_that_keeps_the_frames_keeps_nobody_out(device, block) -> None:
    frames = []
    sys.setprofile(lambda frame, *_: frames.append(frame))
    try:
        with block(device):
            pass
    finally:
        sys.setprofile(None)
    assert frames
    with block(device):
        pass
