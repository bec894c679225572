"""The schedule of an overlapped step: numbers in, numbers out, without a device."""

from hypothesis import given, settings, strategies as st

from residency._optim._overlap._schedule import (
    STEP_BEGINS,
    STEP_IS_OVER,
    RoomSchedule,
    Trigger,
    TriggerKind,
)

# Of one loop: how much each of its modules adds, and how much more it needs meanwhile.
SHAPES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 80)), min_size=1, max_size=6)
SLOTS = 7
SIZES = st.lists(st.integers(1, 20), min_size=3, max_size=12)


def cycle(shape, size, base):
    """Yields the triggers of a cycle with the level there, the most until the next one, and until
    the step.
    """
    level, passed = base, []
    for number, (adds, needs) in enumerate(shape):
        passed.append((Trigger(TriggerKind.FORWARD, number), level, level + size * (adds + needs)))
        level += size * adds
    for number, (adds, needs) in reversed(list(enumerate(shape))):
        passed.append((Trigger(TriggerKind.BACKWARD, number), level, level + size * needs))
        level -= size * adds
    passed.append((STEP_BEGINS, base, base + SLOTS))
    passed.append((STEP_IS_OVER, base, base))
    return passed


def until(passed, index):
    """Returns the most that the run has until the next trigger, or until the step if state that
    comes in then stays so long.
    """
    if passed[index][0].kind != TriggerKind.BACKWARD:
        return passed[index][2]
    return max(most for trigger, _, most in passed[index:] if trigger.kind == TriggerKind.BACKWARD)


@settings(max_examples=300, deadline=None)
@given(SHAPES, SIZES, st.integers(0, 1000))
def test_a_run_and_its_room_are_never_above_its_passes_and_the_slots(shape, sizes, base):
    schedule, peak = RoomSchedule(), 0
    for size in sizes:
        passed = cycle(shape, size, base)
        peak = max(peak, *(most for (kind, _), _, most in passed if kind != TriggerKind.STEP))
        before = base
        for index, (trigger, level, _) in enumerate(passed):
            room = schedule.at(trigger, level, before)
            assert room == 0 or until(passed, index) + room <= peak + SLOTS
            before = passed[index][2] if schedule.is_measuring else 0


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 20), st.integers(0, 1000))
def test_from_the_third_cycle_on_all_that_the_peak_leaves_is_room(shape, size, base):
    schedule, rooms = RoomSchedule(), {}
    for _ in range(4):
        before = base
        for trigger, level, most in cycle(shape, size, base):
            rooms[trigger] = schedule.at(trigger, level, before)
            before = most
    passed = cycle(shape, size, base)
    peak = max(most for *_, most in passed)
    assert rooms == {
        trigger: peak - until(passed, index) for index, (trigger, *_) in enumerate(passed)
    }


def test_what_was_never_seen_has_no_room():
    schedule = RoomSchedule()
    passed = cycle([(10, 5), (20, 5)], 3, 100)
    for _ in range(3):
        for trigger, level, most in passed:
            schedule.at(trigger, level, most)
    assert schedule.at(Trigger(TriggerKind.FORWARD, 9), 100, 100) == 0
    assert schedule.at(Trigger(TriggerKind.OTHER, 0), 100, 100) == 0


def test_without_forward_passes_there_is_no_room():
    schedule = RoomSchedule()
    for _ in range(4):
        assert schedule.at(Trigger(TriggerKind.BACKWARD, 0), 100, 900) == 0
        assert schedule.at(STEP_BEGINS, 50, 100) == 0
        assert schedule.at(STEP_IS_OVER, 50, 50) == 0


def test_the_cycle_after_one_that_went_higher_is_measured():
    schedule = RoomSchedule()
    sizes = [3, 3, 3, 2, 4, 3, 4]
    for size, is_measured in zip(sizes, [True, True, True, False, False, True, False], strict=True):
        for trigger, level, most in cycle([(10, 5), (20, 5)], size, 100):
            if trigger == STEP_BEGINS:
                assert schedule.is_measuring == is_measured
            schedule.at(trigger, level, most)
