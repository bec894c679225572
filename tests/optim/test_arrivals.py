"""A tensor of the device that went home is known by its bytes; no other tensor is taken for it."""

import torch

from residency._optim._arrivals import Arrivals


class HostHome:
    """A home as far as an arrival needs one: its tensor."""

    def __init__(self, tensor):
        self.tensor = torch.empty_like(tensor, device="cpu")


def test_what_lies_on_the_host_or_counts_no_writes_is_not_remembered(device):
    arrivals = Arrivals()
    with torch.inference_mode():
        uncounted = torch.ones(4, device=device)
    for tensor in (torch.ones(4), uncounted):
        home = HostHome(tensor)
        arrivals.note(tensor, home)
        assert arrivals._by_storage == {}
        assert arrivals.find(tensor) is None
        assert arrivals.beside(tensor) == []


def test_the_newest_home_of_the_same_bytes_is_found(device):
    arrivals, tensor = Arrivals(), torch.ones(4, device=device)
    homes = [HostHome(tensor), HostHome(tensor)]
    for home in homes:
        arrivals.note(tensor, home)
    assert arrivals.find(tensor) == (homes[1], 0)
    assert [home for home, _ in arrivals.beside(tensor)] == [homes[1]]


def test_bytes_beside_others_in_one_storage_are_others(device):
    arrivals, whole = Arrivals(), torch.ones(8, device=device)
    left, right = whole[:4], whole[4:]
    home = HostHome(left)
    arrivals.note(left, home)
    assert arrivals.beside(right) == []
    assert arrivals.find(right) is None
    assert arrivals.beside(whole) == [(home, left.data_ptr())]


def test_what_was_written_since_is_another_state(device):
    arrivals, tensor = Arrivals(), torch.ones(4, device=device)
    home = HostHome(tensor)
    arrivals.note(tensor, home)
    tensor.add_(1)
    assert arrivals.find(tensor) is None
    assert arrivals.beside(tensor) == []
