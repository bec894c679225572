"""Weights that bitsandbytes has packed: it keeps them where autograd does not look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from frozen_lab import Net, are_same, assert_alike, freeze, passes, run

pytestmark = [pytest.mark.sim, pytest.mark.whole]


@pytest.fixture
def bnb(tested_device: torch.device, framework: Callable[..., Any]) -> Any:
    """The package, whose tables are on the device from here on; it comes before ``device``."""
    package = framework("bitsandbytes", "nn")
    passes(_packed(package, tested_device, 4, None), tested_device)
    return package


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _packed(bnb: Any, device: torch.device, num_bits: int, use_reentrant: bool | None) -> Any:
    """Returns a model on the device, where the weights are packed on their way."""
    model = Net(use_reentrant=use_reentrant)
    for block in model.blocks:
        for name in ("up", "down"):
            plain = getattr(block, name)
            sizes = plain.in_features, plain.out_features
            if num_bits == 4:
                layer = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
                weight = bnb.nn.Params4bit(plain.weight.data, False, quant_type="nf4")
            else:
                layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                weight = bnb.nn.Int8Params(plain.weight.data, False, has_fp16_weights=False)
            layer.weight, layer.bias = weight, plain.bias
            setattr(block, name, layer)
    return freeze(model).to(device)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_4_bit_weights_stream_to_the_same_bits(
    bnb: Any, device: torch.device, use_reentrant: bool | None
) -> None:
    make = partial(_packed, bnb, device, 4, use_reentrant)
    streamed = assert_alike(make, partial(passes, count=4), device)
    assert streamed.stream.statistics().num_loads > 2 * 6  # each slot was used again and again
    weight = streamed.model.blocks[0].up.weight
    assert type(weight) is bnb.nn.Params4bit
    assert weight.quant_state is not None


def test_the_device_has_two_units_of_4_bit_weights(bnb: Any, device: torch.device) -> None:
    """The context of ``MatMul4Bit`` has the weight as an attribute, from forward to backward."""
    make = partial(_packed, bnb, device, 4, None)
    resident = run(make, passes, device, streams=False)
    resident.model = resident.results = None  # type: ignore[assignment]
    streamed = run(make, passes, device, streams=True)
    unit_bytes = streamed.stream.statistics().slot_bytes
    assert resident.peak_bytes - streamed.peak_bytes == (6 - 2) * unit_bytes


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_8_bit_weights_have_the_same_bits_and_a_warning_names_what_stays(
    bnb: Any, device: torch.device
) -> None:
    make = partial(_packed, bnb, device, 8, None)
    expected = run(make, passes, device, streams=False).results
    with pytest.warns(UserWarning, match=r"48\.00 KiB of the frozen .* 8-bit layers"):
        streamed = run(make, passes, device, streams=True)
    assert are_same(streamed.results, expected)
