"""Two names for the same bytes, and what callers keep, hand over or replace: as without an
offload."""

import collections
import copy
import io
import threading

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import residency
from residency._transfer import lending


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


def _swapped(optimizer, p, q, r):
    optimizer.state[p], optimizer.state[q] = optimizer.state[q], optimizer.state[p]


def _rotated(optimizer, p, q, r):
    state = optimizer.state
    state.update({p: state[q], q: state[r], r: state[p]})


def _keys_exchanged(optimizer, p, q, r):
    state = optimizer.state[p]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].sqrt_(), state["exp_avg"].abs_()


def _turned(optimizer, p, q, r):
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t()


def _turned_in_part(optimizer, p, q, r):
    state = optimizer.state[p]
    state["exp_avg"] = state["exp_avg"].t().contiguous().flip(0)


def _tensor_shared(optimizer, p, q, r):
    optimizer.state[p]["exp_avg"] = optimizer.state[q]["exp_avg"]


def _all_shared(optimizer, p, q, r):
    optimizer.state[p] = optimizer.state[q]


def _shared_and_parted(optimizer, p, q, r):
    _tensor_shared(optimizer, p, q, r)
    optimizer.state[p]["exp_avg"] = torch.ones_like(optimizer.state[q]["exp_avg"])


def _tensor_shared_back(optimizer, p, q, r):
    optimizer.state[r]["exp_avg"] = optimizer.state[p]["exp_avg"]


def _step_shared(optimizer, p, q, r):
    optimizer.state[p]["step"] = optimizer.state[r]["step"]


def _view_beside(optimizer, p, q, r):
    optimizer.state[p]["mine"] = optimizer.state[p]["exp_avg"].view(-1)[7:100]


def _view_of_another(optimizer, p, q, r):
    optimizer.state[q]["exp_avg"] = optimizer.state[r]["exp_avg"].view(-1)[:4096].view(64, 64)


def _through_numpy(optimizer, p, q, r):
    state = optimizer.state[p]
    state["exp_avg"] = torch.from_numpy(state["exp_avg"].cpu().numpy()).to(state["exp_avg"].device)


def _permuted(optimizer, p, q, r):
    saved = optimizer.state_dict()
    states = saved["state"]
    states[0], states[1] = states[1], states[0]
    optimizer.load_state_dict(saved)


def _loaded_over_a_copy(optimizer, p, q, r):
    saved = optimizer.state_dict()
    states = saved["state"]
    states[0], states[1] = states[1], copy.deepcopy(states[0])
    optimizer.load_state_dict(saved)


def _popped_and_given_on(optimizer, p, q, r):
    taken = optimizer.state.pop(p)
    optimizer.state[p] = optimizer.state.pop(q)
    optimizer.state[q] = taken


def _another_mapping(optimizer, p, q, r):
    state = optimizer.state
    optimizer.state = collections.defaultdict(dict, {p: state[q], q: state[p], r: dict(state[r])})


MOVES = [
    _swapped, _rotated, _keys_exchanged, _turned, _turned_in_part, _tensor_shared,
    _tensor_shared_back, _all_shared, _shared_and_parted, _step_shared, _view_beside,
    _view_of_another, _through_numpy, _permuted, _loaded_over_a_copy, _popped_and_given_on,
    _another_mapping,
]  # fmt: skip
PLACES = {
    "streamed": {},
    "one slot": {"slots": 1, "bucket": "4KiB"},
    "cut": {"bucket": "20KiB"},
    "resident in part": {"bucket": "20KiB", "resident": "33KiB"},
    "resident": {"resident": "1MiB"},
    "not pinned": {"pin": False, "bucket": "20KiB"},
}


def _three(lab, offload, kind=torch.optim.AdamW, place=None, **options):
    parameters = lab.parameters(shapes=((64, 64),) * 3)
    optimizer = kind(parameters, lr=1e-2, **options)
    if offload:
        residency.offload_optimizer(optimizer, **(place or {}))
    return optimizer, parameters


def _everything(lab, optimizer, parameters):
    seen = lab.read(optimizer, parameters)
    return [*seen.parameters, *(v for s in seen.state for v in s.values() if torch.is_tensor(v))]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("move", MOVES)
def test_states_that_callers_exchange_are_those_of_the_plain_optimizer(lab, move, place):
    results = []
    for offload in (False, True):
        optimizer, parameters = _three(lab, offload, place=place, foreach=False)
        for steps in (range(2), range(2, 4), range(4, 6)):
            lab.take_steps(optimizer, parameters, steps, missing=False)
            if steps.start == 0:
                move(optimizer, *parameters)
        results.append(_everything(lab, optimizer, parameters))
    plain, streamed = results
    assert len(plain) == len(streamed)
    assert all(map(torch.equal, plain, streamed))


FEW = {name: PLACES[name] for name in ("one slot", "cut", "resident in part")}
KEEPERS = {
    "a state": lambda o, p: o.state[p]["exp_avg"],
    "a view": lambda o, p: o.state[p]["exp_avg"].view(-1)[5:],
    "an array": lambda o, p: (
        torch.from_numpy(o.state[p]["exp_avg"].numpy())
        if o.state[p]["exp_avg"].is_cpu
        else o.state[p]["exp_avg"]
    ),
    "a state dict": lambda o, p: o.state_dict()["state"][0]["exp_avg"],
    "a copy of the mapping": lambda o, p: dict(o.state[p])["exp_avg"],
    "an item": lambda o, p: dict(o.state[p].items())["exp_avg"],
    "step": lambda o, p: o.state[p]["step"],
}


@pytest.mark.parametrize("place", FEW.values(), ids=FEW)
@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_what_a_caller_keeps_is_the_live_state_to_read_and_to_write(lab, keep, place):
    results = []
    for offload in (False, True):
        optimizer, parameters = _three(lab, offload, place=place)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        kept = keep(optimizer, parameters[0])
        seen = []
        for step in range(2, 5):
            lab.take_steps(optimizer, parameters, [step], missing=False)
            seen.append(kept.cpu().clone())  # with no new look at the state
            kept.mul_(0.5)
        del kept
        lab.take_steps(optimizer, parameters, range(5, 7), missing=False)
        results.append([*seen, *_everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("share", ["one tensor", "a view"])
@pytest.mark.parametrize("look", ["read", "write", "snapshot"])
def test_a_state_is_whole_where_a_step_took_it_under_its_other_name_alone(lab, share, look):
    results = []
    for offload in (False, True):
        parameters = lab.parameters(shapes=((64, 64), (64, 64)))
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
        if offload:
            residency.offload_optimizer(optimizer, bucket=lab.bucket)
        lab.take_steps(optimizer, parameters, range(1), missing=False)
        first, second = (optimizer.state[p] for p in parameters)
        state = second["momentum_buffer"]
        first["momentum_buffer"] = state if share == "one tensor" else state.view(-1).view(64, 64)
        del first, second, state
        for step in range(1, 3):
            lab.set_gradients(parameters, step, missing=False)
            parameters[0].grad = None  # so that the step takes the other one alone
            optimizer.step()
            if look == "snapshot":
                taken = residency.snapshot({"first": optimizer.state[parameters[0]]})
                results.append(taken.tree["first"]["momentum_buffer"].cpu().clone())
                continue
            state = optimizer.state[parameters[0]]["momentum_buffer"]
            results.append(state.cpu().clone())
            if look == "write":
                state.mul_(0.5)
            del state
        results += [p.detach().cpu() for p in parameters]
    plain, ours = results[: len(results) // 2], results[len(results) // 2 :]
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize("bucket", ["4KiB", "64KiB"], ids=["cut", "whole"])
@pytest.mark.parametrize("share", ["one tensor", "a view"])
@pytest.mark.parametrize("kept", ["snapshot", "snapshot and state"])
def test_a_shared_state_that_a_step_moves_off_a_snapshots_bytes_stays_shared(
    lab, kept, share, bucket
):
    results = []
    for offload in (False, True):
        parameters = lab.parameters(shapes=((64, 64),) * 3)
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=False)
        if offload:
            residency.offload_optimizer(optimizer, bucket=bucket)
        lab.take_steps(optimizer, parameters, range(1), missing=False)
        taken = []
        for step in range(1, 10):
            if step in (1, 3, 6):
                taken.append(residency.snapshot({"optimizer": optimizer}))
            if step == 1:
                first, second, _ = (optimizer.state[p] for p in parameters)
                state = second["momentum_buffer"]
                is_view = share == "a view"
                first["momentum_buffer"] = state.view(-1).view(64, 64) if is_view else state
                taken += [state] if kept == "snapshot and state" else []
                del first, second, state
            # Whoever of the two has no gradient must find what the other's step has written.
            lab.set_gradients(parameters, step, missing=False)
            if step % 3:
                parameters[step % 3 - 1].grad = None
            optimizer.step()
        results.append(_everything(lab, optimizer, parameters))
        seen = [taken.tree for taken in taken if not torch.is_tensor(taken)]
        results[-1] += [s["optimizer"]["state"][0]["momentum_buffer"].cpu() for s in seen]
    assert all(map(torch.equal, *results))


def test_a_step_leaves_bytes_that_are_lent_as_part_of_another_state(lab):
    parameters = lab.parameters(shapes=((32, 64), (64, 64)))
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    residency.offload_optimizer(optimizer)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    part, whole = (optimizer.state[parameter] for parameter in parameters)
    part["momentum_buffer"] = whole["momentum_buffer"][8:40]
    whole.fence()  # the home is now in the memory of the tensor that was shown
    lent, borrower = whole.homes_by_key["momentum_buffer"].tensor, object()
    before = lent.clone()
    lending.lend(lent, borrower, keep=True)
    parameters[1].grad = None
    optimizer.step()
    assert torch.equal(lent, before)
    assert not torch.equal(whole["momentum_buffer"], before)
    lending.give_back(lent, borrower)


@pytest.mark.parametrize("kept", ["a state", "a view", "both"])
@pytest.mark.parametrize(
    "how",
    ["save, then look", "look, then save", "snapshot, then look", "look, then snapshot", "no tree"],
)
def test_what_a_caller_keeps_is_live_whatever_keeps_the_bytes(lab, tmp_path, kept, how):
    results = []
    for offload in (False, True):
        optimizer, parameters = _three(lab, offload)
        lab.take_steps(optimizer, parameters, range(1), missing=False)
        taken, seen = None, []
        for action in how.split(", then ") if "then" in how else ("snapshot", "look"):
            if action == "look":
                state = optimizer.state[parameters[0]]["exp_avg"]
                seen += [state] if kept != "a view" else []
                seen += [state.view(-1)[7:]] if kept != "a state" else []
                del state
            elif offload and action == "save":
                taken = residency.Checkpointer(tmp_path)
                taken.save(1, {"optimizer": optimizer})
            elif offload:
                taken = residency.snapshot({"optimizer": optimizer})
                taken = None if how == "no tree" else taken.tree
        values = []
        for step in range(1, 4):
            lab.take_steps(optimizer, parameters, [step], missing=False)
            values += [each.cpu().clone() for each in seen]  # with no new look at the state
            seen[0].mul_(0.5)
        if how.endswith("save"):
            taken = taken.close() if offload else None
        results.append([*values, *_everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))


def test_a_step_waits_for_a_save_of_bytes_of_which_a_caller_has_a_view(lab):
    optimizer, parameters = _three(lab, True)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    optimizer._residency.host.homes.arena.make_room(
        [1 << 20]
    )  # into which steps go on beside a save
    whole, part = (optimizer.state[p]["exp_avg"] for p in parameters[:2])
    part = part[1:]
    home = optimizer.state.peek(parameters[1]).homes_by_key["exp_avg"]
    lending.lend(home.tensor, "a save")
    ended = []

    def end():
        ended.append(True)
        lending.give_back(home.tensor, "a save")

    timer = threading.Timer(0.2, end)
    timer.start()
    lab.take_steps(optimizer, parameters, [1], missing=False)
    assert ended
    timer.join()
    assert torch.equal(part, optimizer.state[parameters[1]]["exp_avg"][1:])
    assert whole is optimizer.state[parameters[0]]["exp_avg"]


def test_a_step_waits_only_while_a_caller_has_a_state(lab):
    optimizer, parameters = _three(lab, True)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    optimizer.state_dict()  # looked at, and not kept
    homes = optimizer._residency.host.homes
    optimizer.step()
    assert not homes.held()
    kept = optimizer.state[parameters[0]]["exp_avg"].t()
    assert len(homes.held()) == 1
    optimizer.step()
    assert homes.newest.query()
    del kept
    assert not homes.held()
    optimizer.step()
    if lab.device.type == "sim":
        assert not homes.newest.query()  # nothing has made the host wait for it


REPLACEMENTS = {
    "share_memory": lambda t: t.share_memory_(),
    "data": lambda t: setattr(t, "data", torch.full_like(t, 0.25)),
    "set_": lambda t: t.set_(torch.full_like(t, 0.25)),
    "data of other strides": lambda t: setattr(t, "data", torch.full_like(t, 0.25).t()),
    "data with gaps": lambda t: setattr(t, "data", t.new_full((64, 128), 0.25)[:, ::2]),
}


@pytest.mark.parametrize("place", FEW.values(), ids=FEW)
@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_memory_that_a_caller_puts_at_a_state_is_the_state(lab, replace, place):
    results = []
    for offload in (False, True):
        optimizer, parameters = _three(lab, offload, torch.optim.Adagrad, place)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        replace(optimizer.state[parameters[1]]["sum"])
        saved = optimizer.state_dict()["state"][1]["sum"]
        seen = [saved.cpu().clone()]
        lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
        seen.append(saved.cpu().clone())
        results.append([*seen, *_everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))


def _exchanged(state, p, q):
    # Python assigns from left to right: for a moment no entry has q's.
    state[q]["exp_avg"], state[p]["exp_avg"] = state[p]["exp_avg"], state[q]["exp_avg"]


def _out_and_back(state, p, q):
    taken = state[q].pop("exp_avg")
    state[q]["exp_avg"] = taken


def _out_and_elsewhere(state, p, q):
    taken = state.pop(q)
    state[p]["exp_avg"] = taken["exp_avg"]
    state[q] = {**taken, "exp_avg": torch.zeros_like(taken["exp_avg"])}


def _replaced_and_in_turned(state, p, q):
    taken = state[q]["exp_avg"]
    state[q]["exp_avg"] = torch.ones_like(taken)
    state[p]["exp_avg"] = taken.t()


WAYS = [_exchanged, _out_and_back, _out_and_elsewhere, _replaced_and_in_turned]


@pytest.mark.parametrize("replace", [None, "share_memory", "set_", "data of other strides"])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_no_entry_has_for_a_while_is_live_again_in_its_next(lab, way, replace):
    results = []
    place = FEW["resident in part"]
    for offload in (False, True):
        optimizer, parameters = _three(lab, offload, place=place, foreach=False)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        kept = optimizer.state[parameters[1]]["exp_avg"]
        if replace is not None:
            REPLACEMENTS[replace](kept)
        lab.take_steps(optimizer, parameters, [2], missing=False)
        way(optimizer.state, *parameters[:2])
        seen = []
        for step in range(3, 6):
            lab.take_steps(optimizer, parameters, [step], missing=False)
            seen.append(kept.cpu().clone())
            kept.mul_(0.5)
        results.append([*seen, *_everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))


def test_a_load_leaves_alone_what_a_caller_has_kept(lab):
    results = []
    for offload in (False, True):
        optimizer, parameters = _three(lab, offload)
        lab.take_steps(optimizer, parameters, range(2), missing=False)
        before = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(before))
        frozen = optimizer.state[parameters[1]]["exp_avg"]
        optimizer.state[parameters[1]]["exp_avg"] = torch.zeros_like(parameters[1])
        lab.take_steps(optimizer, parameters, range(2, 4), missing=False)
        results.append([t.cpu().clone() for t in (frozen, before["state"][0]["exp_avg"])])
        optimizer.load_state_dict(before)
        lab.take_steps(optimizer, parameters, range(4, 6), missing=False)
        results[-1] += _everything(lab, optimizer, parameters)
    assert all(map(torch.equal, *results))


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
@pytest.mark.parametrize("make", [_tied, _overlapping, _columns, None])
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
        results.append(_everything(lab, optimizer, parameters))
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
        results.append([*(v.cpu() for v in kept), *_everything(lab, optimizer, parameters)])
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
