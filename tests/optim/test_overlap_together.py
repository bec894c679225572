"""The bound of an overlapped step, from the allocator's journal: of two optimizers on one device,
and of one that gets a group of parameters later.
"""

import gc
import random
import struct

import pytest
import torch
from torch import nn

import residency
from residency_sim import dry_run

pytestmark = pytest.mark.sim
WIDTH, BUCKET, SLOTS = 128, 96 << 10, 2
_ENTRY = struct.Struct("<5q")


class Deep(nn.Module):
    """Layers whose passes take far more memory than their parameters."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Journal:
    """The allocator's journal: the most bytes so far, and what there was at the beginning."""

    def __init__(self) -> None:
        torch.accelerator.synchronize()
        dry_run.take_journal()
        self.now = self.highest = 0

    def read(self) -> int:
        for _, num_bytes, *_ in _ENTRY.iter_unpack(dry_run.take_journal()):
            self.now += num_bytes
            self.highest = max(self.highest, self.now)
        return self.highest


def rows(length, numbers, device):
    return torch.randn(length, WIDTH, generator=numbers).pin_memory().to(device, non_blocking=True)


def in_turns(nets, optimizers, batch):
    """Steps the discriminator, then the generator, whose gradients pass through the other."""
    generator, discriminator = nets
    losses = []
    for which in (1, 0):
        x = generator(batch())
        y = discriminator(x.detach() if which else x)
        loss = y.square().mean()
        if which:
            loss = loss - discriminator(batch()).mean()
        del x, y
        loss.backward()
        losses.append(loss.detach())
        optimizers[which].step()
        for each in optimizers:
            each.zero_grad()
    return losses


def in_one_pass(nets, optimizers, batch):
    """Steps both after one backward pass."""
    loss = nets[1](nets[0](batch())).square().mean()
    loss.backward()
    for each in optimizers:
        each.step()
    for each in optimizers:
        each.zero_grad()
    return [loss.detach()]


def several_of_one(nets, optimizers, batch):
    """Steps the discriminator three times before the generator."""
    losses = []
    for _ in range(2):
        loss = nets[1](nets[0](batch()).detach()).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizers[1].step()
        optimizers[1].zero_grad()
    return losses + in_turns(nets, optimizers, batch)


LOOPS = [in_turns, in_one_pass, several_of_one]


def trained(device, how, loop, depths, lengths):
    """Returns the most bytes up to each round, beyond those after a first one, which makes all
    state; the end of the run; and the state of each optimizer that was there at each round's steps.
    """
    torch.manual_seed(0)
    nets = [Deep(depth).to(device) for depth in depths]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    if how == "overlap":
        for each in optimizers:
            residency.offload_optimizer(each, bucket=BUCKET, slots=SLOTS, overlap=True)
    numbers = torch.Generator().manual_seed(1)
    longest = lengths[0]

    def batch():
        length = int(longest * (0.6 + 0.4 * torch.rand(1, generator=numbers).item()))
        return rows(length, numbers, device)

    losses = loop(nets, optimizers, batch)
    dry_run.keep_journal()
    journal, highest, ahead = Journal(), [], []
    for longest in lengths:  # noqa: B007  # `batch` reads it
        losses += loop(nets, optimizers, batch)
        highest.append(journal.read())
        if how == "overlap":
            ahead += [each.statistics().ahead_bytes for each in optimizers]
    values = [p.detach().cpu() for net in nets for p in net.parameters()]
    return highest, [*values, *(loss.cpu() for loss in losses)], ahead


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("depths", [(6, 3), (2, 7)])
@pytest.mark.parametrize("loop", LOOPS)
def test_two_optimizers_are_together_below_the_own_peak_of_the_run(device, loop, depths, grows):
    chance = random.Random(3)
    lengths = [chance.randint(100, 900) for _ in range(12)]
    if grows:
        lengths.sort()
    own, values, _ = trained(device, "resident", loop, depths, lengths)
    gc.collect()
    together, overlapped, ahead = trained(device, "overlap", loop, depths, lengths)
    assert any(ahead)
    for resident, with_state in zip(own, together, strict=True):
        assert with_state <= resident + 4096  # the slots are room for what these runs do not do
    assert all(torch.equal(a, b) for a, b in zip(values, overlapped, strict=True))


def trained_with_a_late_group(device, how, lengths, resident):
    torch.manual_seed(0)
    net, late = Deep(6).to(device), Deep(2).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if how == "overlap":
        settings = {"bucket": BUCKET, "slots": SLOTS, "resident": resident}
        residency.offload_optimizer(optimizer, overlap=True, **settings)
    numbers = torch.Generator().manual_seed(1)
    journal, highest = None, []
    for index, length in enumerate(lengths):
        if index == 1:
            dry_run.keep_journal()
            journal = Journal()
        if index == len(lengths) // 2:
            optimizer.add_param_group({"params": list(late.parameters()), "lr": 1e-3})
        loss = late(net(rows(length, numbers, device))).square().mean()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        if journal is not None:
            highest.append(journal.read())
    ahead = optimizer.statistics().ahead_bytes if how == "overlap" else 0
    return highest, [p.detach().cpu() for p in [*net.parameters(), *late.parameters()]], ahead


@pytest.mark.parametrize("seed", range(3))
def test_a_later_group_whose_state_stays_keeps_the_bound(device, seed):
    chance = random.Random(seed)
    lengths = [chance.randint(100, 300) for _ in range(6)]
    lengths += [chance.randint(100, 1200) for _ in range(6)]
    state = 8 * (WIDTH + 1) * WIDTH  # of a layer
    own, values, _ = trained_with_a_late_group(device, "resident", lengths, 0)
    gc.collect()
    # The state of four layers stays; that of the others and of the late group streams.
    together, overlapped, ahead = trained_with_a_late_group(
        device, "overlap", lengths, 4 * state + 4096
    )
    assert ahead > 0
    for resident, with_state in zip(own, together, strict=True):
        assert with_state <= resident + SLOTS * BUCKET + 4096
    assert all(torch.equal(a, b) for a, b in zip(values, overlapped, strict=True))
