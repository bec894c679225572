"""A loan of host memory ends once, and who waits for it waits for every borrower."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from residency._transfer import Loans, lending as of_process
from residency._transfer._lending import Lending

_SECONDS = 30  # after which a thread counts as stuck


class Waiter:
    """A thread that waits for loans, and says how often it has looked."""

    def __init__(self, wait: Callable[[Callable[[bool], bool]], None]) -> None:
        self._looks = threading.Semaphore(0)
        self._thread = threading.Thread(target=wait, args=(self._saw,), daemon=True)
        self._thread.start()

    def _saw(self, is_done: bool) -> bool:
        self._looks.release()
        return is_done

    def has_looked(self) -> bool:
        return self._looks.acquire(timeout=_SECONDS)

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def ends(self) -> bool:
        self._thread.join(_SECONDS)
        return not self._thread.is_alive()


@pytest.fixture
def lending() -> Lending:
    return Lending()


def test_only_what_was_lent_for_good_is_kept(lending: Lending) -> None:
    brief, lasting, told, alone = (torch.ones(4) for _ in range(4))
    lending.lend(brief, "a")
    lending.lend(lasting, "b", is_lasting=True)
    lending.lend(told, "c")
    lending.make_lasting(told)
    lending.make_lasting(alone)  # nobody borrowed it
    assert [lending.is_lent(t) for t in (brief, lasting, told, alone)] == [True, True, True, False]
    assert [lending.is_lasting(t) for t in (brief, lasting, told, alone)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_loan_is_over_when_its_last_borrower_gives_back_and_leaves_nothing(
    lending: Lending,
) -> None:
    tensor = torch.ones(4)
    lending.lend(tensor, "a", is_lasting=True)
    lending.lend(tensor, "b")
    lending.give_back(tensor, "a")
    lending.give_back(tensor, "a")  # again, which is no end of the other loan
    assert lending.is_lent(tensor)
    assert lending
    lending.give_back(tensor, "b")
    assert not lending.is_lent(tensor)
    assert not lending.is_lasting(tensor)
    assert not lending
    lending.lend(tensor, "c")  # the memory is used again, for a brief loan
    assert not lending.is_lasting(tensor)


def test_the_end_of_memory_ends_all_its_loans_and_no_other(lending: Lending) -> None:
    first, second = torch.ones(4), torch.ones(4)
    for borrower in "ab":
        lending.lend(first, borrower)
        lending.lend(second, borrower)
    lending.end_at(first.data_ptr())
    assert (lending.is_lent(first), lending.is_lent(second)) == (False, True)


def test_what_has_no_bytes_is_not_lent(lending: Lending) -> None:
    lending.lend(torch.empty(0), "a")
    assert not lending


def test_whoever_waits_goes_on_when_every_loan_has_ended_and_not_before(lending: Lending) -> None:
    first, second = torch.ones(4), torch.ones(4)
    lending.lend(first, "a")
    lending.lend(second, "b")
    lent = lending.is_lent
    waiter = Waiter(
        lambda saw: lending.wait_until(lambda: saw(not lent(first) and not lent(second)))
    )
    assert waiter.has_looked()
    lending.give_back(first, "a")
    assert waiter.has_looked()  # it was woken by the end of the first, and found the second lent
    assert waiter.is_waiting
    lending.give_back(second, "b")
    assert waiter.ends()


def test_waiting_for_tensors_ends_when_the_last_of_them_is_given_back(lending: Lending) -> None:
    tensors = [torch.ones(4), torch.ones(4)]
    lending.lend(tensors[1], "a")
    order: list[str] = []

    def wait(saw: Callable[[bool], bool]) -> None:
        def each() -> Iterator[torch.Tensor]:
            saw(False)
            yield from tensors

        lending.wait_for(each())
        order.append("goes on")

    waiter = Waiter(wait)
    assert waiter.has_looked()
    order.append("gives back")
    lending.give_back(tensors[1], "a")
    assert waiter.ends()
    assert order == ["gives back", "goes on"]
    lending.wait_for(tensors)  # nothing is lent: at once


def test_whoever_waits_is_woken_when_a_loan_turns_out_to_last(lending: Lending) -> None:
    tensor = torch.ones(4)
    lending.lend(tensor, "a")
    waiter = Waiter(lambda saw: lending.wait_until(lambda: saw(lending.is_lasting(tensor))))
    assert waiter.has_looked()
    lending.make_lasting(tensor)
    assert waiter.ends()


@pytest.mark.parametrize("is_copied", [True, False])
def test_bytes_that_are_kept_for_good_stay_the_same_when_the_end_of_the_loan_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    state = torch.full((4,), 1.0)
    lent = Loans().lend(state, state, None)
    if is_copied:
        lent.own_bytes = torch.Tensor.clone
    with monkeypatch.context() as patch:
        patch.setattr(type(lent), "give_back", _interrupt)
        if is_copied:
            with pytest.raises(KeyboardInterrupt):
                lent.for_good(state)
        else:
            lent.for_good(state)
    if is_copied:
        state.fill_(2.0)  # the loan may be over, and the next step has written
    assert lent.for_good(state.view(4)).tolist() == [1.0] * 4
    lent.give_back()
    of_process.end_at(state.data_ptr())  # as the end of this memory does
    assert not of_process


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt
