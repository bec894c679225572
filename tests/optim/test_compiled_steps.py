"""A compiled model and a compiled step: Dynamo leaves the step of an offloaded optimizer to Python,
so that it has the bits of one that is not compiled, and refuses it where nothing may be left."""

import pytest
import torch

import residency


def trained(device, *, is_offloaded, compile_model, compile_step):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if is_offloaded:
        residency.offload_optimizer(optimizer, bucket="8KiB")
    forward, step = compile_model(model), compile_step(optimizer)
    draws = torch.Generator().manual_seed(1)
    for _ in range(4):
        forward(torch.randn(5, 64, generator=draws).to(device)).square().mean().backward()
        step()
        optimizer.zero_grad()
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def compiled(call, **options):
    return torch.compile(call, backend="eager", **options)  # traces, and generates no code


STEPS = {
    "method": lambda optimizer: compiled(optimizer.step),
    "within": lambda optimizer: compiled(lambda: optimizer.step()),
}


@pytest.mark.whole
@pytest.mark.parametrize("compile_step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("compile_model", [compiled, lambda model: model], ids=["model", "step"])
def test_a_compiled_step_has_the_bits_of_one_that_is_not(device, compile_model, compile_step):
    torch.compiler.reset()
    plain = {"compile_model": lambda model: model, "compile_step": lambda o: o.step}
    expected = trained(device, is_offloaded=False, **plain)
    ours = {"compile_model": compile_model, "compile_step": compile_step}
    for found, wanted in zip(trained(device, is_offloaded=True, **ours), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.whole
def test_a_step_that_must_be_one_graph_is_dynamos_error(device):
    torch.compiler.reset()

    def whole(optimizer):
        return compiled(lambda: optimizer.step(), fullgraph=True)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        trained(device, is_offloaded=True, compile_model=lambda m: m, compile_step=whole)
