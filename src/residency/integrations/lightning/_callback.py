"""The callback that offloads a Trainer's optimizers and names the parts of its loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from residency._errors import InvalidArgumentError, RefusedError
from residency._memory import begin_phase, end_phase, explain
from residency._optim import OffloadedOptimizer, offload_optimizer, onload_optimizer
from residency._park import parked
from residency.integrations.lightning._trees import in_trees, kind_of, made_again, version_of

_HOOKS = (
    "setup",
    "teardown",
    "on_fit_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_exception",
)


class ResidencyCallback:
    """A callback that offloads optimizers, names the parts of the loop and explains OOM errors.

    ``Trainer(callbacks=[ResidencyCallback()])``; of the class tree that is imported when it is
    made, ``lightning`` or ``pytorch_lightning``, or of both.

    The optimizers are offloaded when they exist and before a checkpoint is loaded into them, so
    that restored state goes straight to the host. They stay offloaded when ``fit`` ends. If an
    optimizer is offloaded already, in ``configure_optimizers`` say, it stays as it is.

    Args:
        offload: Whether to offload; or the settings of ``residency.offload_optimizer``, such as
            ``{"resident": "1GiB"}``.
        phases: Whether to make phases: ``fit``, ``validate``, ``test`` and ``predict``, and inside
            them ``train_step`` (forward, backward and step of a batch) and ``validation``.
        park_in_validation: Whether the optimizers' state waits on the host while a validation
            within ``fit`` runs, as in ``residency.parked``: for ``offload=False``, and for state
            that stays resident.

    Raises:
        InvalidArgumentError: An argument is something else.
        ImportError: Neither tree is installed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an instance of the classes that the imported trees have hooks in."""
        return object.__new__(in_trees(cls, "callback", *_HOOKS))

    def __init__(
        self,
        *,
        offload: bool | Mapping[str, Any] = True,
        phases: bool = True,
        park_in_validation: bool = False,
    ) -> None:
        """Checks the settings; nothing is changed before ``fit``."""
        for name, value in (("phases", phases), ("park_in_validation", park_in_validation)):
            if not isinstance(value, bool):
                raise InvalidArgumentError(f"{name} is {value!r}; expected True or False.")
        self.offload = _checked(offload)
        self.phases = phases
        self.park_in_validation = park_in_validation
        self._away: AbstractContextManager[int] | None = None
        self._open: list[tuple[str, object]] = []  # phases and their owners, the innermost last

    def __reduce__(self) -> Any:
        """Makes another one, with no phase open, where a launcher copies the Trainer."""
        return made_again, (kind_of(self),), {**vars(self), "_open": [], "_away": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begins the phase of the whole call.

        Raises:
            RefusedError: The Trainer has two of these callbacks.
        """
        others = [each for each in trainer.callbacks if isinstance(each, ResidencyCallback)]
        if len(others) > 1:
            raise RefusedError(
                f"the Trainer has {len(others)} ResidencyCallbacks ({version_of(trainer)}), which"
                " would each offload its optimizers. Nothing was changed; pass one."
            )
        self._end_all(None)  # of a call that was left without a word
        self._begin(stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Offloads the optimizers, all or none.

        Raises:
            RefusedError: One cannot be stepped in parts with the same bits, or the host has no
                room. The optimizers are as they were.
        """
        if self.offload is False:
            return
        settings = {} if self.offload is True else dict(self.offload)
        done: list[Any] = []
        try:
            for optimizer in trainer.optimizers:
                if not isinstance(optimizer, OffloadedOptimizer):
                    done.append(offload_optimizer(optimizer, **settings))
        except BaseException as error:
            for optimizer in done:
                onload_optimizer(optimizer)
            if isinstance(error, RefusedError):
                error.add_note(f"asked for by ResidencyCallback under {version_of(trainer)}")
            raise

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Begins ``train_step``."""
        self._begin("train_step")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Ends ``train_step``."""
        self._end("train_step")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins ``validation``, and makes room for it."""
        self._begin("validation")
        if self.park_in_validation and self._away is None and trainer.optimizers:
            away = parked(*trainer.optimizers)
            away.__enter__()
            self._away = away

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """Ends ``validation``; the parked state comes back."""
        self._bring_back(None)
        self._end("validation")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends the phase of the whole call."""
        self._end_all(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explains an out-of-memory error, ends the phases that it leaves, and brings parked
        state back.
        """
        self._end_all(exception)
        explain(exception)
        self._bring_back(exception)

    def _bring_back(self, error: BaseException | None) -> None:
        away, self._away = self._away, None
        if away is None:
            return
        if error is None:
            away.__exit__(None, None, None)
        else:
            away.__exit__(type(error), error, error.__traceback__)

    def _begin(self, name: str) -> None:
        if self.phases:
            owner = object()
            self._open.append((name, owner))
            begin_phase(name, owner)

    def _end(self, name: str) -> None:
        if name in (opened for opened, _ in self._open):
            while self._open[-1][0] != name:
                self._open.pop()
            end_phase(self._open.pop()[1], None)

    def _end_all(self, error: BaseException | None) -> None:
        if self._open:
            owner = self._open[0][1]
            self._open.clear()
            end_phase(owner, error)


def _checked(offload: Any) -> bool | dict[str, Any]:
    if isinstance(offload, bool):
        return offload
    if isinstance(offload, Mapping):
        known = inspect.signature(offload_optimizer).parameters.keys() - {"optimizer"}
        unknown = sorted(map(str, offload.keys() - known))
        if not unknown:
            return dict(offload)
        raise InvalidArgumentError(
            f"offload has {', '.join(unknown)}; expected settings of offload_optimizer:"
            f" {', '.join(sorted(known))}."
        )
    raise InvalidArgumentError(
        f"offload is {offload!r}; expected True, False, or a mapping of the settings of"
        ' offload_optimizer, such as {"resident": "1GiB"}.'
    )
