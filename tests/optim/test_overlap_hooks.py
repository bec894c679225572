"""The watch of an overlapped step over calls of modules: nothing of it is in modules, in compiled
graphs, in copies of a model and in files.
"""

import copy
import gc
import io
import pickletools
import warnings
import weakref
import zipfile

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import residency

pytestmark = pytest.mark.sim
WIDTH = 64


class Net(nn.Module):
    """Two layers, between which a number of rows is much memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def made(device, net=None):
    net = (net or Net()).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    residency.offload_optimizer(optimizer, bucket="8KiB", slots=1, overlap=True)
    return net, optimizer


def steps(forward, optimizer, num_steps=4):
    """Returns the bytes of state that were on the device before the last step."""
    device = optimizer.param_groups[0]["params"][0].device
    for _ in range(num_steps):
        forward(torch.randn(300, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.statistics().ahead_bytes


def hooked(net):
    return [name for name, module in net.named_modules() if module._forward_pre_hooks]


def test_no_module_has_a_hook_and_torch_has_no_global_one(device):
    gc.collect()  # optimizers of tests before
    torch_call = nn.Module.__call__
    net, optimizer = made(device)
    assert steps(net, optimizer) > 0
    assert hooked(net) == []
    assert not nn.modules.module._has_any_global_hook()
    assert nn.Module.__call__ is not torch_call
    residency.onload_optimizer(optimizer)
    assert nn.Module.__call__ is torch_call


@pytest.mark.parametrize("is_compiled_first", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_keeps_its_one_graph_and_is_not_warned_of(
    device, is_compiled_first, in_place
):
    net, optimizer = made(device)
    if not is_compiled_first:
        assert steps(net, optimizer) > 0
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if in_place:
            net.compile(backend="eager", fullgraph=True)
        compiled = net if in_place else torch.compile(net, backend="eager", fullgraph=True)
        steps(compiled, optimizer)
    assert counters["stats"]["unique_graphs"] == 1


def test_an_optimizer_that_is_collected_in_a_cycle_leaves_no_hook(device):
    gc.collect()  # optimizers of tests before
    torch_call = nn.Module.__call__
    net, optimizer = made(device)
    assert steps(net, optimizer) > 0
    parameters = list(net.parameters())
    assert any(each._post_accumulate_grad_hooks for each in parameters)
    cycle = [optimizer]
    cycle.append(cycle)
    del optimizer, cycle
    gc.collect()
    assert nn.Module.__call__ is torch_call
    assert not any(each._post_accumulate_grad_hooks for each in parameters)


def test_a_copy_of_a_model_has_no_hook_that_acts_or_keeps_anything_alive(device):
    net, optimizer = made(device)
    assert steps(net, optimizer) > 0
    copied = copy.deepcopy(net)
    x = torch.ones(3, WIDTH, device=device)
    before = optimizer.statistics()
    assert torch.equal(copied(x), copied(x.clone()))
    assert optimizer.statistics() == before
    assert torch.compile(copied, backend="eager", fullgraph=True)(x).shape == x.shape
    died = weakref.ref(optimizer), weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert [ref() for ref in died] == [None, None]
    again, other = made(device, copy.deepcopy(copied))
    assert steps(again, other) > 0


def test_a_file_of_a_model_names_nothing_of_this_library(device):
    net, optimizer = made(device)
    assert steps(net, optimizer) > 0
    file = io.BytesIO()
    torch.save(net, file)
    with zipfile.ZipFile(file) as archive:
        pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        words = {str(arg) for _, arg, _ in pickletools.genops(archive.read(pickled))}
    assert not [word for word in words if "residency" in word]
    file.seek(0)
    x = torch.ones(3, WIDTH, device=device)
    assert torch.equal(torch.load(file, weights_only=False)(x), net(x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_trace_of_a_model_has_the_models_own_operations(device):
    net, optimizer = made(device)
    assert steps(net, optimizer) > 0
    x = torch.ones(3, WIDTH, device=device)
    kinds = [node.kind() for node in torch.jit.trace(net, x).inlined_graph.nodes()]
    operations = [kind for kind in kinds if kind.startswith("aten::")]
    assert operations == ["aten::linear", "aten::relu", "aten::linear"]


def test_modules_that_come_later_are_found_with_their_parameters(device):
    net, optimizer = made(device)
    steps(net, optimizer, 2)
    late = Net().to(device)
    optimizer.add_param_group({"params": list(late.parameters())})
    assert steps(lambda x: late(net(x)), optimizer, 5) > 0


def test_a_module_that_takes_the_place_of_another_is_found(device):
    net, optimizer = made(device)
    steps(net, optimizer)
    successor = Net()
    successor.first.weight, successor.first.bias = net.first.weight, net.first.bias
    successor.last = net.last
    net.first = nn.Identity()
    del net
    gc.collect()
    assert steps(successor, optimizer) > 0


def test_parameters_that_a_functional_call_uses_are_stepped_with_the_same_bits(device):
    ends = []
    for is_overlapped in (False, True):
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if is_overlapped:
            residency.offload_optimizer(optimizer, bucket="8KiB", slots=1, overlap=True)
        values = dict(net.named_parameters())
        torch.manual_seed(1)
        for _ in range(5):
            x = torch.randn(300, WIDTH, device=device)
            torch.func.functional_call(net, values, (x,)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if is_overlapped:
            assert optimizer.statistics().ahead_bytes > 0
        ends.append([each.detach().cpu() for each in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_without_modules_the_log_says_once_that_overlap_changes_nothing(device, caplog):
    weights = [nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(2)]
    optimizer = residency.optim.AdamW(weights, bucket="8KiB", overlap=True)
    for _ in range(4):
        sum(each.square().sum() for each in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [r.getMessage() for r in caplog.records if "overlap" in r.getMessage()] == [
        "no module that has a parameter began a forward pass, or all are compiled, so "
        "overlap=True changes nothing."
    ]
    assert optimizer.statistics().ahead_bytes == 0
