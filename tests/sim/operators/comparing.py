"""What two runs of one sample gave, and how they compare."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_TOLERANCES = {
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float16: (2e-2, 1e-2),
}


@dataclass
class Outcome:
    """What a call returned, its gradients, and the most bytes that the device held meanwhile."""

    tensors: list[torch.Tensor | None]
    peak_bytes: int = 0
    on_host: list[torch.Tensor | None] = field(default_factory=list)

    def forms(self) -> list[object]:
        """Returns all of the tensors but their bytes, as JSON can hold it."""
        return [
            None
            if tensor is None
            else [
                list(tensor.shape),
                list(tensor.stride()),
                str(tensor.dtype),
                tensor.untyped_storage().nbytes(),
            ]
            for tensor in self.tensors
        ]


def compare(host: Outcome, device: Outcome) -> tuple[str, str]:
    """Returns ``equal``, ``close`` or ``different``, and where."""
    if len(host.tensors) != len(device.tensors):
        return "different", f"{len(device.tensors)} results, {len(host.tensors)} on the host"
    worst = ("equal", "")
    for index, (expected, found) in enumerate(zip(host.tensors, device.on_host, strict=True)):
        if (expected is None) != (found is None):
            return "different", f"result {index} is missing on one side"
        if expected is None or found is None:
            continue
        status, detail = _compare(expected, found)
        if status == "equal":
            status, detail = _compare_form(expected, device.tensors[index])
        if status == "different":
            return status, f"result {index}: {detail}"
        if status == "close":
            worst = (status, f"result {index}")
    return worst


def _compare_form(expected: torch.Tensor, found: torch.Tensor | None) -> tuple[str, str]:
    assert found is not None
    if expected.numel() > 1 and expected.stride() != found.stride():
        return "different", f"strides {found.stride()}, {expected.stride()} on the host"
    if expected.requires_grad != found.requires_grad:
        return "different", f"requires_grad is {found.requires_grad}"
    return "equal", ""


def _compare(expected: torch.Tensor, found: torch.Tensor) -> tuple[str, str]:
    for what in ("shape", "dtype"):
        if getattr(expected, what) != getattr(found, what):
            return "different", f"{what} {getattr(found, what)}, {getattr(expected, what)} expected"
    x, y = (_plain(tensor) for tensor in (expected, found))
    if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return "equal", ""
    if x.dtype not in _TOLERANCES:
        return "different", f"{int((x != y).sum())} of {x.numel()} values"
    if torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()):
        return "equal", ""  # but for the sign of a zero, or the bits of a nan
    rtol, atol = _TOLERANCES[x.dtype]
    if torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True):
        return "close", ""
    worst = (x - y).abs().nan_to_num().max().item()
    return "different", f"{int((x != y).sum())} of {x.numel()} values, by up to {worst:.3g}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat)
