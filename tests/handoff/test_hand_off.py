"""The bytes are free inside, by the device's own figure; outside, nothing shows that they were."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import residency
from residency import HandOffError, InvalidArgumentError, RefusedError, _device, hand_off
from residency._memory._state import measure

# Small, so that what nobody needs can be filled quickly.
pytestmark = pytest.mark.sim_device(capacity="256MiB")

MIB = 1 << 20
WIDTH = 1792  # 12.25 MiB of weights a layer: more than 10, and each has a segment of its own


@pytest.fixture(autouse=True)
def garbage_waits() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def block(num_mib: int, device: torch.device) -> Tensor:
    return torch.ones(num_mib * MIB, dtype=torch.uint8, device=device)


def make_model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    torch.manual_seed(2)
    model(torch.randn(8, WIDTH).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: nn.Module) -> list[Tensor]:
    return [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers())]


def is_on(model: nn.Module, kind: str) -> bool:
    return {t.device.type for t in (*model.parameters(), *model.buffers())} == {kind}


def everything_but(num_mib: int, device: torch.device) -> int:
    """Returns how much is free if everything but so much is: a need that asks for it."""
    return measure(device).capacity - num_mib * MIB


def test_where_the_bytes_are_free_nothing_is_done(device: torch.device) -> None:
    model = make_model(device)
    before = measure(device)
    with hand_off("1MiB", park=[model]) as freed:
        assert freed.total == 0
        assert measure(device) == before
        assert is_on(model, device.type)


def test_the_cheapest_means_that_suffices_is_the_last(device: torch.device) -> None:
    model = make_model(device)
    cached = block(64, device)
    del cached
    with hand_off(measure(device).free + 32 * MIB, park=[model]) as freed:
        assert freed.cache >= 64 * MIB
        assert freed.parked == 0
        assert is_on(model, device.type)


def test_parking_frees_no_more_than_is_missing(device: torch.device) -> None:
    model = make_model(device)
    _device.empty_cache(device)
    with hand_off(measure(device).free + 3 * MIB, park=[model]) as freed:
        assert freed.parked >= 3 * MIB
        on_device = sum(p.device.type == device.type for p in model[:3].parameters())
        assert on_device == 2
        assert measure(device).free >= freed.before.free + 3 * MIB
    assert is_on(model, device.type)


def test_training_goes_on_bit_for_bit_across_hand_offs(device: torch.device) -> None:
    def run(*, is_handed: bool) -> list[Tensor]:
        gc.collect()  # an optimizer is a cycle
        model = make_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            train(model, optimizer, device)
            if is_handed:
                with hand_off(everything_but(2, device), park=[model, optimizer]) as freed:
                    assert freed.parked > 60 * MIB
                    assert freed.free >= everything_but(2, device)
                    other = block(everything_but(4, device) // MIB, device)
                    del other
        return bits(model)

    assert all(map(torch.equal, run(is_handed=False), run(is_handed=True)))


def test_an_optimizer_is_parked_beside_another_model_than_its_own(device: torch.device) -> None:
    """As where the policy stays for the sync of its weights, and the reference model goes."""

    def run(*, is_handed: bool) -> list[Tensor]:
        gc.collect()  # an optimizer is a cycle
        policy, reference = make_model(device), make_model(device)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2, momentum=0.9, foreach=False)
        expected = bits(reference)
        for _ in range(2):
            train(policy, optimizer, device)
            if not is_handed:
                continue
            need = everything_but(num_bytes_of(policy) // MIB + 8, device)
            with hand_off(need, park=[optimizer, reference]) as freed:
                assert freed.parked >= 2 * num_bytes_of(reference)
                assert is_on(policy, device.type)
                assert is_on(reference, "cpu")
        assert all(map(torch.equal, expected, bits(reference)))
        return bits(policy)

    assert all(map(torch.equal, run(is_handed=False), run(is_handed=True)))


def num_bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_an_offloaded_optimizer_costs_nothing(device: torch.device) -> None:
    model = make_model(device)
    optimizer = residency.offload_optimizer(torch.optim.AdamW(model.parameters()), bucket="4MiB")
    train(model, optimizer, device)
    with hand_off(everything_but(2, device), park=[optimizer, model]) as freed:
        assert freed.parked < 60 * MIB  # the model, and no state
    train(model, optimizer, device)


def test_owners_are_parked_in_their_order(device: torch.device) -> None:
    first, second = make_model(device), make_model(device)
    _device.empty_cache(device)
    with hand_off(measure(device).free + 10 * MIB, park=[second, first]):
        assert is_on(first, device.type)
        assert not is_on(second, device.type)
    assert is_on(second, device.type)


def test_what_was_parked_before_stays_parked(device: torch.device) -> None:
    first, second = make_model(device), make_model(device)
    residency.park(first)
    with hand_off(everything_but(2, device), park=[first, second]):
        assert is_on(second, "cpu")
    assert is_on(second, device.type)
    assert is_on(first, "cpu")
    residency.unpark(first)
    assert is_on(first, device.type)


def test_an_error_in_the_body_passes_through_and_everything_is_back(device: torch.device) -> None:
    model = make_model(device)
    before = bits(model)

    def fail() -> None:
        assert is_on(model, "cpu")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hand_off(everything_but(2, device), park=[model]):
        fail()
    assert is_on(model, device.type)
    assert all(map(torch.equal, before, bits(model)))


def test_what_cannot_be_reached_is_refused_with_table_and_holders(device: torch.device) -> None:
    model = make_model(device)
    kept_by_the_test = block(64, device)
    before = bits(model)
    with (
        pytest.raises(HandOffError) as caught,
        hand_off(everything_but(50, device), park=[model]),
    ):
        pytest.fail("the body must not run")
    message = str(caught.value)
    assert "too few" in message
    assert "kept_by_the_test" in message
    assert "returnable" in message
    assert is_on(model, device.type)
    assert all(map(torch.equal, before, bits(model)))
    assert not caught.value.is_parked
    caught.value.retry()  # has nothing to do
    del kept_by_the_test


def test_nothing_moves_where_even_everything_would_be_too_little(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from residency._park._parking import Parking

    model = make_model(device)
    kept = block(64, device)
    monkeypatch.setattr(Parking, "park", lambda *_: pytest.fail("it must not be tried"))
    with pytest.raises(HandOffError), hand_off(everything_but(8, device), park=[model]):
        pytest.fail("the body must not run")
    del kept


def test_bytes_that_do_not_come_back_leave_everything_whole_and_a_retry(
    device: torch.device,
) -> None:
    model = make_model(device)
    before = bits(model)
    taken = []
    with (
        pytest.raises(HandOffError, match=r"are not free again after 0\.2 s") as caught,
        hand_off(everything_but(2, device), park=[model], timeout=0.2),
    ):
        taken.append(block(everything_but(4, device) // MIB, device))
    error = caught.value
    assert error.is_parked
    assert is_on(model, "cpu")
    assert all(map(torch.equal, before, bits(model)))
    with pytest.raises(HandOffError, match="whole on the host"):
        error.retry()
    taken.clear()
    error.retry()
    assert not error.is_parked
    assert is_on(model, device.type)
    assert all(map(torch.equal, before, bits(model)))


def test_the_error_of_the_body_is_the_cause_where_bytes_do_not_come_back(
    device: torch.device,
) -> None:
    model = make_model(device)
    taken = []

    def fail() -> None:
        taken.append(block(everything_but(4, device) // MIB, device))
        raise ZeroDivisionError

    with (
        pytest.raises(HandOffError) as caught,
        hand_off(everything_but(2, device), park=[model], timeout=0),
    ):
        fail()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    taken.clear()
    caught.value.retry()
    assert is_on(model, device.type)


def test_an_interrupt_passes_through_and_what_is_parked_can_be_brought_back(
    device: torch.device,
) -> None:
    model = make_model(device)
    before = bits(model)
    taken: list[Tensor] = []

    def interrupted() -> None:
        taken.append(block(everything_but(4, device) // MIB, device))
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt) as caught,
        hand_off(everything_but(2, device), park=[model], timeout=0),
    ):
        interrupted()
    assert "are not free again" in caught.value.__notes__[0]
    assert is_on(model, "cpu")
    taken.clear()
    residency.unpark(model)
    assert is_on(model, device.type)
    assert all(map(torch.equal, before, bits(model)))


def test_what_a_hand_off_parked_may_be_brought_back_inside_it(device: torch.device) -> None:
    model = make_model(device)
    with hand_off(everything_but(2, device), park=[model]):
        residency.unpark(model)  # as the note on the error of a parked forward says
        assert is_on(model, device.type)
    assert is_on(model, device.type)


def test_holes_that_the_parked_left_in_shared_segments_are_no_reason_to_wait(
    device: torch.device,
) -> None:
    layers = [nn.Linear(512, 512, bias=False) for _ in range(40)]  # 1 MiB each: segments are shared
    model = nn.Sequential(*layers).to(device)
    other = nn.ModuleList(layers[::2])
    before = bits(model)
    free = measure(device).free
    filler = block((free - 4 * MIB) // MIB, device)
    parked = residency.park(other)
    assert parked >= 20 * MIB
    residency.unpark(other)
    with pytest.raises(HandOffError), hand_off(free, park=[other], timeout=30):
        pytest.fail("the body must not run")  # and this did not take the half minute
    assert is_on(model, device.type)
    assert all(map(torch.equal, before, bits(model)))
    del filler


def test_what_fails_on_the_way_back_leaves_a_retry(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from residency._park._parking import Parking

    model = make_model(device)
    before, real = bits(model), Parking.unpark

    def fail(self: Parking) -> int:
        raise RuntimeError("the copy failed")

    with (
        pytest.raises(HandOffError, match="the copy failed") as caught,
        hand_off(everything_but(2, device), park=[model], timeout=30),
    ):
        monkeypatch.setattr(Parking, "unpark", fail)
    assert caught.value.is_parked
    monkeypatch.setattr(Parking, "unpark", real)
    with hand_off(1), pytest.raises(RefusedError, match="under way"):
        caught.value.retry()  # would take what is being handed over
    caught.value.retry()
    assert all(map(torch.equal, before, bits(model)))
    assert is_on(model, device.type)


def test_hand_offs_do_not_nest_and_the_refused_one_moves_nothing(device: torch.device) -> None:
    first, second = make_model(device), make_model(device)
    with hand_off(measure(device).free + MIB, park=[first]):
        with pytest.raises(RefusedError, match="do not nest"), hand_off(1, park=[second]):
            pytest.fail("the body must not run")
        assert is_on(second, device.type)
    with hand_off(1):
        pass  # the next one is welcome


@pytest.mark.sim
def test_segments_stop_growing_inside_and_grow_again_after(device: torch.device) -> None:
    from residency._handoff._segments import is_expandable

    try:
        torch._C._accelerator_setAllocatorSettings(
            "garbage_collection_threshold:0.8,expandable_segments:True"
        )
        with hand_off(0, expandable_segments=False):
            assert not is_expandable(device)
            assert "garbage_collection_threshold:0.8" in _device.allocator_settings()
        assert is_expandable(device)
        with pytest.raises(ZeroDivisionError), hand_off(0, expandable_segments=False):
            raise ZeroDivisionError
        assert is_expandable(device)
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.sim
@pytest.mark.parametrize("now", [True, False])
def test_segments_grow_as_before_on_a_torch_that_does_not_tell_its_settings(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, now: bool
) -> None:
    """A library has changed the setting since the process began, whose environment names it."""
    from residency._handoff._segments import is_expandable

    read = torch._C._accelerator_getAllocatorSettings
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{not now}")
    torch.accelerator.empty_cache()
    try:
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{now}")
        model = make_model(device)
        assert is_expandable(device) is now
        with hand_off(0, expandable_segments=not now):
            assert read() == f"expandable_segments:{not now}"
        assert read() == f"expandable_segments:{now}"
        del model
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.sim
def test_segments_do_not_grow_beside_a_library_that_cannot_bear_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    model = make_model(device)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", sys)
    with (
        pytest.raises(RefusedError, match="torch_memory_saver"),
        hand_off(everything_but(2, device), park=[model], expandable_segments=True),
    ):
        pytest.fail("the body must not run")
    assert is_on(model, device.type)


@pytest.mark.sim
def test_with_expandable_segments_bytes_are_proven_all_the_same(device: torch.device) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        model = make_model(device)
        cached = block(64, device)
        del cached
        assert measure(device).stuck is None
        with hand_off(everything_but(4, device), park=[model]) as freed:
            assert freed.free >= everything_but(4, device)
        assert is_on(model, device.type)
        assert freed.total == sum(freed.by_means().values()) > 64 * MIB
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_sizes_and_seconds_that_mean_nothing_are_refused_at_the_call(device: torch.device) -> None:
    for call in (hand_off, partial(residency.take_over, peer="gpu0.sock")):
        with pytest.raises(InvalidArgumentError, match="need is '1 parsec'"):
            call("1 parsec")
        with pytest.raises(InvalidArgumentError, match="timeout is -1"):
            call(1, timeout=-1)


def test_bad_input_is_named_and_nothing_moves(device: torch.device) -> None:
    model = make_model(device)
    with pytest.raises(InvalidArgumentError, match="need is -1"), hand_off(-1):
        pass
    with pytest.raises(InvalidArgumentError, match="device is 'cpu'"), hand_off(1, device="cpu"):
        pass
    with pytest.raises(InvalidArgumentError, match="timeout is -1"), hand_off(1, timeout=-1):
        pass
    for park, reason in (
        ([model, model], r"park\[1\] \(Sequential\) is listed before"),
        ([model, torch.ones(3)], r"park\[1\] \(Tensor\) cannot be parked"),
        ([nn.Linear(2, 2)], r"park\[0\] \(Linear\) is on cpu"),
    ):
        with (
            pytest.raises(InvalidArgumentError, match=reason),
            hand_off(everything_but(2, device), park=park),
        ):
            pytest.fail("the body must not run")
    assert is_on(model, device.type)
    for options, reason in (
        ({"park": 3}, "park is 3"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": "5"}, "timeout is '5'"),
        ({"group": "x"}, "group is 'x'"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason), hand_off(1, **options):
            pytest.fail("the body must not run")
    for path, reason in (("/nowhere/a.sock", "no such directory"), ("/" + "x" * 200, "most 107")):
        with pytest.raises(InvalidArgumentError, match=reason), hand_off(0, peer=path):
            pass


def test_what_cannot_even_be_shown_is_named_all_the_same(device: torch.device) -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with (
        pytest.raises(residency.InvalidArgumentError, match="park is <Mute instance"),
        residency.hand_off(1, park=Mute()),
    ):
        pass


def test_owners_may_come_from_a_generator(device: torch.device) -> None:
    model = make_model(device)
    with hand_off(everything_but(2, device), park=(part for part in [model])):
        assert is_on(model, "cpu")
    assert is_on(model, device.type)


def test_a_stream_that_is_captured_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device, "is_capturing", lambda _: True)
    with pytest.raises(RefusedError, match="captured"), hand_off(1):
        pass
