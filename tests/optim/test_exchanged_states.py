"""States that callers exchange, replace or give on are those of the plain optimizer."""

import collections
import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from exchanged import FEW, PLACES, everything, three


def _swapped(optimizer, p, q, r):
    optimizer.state[p], optimizer.state[q] = optimizer.state[q], optimizer.state[p]


def _rotated(optimizer, p, q, r):
    state = optimizer.state
    state.update({p: state[q], q: state[r], r: state[p]})


def _keys_exchanged(optimizer, p, q, r):
    # Exact arithmetic: ours is the processor's, and the plain optimizer's the device's, whose roots
    # differ.
    state = optimizer.state[p]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].mul_(8), state["exp_avg"].abs_()


def _turned(optimizer, p, q, r):
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t()


def _turned_in_part(optimizer, p, q, r):
    state = optimizer.state[p]
    state["exp_avg"] = state["exp_avg"].t().contiguous().flip(0)


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
    _swapped, _rotated, _keys_exchanged, _turned, _turned_in_part, _through_numpy, _permuted,
    _loaded_over_a_copy, _popped_and_given_on, _another_mapping,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("move", MOVES)
def test_states_that_callers_exchange_are_those_of_the_plain_optimizer(lab, move, place):
    results = []
    for offload in (False, True):
        optimizer, parameters = three(lab, offload, place=place, foreach=False)
        for steps in (range(2), range(2, 4), range(4, 6)):
            lab.take_steps(optimizer, parameters, steps, missing=False)
            if steps.start == 0:
                move(optimizer, *parameters)
        results.append(everything(lab, optimizer, parameters))
    plain, streamed = results
    assert len(plain) == len(streamed)
    assert all(map(torch.equal, plain, streamed))


def _exchanged(state, p, q):
    # Python assigns from left to right: for a moment no entry has q's.
    state[q]["exp_avg"], state[p]["exp_avg"] = state[p]["exp_avg"], state[q]["exp_avg"]


def _out_and_back(state, p, q):
    taken = state[q].pop("exp_avg")
    state[q]["exp_avg"] = taken


@pytest.mark.parametrize("way", [_exchanged, _out_and_back])
def test_a_state_that_no_entry_has_for_a_while_is_live_again_in_its_next(lab, way):
    results = []
    place = FEW["cut"]
    for offload in (False, True):
        optimizer, parameters = three(lab, offload, place=place, foreach=False)
        lab.take_steps(optimizer, parameters, range(3), missing=False)
        kept = optimizer.state[parameters[1]]["exp_avg"]
        way(optimizer.state, *parameters[:2])
        seen = []
        for step in range(3, 6):
            lab.take_steps(optimizer, parameters, [step], missing=False)
            seen.append(kept.cpu().clone())
            kept.mul_(0.5)
        results.append([*seen, *everything(lab, optimizer, parameters)])
    assert all(map(torch.equal, *results))
