"""What may be said of a script follows from what was found of its run, and never from less."""

import random
from typing import Any

import pytest
from tests.dryrun.facts import SEEN, facts

from residency._dryrun._verdict import Verdict, left_out, verdict_of, went_on

NOTHING = dict.fromkeys(SEEN, 0)
ERROR = [{"phase": "forward"}]
INFERENCE = NOTHING | {"forward_passes": 3}
BY_HAND = SEEN | {"steps": 0}
OF_NO_TRAINING = {"seen": NOTHING, "has_optimizer": False}
BEGUN = NOTHING | {"begun_passes": 1}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, Verdict.FITS),
        ({"ended": "left"}, Verdict.FITS),
        ({"ended": "stopped", "error": "ZeroDivisionError"}, Verdict.FITS),
        ({"ended": "error", "error": "ValueError"}, Verdict.FAILED),
        ({"ended": "running"}, Verdict.KILLED),
        ({"was_interrupted": True}, Verdict.INTERRUPTED),
        ({"signals": ["SIGINT"]}, Verdict.INTERRUPTED),
        ({"peak_reserved": 0}, Verdict.UNSEEN),
        # No step: an optimizer was made and a pass with gradients begun, or there is neither.
        ({"seen": BEGUN}, Verdict.UNSEEN),
        ({"seen": BY_HAND}, Verdict.UNSEEN),
        ({"seen": NOTHING}, Verdict.UNSEEN),
        # Another kind of run, such as a merge: it meant no training, and nothing went wrong.
        (OF_NO_TRAINING, Verdict.FITS),
        (OF_NO_TRAINING | {"seen": NOTHING | {"saves": 1}}, Verdict.FITS),
        (OF_NO_TRAINING | {"seen": BEGUN}, Verdict.UNSEEN),
        (OF_NO_TRAINING | {"has_optimizer": True}, Verdict.UNSEEN),
        (OF_NO_TRAINING | {"caught": "ValueError: no data (train.py:3)"}, Verdict.UNSEEN),
        (OF_NO_TRAINING | {"has_failed": True}, Verdict.UNSEEN),
        (OF_NO_TRAINING | {"peak_reserved": 0}, Verdict.UNSEEN),
        (OF_NO_TRAINING | {"ended": "left"}, Verdict.UNSEEN),
        (OF_NO_TRAINING | {"ended": "error", "error": "ValueError"}, Verdict.FAILED),
        (
            OF_NO_TRAINING | {"out_of_memory": ERROR, "since_error": NOTHING},
            Verdict.DOES_NOT_FIT,
        ),
        ({"seen": BY_HAND, "has_optimizer": False}, Verdict.FITS),
        ({"seen": INFERENCE, "has_optimizer": False}, Verdict.FITS),
        ({"seen": INFERENCE}, Verdict.FITS),
        # An error for memory, and what came after it.
        ({"out_of_memory": ERROR, "since_error": NOTHING}, Verdict.DOES_NOT_FIT),
        (
            {"out_of_memory": ERROR, "since_error": NOTHING, "ended": "running"},
            Verdict.DOES_NOT_FIT,
        ),
        ({"out_of_memory": ERROR, "since_error": NOTHING, "ended": "error"}, Verdict.DOES_NOT_FIT),
        ({"out_of_memory": ERROR, "since_error": NOTHING | {"steps": 1}}, Verdict.FITS),
        ({"out_of_memory": ERROR, "since_error": SEEN | {"steps": 0}}, Verdict.DOES_NOT_FIT),
        (
            {"out_of_memory": ERROR, "since_error": INFERENCE, "phase_of_error": "a/evaluate"},
            Verdict.FITS,
        ),
        (
            {"out_of_memory": ERROR, "since_error": INFERENCE, "phase_of_error": "save"},
            Verdict.DOES_NOT_FIT,
        ),
        (
            {
                "out_of_memory": ERROR,
                "since_error": NOTHING | {"saves": 1},
                "phase_of_error": "save",
            },
            Verdict.FITS,
        ),
    ],
)
def test_a_verdict_follows_from_what_was_found(changed: dict[str, Any], verdict: Verdict) -> None:
    assert verdict_of(facts(**changed)) is verdict


EVENTS = ["steps", "backward_passes", "forward_passes", "begun_passes", "saves", "error"]
PHASES = ["forward", "backward", "optimizer step", "evaluate", "epoch/generate", "save", "set up"]


def drawn(generator: random.Random) -> tuple[list[str], dict[str, Any]]:
    """Draws the events of a run, and how it ended."""
    kinds = generator.sample(EVENTS, generator.randint(1, len(EVENTS)))
    events = [generator.choice(kinds) for _ in range(generator.randint(0, 12))]
    rest = {
        "ended": generator.choice(["finished"] * 5 + ["left", "stopped", "error", "running"]),
        "has_optimizer": "steps" in events or generator.random() < 0.5,
        "peak_reserved": generator.choice([0, 1, 1, 1, 1]),
        "phase_of_error": generator.choice(PHASES),
        "signals": generator.choice([[], [], [], [], ["SIGTERM"]]),
    }
    return events, rest


def of_events(events: list[str], rest: dict[str, Any]) -> dict[str, Any]:
    last = max((place for place, event in enumerate(events) if event == "error"), default=None)
    since = None if last is None else events[last:]
    return facts(
        **rest,
        seen={name: events.count(name) for name in SEEN},
        since_error=since and {name: since.count(name) for name in SEEN},
        out_of_memory=[] if last is None else ERROR,
    )


def test_no_run_is_said_to_fit_of_which_nothing_came_to_its_end_after_the_last_error() -> None:
    generator = random.Random(7)
    verdicts = set()
    for _ in range(4000):
        events, rest = drawn(generator)
        found = of_events(events, rest)
        verdict = verdict_of(found)
        verdicts.add(verdict)
        if verdict is not Verdict.FITS:
            continue
        assert rest["ended"] not in ("error", "running"), (events, rest)
        assert not rest["signals"], (events, rest)
        last = events[::-1].index("error") if "error" in events else len(events)
        after = set(events[len(events) - last :]) - {"begun_passes"}
        assert after or not (events or rest["has_optimizer"]), (events, rest)
        if "steps" not in after and "steps" in events:  # after the training, in another part of it
            assert rest["phase_of_error"] in ("evaluate", "epoch/generate", "save"), (events, rest)
        if rest["has_optimizer"] and "begun_passes" in events:
            assert "steps" in events, (events, rest)
        # What takes evidence away leaves less to say.
        assert verdict_of(of_events([*events, "error"], rest)) is Verdict.DOES_NOT_FIT
        meant = rest["has_optimizer"] or rest["ended"] != "finished"
        assert verdict_of(of_events([], rest)) is (Verdict.UNSEEN if meant else Verdict.FITS)
        for changed in ({"ended": "running"}, {"ended": "error"}, {"was_interrupted": True}):
            assert verdict_of(found | changed) is not Verdict.FITS
    assert verdicts == set(Verdict)


def test_a_run_without_an_error_for_memory_has_gone_on() -> None:
    assert went_on(facts())


def test_what_a_trainer_does_later_is_left_out_of_a_training_that_one_has_ended_alone() -> None:
    said = "left out: a trainer's work after these steps"
    of_trainer = list(left_out(facts(is_cut=True)))
    assert [line.startswith(said) for line in of_trainer] == [True]
    for changed in ({"is_cut": False}, {"is_cut": True, "has_framework": False}):
        assert list(left_out(facts(**changed))) == []


def test_the_status_is_0_for_what_fits_alone() -> None:
    statuses = {each: each.status for each in Verdict}
    assert statuses.pop(Verdict.FITS) == 0
    assert statuses.pop(Verdict.DOES_NOT_FIT) == 1
    assert set(statuses.values()) == {3}
