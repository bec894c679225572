"""Code that goes through collections (torch's trees, frameworks, pickle) finds an offloaded state
to be what a plain one is.
"""

import collections
import copy
import io
import pickle

import pytest
import torch
from torch.utils import _pytree  # no public way goes through trees


def apply_to_collection(value):
    found = pytest.importorskip("lightning_utilities.core.apply_func")
    return found.apply_to_collection(value, torch.Tensor, torch.clone)


def send_to_device(value):
    return pytest.importorskip("accelerate.utils").send_to_device(value, "cpu")


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


OF_ONE = {
    "a tree": lambda state: _pytree.tree_map(torch.clone, state),
    "its own type": lambda state: type(state)(state),
    "keys of its own type": lambda state: type(state).fromkeys(state, 1),
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch.save": through_a_file,
    "lightning_utilities": apply_to_collection,
    "accelerate": send_to_device,
}
OF_ALL = {
    "a tree": lambda state: list(_pytree.tree_map(torch.clone, list(state.values()))),
    "a tree of the whole": lambda state: list(_pytree.tree_map(torch.clone, state).values()),
    "a copy": lambda state: list(copy.copy(state).values()),
    "torch.save": lambda state: through_a_file(list(state.values())),
    "pickle": lambda state: list(pickle.loads(pickle.dumps(state)).values()),
    "lightning_utilities": lambda state: list(apply_to_collection(state).values()),
}


def stepped(lab, *, offload):
    optimizer, parameters = lab.adamw(offload=offload)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    return optimizer, parameters


def values_of(state):
    return [
        (key, value.cpu().clone() if isinstance(value, torch.Tensor) else value)
        for key, value in state.items()
    ]


def assert_same(left, right):
    assert [key for key, _ in left] == [key for key, _ in right]
    for (_, one), (_, other) in zip(left, right, strict=True):
        assert one is other or torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("way", OF_ONE)
def test_the_state_of_a_parameter_is_a_dict_to_code_that_makes_another(lab, way):
    made = []
    for offload in (False, True):
        optimizer, parameters = stepped(lab, offload=offload)
        kept = OF_ONE[way](optimizer.state[parameters[0]])
        assert type(kept) in (dict, collections.OrderedDict)
        made.append(values_of(kept))
        lab.take_steps(optimizer, parameters, range(2, 3), missing=False)
        if way not in ("a copy", "its own type", "accelerate"):  # which have the same tensors
            assert_same(values_of(kept), made[-1])
    assert_same(*made)


@pytest.mark.parametrize("way", OF_ALL)
def test_the_states_of_all_parameters_are_dicts_in_a_mapping(lab, way):
    made = []
    for offload in (False, True):
        optimizer, _ = stepped(lab, offload=offload)
        made.append([values_of(each) for each in OF_ALL[way](optimizer.state)])
    assert len(made[0]) == len(made[1]) > 1
    for left, right in zip(*made, strict=True):
        assert_same(left, right)


def test_paths_in_trees_have_the_keys(lab):
    optimizer, parameters = stepped(lab, offload=True)
    leaves, _ = _pytree.tree_flatten_with_path(optimizer.state[parameters[0]])
    assert [str(path[0]) for path, _ in leaves] == ["['step']", "['exp_avg']", "['exp_avg_sq']"]
