"""An offload leaves the global generators alone, and lets others draw from them meanwhile."""

import random
import threading

import numpy
import pytest
import torch

import residency


class Threaded(torch.optim.SGD):
    """A class from outside of torch, while a thread draws, as a loader's does."""

    def step(self, closure=None):
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        super().step(closure)
        thread.join()


class Drawing(torch.optim.SGD):
    def step(self, closure=None):
        torch.rand(3)
        super().step(closure)


class OwnGenerator(torch.optim.SGD):
    def step(self, closure=None):
        torch.rand(3, generator=torch.Generator().manual_seed(0))
        super().step(closure)


class Coupling(torch.optim.SGD):
    """Draws from other generators, and couples the parameters by that."""

    def step(self, closure=None):
        factor = random.random() + numpy.random.rand()
        for group in self.param_groups:
            for each in group["params"]:
                each.data.mul_(factor)


def made(kind, device):
    model = torch.nn.Linear(8, 8).to(device)
    model(torch.ones(1, 8, device=device)).sum().backward()
    return kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Threaded, OwnGenerator])
def test_draws_of_another_thread_and_of_an_own_generator_are_no_draws_of_a_step(device, kind):
    assert residency.offload_optimizer(made(kind, device)) is not None


def test_what_another_thread_draws_in_a_trial_is_not_drawn_again(device):
    optimizer = made(Threaded, device)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    residency.offload_optimizer(optimizer)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", [Drawing, Coupling])
def test_a_refusal_leaves_each_generator_as_it_was(device, kind):
    optimizer = made(kind, device)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(residency.RefusedError):
        residency.offload_optimizer(optimizer)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
