"""What the plugin reports of tests that fail: each run is another project's, in its own process."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sim_only = pytest.mark.sim


@sim_only
def test_bytes_that_a_test_leaves_behind_fail_it_with_the_figures(run_tests) -> None:
    result = run_tests(
        """
        import pytest, torch

        kept = []

        @pytest.fixture
        def before(sim_device):
            return torch.ones(1024, 1024, device=sim_device)

        @pytest.mark.device_memory(growth="1MiB")
        def test_leaks(before):
            kept.append(torch.ones(512, 1024, device="sim"))

        @pytest.mark.device_memory(growth="0B")
        def test_after_it():
            pass
        """
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "The test left 2.00 MiB on sim:0: 4.00 MiB were allocated before it and 6.00 MiB "
            "after it; device_memory(growth='1MiB') allows 1.00 MiB.",
            "The tensors that it left, and then all tensors on the device:",
            "the largest:",
            "*2.00 MiB  *.kept*0?",
            "memory of sim:0",
            "  held *6.00 MiB*allocated to live tensors",
        ]
    )
    result.stdout.no_fnmatch_line("*4.00 MiB  *before*")  # a fixture's, there before the test


@pytest.mark.whole
@sim_only
def test_foreign_tensors_neither_run_nor_hide_what_a_test_left(run_tests) -> None:
    result = run_tests(
        """
        import pytest, torch

        kept = []

        class Evil(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                raise RuntimeError("foreign code ran")

            device = shape = nbytes = property(lambda self: 1 / 0)

        @pytest.mark.device_memory(growth="0B")
        def test_leaks(sim_device):
            kept.append(torch.ones(1024, device=sim_device).as_subclass(Evil))
            kept.append(torch.eye(3).to_sparse())
            kept.append(torch.empty(10, device="meta"))
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["The test left 4.00 KiB on sim:0*", "the largest:", "*4.00 KiB  *.kept*0?"]
    )
    result.stdout.no_fnmatch_line("*foreign code ran*")


@sim_only
def test_missing_waits_and_too_little_memory_fail_the_test_that_has_them(run_tests) -> None:
    result = run_tests(
        """
        import pytest, torch

        def save(tensor, wait):
            lane = torch.Stream(device=tensor.device)
            if wait:
                lane.wait_stream(torch.accelerator.current_stream())
            host = torch.zeros(tensor.shape).pin_memory()
            with lane:
                host.copy_(tensor, non_blocking=True)
            return host, lane

        @pytest.mark.parametrize("wait", [True, False])
        def test_race(sim_device, wait):
            save(torch.ones(100, device=sim_device).add_(1), wait)[1].synchronize()

        @pytest.mark.parametrize("wait", [True, False])
        def test_stale_bytes(sim_device, wait):
            host, lane = save(torch.ones(100, device=sim_device), True)
            if wait:
                lane.synchronize()
            assert host.sum() == 100, "stale"

        @pytest.mark.parametrize("parts", [1, 2])
        @pytest.mark.device_memory(limit="32MiB")
        def test_fits(parts):
            held = [torch.empty(20 << 20, dtype=torch.uint8, device="sim") for _ in range(parts)]
        """
    )
    result.assert_outcomes(failed=3, passed=3)
    result.stdout.fnmatch_lines(
        [
            "E*RaceError: race on * bytes*",
            "E*AssertionError: stale",
            "E*OutOfMemoryError: *total capacity of 32.00 MiB*",
            "E*device_memory(limit='32MiB'): the test had 32.00 MiB, and its tensors held at most "
            "20.00 MiB of them at once.",
            "E*residency: the device's memory when this failed:",
            "E*20.00 MiB more were held when it failed, by values without a name of their own; *",
            "FAILED *::test_race?False?*",
            "FAILED *::test_stale_bytes?False?*",
            "FAILED *::test_fits?2?*",
        ]
    )


@pytest.mark.whole
@sim_only
def test_queued_work_that_fails_is_reported_on_the_test_that_queued_it(run_tests) -> None:
    result = run_tests(
        """
        import pytest, torch
        from residency import sim

        def queue_a_failure(times=1):
            target, bad = torch.zeros(9, device="sim"), torch.tensor([99], device="sim")
            for _ in range(times):
                target.index_fill_(0, bad, 1.0)

        def test_queues(sim_device):
            queue_a_failure(times=2)

        def test_fails_itself(sim_device):
            queue_a_failure()
            assert 1 == 2

        @pytest.fixture
        def queues_at_the_end(sim_device):
            yield
            queue_a_failure()

        @pytest.mark.sim_device(capacity="64MiB")
        def test_with_a_fixture_that_queues(queues_at_the_end):
            pass

        def test_the_settings_came_back():
            assert sim.settings()["capacity"] == 8 << 30

        @pytest.fixture(scope="module")
        def queues_outside():
            queue_a_failure()

        def test_after_work_from_outside(queues_outside, sim_device):
            pass

        def test_after_them_all(sim_device):
            assert torch.ones(9, device=sim_device).sum() == 9
        """
    )
    result.assert_outcomes(failed=2, passed=3, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_with_a_fixture_that_queues*",
            "QueuedWorkError: Work that was queued towards the end of this test failed "
            "when it ran: IndexError: *",
            "*ERROR at setup of test_after_work_from_outside*",
            "QueuedWorkError: Work that was queued before this test failed when it ran: Index*",
            "*_ test_queues _*",
            "Work that was queued by the test failed when it ran (the first of 2 failures): "
            "IndexError: *",
            "torch.accelerator.synchronize() after the lines *",
            "*_ test_fails_itself _*",
            "E*assert 1 == 2",
            "E*Work that was queued by the test failed when it ran: IndexError: *",
        ]
    )


@pytest.mark.whole
@sim_only
def test_a_device_that_a_test_loses_is_there_again_for_the_next(run_tests, monkeypatch) -> None:
    monkeypatch.setenv("RESIDENCY_TEST_DEVICE", "sim-as-cuda")
    result = run_tests(
        """
        import pytest, torch
        from residency import sim

        def lose(device):
            torch.zeros(3, device=device)[torch.tensor([9], device=device)]

        def test_loses_it(tested_device):
            lose(tested_device)

        def test_uses_it(tested_device):
            assert torch.ones(3, device=tested_device).sum().item() == 3.0

        def test_loses_it_and_takes_it_back(tested_device):
            lose(tested_device)
            with pytest.raises(torch.AcceleratorError):
                torch.accelerator.synchronize()
            sim.enable(**sim.settings())

        def test_uses_it_again(tested_device):
            assert torch.ones(3, device=tested_device).sum().item() == 3.0
        """
    )
    result.assert_outcomes(failed=1, passed=3)
    result.stdout.fnmatch_lines(
        ["*Work that was queued by the test failed*: AcceleratorError: CUDA error: device-side*"]
    )


@pytest.mark.whole
@sim_only
def test_one_failed_test_does_not_make_the_next_ones_fail(run_tests) -> None:
    # The failed tests' tensors live on in tracebacks, in the way of the settings to come.
    result = run_tests(
        """
        import pytest, torch
        from residency import sim

        @pytest.fixture(scope="module", autouse=True)
        def around():
            sim.enable("1GiB")
            yield
            assert sim.settings()["capacity"] == 1 << 30

        @pytest.mark.sim_device(capacity="64MiB")
        def test_fails_with_tensors():
            held = torch.ones(12 << 20, device="sim")
            assert held is None

        @pytest.mark.sim_device(capacity="16MiB")
        def test_on_a_smaller_device():
            assert torch.accelerator.memory_reserved() == 0

        @pytest.mark.sim_device(dry=True)
        def test_fails_in_dry_mode():
            held = torch.ones(12 << 20, device="sim")
            assert held is None

        def test_that_takes_no_device():
            assert not sim.settings()["dry"]

        def test_in_real_mode(sim_device):
            assert torch.ones(9, device=sim_device).sum() == 9

        @pytest.mark.device_memory(growth="0B")
        def test_whose_growth_is_judged(sim_device):
            pass

        @pytest.mark.sim_device(capacity="64MiB")
        def test_fails_last():
            held = torch.ones(9, device="sim")
            assert held is None
        """
    )
    result.assert_outcomes(failed=3, passed=4)


@pytest.mark.whole
@sim_only
def test_tensors_that_a_passed_test_leaves_where_they_cannot_stay_are_its_error(run_tests) -> None:
    result = run_tests(
        """
        import pytest, torch
        from residency import sim

        kept = []

        @pytest.fixture(scope="module", autouse=True)
        def small():
            sim.enable("16MiB")

        @pytest.mark.sim_device(capacity="64MiB")
        def test_leaks():
            kept.append(torch.ones(10 << 20, device="sim"))
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "RefusedError: A test left tensors behind, so that the settings from before it cannot "
            "come back: capacity is 16.00 MiB, and 40.00 MiB are in use; *"
        ]
    )


@pytest.mark.whole
@sim_only
def test_a_marker_that_means_nothing_is_named(run_tests) -> None:
    result = run_tests(
        """
        import pytest

        @pytest.mark.sim_device(capacity="1GiB")
        @pytest.mark.device_memory(limit="2GiB")
        def test_two_capacities(): ...

        @pytest.mark.sim_device(speed=3)
        def test_unknown(): ...

        @pytest.mark.device_memory("2GiB")
        def test_positional(): ...

        @pytest.mark.device_memory(growth="1 GB")
        def test_decimal(): ...

        @pytest.mark.parametrize("sim_device", ["late"], indirect=True)
        def test_parameter(sim_device): ...

        def test_fine(sim_device): ...
        """
    )
    result.assert_outcomes(errors=5, passed=1)
    result.stdout.fnmatch_lines(
        [
            "InvalidArgumentError: sim_device(capacity='1GiB') and device_memory(limit='2GiB') "
            "both say how many bytes the device has; keep one of them.",
            "InvalidArgumentError: sim_device does not know speed; it takes capacity, check_races,"
            " clock, context, dry, schedule, share, workspaces.",
            "InvalidArgumentError: device_memory takes keywords only; found '2GiB' without one.",
            "InvalidArgumentError: growth is '1 GB'; expected an int of bytes*",
            "InvalidArgumentError: The parameter of sim_device is 'late'; expected a mapping *",
        ]
    )


def test_an_unknown_schedule_stops_the_collection(run_tests) -> None:
    result = run_tests(
        """
        import pytest

        @pytest.mark.sim_device(schedule=["late", "soon"])
        def test_it(): ...
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it: schedule is ?'late', 'soon'?; expected one or *"])


@pytest.mark.whole
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("residency_capacity = 8 GB", "residency_capacity*capacity is '8 GB'*"),
        ("residency_context = all", "residency_capacity, _context*context is 'all'*"),
        ("residency_schedules = soon", "*schedule is ?'soon'?; expected one or several of 'late'*"),
        ("residency_missing = ignore", "residency_missing is 'ignore'; expected fail or skip."),
    ],
)
def test_a_default_that_means_nothing_stops_the_run(run_tests, line: str, message: str) -> None:
    result = run_tests("def test_it(): ...", ini=line)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


USES_THE_DEVICE = """
    import torch

    def test_one(sim_device): ...
    def test_two(tested_device): ...
    def test_three(): ...
"""


@pytest.mark.whole
def test_a_machine_that_cannot_build_the_simulator_fails_the_tests_that_need_it(
    run_tests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("RESIDENCY_CACHE", str(tmp_path / "empty"))
    result = run_tests(USES_THE_DEVICE)
    result.assert_outcomes(errors=2, passed=1)
    result.stdout.fnmatch_lines(
        [
            "The simulated accelerator is compiled *lacks the C++ compiler no-such-compiler *",
            "(residency_missing = skip in pytest's configuration leaves such tests out.)",
        ]
    )
    result = run_tests(USES_THE_DEVICE, "-rs", ini="residency_missing = skip")
    result.assert_outcomes(skipped=2, passed=1)
    result.stdout.fnmatch_lines(["SKIPPED*lacks the C++ compiler no-such-compiler*"])


@pytest.mark.whole
def test_a_failed_build_is_tried_once_and_shown(
    run_tests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("RESIDENCY_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("MAX_JOBS", "1")
    result = run_tests(USES_THE_DEVICE)
    result.assert_outcomes(errors=2, passed=1)
    output = result.stdout.str() + result.stderr.str()
    assert output.count("building the simulated accelerator") == 2  # one build: start and end


@pytest.mark.whole
def test_a_device_that_is_not_there_is_named_and_the_simulated_one_left_out(
    run_tests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESIDENCY_TEST_DEVICE", "xpu")
    result = run_tests(USES_THE_DEVICE, "-rs")
    result.assert_outcomes(skipped=1, errors=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "RefusedError: RESIDENCY_TEST_DEVICE is 'xpu', and torch finds * in this process. *",
            "SKIPPED*needs the simulated accelerator; RESIDENCY_TEST_DEVICE is 'xpu'",
        ]
    )


def test_a_run_that_takes_no_device_imports_no_torch(run_tests) -> None:
    result = run_tests(
        """
        import sys
        import pytest
        import residency.testing

        def test_it():
            assert "residency.testing.plugin" in sys.modules
            assert "torch" not in sys.modules
            residency.InvalidArgumentError
            assert "torch" not in sys.modules

        @pytest.mark.parametrize("number", [1, 2])
        def test_with_a_parameter(number): ...
        """
    )
    result.assert_outcomes(passed=3)


def test_without_pytest_the_plugin_says_what_to_install() -> None:
    script = (
        "import sys\n"
        "sys.modules['pytest'] = None\n"
        "import residency.testing\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n    import residency.testing.plugin\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip().endswith("Install it with: pip install 'residency[testing]'"), done


def test_the_plugin_is_registered_under_the_name_of_its_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = "residency.testing.plugin"
    assert project["entry-points"]["pytest11"] == {name: name}
