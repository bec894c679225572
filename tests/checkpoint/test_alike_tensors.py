"""Tensors that are alike are copied together, and each comes back with its own bytes."""

import torch

import residency


def test_bools_keep_bytes_that_are_neither_0_nor_1(device):
    numbers = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    tree = {"there": numbers.to(device).view(torch.bool), "here": numbers.view(torch.bool)}
    found = residency.snapshot(tree).tree
    assert {name: each.view(torch.uint8).tolist() for name, each in found.items()} == {
        "there": [0, 1, 2, 255],
        "here": [0, 1, 2, 255],
    }


def test_a_tensor_of_a_class_of_its_own_is_copied_beside_plain_ones_that_are_like_it(device):
    class Named(torch.Tensor):
        pass

    numbers = torch.arange(8.0).view(2, 4).split(1)
    tensors = [each.to(where).contiguous() for where in (device, "cpu") for each in numbers]
    tree = {"mixed": [tensors[0], tensors[1].as_subclass(Named), *tensors[2:]]}
    tree["mixed"][2] = tree["mixed"][2].as_subclass(Named)
    found = residency.snapshot(tree).tree["mixed"]
    assert [each.tolist() for each in found] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]] * 2
