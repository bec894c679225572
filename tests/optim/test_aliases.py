"""Parameters, gradients and buffers that share bytes, and hooks that change a state dict."""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

sys.path.insert(0, str(Path(__file__).parent))
from exchanged import FEW, everything

import residency


@pytest.mark.parametrize("make", [torch.Tensor.t, lambda t: t.repeat(1, 2)[:, ::2]])
def test_a_gradient_that_is_not_contiguous_is_changed_as_the_plain_step_changes_it(lab, make):
    results = []
    for offload in (False, True):
        parameters = lab.parameters(shapes=((128, 128), (64, 64)))
        optimizer = torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1
        )
        if offload:
            residency.offload_optimizer(optimizer, bucket=lab.bucket)
        gradients = []
        for step in range(3):
            lab.set_gradients(parameters, step, missing=False)
            for parameter in parameters:
                parameter.grad = make(parameter.grad)
            optimizer.step()
            gradients += [p.grad.cpu() for p in parameters]
        results.append([*gradients, *(p.detach().cpu() for p in parameters)])
    assert all(map(torch.equal, *results))


def _reset(state):
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _pop_and_set(state):
    state["exp_avg"] = state.pop("exp_avg").add(1)


def _halve(state):
    state["exp_avg"].mul_(0.5)


HOOKS = {
    "assigned": _reset,
    "a new key": lambda state: state.update(mark=1),
    "popped and set": _pop_and_set,
    "cleared": lambda state: state.clear(),
    "in place": _halve,
}


@pytest.mark.parametrize("change", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("is_before", [True, False])
def test_what_a_hook_of_state_dict_changes_stays_changed(lab, change, is_before):
    results = []
    for offload in (False, True):
        optimizer, parameters = lab.adamw(offload=offload)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        if is_before:
            hook = optimizer.register_state_dict_pre_hook(
                lambda o, p=parameters[0]: change(o.state[p])
            )
        else:
            hook = optimizer.register_state_dict_post_hook(
                lambda o, saved: change(saved["state"][0])
            )
        saved = optimizer.state_dict()["state"]
        hook.remove()
        assert all(type(values) is dict for values in saved.values())
        seen = {k: v.cpu().clone() if k != "mark" else v for k, v in saved[0].items()}
        lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
        results.append((seen, lab.read(optimizer, parameters)))
    (seen, after), (expected, plain) = results
    assert list(seen) == list(expected)
    assert all(torch.equal(torch.as_tensor(seen[k]), torch.as_tensor(expected[k])) for k in seen)
    lab.assert_equal(after, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_state_of_an_empty_parameter_is_saved_and_loaded(lab, dtype):
    parameters = lab.parameters(shapes=((0, 4), (4,)), dtype=dtype)
    optimizer = torch.optim.AdamW(parameters)
    residency.offload_optimizer(optimizer)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)["state"]
    assert loaded[0]["exp_avg"].shape == (0, 4)
    assert torch.equal(loaded[1]["exp_avg"], optimizer.state[parameters[1]]["exp_avg"])


def _tied(lab):
    (first, other) = lab.parameters(shapes=((64, 64), (64, 64)))
    return [first, other, torch.nn.Parameter(first.data)]


def _overlapping(lab):
    (flat,) = lab.parameters(shapes=((6000,),))
    return [torch.nn.Parameter(flat.data[:4000]), torch.nn.Parameter(flat.data[2000:])]


def _columns(lab):
    (flat,) = lab.parameters(shapes=((64, 64),))
    return [torch.nn.Parameter(flat.data[:, :40]), torch.nn.Parameter(flat.data[:, 30:])]


@pytest.mark.parametrize("place", FEW.values(), ids=FEW)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        (torch.optim.Adagrad, {"foreach": True}),
    ],
    ids=["AdamW", "SGD", "Adagrad"],
)
@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(each, marks=pytest.mark.races) for each in (_tied, _overlapping)),
        _columns,
        None,
    ],
)
def test_parameters_and_gradients_that_share_bytes_step_as_in_the_plain_list(
    lab, make, kind, options, place
):
    results = []
    for offload in (False, True):
        parameters = make(lab) if make else lab.parameters(shapes=((64, 64),) * 3)
        optimizer = kind(parameters, lr=1e-2, **({"foreach": True} | options))
        if offload:
            residency.offload_optimizer(optimizer, **place)
        for step in range(3):
            lab.set_gradients(parameters, step, missing=False)
            if make is None:
                parameters[2].grad = parameters[0].grad
            optimizer.step()
        results.append(everything(lab, optimizer, parameters))
    assert all(map(torch.equal, *results))


def test_parameters_that_share_bytes_get_no_master_each(lab):
    (first,) = lab.parameters(shapes=((64, 64),), dtype=torch.bfloat16)
    parameters = [first, torch.nn.Parameter(first.data)]
    before = first.detach().clone()
    with pytest.raises(residency.RefusedError, match="share bytes"):
        residency.offload_optimizer(torch.optim.AdamW(parameters), master_weights=True)
    assert torch.equal(first, before)


class _Handing(torch.optim.Optimizer):
    def __init__(self, parameters, **options):
        super().__init__(parameters, {"lr": 0.1})
        self.__dict__.update(options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self.one(parameter, self.state[parameter])


class _Shift(_Handing):
    def one(self, p, s):
        if not s:
            s["last"], s["before"] = torch.zeros_like(p), torch.zeros_like(p)
        p.sub_(0.1 * (p.grad + 0.5 * s["last"] + 0.25 * s["before"]))
        s["before"], s["last"] = s["last"], p.grad.clone()


class _PingPong(_Handing):
    def one(self, p, s):
        if not s:
            s["a"], s["b"] = torch.zeros_like(p), torch.zeros_like(p)
        s["a"].mul_(0.9).add_(p.grad)
        p.sub_(0.1 * (s["a"] - 0.5 * s["b"]))
        s["a"], s["b"] = s["b"], s["a"]


class _NewKey(_Handing):
    def one(self, p, s):
        s["now"] = s["now"] * 0.9 + p.grad if s else p.grad.clone()
        s["first"] = s.get("first", s["now"])
        p.sub_(0.1 * (s["now"] - 0.5 * s["first"]))


class _Alias(_Handing):
    def one(self, p, s):
        if not s:
            s["m"] = s["n"] = torch.zeros_like(p)
        s["m"].mul_(0.9).add_(p.grad)
        p.sub_(0.1 * s["n"])


class _Views(_Handing):
    def one(self, p, s):
        if not s:
            s["both"] = p.new_zeros(2, *p.shape)
            s["m"], s["v"] = s["both"].unbind()
        s["m"].mul_(0.9).add_(p.grad)
        s["v"].mul_(0.9).addcmul_(p.grad, p.grad)
        p.sub_(0.1 * s["both"][0] / (s["both"][1].sqrt() + 0.1))


class _KeptOutside(_Handing):
    def one(self, p, s):
        if not s:
            s["m"] = torch.zeros_like(p)
            self.kept[p] = s["m"]
        self.kept[p].mul_(0.9).add_(p.grad)
        p.sub_(0.1 * s["m"])


@pytest.mark.parametrize("kind", [_Shift, _PingPong, _NewKey])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_class_that_hands_its_buffers_on_steps_as_it_does_by_itself(lab, kind, slots):
    results = []
    for offload in (False, True):
        parameters = lab.parameters(shapes=((64, 64), (33,), (64, 64)))
        optimizer = kind(parameters)
        if offload:
            residency.offload_optimizer(optimizer, bucket="40KiB", slots=slots)
        lab.take_steps(optimizer, parameters, range(3), missing=False)
        kept = [] if kind is _PingPong else list(optimizer.state[parameters[0]].values())
        lab.take_steps(optimizer, parameters, range(3, 7), missing=False)
        results.append([*(v.cpu() for v in kept), *everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", [_Alias, _Views, _KeptOutside])
def test_a_class_that_keeps_one_buffer_under_two_names_is_refused_at_the_call(lab, kind):
    parameters = lab.parameters(shapes=((64, 64), (33,)))
    options = {"kept": {}} if kind is _KeptOutside else {}
    with pytest.raises(residency.RefusedError, match="cannot be offloaded"):
        residency.offload_optimizer(kind(parameters, **options))


def test_a_class_that_has_the_memory_of_several_parameters_is_refused_at_the_call(lab):
    flat = torch.ones(9000, device=lab.device)
    parameters = [torch.nn.Parameter(flat[:4000]), torch.nn.Parameter(flat[4000:])]
    with pytest.raises(residency.RefusedError, match="over the bytes of 2 of its parameters"):
        residency.offload_optimizer(_Shift(parameters, flat=flat))
    assert (flat == 1).all()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_state_dict_of_torch_on_the_host_is_a_copy_where_the_plain_one_is(lab, is_full):
    results = []
    for offload in (False, True):
        model = torch.nn.Linear(64, 64).to(lab.device)
        parameters = list(model.parameters())
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(0.5)
        optimizer = torch.optim.AdamW(parameters)
        if offload:
            residency.offload_optimizer(optimizer)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        options = StateDictOptions(cpu_offload=True, full_state_dict=is_full)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
        torch.accelerator.synchronize()
        results.append([v.clone() for v in saved["state"]["weight"].values() if v.dim()])
    assert all(map(torch.equal, *results))
