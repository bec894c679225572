"""What scripts do with the numbers that they read, in dry mode: it ends, and it does not raise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from residency import sim
from residency_sim import dry_run

pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity="1GiB", schedule="late", check_races=False),
]


@pytest.fixture(autouse=True)
def dry() -> None:
    sim.enable("1GiB", dry=True)


def unknown(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that no program has put there: of few, the numbers that are drawn are known."""
    return torch.rand((100, *shape), device="sim")[0].mul(4).to(dtype)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = functional.cross_entropy(model(unknown((4, 8))), torch.zeros(4, **INDEX))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


INDEX = {"dtype": torch.long, "device": "sim"}


def _training() -> Callable[[], torch.Tensor]:
    model = torch.nn.Linear(8, 4, device="sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: _step(model, optimizer)


# --------------------------------------------------------------------------------- loops that end


def while_the_loss_is_large() -> None:
    step = _training()
    loss = step()
    while loss.item() > 1e-3:
        loss = step()


def while_the_loss_on_the_host_is_large() -> None:
    step = _training()
    loss = step()
    while loss.detach().cpu().numpy() > 1e-3:
        loss = step()


def while_the_loss_on_the_device_is_large() -> None:
    loss = unknown(())
    while loss > 1e-3:
        loss = unknown(())


def until_an_error_is_small() -> None:
    while True:
        error = unknown((3,)).norm()
        if error.item() < 1e-6:
            break


def until_an_error_on_the_device_is_small() -> None:
    while not unknown((3,)).norm() < 1e-6:
        pass


def until_all_have_converged() -> None:
    while not (unknown((3,)) < 1e-6).all():
        pass


def while_some_are_left() -> None:
    remaining = unknown((3,))
    while (remaining > 0).any():
        remaining = remaining - 1


def while_a_count_is_not_zero() -> None:
    while unknown((3,), dtype=torch.long).sum().item() > 0:
        pass


def until_the_loss_stops_to_change() -> None:
    before, now = math.inf, 0.0
    while abs(before - now) > 1e-4:
        before, now = now, unknown(()).item()


def for_as_many_as_the_largest() -> None:
    assert len(list(range(unknown((3,), dtype=torch.long).max()))) == 1


def early_stopping() -> None:
    best, patience, stale = math.inf, 3, 0
    while stale < patience:
        loss = unknown(()).item()
        stale = 0 if loss < best else stale + 1
        best = min(best, loss)


def early_stopping_on_the_device() -> None:
    best, stale = torch.tensor(math.inf, device="sim"), 0
    while stale < 3:
        loss = unknown(())
        stale = 0 if loss < best else stale + 1
        best = torch.minimum(best, loss)


def generate_until_all_sequences_have_ended() -> None:
    """As transformers does."""
    tokens = torch.zeros(2, 3, **INDEX)
    unfinished = torch.ones(2, **INDEX)
    finished = False
    while not finished:
        following = unknown((2, 9)).softmax(-1).multinomial(1)
        tokens = torch.cat([tokens, following * unfinished[:, None]], dim=1)
        is_long = torch.full((2,), tokens.shape[1] >= 8, device="sim", dtype=torch.bool)
        has_ended = torch.isin(tokens[:, -1], torch.tensor([5, 6], device="sim"))
        unfinished = unfinished & ~(is_long | has_ended)
        finished = unfinished.max() == 0
    assert tokens.shape == (2, 8)


# --------------------------------------------------------------------------- numbers as such


def tokens_by_the_sum_of_a_mask() -> None:
    mask = unknown((4, 6)) > 1
    assert mask.sum().item() == 24  # as it is true everywhere
    assert math.isfinite((unknown((4, 6)) * mask).sum().item() / mask.sum().item())
    assert int((unknown((4, 6)) != -100).sum()) == 24
    assert (24 / mask.sum()).shape == ()


def logarithms_and_exponentials() -> None:
    loss = unknown(())
    assert math.log(loss.item()) == 0.0
    assert math.exp(loss) == math.e
    assert math.log(loss.cpu().item()) == 0.0
    assert torch.exp(loss).item() == 1.0
    assert 1 / loss.tolist() == 1.0


def conversions() -> None:
    assert int(unknown(())) == 1
    assert float(unknown((1,))) == 1.0
    assert bool(unknown(())) is True
    assert unknown((2, 2)).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert f"{unknown(()):.2f}" == "1.00"
    assert [0, 1, 2][unknown((5,)).argmax()] == 1
    assert len(torch.zeros(unknown((), dtype=torch.long))) == 1


# -------------------------------------------------------------------------------------- checks


def checks_for_nan_and_infinity() -> None:
    loss = unknown(())
    x = unknown((4, 6))
    assert not torch.isnan(loss)
    assert not torch.isinf(loss)
    assert not x.isnan().any()
    assert torch.isnan(x).sum().item() == 0
    assert torch.isfinite(x).all()
    assert torch.isfinite(loss)
    assert not (~torch.isfinite(x)).any()
    assert not (torch.isnan(x) | torch.isinf(x)).any()
    assert not loss != loss  # noqa: SIM202
    assert not np.isnan(loss.item())
    assert loss.item() != float("inf")
    assert math.isfinite(loss)


def checks_of_a_range() -> None:
    x = unknown((4, 6), dtype=torch.long)
    assert (x < 10).all()
    assert ((x >= 0) & (x < 10)).all()
    assert x.max() < 10
    assert x.min() >= 0
    assert not (x >= 10).any()
    assert (x != -100).sum() > 0


def checks_of_distributions() -> None:
    logits = unknown((4, 6))
    action = torch.distributions.Categorical(logits=logits).sample()
    assert torch.distributions.Categorical(logits=logits).log_prob(action).shape == (4,)
    counts = torch.distributions.Poisson(logits.exp()).sample()
    assert torch.distributions.Poisson(logits.exp()).log_prob(counts).shape == (4, 6)
    assert torch.distributions.Binomial(3, logits=logits).log_prob(counts).shape == (4, 6)
    assert (action % 1 == 0).all()
    assert not (action % 2 == 0).any()


# ------------------------------------------------------------- choices and what is done with them


def samples_and_ranks() -> None:
    logits = unknown((3, 9))
    assert torch.multinomial(logits.softmax(-1), 2).shape == (3, 2)
    values, indices = logits.topk(4)
    assert (values.shape, indices.shape) == ((3, 4), (3, 4))
    logits[logits < values[:, [-1]]] = -math.inf
    table = unknown((9, 5))
    assert table[logits.argmax(-1)].shape == (3, 5)
    assert table[logits[0].argmax().item()].shape == (5,)


def masks_and_unique_labels() -> None:
    labels = unknown((4, 6), dtype=torch.long)
    mask = labels != -100
    assert labels[mask].shape == (24,)
    assert functional.cross_entropy(unknown((4, 6, 9))[mask], labels[mask]).shape == ()
    assert torch.unique(labels).tolist() == [1]  # one class, in which all are
    for label in torch.unique(labels):
        assert unknown((4, 6))[labels == label].numel() == 24


def metrics_on_the_host() -> None:
    logits, labels = unknown((8, 3)), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1], device="sim")
    predicted = logits.argmax(-1).cpu().numpy()
    expected = labels.cpu().numpy()
    assert (predicted == expected).mean() == 3 / 8  # the labels are known, the predictions ones
    positives = ((predicted == 1) & (expected == 1)).sum()
    precision, recall = positives / (predicted == 1).sum(), positives / (expected == 1).sum()
    assert 2 * precision * recall / (precision + recall) > 0
    assert np.log(logits.cpu().numpy()).sum() == 0.0
    assert [["cat", "dog", "bird"][i] for i in predicted.tolist()] == ["dog"] * 8


def masks_on_the_host() -> None:
    scores = unknown((8, 3))
    keep = (scores > 0.5).cpu()
    assert keep.all()
    assert scores.cpu()[keep].mean() == 1.0  # of no element it would be no number
    assert scores.cpu().numpy()[keep.numpy()].max() == 1.0
    assert sum((scores[:, 0] > scores[:, 1]).tolist()) / 8 == 1.0
    assert not torch.isnan(scores).cpu().any()
    assert not (scores == 0).cpu().any()
    while (unknown((4,)) > 0.5).cpu().any():
        pass  # it ends: after many questions no element is chosen


# --------------------------------------------------------------------------- what is known


def checks_of_whole_numbers_that_are_zero() -> None:
    lengths = unknown((4,), dtype=torch.long)
    heard: list[str] = []
    dry_run.attach_guess_observer(lambda what, numel: heard.append(what))
    try:
        assert not (lengths == 0).any()
        assert (lengths == 0).sum().item() == 0
        assert heard == ["False", "0"]  # none is taken to be 0, which is no more than likely
        assert not (unknown((4,)) == 0).any()
        assert not torch.isnan(unknown((4,))).any()
        assert len(heard) == 2
    finally:
        dry_run.attach_guess_observer(None)


def what_was_copied_from_the_host() -> None:
    sizes = torch.tensor([3, 5, 7]).to("sim")
    assert sizes.tolist() == [3, 5, 7]
    assert sizes[1].item() == 5
    assert [part.shape[0] for part in unknown((15,)).split(sizes.tolist())] == [3, 5, 7]
    assert sizes.float().cpu().tolist() == [3.0, 5.0, 7.0]
    assert sizes.clone()[2].item() == 7
    sizes.add_(unknown((3,), dtype=torch.long))
    assert sizes.tolist() == [1, 1, 1]  # a placeholder again


def what_is_computed_from_what_is_known() -> None:
    sizes = torch.tensor([3, 5, 7], device="sim")
    assert sizes.cumsum(0).tolist() == [3, 8, 15]
    assert sizes.max().item() == 7
    assert (sizes > 4).tolist() == [False, True, True]
    steps = torch.zeros((), device="sim")
    for _ in range(3):
        steps += 1
    assert steps.item() == 3.0
    assert torch.arange(3, device="sim").tolist() == [0, 1, 2]
    assert torch.full((2,), 7, device="sim").tolist() == [7, 7]


def sums_of_few_fractions_in_the_order_of_their_layout() -> None:
    row = torch.linspace(0, 128, 50)
    for lies in (row.expand(2, 50), row.reshape(5, 10).T, torch.stack([row, row])):
        there = row.to("sim").expand(2, 50) if lies.stride(0) == 0 else lies.to("sim")
        assert there.stride() == lies.stride()
        assert there.mean().item() == lies.mean().item()


def sizes_of_what_is_known() -> None:
    labels = torch.tensor([2, -100, 2, 0], device="sim")
    mask = labels != -100
    assert labels[mask].tolist() == [2, 2, 0]
    assert unknown((4, 5))[mask].shape == (3, 5)
    assert labels.masked_select(mask).shape == (3,)
    assert unknown((2, 4)).masked_select(mask).shape == (6,)
    assert mask.nonzero().shape == (3, 1)
    assert labels.unique().tolist() == [-100, 0, 2]
    assert labels[mask].bincount().tolist() == [1, 0, 2]
    assert unknown((2, 3)).repeat_interleave(labels[::2], dim=0).shape == (4, 3)
    assert torch.equal(mask, labels >= 0)
    assert not torch.equal(mask, labels > 0)
    assert unknown((3, 3))[torch.zeros(3, 3, dtype=torch.bool, device="sim")].shape == (0,)


def whole_numbers_of_a_batch() -> None:
    positions = torch.arange(2048, device="sim").expand(4, -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)  # as transformers does
    assert ((steps != 1).cumsum(-1)[:, -1] == 0).all()
    packed = positions % 1024
    steps = torch.diff(packed, prepend=packed[:, :1] - 1, dim=-1)
    assert not ((steps != 1).cumsum(-1)[:, -1] == 0).all()
    mask = torch.ones(16, 512, **INDEX)
    assert mask.sum() == mask.numel()
    mask[3, 100:] = 0
    mask[:, 0] = 0
    assert mask.sum().item() == 16 * 511 - 412
    labels = functional.pad(packed, (0, 1), value=-100)[:, 1:]
    assert (labels == -100).sum().item() == 4
    assert unknown((4, 2048))[labels != -100].shape == (4 * 2047,)
    assert torch.full((2, 4096), 7, **INDEX).sum().item() == 2 * 4096 * 7
    assert torch.arange(1 << 20, device="sim")[3].item() == 1  # too many: a placeholder


def few_random_numbers_are_drawn() -> None:
    assert all(3 <= each < 4 for each in torch.zeros(3, device="sim").uniform_(3, 4).tolist())
    assert torch.zeros(99, device="sim").uniform_(3, 4).tolist() == [1.0] * 99
    assert set(torch.zeros(9, device="sim").bernoulli_(0.5).tolist()) <= {0.0, 1.0}


IDIOMS = [
    while_the_loss_is_large,
    while_the_loss_on_the_device_is_large,
    while_the_loss_on_the_host_is_large,
    until_an_error_is_small,
    until_an_error_on_the_device_is_small,
    until_all_have_converged,
    while_some_are_left,
    while_a_count_is_not_zero,
    until_the_loss_stops_to_change,
    for_as_many_as_the_largest,
    early_stopping,
    early_stopping_on_the_device,
    generate_until_all_sequences_have_ended,
    tokens_by_the_sum_of_a_mask,
    logarithms_and_exponentials,
    conversions,
    checks_for_nan_and_infinity,
    checks_of_a_range,
    checks_of_distributions,
    samples_and_ranks,
    masks_and_unique_labels,
    metrics_on_the_host,
    masks_on_the_host,
    what_was_copied_from_the_host,
    what_is_computed_from_what_is_known,
    sums_of_few_fractions_in_the_order_of_their_layout,
    sizes_of_what_is_known,
    whole_numbers_of_a_batch,
    checks_of_whole_numbers_that_are_zero,
    few_random_numbers_are_drawn,
]


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_an_idiom_ends_in_dry_mode(idiom: Callable[[], None]) -> None:
    idiom()
