"""A resume that is exact is proved, and one that is not is told by the first value that differs."""

import maker
import pytest
import torch
from runs import Run

from residency import InvalidArgumentError
from residency._checkpoint import _rng
from residency.testing import ResumeError, verify_resume


class Keeper:
    """Saves and restores as a checkpointer does."""

    def __init__(self, directory, *, forgets=(), rng=True):
        self.directory = directory
        self.forgets = forgets
        self.rng = rng

    def save(self, step, state):
        part = maker.Part(state, rng=_rng.random_states())
        self.saved = maker.write(self.directory / f"step-{step:08d}", part)

    def restore(self, state):
        kept = {name: value for name, value in state.items() if name not in self.forgets}
        maker.restore_state(kept, self.saved, rng=self.rng)

    def wait(self):
        pass

    def close(self):
        pass


def runs(device, *, offloads=(False, False)):
    pending = list(offloads)

    def make_run():
        run = Run(device, offload=pending.pop(0))
        return run.state, lambda step: run.train([step])

    return make_run


@pytest.mark.parametrize("offloads", [(False, False), (True, True), (False, True)])
def test_an_exact_resume_is_proved(device, offloads):
    proofs = [
        verify_resume(runs(device, offloads=offloads), steps=4, make_checkpointer=Keeper)
        for _ in range(2)
    ]
    assert proofs[0].num_tensors > 20
    assert proofs[0].num_values > 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forgets": ["optimizer"]}, r"right after the restore of step 2, .*optimizer"),
        ({"forgets": ["model"]}, r"right after the restore of step 2, model\.\S+ differs first"),
        ({"forgets": ["scheduler"]}, r"scheduler\S* is"),
        ({"forgets": ["extra"]}, r"extra\S* is"),
        ({"rng": False}, r"right after the restore of step 2, .*rng"),
    ],
)
def test_what_a_resume_forgets_is_named(device, settings, message):
    def make(directory):
        return Keeper(directory, **settings)

    with pytest.raises(ResumeError, match=message):
        verify_resume(runs(device), steps=4, make_checkpointer=make)


def test_a_run_whose_steps_depend_on_what_is_not_saved_is_told_at_the_end(device):
    counts = []

    def make_run():
        run = Run(device)
        counts.append(len(counts))

        def step(index):
            run.train([index])
            with torch.no_grad():
                run.model.scale += 0.5 * counts[-1]

        return run.state, step

    with pytest.raises(ResumeError, match=r"step 4, model\.scale differs first, at element 0"):
        verify_resume(make_run, steps=4, make_checkpointer=Keeper)


@pytest.mark.parametrize(("steps", "save_after"), [(1, None), (4, 4), (4, 0)])
def test_steps_on_both_sides_of_the_save_are_needed(steps, save_after):
    with pytest.raises(InvalidArgumentError, match="at least one step"):
        verify_resume(lambda: ({}, print), steps=steps, save_after=save_after)
