"""A value that is taken apart and put together again shares nothing mutable with the caller."""

import io

import torch

from residency.integrations._common._pickled import Freezer, Thawer


def test_what_is_put_together_again_has_the_values_of_the_call(device):
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True)
    value = {"sparse": sparse, "list": [1, 2], "tensor": torch.ones(2)}
    file = io.BytesIO()
    freezer = Freezer(file, {})
    freezer.dump(value)
    tensors = {name: leaf.value.clone() for name, leaf in freezer.encoder.leaves.items()}
    sparse._values().fill_(9)
    value["list"].append(3)
    thawed = Thawer(file.getvalue(), freezer.aside).thaw(tensors)
    assert thawed["list"] == [1, 2]
    assert thawed["sparse"].to_dense().tolist() == [1.0, 0.0, 2.0, 0.0]
    assert thawed["tensor"].tolist() == [1.0, 1.0]
    thawed["list"].append(4)
    thawed["sparse"]._values().fill_(7)
    assert value["list"] == [1, 2, 3]
    assert sparse._values().tolist() == [9.0, 9.0]
