"""What `residency.integrations.verl` does where verl is not installed; tests/verl has the rest."""

from __future__ import annotations

import sys

import pytest
import torch

import residency
from residency._memory._imports import ImportWatch
from residency.integrations import verl as door


def watches() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, ImportWatch)]


@pytest.fixture(autouse=True)
def _no_guard_stays():
    assert watches() == []
    yield
    door.remove_guard()
    assert watches() == []


def test_every_class_of_torch_has_an_offloaded_name() -> None:
    named = {name for name in dir(door) if name.startswith("Offloaded")}
    assert {"OffloadedAdamW", "OffloadedSGD", "OffloadedMuon"} <= named
    assert "OffloadedOptimizer" not in named
    for name in named:
        assert getattr(door, name) is getattr(door, name)


def test_an_offloaded_class_steps_as_the_plain_one(device: torch.device) -> None:
    def trained(make) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8).to(device)
        optimizer = make(layer.parameters())
        for _ in range(3):
            layer(torch.ones(2, 8, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach().cpu()

    def offloaded(params):
        optimizer = door.OffloadedAdamW(params, lr=0.1, bucket="1KiB", betas=[0.8, 0.9])
        assert isinstance(optimizer, residency.OffloadedOptimizer)
        return optimizer

    plain = trained(lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.8, 0.9)))
    assert torch.equal(trained(offloaded), plain)


def test_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    for name in ("OffloadedNothing", "Offloaded", "AdamW"):
        with pytest.raises(AttributeError, match=f"{name!r}; for verl .* OffloadedAdamW"):
            getattr(door, name)


def test_an_unknown_option_is_an_error_with_the_known_ones(device: torch.device) -> None:
    layer = torch.nn.Linear(8, 8).to(device)
    with pytest.raises(residency.InvalidArgumentError, match=r"'buket', 'epsilon'.*bucket.*eps"):
        door.OffloadedAdamW(layer.parameters(), epsilon=1, buket="1KiB")


def test_a_size_that_does_not_parse_leaves_the_guard_that_is_there() -> None:
    door.install_guard("1GiB")
    found = watches()
    with pytest.raises(residency.InvalidArgumentError, match="need is 'lots'"):
        door.install_guard("lots")
    assert watches() == found != []


def test_a_guard_waits_for_verl_without_importing_it_and_can_be_taken_back() -> None:
    before = set(sys.modules)
    for _ in range(2):
        door.install_guard()
    door.remove_guard()
    door.remove_guard()
    assert {name for name in set(sys.modules) - before if name.startswith("verl")} == set()
    assert door.guard_statistics() == door.GuardStatistics()


def test_figures_of_the_guard_are_printed_in_units_with_what_they_mean() -> None:
    figures = door.GuardStatistics(num_transitions=3, freed_bytes=3 << 29, seconds=0.0125)
    assert [line.split(maxsplit=1)[0] for line in str(figures).splitlines()[1:]] == [
        "num_transitions",
        "freed_bytes",
        "seconds",
    ]
    for figure in ("3  methods", "1.50 GiB  that went back", "12.500 ms  for it"):
        assert figure in str(figures)


def test_the_plugin_leaves_a_guard_that_is_there() -> None:
    from residency.integrations import _verl_guard

    door.install_guard("1GiB")
    guard = _verl_guard._installed
    _verl_guard.ensure_guard()
    assert _verl_guard._installed is guard
    door.remove_guard()
    _verl_guard.ensure_guard()
    assert _verl_guard._installed is not None


def test_a_version_with_another_worker_is_an_error_that_names_it_and_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class ActorRolloutRefWorker:
        def update_actor(self, data: object) -> object:
            return data

        async def compute_ref_log_prob(self, data: object) -> object:
            return data

    module = type(sys)("verl.workers.engine_workers")
    module.ActorRolloutRefWorker = ActorRolloutRefWorker
    methods = dict(vars(ActorRolloutRefWorker))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    door.install_guard()
    assert dict(vars(ActorRolloutRefWorker)) == methods
    (record,) = caplog.records
    assert "residency leaves verl.workers.engine_workers as it is" in record.getMessage()
    assert "verl (of unknown version) has no" in str(record.exc_info[1])


def test_a_version_without_a_critics_update_has_the_other_guards_and_a_warning_that_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class ActorRolloutRefWorker:
        def update_actor(self, data: object) -> object:
            return self.compute_ref_log_prob(data)

        def compute_ref_log_prob(self, data: object) -> object:
            return data

    module = type(sys)("verl.workers.fsdp_workers")
    module.ActorRolloutRefWorker = ActorRolloutRefWorker
    monkeypatch.setitem(sys.modules, module.__name__, module)
    door.install_guard()
    (record,) = caplog.records
    assert "fsdp_workers.CriticWorker.update_critic: no memory is given back" in record.getMessage()
    assert record.getMessage().startswith("verl (of unknown version) has no")
    assert ActorRolloutRefWorker().update_actor("batch") == "batch"
    # The outermost alone, and only where there is a device.
    assert door.guard_statistics().num_transitions == int(torch.accelerator.is_available())
