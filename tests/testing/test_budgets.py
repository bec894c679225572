"""A test with a budget says its peak, where it passes too: in the summary and in JUnit's file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

pytestmark = pytest.mark.sim

MIB = 1 << 20
SOURCE = """
import pytest
import torch

@pytest.mark.device_memory(limit="64MiB")
def test_limited(sim_device):
    torch.empty(24 << 20, dtype=torch.uint8, device=sim_device)  # a segment of its own
    torch.empty(3 << 20, dtype=torch.uint8, device=sim_device)  # in what is cached

@pytest.mark.device_memory(growth="0B")
def test_growing(sim_device):
    torch.empty(3 << 20, dtype=torch.uint8, device=sim_device)  # in a segment of 20 MiB

def test_without_a_budget(sim_device):
    torch.empty(3 << 20, dtype=torch.uint8, device=sim_device)

kept = []

@pytest.mark.device_memory(growth="0B")
def test_leaking(sim_device):
    kept.append(torch.empty(5 << 20, dtype=torch.uint8, device=sim_device))
"""
EXPECTED = {
    "test_limited": {"peak_held": 24 * MIB, "peak_reserved": 24 * MIB, "limit": 64 * MIB},
    "test_growing": {"peak_held": 3 * MIB, "peak_reserved": 20 * MIB},
    "test_without_a_budget": {},
    "test_leaking": {"peak_held": 5 * MIB, "peak_reserved": 20 * MIB},
}


@pytest.mark.whole
@pytest.mark.parametrize("arguments", [["-p", "no:xdist"], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_budget_has_its_peak_in_the_summary_and_in_junits_file(
    run_tests, pytester: pytest.Pytester, arguments: list[str]
) -> None:
    if arguments == ["-n", "1"]:
        pytest.importorskip("xdist")
    result = run_tests(SOURCE, *arguments, "-rA", "--junitxml=junit.xml")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*Captured device memory call*",
            "tensors held at most 24.00 MiB; * reserved at most 24.00 MiB of 64.00 MiB",
            "tensors held at most 3.00 MiB; the allocator had reserved at most 20.00 MiB",
            "The test left 5.00 MiB on sim:0:*",
            "tensors held at most 5.00 MiB; the allocator had reserved at most 20.00 MiB",
        ]
    )
    cases = ElementTree.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    found = {
        case.attrib["name"]: {
            each.attrib["name"]: each.attrib["value"] for each in case.iter("property")
        }
        for case in cases
    }
    assert found == {
        test: {f"device_memory_{name}_bytes": str(size) for name, size in sizes.items()}
        for test, sizes in EXPECTED.items()
    }
