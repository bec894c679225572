"""Whatever training does between the calls, a published save equals the state at its call.

On the simulated device in late order, with the checker on: a writer that does not pass the gate
shows as other bytes, or as a race.
"""

from __future__ import annotations

import gc
import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import residency

ACTIONS = (
    "step",
    "closure",
    "forward",
    "save",
    "snapshot",
    "restore",
    "load_into",
    "offload",
    "onload",
    "mutate",
    "free",
    "load_state_dict",
)


class Script:
    """Carries out actions on a run, and remembers what every save must hold."""

    def __init__(self, lab, directory, *, offload, max_in_flight, spare):
        self.lab = lab
        self.run = lab.run(offload=offload, bucket=2048)
        self.checkpointer = residency.Checkpointer(
            directory, max_in_flight=max_in_flight, spare=spare
        )
        self.directory = directory
        self.expected = {}
        self.snapshots = []

    def step(self):
        self.run.step()

    def closure(self):
        self.run.step(closure=True)

    def forward(self):
        self.run.forward()

    def save(self):
        step = len(self.expected)
        self.expected[step] = self.run.clones()  # in stream order, so that much is still to run
        self.checkpointer.save(step, self.run.state)

    def snapshot(self):
        expected = self.run.clones()
        self.snapshots.append((residency.snapshot(self.run.state), expected))

    def restore(self):
        if self.expected:
            step = self.checkpointer.restore(self.run.state)
            self.lab.same(self.run.copy(), self.expected[step])

    def load_into(self):
        self.checkpointer.wait()
        if self.expected:
            step = max(self.expected)
            residency.load_into(self.run.model, self.checkpointer._directory.folder(step))

    def offload(self):
        if not isinstance(self.run.optimizer, residency.OffloadedOptimizer):
            residency.offload_optimizer(self.run.optimizer, bucket=2048)

    def onload(self):
        if isinstance(self.run.optimizer, residency.OffloadedOptimizer):
            residency.onload_optimizer(self.run.optimizer)

    def mutate(self):
        tensors = [*self.run.model.parameters(), *self.run.model.buffers()]
        with residency.mutating(*tensors), torch.no_grad():
            for tensor in tensors:
                tensor.mul_(2)

    def free(self):
        """Drops gradients and a whole run, whose memory the next one may take."""
        self.run.optimizer.zero_grad()
        other = self.lab.run(offload=False)
        other.step()
        expected = other.clones()
        self.snapshots.append((residency.snapshot(other.state), expected))
        del other
        gc.collect()
        torch.ones(4096, device=self.lab.device).mul_(3)

    def load_state_dict(self):
        saved = self.lab.copied(self.run.optimizer.state_dict())
        for state in saved["state"].values():
            state["exp_avg"].add_(1)
        self.run.optimizer.load_state_dict(saved)

    def check(self):
        self.checkpointer.close()
        for snapshot, expected in self.snapshots:
            self.lab.same(snapshot.tree, expected)
        with residency.Checkpointer(self.directory) as checkpointer:
            assert checkpointer.steps() == sorted(self.expected)
            for step, expected in self.expected.items():
                fresh = self.lab.run(offload=step % 2 == 0)
                assert checkpointer.restore(fresh.state, step=step) == step
                self.lab.same(fresh.copy(), expected)


def _programs(count):
    """Decorates a test of a program of saves; each takes its own ones, the same in every run."""
    return lambda test: settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )(
        given(
            offload=st.booleans(),
            max_in_flight=st.integers(1, 2),
            spare=st.sampled_from([None, "all", "512B"]),
            actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=12),
        )(test)
    )


@_programs(10)
def test_every_save_and_snapshot_equals_the_state_at_its_call(
    lab, no_loans, offload, max_in_flight, spare, actions
):
    check(lab, no_loans, offload, max_in_flight, spare, actions)


@pytest.mark.whole
@_programs(50)
def test_more_saves_and_snapshots_equal_the_states_at_their_calls(
    lab, no_loans, offload, max_in_flight, spare, actions
):
    check(lab, no_loans, offload, max_in_flight, spare, actions)


def check(lab, no_loans, offload, max_in_flight, spare, actions):
    directory = tempfile.mkdtemp()
    try:
        script = Script(lab, directory, offload=offload, max_in_flight=max_in_flight, spare=spare)
        for action in actions:
            getattr(script, action)()
        script.check()
        del script
        gc.collect()
        assert no_loans()
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("given", [[torch.ones(1)], torch.nn.Linear(1, 1), None, {"a": 1}])
def test_mutating_takes_tensors_alone(given):
    with (
        pytest.raises(residency.InvalidArgumentError, match=r"mutating\(\*model.parameters\(\)\)"),
        residency.mutating(torch.ones(1), given),
    ):
        pass
