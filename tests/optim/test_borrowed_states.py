"""States that are something else, too: a gradient, a parameter, a value of a group, an argument.

Each seed draws a class whose state is such a thing, or a copy of one, from a step on. Stock torch
is the judge: an offload ends at its bits, or is refused with nothing changed; only where a later
step makes such a state, that step says so.
"""

import random

import pytest
import torch

import residency

SEEDS = range(16)
LATE = 9  # after what the trial sees


class Drawn(torch.optim.Optimizer):
    """Keeps a state that is drawn, or a copy of it, and steps by it."""

    def __init__(self, params, seed):
        super().__init__(params, {"lr": 0.1})
        draw = random.Random(seed)
        self.what = draw.choice(["gradient", "parameter", "counter", "list", "nothing"])
        self.view = draw.choice(["itself", "detached", "flat", "part", "nested"])
        self.is_copy = draw.random() < 0.35
        self.begins = draw.choice([0, 0, 2, LATE])
        self.steps = 0
        self.is_one_group = draw.random() < 0.5

    def source(self, p, group):
        found = {"gradient": p.grad, "parameter": p, "counter": group["t"]}.get(
            self.what, group["l"]
        )
        if isinstance(found, list):
            return list(found) if self.is_copy else found
        found = {"itself": found, "detached": found.detach(), "nested": found.detach()}.get(
            self.view, found.detach().view(-1)[: 2 if self.view == "part" else None]
        )
        found = found.detach().clone() if self.is_copy else found
        return [found] if self.view == "nested" else found

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group.setdefault("t", torch.zeros(())).add_(1)
            group.setdefault("l", []).append(len(group["l"]) + 1.0)
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad)
                if "x" in state:
                    x = state["x"][-1] if isinstance(state["x"], list) else state["x"]
                    x = x if isinstance(x, float) else float(x.sum().cpu())
                    state["m"].add_(x, alpha=0.01)
                is_due = self.what != "nothing" and self.steps > self.begins
                if is_due and (self.what == "gradient" or "x" not in state):
                    state["x"] = self.source(p, group)
                p.add_(state["m"], alpha=-group["lr"])

    @property
    def is_borrowing(self):
        return self.what != "nothing" and not self.is_copy


def made(device, seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for shape in ((6, 4), (5,), (3, 2))
    ]
    return parameters, Drawn([{"params": parameters[:1]}, {"params": parameters[1:]}], seed)


def step(parameters, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for p in parameters:
        gradient = torch.randn(p.shape, generator=generator).to(p.device)
        p.grad = gradient if p.grad is None else p.grad.add_(gradient)  # as backward passes add up
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def bits(parameters, optimizer):
    kept = [p.detach().cpu().clone() for p in parameters]
    for p in parameters:
        for value in dict(optimizer.state.get(p, {})).values():
            values = value if isinstance(value, list) else [value]
            kept += [torch.as_tensor(each).detach().cpu().clone() for each in values]
    return kept


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("offload_at", [0, 4])
def test_a_state_that_is_something_else_is_refused_or_steps_as_the_plain_one(
    device, seed, offload_at
):
    (theirs, plain), (ours, optimizer) = made(device, seed), made(device, seed)
    said = None
    for number in range(LATE + 4):
        step(theirs, plain, number)
        if number == offload_at:
            before = bits(ours, optimizer)
            try:
                residency.offload_optimizer(optimizer, bucket=64, slots=2)
            except residency.RefusedError as error:
                said = str(error)
                assert same(before, bits(ours, optimizer))
                assert type(optimizer) is Drawn
        if optimizer.is_borrowing and optimizer.begins == LATE == number and said is None:
            with pytest.raises(residency.ResidencyError, match="'x' is also"):
                step(ours, optimizer, number)
            return
        step(ours, optimizer, number)
        assert same(bits(theirs, plain), bits(ours, optimizer)), number
    assert (said is not None) == optimizer.is_borrowing, (said, vars(optimizer))


@pytest.mark.parametrize(
    ("what", "is_offloaded"),
    [
        *((what, False) for what in ("gradient", "parameter", "view", "rate")),
        *((what, True) for what in ("gradient", "parameter", "view")),  # torch copies saved rates
    ],
)
def test_a_state_of_torchs_own_class_that_a_caller_has_tied_is_refused(device, what, is_offloaded):
    p = torch.nn.Parameter(torch.ones(4, 3, device=device))
    optimizer = torch.optim.AdamW([p], lr=torch.tensor(0.1), foreach=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    tied = {
        "gradient": p.grad,
        "parameter": p.detach(),
        "view": p.detach().view(-1)[:12].view(4, 3),
        "rate": optimizer.param_groups[0]["lr"],
    }[what]
    key = "step" if what == "rate" else "exp_avg"
    if not is_offloaded:
        optimizer.state[p][key] = tied
        with pytest.raises(residency.RefusedError, match=f"'{key}' is also"):
            residency.offload_optimizer(optimizer)
        assert optimizer.state[p][key] is tied
        return
    saved = optimizer.state_dict()
    residency.offload_optimizer(optimizer)
    before = dict(optimizer.state[p])
    saved["state"][0] = {**saved["state"][0], key: tied}
    with pytest.raises(residency.RefusedError, match=f"'{key}' is also"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state[p].items())


def test_a_model_that_comes_from_the_host_with_a_tied_state_is_refused_at_its_step(device):
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = residency.offload_optimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data, p.grad = p.data.to(device), torch.ones(4, device=device)
    optimizer.state[p]["momentum_buffer"] = p.grad
    with pytest.raises(residency.RefusedError, match="'momentum_buffer' is also a gradient"):
        optimizer.step()
    assert optimizer.state[p]["momentum_buffer"] is p.grad
    assert torch.equal(p.detach().cpu(), torch.full((4,), 0.9))


def test_an_assignment_to_an_offloaded_state_gives_the_value_alone(device):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = residency.offload_optimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["momentum_buffer"] = p.grad
    p.grad.zero_()
    assert optimizer.state[p]["momentum_buffer"].tolist() == [1.0] * 4
