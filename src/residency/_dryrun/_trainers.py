"""The changes of a dry run that go by way of a framework's trainer: its callbacks and arguments."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from residency._dryrun._methods import Function, put_around
from residency._dryrun._numbers import NUMBERS
from residency._dryrun._settings import RunSettings
from residency._memory import ImportWatch


class Trainers:
    """The trainers of one process.

    Attributes:
        found: Of a Trainer of Transformers: the names of its ``class`` and of that of its
            ``arguments``, and the ``numbers`` that these have for a batch and the like.
    """

    def __init__(self, settings: RunSettings) -> None:
        """Prepares; nothing is changed until `start`."""
        self.found: dict[str, Any] = {"numbers": {}}
        self._settings = settings

    def start(self) -> None:
        """Makes the changes, also in modules that are imported later."""
        watched = {
            "transformers.training_args": self._watch_arguments,
            "transformers.trainer": self._watch_trainer,
        }
        if self._settings.offload is not None:
            for lightning in ("lightning.pytorch", "pytorch_lightning"):
                watched[f"{lightning}.trainer.trainer"] = self._watch_lightning
        ImportWatch(watched).start()

    def _watch_arguments(self, module: ModuleType) -> None:
        """Notes the numbers of a Trainer's arguments, and gives them others."""

        @put_around(module.TrainingArguments, "__post_init__")
        def checked(check: Function, arguments: Any) -> None:
            values = {name: getattr(arguments, name, None) for name in NUMBERS}
            numbers = {name: each for name, each in values.items() if isinstance(each, int)}
            self.found |= {"arguments": type(arguments).__name__, "numbers": numbers}
            for name, value in self._settings.trainer_arguments.items():
                setattr(arguments, name, value)
            check(arguments)

    def _watch_trainer(self, module: ModuleType) -> None:
        """Notes a trainer's class, and gives it the callback where that is asked for."""
        signature = inspect.signature(module.Trainer.__init__)
        settings = self._settings

        @put_around(module.Trainer, "__init__")
        def init(make: Function, trainer: Any, *args: Any, **options: Any) -> None:
            self.found["class"] = type(trainer).__name__
            if not settings.calls_back:
                make(trainer, *args, **options)
                return
            from residency.integrations.transformers import ResidencyCallback

            given = signature.bind(trainer, *args, **options)
            callbacks = list(given.arguments.get("callbacks") or ())
            if not any(isinstance(each, ResidencyCallback) for each in callbacks):
                is_offloading = settings.offload is not None
                added = ResidencyCallback(offload=is_offloading, resident=settings.offload or 0)
                given.arguments["callbacks"] = [*callbacks, added]
            make(*given.args, **given.kwargs)

    def _watch_lightning(self, module: ModuleType) -> None:
        """Gives trainers of Lightning the callback: their passes are in a step's closure."""

        @put_around(module.Trainer, "__init__")
        def init(
            make: Function, trainer: Any, *args: object, callbacks: Any = None, **options: object
        ) -> None:
            from residency.integrations.lightning import ResidencyCallback

            given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
            offloading = ResidencyCallback(offload={"resident": self._settings.offload or 0})
            make(trainer, *args, callbacks=[*given, offloading], **options)
