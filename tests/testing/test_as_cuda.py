"""Code that says "cuda" is tested on the simulated accelerator by one line of configuration."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.sim

SAYS_CUDA = """
    import pytest, torch

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # as modules do when they are imported

    def step():
        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(8, 1024, device="cuda")).sum().backward()
        optimizer.step()

    @pytest.mark.device_memory(limit="32MiB")
    def test_fits():
        assert DEVICE == "cuda"
        step()

    @pytest.mark.device_memory(limit="8MiB")
    def test_does_not_fit():
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            step()
"""


def test_code_that_says_cuda_has_the_simulated_accelerator_there(run_tests) -> None:
    result = run_tests(SAYS_CUDA, ini="residency_device = cuda\n")
    result.assert_outcomes(passed=2)


def test_another_name_is_refused_before_a_test_runs(run_tests) -> None:
    result = run_tests("def test_it(): pass", ini="residency_device = gpu\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*residency_device is 'gpu'; expected sim or cuda.*"])


def test_a_marker_that_names_a_device_is_told_of_the_setting(run_tests) -> None:
    result = run_tests(
        """
        import pytest

        @pytest.mark.sim_device(device="cuda")
        def test_it():
            pass
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*does not know device; it takes *residency_device = cuda*"])
