"""What a callback can do for a `Trainer`: adapters that load host-first, an optimizer that is
offloaded once it exists, outputs of an evaluation that leave the device, phases, and a note on an
out-of-memory error that ends the process.

Invariant, which ``tests/integrations/test_transformers.py`` tries to break: what it puts onto the
model and into the process, `ResidencyCallback.remove` takes off.
"""

from __future__ import annotations

import logging
import sys
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from residency._errors import RefusedError
from residency._memory import begin_phase, end_failed, end_phase, explain, open_phases
from residency._optim import (
    OffloadedOptimizer,
    offload_optimizer,
    onload_optimizer,
    parse_bucket,
    parse_resident,
)
from residency._park import parked
from residency.integrations._common._framework import hook_in, load_framework, named_with_version
from residency.integrations.transformers import _evaluation
from residency.integrations.transformers._adapter import HostFirst, put_on

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = hook_in(
        load_framework("transformers", extra="transformers"),
        "TrainerCallback",
        distribution="transformers",
        remedy="pip install 'residency[transformers]'",
    )

# On a trainer's control: who was called last, of what event, and whether it offloaded then.
_MARK = "_residency_callback"
_log = logging.getLogger("residency")


class ResidencyCallback(TrainerCallback):  # type: ignore[misc]  # is not analysed: too large
    """A callback that keeps a ``Trainer`` inside its memory, as far as one can.

    Give it to ``Trainer(callbacks=[ResidencyCallback()])``. Adapters of a PEFT model load
    host-first, at resume and at the end of training; the optimizer is offloaded when training
    begins; predictions, labels and losses of an evaluation go to the host batch by batch; ``train``
    and each ``step`` are phases, and an out-of-memory error that ends the process gets a note.
    `ResidencyTrainerMixin` does the work that a callback cannot reach.

    Args:
        offload: Whether the optimizer's state lives on the host. An optimizer that is offloaded
            already stays so, with its own settings.
        resident: As in ``residency.offload_optimizer``.
        bucket: As there.
        slots: As there.
        pin: As there.
        master_weights: As there.
        overlap: As there.
        outputs_on_host: Whether ``evaluate`` and ``predict`` keep their outputs on the host. Their
            arrays, in ``compute_metrics`` too, equal the stock loop's bit for bit; metrics of each
            batch (``batch_eval_metrics``) get device tensors as ever.
        park_in_evaluation: Whether the optimizer's state waits on the host while an evaluation in
            training runs, as in ``residency.parked``: for ``offload=False``, and for state that
            stays ``resident``. A callback hears with its first batch of an evaluation that no
            strategy of the arguments asked for, and of a second data set's. With
            `ResidencyTrainerMixin` each ``evaluate`` and ``predict`` has the room at once.

    Raises:
        InvalidArgumentError: A size does not parse, or ``resident="auto"`` is without ``overlap``.

    Memory:
        Device: the outputs of one batch (the stock loop has the outputs of all); labels and inputs,
        which the loop has as well, twice. Host: 32 MiB, page-locked, while outputs are gathered;
        all outputs once, and the outputs of one batch.
    """

    def __init__(
        self,
        *,
        offload: bool = True,
        resident: int | str = 0,
        bucket: int | str | None = None,
        slots: int = 3,
        pin: bool = True,
        master_weights: bool = False,
        overlap: bool = False,
        outputs_on_host: bool = True,
        park_in_evaluation: bool = False,
    ) -> None:
        super().__init__()
        self._is_offloading = offload
        self._parks = park_in_evaluation
        self._away: AbstractContextManager[object] | None = None
        self._are_outputs_on_host = outputs_on_host
        parse_resident(resident, overlap=overlap)  # now, and not when training begins
        self._settings: dict[str, Any] = {
            "resident": resident,
            "bucket": parse_bucket(bucket),
            "slots": slots,
            "pin": pin,
            "master_weights": master_weights,
            "overlap": overlap,
        }
        self._put: list[HostFirst] = []
        self._entered: dict[str, _Entered] = {}

    # The events. Trainer calls them by name, with more arguments than each needs.

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Makes the model load adapters host-first, and evaluations keep their outputs on the host.

        Raises:
            RefusedError: The trainer has a ``ResidencyCallback`` already, or a framework's version
                lacks a method that this needs. Nothing was changed.
        """
        if vars(control).get(_MARK) is not None:
            raise self._added_twice()
        self._put_on(others.get("model"))
        vars(control)[_MARK] = (self, "on_init_end", False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Offloads the optimizer, which is there now.

        Raises:
            RefusedError: It cannot be stepped in parts with the same bits, or the trainer has two
                such callbacks. The optimizer is as it was.
        """
        optimizer = others.get("optimizer")
        before, event, has_offloaded = vars(control).get(_MARK, (self, None, False))
        if before is not self and event == "on_train_begin":
            del vars(control)[_MARK]  # once one of them is gone, the other may train
            before._undo_begin(optimizer if has_offloaded else None)
            raise self._added_twice()
        self._put_on(others.get("model"))  # a `model_init` has made another one
        self._bring_back()  # of a run that an error ended
        was_offloaded = _is_offloaded(optimizer)
        self.offload(optimizer)
        has_offloaded = _is_offloaded(optimizer) and not was_offloaded
        vars(control)[_MARK] = (self, "on_train_begin", has_offloaded)
        _UncaughtErrors.put_on(self)
        _leave_what_failed()
        if not any(visit.name == "train" for visit in open_phases()):
            self._enter("train")

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begins the phase ``step``: forward, backward, of all batches that are accumulated."""
        vars(control).pop(_MARK, None)  # one that is added from now on may take this one's place
        self._leave("step")
        self._enter("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Ends the phase ``step``; an evaluation may come next."""
        self._leave("step")
        if control.should_evaluate:
            self._park(others.get("optimizer"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Makes room for an evaluation that comes next."""
        if control.should_evaluate:
            self._park(others.get("optimizer"))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Sends the outputs of the evaluation that is under way to the host, from this batch on."""
        if self._are_outputs_on_host:
            _evaluation.claim()
        if "train" in self._entered:
            self._park(others.get("optimizer"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Brings back the state that was parked for the evaluation."""
        self._bring_back()

    def on_predict(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Brings back the state that was parked for the predictions."""
        self._bring_back()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Ends the phase ``train``.

        The adapters of the model go on loading host-first: a second ``train`` resumes before it
        calls a callback.
        """
        self._bring_back()
        self._leave("step")
        self._leave("train")
        _UncaughtErrors.take_off(self)

    # What users, and the mixin, call.

    def offload(self, optimizer: Any) -> None:
        """Offloads an optimizer with this callback's settings, if that is asked for.

        Args:
            optimizer: The result of accelerate's ``prepare``, or the optimizer itself; None for
                none.

        Raises:
            RefusedError: It cannot be stepped in parts with the same bits. It is as it was.
        """
        if not self._is_offloading or optimizer is None:
            return
        if _is_offloaded(optimizer):
            _log.info("the optimizer is offloaded already; it keeps the settings that it has")
            return
        try:
            offload_optimizer(optimizer, **self._settings)
        except RefusedError as error:
            raise RefusedError(
                f"{error} It was made for a Trainer of {named_with_version('transformers')}: pass"
                " ResidencyCallback(offload=False) to train with it as it is."
            ) from error

    def parked(self, optimizer: Any) -> AbstractContextManager[object]:
        """Keeps an optimizer's state on the host during a block, if this callback is to do so.

        Args:
            optimizer: The result of accelerate's ``prepare``, or the optimizer itself; None for
                none.

        Returns:
            The context manager of ``residency.parked``, or one that does nothing.
        """
        if not self._parks or optimizer is None:
            return nullcontext()
        return parked(optimizer_inside(optimizer))

    def remove(self) -> None:
        """Takes off models and process everything that this callback put on; an offload is undone
        with ``residency.onload_optimizer``.
        """
        while self._put:
            self._put.pop().take_off()
        _evaluation.take_off(self)
        self._bring_back()
        self._leave("train")
        _UncaughtErrors.take_off(self)

    def _put_on(self, model: Any) -> None:
        put = put_on(model)
        if put is not None:
            self._put.append(put)
        if self._are_outputs_on_host:
            _evaluation.put_on(self)

    def _park(self, optimizer: Any) -> None:
        if self._away is None and self._parks and optimizer is not None:
            away = self.parked(optimizer)
            away.__enter__()
            self._away = away

    def _bring_back(self) -> None:
        away, self._away = self._away, None
        if away is not None:
            away.__exit__(None, None, None)

    def _undo_begin(self, optimizer: Any) -> None:
        """Undoes `on_train_begin`, for a run that another callback refuses."""
        self._leave("train")
        _UncaughtErrors.take_off(self)
        if optimizer is not None:
            with suppress(RefusedError):  # from master weights there is no way back
                onload_optimizer(optimizer_inside(optimizer))

    def _enter(self, name: str) -> None:
        self._entered[name] = entered = _Entered()
        begin_phase(name, entered)

    def _leave(self, name: str) -> None:
        entered = self._entered.pop(name, None)
        if any(visit._owner is entered for visit in open_phases()):
            end_phase(entered, None)

    def _added_twice(self) -> RefusedError:
        return RefusedError(
            f"this Trainer of {named_with_version('transformers')} has two callbacks of the kind"
            f" {type(self).__name__}, which would fight over one optimizer. Nothing was trained;"
            " pass one."
        )


class _Entered:
    """The owner of one visit of a phase that a callback has begun."""


def _leave_what_failed() -> None:
    """Ends what a run that an error ended has left open: its callback was not called."""
    for visit in open_phases():
        if isinstance(visit._owner, _Entered):
            end_failed(visit)
            return


def optimizer_inside(optimizer: Any) -> Any:
    """Returns the optimizer inside of accelerate's wrapper, or what it is given."""
    accelerate: Any = sys.modules.get("accelerate.optimizer")
    if accelerate is not None and isinstance(optimizer, accelerate.AcceleratedOptimizer):
        return optimizer.optimizer
    return optimizer


def _is_offloaded(optimizer: Any) -> bool:
    return isinstance(optimizer_inside(optimizer), OffloadedOptimizer)


class _UncaughtErrors:
    """A hook that explains an out-of-memory error at the end of the process: callbacks see none.

    One stands as ``sys.excepthook`` for all callbacks. A run that an error ended leaves it there,
    because the error may be on its way to it; it goes with the last callback that needs it.
    """

    def __init__(self, before: Any) -> None:
        self._before = before
        self._users: weakref.WeakSet[ResidencyCallback] = weakref.WeakSet()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        visits = open_phases()
        explain(error, phase=visits[-1].path if visits else None)
        self._before(kind, error, trace)

    @staticmethod
    def put_on(user: ResidencyCallback) -> None:
        hook: Any = sys.excepthook
        if not isinstance(hook, _UncaughtErrors):
            sys.excepthook = hook = _UncaughtErrors(hook)
        hook._users.add(user)

    @staticmethod
    def take_off(user: ResidencyCallback) -> None:
        hook: Any = sys.excepthook
        if isinstance(hook, _UncaughtErrors):
            hook._users.discard(user)
            if not hook._users:
                sys.excepthook = hook._before
