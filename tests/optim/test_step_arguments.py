"""A step takes what its class' own step takes; stock torch is the judge."""

import inspect
import random
import warnings

import pytest
import torch

import residency

SEEDS = range(10)


class Drawn(torch.optim.Optimizer):
    """Its ``step`` has a signature that is drawn; see ``made``."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.seen = []

    @torch.no_grad()
    def go(self, closure, scale, mode, shift):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = float(scale) * (0.5 if mode == "slow" else 1.0)
        factor *= 1.0 if loss is None else 1 + float(loss.detach().cpu())
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                if mode == "slow" and "slow" not in state:  # a state that an argument makes
                    state["slow"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad)
                p.add_(state["m"], alpha=-group["lr"] * factor).add_(shift or 0.0, alpha=0.01)
                if "slow" in state:
                    state["slow"].lerp_(p, 0.1)
        return loss


SIGNATURES = {
    "keywords": "self, closure=None, *, scale=1.0, mode=None, shift=None",
    "positions": "self, scale=1.0, mode=None, shift=None, closure=None",
    "no_names": "self, closure=None, scale=1.0, /, mode=None, shift=None",
    "other_name": "self, forward=None, scale=1.0, mode=None, shift=None",
    "all": "self, *args, **kwargs",
}


def made(device, kind):
    names = {}
    closure = "forward" if kind == "other_name" else "closure"
    body = f"self.go({closure}, scale, mode, shift)"
    if kind == "all":
        body = "self.go(args[0] if args else kwargs.get('closure'), kwargs.get('scale', 1.0), "
        body += "kwargs.get('mode'), kwargs.get('shift'))"
    exec(f"def step({SIGNATURES[kind]}):\n    return {body}", names)
    cls = type(f"Drawn_{kind}", (Drawn,), {"step": names["step"]})
    generator = torch.Generator().manual_seed(1)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for shape in ((6, 4), (5,), (3, 2))
    ]
    return parameters, cls([{"params": parameters[:1]}, {"params": parameters[1:]}])


def arguments(draw, kind, device, closure):
    """Returns the arguments of a call, those by position first."""
    scale = draw.choice([1.0, 0.25, torch.tensor(0.5), torch.tensor(0.5, device=device)])
    values = {"scale": scale, "mode": draw.choice(["slow", "fast"]), "shift": draw.choice([0, 1.5])}
    values = {name: value for name, value in values.items() if draw.random() < 0.6}
    name = "forward" if kind == "other_name" else "closure"
    by_name = {**values, **({name: closure} if draw.random() < 0.5 else {})}
    if kind == "keywords" and name in by_name and draw.random() < 0.5:
        return [by_name.pop(name)], by_name
    if kind == "positions" and "scale" in by_name:
        return [by_name.pop("scale")], by_name
    if kind == "no_names" and by_name.keys() & {"closure", "scale"}:
        given = by_name.pop("closure", None)
        return [given, by_name.pop("scale", 1.0)], by_name
    return [], by_name


def run(device, seed, is_offloaded):
    kind = list(SIGNATURES)[seed % len(SIGNATURES)]
    parameters, optimizer = made(device, kind)
    given = []
    optimizer.register_step_pre_hook(lambda _, args, kwargs: given.append((len(args), [*kwargs])))
    draw = random.Random(seed)
    begins = draw.choice([0, 2])
    losses = []
    evaluations = []

    def closure():
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in parameters)
        loss.backward()
        evaluations.append(torch.is_grad_enabled())
        return loss / 100

    for number in range(6):
        if is_offloaded and number == begins:
            residency.offload_optimizer(optimizer, bucket=64, slots=2)
        closure()
        evaluations.clear()
        args, kwargs = arguments(draw, kind, device, closure)
        loss = optimizer.step(*args, **kwargs)
        asked = closure in (*args, *kwargs.values())
        assert evaluations == [True] * asked
        losses.append(None if loss is None else float(loss.detach().cpu()))
    states = [v.detach().cpu() for p in parameters for v in dict(optimizer.state[p]).values()]
    return [*(p.detach().cpu() for p in parameters), *states], losses, given


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_takes_its_classs_own_arguments(device, seed):
    ours, our_losses, our_calls = run(device, seed, True)
    theirs, losses, calls = run(device, seed, False)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
    assert our_losses == losses
    assert our_calls == calls  # hooks see what they see without an offload


@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_step_says_that_it_takes_what_its_classs_own_takes(device, kind):
    _, plain = made(device, kind)
    parameters, optimizer = made(device, kind)
    optimizer = residency.offload_optimizer(optimizer)
    assert inspect.signature(optimizer.step) == inspect.signature(plain.step)
    parameters[0].grad = torch.ones_like(parameters[0])
    if kind != "all":
        with pytest.raises(TypeError, match="unknown"):
            optimizer.step(unknown=1)
    assert not optimizer.state[parameters[0]]


@pytest.mark.parametrize(
    "value",
    [
        [0.1, 0.2, 0.3],
        (0.1, 0.2),
        {"a": 1.0},
        torch.ones(3),
        torch.nn.Linear(1, 1),
        torch.Generator(),
        torch.amp.GradScaler("cpu"),
        lambda index: index,
        iter(()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_that_parts_cannot_be_given_is_refused_by_its_name(device, value):
    parameters, optimizer = made(device, "keywords")
    residency.offload_optimizer(optimizer)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(residency.RefusedError, match="'scale'"):
        optimizer.step(scale=value)
    assert all(map(torch.equal, before, parameters))
    optimizer.step(scale=0.5)
    assert not torch.equal(before[0], parameters[0])


class Coupling(torch.optim.Optimizer):
    """Couples its parameters, or evaluates its closure twice, where it is asked to."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None, *, most=None, out=None):
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        if closure is not None:
            for _ in range(2):
                with torch.enable_grad():
                    loss = closure()
                for p in parameters:
                    p.sub_(p.grad, alpha=0.1 * float(loss.detach().cpu()))
            return
        if most is not None:
            torch.nn.utils.clip_grad_norm_(parameters, most)
        for p in parameters:
            self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.sub_(self.state[p]["m"], alpha=0.1)
            if out is not None:
                out.add_(p.cpu().sum())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"most": 0.5}, "couples the parameters"),
        ({"closure": lambda: torch.ones(())}, "evaluates its closure more than once"),
        ({"out": torch.zeros(())}, "'out'"),
    ],
    ids=["most", "closure", "out"],
)
def test_an_argument_that_couples_the_parameters_is_found_before_the_step(device, given, reason):
    parameters = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (3, 4)]
    optimizer = residency.offload_optimizer(Coupling(parameters))
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(residency.RefusedError, match=reason):
        optimizer.step(**given)
    assert all(map(torch.equal, before, parameters))
    optimizer.step()


class TakesScaler(torch.optim.SGD):
    """Asks for the scaler by the name by which ``GradScaler`` finds out, as old classes do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        return super().step(closure)


def test_a_class_that_takes_the_scaler_itself_is_refused_with_nothing_stepped(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = residency.offload_optimizer(TakesScaler([p], lr=0.1))
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
    scaler.scale(p.sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.raises(residency.RefusedError, match="'grad_scaler'"):
            scaler.step(optimizer)
    assert p.tolist() == [1.0] * 3


class OnHost(torch.optim.Optimizer):
    """Keeps what it has on the host on purpose."""

    def __init__(self, params, dtype):
        super().__init__(params, {"lr": 0.1})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros(p.shape, dtype=self.dtype)
                    state["n"] = torch.zeros(())
                state["m"].mul_(0.9).add_(p.grad.cpu())
                state["n"].add_(1)
                p.sub_(state["m"].to(p.device, p.dtype), alpha=0.1 / float(state["n"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offload_at", [0, 2])
def test_a_class_that_keeps_its_state_on_the_host_keeps_it_there(device, dtype, offload_at):
    ends = []
    for is_offloaded in (False, True):
        parameters = [torch.nn.Parameter(torch.ones(n, 4, device=device)) for n in (3, 5)]
        optimizer = OnHost(parameters, dtype)
        for number in range(5):
            if is_offloaded and number == offload_at:
                residency.offload_optimizer(optimizer)
            if is_offloaded and number == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            sum((p * p).sum() for p in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [v for p in parameters for v in optimizer.state[p].values()]
        assert all(v.is_cpu for v in states)
        ends.append([*(p.detach().cpu() for p in parameters), *states])
    assert all(map(torch.equal, *ends))
