"""An optimizer config for XTuner v1 whose optimizer is offloaded.

XTuner is on no package index under this name and of this generation, so its config class is made
from whatever is installed, when it is first asked for. Invariant, which
``tests/integrations/test_xtuner.py`` tries to break: parameter groups, defaults and log lines come
from XTuner's own ``AdamWConfig``, which builds the optimizer.

Source: InternLM/xtuner b934f462 (2026-08-21), ``xtuner/v1/config/optim.py`` and
``xtuner/v1/engine/train_engine.py``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

from residency._errors import RefusedError
from residency._optim import OffloadedOptimizer, offload_optimizer
from residency.integrations._common._framework import hook_in, load_framework, missing_in

if TYPE_CHECKING:
    OffloadedAdamWConfig: Any

__all__ = ["OffloadedAdamWConfig"]

_MODULE = "xtuner.v1.config.optim"
_FROM_GIT = "pip install git+https://github.com/InternLM/xtuner.git"


def __getattr__(name: str) -> Any:
    if name == "OffloadedAdamWConfig":
        return _config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _published() -> Any:
    """Returns the ``AdamWConfig`` that is installed.

    Raises:
        ImportError: XTuner v1 is not installed; the message gives the line that installs it.
        RefusedError: It has no ``AdamWConfig``, or that has no ``swap_optimizer``.
    """
    try:
        module = load_framework(_MODULE, extra="xtuner")
    except ImportError as error:
        if error.name is not None:
            raise  # it is there, and something that it needs is not
        raise ImportError(
            f"{_MODULE} is not installed, and no package index has it (xtuner 0.2 is another "
            f"generation); run: {_FROM_GIT}"
        ) from error
    newer = f"install a newer one: {_FROM_GIT}"
    found: Any = hook_in(module, "AdamWConfig", distribution="xtuner", remedy=newer)
    if "swap_optimizer" not in found.model_fields:
        raise missing_in("xtuner", "AdamWConfig.swap_optimizer", newer)
    return found


@functools.cache
def _config_class() -> type[Any]:
    """Makes the class over the ``AdamWConfig`` that is installed."""
    base: Any = _published()

    class OffloadedAdamWConfig(base):  # type: ignore[misc]  # known when it runs
        """XTuner's ``AdamWConfig`` with the state on the host: ``TrainerConfig(optim_cfg=...)``.

        Attributes:
            swap_optimizer: Is True: XTuner's own movers then leave the optimizer alone.
            resident: As in ``residency.offload_optimizer``.
            bucket: As there.
            slots: As there.
            master_weights: As there.
        """

        swap_optimizer: Literal[True] = True
        resident: int | str = 0
        bucket: int | str | None = None
        slots: int = 3
        master_weights: bool = False

        def build(self, model: Any) -> OffloadedOptimizer:
            """Returns torch's AdamW over the trainable parameters, offloaded and primed.

            Primed, so that neither a save nor XTuner's ``load_dcp`` takes a step with zero
            gradients to find out what the state looks like.

            Raises:
                InvalidArgumentError: A size does not parse.
                RefusedError: The host has no room.
            """
            plain = self.model_copy(update={"swap_optimizer": False})
            optimizer = base.build(plain, model)
            if isinstance(optimizer, OffloadedOptimizer):
                raise RefusedError(
                    "XTuner's AdamWConfig built an optimizer that is offloaded already, so "
                    "something else offloads its optimizers. Use one of the two."
                )
            offload_optimizer(
                optimizer,
                resident=self.resident,
                bucket=self.bucket,
                slots=self.slots,
                master_weights=self.master_weights,
            )
            optimizer.prime()
            offloaded: OffloadedOptimizer = optimizer
            return offloaded

    # Where it can be imported from, so that it can be pickled and has a path of its own.
    OffloadedAdamWConfig.__qualname__ = OffloadedAdamWConfig.__name__
    return OffloadedAdamWConfig
