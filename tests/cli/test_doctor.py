"""``residency doctor`` describes any machine in ten lines, one where something is broken too."""

import pytest

from residency import _device, sim
from residency._cli import main
from residency._errors import BuildError


@pytest.fixture
def timed(device):
    sim.enable(clock=sim.Clock(h2d_bytes_per_second="4GiB", d2h_bytes_per_second="2GiB"))
    return device


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    return {line[:12].strip(): line[12:].strip() for line in lines}


@pytest.mark.sim  # a link's rate is known beforehand
def test_a_device_has_a_name_and_a_link_that_was_measured(timed, capsys) -> None:
    before = _device.memory_allocated(timed)
    found = lines_of(capsys)
    assert found["device"].startswith("1 x ")
    assert found["link"] == "4.00 GiB/s to the device, 2.00 GiB/s from it, both simulated"
    assert _device.memory_allocated(timed) == before
    assert found["simulator"].startswith("compiled")


def test_a_machine_without_a_device_or_a_compiler_is_described(monkeypatch, capsys) -> None:
    def lacks() -> bool:
        raise BuildError("this machine lacks Python.h (apt-get install python3-dev)")

    monkeypatch.setattr(_device, "accelerator", lambda: None)
    monkeypatch.setattr(sim, "is_built", lacks, raising=False)
    monkeypatch.setenv("CXX", "no-compiler-of-this-name")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = lines_of(capsys)
    assert found["device"].startswith("none")
    assert found["compiler"].startswith("no no-compiler-of-this-name")
    assert "python3-dev" in found["simulator"]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in found["settings"]


def test_a_line_that_fails_says_why_and_the_others_are_there(monkeypatch, capsys) -> None:
    def fails() -> None:
        raise RuntimeError("the driver is too old\nand more")

    monkeypatch.setattr(_device, "accelerator", fails)
    found = lines_of(capsys)
    assert found["device"] == found["link"] == "RuntimeError: the driver is too old"
    assert found["versions"].startswith("residency ")
