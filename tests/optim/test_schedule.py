"""The schedule of an overlapped step: numbers in, numbers out, without a device."""

from hypothesis import given, settings, strategies as st

from residency._optim._overlap._schedule import RoomSchedule, Trigger, TriggerKind

# Of the modules of a loop: how much each adds, and how much more it needs meanwhile.
SHAPES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 80)), min_size=1, max_size=6)
SLOTS = 7
SIZES = st.lists(st.integers(1, 20), min_size=3, max_size=12)
MODULES = 100  # from which the modules of another optimizer have their numbers


def step_begins(optimizer=0):
    return Trigger(TriggerKind.STEP_BEGINS, optimizer)


def step_is_over(optimizer=0):
    return Trigger(TriggerKind.STEP_IS_OVER, optimizer)


def passes(shape, size, base, first=0):
    """Yields the triggers of a pass through modules, with the level there and the most until the
    next one.
    """
    level, passed = base, []
    for number, (adds, needs) in enumerate(shape, first):
        passed.append((Trigger(TriggerKind.FORWARD, number), level, level + size * (adds + needs)))
        level += size * adds
    for number, (adds, needs) in reversed(list(enumerate(shape, first))):
        passed.append((Trigger(TriggerKind.BACKWARD, number), level, level + size * needs))
        level -= size * adds
    return passed


def cycle(shape, size, base, temporaries=SLOTS):
    return [
        *passes(shape, size, base),
        (step_begins(), base, base + temporaries),
        (step_is_over(), base, base),
    ]


def until(passed, index):
    """Returns the most that the run has until the next trigger, or until the step if state that
    comes in then stays so long.
    """
    most = passed[index][2]
    for trigger, _, later in passed[index:]:
        if trigger.kind != TriggerKind.BACKWARD:
            break
        most = max(most, later)
    return most


def check_bound(cycles, base):
    """Passes through cycles, each a list that ends with a step, and judges each room."""
    schedule, peak, before = RoomSchedule(), base, base
    for passed in cycles:
        peak = max(peak, *(most for _, _, most in passed))
        for index, (trigger, level, most) in enumerate(passed):
            room = schedule.at(trigger, level, before)
            assert room == 0 or until(passed, index) + room <= peak + SLOTS
            before = most if schedule.is_measuring else 0


@settings(max_examples=300, deadline=None)
@given(SHAPES, SIZES, st.integers(0, 1000), st.integers(0, 5000))
def test_a_run_and_its_room_are_never_above_its_own_peak_and_the_slots(
    shape, sizes, base, temporaries
):
    check_bound([cycle(shape, size, base, temporaries) for size in sizes], base)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(SHAPES, min_size=2, max_size=3),
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=0, max_size=3),
        min_size=4,
        max_size=16,
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_several_optimizers_have_one_bound_together(shapes, sizes, turns, base):
    cycles = []
    for index, parts in enumerate(sizes):  # a cycle with passes of these models, and a step
        passed = []
        for which, size in parts:
            number = which % len(shapes)
            passed += passes(shapes[number], size, base, MODULES * number)
        optimizer = turns[index % len(turns)]
        passed.append((step_begins(optimizer), base, base + SLOTS))
        passed.append((step_is_over(optimizer), base, base))
        cycles.append(passed)
    check_bound(cycles, base)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 20), st.integers(0, 1000))
def test_from_the_third_cycle_on_all_that_the_peak_leaves_is_room(shape, size, base):
    schedule, rooms = RoomSchedule(), {}
    for _ in range(4):
        before = base
        for trigger, level, most in cycle(shape, size, base, 0):
            rooms[trigger] = schedule.at(trigger, level, before)
            before = most
    passed = cycle(shape, size, base, 0)
    peak = max(most for *_, most in passed)
    assert rooms == {
        trigger: peak - until(passed, index) for index, (trigger, *_) in enumerate(passed)
    }


def test_what_was_never_seen_has_no_room():
    schedule = RoomSchedule()
    for _ in range(3):
        for trigger, level, most in cycle([(10, 5), (20, 5)], 3, 100):
            schedule.at(trigger, level, most)
    assert schedule.at(Trigger(TriggerKind.FORWARD, 9), 100, 100) == 0
    assert schedule.at(Trigger(TriggerKind.OTHER, 0), 100, 100) == 0


def test_cycles_after_one_that_went_higher_are_measured_until_one_goes_so_high():
    schedule = RoomSchedule()
    sizes = [3, 3, 3, 2, 4, 3, 4, 5, 1, 1, 1, 1, 1]
    measured = [True, True, *3 * [False], True, True, False, *4 * [True], False]
    for size, is_measured in zip(sizes, measured, strict=True):
        for trigger, level, most in cycle([(10, 5), (20, 5)], size, 100):
            if trigger.kind == TriggerKind.STEP_BEGINS:
                assert schedule.is_measuring == is_measured
            schedule.at(trigger, level, most)


def test_after_a_cycle_that_went_higher_that_of_the_same_optimizer_is_measured():
    schedule, before, was_measured = RoomSchedule(), 100, []
    for optimizer, size in [*6 * [(0, 3), (1, 3)], (0, 3), (1, 9), (0, 3), (1, 9), (0, 3), (1, 9)]:
        modules = passes([(10, 5)], size, 100, MODULES * optimizer)
        steps = [(step_begins(optimizer), 100, 110), (step_is_over(optimizer), 100, 100)]
        for trigger, level, most in [*modules, *steps]:
            if trigger.kind == TriggerKind.STEP_BEGINS:
                was_measured.append((optimizer, schedule.is_measuring))
            schedule.at(trigger, level, before)
            before = most
    assert was_measured[-6:] == [
        (0, False),
        (1, False),  # goes higher
        (0, True),
        (1, True),
        (0, False),
        (1, False),
    ]
    assert schedule.cap == 100 + 9 * 15
