"""What a test's report says of the processes that it waited for in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

HANGS = """
import subprocess, sys, threading

CHILD = '''
import faulthandler, sys, time
if len(sys.argv) > 1:
    faulthandler.enable(open(sys.argv[1], "w"))

def wait_for_good():
    time.sleep(600)

wait_for_good()
'''

def test_waits(tmp_path):
    crash = str(tmp_path / "child.crash")
    noting = subprocess.Popen([sys.executable, "-c", CHILD, crash])
    telling = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert noting.wait() == telling.returncode == -6
    assert telling.returncode == 0, telling.stderr
"""


def test_processes_say_where_they_are_before_a_test_runs_into_its_limit(
    pytester: pytest.Pytester,
) -> None:
    pytest.importorskip("pytest_timeout")
    pytester.makepyfile(HANGS)
    tools = Path(__file__).parent / "tools"
    result = pytester.runpytest_subprocess("-p", "hangs", f"-opythonpath={tools}", "--timeout=8")
    result.assert_outcomes(failed=1)
    report, _, processes = result.stdout.str().partition("Captured processes")
    for part in (report, processes):  # of the process that writes to stderr, and to a file
        assert "Fatal Python error: Aborted" in part, part
        assert "in wait_for_good" in part, part
    assert "python: ['S']" in processes
    assert "Timeout" not in report  # the test ended by itself
