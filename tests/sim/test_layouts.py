"""What a kernel chooses for a result beside its bytes comes along: strides, lazy bits, storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from residency import sim

pytestmark = pytest.mark.sim


@pytest.fixture(params=["late", "overtake", "eager"], autouse=True)
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    sim.enable("1GiB", schedule=request.param, check_races=True)
    torch.Stream(device="sim")  # from here on kernels are queued
    yield request.param
    torch.accelerator.synchronize()


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_a_result_in_a_larger_buffer_of_the_kernel_s_keeps_all_of_it() -> None:
    a, b = _random(2, 4, 3), _random(2, 4, 3, seed=1)
    host = torch.linalg.lstsq(a, b).solution
    found = torch.linalg.lstsq(a.to("sim"), b.to("sim")).solution
    assert found.stride() == host.stride()
    assert found.untyped_storage().nbytes() == host.untyped_storage().nbytes()
    torch.testing.assert_close(found.cpu(), host)
    matrix = a.to("sim").requires_grad_()
    torch.linalg.lstsq(matrix, b.to("sim")).solution.sum().backward()
    assert matrix.grad is not None
    assert matrix.grad.isfinite().all()


def test_an_output_that_is_part_of_a_tensor_leaves_the_rest_alone() -> None:
    whole = torch.full((40,), 7.0, device="sim")
    part = whole[30:36].view(2, 3)
    a, b = _random(3, 2).to("sim"), _random(3, 3, seed=1).to("sim")
    torch.mm(a.mT, b, out=part)
    assert torch.equal(part.cpu(), a.cpu().mT @ b.cpu())
    assert whole[:30].eq(7.0).all()
    assert whole[36:].eq(7.0).all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_kernel_that_writes_conjugates_is_believed(dtype: torch.dtype) -> None:
    lu, pivots = torch.linalg.lu_factor(_random(3, 3, dtype=dtype))
    b = _random(2, 3, dtype=dtype, seed=1)
    expected = torch.linalg.lu_solve(lu, pivots, b, left=False)
    operands = [tensor.to("sim") for tensor in (lu, pivots, b)]
    torch.testing.assert_close(
        torch.linalg.lu_solve(*operands, left=False).cpu(), expected.resolve_conj()
    )
    out = torch.empty_like(operands[2])
    torch.linalg.lu_solve(*operands, left=False, out=out)
    torch.testing.assert_close(out.cpu(), expected.resolve_conj())


@pytest.mark.parametrize("transposed", ["q", "k", "v", "qkv", "gradient"])
@pytest.mark.parametrize("num_groups", [4, 2])
def test_attention_asks_for_the_strides_that_the_kernel_needs(
    transposed: str, num_groups: int
) -> None:
    def inner_out(tensor: torch.Tensor) -> torch.Tensor:  # the last stride is not 1
        return tensor.mT.contiguous().mT

    def run(device: str, lay_out: bool) -> list[torch.Tensor]:
        leaves = []
        for i, name in enumerate("qkv"):
            heads = 4 if name == "q" else num_groups
            tensor = _random(2, heads, 6, 8, dtype=torch.float64, seed=i)
            tensor = inner_out(tensor) if lay_out and name in transposed else tensor
            leaves.append(tensor.to(device).requires_grad_())
        output = functional.scaled_dot_product_attention(*leaves, enable_gqa=True)
        gradient = _random(2, 4, 6, 8, dtype=torch.float64, seed=9).to(device)
        if lay_out and transposed == "gradient":
            gradient = inner_out(gradient)
        output.backward(gradient)
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == 3
        return [tensor.detach().cpu() for tensor in (output, *gradients)]

    for found, expected in zip(run("sim", True), run("cpu", False), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_elements", [7, 35, 64])
def test_fused_sgd_steps_every_element_of_half_parameters(
    dtype: torch.dtype, num_elements: int
) -> None:
    def train(device: str, **options: Any) -> list[torch.Tensor]:
        parameter = torch.nn.Parameter(_random(num_elements).to(dtype).to(device))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, **options)
        for step in range(3):
            parameter.grad = _random(num_elements, seed=step + 1).to(dtype).to(device)
            optimizer.step()
        return [parameter.detach().cpu(), optimizer.state[parameter]["momentum_buffer"].cpu()]

    for found, expected in zip(train("sim", fused=True), train("cpu", fused=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_name_the_dtype_of_their_result(dtype: torch.dtype) -> None:
    a, b = (_random(4, 4, seed=seed).to(dtype) for seed in (0, 1))
    found = torch.mm(a.to("sim"), b.to("sim"), out_dtype=torch.float32)
    assert torch.equal(found.cpu(), a.float() @ b.float())
    batch = torch.bmm(a[None].to("sim"), b[None].to("sim"), out_dtype=torch.float32)
    assert torch.equal(batch.cpu()[0], a.float() @ b.float())
    with pytest.raises(RuntimeError, match="out_dtype must be the same"):
        torch.mm(a.to("sim"), b.to("sim"), out_dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool])
def test_products_of_integers_are_refused_as_on_cuda(dtype: torch.dtype) -> None:
    a = torch.ones(2, 2, dtype=dtype, device="sim")
    for operation in (torch.mm, torch.matmul):
        with pytest.raises(NotImplementedError, match=r'"addmm_cuda" not implemented for'):
            operation(a, a)
