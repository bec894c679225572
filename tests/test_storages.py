"""Which tensors share bytes: the judge writes into one and looks at the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from residency._modes import callers_modes_off
from residency._storages import sharing, span_of


@st.composite
def views(draw: st.DrawFn) -> list[Tensor]:
    whole = torch.zeros(48, dtype=torch.float32)
    made = []
    for _ in range(draw(st.integers(2, 6))):
        shape = draw(st.lists(st.integers(0, 3), min_size=0, max_size=2))
        stride = [draw(st.integers(0, 5)) for _ in shape]
        made.append(whole.as_strided(shape, stride, draw(st.integers(0, 20))))
    return made


def groups_by_writing(tensors: list[Tensor]) -> list[list[int]]:
    """The same answer by brute force: the elements of each, as indices into the whole."""
    whole = torch.arange(48)
    taken = [
        set(whole.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())
        for t in tensors
    ]
    groups: list[set[int]] = []
    for index, each in enumerate(taken):
        if not each:
            continue
        mine = [g for g in groups if any(taken[other] & each for other in g)]
        groups = [g for g in groups if g not in mine] + [set().union({index}, *mine)]
    return sorted(sorted(group) for group in groups if len(group) > 1)


@given(views())
@settings(max_examples=300, deadline=None)
def test_the_groups_are_those_that_brute_force_finds(tensors: list[Tensor]) -> None:
    assert sharing(tensors) == groups_by_writing(tensors)


def test_two_storages_over_one_array_share() -> None:
    array = np.zeros(8, dtype=np.float32)
    left, right = torch.from_numpy(array), torch.from_numpy(array[4:])
    assert left.untyped_storage()._cdata != right.untyped_storage()._cdata
    assert sharing([left, torch.zeros(3), right]) == [[0, 2]]


def test_a_freed_storage_and_an_empty_tensor_have_no_range() -> None:
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    assert span_of(freed) is None
    assert span_of(torch.zeros(0)) is None
    assert sharing([freed, freed, torch.zeros(0)]) == []


def test_conjugated_and_negated_views_share_with_what_they_are_views_of() -> None:
    z = torch.zeros(4, dtype=torch.complex64)
    assert sharing([z, z.conj(), z.imag, z.conj().imag]) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("kind", ["device", "default", "inference"])
def test_what_is_made_with_the_modes_off_is_a_plain_host_tensor(kind: str) -> None:
    def make() -> Tensor:
        with callers_modes_off():
            return torch.empty(2, dtype=torch.float32, device="cpu")

    if kind == "device":
        with torch.device("meta"):
            made = make()
    elif kind == "inference":
        with torch.inference_mode():
            made = make()
    else:
        torch.set_default_device("meta")
        try:
            made = make()
        finally:
            torch.set_default_device(None)
    assert (made.device.type, made.is_inference(), made.requires_grad) == ("cpu", False, False)


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, *_: object) -> None:  # type: ignore[override]
        raise AssertionError("the mode has seen a call")


def test_a_mode_that_is_switched_on_within_is_shut_out_again() -> None:
    """A block in a block enters nothing where nothing was switched on meanwhile."""
    with callers_modes_off():
        for mode in (torch.enable_grad(), torch.inference_mode()):
            with mode, callers_modes_off():
                made = torch.empty(2, dtype=torch.float32, device="cpu")
                assert not torch.is_grad_enabled()
            assert (made.is_inference(), made.requires_grad) == (False, False)
        with Refusing(), callers_modes_off(), callers_modes_off():
            torch.zeros(2, dtype=torch.float32, device="cpu")
        assert not torch.is_grad_enabled()
