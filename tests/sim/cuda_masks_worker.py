"""Runs cases of tests/sim/test_cuda_face.py in one process, in which the simulator is CUDA: masks
among the indices of what is captured into a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from worker_cases import Cases

from residency import sim

case = Cases()


def rows() -> torch.Tensor:
    return torch.zeros(3, device="cuda")


def is_refused(call: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    values, mask = rows(), rows() == 0
    not_permitted = pytest.raises(torch.AcceleratorError, match="not permitted when stream is capt")
    with (
        pytest.raises(torch.AcceleratorError, match="previous error during capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        not_permitted,
    ):
        call(values, mask)


@case
def a_mask_that_chooses_is_counted_and_ends_a_capture() -> None:
    is_refused(lambda values, mask: values[mask])


@case
def a_mask_that_takes_values_of_the_device_is_counted_and_ends_a_capture() -> None:
    is_refused(lambda values, mask: values.index_put_((mask,), values[:1]))


@case
def a_mask_that_takes_one_number_of_the_hosts_is_captured() -> None:
    values, graph = rows(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values[values == 0] = 5.0
    values.zero_()
    graph.replay()
    assert values.tolist() == [5.0] * 3


def main(folder: Path) -> None:
    sim.enable("1GiB", device="cuda")
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
